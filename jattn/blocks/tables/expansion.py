"""Kernel blocks as a view of the manager's blocks.

A block of S tokens is `n` kernel blocks of S / n tokens, and

    kernel_id(b, j) = b * stride + j,    j = 0 .. n - 1,    stride = n by default.

A larger stride skips what lies between consecutive blocks of a layer (pages of other layers, in a
pool that packs them). The ids are expanded when a kernel needs them and are never stored. Slots are
those of the manager's blocks, because `b * S + offset` does not depend on n.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jattn.blocks.arguments import Integers, as_int32
from jattn.blocks.tables.tables import BlockTables
from jattn.checks import checking
from jattn.integers import INT32_MAX, require_int, with_python_ints


@with_python_ints
def expand_block_ids(
    block_ids: Integers, blocks_per_kv_block: int, *, stride: int | None = None
) -> jax.Array:
    """Return the kernel blocks of each block, in order, along the last axis.

    Args:
      block_ids: int32 [..., M], the manager's blocks.
      blocks_per_kv_block: n, kernel blocks in a block. Static.
      stride: kernel blocks from one block to the next, at least n. Static. None: n.

    Returns: int32 [..., M * n]. With n = 1 the ids come back unchanged, whatever the stride, as in
      vLLM: a kernel that reads whole blocks addresses them itself. A block whose kernel blocks
      int32 cannot hold becomes n times -1.
    Raises: `ValueError` if `blocks_per_kv_block` is below 1 or `stride` is below it, and for a
      wrong dtype or shape.

    >>> expand_block_ids([4, 0], 3).tolist()
    [12, 13, 14, 0, 1, 2]
    """
    with checking("expand_block_ids") as problems:
        counted = require_int(problems, "blocks_per_kv_block", blocks_per_kv_block, 1)
        if counted and stride is not None:
            require_int(problems, "stride", stride, blocks_per_kv_block)
        ids = as_int32(problems, "block_ids", block_ids, ranks=tuple(range(1, 9)))
    n = blocks_per_kv_block
    if n == 1:
        return ids
    return _expand(ids, n, n if stride is None else int(stride))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _expand(ids: jax.Array, n: int, stride: int) -> jax.Array:
    offsets = jnp.arange(n, dtype=jnp.int32).reshape((1,) * ids.ndim + (n,))
    most = (INT32_MAX - n + 1) // stride
    held = (ids >= -most) & (ids <= most)  # others would wrap around and name other blocks
    first = jnp.where(held, ids, -1)[..., None]
    expanded = jnp.where(held[..., None], first * jnp.int32(min(stride, INT32_MAX)) + offsets, -1)
    return expanded.reshape(*ids.shape[:-1], ids.shape[-1] * n)


def kernel_block_tables(
    tables: BlockTables,
    gathered: Sequence[jax.Array] | None = None,
    *,
    strides: Sequence[int | None] | None = None,
) -> tuple[jax.Array, ...]:
    """Return the block tables in kernel blocks, one array per group.

    Args:
      tables: the tables, whose groups say how many kernel blocks a block has.
      gathered: what `gather_block_tables` returned, int32 [B, W_g]. None: all rows.
      strides: per group, `stride` of `expand_block_ids`. None: dense.

    Returns: per group int32 [B, W_g * n_g]; tables that store kernel blocks come back unchanged.
    Raises: `ValueError` if `gathered` or `strides` does not have one entry per group, or as
      `expand_block_ids`.

    >>> group = BlockGroup(block_size=48, max_blocks=2, kernel_block_size=16)
    >>> tables = init_block_tables([group], max_num_seqs=2)
    >>> tables, _ = append_block_ids(tables, 1, [[4]], [1])
    >>> kernel_block_tables(tables, gather_block_tables(tables, [1]))[0].tolist()
    [[12, 13, 14, 0, 1, 2]]
    """
    with checking("kernel_block_tables") as problems:
        gathered = tables.tables if gathered is None else tuple(gathered)
        strides = (None,) * len(tables.groups) if strides is None else tuple(strides)
        for argument, values in (("gathered", gathered), ("strides", strides)):
            problems.require(
                len(values) == len(tables.groups),
                argument,
                f"{len(values)} entries",
                f"one per group, {len(tables.groups)}",
            )
    if tables.stores_kernel_blocks:
        return gathered
    return tuple(
        expand_block_ids(table, group.blocks_per_kv_block, stride=stride)
        for table, group, stride in zip(gathered, tables.groups, strides, strict=True)
    )
