r"""Decode on Mosaic GPU: sequences with 1 to 8 query tokens, bound by the reading of K and V.

For a block of R rows (query token, head of the group) of one sequence and one KV head, over tiles
of 64 keys, with queries as columns ("swap-AB": the 64 rows that `wgmma` wants are keys, of which
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

One consumer has all rows, or two have half of them each, and compute the same things of the same
keys. A number for each row, over the four warps' keys, is reduced through memory that Mosaic gives
the whole block once, so two take turns at that.

Who holds what:
    ring[u]   producer from empty[u] until its copies have arrived on full[u], then the consumers;
              K and V take turns in it, and it runs on from one split into the next
    q[i]      the same with q_full[i], q_empty[i]; two, so that the next split's is under way
    p, out    each consumer its own

Slots that no sequence owns may hold NaN. A row of K is a row of S^T and is masked there; the rows
of V are summed over, so a tile that reaches past the visible keys has those rows of V zeroed before
its product, by the first consumer, for which the second waits at clean[u]. A copy never reads a
table entry past the visible keys, and an id is clamped into the pool. fp8 is read as it is stored
and widened to float16 by the consumer: in the stage, one chunk at a time (sm_90 turns e4m3 into
float16 in one instruction, into bfloat16 in many).
"""

from __future__ import annotations

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
from jattn.integers import ceil_div
from jattn.pallas.mosaic_gpu import compat as mgpu
from jattn.pallas.mosaic_gpu import fp8, fragments, scratch
from jattn.pallas.mosaic_gpu.decode import merge, plan
from jattn.pallas.mosaic_gpu.decode import tiles as tiling
from jattn.pallas.mosaic_gpu.decode.plan import Fact

TILE = tiling.TILE
# A query is a column of S^T. A row that has seen nothing yet has its maximum at -inf.
SOFTMAX = fragments.Online(axis=1, exp=jnp.exp, floor=-np.inf)
# A multiprocessor has 65536: two blocks of 256 threads run on one where a thread has 128, four
# where it has 64. Naming the number makes ptxas keep to it; left alone, it takes up to 255 because
# it can.
SHARED_REGISTERS = {2: (128, 80), 4: (64, 56)}  # of a consumer and of a producer
PAIRED_REGISTERS = (232, 40)  # where two consumers and a producer have one to themselves


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
    tile = tiling.pick(call, span)
    dtype = scratch.compute_dtype(call)
    row_blocks = ceil_div(span * call.group, tile.row_block)
    grid = mgpu.num_cores() * tile.blocks_per_core
    planned = plan.make(
        call,
        operands,
        counts,
        tile=TILE,
        kernel_block=tile.kernel_block,
        row_block=tile.row_block,
        grid=grid,
        min_share=tile.min_share,
    )
    queries, scales = _query_rows(call, operands, counts, row_blocks, tile, dtype)
    splits = _kernel(call, operands, planned, queries, scales, tile, span)
    in_place = others is None and call.group % 8 == 0 and tile.stored_rows == call.value_dim
    done = merge.run(call, operands, planned, SOFTMAX, splits, row_blocks, in_place)
    if in_place:
        return done
    if others is None:
        if not call.ragged:
            return _all_rows(call, *done, tile)
        tokens, starts = jnp.arange(call.num_tokens, dtype=jnp.int32), operands.query_start_loc
        b = jnp.searchsorted(starts, tokens, side="right", method="scan_unrolled")
        b = jnp.clip(b.astype(jnp.int32) - 1, 0, call.num_seqs - 1)
        return _rows(call, operands, counts, done, tile, b, tokens)

    def scattered(others: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        b, index = jnp.divmod(jnp.arange(call.num_seqs * span, dtype=jnp.int32), span)
        token = operands.query_start_loc[b] + index
        out, lse = _rows(call, operands, counts, done, tile, b, token)
        where = jnp.where(index < counts[b], token, call.num_tokens)
        return others[0].at[where].set(out, mode="drop"), others[1].at[where].set(lse, mode="drop")

    return lax.cond(jnp.any(counts > 0), scattered, lambda others: others, others)


def _query_rows(
    call: calls.Call,
    operands: calls.Operands,
    counts: jax.Array,
    row_blocks: int,
    tile: tiling.DecodeTiles,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Rows [B, K, J, R, D] of the kernel's dtype, and what to multiply their dots by.

    That is [B, K, J, R] where rows are narrowed, each by a number of its own, and otherwise [K], or
    [1] for all. Row `r` of a sequence and a KV head is query token `r // G`, head `r % G` of the
    group; those it does not have are zeros. Where the kernel copies rows from where they are
    (`_boxes`), the queries as they come.
    """
    kv_heads, group, row_block = call.num_kv_heads, call.group, tile.row_block
    scales = operands.scale[None]
    if operands.k_scale is not None:
        scales = scales * operands.k_scale
    if _boxes(call, tile)[0]:
        return operands.query, scales
    rows = jnp.arange(row_blocks * row_block, dtype=jnp.int32)
    token = rows // group
    at = operands.query_start_loc[:-1, None] + token[None]
    live = token[None] < counts[:, None]
    queries = operands.query.reshape(call.num_tokens, kv_heads, group, call.head_dim)
    at = jnp.where(live, at, 0)
    queries = queries.at[at, :, (rows % group)[None]].get(mode="clip")  # [B, rows, K, D]
    queries = jnp.where(live[:, :, None, None], queries, jnp.zeros_like(queries)).swapaxes(1, 2)
    shape = (call.num_seqs, kv_heads, row_blocks, row_block)
    if queries.dtype != dtype:
        queries, power = fp8.narrowed(queries, dtype)
        scales = (scales[None, :, None] * power).reshape(shape)
    return queries.reshape(*shape, call.head_dim), scales


def _boxes(call: calls.Call, tile: tiling.DecodeTiles) -> tuple[int, int]:
    """How many copies bring an item's rows from the queries [T, H, D], and the rows of each.

    (0, 0) where they are gathered first: a copy's rows in shared memory are a multiple of 8, and
    queries in another dtype are narrowed.
    """
    size = math.gcd(call.group, tile.rows)
    if size % 8 or call.query_dtype != str(scratch.compute_dtype(call)):
        return 0, 0
    return tile.row_block // size, size


def _columns(call: calls.Call, out: jax.Array, tile: tiling.DecodeTiles) -> jax.Array:
    """`out` [..., V] of what the kernels stored, some columns perhaps twice."""
    if tile.stored_rows == call.value_dim:
        return out
    return out[..., np.asarray(tile.row_of_value)]


def _all_rows(
    call: calls.Call, out: jax.Array, lse: jax.Array, tile: tiling.DecodeTiles
) -> tuple[jax.Array, jax.Array]:
    """`out` [T, H, V] and `lse` [T, H] where each sequence has one token: the rows as they lie."""
    heads = (call.num_seqs, call.num_kv_heads, -1)
    out = _columns(call, out, tile).reshape(*heads, call.value_dim)[:, :, : call.group]
    lse = lse.reshape(heads)[:, :, : call.group]
    shape = (call.num_tokens, call.num_heads)
    return out.reshape(*shape, call.value_dim), lse.reshape(shape)


def _rows(
    call: calls.Call,
    operands: calls.Operands,
    counts: jax.Array,
    done: tuple[jax.Array, jax.Array],
    tile: tiling.DecodeTiles,
    b: jax.Array,
    tokens: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`out` [n, H, V] and `lse` [n, H] for tokens [n] of sequences `b` [n], of finished rows.

    Zeros and -inf for tokens that are not among the `counts` of their sequence, and NaN for those
    of one that breaks a promise, which may be more than the kernels have rows for.
    """
    group, row_block = call.group, tile.row_block
    out, lse = _columns(call, done[0], tile), done[1]
    index = tokens - operands.query_start_loc[b]
    real = (tokens < operands.query_start_loc[-1])[:, None, None]
    mine = real & (index < counts[b])[:, None, None]
    index = jnp.clip(index, 0, lse.shape[2] * row_block // group - 1)
    row = index[:, None, None] * group + jnp.arange(group, dtype=jnp.int32)[None, None]
    kv_head = jnp.arange(call.num_kv_heads, dtype=jnp.int32)[None, :, None]
    where = (b[:, None, None], kv_head, row // row_block, row % row_block)
    broken = real & (operands.seq_lens[b] < 0)[:, None, None]
    absent = jnp.where(broken, jnp.float32(jnp.nan), jnp.float32(0))
    mine = mine & ~broken
    out = jnp.where(mine[..., None], out[where], absent[..., None].astype(out.dtype))
    lse = jnp.where(mine, lse[where], absent - jnp.float32(jnp.inf))
    shape = (tokens.size, call.num_heads)
    return out.reshape(*shape, call.value_dim), lse.reshape(shape)


class Inputs(typing.NamedTuple):
    """The kernel's inputs, as arrays outside it and as refs inside; None for absent ones."""

    plan: Any
    tables: Any  # int32 [B, M]
    queries: Any  # [B, K, J, R, D], or the call's [T, H, D]
    keys: Any  # the pool, in the call's layout
    values: Any
    scale: Any  # float32: what dots are multiplied by, as `_query_rows` gives it
    token: Any  # int32 [J, R]: which query token of its sequence a row is; None: the first
    slope: Any  # float32 [K, J, R]
    window: Any  # int32 [1]
    cap: Any  # float32 [1]


def _kernel(
    call: calls.Call,
    operands: calls.Operands,
    planned: plan.Plan,
    queries: jax.Array,
    scales: jax.Array,
    tile: tiling.DecodeTiles,
    span: int,
) -> merge.Splits:
    """Every split's state, of `items + C` places."""
    num_seqs, kv_heads, rows = call.num_seqs, call.num_kv_heads, tile.row_block
    row_blocks = ceil_div(span * call.group, rows)
    places = num_seqs * kv_heads * row_blocks + planned.grid
    stored, dtype = call.key_format.value_dtype, queries.dtype
    assert operands.value_cache is not None, "the row refuses values that are part of keys"
    which = jnp.arange(row_blocks * rows, dtype=jnp.int32)
    slopes = None
    if operands.alibi_slopes is not None:
        group = operands.alibi_slopes.reshape(kv_heads, call.group)
        slopes = group[:, which % call.group].reshape(kv_heads, row_blocks, rows)
    window, cap = operands.sliding_window, operands.logits_soft_cap
    inputs = Inputs(
        planned.numbers,
        operands.block_tables,
        queries,
        call.key_format.decode(operands.key_cache),
        call.value_format.decode(operands.value_cache),
        scale=scales,
        token=None if span == 1 else (which // call.group).reshape(row_blocks, rows),
        slope=slopes,
        window=None if window is None else window[None],
        cap=None if cap is None else cap[None],
    )

    def body(ins: Inputs, acc: Any, ml: Any, bad: Any, refs: dict[str, Any]) -> None:
        facts = plan.Plan(ins.plan, num_seqs, planned.grid)
        walk = functools.partial(_splits, facts, kv_heads, row_blocks)
        thread = lax.axis_index("thread")

        @pl.when(thread < tile.consumers)
        def _() -> None:
            w = 0 if tile.consumers == 1 else thread
            _consume(call, tile, walk, facts, ins, w, acc, ml, refs)

        @pl.when(thread == tile.consumers)
        def _() -> None:
            _produce(call, tile, walk, facts, ins, bad, refs)

    struct = jax.ShapeDtypeStruct
    acc, ml, bad = mgpu.launch(
        body,
        inputs,
        out_type=(
            struct((places, tile.stored_rows, rows), jnp.float32),
            struct((places, 2, rows), jnp.float32),
            struct((places,), jnp.int32),
        ),
        name="jattn_decode",
        declared=tile.scratch(stored, dtype)
        | {"q_full": scratch.Barriers(2, _boxes(call, tile)[0] or tile.consumers)},
        grid=(planned.grid,),
        grid_names=("block",),
        num_threads=tile.consumers + 1,
        thread_name="thread",
        auto_barriers=tile.stored_bytes == 1,  # as in prefill
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
    place: jax.Array  # where its state goes


def _splits(
    facts: plan.Plan,
    kv_heads: int,
    row_blocks: int,
    visit: Callable[[Split], None],
) -> tuple[jax.Array, jax.Array]:
    """Call `visit` with every split of this grid block; returns its tiles and its splits."""
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
        place = (seq * kv_heads + kv_head) * row_blocks + row_block + block
        visit(Split(seq, kv_head, row_block, first, count, at - start, number, place))
        last = within + count == tiles * live * kv_heads
        return at + count, jnp.where(last, facts[seq, Fact.NEXT], seq), number + 1

    state = (start, facts.first_seq(block), jnp.int32(0))
    _, _, splits = lax.while_loop(lambda state: state[0] < end, step, state)
    return jnp.maximum(end - start, 0), splits


def _registers(tile: tiling.DecodeTiles) -> tuple[int, int] | None:
    """Of a thread that computes and one that copies, or None for what ptxas takes."""
    return PAIRED_REGISTERS if tile.consumers > 1 else SHARED_REGISTERS.get(tile.blocks_per_core)


def _produce(
    call: calls.Call,
    tile: tiling.DecodeTiles,
    walk: Callable[..., tuple[jax.Array, jax.Array]],
    facts: plan.Plan,
    ins: Inputs,
    bad_g: Any,
    refs: dict[str, Any],
) -> None:
    """The warpgroup that keeps the ring filled, and says which splits met an id of no block."""
    q_s, ring_s = refs["q_s"], refs["ring_s"]
    q_full, q_empty, full, empty = (refs[n] for n in ("q_full", "q_empty", "full", "empty"))
    if (registers := _registers(tile)) is not None:
        mgpu.set_max_registers(registers[1], action="decrease")
    size = tile.kernel_block
    chunks = [
        (source, pl.ds(c * tile.chunk, tile.chunk))
        for source, count in ((ins.keys, tile.key_chunks), (ins.values, tile.value_chunks))
        for c in range(count)
    ]

    def fetch_queries(split: Split, which: jax.Array) -> None:
        count, height = _boxes(call, tile)
        for i in range(count):
            first = split.row_block * tile.row_block + i * height
            index = lax.div(first, jnp.int32(call.group))
            # A token that is not there is the last one again.
            index = jnp.minimum(index, facts[split.seq, Fact.QUERIES] - 1)
            head = split.kv_head * call.group + lax.rem(first, jnp.int32(call.group))
            w, row = divmod(i * height, tile.rows)
            mgpu.copy_gmem_to_smem(
                ins.queries.at[facts[split.seq, Fact.TOKEN] + index, pl.ds(head, height)],
                q_s.at[which, w, pl.ds(row, height)],
                q_full.at[which],
            )
        if count:
            return
        for w in range(tile.consumers):
            rows = pl.ds(w * tile.rows, tile.rows)
            query = ins.queries.at[split.seq, split.kv_head, split.row_block, rows]
            mgpu.copy_gmem_to_smem(query, q_s.at[which, w], q_full.at[which])

    def visit(split: Split) -> None:
        which = lax.rem(split.number, 2)

        @pl.when(split.number >= 2)
        def _() -> None:
            mgpu.barrier_wait(q_empty.at[which])

        fetch_queries(split, which)
        base = facts[split.seq, Fact.BASE]
        last_key = facts[split.seq, Fact.LAST_KEY]

        def step(i: jax.Array, bad: jax.Array) -> jax.Array:
            where = []
            for j in range(TILE // size):
                # A kernel block past the visible keys is read as the last of them: a table entry
                # there may be anything. Its keys are masked and its values zeroed.
                position = base + (split.first + i) * TILE + j * size
                position = jnp.minimum(position, last_key)
                block = lax.div(position, call.block_size)
                first = lax.div(position - block * call.block_size, size) * size
                given = ins.tables[split.seq, block]
                block = jnp.minimum(jnp.maximum(given, 0), call.num_blocks - 1)
                bad = bad | (given ^ block)
                where.append((block, pl.ds(pl.multiple_of(first, size), size)))
            for c, (source, columns) in enumerate(chunks):
                use = (split.done + i) * len(chunks) + c
                slot = lax.rem(use, tile.ring)

                @pl.when(use >= tile.ring)
                def _(slot: jax.Array = slot) -> None:
                    mgpu.barrier_wait(empty.at[slot])

                for j, (block, tokens) in enumerate(where):
                    if call.kv_layout == "HND":
                        page = source.at[block, split.kv_head, tokens, columns]
                    else:
                        page = source.at[block, tokens, split.kv_head, columns]
                    there = ring_s.at[slot, pl.ds(j * size, size)]
                    mgpu.copy_gmem_to_smem(page, there, full.at[slot])
            return bad

        bad_g[split.place] = lax.fori_loop(0, split.num_tiles, step, jnp.int32(0))

    tiles, splits = walk(visit)
    # The consumer's last arrivals, so that no barrier ends with an arrival that was never awaited.
    uses = tiles * len(chunks)

    @pl.loop(jnp.maximum(uses - tile.ring, 0), uses)
    def _drain_ring(use: jax.Array) -> None:
        mgpu.barrier_wait(empty.at[lax.rem(use, tile.ring)])

    @pl.loop(jnp.maximum(splits - 2, 0), splits)
    def _drain_queries(number: jax.Array) -> None:
        mgpu.barrier_wait(q_empty.at[lax.rem(number, 2)])


def _consume(
    call: calls.Call,
    tile: tiling.DecodeTiles,
    walk: Callable[..., tuple[jax.Array, jax.Array]],
    facts: plan.Plan,
    ins: Inputs,
    w: jax.Array | int,
    o_g: Any,
    ml_g: Any,
    refs: dict[str, Any],
) -> None:
    """A warpgroup that computes: the rows of consumer w."""
    q_s, ring_s, p_s, o_s, ml_s = (refs[n] for n in ("q_s", "ring_s", "p_s", "o_s", "ml_s"))
    q_full, q_empty, full, empty = (refs[n] for n in ("q_full", "q_empty", "full", "empty"))
    stage_s: Any = refs.get("stage_s")  # for fp8 alone
    if (registers := _registers(tile)) is not None:
        mgpu.set_max_registers(registers[0], action="increase")
    rows = tile.rows
    p_s, o_s, ml_s = p_s.at[w], o_s.at[w], ml_s.at[w]
    mine = pl.ds(0 if tile.consumers == 1 else pl.multiple_of(w * rows, rows), rows)
    shape = (TILE, rows)
    keys, chunks = tile.key_chunks, tile.key_chunks + tile.value_chunks
    dtype = q_s.dtype

    def staged(slot: jax.Array, stage: jax.Array | int) -> Any:
        """fp8 in a place of the ring as float16 in the stage; the place is free again."""
        wide = max(tile.swizzle // 2, tile.ring_swizzle)

        fp8.widen(ring_s.at[slot], stage_s.at[stage], wide)
        mgpu.barrier_arrive(empty.at[slot])
        return stage_s.at[stage]

    def alone(reduce: Callable[[], jax.Array]) -> jax.Array:
        """Run `reduce` in one consumer after the other, 0 first."""
        if tile.consumers == 1:
            return reduce()
        mgpu.barrier_wait(refs["turn"].at[w])
        found = reduce()
        mgpu.barrier_arrive(refs["turn"].at[1 - w])
        return found

    def visit(split: Split) -> None:
        which = lax.rem(split.number, 2)
        seq = split.seq
        base, first_key = facts[seq, Fact.BASE], facts[seq, Fact.FIRST_KEY]
        last_key = facts[seq, Fact.LAST_KEY]
        where = (seq, split.kv_head, split.row_block)
        mgpu.barrier_wait(q_full.at[which])

        def step(i: jax.Array, state: Any) -> Any:
            acc, m, l = state
            use = (split.done + i) * chunks

            def product(acc_ref: Any, c: jax.Array | int, first: jax.Array | int) -> None:
                slot = lax.rem(use + c, tile.ring)
                mgpu.barrier_wait(full.at[slot])
                if stage_s is None:
                    key = ring_s.at[slot]
                else:
                    mgpu.wgmma_wait(1)
                    key = staged(slot, lax.rem(c, 2))
                mgpu.wgmma(acc_ref, key, q_s.at[which, w, :, pl.ds(first, tile.chunk)].T)

            def products(acc_ref: Any) -> jax.Array:
                if keys == 1:
                    product(acc_ref, 0, 0)
                else:
                    # A loop, not unrolled: the addresses of all of Q would stay in registers.
                    @pl.loop(0, keys)
                    def _(c: jax.Array) -> None:
                        product(acc_ref, c, pl.multiple_of(c * tile.chunk, tile.chunk))

                return acc_ref[...]

            dots = pl.run_scoped(products, mgpu.ACC(shape, jnp.float32))
            if stage_s is None:
                for c in range(keys):
                    mgpu.barrier_arrive(empty.at[lax.rem(use + c, tile.ring)])
            tile_start = base + (split.first + i) * TILE
            k_pos = fragments.positions(shape, 0, tile_start)
            # Read for every tile: cheaper than the registers they would stay in.
            is_causal = facts[seq, Fact.IS_CAUSAL] if call.is_causal is None else call.is_causal
            window = None if ins.window is None else ins.window[0]
            cap = None if ins.cap is None else ins.cap[0]
            q_pos = facts[seq, Fact.FIRST_QUERY]
            if ins.token is not None:
                token = fragments.vector(ins.token.at[split.row_block, mine], 1)
                q_pos = fragments.along(token + q_pos, shape, 1)
            if ins.scale.ndim == 1:
                scale = ins.scale[split.kv_head if ins.scale.size > 1 else 0]
            else:
                scale = fragments.along(fragments.vector(ins.scale.at[(*where, mine)], 1), shape, 1)
            slope = None
            if ins.slope is not None:
                slope = fragments.vector(ins.slope.at[(*where[1:], mine)], 1)
            logits = spec.transform_logits(
                dots,
                scale=scale,
                logits_soft_cap=cap,
                alibi_slopes=None if slope is None else fragments.along(slope, shape, 1),
                q_pos=q_pos,
                k_pos=k_pos,
            )
            sight = spec.Sight(is_causal, window)
            seen = fragments.visible(q_pos, k_pos, facts[seq, Fact.SEQ_LEN], sight)
            logits = jnp.where(seen, logits, -jnp.inf)
            m_new = alone(functools.partial(SOFTMAX.maxima, m, logits))
            shrink, p = SOFTMAX.shrink(m, m_new), SOFTMAX.weights(logits, m_new)
            # Summed over the warps once, at the end of the split.
            l = SOFTMAX.rescale(l, shrink) + p
            p_s.T[...] = p.astype(dtype)
            mgpu.commit_smem()
            edge = (tile_start < first_key) | (tile_start + TILE - 1 > last_key)

            def zero_unseen(value: Any) -> None:
                # A loop over columns: rare, and not worth registers.
                wide = tile.swizzle // 2

                @pl.loop(0, tile.chunk // wide)
                def _(i: jax.Array) -> None:
                    columns = pl.ds(pl.multiple_of(i * wide, wide), wide)
                    token = fragments.positions((TILE, wide), 0, tile_start)
                    keep = (token >= first_key) & (token <= last_key)
                    old = mgpu.load(value.at[:, columns], mgpu.WGMMA)
                    value[:, columns] = jnp.where(keep, old, jnp.zeros_like(old))

                mgpu.commit_smem()

            def zero_together(value: Any, slot: jax.Array) -> None:
                # A barrier of its own for each place, which no one has again before both left it.
                @pl.when(w == 0)
                def _() -> None:
                    zero_unseen(value)
                    mgpu.barrier_arrive(refs["clean"].at[slot])

                @pl.when(w > 0)
                def _() -> None:
                    mgpu.barrier_wait(refs["clean"].at[slot])

            def add(old: jax.Array, value: Any, part: tiling.Part) -> jax.Array:
                def product(acc_ref: Any) -> jax.Array:
                    mgpu.wgmma(acc_ref, value.at[:, pl.ds(part.first, part.rows)].T, p_s.T)
                    return acc_ref[...]

                gained = pl.run_scoped(product, mgpu.ACC(old.shape, jnp.float32))
                return SOFTMAX.rescale(old, shrink) + gained

            new: list[jax.Array] = []
            for c in range(tile.value_chunks):
                slot = lax.rem(use + keys + c, tile.ring)
                mgpu.barrier_wait(full.at[slot])
                value = ring_s.at[slot] if stage_s is None else staged(slot, c % 2)
                if tile.consumers == 1:
                    pl.when(edge)(functools.partial(zero_unseen, value))
                else:
                    pl.when(edge)(functools.partial(zero_together, value, slot))
                for old, part in zip(acc, tile.parts, strict=True):
                    if part.chunk == c:
                        new.append(add(old, value, part))
                if stage_s is None:
                    mgpu.barrier_arrive(empty.at[slot])
            return tuple(new), m_new, l

        m, _, l, *acc = SOFTMAX.empty(rows, shape, *((part.rows, rows) for part in tile.parts))
        acc, m, l = lax.fori_loop(0, split.num_tiles, step, (tuple(acc), m, l))
        mgpu.barrier_arrive(q_empty.at[which])
        ml_s[0] = m
        ml_s[1] = alone(lambda: l.sum(axis=0))
        mgpu.commit_smem()
        mgpu.copy_smem_to_gmem(ml_s, ml_g.at[split.place, :, mine])
        for i, (part, rows_of_part) in enumerate(zip(tile.parts, acc, strict=True)):
            there = o_s.at[i % 2, pl.ds(0, part.rows)]
            if i >= 2:
                mgpu.wait_smem_to_gmem(1, wait_read_only=True)
            there[...] = rows_of_part
            mgpu.commit_smem()
            place = o_g.at[split.place, pl.ds(part.place, part.rows), mine]
            mgpu.copy_smem_to_gmem(there, place)
        mgpu.wait_smem_to_gmem(0)

    if tile.consumers > 1:
        pl.when(w == 1)(lambda: mgpu.barrier_arrive(refs["turn"].at[0]))
    walk(visit)
    if tile.consumers > 1:
        pl.when(w == 0)(lambda: mgpu.barrier_wait(refs["turn"].at[0]))
