"""Prefill, chunked prefill and the long part of mixtures with Triton: tiles of query rows.

The rows of a sequence are its query tokens times the query heads of one KV head, token by token;
a program takes ROWS of them and walks over the keys that they see, TILE at a time:

    m, l, acc = nothing
    for keys at the window's edge:  step with masks
    for keys that every row sees:   step without
    for keys at the diagonal:       step with masks
    out, lse = finish(m, l, acc)

Without EDGES there is one loop, with masks: they cost little compared with the products of wide
heads, and every further copy of the loop costs registers that such heads do not have.

Sequence b's tiles are numbered from `query_start_loc[b] * G // ROWS + b` on. That gives more
numbers than tiles, but a program finds its sequence by counting, with no sums over the batch.
Tokens past the last sequence's form another sequence, whose rows are zeros. Programs take numbers
from the last to the first: a causal sequence's last tile has the most keys, so the longest work
starts first.

The axis letters are those of `jattn.paged_attention`; ROWS rows of a tile, TILE keys of a step.
"""

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
    load_rows,
    rows_at,
    step,
)
from jattn.pallas.triton.pools import Pool, Stored, names_no_block, pool_of, selected_range
from jattn.pallas.triton.visibility import SequenceSight, key_range, load_limits, up_to


@triton.jit
def sequence_of(number, starts_ptr, num_seqs, C: tl.constexpr):
    """The sequence that tile `number` belongs to; `num_seqs` for padding."""
    known = 0
    for chunk_start in range(0, num_seqs + 1, C.PLAN):
        b = chunk_start + tl.arange(0, C.PLAN)
        inside = b <= num_seqs
        starts = tl.load(starts_ptr + b, mask=inside, other=0)
        first_number = starts * C.GROUP // C.ROWS + b
        known += tl.sum((inside & (first_number <= number)).to(tl.int32), axis=0)
    return known - 1


@triton.jit
def tile_at(number, b, starts_ptr, num_tokens, num_seqs, AGAIN: tl.constexpr, C: tl.constexpr):
    """`(first_token, padding, count, first_row)` of sequence `b` and its tile `number`.

    With AGAIN, their inputs are loaded again.
    """
    first_token = tl.load(starts_ptr + b, volatile=AGAIN)
    padding = b == num_seqs
    after = tl.load(starts_ptr + tl.minimum(b + 1, num_seqs), volatile=AGAIN)
    count = tl.where(padding, num_tokens, after) - first_token
    first_row = (number - first_token * C.GROUP // C.ROWS - b) * C.ROWS
    return first_token, padding, count, first_row


@triton.jit
def keys_of(rows, first_row, count, padding, sight, pool, num_selected, C: tl.constexpr):
    """Which tokens a tile reads: `(start, end, begin, whole_from, whole_to, stop)`.

    No row sees a key outside `[start, end)`. Steps go from `begin` to `stop`; every row sees every
    key of those from `whole_from` to `whole_to`, which end before any tree.
    """
    first_q = rows.first + first_row // C.GROUP
    last_q = rows.first + tl.minimum((first_row + C.ROWS - 1) // C.GROUP, count - 1)
    # What the last query sees begins last, what the first one sees ends first; between the two
    # every row sees every key.
    whole_from, _ = key_range(last_q, last_q, sight, C)
    if C.TREE_WORDS > 0:  # a token may be as early as the first one, whatever its place
        first_q = rows.first
    _, whole_to = key_range(first_q, first_q, sight, C)
    if C.TREE_WORDS > 0:
        whole_to = tl.minimum(whole_to, tl.maximum(rows.first, 0))
    if C.HAS_END:
        furthest = tl.max(rows.terms.visible_end, axis=0)
        sight = up_to(sight, furthest)
    start, end = key_range(first_q, last_q, sight, C)
    if C.SELECTED:
        start, end = selected_range(pool, num_selected, start, end, C)
    end = tl.where(padding, start, end)
    begin = start // C.TILE * C.TILE
    num_tiles = (end - begin + C.TILE - 1) // C.TILE
    stop = tl.where(end > start, begin + num_tiles * C.TILE, begin)
    whole_from = (tl.maximum(whole_from, start) + C.TILE - 1) // C.TILE * C.TILE
    whole_from = tl.minimum(whole_from, stop)
    whole_to = tl.maximum(tl.minimum(whole_to, end) // C.TILE * C.TILE, whole_from)
    return start, end, begin, whole_from, whole_to, stop


@triton.jit
def prefill(
    query_ptr, key_cache_ptr, value_cache_ptr, block_tables_ptr, sequences_ptr, scale_ptr,
    is_causal_ptr, sliding_window_ptr, attention_chunk_size_ptr, logits_soft_cap_ptr, sinks_ptr,
    alibi_slopes_ptr, relative_bias_ptr, visible_end_ptr, tree_mask_ptr, selected_columns_ptr,
    selected_tokens_ptr, k_scale_ptr, v_scale_ptr,
    key_groups_ptr, value_groups_ptr, key_scales_ptr, value_scales_ptr, key_zeros_ptr,
    value_zeros_ptr,
    out_in_ptr, lse_in_ptr,
    num_tokens, num_seqs, width, num_blocks, kv_heads,
    out_ptr, lse_ptr,
    C: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one KV head, of padding or a sequence of more than MAX_QUERIES tokens.

    Grid: (tile numbers, K). `out_in` and `lse_in` are the same buffers as `out` and `lse`: rows of
    other sequences do not change.
    """
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    lens_ptr, starts_ptr = lengths_and_starts(sequences_ptr, num_seqs)
    b = sequence_of(number, starts_ptr, num_seqs, C)
    first_token, padding, count, first_row = tile_at(
        number, b, starts_ptr, num_tokens, num_seqs, False, C
    )
    if (first_row < count * C.GROUP) & (padding | (count > C.MAX_QUERIES)):
        row, real, query_head, out_row = rows_at(first_token, first_row, count, head, kv_heads, C)
        known_b = tl.minimum(b, num_seqs - 1)
        seq_len = tl.load(lens_ptr + known_b)
        causal = 1
        if C.CAUSAL == 2:
            causal = tl.load(is_causal_ptr + known_b).to(tl.int32)
        limits = load_limits(sliding_window_ptr, attention_chunk_size_ptr, C)
        arrays = Pool(
            Stored(key_cache_ptr, key_groups_ptr, key_scales_ptr, key_zeros_ptr),
            Stored(value_cache_ptr, value_groups_ptr, value_scales_ptr, value_zeros_ptr),
            block_tables_ptr,
            selected_columns_ptr,
            num_blocks,
        )
        pool = pool_of(arrays, known_b, width, head, C)
        scale = tl.load(scale_ptr) * LOG2E
        first = seq_len - count
        terms = Terms(
            logits_soft_cap_ptr, alibi_slopes_ptr, relative_bias_ptr, visible_end_ptr, tree_mask_ptr
        )
        is_query = real & (b < num_seqs)  # rows of padding are not queries
        rows = load_rows(
            query_ptr, k_scale_ptr, terms, scale, row, first_row, is_query, query_head, out_row,
            first_token, first, head, C,
        )  # fmt: skip
        sight = SequenceSight(seq_len, causal, limits, 0)
        num_selected = 0
        if C.SELECTED:
            num_selected = tl.load(selected_tokens_ptr + known_b)
        start, end, begin, whole_from, whole_to, stop = keys_of(
            rows, first_row, count, padding, sight, pool, num_selected, C
        )

        m, l, acc0, acc1, added = empty(C.ROWS, C.V0, C.V1)
        # Check all ids that the sequence uses, not only these rows': all its rows are NaN, or none.
        used_from, used_to = key_range(first, first + count - 1, sight, C)
        if C.SELECTED:
            used_from = 0
            used_to = num_selected
        used_to = tl.where(padding, used_from, used_to)
        bad = names_no_block(pool, used_from, used_to, C)
        l = tl.where(bad, float("nan"), l)
        if C.HAS_K_SCALE:
            scale = scale * tl.load(k_scale_ptr + head)
        if not C.EDGES or scale <= 0.0:  # see `step`
            whole_from = begin
            whole_to = begin
        if C.EDGES and (C.HAS_WINDOW or C.HAS_CHUNK):
            for token in tl.range(begin, whole_from, C.TILE, num_stages=C.LOOP_STAGES):
                m, l, acc0, acc1, added = step(
                    m, l, acc0, acc1, added, rows, pool, token, start, end, sight, True, C
                )
        if C.EDGES:
            for token in tl.range(whole_from, whole_to, C.TILE, num_stages=C.LOOP_STAGES):
                m, l, acc0, acc1, added = step(
                    m, l, acc0, acc1, added, rows, pool, token, start, end, sight, False, C
                )
        for token in tl.range(whole_to, stop, C.TILE, num_stages=C.LOOP_STAGES):
            m, l, acc0, acc1, added = step(
                m, l, acc0, acc1, added, rows, pool, token, start, end, sight, True, C
            )
        acc0, acc1 = both_columns_of(acc0, acc1, added, C)

        # Compute the rows again, from numbers that are loaded again: otherwise the compiler would
        # keep them over the loops, in registers that the accumulators need.
        again, padding, count, first_row = tile_at(
            number, b, starts_ptr, num_tokens, num_seqs, True, C
        )
        known_len = tl.load(lens_ptr + tl.minimum(b, num_seqs - 1), volatile=True)
        broken = (known_len < 0) & (b < num_seqs)
        _, real, query_head, out_row = rows_at(again, first_row, count, head, kv_heads, C)
        is_query = real & (b < num_seqs)  # rows of padding have no sinks, and see nothing
        factor, lse = factor_and_lse(
            m, l, sinks_ptr, v_scale_ptr, head, query_head, out_row, is_query, C
        )
        finish_rows(out_ptr, lse_ptr, out_row, real, factor, lse, acc0, acc1, broken, C)
