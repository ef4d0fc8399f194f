"""What attention means, for Triton: `jattn/spec.py` and the online softmax again, in its language.

A Triton kernel can call nothing but Triton, so the rules stand here a second time, and only here:
a test compares every function with `spec.py` and `softmax.py` point by point. Both kernels are made
of these functions; they add which rows and which keys a program takes.

    visible, key_range, transform_logits     as in spec.py, by the same names
    finish                                   as in softmax.py, logits in base 2
    offsets_of                               where tokens of a sequence lie in a pool
    rows_at, step                            rows of a tile, and one step of the online softmax
    limit_registers                          what the compiler may spend on a thread

Logits are in base 2: `transform_logits` scales, caps and biases in whatever unit its scale, cap and
slopes are in, and the kernels hand it all three times log2(e). Every switch is static (upper case);
every number is loaded by the kernel.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@tl.core.builtin
def limit_registers(count, _semantic=None, _generator=None):
    """At most `count` registers a thread, a constant: `.maxnreg` in the kernel's PTX.

    ptxas otherwise has a mind of its own: it spills some bytes to let a program more on a core than
    is launched. jax-triton has no argument for what Triton calls `maxnreg`. Where the compiler is
    not built as it was in 3.6, it goes without.
    """
    module = getattr(_generator, "module", None)
    if hasattr(module, "set_attr"):
        limit = _semantic.builder.get_int32_attr(tl.core._unwrap_if_constexpr(count))
        module.set_attr("ttg.maxnreg", limit)


@triton.jit
def visible(
    q_pos, k_pos, seq_len, is_causal, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """Whether queries see keys; broadcasts. CAUSAL: 0 no, 1 yes, 2 as `is_causal` says."""
    seen = (k_pos >= 0) & (k_pos < seq_len)
    if CAUSAL == 1:
        seen = seen & (k_pos <= q_pos)
    if CAUSAL == 2:
        seen = seen & ((k_pos <= q_pos) | (is_causal == 0))
    if HAS_WINDOW:
        # Differences: a window of 2^31 - 1 must not overflow.
        seen = seen & (q_pos - k_pos < window) & (k_pos - q_pos < window)
    return seen


@triton.jit
def key_range(
    first_q, last_q, seq_len, is_causal, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """`(start, end)`: no query in `[first_q, last_q]` sees a key outside `start <= k < end`."""
    start = first_q * 0
    end = tl.maximum(seq_len, 0)
    if CAUSAL == 1:
        end = tl.minimum(end, last_q + 1)
    if CAUSAL == 2:
        end = tl.where(is_causal != 0, tl.minimum(end, last_q + 1), end)
    if HAS_WINDOW:
        near = tl.minimum(window, 1073741824)
        start = tl.maximum(start, first_q - near + 1)
        end = tl.minimum(end, last_q + near)
    end = tl.maximum(end, 0)
    return tl.minimum(start, end), end


@triton.jit
def tanh(x):
    """The hyperbolic tangent to a few float32 ulps, which neither `1 - 2 / (e^2x + 1)` (it cancels
    near 0) nor the hardware's approximation (11 bits) gives."""
    y = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(tl.minimum(y, 30.0) * (2.0 * LOG2E)) + 1.0)
    # (tanh(y) - y) / y^3 in powers of y^2, least squares on [0, 0.6] of the relative error.
    s = y * y
    p = -0.0058951578
    p = p * s + 0.020795971
    p = p * s - 0.05378383
    p = p * s + 0.13331924
    p = p * s - 0.333332986
    t = tl.where(y < 0.6, y + y * s * p, far)
    t = tl.where(x < 0.0, -t, t)
    return tl.where(x == x, t, x)  # `minimum` has made a number of NaN


@triton.jit
def transform_logits(
    dots, scale, cap, slopes, q_pos, k_pos, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr
):
    """Scaled, capped, biased logits from the dot products. Broadcasts."""
    logits = dots * scale
    if HAS_CAP:
        logits = cap * tanh(logits / cap)
    if HAS_SLOPES:
        logits = logits + slopes * (k_pos - q_pos).to(tl.float32)
    return logits


@triton.jit
def finite_max(m):
    """`m`, or 0 where it is -inf: subtracting it gives exp2(-inf) = 0 and never NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def finish(m, l, sinks, HAS_SINKS: tl.constexpr):
    """`(factor, lse)` of rows `(m, l)`, m in base 2: `out = acc * factor`, the lse natural.

    A row that has seen nothing gets factor 0 and lse -inf, or its sink.
    """
    if HAS_SINKS:
        sinks = sinks * LOG2E
        top = tl.maximum(m, sinks)
        base = finite_max(top)
        rescale = tl.exp2(m - base)
        l = l * rescale + tl.exp2(sinks - base)
        empty = l == 0.0
        safe = tl.where(empty, 1.0, l)
        factor = rescale / safe
        lse = (top + tl.log2(safe)) * LN2
    else:
        empty = l == 0.0
        safe = tl.where(empty, 1.0, l)
        factor = 1.0 / safe
        lse = (m + tl.log2(safe)) * LN2
    return tl.where(empty, 0.0, factor), tl.where(empty, float("-inf"), lse)


@triton.jit
def offsets_of(
    table_ptr, token, start, end, num_blocks,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
):  # fmt: skip
    """int64 [TILE]: where tokens `token`, `token + 1`, ... lie in one head of a pool.

    `token` is a multiple of TILE. Ids are clamped to the pool, and the table is read only inside
    `[start, end)`: whatever it holds, what is read with these offsets is memory of the pool.
    """
    inner = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        # The tile lies in one block: one id, and rows at a constant distance.
        block = tl.load(table_ptr + token // BLOCK_SIZE)
        block = tl.minimum(tl.maximum(block, 0), num_blocks - 1).to(tl.int64)
        rows = (token % BLOCK_SIZE + inner).to(tl.int64)
        return block * BLOCK_STRIDE + rows * TOKEN_STRIDE
    positions = token + inner
    mine = (positions >= start) & (positions < end)
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=mine, other=0)
    blocks = tl.minimum(tl.maximum(blocks, 0), num_blocks - 1).to(tl.int64)
    return blocks * BLOCK_STRIDE + (positions % BLOCK_SIZE).to(tl.int64) * TOKEN_STRIDE


@triton.jit
def rows_at(first_token, first_row, count, head, kv_heads, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """`(row, mine, query_head, place)` of a tile's rows; `place` counts rows of [T, H], int64."""
    row = first_row + tl.arange(0, ROWS)
    query_head = head * GROUP + row % GROUP
    place = (first_token + row // GROUP).to(tl.int64) * (kv_heads * GROUP) + query_head
    return row, row < count * GROUP, query_head, place


@triton.jit
def load_part(
    ptr, offsets, mine, FIRST: tl.constexpr, PART: tl.constexpr, DIM: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[rows, PART] numbers from dimension FIRST on, as DTYPE; zeros where not `mine`, and past DIM.

    Rows that are not the tile's own may hold NaN, and 0 * NaN is not 0: they are not read.
    """
    dims = FIRST + tl.arange(0, PART)
    at = ptr + offsets[:, None] + dims[None, :]
    if FIRST + PART > DIM:
        if MASKED:
            x = tl.load(at, mask=mine[:, None] & (dims < DIM)[None, :], other=0.0)
        else:
            x = tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    elif MASKED:
        x = tl.load(at, mask=mine[:, None], other=0.0)
    else:
        x = tl.load(at)
    if ptr.dtype.element_ty == tl.uint8:
        # e5m2 is the upper half of float16; older GPUs have no instruction that says so.
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def row_exponent(x0, x1, D1: tl.constexpr):
    """Per row of float32 [rows, D0] and [rows, D1], a power of two of its largest magnitude's size.

    Divided by it, rows fit float16's range and lose nothing that counts.
    """
    top = tl.max(tl.abs(x0), axis=1)
    if D1 > 0:
        top = tl.maximum(top, tl.max(tl.abs(x1), axis=1))
    bits = tl.maximum(top, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def step(
    m, l, acc0, acc1, q0, q1, row_scale, cap, slopes, q_pos,
    key_ptr, value_ptr, table_ptr, token, start, end, seq_len, num_blocks, is_causal, window,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, MASKED: tl.constexpr,
    TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K_BLOCK_STRIDE: tl.constexpr, K_TOKEN_STRIDE: tl.constexpr,
    V_BLOCK_STRIDE: tl.constexpr, V_TOKEN_STRIDE: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    QK_DTYPE: tl.constexpr, PV_DTYPE: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: rows `(m, l, acc)` and the TILE keys from `token` on.

    Without MASKED every row must see all of them. Head sizes that are no power of two come in two
    parts, the second with no columns (D1, V1 of 0) where there is only one.
    """
    k_pos = token + tl.arange(0, TILE)
    mine = (k_pos >= start) & (k_pos < end)
    at = offsets_of(
        table_ptr, token, start, end, num_blocks, TILE, BLOCK_SIZE, K_BLOCK_STRIDE, K_TOKEN_STRIDE
    )
    k0 = load_part(key_ptr, at, mine, 0, D0, D, MASKED, QK_DTYPE)
    dots = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    if D1 > 0:
        k1 = load_part(key_ptr, at, mine, D0, D1, D, MASKED, QK_DTYPE)
        dots = tl.dot(q1, tl.trans(k1), dots, input_precision="ieee")
    logits = transform_logits(
        dots, row_scale[:, None], cap, slopes[:, None], q_pos[:, None], k_pos[None, :],
        HAS_CAP, HAS_SLOPES,
    )  # fmt: skip
    if MASKED:
        seen = visible(
            q_pos[:, None], k_pos[None, :], seq_len, is_causal, window, CAUSAL, HAS_WINDOW
        )
        logits = tl.where(seen & mine[None, :], logits, float("-inf"))
    m_new = tl.maximum(m, tl.max(logits, axis=1))
    base = m_new
    if MASKED:
        base = finite_max(m_new)
    p = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(m - base)
    l = l * shrink + tl.sum(p, axis=1)
    if V_BLOCK_STRIDE != K_BLOCK_STRIDE or V_TOKEN_STRIDE != K_TOKEN_STRIDE:
        at = offsets_of(
            table_ptr, token, start, end, num_blocks, TILE, BLOCK_SIZE, V_BLOCK_STRIDE,
            V_TOKEN_STRIDE,
        )  # fmt: skip
    p = p.to(PV_DTYPE)
    v0 = load_part(value_ptr, at, mine, 0, V0, V, MASKED, PV_DTYPE)
    acc0 = tl.dot(p, v0, acc0 * shrink[:, None], input_precision="ieee")
    if V1 > 0:
        v1 = load_part(value_ptr, at, mine, V0, V1, V, MASKED, PV_DTYPE)
        acc1 = tl.dot(p, v1, acc1 * shrink[:, None], input_precision="ieee")
    return m_new, l, acc0, acc1
