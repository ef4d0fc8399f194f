"""Make the arrays that an engine keeps on its devices, and change them between steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

import jattn.blocks as jb
from examples.engine.caches import Caches, init_caches
from examples.engine.forks import copy_blocks
from examples.engine.history import History, begin, constrain, init_history
from examples.engine.model import Model
from examples.engine.scheduler import Limits
from examples.engine.step import make_tables


def initializer(
    model: Model, limits: Limits, kv_format: Any, implementation: str | None
) -> Callable[[], tuple[Caches, jb.BlockTables, History]]:
    """Return a function that makes an engine's caches, tables and history, placed on its mesh."""
    sizes = {group.name: limits.num_blocks[limits.pool_of(group)] for group in limits.groups}

    def make() -> tuple[Caches, jb.BlockTables, History]:
        caches = init_caches(
            model.layers,
            sizes,
            limits.block_size,
            kv_format,
            unified=limits.unified,
            implementation=implementation,
        )
        return caches, make_tables(limits), init_history(limits.max_seqs, model.vocab_size)

    return make if model.mesh is None else model.mesh.init(make)


@dataclasses.dataclass(frozen=True)
class Updates:
    """The jitted programs that run between steps. Each takes over the arrays that it changes."""

    begin: Callable[..., History]
    constrain: Callable[..., History]
    copy: Callable[..., Caches]

    @classmethod
    def of(cls, model: Model, caches: Caches, history: History) -> Updates:
        """Make the programs for arrays like these, which stay where they are."""
        where = jax.tree.map(lambda x: x.sharding, history)
        copy = copy_blocks if model.mesh is None else model.mesh.update(copy_blocks, caches)
        return cls(
            begin=jax.jit(begin, donate_argnums=0, out_shardings=where),
            constrain=jax.jit(constrain, donate_argnums=0, out_shardings=where),
            copy=jax.jit(copy, donate_argnums=0),
        )


def id_bytes(caches: Caches, limits: Limits) -> dict[str, int]:
    """Return the bytes of one block or state of each pool, over all layers."""
    found = dict.fromkeys(limits.num_blocks, 0)
    pool_of = {group.name: limits.pool_of(group) for group in limits.groups}
    for index, pool in enumerate(caches.pools):
        group = next(place.group for place in caches.places if place.pool == index)
        name = pool_of[group]
        found[name] += nbytes(pool) // limits.num_blocks[name]
    return found


def nbytes(tree: object) -> int:
    """Return the bytes of all arrays in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
