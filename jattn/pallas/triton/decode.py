"""Decode with Triton: sequences with few query tokens, their keys spread evenly over programs.

A **work item** is one sequence's keys for one KV head and one tile of rows, cut into kv tiles of
TILE keys. All items one after another make a line of `total` tiles, and program p of P takes the
run of tiles `[p * share, (p + 1) * share)`:

    while the program has tiles left:
        m, l, acc = the online softmax over the rest of this item, or of the program's run
        the item is whole: out, lse = finish(m, l, acc)
        else: leave the split (m, l, acc) to `merge_splits`

so the work depends only on the lengths, whatever else is in the batch: one long sequence is split
over all programs, many short ones are assigned whole, and the host plans nothing. Every program
computes what it needs of the line from `query_start_loc` and `seq_lens`: a few loads of B integers,
which all programs share in L2.

A program leaves at most two splits, one where it starts and one where it ends: slots `2 p` and
`2 p + 1`. An item is split exactly if the end of some program's run is inside it, so `merge_splits`
has a program for each such end and MERGE_ROWS rows, and the first in an item does the work.

Rows of a tile are query tokens times query heads of one KV head, token by token.

The axis letters are those of `jattn.paged_attention`; ROWS rows of a tile, TILE keys of a tile.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jattn.pallas.triton.fragments import (
    LOG2E,
    Terms,
    both_columns_of,
    empty,
    factor_and_lse,
    finish_rows,
    lengths_and_starts,
    limit_registers,
    load_rows,
    merge,
    rows_at,
    step,
    store_rows,
)
from jattn.pallas.triton.pools import Pool, Stored, names_no_block, pool_of
from jattn.pallas.triton.visibility import SequenceSight, key_range, load_limits

SPLITS_AT_A_TIME = tl.constexpr(8)


class Batch(NamedTuple):
    """The arrays from which the line of work is computed."""

    starts: Any
    lens: Any
    is_causal: Any
    limits: Any
    selected: Any
    num_seqs: Any
    kv_heads: Any


@triton.jit
def sequence_tiles(b, inside, batch, C: tl.constexpr):
    """The tiles of sequences `b` in the line of work.

    Returns `(count, sight, start, end, row_tiles, tiles)`. `tiles` of keys is 0 for sequences with
    no query tokens, or too many for this kernel: they have no place in the line. One that has a
    place but sees no key gets a tile, so that its zeros are written, or the NaN of a length of -1.
    C.ALONE says that no other kernel runs: then every sequence with query tokens has a place.
    """
    first_token = tl.load(batch.starts + b, mask=inside, other=0)
    count = tl.load(batch.starts + b + 1, mask=inside, other=0) - first_token
    seq_len = tl.load(batch.lens + b, mask=inside, other=0)
    causal = 1
    if C.CAUSAL == 2:
        causal = tl.load(batch.is_causal + b, mask=inside, other=0).to(tl.int32)
    first = seq_len - count
    # The last query sits at the last key: visible ends reach no further, so 0 will do.
    sight = SequenceSight(seq_len, causal, batch.limits, 0)
    start, end = key_range(first, first + count - 1, sight, C)
    if C.SELECTED:
        start = first * 0
        end = tl.load(batch.selected + b, mask=inside, other=0)
    here = inside & (count > 0)
    if not C.ALONE:
        here = here & (count <= C.MAX_QUERIES)
    base = start // C.TILE * C.TILE
    tiles = tl.where(end > start, (end - base + C.TILE - 1) // C.TILE, 1)
    tiles = tl.where(here, tiles, 0)
    row_tiles = (count * C.GROUP + C.ROWS - 1) // C.ROWS
    return count, sight, start, end, row_tiles, tiles


@triton.jit
def line_length(batch, C: tl.constexpr):
    """Tiles of the whole line."""
    total = 0
    for chunk_start in range(0, batch.num_seqs, C.PLAN):
        b = chunk_start + tl.arange(0, C.PLAN)
        _, _, _, _, row_tiles, tiles = sequence_tiles(b, b < batch.num_seqs, batch, C)
        total += tl.sum(tiles * row_tiles, axis=0) * batch.kv_heads
    return total


@triton.jit
def sequence_at(tile_number, batch, C: tl.constexpr):
    """`(b, first_tile)` of the sequence that has a tile of the line, and where its items begin."""
    before = 0
    found = 0
    first_tile = 0
    for chunk_start in range(0, batch.num_seqs, C.PLAN):
        b = chunk_start + tl.arange(0, C.PLAN)
        _, _, _, _, row_tiles, tiles = sequence_tiles(b, b < batch.num_seqs, batch, C)
        size = tiles * row_tiles * batch.kv_heads
        ends = before + tl.cumsum(size, axis=0)
        past = (ends <= tile_number) & (b < batch.num_seqs)
        found += tl.sum(past.to(tl.int32), axis=0)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(past, ends, 0), axis=0))
        before += tl.sum(size, axis=0)
    return found, first_tile


@triton.jit
def clear_padding(out_ptr, lse_ptr, starts_ptr, num_seqs, heads, num_tokens, C: tl.constexpr):
    """Write zeros and -inf for the tokens past the last sequence's, a row at a time."""
    dims0 = tl.arange(0, C.V0)
    last = tl.load(starts_ptr + num_seqs) * heads
    for row in range(last + tl.program_id(0), num_tokens * heads, tl.num_programs(0)):
        row_ptr = out_ptr + row.to(tl.int64) * C.V
        zeros0 = tl.zeros((C.V0,), tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(row_ptr + dims0, zeros0, mask=dims0 < C.V)
        if C.V1 > 0:
            dims1 = C.V0 + tl.arange(0, C.V1)
            zeros1 = tl.zeros((C.V1,), tl.float32).to(out_ptr.dtype.element_ty)
            tl.store(row_ptr + dims1, zeros1, mask=dims1 < C.V)
        tl.store(lse_ptr + row, float("-inf"))


@triton.jit
def decode(
    query_ptr, key_cache_ptr, value_cache_ptr, block_tables_ptr, sequences_ptr, scale_ptr,
    is_causal_ptr, sliding_window_ptr, attention_chunk_size_ptr, logits_soft_cap_ptr, sinks_ptr,
    alibi_slopes_ptr, relative_bias_ptr, visible_end_ptr, tree_mask_ptr, selected_columns_ptr,
    selected_tokens_ptr, k_scale_ptr, v_scale_ptr,
    key_groups_ptr, value_groups_ptr, key_scales_ptr, value_scales_ptr, key_zeros_ptr,
    value_zeros_ptr,
    num_tokens, num_seqs, width, num_blocks, kv_heads,
    out_ptr, lse_ptr, acc_ptr, ml_ptr,
    C: tl.constexpr,
):  # fmt: skip
    """Program p's run of the line: whole items to `out` and `lse`, splits to `acc` and `ml`.

    Buffers: out [T, H, V]; lse float32 [T, H]; acc float32 [2 P, ROWS, V]; ml float32
    [2 P, 2, ROWS], m in base 2 and l. Every buffer is written once per element or not at all.
    """
    if C.REGISTERS > 0:
        limit_registers(C.REGISTERS)
    program = tl.program_id(0)
    limits = load_limits(sliding_window_ptr, attention_chunk_size_ptr, C)
    scale = tl.load(scale_ptr) * LOG2E
    arrays = Pool(
        Stored(key_cache_ptr, key_groups_ptr, key_scales_ptr, key_zeros_ptr),
        Stored(value_cache_ptr, value_groups_ptr, value_scales_ptr, value_zeros_ptr),
        block_tables_ptr,
        selected_columns_ptr,
        num_blocks,
    )
    terms = Terms(
        logits_soft_cap_ptr, alibi_slopes_ptr, relative_bias_ptr, visible_end_ptr, tree_mask_ptr
    )

    heads = kv_heads * C.GROUP
    lens_ptr, starts_ptr = lengths_and_starts(sequences_ptr, num_seqs)
    if C.ALONE:
        clear_padding(out_ptr, lse_ptr, starts_ptr, num_seqs, heads, num_tokens, C)

    batch = Batch(
        starts_ptr, lens_ptr, is_causal_ptr, limits, selected_tokens_ptr, num_seqs, kv_heads
    )
    total = line_length(batch, C)
    share = tl.maximum((total + tl.num_programs(0) - 1) // tl.num_programs(0), C.MIN_SHARE)
    tile_number = program * share
    stop = tl.minimum(tile_number + share, total)
    slot = 2 * program
    while tile_number < stop:
        b, first_tile = sequence_at(tile_number, batch, C)
        count, sight, start, end, row_tiles, tiles = sequence_tiles(b, b < num_seqs, batch, C)
        item = (tile_number - first_tile) // tiles
        skip = (tile_number - first_tile) % tiles
        head = item // row_tiles
        steps = tl.minimum(tiles - skip, stop - tile_number)

        first_row = item % row_tiles * C.ROWS
        first_token = tl.load(starts_ptr + b)
        row, real, query_head, out_row = rows_at(first_token, first_row, count, head, kv_heads, C)
        first = sight.seq_len - count
        rows = load_rows(
            query_ptr, k_scale_ptr, terms, scale, row, first_row, real, query_head, out_row,
            first_token, first, head, C,
        )  # fmt: skip
        pool = pool_of(arrays, b, width, head, C)
        m, l, acc0, acc1, added = empty(C.ROWS, C.V0, C.V1)
        first_key = start // C.TILE * C.TILE + skip * C.TILE
        after = tl.where(end > start, first_key + steps * C.TILE, first_key)
        # Every id that the sequence uses is in some program's run, and NaN stays in the sum.
        bad = names_no_block(pool, tl.maximum(first_key, start), tl.minimum(after, end), C)
        l = tl.where(bad, float("nan"), l)
        for token in tl.range(first_key, after, C.TILE, num_stages=C.LOOP_STAGES):
            m, l, acc0, acc1, added = step(
                m, l, acc0, acc1, added, rows, pool, token, start, end, sight, True, C
            )
        acc0, acc1 = both_columns_of(acc0, acc1, added, C)

        # Compute the rows again, from a number that is loaded again: otherwise the compiler would
        # keep them over the loop, in registers that the accumulators need.
        again = tl.load(starts_ptr + b, volatile=True)
        _, real, query_head, out_row = rows_at(
            again, first_row + (again - first_token), count, head, kv_heads, C
        )
        row_in_tile = tl.arange(0, C.ROWS)
        if steps == tiles:
            factor, lse = factor_and_lse(
                m, l, sinks_ptr, v_scale_ptr, head, query_head, out_row, real, C
            )
            broken = sight.seq_len < 0
            finish_rows(out_ptr, lse_ptr, out_row, real, factor, lse, acc0, acc1, broken, C)
        else:
            store_rows(acc_ptr, slot.to(tl.int64) * C.ROWS + row_in_tile, real, acc0, acc1, C)
            tl.store(ml_ptr + slot * 2 * C.ROWS + row_in_tile, m, mask=real)
            tl.store(ml_ptr + (slot * 2 + 1) * C.ROWS + row_in_tile, l, mask=real)
        tile_number += steps
        slot = 2 * program + 1


@triton.jit
def merge_splits(
    sequences_ptr, is_causal_ptr, sliding_window_ptr, attention_chunk_size_ptr, sinks_ptr,
    selected_tokens_ptr, v_scale_ptr, acc_ptr, ml_ptr, out_in_ptr, lse_in_ptr,
    num_seqs, kv_heads, num_programs,
    out_ptr, lse_ptr,
    C: tl.constexpr,
):  # fmt: skip
    """MERGE_ROWS rows of the item in which program p's run begins, if p is the first in it.

    Grid: (P - 1, ROWS / MERGE_ROWS). SPLITS_AT_A_TIME splits are read at once, all loads in flight
    together. `out_in` and `lse_in` are the same buffers as `out` and `lse`: other rows do not
    change.
    """
    program = tl.program_id(0) + 1
    lens_ptr, starts_ptr = lengths_and_starts(sequences_ptr, num_seqs)
    limits = load_limits(sliding_window_ptr, attention_chunk_size_ptr, C)
    batch = Batch(
        starts_ptr, lens_ptr, is_causal_ptr, limits, selected_tokens_ptr, num_seqs, kv_heads
    )
    total = line_length(batch, C)
    share = tl.maximum((total + num_programs - 1) // num_programs, C.MIN_SHARE)
    tile_number = program * share
    if tile_number < total:
        b, first_tile = sequence_at(tile_number, batch, C)
        count, _, _, _, row_tiles, tiles = sequence_tiles(b, b < num_seqs, batch, C)
        item = (tile_number - first_tile) // tiles
        item_tile = first_tile + item * tiles
        first_in_tile = tl.program_id(1) * C.MERGE_ROWS
        first_row = item % row_tiles * C.ROWS + first_in_tile
        is_first = (item_tile < tile_number) & (item_tile >= tile_number - share)
        if is_first & (first_row < count * C.GROUP):
            row_in_tile = first_in_tile + tl.arange(0, C.MERGE_ROWS)
            row = item % row_tiles * C.ROWS + row_in_tile
            real = row < count * C.GROUP
            head = item // row_tiles
            dims = tl.arange(0, C.V_ALL)
            # Program p - 1 begins with this item, or comes to it last; the others begin in it.
            earliest = 2 * (program - 1) + (item_tile > tile_number - share).to(tl.int32)
            splits = (item_tile + tiles - 1) // share - program + 2
            m = tl.full((C.MERGE_ROWS,), float("-inf"), tl.float32)
            l = tl.zeros((C.MERGE_ROWS,), tl.float32)
            acc = tl.zeros((C.MERGE_ROWS, C.V_ALL), tl.float32)
            for chunk_start in range(0, splits, SPLITS_AT_A_TIME):
                split = chunk_start + tl.arange(0, SPLITS_AT_A_TIME)
                there = (split < splits)[:, None] & real[None, :]
                slot = tl.where(split == 0, earliest, 2 * (program - 1 + split))
                ml = ml_ptr + (slot * 2 * C.ROWS)[:, None] + row_in_tile[None, :]
                split_m = tl.load(ml, mask=there, other=float("-inf"))
                split_l = tl.load(ml + C.ROWS, mask=there, other=0.0)
                state = (slot.to(tl.int64) * C.ROWS)[:, None] + row_in_tile[None, :]
                split_acc = tl.load(
                    acc_ptr + state[:, :, None] * C.V + dims[None, None, :],
                    mask=there[:, :, None] & (dims < C.V)[None, None, :], other=0.0,
                )  # fmt: skip
                m, l, acc = merge(m, l, acc, split_m, split_l, split_acc)
            query_head = head * C.GROUP + row % C.GROUP
            token = tl.load(starts_ptr + b) + row // C.GROUP
            out_row = token.to(tl.int64) * (kv_heads * C.GROUP) + query_head
            factor, lse = factor_and_lse(
                m, l, sinks_ptr, v_scale_ptr, head, query_head, out_row, real, C
            )
            out = (acc * factor[:, None]).to(out_ptr.dtype.element_ty)
            written = real[:, None] & (dims < C.V)[None, :]
            tl.store(out_ptr + out_row[:, None] * C.V + dims[None, :], out, mask=written)
            tl.store(lse_ptr + out_row, lse, mask=real)
