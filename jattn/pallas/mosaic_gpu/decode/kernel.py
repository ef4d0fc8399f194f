r"""Decode on Mosaic GPU: sequences with 1 to 8 query tokens, bound by reading K and V.

For a block of R rows (query token, head of the group) of one sequence and one KV head, over tiles
of 64 keys, with queries as columns ("swap-AB": the 64 rows that `wgmma` needs are keys, of which
there are many, and not queries, of which there are few),

    S^T = K Q^T                      [64, R]
    m'  = max(m, max over keys S^T)  [R]
    P^T = exp(S^T - m')              [64, R]
    l   = exp(m - m') l + sum P^T    [R]
    O^T = exp(m - m') O^T + V^T P^T  [V, R]

    for each split in this grid block's run of tiles (see decode.plan):   all warpgroups
        for each tile: for each chunk of K, then of V:
            producer: wait empty[u]; a TMA copy per kernel block -> ring[u], arriving on full[u]
            consumer: wait full[u]; wgmma; arrive empty[u]
        consumer: write (m, l, O^T) to the split's place

Either one consumer has all rows, or each of two has half of them; both read the same keys. To
reduce a number for each row over its four warps, a consumer needs memory that Mosaic gives a block
only once, so two consumers take turns: turn[w].

Ownership:
    ring[u]   producer from empty[u] until its copies have arrived on full[u], then the consumers;
              K and V take turns in it, and it runs on from one split into the next
    q[i]      the same with q_full[i], q_empty[i]; two, so that the next split's is under way
    p, out, m and l, and for fp8 wide    each consumer its own

Slots that no sequence owns may hold NaN. A row of K is a row of S^T and is masked there; the rows
of V are summed over, so a tile that reaches past the visible keys has those rows of V zeroed before
its product, by the first consumer, for which the second waits at clean[u]. A copy never reads a
table entry past the visible keys, and an id is clamped into the pool. fp8 is read as stored
and widened to float16 by the consumer, one chunk at a time, into one of two buffers wide[i] (sm_90
turns e4m3 into float16 in one instruction, into bfloat16 in many).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jattn import call as calls
from jattn import spec
from jattn.pallas.mosaic_gpu import compat as mgpu
from jattn.pallas.mosaic_gpu import fp8, fragments, pools, scratch
from jattn.pallas.mosaic_gpu.decode import merge, plan, query_rows
from jattn.pallas.mosaic_gpu.decode import tiles as tiling
from jattn.pallas.mosaic_gpu.decode.plan import Fact

TILE = tiling.TILE
# A query is a column of S^T. A row that has seen nothing yet has its maximum at -inf.
SOFTMAX = fragments.Online(axis=1, exp=jnp.exp, floor=-np.inf)
# A multiprocessor has 65536: two blocks of 256 threads run on one where a thread has 128, four
# where it has 64. Naming the number makes ptxas keep to it; left alone, it takes up to 255.
SHARED_REGISTERS = {2: (128, 80), 4: (64, 56)}  # of a consumer and of a producer
PAIRED_REGISTERS = (232, 40)  # two consumers and a producer have a multiprocessor to themselves


def run(
    call: calls.Call,
    operands: calls.Operands,
    counts: jax.Array,
    span: int,
    others: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`(out [T, H, V] in the output dtype, lse [T, H] float32)` of sequences with few tokens.

    Args:
      call: the call.
      operands: its operands as `promises.marked` returns them.
      counts: int32 [B]; query tokens of each sequence, at most `span`; 0 for those of other
        kernels.
      span: static bound on `counts`.
      others: `(out, lse)` of other kernels, which hold every other token and padding; None for
        zeros and -inf, and NaN for all sequences that break a promise.
    """
    tiles = tiling.pick(call, span)
    rows = query_rows.Rows(call, operands, counts, tiles, span)
    planned = plan.make(
        call,
        operands,
        counts,
        tile=TILE,
        kernel_block=tiles.kernel_block,
        row_block=tiles.row_block,
        grid=mgpu.num_cores() * tiles.blocks_per_core,
        min_share=tiles.min_share,
    )
    splits = _kernel(rows, planned)
    in_place = others is None and rows.stay_in_place
    out, lse = merge.run(call, operands, planned, SOFTMAX, splits, rows.blocks, in_place)
    if in_place:
        return out, lse
    return rows.result(out, lse) if others is None else rows.scatter(out, lse, others)


class Inputs(typing.NamedTuple):
    """The kernel's inputs, as arrays outside it and as refs inside; None for absent ones."""

    plan: Any
    tables: Any  # int32 [B, M]
    queries: Any  # [B, K, J, R, D], or the call's [T, H, D]
    keys: Any  # the pool, in the call's layout
    values: Any
    scale: Any  # float32: what dots are multiplied by, as `Rows.queries` gives it
    token: Any  # int32 [J, R]: which query token of its sequence a row is; None: the first
    slopes: Any  # float32 [K, J, R]
    sight: spec.Sight  # of `fragments.sight_inputs`
    cap: Any  # float32 [1]


def _inputs(rows: query_rows.Rows, planned: plan.Plan) -> Inputs:
    """The arrays that the kernel is called with."""
    call, operands = rows.call, rows.operands
    queries, scales = rows.queries()
    keys, values = pools.arrays(call, operands)
    shape = (rows.blocks, rows.tiles.row_block)
    token = None
    if rows.span > 1:
        token = (jnp.arange(math.prod(shape), dtype=jnp.int32) // call.group).reshape(shape)
    return Inputs(
        planned.numbers,
        operands.block_tables,
        queries,
        keys,
        values,
        scale=scales,
        token=token,
        slopes=jax.tree.map(lambda x: query_rows.by_row(x, call, *shape), operands.alibi_slopes),
        sight=fragments.sight_inputs(call, operands),
        cap=jax.tree.map(lambda x: x[None], operands.logits_soft_cap),
    )


def _kernel(rows: query_rows.Rows, planned: plan.Plan) -> merge.Splits:
    """Return every split's partial result, in `items + C` places."""
    call, tiles, row_blocks = rows.call, rows.tiles, rows.blocks
    places = call.num_seqs * call.num_kv_heads * row_blocks + planned.grid
    inputs = _inputs(rows, planned)

    def body(ins: Inputs, acc: Any, ml: Any, bad: Any, refs: dict[str, Any]) -> None:
        facts = plan.Plan(ins.plan, call.num_seqs, planned.grid)
        block = Block(call, tiles, row_blocks, facts, ins)
        thread = lax.axis_index("thread")

        @pl.when(thread < tiles.consumers)
        def _() -> None:
            _consume(block, 0 if tiles.consumers == 1 else thread, acc, ml, refs)

        @pl.when(thread == tiles.consumers)
        def _() -> None:
            _produce(block, bad, refs)

    struct = jax.ShapeDtypeStruct
    declared = tiles.scratch(call.key_format.value_dtype, inputs.queries.dtype)
    arrivals = query_rows.boxes(call, tiles)[0] or tiles.consumers
    acc, ml, bad = mgpu.launch(
        body,
        inputs,
        out_type=(
            struct((places, tiles.stored_rows, tiles.row_block), jnp.float32),
            struct((places, 2, tiles.row_block), jnp.float32),
            struct((places,), jnp.int32),
        ),
        name="jattn_decode",
        declared=declared | {"q_full": scratch.Barriers(2, arrivals)},
        grid=(planned.grid,),
        grid_names=("block",),
        num_threads=tiles.consumers + 1,
        thread_name="thread",
        auto_barriers=tiles.narrow,  # as in prefill
    )
    return merge.Splits(ml, acc, bad)


class Split(typing.NamedTuple):
    """A run of one item's tiles that this grid block takes. int32 scalars."""

    seq: jax.Array
    kv_head: jax.Array
    row_block: jax.Array
    first: jax.Array  # the run's first tile, counted within the item
    num_tiles: jax.Array
    done: jax.Array  # tiles this grid block has seen before
    number: jax.Array  # splits this grid block has seen before
    place: jax.Array  # where its partial result goes


class Block(typing.NamedTuple):
    """The work of a grid block."""

    call: calls.Call
    tiles: tiling.DecodeTiles
    row_blocks: int  # J
    facts: plan.Plan
    inputs: Inputs

    def visit_splits(self, visit: Callable[[Split], None]) -> tuple[jax.Array, jax.Array]:
        """Call `visit` with every split of this grid block; return how many tiles and splits."""
        facts, kv_heads = self.facts, self.call.num_kv_heads
        block = lax.axis_index("block")
        start = block * facts.share
        end = jnp.minimum(start + facts.share, facts.total)

        def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            at, seq, number = state
            tiles, live = facts[seq, Fact.TILES], facts[seq, Fact.ROW_BLOCKS]
            within = at - facts[seq, Fact.START]
            item = lax.div(within, tiles)
            first = within - item * tiles
            count = jnp.minimum(tiles - first, end - at)
            kv_head = lax.div(item, live)
            row_block = item - kv_head * live
            place = (seq * kv_heads + kv_head) * self.row_blocks + row_block + block
            visit(Split(seq, kv_head, row_block, first, count, at - start, number, place))
            last = within + count == tiles * live * kv_heads
            return at + count, jnp.where(last, facts[seq, Fact.NEXT], seq), number + 1

        state = (start, facts.first_seq(block), jnp.int32(0))
        _, _, splits = lax.while_loop(lambda state: state[0] < end, step, state)
        return jnp.maximum(end - start, 0), splits


def _registers(tiles: tiling.DecodeTiles) -> tuple[int, int] | None:
    """Registers of a thread that computes and of one that copies; None if ptxas may choose."""
    return PAIRED_REGISTERS if tiles.consumers > 1 else SHARED_REGISTERS.get(tiles.blocks_per_core)


def _produce(block: Block, bad: Any, refs: dict[str, Any]) -> None:
    """The warpgroup that keeps the ring filled and reports splits that met an invalid block id."""
    if (registers := _registers(block.tiles)) is not None:
        mgpu.set_max_registers(registers[1], action="decrease")
    producer = Producer(block, bad, refs)
    producer.drain(*block.visit_splits(producer.visit))


@dataclasses.dataclass(frozen=True)
class Producer:
    """The copies of a grid block.

    | fills | once it has waited for | and the copies arrive on |
    |---|---|---|
    | q[split % 2] | q_empty[split % 2] | q_full[split % 2] |
    | ring[use % ring] | empty[use % ring] | full[use % ring] |

    where a use is a chunk of a tile of K or V, counted over all splits.

    Attributes:
      block: the grid block.
      bad: int32 [places], in global memory: not 0 where a split met an invalid block id.
      refs: shared memory.
    """

    block: Block
    bad: Any
    refs: dict[str, Any]

    @property
    def chunks(self) -> list[tuple[Any, Any]]:
        """`(pool, columns)` of the chunks of a tile, in the order in which they are used."""
        tiles, ins = self.block.tiles, self.block.inputs
        value = pools.first_value_column(self.block.call)
        return [
            *((ins.keys, pl.ds(c * tiles.chunk, tiles.chunk)) for c in range(tiles.key_chunks)),
            *(
                (ins.values, pl.ds(value + c * tiles.chunk, tiles.chunk))
                for c in range(tiles.value_chunks)
            ),
        ]

    def visit(self, split: Split) -> None:
        """Issue all copies of a split."""
        which = lax.rem(split.number, 2)

        @pl.when(split.number >= 2)
        def _() -> None:
            mgpu.barrier_wait(self.refs["q_empty"].at[which])

        if query_rows.boxes(self.block.call, self.block.tiles)[0]:
            self.copy_boxes(split, which)
        else:
            self.copy_rows(split, which)
        base = self.block.facts[split.seq, Fact.BASE]
        last_key = self.block.facts[split.seq, Fact.LAST_KEY]

        def step(i: jax.Array, bad: jax.Array) -> jax.Array:
            tile_start = base + (split.first + i) * TILE
            where, bad = self.kernel_blocks(split, tile_start, last_key, bad)
            for c, chunk in enumerate(self.chunks):
                use = (split.done + i) * len(self.chunks) + c
                self.copy_chunk(split, where, chunk, use)
            return bad

        self.bad[split.place] = lax.fori_loop(0, split.num_tiles, step, jnp.int32(0))

    def copy_boxes(self, split: Split, which: jax.Array) -> None:
        """Copy the split's queries from where they are: of every token the heads that are rows."""
        call, tiles, facts = self.block.call, self.block.tiles, self.block.facts
        count, height = query_rows.boxes(call, tiles)
        for i in range(count):
            first = split.row_block * tiles.row_block + i * height
            index = lax.div(first, jnp.int32(call.group))
            # A missing token is replaced by the last one.
            index = jnp.minimum(index, facts[split.seq, Fact.QUERIES] - 1)
            head = split.kv_head * call.group + lax.rem(first, jnp.int32(call.group))
            w, row = divmod(i * height, tiles.rows)
            mgpu.copy_gmem_to_smem(
                self.block.inputs.queries.at[
                    facts[split.seq, Fact.TOKEN] + index, pl.ds(head, height)
                ],
                self.refs["q_s"].at[which, w, pl.ds(row, height)],
                self.refs["q_full"].at[which],
            )

    def copy_rows(self, split: Split, which: jax.Array) -> None:
        """Copy the split's gathered queries: one copy for each consumer."""
        for w in range(self.block.tiles.consumers):
            rows = pl.ds(w * self.block.tiles.rows, self.block.tiles.rows)
            query = self.block.inputs.queries.at[split.seq, split.kv_head, split.row_block, rows]
            mgpu.copy_gmem_to_smem(
                query, self.refs["q_s"].at[which, w], self.refs["q_full"].at[which]
            )

    def kernel_blocks(
        self, split: Split, tile_start: jax.Array, last_key: jax.Array, bad: jax.Array
    ) -> tuple[list[tuple[jax.Array, Any]], jax.Array]:
        """`(block, tokens)` of a tile's kernel blocks; and `bad` with their ids checked.

        A kernel block past the visible keys is read as the last of them: a table entry there may be
        anything. Its keys are masked and its values zeroed.
        """
        call, size = self.block.call, self.block.tiles.kernel_block
        found = []
        for j in range(TILE // size):
            position = tile_start + j * size
            position = jnp.minimum(position, last_key)
            block = lax.div(position, call.block_size)
            first = lax.div(position - block * call.block_size, size) * size
            given = self.block.inputs.tables[split.seq, block]
            block = jnp.minimum(jnp.maximum(given, 0), call.num_blocks - 1)
            bad = bad | (given ^ block)
            found.append((block, pl.ds(pl.multiple_of(first, size), size)))
        return found, bad

    def copy_chunk(
        self,
        split: Split,
        where: list[tuple[jax.Array, Any]],
        chunk: tuple[Any, Any],
        use: jax.Array,
    ) -> None:
        """Copy a chunk of a tile to its stage of the ring, with a copy for every kernel block."""
        (pool, columns), size = chunk, self.block.tiles.kernel_block
        stage = lax.rem(use, self.block.tiles.ring)

        @pl.when(use >= self.block.tiles.ring)
        def _() -> None:
            mgpu.barrier_wait(self.refs["empty"].at[stage])

        for j, (block, tokens) in enumerate(where):
            tile = pools.copy_source(self.block.call, pool, block, split.kv_head, tokens, columns)
            there = self.refs["ring_s"].at[stage, pl.ds(j * size, size)]
            mgpu.copy_gmem_to_smem(tile, there, self.refs["full"].at[stage])

    def drain(self, tiles: jax.Array, splits: jax.Array) -> None:
        """Wait for the consumers' last arrivals: the block may not end before all have come.

        Args:
          tiles, splits: how many there were.
        """
        ring, uses = self.block.tiles.ring, tiles * len(self.chunks)

        @pl.loop(jnp.maximum(uses - ring, 0), uses)
        def _drain_ring(use: jax.Array) -> None:
            mgpu.barrier_wait(self.refs["empty"].at[lax.rem(use, ring)])

        @pl.loop(jnp.maximum(splits - 2, 0), splits)
        def _drain_queries(number: jax.Array) -> None:
            mgpu.barrier_wait(self.refs["q_empty"].at[lax.rem(number, 2)])


def _consume(block: Block, w: jax.Array | int, acc: Any, ml: Any, refs: dict[str, Any]) -> None:
    """A warpgroup that computes: the rows of consumer w."""
    tiles = block.tiles
    if (registers := _registers(tiles)) is not None:
        mgpu.set_max_registers(registers[0], action="increase")
    first = 0 if tiles.consumers == 1 else pl.multiple_of(w * tiles.rows, tiles.rows)
    consumer = Consumer(block, w, pl.ds(first, tiles.rows), acc, ml, refs)
    if tiles.consumers > 1:
        pl.when(w == 1)(lambda: mgpu.barrier_arrive(refs["turn"].at[0]))
    block.visit_splits(consumer.visit)
    if tiles.consumers > 1:
        pl.when(w == 0)(lambda: mgpu.barrier_wait(refs["turn"].at[0]))


class Keys(typing.NamedTuple):
    """Positions of a sequence's keys. int32 scalars."""

    base: jax.Array  # where its first tile begins
    first: jax.Array  # that any query sees
    last: jax.Array


@dataclasses.dataclass(frozen=True)
class Consumer:
    """The part of every split that one warpgroup computes.

    | reads | once it has waited for | and hands back by |
    |---|---|---|
    | q[split % 2] | q_full[split % 2] | q_empty[split % 2], after the split's last tile |
    | ring[use % ring], 16 bits | full[use % ring] | empty[use % ring], after the products |
    | ring[use % ring], fp8 | full[use % ring] | empty[use % ring], once it is widened |

    Attributes:
      block: the grid block.
      w: which consumer.
      mine: its rows among the R of an item, a slice.
      acc, ml: partial results in global memory, as in `merge.Splits`.
      refs: shared memory.
    """

    block: Block
    w: jax.Array | int
    mine: Any
    acc: Any
    ml: Any
    refs: dict[str, Any]

    @property
    def shape(self) -> fragments.Shape:
        """Of S^T."""
        return TILE, self.block.tiles.rows

    def visit(self, split: Split) -> None:
        """Compute all tiles of a split and write its partial result."""
        tiles, facts = self.block.tiles, self.block.facts
        which = lax.rem(split.number, 2)
        keys = Keys(
            facts[split.seq, Fact.BASE],
            facts[split.seq, Fact.FIRST_KEY],
            facts[split.seq, Fact.LAST_KEY],
        )
        mgpu.barrier_wait(self.refs["q_full"].at[which])

        def step(i: jax.Array, state: Any) -> Any:
            return self.step(split, which, keys, i, state)

        # The sum stays spread over a tile's keys until the end of the split.
        shapes = [(part.rows, tiles.rows) for part in tiles.parts]
        m, _, l, *acc = SOFTMAX.empty(tiles.rows, self.shape, *shapes)
        acc, m, l = lax.fori_loop(0, split.num_tiles, step, (tuple(acc), m, l))
        mgpu.barrier_arrive(self.refs["q_empty"].at[which])
        self.write(split, m, l, acc)

    def step(self, split: Split, which: jax.Array, keys: Keys, i: jax.Array, state: Any) -> Any:
        """Compute tile i of a split, whose queries are q[which]; `state` is `(acc, m, l)`."""
        acc, m, l = state
        tiles, p_s = self.block.tiles, self.refs["p_s"].at[self.w]
        use = (split.done + i) * (tiles.key_chunks + tiles.value_chunks)
        dots = self.dots(which, use)
        tile_start = keys.base + (split.first + i) * TILE
        logits = self.logits(split, dots, tile_start)
        m_new = self.in_turn(functools.partial(SOFTMAX.maxima, m, logits))
        shrink, p = SOFTMAX.shrink(m, m_new), SOFTMAX.weights(logits, m_new)
        l = SOFTMAX.rescale(l, shrink) + p
        p_s.T[...] = p.astype(p_s.dtype)
        mgpu.commit_smem()
        edge = (tile_start < keys.first) | (tile_start + TILE - 1 > keys.last)
        new: list[jax.Array] = []
        for c in range(tiles.value_chunks):
            stage = lax.rem(use + tiles.key_chunks + c, tiles.ring)
            mgpu.barrier_wait(self.refs["full"].at[stage])
            value = self.widened(stage, c % 2) if tiles.narrow else self.refs["ring_s"].at[stage]
            zero = functools.partial(self.zero_unseen, value, tile_start, keys)
            if tiles.consumers > 1:
                zero = functools.partial(self.zero_together, zero, stage)
            pl.when(edge)(zero)
            for old, part in zip(acc, tiles.parts, strict=True):
                if part.chunk == c:
                    gained = self.weigh(value, part)
                    new.append(SOFTMAX.rescale(old, shrink) + gained)
            if not tiles.narrow:
                mgpu.barrier_arrive(self.refs["empty"].at[stage])
        return tuple(new), m_new, l

    def dots(self, which: jax.Array, use: jax.Array) -> jax.Array:
        """K Q^T [TILE, R] of a tile, the chunks of K one after the other."""
        tiles, refs = self.block.tiles, self.refs

        def product(acc_ref: Any, c: jax.Array | int, first: jax.Array | int) -> None:
            stage = lax.rem(use + c, tiles.ring)
            mgpu.barrier_wait(refs["full"].at[stage])
            if tiles.narrow:
                mgpu.wgmma_wait(1)
                key = self.widened(stage, lax.rem(c, 2))
            else:
                key = refs["ring_s"].at[stage]
            query = refs["q_s"].at[which, self.w, :, pl.ds(first, tiles.chunk)]
            mgpu.wgmma(acc_ref, key, query.T)

        def products(acc_ref: Any) -> jax.Array:
            if tiles.key_chunks == 1:
                product(acc_ref, 0, 0)
            else:
                # A loop, not unrolled: the addresses of all of Q would stay in registers.
                @pl.loop(0, tiles.key_chunks)
                def _(c: jax.Array) -> None:
                    product(acc_ref, c, pl.multiple_of(c * tiles.chunk, tiles.chunk))

            return acc_ref[...]

        dots = pl.run_scoped(products, mgpu.ACC(self.shape, jnp.float32))
        if not tiles.narrow:
            for c in range(tiles.key_chunks):
                mgpu.barrier_arrive(refs["empty"].at[lax.rem(use + c, tiles.ring)])
        return dots

    def widened(self, stage: jax.Array, which: jax.Array | int) -> Any:
        """Widen a stage of the ring from fp8 to float16, into one of two buffers, and free it."""
        tiles, wide = self.block.tiles, self.refs["wide_s"].at[which]
        fp8.widen(self.refs["ring_s"].at[stage], wide, max(tiles.swizzle // 2, tiles.ring_swizzle))
        mgpu.barrier_arrive(self.refs["empty"].at[stage])
        return wide

    def in_turn(self, reduce: Callable[[], jax.Array]) -> jax.Array:
        """Run `reduce` in one consumer after the other, 0 first."""
        if self.block.tiles.consumers == 1:
            return reduce()
        mgpu.barrier_wait(self.refs["turn"].at[self.w])
        found = reduce()
        mgpu.barrier_arrive(self.refs["turn"].at[1 - self.w])
        return found

    def logits(self, split: Split, dots: jax.Array, tile_start: jax.Array) -> jax.Array:
        """Logits of a tile's dots, -inf where a query does not see the key.

        What they depend on is read for every tile, which is cheaper than keeping it in registers.
        """
        call, facts, ins, shape = self.block.call, self.block.facts, self.block.inputs, self.shape
        seq, item_rows = split.seq, (split.kv_head, split.row_block, self.mine)
        k_pos = fragments.positions(shape, 0, tile_start)
        is_causal = facts[seq, Fact.IS_CAUSAL] if call.is_causal is None else call.is_causal
        sight = fragments.sight(ins.sight, is_causal)
        cap = ins.cap[0] if "logits_soft_cap" in call.options else None
        q_pos = facts[seq, Fact.FIRST_QUERY]
        if ins.token is not None:
            token = fragments.vector(ins.token.at[split.row_block, self.mine], 1)
            q_pos = fragments.along(token + q_pos, shape, 1)
        if ins.scale.ndim == 1:
            scale = ins.scale[split.kv_head if ins.scale.size > 1 else 0]
        else:
            scale = fragments.along(fragments.vector(ins.scale.at[(seq, *item_rows)], 1), shape, 1)
        slopes = None
        if "alibi_slopes" in call.options:
            slopes = fragments.along(fragments.vector(ins.slopes.at[item_rows], 1), shape, 1)
        logits = spec.transform_logits(
            dots,
            scale=scale,
            logits_soft_cap=cap,
            alibi_slopes=slopes,
            q_pos=q_pos,
            k_pos=k_pos,
        )
        seen = fragments.visible(q_pos, k_pos, facts[seq, Fact.SEQ_LEN], sight)
        return jnp.where(seen, logits, -jnp.inf)

    def zero_unseen(self, value: Any, tile_start: jax.Array, keys: Keys) -> None:
        """Zero the rows of V that no query sees, in a loop over columns.

        It is rare, and not worth registers.
        """
        wide = self.block.tiles.swizzle // 2

        @pl.loop(0, self.block.tiles.chunk // wide)
        def _(i: jax.Array) -> None:
            columns = pl.ds(pl.multiple_of(i * wide, wide), wide)
            token = fragments.positions((TILE, wide), 0, tile_start)
            keep = (token >= keys.first) & (token <= keys.last)
            old = mgpu.load(value.at[:, columns], mgpu.WGMMA)
            value[:, columns] = jnp.where(keep, old, jnp.zeros_like(old))

        mgpu.commit_smem()

    def zero_together(self, zero: Callable[[], None], stage: jax.Array) -> None:
        """The first consumer zeroes and the second waits for it.

        Every stage has a barrier for this, and is not filled again before both have passed it.
        """

        @pl.when(self.w == 0)
        def _() -> None:
            zero()
            mgpu.barrier_arrive(self.refs["clean"].at[stage])

        @pl.when(self.w > 0)
        def _() -> None:
            mgpu.barrier_wait(self.refs["clean"].at[stage])

    def weigh(self, value: Any, part: tiling.Part) -> jax.Array:
        """V^T P^T of a part."""
        p_s = self.refs["p_s"].at[self.w]

        def product(acc_ref: Any) -> jax.Array:
            mgpu.wgmma(acc_ref, value.at[:, pl.ds(part.first, part.rows)].T, p_s.T)
            return acc_ref[...]

        shape = (part.rows, self.block.tiles.rows)
        return pl.run_scoped(product, mgpu.ACC(shape, jnp.float32))

    def write(self, split: Split, m: jax.Array, l: jax.Array, acc: list[jax.Array]) -> None:
        """Write the split's partial result to its place, the parts of acc through two buffers."""
        o_s, ml_s = self.refs["o_s"].at[self.w], self.refs["ml_s"].at[self.w]
        ml_s[0] = m
        ml_s[1] = self.in_turn(lambda: l.sum(axis=0))
        mgpu.commit_smem()
        mgpu.copy_smem_to_gmem(ml_s, self.ml.at[split.place, :, self.mine])
        for i, (part, rows_of_part) in enumerate(zip(self.block.tiles.parts, acc, strict=True)):
            there = o_s.at[i % 2, pl.ds(0, part.rows)]
            if i >= 2:
                mgpu.wait_smem_to_gmem(1, wait_read_only=True)
            there[...] = rows_of_part
            mgpu.commit_smem()
            place = self.acc.at[split.place, pl.ds(part.place, part.rows), self.mine]
            mgpu.copy_smem_to_gmem(there, place)
        mgpu.wait_smem_to_gmem(0)
