r"""Merging the softmax states that decode's grid blocks left of each item.

    m = max m_c      l = sum exp(m_c - m) l_c      acc = sum exp(m_c - m) acc_c

over the grid blocks c that took tiles of the item, which are neighbours: those of its first to its
last tile. A grid block here merges 64 rows of V^T of one item, in order of c, so that the sum does
not depend on which block was first:

    for each few c from the item's first grid block to its last:
        read m_c, l_c [R] and acc_c [64, R] from place item + c, all before any is used
        merge them into m, l, acc
    write m, l, acc

Nothing is shared: everything goes from global memory to registers and back. An item without tiles
gives -inf, 0, 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jattn import softmax
from jattn.pallas.mosaic_gpu import compat as mgpu
from jattn.pallas.mosaic_gpu import fragments
from jattn.pallas.mosaic_gpu.decode.plan import Fact, Plan

SLICE = 64  # rows of V^T that one grid block merges
# Splits that are read at once times their rows: 8 of 8 rows are 32 registers of each thread.
NUMBERS = 64


def run(
    plan: Plan,
    online: fragments.Online,
    ml: jax.Array,
    acc: jax.Array,
    items: tuple[int, int, int],
) -> softmax.Partial:
    """`m`, `l` [B, K, J, R] and `acc` [B, K, J, V, R] from the states of all splits.

    Args:
      plan, online: the decode kernel's.
      ml: [splits, 2, R], `m` and `l`.
      acc: [splits, V, R], V a multiple of 64.
      items: B, K, J.
    """
    num_seqs, kv_heads, row_blocks = items
    _, value_rows, rows = acc.shape
    at_a_time = NUMBERS // rows

    def body(facts: Any, share: Any, ml_g: Any, acc_g: Any, ml_o: Any, acc_o: Any) -> None:
        item, at = lax.axis_index("item"), lax.axis_index("slice") * SLICE
        head = lax.div(item, row_blocks)
        row_block = item - head * row_blocks
        seq = lax.div(head, kv_heads)
        head = head - seq * kv_heads
        tiles, live = facts[seq, Fact.TILES], facts[seq, Fact.ROW_BLOCKS]
        mine = jnp.where(row_block < live, tiles, 0)
        first = facts[seq, Fact.START] + (head * live + row_block) * tiles
        start = lax.div(first, share[0])
        # The grid block after the last; the one that `first` would be in where there are no tiles.
        end = lax.div(first + mine + share[0] - 1, share[0])
        end = jnp.where(mine > 0, end, start)
        here = (pl.ds(pl.multiple_of(at, SLICE), SLICE), slice(None))

        def read(block: jax.Array) -> tuple[jax.Array, ...]:
            place = item + jnp.minimum(block, end - 1)
            m = fragments.vector(ml_g.at[place, 0], 1)
            # One more read of the last split instead of one past it; it then counts for nothing.
            m = m + jnp.where(block < end, jnp.float32(0), -jnp.float32(jnp.inf))
            l = fragments.vector(ml_g.at[place, 1], 1)
            return m, l, mgpu.load(acc_g.at[(place, *here)], mgpu.WGMMA, optimized=False)

        def step(i: jax.Array, old: Any) -> Any:
            several = [read(start + i * at_a_time + j) for j in range(at_a_time)]
            for split in several:
                old = online.merge(old, split)
            return old

        steps = lax.div(end - start + (at_a_time - 1), jnp.int32(at_a_time))
        state = online.empty(rows, (SLICE, rows))
        m, l, acc = lax.fori_loop(0, steps, step, state)
        mgpu.store(acc_o.at[(item, *here)], acc)

        @pl.when(at == 0)
        def _() -> None:
            mgpu.store(ml_o.at[item, 0], m)
            mgpu.store(ml_o.at[item, 1], l)

    struct = jax.ShapeDtypeStruct
    count = num_seqs * kv_heads * row_blocks
    ml, acc = mgpu.kernel(
        body,
        out_type=(
            struct((count, 2, rows), jnp.float32),
            struct((count, value_rows, rows), jnp.float32),
        ),
        grid=(count, value_rows // SLICE),
        grid_names=("item", "slice"),
        num_threads=1,
        thread_name="thread",
    )(plan.facts, plan.share, ml, acc)
    return softmax.Partial(
        ml[:, 0].reshape(*items, rows),
        ml[:, 1].reshape(*items, rows),
        acc.reshape(*items, value_rows, rows),
    )
