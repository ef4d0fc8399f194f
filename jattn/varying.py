"""Under `jax.shard_map` a loop's carry must vary over the mesh as what the loop adds to it does.

A new array of zeros varies over no axis; an argument over those it is split along. Elsewhere there
is nothing to do.
"""

from __future__ import annotations

import typing
from typing import Any

import jax
from jax import lax

Tree = typing.TypeVar("Tree")


def as_varying(tree: Tree, like: object) -> Tree:
    """`tree` with every array varying over all axes that some array of `like` varies over."""
    axes = axes_of(like)

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def axes_of(tree: object) -> frozenset[Any]:
    """The axes over which some array of `tree` varies."""
    return frozenset[Any]().union(*map(_axes, jax.tree.leaves(tree)))


def as_cotangent(grad: jax.Array | None, primal: object) -> jax.Array | None:
    """`grad` varying over the axes of `primal`: summed over those it was computed apart on."""
    if grad is None or primal is None:
        return grad
    extra = tuple(sorted(_axes(grad) - _axes(primal)))
    return as_varying(lax.psum(grad, extra) if extra else grad, primal)


def _axes(x: object) -> frozenset[Any]:
    aval: Any = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):
        return frozenset(aval.manual_axis_type.varying)
    return frozenset(aval.vma)  # JAX 0.9
