r"""Merging the partial results that decode's grid blocks left of each item, and finishing its rows.

    m = max m_c      l = sum exp(m_c - m) l_c      acc = sum exp(m_c - m) acc_c

over the grid blocks c that took tiles of the item, which are neighbours: those of its first to its
last tile; then the sink joins l, and `out = v_scale acc / l`. A grid block here does 64 columns of
V of one item, in order of c, so that the sum does not depend on which block was first:

    for every few c from the item's first grid block to its last:
        read m_c, l_c [R] and acc_c [64, R] from place item + c, all before any is used
        merge them into m, l, acc
    factor, lse = finish(m, l, sink)
    acc factor, rounded to the output's dtype -> o_s [R, 64] -> out

If all rows of the call are decode's, groups are multiples of 8 and no column of V is stored twice,
the rows go where they belong in the call's result (`in_place`), with zeros and -inf for tokens of
no sequence. Otherwise they go to [B, K, J, R, V], and XLA takes them from there.

Ownership: o_s and lse_s are the warpgroup's, and TMA's from `commit_smem` on. All else goes
from global memory to registers. Rows of an item without tiles are zeros and -inf, or the sink, and
NaN where the sequence breaks a promise or a split met an invalid block id.
"""

from __future__ import annotations

import dataclasses
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
from jattn.pallas.mosaic_gpu.decode.query_rows import by_row

SLICE = scratch.PRODUCT_ROWS  # columns of V that one grid block finishes
SWIZZLE = 128  # bytes: a row of a slice in 16 bits
# Splits that are read at once times their rows: 8 of 8 rows are 32 registers of each thread.
NUMBERS = 64


class Splits(typing.NamedTuple):
    """The partial results that the decode kernel leaves for every split, by its place."""

    ml: jax.Array  # float32 [places, 2, R]: `m` and `l`
    acc: jax.Array  # float32 [places, V, R], V a multiple of 64
    bad: jax.Array  # int32 [places]: not 0 where the split met an invalid block id


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
      splits: all partial results.
      row_blocks: J.
      in_place: `out` is [T, H, V] and `lse` [T, H]; the call's group must be a multiple of 8.
    """
    _, value_rows, rows = splits.acc.shape
    assert not in_place or math.gcd(call.group, rows) % scratch.COPIED_ROWS == 0
    items = (call.num_seqs, call.num_kv_heads, row_blocks, rows)
    count = math.prod(items[:3])
    place = (call.num_tokens, call.num_heads) if in_place else (count, rows)
    dtype, struct = jnp.dtype(call.out_dtype), jax.ShapeDtypeStruct
    sinks = jax.tree.map(lambda x: by_row(x, call, row_blocks, rows), operands.sinks)

    def body(ins: Inputs, out: Any, lse: Any, refs: dict[str, Any]) -> None:
        facts = Plan(ins.plan, call.num_seqs, plan.grid)
        part = Slice.of(call, online, facts, ins, rows, row_blocks)
        acc, row_lse, broken = part.finished()
        result = Result(part, out, lse, refs["o_s"], refs["lse_s"])
        result.put(acc, row_lse)
        if in_place:
            result.write_tokens(broken)
        else:
            result.write()
        mgpu.wait_smem_to_gmem(0)

    out, lse = mgpu.launch(
        body,
        Inputs(plan.numbers, *splits, sinks, operands.v_scale),
        out_type=(struct((*place, value_rows), dtype), struct(place, jnp.float32)),
        name="jattn_merge",
        declared={
            "o_s": scratch.Buffer((rows, SLICE), dtype, SWIZZLE),
            "lse_s": scratch.Buffer((rows,), np.float32),
        },
        # One axis: of several, only the last may be longer than 65,535.
        grid=(count * (value_rows // SLICE),),
        grid_names=("slice",),
        num_threads=1,
        thread_name="thread",
    )
    if in_place:
        return out, lse
    return out.reshape(*items, value_rows), lse.reshape(items)


@dataclasses.dataclass(frozen=True)
class Slice:
    """The results of a grid block: some columns of V of one item's rows.

    Attributes:
      call, online: as of `run`.
      facts: the plan.
      inputs: the kernel's.
      rows: R.
      item: which of all.
      seq, kv_head, row_block: the item's.
      first_column: of V, as stored.
      columns: from there on, a slice.
    """

    call: calls.Call
    online: fragments.Online
    facts: Plan
    inputs: Inputs
    rows: int
    item: jax.Array
    seq: jax.Array
    kv_head: jax.Array
    row_block: jax.Array
    first_column: jax.Array
    columns: Any

    @classmethod
    def of(
        cls,
        call: calls.Call,
        online: fragments.Online,
        facts: Plan,
        inputs: Inputs,
        rows: int,
        row_blocks: int,
    ) -> Slice:
        """The slice of this grid block."""
        index, slices = lax.axis_index("slice"), inputs.acc.shape[1] // SLICE  # of an item
        item = lax.div(index, slices)
        first = (index - item * slices) * SLICE
        head = lax.div(item, row_blocks)
        row_block = item - head * row_blocks
        seq = lax.div(head, call.num_kv_heads)
        kv_head = head - seq * call.num_kv_heads
        columns = pl.ds(pl.multiple_of(first, SLICE), SLICE)
        at = (item, seq, kv_head, row_block, first, columns)
        return cls(call, online, facts, inputs, rows, *at)

    def grid_blocks(self) -> tuple[jax.Array, jax.Array]:
        """`(start, end)`: the decode kernel's grid blocks that took tiles of the item.

        If it has no tiles, both are the block that its first tile would be in.
        """
        facts, seq = self.facts, self.seq
        tiles, live = facts[seq, Fact.TILES], facts[seq, Fact.ROW_BLOCKS]
        mine = jnp.where(self.row_block < live, tiles, 0)
        first = facts[seq, Fact.START] + (self.kv_head * live + self.row_block) * tiles
        share = facts.share
        start = lax.div(first, share)
        end = lax.div(first + mine + share - 1, share)
        return start, jnp.where(mine > 0, end, start)

    def split(self, block: jax.Array, end: jax.Array) -> tuple[jax.Array, ...]:
        """`(m, l, acc)` that a grid block left; nothing from `end` on."""
        ins, place = self.inputs, self.item + jnp.minimum(block, end - 1)
        # NaN stays in the sum. Instead of a split past the last, the last is read once more, with
        # an m of -inf, so that it counts for nothing.
        nan = fragments.nan_where(ins.bad[place] != 0)
        m = fragments.vector(ins.ml.at[place, 0], 1)
        m = m + jnp.where(block < end, jnp.float32(0), -jnp.float32(jnp.inf))
        l = fragments.vector(ins.ml.at[place, 1], 1) + nan
        acc = ins.acc.at[place, self.columns, slice(None)]
        return m, l, mgpu.load(acc, mgpu.WGMMA, optimized=False)

    def nothing(self) -> tuple[jax.Array, ...]:
        """`(m, l, acc)` of no split."""
        return self.online.empty(self.rows, (SLICE, self.rows))

    def merged(self) -> tuple[jax.Array, ...]:
        """`(m, l, acc)` of all splits of the item, several read at a time."""
        start, end = self.grid_blocks()
        at_a_time = NUMBERS // self.rows

        def step(i: jax.Array, old: Any) -> Any:
            several = [self.split(start + i * at_a_time + j, end) for j in range(at_a_time)]
            for split in several:
                old = self.online.merge(old, split)
            return old

        steps = lax.div(end - start + (at_a_time - 1), jnp.int32(at_a_time))
        return lax.fori_loop(0, steps, step, self.nothing())

    def finished(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`(acc, lse, broken)` of the rows, NaN where their sequence breaks a promise."""
        m, l, acc = self.merged()
        ins, sink = self.inputs, None
        if "sinks" in self.call.options:
            sink = ins.sinks.at[self.kv_head, self.row_block]
            sink = fragments.vector(sink, 1) * softmax.LOG2E
        factor, lse = fragments.finish(m * softmax.LOG2E, l, sink)
        if "v_scale" in self.call.options:
            factor = factor * ins.v_scale[self.kv_head]
        # The length of a sequence that breaks a promise is -1.
        broken = self.facts[self.seq, Fact.SEQ_LEN] < 0
        nan = fragments.nan_where(broken)
        return self.online.rescale(acc, factor + nan), lse + nan, broken


@dataclasses.dataclass(frozen=True)
class Result:
    """Where the rows of a slice go.

    Attributes:
      slice: the slice.
      out, lse: of the call, or [items, R, V] and [items, R], in global memory.
      o_s, lse_s: [R, 64] and [R], from which copies take them.
    """

    slice: Slice
    out: Any
    lse: Any
    o_s: Any
    lse_s: Any

    def put(self, acc: jax.Array, lse: jax.Array) -> None:
        """Put rows where copies read them, once earlier copies have read what was there."""
        mgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.o_s.T[...] = acc.astype(self.o_s.dtype)
        self.lse_s[...] = lse
        mgpu.commit_smem()

    def write(self) -> None:
        """Copy the rows to their item's place."""
        item = self.slice.item
        mgpu.copy_smem_to_gmem(self.o_s, self.out.at[item, :, self.slice.columns])

        @pl.when(self.slice.first_column == 0)
        def _() -> None:
            mgpu.copy_smem_to_gmem(self.lse_s, self.lse.at[item])

    @property
    def box(self) -> int:
        """Rows of one copy to the call's result: heads of one token."""
        return math.gcd(self.slice.call.group, self.slice.rows)

    @property
    def first_row(self) -> jax.Array:
        """The item's first, among all rows of the sequence in its KV head."""
        return self.slice.row_block * self.slice.rows

    def write_token(self, token: jax.Array, row: int) -> None:
        """Copy the box that begins at a row to a token's heads."""
        group = self.slice.call.group
        head = self.slice.kv_head * group + lax.rem(self.first_row + row, jnp.int32(group))
        box, heads = pl.ds(row, self.box), pl.ds(head, self.box)
        mgpu.copy_smem_to_gmem(self.o_s.at[box], self.out.at[token, heads, self.slice.columns])

        @pl.when(self.slice.first_column == 0)
        def _() -> None:
            mgpu.copy_smem_to_gmem(self.lse_s.at[box], self.lse.at[token, heads])

    def write_tokens(self, broken: jax.Array) -> None:
        """Copy the rows to where they belong in the call's result.

        The blocks of rows that have the first token's heads also handle other tokens: all of a
        sequence that is `broken`, which may be more than there are rows for, and padding.
        """
        part, call, facts = self.slice, self.slice.call, self.slice.facts
        token, queries = facts[part.seq, Fact.TOKEN], facts[part.seq, Fact.QUERIES]
        leads = self.first_row < call.group
        for row in range(0, part.rows, self.box):
            index = lax.div(self.first_row + row, jnp.int32(call.group))

            @pl.when(jnp.logical_not(broken) & (index < queries))
            def _(row: int = row, index: jax.Array = index) -> None:
                self.write_token(token + index, row)

        pl.when(broken)(lambda: self.write_all(leads, token, token + queries, 1))
        padding = facts.queries + part.seq

        @pl.when(leads & (padding < call.num_tokens))
        def _() -> None:
            _, l, acc = part.nothing()
            self.put(acc, l - jnp.float32(jnp.inf))
            self.write_all(leads, padding, jnp.int32(call.num_tokens), call.num_seqs)

    def write_all(self, leads: jax.Array, first: jax.Array, end: jax.Array, step: int) -> None:
        """Copy one token's rows to every `step`-th of others, if this block of rows `leads`."""
        count = lax.div(end - first + (step - 1), jnp.int32(step))

        @pl.loop(0, jnp.where(leads, jnp.maximum(count, 0), 0))
        def _(i: jax.Array) -> None:
            for row in range(0, self.slice.rows, self.box):

                @pl.when(self.first_row + row < self.slice.call.group)
                def _(row: int = row) -> None:
                    self.write_token(first + i * step, row)
