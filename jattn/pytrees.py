"""Register dataclasses as pytrees of arrays, and compare them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeVar

import jax
import numpy as np

from jattn import checks, serialization

T = TypeVar("T")


def register(*statics: type) -> Callable[[type[T]], type[T]]:
    """Register a dataclass as a pytree; fields with `metadata={"static": True}` are static.

    Two are equal if they have the same static fields and the same bits; `==` waits for the device.
    Unflattening skips their checks, because JAX unflattens with placeholders and extra axes.

    Args:
      statics: the dataclasses that its static fields may hold, for `jax.export`.
    """

    def decorate(cls: type[T]) -> type[T]:
        def equal_to(self: T, other: object) -> bool:
            """Return whether static fields and bits are the same. Waits for the device."""
            return equal(self, other) if isinstance(other, cls) else NotImplemented

        cls.__eq__ = equal_to  # type: ignore[assignment]
        cls.__hash__ = None  # type: ignore[assignment]
        if hasattr(cls, "__post_init__"):
            _register_without_checks(cls)
        else:
            jax.tree_util.register_dataclass(cls)
        serialization.register(cls, *statics)
        return cls

    return decorate


def _register_without_checks(cls: type[T]) -> None:
    """Register like `jax.tree_util.register_dataclass`, but unflatten without `__post_init__`."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    arrays = [f.name for f in fields if not f.metadata.get("static")]
    static = [f.name for f in fields if f.metadata.get("static")]

    def flatten(
        self: T,
    ) -> tuple[list[tuple[jax.tree_util.GetAttrKey, object]], tuple[object, ...]]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in arrays]
        return children, tuple(getattr(self, name) for name in static)

    def unflatten(values: Iterable[object], children: Iterable[object]) -> T:
        self = object.__new__(cls)
        for name, value in (
            *zip(arrays, children, strict=True),
            *zip(static, values, strict=True),
        ):
            object.__setattr__(self, name, value)
        return self

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)


def equal(ours: object, theirs: object) -> bool:
    """Return whether two pytrees have the same structure, static parts included, and leaves.

    Arrays are the same if their dtype, shape and every bit are, NaN included, and shapes without
    numbers (`jax.ShapeDtypeStruct`) if their dtype and shape are. Waits for the device.
    """
    leaves, here = jax.tree.flatten(ours)
    others, there = jax.tree.flatten(theirs)
    trees: list[object] = [here, there]  # JAX has no types for comparing tree definitions
    return bool(trees[0] == trees[1]) and all(map(_same, leaves, others))


def _same(ours: object, theirs: object) -> bool:
    if checks.numpy_dtype(ours) is None or checks.numpy_dtype(theirs) is None:
        return bool(ours == theirs)  # a PartitionSpec, a placeholder
    structs = [isinstance(x, jax.ShapeDtypeStruct) for x in (ours, theirs)]
    if any(structs):  # described by dtype and shape
        return all(structs) and checks.describe(ours) == checks.describe(theirs)
    a, b = np.asarray(ours), np.asarray(theirs)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
