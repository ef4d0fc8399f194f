"""Prefill, chunked prefill and the long part of mixtures with Triton: tiles of query rows.

The rows of a sequence are its query tokens times the query heads of one KV head, token by token;
a program takes ROWS of them and walks over the keys that they see, TILE at a time:

    m, l, acc = nothing
    for keys at the window's edge:  step with masks
    for keys that every row sees:   step without
    for keys at the diagonal:       step with masks
    out, lse = finish(m, l, acc)

Without EDGES there is one loop, with masks: beside the products of wide heads they cost little, and
every further copy of the loop costs registers that such heads do not have.

Sequence b's tiles are numbered from `query_start_loc[b] * G // ROWS + b` on: more numbers than
tiles, but a sequence is found by counting, with no sums over the batch. Tokens past the last
sequence's are a sequence of their own, whose rows are zeros. Numbers go to programs from the last
to the first: in a causal sequence the last tile has most keys, and what takes longest starts first.

The axis letters are those of `jattn.paged_attention`; ROWS rows of a tile, TILE keys of a step.
"""

import triton
import triton.language as tl

from jattn.pallas.triton.fragments import LOG2E, finish, key_range, row_exponent, rows_at, step


@triton.jit
def prefill(
    query_ptr, key_ptr, value_ptr, tables_ptr, lens_ptr, starts_ptr, scale_ptr, is_causal_ptr,
    window_ptr, cap_ptr, sinks_ptr, slopes_ptr, k_scale_ptr, v_scale_ptr, out_in_ptr, lse_in_ptr,
    num_tokens, num_seqs, width, capacity, num_blocks, kv_heads, max_query_len,
    out_ptr, lse_ptr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    K_BLOCK_STRIDE: tl.constexpr, K_HEAD_STRIDE: tl.constexpr, K_TOKEN_STRIDE: tl.constexpr,
    V_BLOCK_STRIDE: tl.constexpr, V_HEAD_STRIDE: tl.constexpr, V_TOKEN_STRIDE: tl.constexpr,
    K_STORED: tl.constexpr, V_STORED: tl.constexpr, QK_DTYPE: tl.constexpr,
    PV_DTYPE: tl.constexpr, NORMALIZE: tl.constexpr,
    MAX_QUERIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PLAN: tl.constexpr,
    LOOP_STAGES: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one KV head, unless its sequence is for `decode` (MAX_QUERIES or fewer).

    Grid: (tile numbers, K). `out_in` and `lse_in` are the same buffers as `out` and `lse`: rows of
    other sequences stay as they are.
    """
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    known = 0
    for chunk in range(0, num_seqs + 1, PLAN):
        some = chunk + tl.arange(0, PLAN)
        inside = some <= num_seqs
        first_number = tl.load(starts_ptr + some, mask=inside, other=0) * GROUP // ROWS + some
        known += tl.sum((inside & (first_number <= number)).to(tl.int32), axis=0)
    b = known - 1
    first_token = tl.load(starts_ptr + b)
    padding = b == num_seqs
    after = tl.load(starts_ptr + tl.minimum(b + 1, num_seqs))
    count = tl.where(padding, num_tokens, after) - first_token
    first_row = (number - first_token * GROUP // ROWS - b) * ROWS
    if (first_row < count * GROUP) & (padding | (count > MAX_QUERIES)):
        broken = (count > max_query_len) & (b < num_seqs)
        row, mine, query_head, at = rows_at(
            first_token, first_row, count, head, kv_heads, GROUP, ROWS
        )
        known_b = tl.minimum(b, num_seqs - 1)
        seq_len = tl.load(lens_ptr + known_b)
        causal = 1
        if CAUSAL == 2:
            causal = tl.load(is_causal_ptr + known_b).to(tl.int32)
        window = 0
        if HAS_WINDOW:
            window = tl.load(window_ptr)
        cap = 1.0
        if HAS_CAP:
            cap = tl.load(cap_ptr) * LOG2E
        # The words of a KVArray are unsigned; what they mean is said here, and nothing is copied.
        keys_ptr = key_ptr.to(tl.pointer_type(K_STORED), bitcast=True) + head * K_HEAD_STRIDE
        values_ptr = value_ptr.to(tl.pointer_type(V_STORED), bitcast=True) + head * V_HEAD_STRIDE
        table_ptr = tables_ptr + known_b.to(tl.int64) * width

        dims = tl.arange(0, D0)
        real = mine & (b < num_seqs)
        q0 = tl.load(
            query_ptr + at[:, None] * D + dims[None, :],
            mask=real[:, None] & (dims < D)[None, :], other=0.0,
        )  # fmt: skip
        q1 = q0
        if D1 > 0:
            dims = D0 + tl.arange(0, D1)
            q1 = tl.load(
                query_ptr + at[:, None] * D + dims[None, :],
                mask=real[:, None] & (dims < D)[None, :], other=0.0,
            )  # fmt: skip
        row_scale = tl.zeros((ROWS,), tl.float32) + tl.load(scale_ptr) * LOG2E
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
        first = seq_len - count
        q_pos = first + row // GROUP
        first_q = first + first_row // GROUP
        last_q = first + tl.minimum((first_row + ROWS - 1) // GROUP, count - 1)
        length = tl.minimum(seq_len, capacity)
        start, end = key_range(first_q, last_q, length, causal, window, CAUSAL, HAS_WINDOW)
        end = tl.where(padding | broken, start, end)
        # What the last query sees begins last, what the first one sees ends first; between the two
        # everybody sees everything.
        whole_from, _ = key_range(last_q, last_q, length, causal, window, CAUSAL, HAS_WINDOW)
        _, whole_to = key_range(first_q, first_q, length, causal, window, CAUSAL, HAS_WINDOW)
        begin = start // TILE * TILE
        stop = tl.where(end > start, begin + (end - begin + TILE - 1) // TILE * TILE, begin)
        whole_from = (tl.maximum(whole_from, start) + TILE - 1) // TILE * TILE
        whole_from = tl.minimum(whole_from, stop)
        whole_to = tl.maximum(tl.minimum(whole_to, end) // TILE * TILE, whole_from)

        m = tl.full((ROWS,), float("-inf"), tl.float32)
        l = tl.zeros((ROWS,), tl.float32)
        acc0 = tl.zeros((ROWS, V0), tl.float32)
        acc1 = l
        if V1 > 0:
            acc1 = tl.zeros((ROWS, V1), tl.float32)
        if not EDGES:
            whole_from = begin
            whole_to = begin
        if EDGES and HAS_WINDOW:
            for at_key in tl.range(begin, whole_from, TILE, num_stages=LOOP_STAGES):
                m, l, acc0, acc1 = step(
                    m, l, acc0, acc1, q0, q1, row_scale, cap, slopes, q_pos,
                    keys_ptr, values_ptr, table_ptr, at_key, start, end, seq_len, num_blocks,
                    causal, window,
                    CAUSAL, HAS_WINDOW, HAS_CAP, HAS_SLOPES, True, TILE, BLOCK_SIZE,
                    K_BLOCK_STRIDE, K_TOKEN_STRIDE, V_BLOCK_STRIDE, V_TOKEN_STRIDE,
                    D, D0, D1, V, V0, V1, QK_DTYPE, PV_DTYPE,
                )  # fmt: skip
        if EDGES:
            for at_key in tl.range(whole_from, whole_to, TILE, num_stages=LOOP_STAGES):
                m, l, acc0, acc1 = step(
                    m, l, acc0, acc1, q0, q1, row_scale, cap, slopes, q_pos,
                    keys_ptr, values_ptr, table_ptr, at_key, start, end, seq_len, num_blocks,
                    causal, window,
                    CAUSAL, HAS_WINDOW, HAS_CAP, HAS_SLOPES, False, TILE, BLOCK_SIZE,
                    K_BLOCK_STRIDE, K_TOKEN_STRIDE, V_BLOCK_STRIDE, V_TOKEN_STRIDE,
                    D, D0, D1, V, V0, V1, QK_DTYPE, PV_DTYPE,
                )  # fmt: skip
        for at_key in tl.range(whole_to, stop, TILE, num_stages=LOOP_STAGES):
            m, l, acc0, acc1 = step(
                m, l, acc0, acc1, q0, q1, row_scale, cap, slopes, q_pos,
                keys_ptr, values_ptr, table_ptr, at_key, start, end, seq_len, num_blocks,
                causal, window,
                CAUSAL, HAS_WINDOW, HAS_CAP, HAS_SLOPES, True, TILE, BLOCK_SIZE,
                K_BLOCK_STRIDE, K_TOKEN_STRIDE, V_BLOCK_STRIDE, V_TOKEN_STRIDE,
                D, D0, D1, V, V0, V1, QK_DTYPE, PV_DTYPE,
            )  # fmt: skip

        # The rows a second time, from numbers that are loaded anew, or the compiler would keep
        # them over the loops, in registers that the accumulators need.
        again = tl.load(starts_ptr + b, volatile=True)
        after = tl.load(starts_ptr + tl.minimum(b + 1, num_seqs), volatile=True)
        padding = b == num_seqs
        count = tl.where(padding, num_tokens, after) - again
        first_row = (number - again * GROUP // ROWS - b) * ROWS
        broken = (count > max_query_len) & (b < num_seqs)
        _, mine, query_head, at = rows_at(again, first_row, count, head, kv_heads, GROUP, ROWS)
        sinks = l
        if HAS_SINKS:
            # Rows of padding have none, and see nothing.
            sinks = tl.load(sinks_ptr + query_head, mask=mine & (b < num_seqs), other=float("-inf"))
        factor, lse = finish(m, l, sinks, HAS_SINKS)
        if HAS_V_SCALE:
            factor = factor * tl.load(v_scale_ptr + head)
        factor = tl.where(broken, float("nan"), factor)
        lse = tl.where(broken, float("nan"), lse)
        dtype = out_ptr.dtype.element_ty
        dims = tl.arange(0, V0)
        tl.store(
            out_ptr + at[:, None] * V + dims[None, :], (acc0 * factor[:, None]).to(dtype),
            mask=mine[:, None] & (dims < V)[None, :],
        )  # fmt: skip
        if V1 > 0:
            dims = V0 + tl.arange(0, V1)
            tl.store(
                out_ptr + at[:, None] * V + dims[None, :], (acc1 * factor[:, None]).to(dtype),
                mask=mine[:, None] & (dims < V)[None, :],
            )  # fmt: skip
        tl.store(lse_ptr + at, lse, mask=mine)
