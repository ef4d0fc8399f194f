"""Native calls on arrays that are split over devices: every device runs its own heads.

XLA cannot see into a custom call and would gather whatever is split. So with several devices this
file tells it how to divide a call (with one, and inside `jax.shard_map`, it adds nothing):

    pools split over their KV heads     a device runs the query heads that read its KV heads
    one KV head, whole on every device  a device runs the query heads that it has (MQA, MLA)
    anything else                       gathered, with a warning for pools

XLA decides about a mesh's automatic axes: `custom_partitioning` tells its partitioner what to do,
and how shardings propagate. Explicit axes are part of an array's type: for these the call is
wrapped in `jax.shard_map` directly.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import custom_partitioning as partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jattn.varying import explicit_mesh

Run = Callable[..., Sequence[jax.Array]]
# What every axis of an array counts: "heads", "kv_heads", or None for anything else.
Axes = tuple[str | None, ...]
# Has a sharding: its type's, or the one that XLA's partitioner found.
Operand = TypeVar("Operand", jax.Array, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True)
class Division:
    """Which axes of a call's arrays are heads.

    Attributes:
      operands, results: the axes of each.
      pools: names of the operands that are pools, None for others.
      kv_heads: K, or 0 if no axis of the pools separates the heads.
      group: G, query heads per KV head.
    """

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    pools: tuple[str | None, ...]
    kv_heads: int
    group: int = 1


def run(
    f: Run, static: Hashable, division: Division, arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """Run `f(static, *arrays)` on every device, with that device's heads.

    Args:
      f: makes the call for any number of heads, with sizes read from the arrays. Callers need their
        own rule for `jax.vmap`: `custom_partitioning` has none.
      static: its first argument; equal ones have equal `repr`s, in every process.
      division: which axes of the arrays are heads.
      arrays: the operands.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if jax.device_count("cpu") == 1 or mesh.manual_axes:
        return list(f(static, *arrays))
    explicit = explicit_mesh(arrays)
    if explicit is not None:
        return _mapped(f, static, division, explicit, arrays)
    return list(_partitioned(f, static, division)(*arrays))


@functools.lru_cache(maxsize=1024)
def _partitioned(f: Run, static: Hashable, division: Division) -> Run:
    """Return the call for XLA's partitioner; one object per kind of call."""

    # JAX keeps compiled programs on disk under the text of the module that it gives XLA. That text
    # does not say what the call does, so an operand does.
    text = repr((f.__name__, static, division)).encode()
    identity = np.frombuffer(hashlib.sha256(text).digest(), np.int32)

    def one(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(f(static, *arrays))

    def with_identity(identity: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        return one(*arrays)

    def places(mesh: Mesh, split: _Split, arrays: tuple[Axes, ...]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, split.spec(axes)) for axes in arrays)

    def partition(
        mesh: Mesh, given: Sequence[jax.ShapeDtypeStruct], results: object
    ) -> tuple[Mesh, Run, tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        mesh, given = _mesh_of(mesh, given), given[1:]
        split = _split(division, mesh.shape, given, functools.partial(_axes_along, mesh))
        _warn_of_gathers(division, split, given, lambda x, axis: len(set(_parts(x, axis))) > 1)
        operands = places(mesh, split, ((None,), *division.operands))
        return mesh, with_identity, places(mesh, split, division.results), operands

    def infer(
        mesh: Mesh, given: Sequence[jax.ShapeDtypeStruct], results: object
    ) -> tuple[NamedSharding, ...]:
        mesh, given = _mesh_of(mesh, given), given[1:]
        split = _split(division, mesh.shape, given, functools.partial(_axes_along, mesh))
        return places(mesh, split, division.results)

    whole = partitioning.custom_partitioning(with_identity)
    whole.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        decode_shardings=False,
        sharding_rule=functools.partial(_rule, division),
    )

    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return whole(identity, *arrays)

    return call


@dataclasses.dataclass(frozen=True)
class _Split:
    """The axes of the mesh that split KV heads, and those that split query heads."""

    kv_heads: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    def spec(self, axes: Axes) -> P:
        """Return an array's sharding: whole along all axes except heads."""
        return P(*(getattr(self, kind) or None if kind else None for kind in axes))


def _split(
    division: Division,
    sizes: Mapping[str, int],
    given: Sequence[Operand],
    along: Callable[[Operand, int], tuple[str, ...]],
) -> _Split:
    """Return the split of the pools, or of queries if pools are whole and have one KV head.

    Args:
      division: which axes of the operands are heads.
      sizes: of the mesh's axes.
      given: the operands.
      along: which axes of the mesh split an axis of an operand.
    """
    whole_pools = division.kv_heads == 1
    kind, count = ("heads", division.group) if whole_pools else ("kv_heads", division.kv_heads)
    for pool, x, axes in zip(division.pools, given, division.operands, strict=True):
        if not count or kind not in axes or not (pool or whole_pools):
            continue
        names = along(x, axes.index(kind))
        if names and count % math.prod(sizes[name] for name in names) == 0:
            return _Split(heads=names) if whole_pools else _Split(names, names)
    return _Split()


def _axes_along(mesh: Mesh, x: jax.ShapeDtypeStruct, axis: int) -> tuple[str, ...]:
    """Return the axes of the mesh that split an axis of `x`; none if only parts of them do."""
    want = _parts(x, axis)
    names = [name for name, size in mesh.shape.items() if size > 1]
    for count in range(1, len(names) + 1):
        for some in itertools.permutations(names, count):
            if math.prod(mesh.shape[name] for name in some) == len(set(want)):
                spec = P(*(None,) * axis, some)
                like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
                if _parts(like, axis) == want:
                    return some
    return ()


def _parts(x: jax.ShapeDtypeStruct, axis: int) -> list[tuple[int, int, int]]:
    """Return which part of an axis each device has, in the order of their ids."""
    try:
        found = x.sharding.devices_indices_map(x.shape)
    except ValueError:  # XLA may split its own arrays into unequal parts
        return [(i, i, 1) for i in range(len(x.sharding.device_set))]
    devices = sorted(found, key=lambda device: device.id)
    return [found[device][axis].indices(x.shape[axis]) for device in devices]


def _mesh_of(mesh: Mesh, given: Sequence[jax.ShapeDtypeStruct]) -> Mesh:
    """Return the mesh, or one axis of all devices if there is none."""
    if not mesh.empty:
        return mesh
    devices = next(list(x.sharding.devices_indices_map(x.shape)) for x in given)
    return Mesh(np.array(devices), ("devices",))


def _warn_of_gathers(
    division: Division,
    split: _Split,
    given: Sequence[Operand],
    is_split: Callable[[Operand, int], bool],
) -> None:
    for name, x, axes in zip(division.pools, given, division.operands, strict=True):
        for axis, kind in enumerate(axes if name else ()):
            if (kind is None or not split.kv_heads) and is_split(x, axis):
                warnings.warn(
                    f"jattn: {name} {list(x.shape)} is split over devices along axis {axis}, so "
                    "the native kernel gathers it in every call; split pools over whole KV heads",
                    stacklevel=2,
                )


def _rule(division: Division, *_: object) -> partitioning.SdyShardingRule:
    """Tell Shardy which operands and results are sharded alike.

    Queries are sharded like results, and pools like pools. A pool is not linked to queries or new
    rows: with fewer KV heads than devices it would be split along parts of an axis.
    """
    fresh = (f"other{i}" for i in itertools.count())

    def mapping(axes: Axes, linked: bool) -> partitioning.ArrayMapping:
        return partitioning.ArrayMapping(
            *(kind if kind and linked else next(fresh) for kind in axes)
        )

    linked = [
        pool is not None or "heads" in axes
        for pool, axes in zip(division.pools, division.operands, strict=True)
    ]
    return partitioning.SdyShardingRule(
        (mapping((None,), False), *map(mapping, division.operands, linked)),
        tuple(mapping(axes, True) for axes in division.results),
    )


def _mapped(
    f: Run,
    static: Hashable,
    division: Division,
    mesh: AbstractMesh,
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """Make the call where types say how arrays are split."""

    def along(x: jax.Array, axis: int) -> tuple[str, ...]:
        names = jax.typeof(x).sharding.spec[axis]
        return (names,) if isinstance(names, str) else tuple(names or ())

    split = _split(division, mesh.shape, arrays, along)
    _warn_of_gathers(division, split, arrays, lambda x, axis: bool(along(x, axis)))
    in_specs, out_specs = (
        tuple(map(split.spec, axes)) for axes in (division.operands, division.results)
    )
    placed = [
        jax.sharding.reshard(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, in_specs, strict=True)
    ]
    one = jax.shard_map(
        lambda *arrays: tuple(f(static, *arrays)),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
    )
    return list(one(*placed))


def automatic_axes(mesh: AbstractMesh) -> tuple[str, ...]:
    """Return the mesh axes that XLA may split arrays along, even inside `jax.shard_map`."""
    sizes = mesh.shape.items()
    return tuple(name for name, size in sizes if size > 1 and name not in mesh.manual_axes)
