r"""Merging the softmax states that decode's grid blocks left of each item, and finishing its rows.

    m = max m_c      l = sum exp(m_c - m) l_c      acc = sum exp(m_c - m) acc_c

over the grid blocks c that took tiles of the item, which are neighbours: those of its first to its
last tile; then the sink joins l, and `out = v_scale acc / l`. A grid block here does 64 columns of
V of one item, in order of c, so that the sum does not depend on which block was first:

    for each few c from the item's first grid block to its last:
        read m_c, l_c [R] and acc_c [64, R] from place item + c, all before any is used
        merge them into m, l, acc
    factor, lse = finish(m, l, sink)
    acc factor, rounded to the output's dtype -> o_s [R, 64] -> out

Where all rows of the call are decode's, groups are multiples of 8 and no column of V is stored
twice, the rows go where they belong in the call's result (`in_place`), zeros and -inf with them for
tokens of no sequence; otherwise to [B, K, J, R, V], and XLA takes them from there.

Who holds what: o_s and lse_s are the warpgroup's, and TMA's from `commit_smem` on. All else goes
from global memory to registers. Rows of an item without tiles are zeros and -inf, or the sink, and
NaN where the sequence breaks a promise or a split met an id of no block.
"""

from __future__ import annotations

import math
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jattn import call as calls
from jattn import softmax
from jattn.pallas.mosaic_gpu import compat as mgpu
from jattn.pallas.mosaic_gpu import fragments, scratch
from jattn.pallas.mosaic_gpu.decode.plan import Fact, Plan

SLICE = 64  # columns of V that one grid block finishes
SWIZZLE = 128  # bytes: a row of a slice in 16 bits
# Splits that are read at once times their rows: 8 of 8 rows are 32 registers of each thread.
NUMBERS = 64


class Splits(typing.NamedTuple):
    """The partial results that the decode kernel leaves of every split, by its place."""

    ml: jax.Array  # float32 [places, 2, R]: `m` and `l`
    acc: jax.Array  # float32 [places, V, R], V a multiple of 64
    bad: jax.Array  # int32 [places]: not 0 where the split met an id of no block


class Inputs(typing.NamedTuple):
    """The kernel's inputs, as arrays outside it and as refs inside; None for absent ones."""

    plan: Any
    ml: Any  # of the splits
    acc: Any
    bad: Any
    sinks: Any  # float32 [K, J, R]
    v_scale: Any  # float32 [K]


def run(
    call: calls.Call,
    operands: calls.Operands,
    plan: Plan,
    online: fragments.Online,
    splits: Splits,
    row_blocks: int,
    in_place: bool,
) -> tuple[jax.Array, jax.Array]:
    """`out` [B, K, J, R, V] in the output's dtype and `lse` float32 [B, K, J, R].

    Args:
      call, operands: the call.
      plan, online: the decode kernel's.
      splits: the states of all.
      row_blocks: J.
      in_place: `out` is [T, H, V] and `lse` [T, H], where the call's group is a multiple of 8.
    """
    num_seqs, kv_heads = call.num_seqs, call.num_kv_heads
    _, value_rows, rows = splits.acc.shape
    at_a_time = NUMBERS // rows
    sinks = None
    if operands.sinks is not None:
        which = np.arange(row_blocks * rows) % call.group
        sinks = operands.sinks.reshape(kv_heads, call.group)[:, which]
        sinks = sinks.reshape(kv_heads, row_blocks, rows)

    def body(ins: Inputs, out_g: Any, lse_g: Any, refs: dict[str, Any]) -> None:
        facts = Plan(ins.plan, num_seqs, plan.grid)
        item, at = lax.axis_index("item"), lax.axis_index("slice") * SLICE
        head = lax.div(item, row_blocks)
        row_block = item - head * row_blocks
        seq = lax.div(head, kv_heads)
        head = head - seq * kv_heads
        tiles, live = facts[seq, Fact.TILES], facts[seq, Fact.ROW_BLOCKS]
        mine = jnp.where(row_block < live, tiles, 0)
        first = facts[seq, Fact.START] + (head * live + row_block) * tiles
        share = facts.share
        start = lax.div(first, share)
        # The grid block after the last; the one that `first` would be in where there are no tiles.
        end = lax.div(first + mine + share - 1, share)
        end = jnp.where(mine > 0, end, start)
        here = (pl.ds(pl.multiple_of(at, SLICE), SLICE), slice(None))

        def read(block: jax.Array) -> tuple[jax.Array, ...]:
            place = item + jnp.minimum(block, end - 1)
            # NaN stays in the sum. The last split is read once more instead of one past it.
            nan = jnp.where(ins.bad[place] != 0, jnp.float32(jnp.nan), jnp.float32(0))
            m = fragments.vector(ins.ml.at[place, 0], 1)
            # And counts for nothing then.
            m = m + jnp.where(block < end, jnp.float32(0), -jnp.float32(jnp.inf))
            l = fragments.vector(ins.ml.at[place, 1], 1) + nan
            return m, l, mgpu.load(ins.acc.at[(place, *here)], mgpu.WGMMA, optimized=False)

        def step(i: jax.Array, old: Any) -> Any:
            several = [read(start + i * at_a_time + j) for j in range(at_a_time)]
            for split in several:
                old = online.merge(old, split)
            return old

        steps = lax.div(end - start + (at_a_time - 1), jnp.int32(at_a_time))
        state = online.empty(rows, (SLICE, rows))
        m, l, acc = lax.fori_loop(0, steps, step, state)
        sink = None
        if ins.sinks is not None:
            sink = fragments.vector(ins.sinks.at[head, row_block], 1) * softmax.LOG2E
        factor, lse = fragments.finish(m * softmax.LOG2E, l, sink)
        if ins.v_scale is not None:
            factor = factor * ins.v_scale[head]
        # The length of a sequence that breaks a promise is -1.
        broken = facts[seq, Fact.SEQ_LEN] < 0
        nan = jnp.where(broken, jnp.float32(jnp.nan), jnp.float32(0))
        o_s, lse_s = refs["o_s"], refs["lse_s"]

        def put(acc: jax.Array, lse: jax.Array) -> None:
            mgpu.wait_smem_to_gmem(0, wait_read_only=True)
            o_s.T[...] = acc.astype(o_s.dtype)
            lse_s[...] = lse
            mgpu.commit_smem()

        put(online.rescale(acc, factor + nan), lse + nan)
        if not in_place:
            mgpu.copy_smem_to_gmem(o_s, out_g.at[item, :, here[0]])

            @pl.when(at == 0)
            def _() -> None:
                mgpu.copy_smem_to_gmem(lse_s, lse_g.at[item])

            mgpu.wait_smem_to_gmem(0)
            return

        def answer(token: jax.Array, box: int) -> None:
            """A box of rows goes to a token's heads."""
            first = row_block * rows + box
            heads = head * call.group + lax.rem(first, jnp.int32(call.group))
            mine = pl.ds(box, size)
            mgpu.copy_smem_to_gmem(o_s.at[mine], out_g.at[token, pl.ds(heads, size), here[0]])

            @pl.when(at == 0)
            def _() -> None:
                mgpu.copy_smem_to_gmem(lse_s.at[mine], lse_g.at[token, pl.ds(heads, size)])

        token, queries = facts[seq, Fact.TOKEN], facts[seq, Fact.QUERIES]
        # The blocks of rows that have the first token's heads answer for other tokens, too.
        leads = row_block * rows < call.group
        boxes = range(0, rows, size)
        for box in boxes:
            index = lax.div(row_block * rows + box, jnp.int32(call.group))

            @pl.when(jnp.logical_not(broken) & (index < queries))
            def _(box: int = box, index: jax.Array = index) -> None:
                answer(token + index, box)

        def everywhere(first: jax.Array, last: jax.Array, step: int) -> None:
            count = lax.div(last - first + (step - 1), jnp.int32(step))

            @pl.loop(0, jnp.where(leads, jnp.maximum(count, 0), 0))
            def _(i: jax.Array) -> None:
                for box in boxes:

                    @pl.when(row_block * rows + box < call.group)
                    def _(box: int = box) -> None:
                        answer(first + i * step, box)

        pl.when(broken)(lambda: everywhere(token, token + queries, 1))
        padding = facts.queries + seq

        @pl.when(leads & (padding < call.num_tokens))
        def _() -> None:
            _, l, acc = online.empty(rows, (SLICE, rows))
            put(acc, l - jnp.float32(jnp.inf))
            everywhere(padding, jnp.int32(call.num_tokens), num_seqs)

        mgpu.wait_smem_to_gmem(0)

    struct = jax.ShapeDtypeStruct
    count, size = num_seqs * kv_heads * row_blocks, math.gcd(call.group, rows)
    assert not in_place or size % 8 == 0
    dtype = jnp.dtype(call.out_dtype)
    shapes = ((count, rows, value_rows), (count, rows))
    if in_place:
        shapes = ((call.num_tokens, call.num_heads, value_rows), (call.num_tokens, call.num_heads))
    out, lse = mgpu.launch(
        body,
        Inputs(plan.numbers, *splits, sinks, operands.v_scale),
        out_type=(struct(shapes[0], dtype), struct(shapes[1], jnp.float32)),
        name="jattn_merge",
        declared={
            "o_s": scratch.Buffer((rows, SLICE), dtype, SWIZZLE),
            "lse_s": scratch.Buffer((rows,), np.float32),
        },
        grid=(count, value_rows // SLICE),
        grid_names=("item", "slice"),
        num_threads=1,
        thread_name="thread",
    )
    if in_place:
        return out, lse
    items = (num_seqs, kv_heads, row_blocks, rows)
    return out.reshape(*items, value_rows), lse.reshape(items)
