"""Mesh axes recorded in array types: those an array varies over, and explicit ones that split it.

Under `jax.shard_map` a loop's carry must vary over the same mesh axes as what the loop adds to it.
A new array of zeros varies over no axis, an argument over those it is split along. On a mesh with
explicit axes, as `jax.make_mesh` makes them, every operation must say how its result is split: the
XLA path leaves that to XLA and only says how the final results are split. Elsewhere these functions
change nothing.
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
    """Make every array of `tree` vary over all axes that any array of `like` varies over."""
    axes = axes_of(like)

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def axes_of(tree: object) -> frozenset[Any]:
    """Return the axes over which any array of `tree` varies."""
    return frozenset[Any]().union(*map(_axes, jax.tree.leaves(tree)))


def as_cotangent(grad: jax.Array | None, primal: object) -> jax.Array | None:
    """Make `grad` vary over the axes of `primal` only: sum it over the others."""
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
    """Return the mesh of the arrays' types if it has explicit axes that may split an array.

    Types inside `jax.vmap` do not say how the batch axis is split. Of a mesh with manual axes too,
    `auto_axes` takes none of those, so there an array must be split.
    """
    for x in jax.tree.leaves(tree):
        sharding: Any = jax.typeof(x).sharding
        mesh = sharding.mesh
        if AxisType.Explicit in mesh.axis_types and (any(sharding.spec) or not mesh.manual_axes):
            return mesh
    return None


def axes_along(x: jax.Array, ndim: int) -> PartitionSpec:
    """Return the spec of `x` for an array of `ndim` axes that shares the first axes of `x`."""
    sharding: Any = jax.typeof(x).sharding
    spec = (*sharding.spec, *(None,) * ndim)
    return PartitionSpec(*spec[: min(ndim, x.ndim)])


def on_automatic_axes(f: Callable[..., Tree], tree: object, specs: object) -> Tree:
    """Call `f(tree)`, letting XLA split what it computes; only the results have given `specs`.

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


def gathered(tree: Tree, num_axes: int | None = None) -> Tree:
    """Gather the first `num_axes` axes of every array, or all, where explicit axes split them."""

    def gather(x: jax.Array) -> jax.Array:
        sharding: Any = jax.typeof(x).sharding
        count = x.ndim if num_axes is None else num_axes
        if explicit_mesh(x) is None or not any(sharding.spec[:count]):
            return x
        spec = PartitionSpec(*(None,) * count, *sharding.spec[count:])
        return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))

    return jax.tree.map(gather, tree)
