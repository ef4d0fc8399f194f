"""Integer arithmetic and checks of integers, for planners and kernels."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable
from typing import Any, ParamSpec, TypeGuard, TypeVar

import jax
import numpy as np

from jattn.checks import Problems

INT32_MAX = 2**31 - 1

# More tokens or tiles than any sequence has; sums with positions still fit int32.
NO_LIMIT = 2**30

IntOrArray = TypeVar("IntOrArray", int, np.ndarray, jax.Array)
P = ParamSpec("P")
R = TypeVar("R")


def ceil_div(a: IntOrArray, b: int) -> IntOrArray:
    """Return `a / b` rounded up; `a` may be an array of signed integers."""
    return -(-a // b)


def round_up(value: IntOrArray, multiple: int) -> IntOrArray:
    """Return the least multiple of `multiple` that is at least `value`."""
    return multiple * ceil_div(value, multiple)


def power_of_two(n: int) -> int:
    """Return the least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def python_int(x: Any) -> Any:
    """Convert a NumPy integer to a Python one, which never overflows; keep anything else."""
    return int(x) if isinstance(x, np.integer) else x


def of_array(x: Any) -> Any:
    """Convert a 0-d NumPy array of integers to a Python integer; keep anything else."""
    known = isinstance(x, np.ndarray) and x.shape == () and x.dtype.kind in "iu"
    return int(x) if known else x


def with_python_ints(f: Callable[P, R]) -> Callable[P, R]:
    """Wrap `f` so that NumPy integers among its arguments become Python ones."""

    @functools.wraps(f)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        named: Any = {name: python_int(x) for name, x in kwargs.items()}
        return f(*map(python_int, args), **named)

    return wrapped


def keep_python_ints(record: object) -> None:
    """Convert NumPy integers in the fields of a frozen dataclass to Python ones."""
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        x = getattr(record, field.name)
        if isinstance(x, np.integer):
            object.__setattr__(record, field.name, int(x))


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
    """Apply `require_int` to several arguments by name; return whether all are good."""
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


def max_blocks(block_size: int, num_layers: int = 1) -> int:
    """Return the most blocks for which int32 can number the slots of all layers of a pool."""
    return INT32_MAX // (block_size * num_layers)


@with_python_ints
def require_int32_slots(
    problems: Problems, argument: str, num_blocks: int, block_size: int, num_layers: int = 1
) -> bool:
    """Note a problem unless the slots `num_layers * num_blocks * block_size` fit int32."""
    most = max_blocks(block_size, num_layers)
    slots = num_layers * num_blocks * block_size
    layers = "" if num_layers == 1 else f" in {num_layers} layers"
    return problems.require(
        num_blocks <= most,
        argument,
        f"{num_blocks} blocks of {block_size} tokens{layers} are {slots} slots",
        f"at most {most} blocks, since slots are int32",
    )
