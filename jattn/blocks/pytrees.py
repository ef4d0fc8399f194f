"""Dataclasses that check themselves when built, registered as pytrees that do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeVar

import jax

from jattn import pytrees, serialization

T = TypeVar("T")


def register(*statics: type) -> Callable[[type[T]], type[T]]:
    """Register a dataclass as a pytree; fields with `metadata={"static": True}` are static.

    Transformations unflatten with stand-ins and with extra axes, so unflattening checks nothing.
    Two are equal that have the same static fields and the same bits; `==` waits for the device.

    Args:
      statics: the dataclasses that its static fields may hold, for `jax.export`.
    """

    def decorate(cls: type[T]) -> type[T]:
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

        def equal(self: T, other: object) -> bool:
            return pytrees.equal(self, other) if isinstance(other, cls) else NotImplemented

        cls.__eq__ = equal  # type: ignore[assignment]
        cls.__hash__ = None  # type: ignore[assignment]
        jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
        serialization.register(cls, *statics)
        return cls

    return decorate
