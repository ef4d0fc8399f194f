"""What the Triton kernels are made of: logits, the online softmax, and a tile's rows.

A Triton kernel can only call Triton functions, so this file repeats spec.py's logits and
softmax.py, and `visibility.py` which keys a query sees. A test compares every function with theirs,
point by point. Both kernels are made of these functions; they add which rows and which keys a
program takes.

    factored_logits                          spec.py's `transform_logits`, in two factors
    empty, update, merge, finish             as in softmax.py, logits in base 2
    lengths_and_starts                       of all sequences, which come in one array
    rows_at, load_queries, load_rows         the rows of a tile
    keys_seen                                which keys of a tile they see, and at what positions
    factor_and_lse, store_rows, finish_rows  their results
    step                                     a tile of keys: logits, update, values
    limit_registers                          what the compiler may spend on a thread

Logits are in base 2: `factored_logits` scales, caps and biases in whatever unit its scale, cap and
slopes are in, and the kernels multiply all three by log2(e). `C` is a `launch.Static`: everything
that is known when a kernel is compiled, in upper case. The kernel loads every number.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jattn import softmax
from jattn.pallas.triton.pools import (
    E2M1_GAIN,
    in_order,
    in_order_of_codes,
    load_each,
    load_part,
    offsets_of,
    positions_of,
)
from jattn.pallas.triton.visibility import depth_of, tree_path, up_to, visible

LOG2E = tl.constexpr(softmax.LOG2E)
LN2 = tl.constexpr(1 / softmax.LOG2E)


class Rows(NamedTuple):
    """The rows of a tile, and what turns their dots into logits."""

    q0: Any
    q1: Any  # the second part of a head size that is not a power of two
    total: Any  # the sum of each query's numbers, for zero points of keys
    scale: Any
    positions: Any  # of query tokens; in a tree, by their depth
    index: Any  # which of its sequence's query tokens a row belongs to
    first: Any  # position of the first of those
    lowest: Any  # no row is at an earlier position
    real: Any
    far: Any  # the first number of each row's table of relative positions
    terms: Any


class Terms(NamedTuple):
    """What changes the logits of single rows. What a call lacks is another array, not read.

    Pointers to the arrays of a call or, in `Rows`, each row's part of them.
    """

    cap: Any
    slopes: Any
    bias: Any  # pointers to the table of each row's head
    visible_end: Any
    tree: Any  # pointers to the mask of each row's token


@tl.core.builtin
def limit_registers(count, _semantic=None, _generator: Any = None):
    """Limit a thread to `count` registers, a constant: `.maxnreg` in the kernel's PTX.

    ptxas otherwise spills some bytes to fit one more program on a multiprocessor than is launched.
    jax-triton has no argument for Triton's `maxnreg`. If the compiler lacks the internals that it
    had in 3.6, there is no limit.
    """
    module: Any = getattr(_generator, "module", None)
    if hasattr(module, "set_attr"):
        limit = _semantic.builder.get_int32_attr(tl.core._unwrap_if_constexpr(count))
        module.set_attr("ttg.maxnreg", limit)


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
    return tl.where(x == x, t, x)  # `minimum` turned NaN into a number


@triton.jit
def bias_of(rows, q_pos, k_pos, last, SHAPE: tl.constexpr, C: tl.constexpr):
    """float32 SHAPE, [rows, keys], of the tables of relative positions, in base 2.

    Keys further back than any row's table reaches get its first number without a lookup.
    """
    EXTENT: tl.constexpr = C.BIAS_COLUMNS // 2
    bias = tl.zeros(SHAPE, tl.float32) + rows.far[:, None]
    if last - rows.lowest > -EXTENT:
        column = tl.minimum(tl.maximum(k_pos - q_pos, -EXTENT), EXTENT) + EXTENT
        bias = tl.load(rows.terms.bias[:, None] + column)
    return bias


@triton.jit
def factored_logits(dots, rows, q_pos, k_pos, last, POSITIVE: tl.constexpr, C: tl.constexpr):
    """`(x, factor)`: the scaled, capped, biased logits are `x * factor[:, None]`.

    The factor is positive, so the largest x is the largest logit's, and the rest of a logit, a
    product and a difference, is one instruction of `update`. It is 1 where the scale may be
    negative or 0, and with slopes or a relative bias.

    Args:
      dots: [rows, keys].
      rows: their scale and terms; the cap is a positive number.
      q_pos, k_pos: int32 that broadcast to [rows, keys].
      last: no key is at a later position.
      POSITIVE: whether the scale is known to be positive.
    """
    scale = rows.scale
    one = tl.full(scale.shape, 1.0, tl.float32)
    if C.HAS_CAP:
        cap = rows.terms.cap
        x = tanh(dots * (scale / cap)[:, None])
        factor = one * cap
    elif POSITIVE:
        x = dots
        factor = scale
    else:
        x = dots * scale[:, None]
        factor = one
    if C.HAS_SLOPES:
        distance = (k_pos - q_pos).to(tl.float32)
        x = x * factor[:, None] + rows.terms.slopes[:, None] * distance
        factor = one
    if C.BIAS_COLUMNS > 0:
        x = x * factor[:, None] + bias_of(rows, q_pos, k_pos, last, x.shape, C)
        factor = one
    return x, factor


@triton.jit
def finite_max(m):
    """`m`, or 0 where it is -inf: subtracting it gives exp2(-inf) = 0 and never NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def empty(ROWS: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr):
    """The state `(m, l, acc0, acc1, added)` of rows that have seen nothing.

    m is in base 2, `(acc0, acc1)` the two parts of a value's columns, and `added` what zero points
    of values add to every column. acc1 is unused where V1 is 0.
    """
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc0 = tl.zeros((ROWS, V0), tl.float32)
    acc1 = l
    if V1 > 0:
        acc1 = tl.zeros((ROWS, V1), tl.float32)
    return m, l, acc0, acc1, tl.zeros((ROWS,), tl.float32)


@triton.jit
def update(m, l, x, factor, MASKED: tl.constexpr):
    """Add the logits `x * factor[:, None]` [rows, keys] to `(m, l)`: `(m, l, p, shrink)`.

    `p` are the weights of the keys' values; `shrink` rescales earlier sums. Without MASKED, no
    logit is -inf.
    """
    m_new = tl.maximum(m, tl.max(x, axis=1) * factor)
    base = m_new
    if MASKED:
        base = finite_max(m_new)
    p = tl.exp2(x * factor[:, None] - base[:, None])
    shrink = tl.exp2(m - base)
    return m_new, l * shrink + tl.sum(p, axis=1), p, shrink


@triton.jit
def merge(m, l, acc, some_m, some_l, some_acc):
    """Merge the states `(m, l, acc)` [R], [R], [R, V] of rows with n of other keys [n, R]."""
    m_new = tl.maximum(m, tl.max(some_m, axis=0))
    base = finite_max(m_new)
    weight = tl.exp2(some_m - base[None, :])
    shrink = tl.exp2(m - base)
    l = l * shrink + tl.sum(some_l * weight, axis=0)
    acc = acc * shrink[:, None] + tl.sum(some_acc * weight[:, :, None], axis=0)
    return m_new, l, acc


@triton.jit
def finish(m, l, sinks, HAS_SINKS: tl.constexpr):
    """`(factor, lse)` of rows `(m, l)`, m in base 2: `out = acc * factor`, the lse natural.

    A row that has seen nothing gets factor 0 and lse -inf, or its sink.
    """
    empty = l == 0.0
    top = m
    rescale = 1.0
    nothing = float("-inf")
    if HAS_SINKS:
        nothing = sinks
        top = tl.maximum(m, sinks * LOG2E)
        base = finite_max(top)
        rescale = tl.exp2(m - base)
        l = l * rescale + tl.exp2(sinks * LOG2E - base)
    safe = tl.where(empty, 1.0, l)
    factor = rescale / safe
    lse = (top + tl.log2(safe)) * LN2
    return tl.where(empty, 0.0, factor), tl.where(empty, nothing, lse)


@triton.jit
def lengths_and_starts(sequences_ptr, num_seqs):
    """Where `seq_lens` and `query_start_loc` are in `sequences`; see `launch.buffers_of`."""
    return sequences_ptr, sequences_ptr + (num_seqs + 3) // 4 * 4


@triton.jit
def rows_at(first_token, first_row, count, head, kv_heads, C: tl.constexpr):
    """`(row, real, query_head, out_row)` of a tile's rows; `out_row` int64, a row of [T, H]."""
    row = first_row + tl.arange(0, C.ROWS)
    query_head = head * C.GROUP + row % C.GROUP
    out_row = (first_token + row // C.GROUP).to(tl.int64) * (kv_heads * C.GROUP) + query_head
    return row, row < count * C.GROUP, query_head, out_row


@triton.jit
def row_exponent(x0, x1, D1: tl.constexpr):
    """Per row of float32 [rows, D0] and [rows, D1], its largest number's power of two.

    Divided by it, rows fit float16's range and lose nothing that counts.
    """
    top = tl.max(tl.abs(x0), axis=1)
    if D1 > 0:
        top = tl.maximum(top, tl.max(tl.abs(x1), axis=1))
    bits = tl.maximum(top, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_queries(query_ptr, k_scale_ptr, scale, out_row, real, head, C: tl.constexpr):
    """`(q0, q1, total, row_scale)` of a tile's rows, as operands of a dot; zeros where not `real`.

    q1 is unused where C.D1 is 0, and `total`, the sum of a row's numbers, where keys have no zero
    points. `scale` is in base 2, and a row's dots are multiplied by its `row_scale`.
    """
    dims = tl.arange(0, C.D0)
    mask = real[:, None] & (dims < C.D)[None, :]
    q0 = tl.load(query_ptr + out_row[:, None] * C.D + dims[None, :], mask=mask, other=0.0)
    q1 = q0
    if C.D1 > 0:
        dims = C.D0 + tl.arange(0, C.D1)
        mask = real[:, None] & (dims < C.D)[None, :]
        q1 = tl.load(query_ptr + out_row[:, None] * C.D + dims[None, :], mask=mask, other=0.0)
        q1 = in_order_of_codes(q1, C.K_PER_WORD)
    q0 = in_order_of_codes(q0, C.K_PER_WORD)
    row_scale = tl.zeros((C.ROWS,), tl.float32) + scale
    if C.HAS_K_SCALE:
        row_scale = row_scale * tl.load(k_scale_ptr + head)
    if C.K_CODES == "e2m1":
        row_scale = row_scale * E2M1_GAIN
    if C.NORMALIZE:
        x0 = q0.to(tl.float32)
        x1 = q1.to(tl.float32)
        size = row_exponent(x0, x1, C.D1)
        q0 = (x0 / size[:, None]).to(C.QK_DTYPE)
        q1 = (x1 / size[:, None]).to(C.QK_DTYPE)
        row_scale = row_scale * size
    else:
        q0 = q0.to(C.QK_DTYPE)
        q1 = q1.to(C.QK_DTYPE)
    total = row_scale
    if C.K_ZERO:
        total = tl.sum(q0.to(tl.float32), axis=1)
        if C.D1 > 0:
            total = total + tl.sum(q1.to(tl.float32), axis=1)
    return q0, q1, total, row_scale


@triton.jit
def load_rows(
    query_ptr, k_scale_ptr, terms, scale, row, first_row, real, query_head, out_row, first_token,
    first, head, C: tl.constexpr,
):  # fmt: skip
    """The `Rows` of a tile.

    Args:
      terms: `Terms`, as arrays.
      scale: in base 2.
      row, real, query_head, out_row: from `rows_at`, `real` without padding.
      first_row: of the tile.
      first_token, first: the sequence's first query token, and its position.
    """
    q0, q1, total, row_scale = load_queries(query_ptr, k_scale_ptr, scale, out_row, real, head, C)
    index = row // C.GROUP
    token = first_token + index
    positions = first + index
    lowest = first + first_row // C.GROUP
    cap = 1.0
    if C.HAS_CAP:
        cap = tl.load(terms.cap) * LOG2E
    slopes = row_scale
    if C.HAS_SLOPES:
        slopes = tl.load(terms.slopes + query_head, mask=real, other=0.0) * LOG2E
    bias = index
    far = row_scale
    if C.BIAS_COLUMNS > 0:
        bias = terms.bias + query_head.to(tl.int64) * C.BIAS_COLUMNS
        far = tl.load(bias)
    visible_end = index
    if C.HAS_END:
        visible_end = tl.load(terms.visible_end + token, mask=real, other=0)
    tree = index
    if C.TREE_WORDS > 0:
        tree = terms.tree + token.to(tl.int64) * C.TREE_WORDS
        positions = first + depth_of(tree, index, real, C)
        lowest = first
    of_rows = Terms(cap, slopes, bias, visible_end, tree)
    return Rows(q0, q1, total, row_scale, positions, index, first, lowest, real, far, of_rows)


@triton.jit
def load_sinks(ptr, query_head, out_row, real, C: tl.constexpr):
    """Load the sink of each row: of its query head, or of its token and query head."""
    index = query_head
    if C.SINKS_PER_TOKEN:
        index = out_row
    return tl.load(ptr + index, mask=real, other=float("-inf"))


@triton.jit
def factor_and_lse(
    m, l, sinks_ptr, v_scale_ptr, head, query_head, out_row, real, C: tl.constexpr
):  # fmt: skip
    """`finish` of a tile's rows, with their sinks and the scale of values."""
    sinks = l
    if C.HAS_SINKS:
        sinks = load_sinks(sinks_ptr, query_head, out_row, real, C)
    factor, lse = finish(m, l, sinks, C.HAS_SINKS)
    if C.HAS_V_SCALE:
        factor = factor * tl.load(v_scale_ptr + head)
    return factor, lse


@triton.jit
def keys_seen(rows, k_pos, nearest, last, sight, C: tl.constexpr):
    """`(seen, k_pos)`, [rows, keys], of a tile's rows and its keys at `k_pos` [keys].

    All keys are at positions from `nearest` to `last`. In a tree, keys that are query tokens get
    the positions that they have on each row's path.
    """
    q_pos = rows.positions[:, None]
    of_rows = up_to(sight, rows.terms.visible_end[:, None])
    keys = k_pos[None, :] + tl.zeros((C.ROWS, C.TILE), tl.int32)
    on_path = keys == keys
    if C.TREE_WORDS > 0:
        # Tokens past a tree are a chain: only where it begins differs from row to row.
        past = rows.first + 32 * C.TREE_WORDS
        shift = tl.where(nearest >= past, rows.positions - rows.first - rows.index, 0)
        keys = keys + shift[:, None]
        if (last >= rows.first) & (nearest < past):
            on_path, distance = tree_path(
                rows.terms.tree, rows.index, rows.real, k_pos - rows.first, C
            )
            keys = q_pos - distance
    return on_path & visible(q_pos, keys, of_rows, C), keys


@triton.jit
def store_rows(ptr, out_row, real, x0, x1, C: tl.constexpr):
    """Write `(x0, x1)` to rows `out_row` of [..., V], those that are `real`."""
    dtype = ptr.dtype.element_ty
    to = ptr + out_row[:, None] * C.V
    dims = tl.arange(0, C.V0)
    tl.store(to + dims[None, :], x0.to(dtype), mask=real[:, None] & (dims < C.V)[None, :])
    if C.V1 > 0:
        dims = C.V0 + tl.arange(0, C.V1)
        tl.store(to + dims[None, :], x1.to(dtype), mask=real[:, None] & (dims < C.V)[None, :])


@triton.jit
def columns_of(x, added, C: tl.constexpr):
    """A part of the sums as columns of the output, including what zero points of values add."""
    if C.V_ZERO:
        x = x + added[:, None]
    if C.V_CODES == "e2m1":
        x = x * E2M1_GAIN
    return in_order(x, C.V_PER_WORD)


@triton.jit
def both_columns_of(acc0, acc1, added, C: tl.constexpr):
    """`columns_of` of both parts."""
    acc0 = columns_of(acc0, added, C)
    if C.V1 > 0:
        acc1 = columns_of(acc1, added, C)
    return acc0, acc1


@triton.jit
def finish_rows(
    out_ptr, lse_ptr, out_row, real, factor, lse, acc0, acc1, broken, C: tl.constexpr
):  # fmt: skip
    """Write `(acc0, acc1)` times `factor` and the lse to rows `out_row`; NaN where `broken`."""
    factor = tl.where(broken, float("nan"), factor)
    lse = tl.where(broken, float("nan"), lse)
    acc0 = acc0 * factor[:, None]
    if C.V1 > 0:
        acc1 = acc1 * factor[:, None]
    store_rows(out_ptr, out_row, real, acc0, acc1, C)
    tl.store(lse_ptr + out_row, lse, mask=real)


@triton.jit
def step(
    m, l, acc0, acc1, added, rows, pool, token, start, end, sight,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: a tile's rows and the C.TILE tokens from `token` on.

        dots = (q k^T) k_scale + total k_zero;  acc += (p v_scale) v;  added += p v_zero

    Without MASKED every row must see all of them, none of them a draft token of a tree, and its
    scale must be positive. Head sizes that are not powers of two come in two parts; for others the
    second has no columns (D1 or V1 is 0).
    """
    tokens = token + tl.arange(0, C.TILE)
    inside = (tokens >= start) & (tokens < end)
    offsets = offsets_of(pool, token, start, end, C.K_BLOCK_STRIDE, C.K_TOKEN_STRIDE, C)
    k0 = load_part(
        pool.k, offsets, inside, 0, C.D0, C.D, MASKED, C.K_CODES, C.K_PER_WORD, C.QK_DTYPE
    )
    dots = tl.dot(rows.q0, tl.trans(k0), input_precision="ieee")
    if C.D1 > 0:
        k1 = load_part(
            pool.k, offsets, inside, C.D0, C.D1, C.D, MASKED, C.K_CODES, C.K_PER_WORD, C.QK_DTYPE
        )
        dots = tl.dot(rows.q1, tl.trans(k1), dots, input_precision="ieee")
    if C.K_SCALED:
        scale_offsets = offsets_of(
            pool, token, start, end, C.K_SCALE_BLOCK_STRIDE, C.K_SCALE_TOKEN_STRIDE, C
        )
        dots = dots * load_each(pool.k.scale, scale_offsets, inside, MASKED)[None, :]
        if C.K_ZERO:
            zero = load_each(pool.k.zero, scale_offsets, inside, MASKED)
            dots = dots + rows.total[:, None] * zero[None, :]
    k_pos = positions_of(pool, token, start, end, C)
    nearest = token
    last = token + C.TILE - 1
    if C.SELECTED:
        nearest = tl.min(k_pos, axis=0)
        last = tl.max(k_pos, axis=0)
    keys = k_pos[None, :]
    if MASKED:
        seen, keys = keys_seen(rows, k_pos, nearest, last, sight, C)
    x, factor = factored_logits(dots, rows, rows.positions[:, None], keys, last, not MASKED, C)
    if MASKED:
        x = tl.where(seen & inside[None, :], x, float("-inf"))
    # A bias may be -inf where nothing is masked.
    m, l, p, shrink = update(m, l, x, factor, MASKED or C.BIAS_COLUMNS > 0)
    if C.V_BLOCK_STRIDE != C.K_BLOCK_STRIDE or C.V_TOKEN_STRIDE != C.K_TOKEN_STRIDE:
        offsets = offsets_of(pool, token, start, end, C.V_BLOCK_STRIDE, C.V_TOKEN_STRIDE, C)
    if C.V_SCALED:
        scale_offsets = offsets_of(
            pool, token, start, end, C.V_SCALE_BLOCK_STRIDE, C.V_SCALE_TOKEN_STRIDE, C
        )
        if C.V_ZERO:
            zero = load_each(pool.v.zero, scale_offsets, inside, MASKED)
            added = added * shrink + tl.sum(p * zero[None, :], axis=1)
        p = p * load_each(pool.v.scale, scale_offsets, inside, MASKED)[None, :]
    p = p.to(C.PV_DTYPE)
    v0 = load_part(
        pool.v, offsets, inside, 0, C.V0, C.V, MASKED, C.V_CODES, C.V_PER_WORD, C.PV_DTYPE
    )
    acc0 = tl.dot(p, v0, acc0 * shrink[:, None], input_precision="ieee")
    if C.V1 > 0:
        v1 = load_part(
            pool.v, offsets, inside, C.V0, C.V1, C.V, MASKED, C.V_CODES, C.V_PER_WORD, C.PV_DTYPE
        )
        acc1 = tl.dot(p, v1, acc1 * shrink[:, None], input_precision="ieee")
    return m, l, acc0, acc1, added
