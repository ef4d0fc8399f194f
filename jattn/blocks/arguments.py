"""Converting arguments to checked int32 arrays, and ids to indices that never wrap around."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from jattn.checks import Problems
from jattn.integers import fits_int32

# One integer, or an array of them, or a list (of lists) that becomes one.
Integers = (
    SupportsIndex
    | Sequence[SupportsIndex]
    | Sequence[Sequence[SupportsIndex]]
    | np.ndarray
    | jax.Array
)


def as_int32(
    problems: Problems, argument: str, value: Integers, ranks: tuple[int, ...]
) -> jax.Array:
    """Return `value` as an int32 array of one of the given ranks, or note a problem.

    Concrete values that int32 cannot hold are also a problem: truncated, they would be other ids.
    """
    array: jax.Array | np.ndarray
    try:
        array = value if isinstance(value, jax.Array) else np.asarray(value)
    except ValueError:  # lists of several lengths
        array = np.empty((), object)
    if array.size == 0 and not hasattr(value, "dtype"):
        array = array.astype(np.int32)  # an empty list has no dtype to check
    ok = jnp.issubdtype(array.dtype, jnp.integer) and array.ndim in ranks
    must = " or ".join(f"{rank}-dimensional" for rank in ranks)
    if len(ranks) > 3:
        must = f"of {ranks[0]} to {ranks[-1]} dimensions"
    ok = problems.expect(ok, argument, value, f"an integer array, {must}")
    if ok and not np.can_cast(array.dtype, np.int32) and not isinstance(array, jax.core.Tracer):
        array = np.asarray(array)
        least, most = (int(x) for x in (array.min(initial=0), array.max(initial=0)))
        ok = problems.require(
            fits_int32(least, most),
            argument,
            f"{array.dtype.name} values from {least} to {most}",
            "within int32",
        )
    if not ok:
        return jnp.zeros((0,) * ranks[0], jnp.int32)
    native = array if isinstance(array, jax.Array) else array.astype(np.int32)
    return jnp.asarray(native, jnp.int32)


def noted(problems: Problems, argument: str) -> bool:
    """Whether a problem with `argument` was already noted."""
    return any(problem.startswith(f"{argument}: ") for problem in problems.found)


def require_shape(
    problems: Problems, argument: str, array: jax.Array, shape: tuple[int, ...], why: str
) -> None:
    """Note a problem unless `array` has `shape` or already has a problem."""
    problems.require(
        array.shape == shape or noted(problems, argument),
        argument,
        f"{list(array.shape)}",
        f"{list(shape)}, {why}",
    )


def inside_or_end(ids: jax.Array, end: int) -> jax.Array:
    """Map ids outside 0..end-1 to `end`, so that `mode="drop"` or "fill" skips them.

    A negative index would otherwise count from the end.
    """
    return jnp.where((ids >= 0) & (ids < end), ids, end)
