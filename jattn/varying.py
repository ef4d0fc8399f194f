"""Mesh axes recorded in array types: those an array varies over, and explicit ones that split it.

Under `jax.shard_map` a loop's carry must vary over the mesh as what the loop adds to it does: a new
array of zeros varies over no axis; an argument over those it is split along. On a mesh with
explicit axes, as `jax.make_mesh` makes them, every operation has to say how its result is split:
the XLA path leaves that to XLA, and says it of the results. Elsewhere there is nothing to do.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

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


def explicit_mesh(tree: object) -> AbstractMesh | None:
    """The mesh of the arrays' types, where its axes are explicit and some array is split."""
    for x in jax.tree.leaves(tree):
        sharding: Any = jax.typeof(x).sharding
        if AxisType.Explicit in sharding.mesh.axis_types and any(sharding.spec):
            return sharding.mesh
    return None


def axes_along(x: jax.Array, ndim: int) -> PartitionSpec:
    """The explicit axes along which `x` is split, for an array that shares its first axes."""
    sharding: Any = jax.typeof(x).sharding
    spec = (*sharding.spec, *(None,) * ndim)
    return PartitionSpec(*spec[: min(ndim, x.ndim)])


def on_automatic_axes(f: Callable[..., Tree], tree: object, specs: object) -> Tree:
    """`f(tree)`, where XLA splits what `f` computes and only the results' `specs` are given.

    Args:
      f: any function of arrays.
      tree: its argument.
      specs: a PartitionSpec for each array of the result.
    """
    mesh = explicit_mesh(tree)
    if mesh is None:
        return f(tree)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    automatic: Any = jax.sharding.auto_axes
    return automatic(f, out_sharding=shardings)(tree)
