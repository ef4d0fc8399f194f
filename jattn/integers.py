"""Integer arithmetic that planners and kernels share, and checks of integers."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeGuard, TypeVar

import jax
import numpy as np

from jattn.checks import Problems, checking

INT32_MAX = 2**31 - 1

# As many tokens or tiles as no sequence has; sums with positions stay in int32.
NO_LIMIT = 2**30

IntOrArray = TypeVar("IntOrArray", int, np.ndarray, jax.Array)
P = ParamSpec("P")
R = TypeVar("R")


def ceil_div(a: IntOrArray, b: int) -> IntOrArray:
    """The least integer not below `a / b`; of an array of signed integers, for each of them."""
    return -(-a // b)


def round_up(value: IntOrArray, multiple: int) -> IntOrArray:
    """The least multiple of `multiple` not below `value`."""
    return multiple * ceil_div(value, multiple)


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def python_int(x: Any) -> Any:
    """NumPy's integers as Python's, which never overflow; all else as it is."""
    return int(x) if isinstance(x, np.integer) else x


def with_python_ints(f: Callable[P, R]) -> Callable[P, R]:
    """`f` for callers whose sizes may be NumPy's integers: it gets Python's."""

    @functools.wraps(f)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        named: Any = {name: python_int(x) for name, x in kwargs.items()}
        return f(*map(python_int, args), **named)

    return wrapped


def keep_python_ints(record: object) -> None:
    """Make NumPy's integers in the fields of a frozen dataclass, a `record`, Python's."""
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        x = getattr(record, field.name)
        if isinstance(x, np.integer):
            object.__setattr__(record, field.name, int(x))


@with_python_ints
def aligned_row_width(num_blocks: int, block_size: int, *, tokens: int = 128) -> int:
    """Table entries to reserve for `num_blocks` blocks, so that a row is whole `tokens`.

    Kernels that load a row in strides of 128 tokens need it: `num_blocks` rounded up to a multiple
    of `tokens / gcd(tokens, block_size)`. (vLLM 0.23 takes `tokens // block_size`, which is right
    for powers of two only.)

    Raises: `ValueError` for sizes below 1.
    """
    with checking("aligned_row_width") as problems:
        require_ints(problems, 1, num_blocks=num_blocks, block_size=block_size, tokens=tokens)
    return round_up(num_blocks, tokens // math.gcd(tokens, block_size))


def least_padding_multiple(values: Sequence[int], at_least: int) -> int:
    """The d that pads `values` least when each is rounded up to a multiple of d.

    `sum(-value % d)` is least, over `at_least <= d <= max(values)`; of equals the largest d.
    `at_least` itself if it exceeds all values. (vLLM's `_approximate_gcd`.)
    """
    candidates = range(at_least, max(values) + 1) or (at_least,)
    return min(candidates, key=lambda d: (sum(-value % d for value in values), -d))


def is_int(value: object, at_least: int) -> TypeGuard[int]:
    """Whether `value` is a true integer (a bool is not) of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return False
    return int(value) >= at_least


def require_int(problems: Problems, argument: str, value: object, at_least: int) -> bool:
    """Note a problem unless `value` is an integer of at least `at_least`."""
    return problems.require(
        is_int(value, at_least), argument, f"{value!r}", f"an integer of at least {at_least}"
    )


def require_ints(problems: Problems, at_least: int, **values: object) -> bool:
    """`require_int` of several arguments, by name; whether all of them are good."""
    good = [require_int(problems, name, value, at_least) for name, value in values.items()]
    return all(good)


def fits_int32(low: int, high: int) -> bool:
    """Whether int32 holds all integers from `low` to `high`."""
    return low >= -INT32_MAX - 1 and high <= INT32_MAX


def require_int32_values(problems: Problems, argument: str, values: np.ndarray) -> bool:
    """Note a problem unless int32 holds all of `values`, integers of any dtype."""
    if values.size == 0 or np.can_cast(values.dtype, np.int32):
        return True
    low, high = int(values.min()), int(values.max())
    inside = fits_int32(low, high)
    return problems.require(inside, argument, f"values {low} to {high}", "within int32")


@with_python_ints
def require_int32_slots(
    problems: Problems, argument: str, num_blocks: int, block_size: int, num_layers: int = 1
) -> bool:
    """Note a problem unless the slots `num_layers * num_blocks * block_size` fit int32."""
    slots = num_layers * num_blocks * block_size
    layers = "" if num_layers == 1 else f" in {num_layers} layers"
    return problems.require(
        fits_int32(0, slots),
        argument,
        f"{num_blocks} blocks of {block_size} tokens{layers} are {slots} slots",
        f"at most {INT32_MAX // (block_size * num_layers)} blocks, since slots are int32",
    )


@with_python_ints
def check_slot_range(num_blocks: int, block_size: int, *, num_layers: int = 1) -> None:
    """Refuse a cache whose slots, `num_layers * num_blocks * block_size`, do not fit int32.

    Raises: `ValueError` naming the sizes and the most blocks that fit.
    """
    with checking("check_slot_range") as problems:
        if require_ints(
            problems, 1, num_blocks=num_blocks, block_size=block_size, num_layers=num_layers
        ):
            require_int32_slots(problems, "num_blocks", num_blocks, block_size, num_layers)
