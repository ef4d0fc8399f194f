"""Checks of single arguments: arrays by dtype and shape, and numbers that may be 0-d arrays."""

from __future__ import annotations

import math
import numbers
import typing
from collections.abc import Iterator, Mapping
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jattn import checks, formats, integers
from jattn.formats import rounding

Shape = tuple[int | None, ...]  # None stands for any length


class Shaped(typing.Protocol):
    """Anything with a shape and a dtype: arrays, tracers and ShapeDtypeStructs."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


def is_array(x: object) -> TypeGuard[Shaped]:
    """Whether `x` has a shape and a dtype that NumPy knows, unlike another library's tensor."""
    return checks.numpy_dtype(x) is not None


def check_given(where: str, arguments: Mapping[str, object]) -> None:
    """Refuse arrays that the checks of shapes and dtypes cannot handle.

    Args:
      where: the function that was called, for the message.
      arguments: by name; anything that is not an array passes, such as None or a number.

    Raises:
      ValueError: a shape is symbolic (`jax.export.symbolic_shape`), or a NumPy array has another
        byte order than the machine.
    """
    with checks.checking(where) as problems:
        for name, x in _parts(arguments):
            shape = getattr(x, "shape", ())
            if isinstance(shape, tuple) and not all(isinstance(n, int | np.integer) for n in shape):
                must = "of a concrete shape: each shape compiles a program"
                problems.require(False, name, f"of the symbolic shape {list(shape)}", must)
            elif isinstance(x, np.ndarray) and not x.dtype.isnative:
                problems.require(False, name, f"of byte order {x.dtype.str!r}", "native")


def check_numbers(where: str, arguments: Mapping[str, object]) -> None:
    """Refuse arguments that are only shapes where numbers are needed.

    Args:
      where, arguments: as in `check_given`.

    Raises:
      ValueError: an argument is a `jax.ShapeDtypeStruct`.
    """
    with checks.checking(where) as problems:
        for name, x in _parts(arguments):
            if isinstance(x, jax.ShapeDtypeStruct):
                must = "an array: there are no numbers to compute with"
                problems.require(False, name, repr(x), must)


def _parts(arguments: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the arguments by name; of a cache, its arrays."""
    for name, x in arguments.items():
        if isinstance(x, formats.KVArray | formats.KVRows):
            for field in ("data", "scale", "zero", "group_scale"):
                part = getattr(x, field, None)
                if part is not None:
                    yield f"{name}.{field}", part
        elif x is not None:
            yield name, x


def check_last_axis_is_whole(problems: checks.Problems, name: str, words: object) -> None:
    """Check that no mesh axis splits the last axis of a pool, if its sharding can be seen."""
    sharding = getattr(words, "sharding", None)
    last = len(shape_of(words)) - 1
    if not isinstance(sharding, jax.sharding.NamedSharding) or not 0 <= last < len(sharding.spec):
        return
    names = sharding.spec[last]
    names = () if names is None else (names,) if isinstance(names, str) else names
    axes = tuple(str(name) for name in names if sharding.mesh.shape[name] > 1)
    problems.require(
        not axes,
        name,
        f"split over its last axis along {axes}",
        "unsplit there: XLA would gather the pool in every call (jattn.sharding splits KV heads)",
    )


def is_bool(x: object) -> TypeGuard[bool | np.bool_]:
    """Whether `x` is a static bool, Python's or NumPy's."""
    return isinstance(x, bool | np.bool_)


def shape_of(x: object) -> tuple[int, ...]:
    """The shape of an array, a ShapeDtypeStruct, a KVArray or a nested list; () if ragged."""
    if hasattr(x, "shape"):
        return tuple(x.shape)
    try:
        return np.asarray(x).shape
    except ValueError:
        return ()


def dtype_of(x: object) -> np.dtype:
    """The dtype JAX would give `x`: int32 for NumPy's int64 unless 64-bit types are enabled.

    The dtype of objects if NumPy does not know it.
    """
    dtype = checks.numpy_dtype(x) if hasattr(x, "dtype") else np.asarray(x).dtype
    return np.dtype(object) if dtype is None else np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def fits(shape: tuple[int, ...], wanted: Shape) -> bool:
    """Whether `shape` is `wanted`, a None in it standing for any length."""
    return len(shape) == len(wanted) and all(
        want in (None, have) for want, have in zip(wanted, shape, strict=True)
    )


def matches(x: object, kind: DTypeLike, *shapes: Shape) -> TypeGuard[Shaped]:
    """Whether `x` is an array of dtype `kind`, or of that kind of dtype, and of one of `shapes`."""
    if not is_array(x) or not any(fits(x.shape, shape) for shape in shapes):
        return False
    return bool(jnp.issubdtype(dtype_of(x), kind))


def axis_is(axis: str, size: int | None) -> str:
    """`, H = 8` for a message, or nothing for an unknown size."""
    return "" if size is None else f", {axis} = {size}"


def check_int32(
    problems: checks.Problems, name: str, x: object, shape: Shape, axes: tuple[str, ...]
) -> bool:
    """Check for int32 of `shape`, with these axis names; a None in it stands for any length."""
    if not check_int32_values(problems, name, x):
        return False
    sizes = zip(shape, axes, strict=True)
    text = ", ".join(axis if want is None else str(want) for want, axis in sizes)
    return problems.expect(matches(x, np.int32, shape), name, x, f"int32[{text}]")


def check_int32_values(problems: checks.Problems, name: str, x: object) -> bool:
    """Check that int32 holds the numbers of `x`, if it is a NumPy array of integers."""
    if not isinstance(x, np.ndarray) or x.dtype.kind != "i":
        return True
    if not integers.require_int32_values(problems, name, x):
        return False
    return problems.require(x.dtype.isnative, name, f"of byte order {x.dtype.str!r}", "native")


def check_float(problems: checks.Problems, name: str, x: object, above: float = -math.inf) -> None:
    """Check for None, a finite number above a bound in float32, or a 0-d float array."""
    ok = x is None or isinstance(x, numbers.Real) or matches(x, jnp.floating, ())
    ok = ok and not is_bool(x)
    if ok and (known := rounding.as_float32(x)) is not None:
        ok = bool(np.isfinite(known) & (known > above))
    bound = "" if above == -math.inf else f" above {above:g}"
    problems.expect(ok, name, x, f"a finite number{bound} in float32, or a 0-d float array")


def check_count(problems: checks.Problems, name: str, x: object, meaning: str = "") -> None:
    """Check for None, an integer from 1 to 2^31 - 1, or a 0-d int32."""
    known = integers.of_array(x)
    ok = integers.is_int(known, 1) and integers.fits_int32(1, int(known))
    if not isinstance(x, np.ndarray | np.generic):
        ok = ok or x is None or matches(x, np.int32, ())
    problems.expect(ok, name, x, f"an integer of at least 1{meaning} or a 0-d int32")
