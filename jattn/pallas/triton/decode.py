"""Decode with Triton: sequences with few query tokens, their keys dealt out evenly to programs.

A **stretch** is one sequence's keys for one KV head and one tile of rows, cut into tiles of TILE
keys. All stretches laid one after another make a line of `total` tiles, and program p of P takes
the tiles `[p * share, (p + 1) * share)` of it:

    while the program has tiles left:
        m, l, acc = the online softmax over the tiles left of this stretch, or as many as it has
        the stretch is whole: out, lse = finish(m, l, acc);  else: leave (m, l, acc) for `merge`

so the work follows the lengths alone, whoever else is in the batch: one long sequence is split over
all programs, many short ones are dealt out whole, and nobody plans on the host. Everything about
the line is computed from `query_start_loc` and `seq_lens` by every program for itself: a few loads
of B integers, which all programs share in L2.

A program leaves at most two partial results, one where it starts and one where it ends: slots
`2 p` and `2 p + 1`. A stretch is in parts exactly if the end of some program's run lies inside it,
so `merge` has a program (per row) for each such end, and the first in a stretch does the work.

Rows of a tile are query tokens times query heads of one KV head, token by token.

The axis letters are those of `jattn.paged_attention`; ROWS rows of a tile, TILE keys of a tile.
"""

import triton
import triton.language as tl

from jattn.pallas.triton.fragments import (
    LOG2E,
    finish,
    finite_max,
    key_range,
    limit_registers,
    row_exponent,
    rows_at,
    step,
)


@triton.jit
def sequence_tiles(
    b, inside, starts_ptr, lens_ptr, is_causal_ptr, window, capacity, max_query_len,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, GROUP: tl.constexpr,
    MAX_QUERIES: tl.constexpr, ALONE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What the line holds of sequences `b`.

    Returns `(count, seq_len, causal, start, end, row_tiles, tiles)`. `tiles` of keys is 0 for those
    that have no place in it: no query tokens, or too many. Those that have one but see no key get
    one, for somebody has to write their zeros. ALONE says that no other kernel runs: then sequences
    that break `max_query_len` are here too, to get their NaN.
    """
    first_row = tl.load(starts_ptr + b, mask=inside, other=0)
    count = tl.load(starts_ptr + b + 1, mask=inside, other=0) - first_row
    seq_len = tl.load(lens_ptr + b, mask=inside, other=0)
    causal = 1
    if CAUSAL == 2:
        causal = tl.load(is_causal_ptr + b, mask=inside, other=0).to(tl.int32)
    first = seq_len - count
    start, end = key_range(
        first, first + count - 1, tl.minimum(seq_len, capacity), causal, window, CAUSAL, HAS_WINDOW
    )
    broken = count > max_query_len
    end = tl.where(broken, start, end)
    mine = inside & (count > 0) & (count <= MAX_QUERIES)
    if ALONE:
        mine = mine | (inside & broken)
    base = start // TILE * TILE
    tiles = tl.where(end > start, (end - base + TILE - 1) // TILE, 1)
    tiles = tl.where(mine, tiles, 0)
    return count, seq_len, causal, start, end, (count * GROUP + ROWS - 1) // ROWS, tiles


@triton.jit
def line_length(
    starts_ptr, lens_ptr, is_causal_ptr, window, capacity, max_query_len, num_seqs, kv_heads,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, GROUP: tl.constexpr,
    MAX_QUERIES: tl.constexpr, ALONE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PLAN: tl.constexpr,
):  # fmt: skip
    """Tiles of the whole line."""
    total = 0
    for at in range(0, num_seqs, PLAN):
        b = at + tl.arange(0, PLAN)
        _, _, _, _, _, row_tiles, tiles = sequence_tiles(
            b, b < num_seqs, starts_ptr, lens_ptr, is_causal_ptr, window, capacity, max_query_len,
            CAUSAL, HAS_WINDOW, GROUP, MAX_QUERIES, ALONE, ROWS, TILE,
        )  # fmt: skip
        total += tl.sum(tiles * row_tiles, axis=0) * kv_heads
    return total


@triton.jit
def sequence_at(
    place, starts_ptr, lens_ptr, is_causal_ptr, window, capacity, max_query_len, num_seqs, kv_heads,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, GROUP: tl.constexpr,
    MAX_QUERIES: tl.constexpr, ALONE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PLAN: tl.constexpr,
):  # fmt: skip
    """`(b, where its part begins)` of the sequence that has a place of the line."""
    before = 0
    found = 0
    begin = 0
    for at in range(0, num_seqs, PLAN):
        b = at + tl.arange(0, PLAN)
        _, _, _, _, _, row_tiles, tiles = sequence_tiles(
            b, b < num_seqs, starts_ptr, lens_ptr, is_causal_ptr, window, capacity, max_query_len,
            CAUSAL, HAS_WINDOW, GROUP, MAX_QUERIES, ALONE, ROWS, TILE,
        )  # fmt: skip
        size = tiles * row_tiles * kv_heads
        ends = before + tl.cumsum(size, axis=0)
        past = (ends <= place) & (b < num_seqs)
        found += tl.sum(past.to(tl.int32), axis=0)
        begin = tl.maximum(begin, tl.max(tl.where(past, ends, 0), axis=0))
        before += tl.sum(size, axis=0)
    return found, begin


@triton.jit
def decode(
    query_ptr, key_ptr, value_ptr, tables_ptr, lens_ptr, starts_ptr, scale_ptr, is_causal_ptr,
    window_ptr, cap_ptr, sinks_ptr, slopes_ptr, k_scale_ptr, v_scale_ptr,
    num_tokens, num_seqs, width, capacity, num_blocks, kv_heads, max_query_len,
    out_ptr, lse_ptr, acc_ptr, ml_ptr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    K_BLOCK_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr, K_TOKEN_STRIDE: tl.constexpr,
    V_BLOCK_STRIDE: tl.constexpr, V_HEAD_STRIDE: tl.constexpr, V_TOKEN_STRIDE: tl.constexpr,
    K_STORED: tl.constexpr, V_STORED: tl.constexpr, QK_DTYPE: tl.constexpr,
    PV_DTYPE: tl.constexpr, NORMALIZE: tl.constexpr,
    MAX_QUERIES: tl.constexpr, ALONE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PLAN: tl.constexpr, MIN_SHARE: tl.constexpr, LOOP_STAGES: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    """Program p's run of the line: whole stretches to `out` and `lse`, parts to `acc` and `ml`.

    Buffers: out [T, H, V]; lse float32 [T, H]; acc float32 [2 P, ROWS, V]; ml float32
    [2 P, 2, ROWS], m in base 2 and l. Every buffer is written once per element or not at all.
    """
    if REGISTERS > 0:
        limit_registers(REGISTERS)
    program = tl.program_id(0)
    window = 0
    if HAS_WINDOW:
        window = tl.load(window_ptr)
    cap = 1.0
    if HAS_CAP:
        cap = tl.load(cap_ptr) * LOG2E
    scale = tl.load(scale_ptr) * LOG2E
    # The words of a KVArray are unsigned; what they mean is said here, and nothing is copied.
    keys_ptr = key_ptr.to(tl.pointer_type(K_STORED), bitcast=True)
    values_ptr = value_ptr.to(tl.pointer_type(V_STORED), bitcast=True)

    dims0 = tl.arange(0, V0)
    heads = kv_heads * GROUP
    if ALONE:
        # Tokens past the last sequence's are padding: zeros and -inf, a row at a time.
        last = tl.load(starts_ptr + num_seqs) * heads
        for pad in range(last + program, num_tokens * heads, tl.num_programs(0)):
            pad_ptr = out_ptr + pad.to(tl.int64) * V
            zeros0 = tl.zeros((V0,), tl.float32).to(out_ptr.dtype.element_ty)
            tl.store(pad_ptr + dims0, zeros0, mask=dims0 < V)
            if V1 > 0:
                pad_dims = V0 + tl.arange(0, V1)
                zeros1 = tl.zeros((V1,), tl.float32).to(out_ptr.dtype.element_ty)
                tl.store(pad_ptr + pad_dims, zeros1, mask=pad_dims < V)
            tl.store(lse_ptr + pad, float("-inf"))

    total = line_length(
        starts_ptr, lens_ptr, is_causal_ptr, window, capacity, max_query_len, num_seqs, kv_heads,
        CAUSAL, HAS_WINDOW, GROUP, MAX_QUERIES, ALONE, ROWS, TILE, PLAN,
    )  # fmt: skip
    share = tl.maximum((total + tl.num_programs(0) - 1) // tl.num_programs(0), MIN_SHARE)
    place = program * share
    stop = tl.minimum(place + share, total)
    slot = 2 * program
    while place < stop:
        b, begin = sequence_at(
            place, starts_ptr, lens_ptr, is_causal_ptr, window, capacity, max_query_len, num_seqs,
            kv_heads, CAUSAL, HAS_WINDOW, GROUP, MAX_QUERIES, ALONE, ROWS, TILE, PLAN,
        )  # fmt: skip
        count, seq_len, causal, start, end, row_tiles, tiles = sequence_tiles(
            b, b < num_seqs, starts_ptr, lens_ptr, is_causal_ptr, window, capacity, max_query_len,
            CAUSAL, HAS_WINDOW, GROUP, MAX_QUERIES, ALONE, ROWS, TILE,
        )  # fmt: skip
        stretch = (place - begin) // tiles
        skip = (place - begin) % tiles
        head = stretch // row_tiles
        steps = tl.minimum(tiles - skip, stop - place)

        first_row = stretch % row_tiles * ROWS
        first_token = tl.load(starts_ptr + b)
        row, mine, query_head, at = rows_at(
            first_token, first_row, count, head, kv_heads, GROUP, ROWS
        )
        dims = tl.arange(0, D0)
        q_mask = mine[:, None] & (dims < D)[None, :]
        q0 = tl.load(query_ptr + at[:, None] * D + dims[None, :], mask=q_mask, other=0.0)
        q1 = q0
        if D1 > 0:
            dims = D0 + tl.arange(0, D1)
            q_mask = mine[:, None] & (dims < D)[None, :]
            q1 = tl.load(query_ptr + at[:, None] * D + dims[None, :], mask=q_mask, other=0.0)
        row_scale = tl.zeros((ROWS,), tl.float32) + scale
        if HAS_K_SCALE:
            row_scale = row_scale * tl.load(k_scale_ptr + head)
        if NORMALIZE:
            x0 = q0.to(tl.float32)
            x1 = q1.to(tl.float32)
            size = row_exponent(x0, x1, D1)
            q0 = (x0 / size[:, None]).to(QK_DTYPE)
            q1 = (x1 / size[:, None]).to(QK_DTYPE)
            row_scale = row_scale * size
        else:
            q0 = q0.to(QK_DTYPE)
            q1 = q1.to(QK_DTYPE)
        slopes = row_scale
        if HAS_SLOPES:
            slopes = tl.load(slopes_ptr + query_head, mask=mine, other=0.0) * LOG2E
        q_pos = seq_len - count + row // GROUP

        m = tl.full((ROWS,), float("-inf"), tl.float32)
        l = tl.zeros((ROWS,), tl.float32)
        acc0 = tl.zeros((ROWS, V0), tl.float32)
        acc1 = l
        if V1 > 0:
            acc1 = tl.zeros((ROWS, V1), tl.float32)
        first = start // TILE * TILE + skip * TILE
        after = tl.where(end > start, first + steps * TILE, first)
        for at_key in tl.range(first, after, TILE, num_stages=LOOP_STAGES):
            m, l, acc0, acc1 = step(
                m, l, acc0, acc1, q0, q1, row_scale, cap, slopes, q_pos,
                keys_ptr + head * K_HEAD_STRIDE, values_ptr + head * V_HEAD_STRIDE,
                tables_ptr + b.to(tl.int64) * width, at_key, start, end, seq_len, num_blocks,
                causal, window,
                CAUSAL, HAS_WINDOW, HAS_CAP, HAS_SLOPES, True, TILE, BLOCK_SIZE,
                K_BLOCK_STRIDE, K_TOKEN_STRIDE, V_BLOCK_STRIDE, V_TOKEN_STRIDE,
                D, D0, D1, V, V0, V1, QK_DTYPE, PV_DTYPE,
            )  # fmt: skip

        # The rows a second time, from a number that is loaded anew, or the compiler would keep
        # them over the loop, in registers that the accumulators need.
        again = tl.load(starts_ptr + b, volatile=True)
        _, mine, query_head, at = rows_at(
            again, first_row + (again - first_token), count, head, kv_heads, GROUP, ROWS
        )
        place_in_tile = tl.arange(0, ROWS)
        if steps == tiles:
            sinks = l
            if HAS_SINKS:
                sinks = tl.load(sinks_ptr + query_head, mask=mine, other=0.0)
            factor, lse = finish(m, l, sinks, HAS_SINKS)
            if HAS_V_SCALE:
                factor = factor * tl.load(v_scale_ptr + head)
            if ALONE:
                nan = count > max_query_len
                factor = tl.where(nan, float("nan"), factor)
                lse = tl.where(nan, float("nan"), lse)
            to = out_ptr + at[:, None] * V
            dtype = out_ptr.dtype.element_ty
            tl.store(
                to + dims0[None, :], (acc0 * factor[:, None]).to(dtype),
                mask=mine[:, None] & (dims0 < V)[None, :],
            )  # fmt: skip
            if V1 > 0:
                dims1 = V0 + tl.arange(0, V1)
                tl.store(
                    to + dims1[None, :], (acc1 * factor[:, None]).to(dtype),
                    mask=mine[:, None] & (dims1 < V)[None, :],
                )  # fmt: skip
            tl.store(lse_ptr + at, lse, mask=mine)
        else:
            part = acc_ptr + (slot.to(tl.int64) * ROWS + place_in_tile)[:, None] * V
            tl.store(part + dims0[None, :], acc0, mask=mine[:, None] & (dims0 < V)[None, :])
            if V1 > 0:
                dims1 = V0 + tl.arange(0, V1)
                tl.store(part + dims1[None, :], acc1, mask=mine[:, None] & (dims1 < V)[None, :])
            tl.store(ml_ptr + slot * 2 * ROWS + place_in_tile, m, mask=mine)
            tl.store(ml_ptr + (slot * 2 + 1) * ROWS + place_in_tile, l, mask=mine)
        place += steps
        slot = 2 * program + 1


@triton.jit
def merge(
    lens_ptr, starts_ptr, is_causal_ptr, window_ptr, sinks_ptr, v_scale_ptr, acc_ptr, ml_ptr,
    out_in_ptr, lse_in_ptr,
    num_seqs, capacity, kv_heads, max_query_len, num_programs,
    out_ptr, lse_ptr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_V_SCALE: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, V_ALL: tl.constexpr,
    MAX_QUERIES: tl.constexpr, ALONE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PLAN: tl.constexpr, MIN_SHARE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One row of the stretch in which program p's run begins, if it is the first that begins there.

    Grid: (P - 1, ROWS). PARTS partial results are read at a time, all loads in flight together.
    `out_in` and `lse_in` are the same buffers as `out` and `lse`: rows of others stay as they are.
    """
    program = tl.program_id(0) + 1
    window = 0
    if HAS_WINDOW:
        window = tl.load(window_ptr)
    total = line_length(
        starts_ptr, lens_ptr, is_causal_ptr, window, capacity, max_query_len, num_seqs, kv_heads,
        CAUSAL, HAS_WINDOW, GROUP, MAX_QUERIES, ALONE, ROWS, TILE, PLAN,
    )  # fmt: skip
    share = tl.maximum((total + num_programs - 1) // num_programs, MIN_SHARE)
    place = program * share
    if place < total:
        b, begin = sequence_at(
            place, starts_ptr, lens_ptr, is_causal_ptr, window, capacity, max_query_len, num_seqs,
            kv_heads, CAUSAL, HAS_WINDOW, GROUP, MAX_QUERIES, ALONE, ROWS, TILE, PLAN,
        )  # fmt: skip
        count, _, _, _, _, row_tiles, tiles = sequence_tiles(
            b, b < num_seqs, starts_ptr, lens_ptr, is_causal_ptr, window, capacity, max_query_len,
            CAUSAL, HAS_WINDOW, GROUP, MAX_QUERIES, ALONE, ROWS, TILE,
        )  # fmt: skip
        stretch = (place - begin) // tiles
        from_tile = begin + stretch * tiles
        in_tile = tl.program_id(1)
        row = stretch % row_tiles * ROWS + in_tile
        if (from_tile < place) & (from_tile >= place - share) & (row < count * GROUP):
            head = stretch // row_tiles
            dims = tl.arange(0, V_ALL)
            # Program p - 1 begins with this stretch, or comes to it last; the others begin in it.
            earliest = 2 * (program - 1) + (from_tile > place - share).to(tl.int32)
            pieces = (from_tile + tiles - 1) // share - program + 2
            m = tl.full((), float("-inf"), tl.float32)
            l = tl.zeros((), tl.float32)
            acc = tl.zeros((V_ALL,), tl.float32)
            for at in range(0, pieces, PARTS):
                part = at + tl.arange(0, PARTS)
                there = part < pieces
                slot = tl.where(part == 0, earliest, 2 * (program - 1 + part))
                ml = ml_ptr + slot * 2 * ROWS + in_tile
                part_m = tl.load(ml, mask=there, other=float("-inf"))
                part_l = tl.load(ml + ROWS, mask=there, other=0.0)
                part_acc = tl.load(
                    acc_ptr + (slot.to(tl.int64) * ROWS + in_tile)[:, None] * V + dims[None, :],
                    mask=there[:, None] & (dims < V)[None, :], other=0.0,
                )  # fmt: skip
                m_new = tl.maximum(m, tl.max(part_m, axis=0))
                base = finite_max(m_new)
                weight = tl.exp2(part_m - base)
                shrink = tl.exp2(m - base)
                l = l * shrink + tl.sum(part_l * weight, axis=0)
                acc = acc * shrink + tl.sum(part_acc * weight[:, None], axis=0)
                m = m_new
            query_head = head * GROUP + row % GROUP
            sink = l
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + query_head)
            factor, lse = finish(m, l, sink, HAS_SINKS)
            if HAS_V_SCALE:
                factor = factor * tl.load(v_scale_ptr + head)
            token = tl.load(starts_ptr + b) + row // GROUP
            at_row = token.to(tl.int64) * (kv_heads * GROUP) + query_head
            dtype = out_ptr.dtype.element_ty
            tl.store(out_ptr + at_row * V + dims, (acc * factor).to(dtype), mask=dims < V)
            tl.store(lse_ptr + at_row, lse)
