"""Keys and values in a pool, for Triton: where a sequence's tokens are, and their numbers.

pool_of                                  keys and values of a sequence and KV head
positions_of, selected_range             tokens that are read, and their positions
offsets_of                               where tokens of a sequence are in a pool
names_no_block                           whether any of their ids is outside it
numbers_of                               a format's words, widened
load_part                                keys or values of a tile, as operands of a dot
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

IDS_AT_A_TIME = tl.constexpr(512)
E2M1_GAIN = tl.constexpr(128.0)  # what NVFP4's numbers were divided by: see `load_part`


class Stored(NamedTuple):
    """The keys or the values of one KV head. What their format lacks is another array, not read."""

    words: Any
    groups: Any  # scales of 16 numbers each, e4m3
    scale: Any  # of each token or block
    zero: Any  # of each token


class Pool(NamedTuple):
    """Keys and values of one sequence and one KV head; Triton reserves the name `values`."""

    k: Stored
    v: Stored
    table: Any
    columns: Any  # if C.SELECTED, where in the whole table each of `table`'s columns is
    num_blocks: Any


@triton.jit
def pool_of(arrays, b, width, head, C: tl.constexpr):
    """The part of a `Pool` of all sequences and heads that belongs to one.

    Words get their true dtype here, and nothing is copied.
    """
    k_groups = arrays.k.groups
    if C.K_CODES == "e2m1":
        k_groups = k_groups.to(tl.pointer_type(C.GROUPS_STORED), bitcast=True)
    v_groups = arrays.v.groups
    if C.V_CODES == "e2m1":
        v_groups = v_groups.to(tl.pointer_type(C.GROUPS_STORED), bitcast=True)
    k = Stored(
        arrays.k.words.to(tl.pointer_type(C.K_STORED), bitcast=True) + head * C.K_HEAD_STRIDE,
        k_groups + head * C.K_HEAD_STRIDE // 2,
        arrays.k.scale + head * C.K_SCALE_HEAD_STRIDE,
        arrays.k.zero + head * C.K_SCALE_HEAD_STRIDE,
    )
    v = Stored(
        arrays.v.words.to(tl.pointer_type(C.V_STORED), bitcast=True)
        + C.V_START
        + head * C.V_HEAD_STRIDE,
        v_groups + head * C.V_HEAD_STRIDE // 2,
        arrays.v.scale + head * C.V_SCALE_HEAD_STRIDE,
        arrays.v.zero + head * C.V_SCALE_HEAD_STRIDE,
    )
    row = b.to(tl.int64) * width
    return Pool(k, v, arrays.table + row, arrays.columns + row, arrays.num_blocks)


@triton.jit
def positions_of(pool, token, start, end, C: tl.constexpr):
    """int32 [TILE]: positions of the tokens `token`, `token + 1`, ... of a pool.

    Selected blocks are numbered without gaps, so a token's number is not its position.
    """
    tokens = token + tl.arange(0, C.TILE)
    if C.SELECTED and C.BLOCK_SIZE % C.TILE == 0:
        column = tl.load(pool.columns + token // C.BLOCK_SIZE)
        tokens = column * C.BLOCK_SIZE + tokens % C.BLOCK_SIZE
    elif C.SELECTED:
        inside = (tokens >= start) & (tokens < end)
        columns = tl.load(pool.columns + tokens // C.BLOCK_SIZE, mask=inside, other=0)
        tokens = columns * C.BLOCK_SIZE + tokens % C.BLOCK_SIZE
    return tokens


@triton.jit
def selected_range(pool, num_selected, start, end, C: tl.constexpr):
    """`(start, end)` of the selected tokens in blocks that have positions in `[start, end)`."""
    before = tl.zeros((IDS_AT_A_TIME,), tl.int32)
    below = tl.zeros((IDS_AT_A_TIME,), tl.int32)
    count = (num_selected + C.BLOCK_SIZE - 1) // C.BLOCK_SIZE
    for chunk_start in range(0, count, IDS_AT_A_TIME):
        entry = chunk_start + tl.arange(0, IDS_AT_A_TIME)
        there = entry < count
        columns = tl.load(pool.columns + entry, mask=there, other=0)
        before += (there & (columns < start // C.BLOCK_SIZE)).to(tl.int32)
        below += (there & (columns * C.BLOCK_SIZE < end)).to(tl.int32)
    first = tl.sum(before, axis=0) * C.BLOCK_SIZE
    after = tl.minimum(tl.sum(below, axis=0) * C.BLOCK_SIZE, num_selected)
    return first, tl.maximum(after, first)


@triton.jit
def offsets_of(
    pool, token, start, end,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """int64 [TILE]: where tokens `token`, `token + 1`, ... are in one head of a pool.

    `token` is a multiple of TILE. Ids are clamped to the pool, and the table is read only inside
    `[start, end)`: whatever it holds, these offsets are inside the pool.
    """
    inner = tl.arange(0, C.TILE)
    if C.BLOCK_SIZE % C.TILE == 0:
        # The tile is in one block: one id, and rows at a constant distance.
        block = tl.load(pool.table + token // C.BLOCK_SIZE)
        block = tl.minimum(tl.maximum(block, 0), pool.num_blocks - 1).to(tl.int64)
        rows = (token % C.BLOCK_SIZE + inner).to(tl.int64)
        return block * BLOCK_STRIDE + rows * TOKEN_STRIDE
    positions = token + inner
    inside = (positions >= start) & (positions < end)
    blocks = tl.load(pool.table + positions // C.BLOCK_SIZE, mask=inside, other=0)
    blocks = tl.minimum(tl.maximum(blocks, 0), pool.num_blocks - 1).to(tl.int64)
    return blocks * BLOCK_STRIDE + (positions % C.BLOCK_SIZE).to(tl.int64) * TOKEN_STRIDE


@triton.jit
def names_no_block(pool, start, end, C: tl.constexpr):
    """Whether the block id of a token in `[start, end)` is invalid; no key is loaded.

    Ids are read ahead of the keys, many at a time: the kernel then finds them in L1.
    """
    first = start // C.BLOCK_SIZE
    after = tl.where(end > start, (tl.maximum(end, 1) - 1) // C.BLOCK_SIZE + 1, first)
    found = tl.zeros((IDS_AT_A_TIME,), tl.int32)
    for chunk_start in range(first, after, IDS_AT_A_TIME):
        entry = chunk_start + tl.arange(0, IDS_AT_A_TIME)
        ids = tl.load(pool.table + entry, mask=entry < after, other=0)
        found = found | ((ids < 0) | (ids >= pool.num_blocks)).to(tl.int32)
    return tl.max(found, axis=0) > 0


@triton.jit
def load_columns(
    ptr, offsets, real, FIRST: tl.constexpr, COUNT: tl.constexpr, END: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """[rows, COUNT] elements from column FIRST on; zeros where not `real`, and from END on."""
    columns = FIRST + tl.arange(0, COUNT)
    at = ptr + offsets[:, None] + columns[None, :]
    if FIRST + COUNT > END:
        if MASKED:
            x = tl.load(at, mask=real[:, None] & (columns < END)[None, :], other=0.0)
        else:
            x = tl.load(at, mask=(columns < END)[None, :], other=0.0)
    elif MASKED:
        x = tl.load(at, mask=real[:, None], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def small_e4m3(x):
    """Codes, uint32 or each half of it, times 2^-8 as bits of float16: the same bits, 7 places up.

    Only NaN carries into the bit above when 1 is added, which makes it float16's NaN.
    """
    nan = (x & 0x007F007F) + 0x00010001 & 0x00800080
    return (x & 0x007F007F | nan) << 7 | (x & 0x00800080) << 8


@triton.jit
def two_of_each(x, DTYPE: tl.constexpr):
    """Split each uint32 into two numbers of 16 bits, [rows, n] to [rows, 2 n]: free on a GPU."""
    low = (x & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
    high = (x >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
    return tl.interleave(low, high)


@triton.jit
def numbers_of(words, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers of words as DTYPE, exact, in the order of `in_order_of_codes`.

    Those of "e2m1" are times 2^-14 and float16: scales come later. Bit operations replace
    conversions that older GPUs lack, or that take longer on any GPU, and work on two of the 4 or 8
    codes in a uint32 at a time, 16 bits each.
    """
    if CODES == "e5m2":  # the upper half of float16
        x = (words.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    elif CODES == "e4m3":
        x = tl.interleave(small_e4m3(words), small_e4m3(words >> 8))
        x = (two_of_each(x, tl.float16) * 256.0).to(DTYPE)
    elif CODES == "int8":  # the last bits of a number whose last place is 1; int4 likewise
        even = words & 0x00FF00FF ^ 0x64806480
        odd = (words >> 8) & 0x00FF00FF ^ 0x64806480
        x = (two_of_each(tl.interleave(even, odd), tl.float16) - 1152.0).to(DTYPE)
    elif CODES == "int4":
        even = tl.interleave(words & 0x000F000F, (words >> 8) & 0x000F000F)
        odd = tl.interleave((words >> 4) & 0x000F000F, (words >> 12) & 0x000F000F)
        x = tl.interleave(even, odd)
        if tl.bfloat16 == DTYPE:
            x = (two_of_each(x ^ 0x43084308, tl.bfloat16) - 136.0).to(DTYPE)
        else:
            x = (two_of_each(x ^ 0x64086408, tl.float16) - 1032.0).to(DTYPE)
    elif CODES == "e2m1":  # the last two bits of an exponent, the first of a significand, a sign
        x0 = (words << 9) & 0x0E000E00 | (words << 12) & 0x80008000
        x1 = (words << 5) & 0x0E000E00 | (words << 8) & 0x80008000
        x2 = (words << 1) & 0x0E000E00 | (words << 4) & 0x80008000
        x3 = (words >> 3) & 0x0E000E00 | words & 0x80008000
        x = two_of_each(tl.interleave(tl.interleave(x0, x2), tl.interleave(x1, x3)), tl.float16)
    else:
        tl.static_assert(CODES == "")
        x = words.to(DTYPE)
    return x


@triton.jit
def in_order_of_codes(x, PER_WORD: tl.constexpr):
    """The columns of [rows, n] in the order of `numbers_of`, PER_WORD of them from each word.

    A pair is a number of a word's first half and the one in the same place of its second half.
    """
    if PER_WORD > 1:
        y = x.reshape(x.shape[0], x.shape[1] // PER_WORD, 2, PER_WORD // 2)
        x = tl.permute(y, (0, 1, 3, 2)).reshape(x.shape[0], x.shape[1])
    return x


@triton.jit
def in_order(x, PER_WORD: tl.constexpr):
    """The inverse of `in_order_of_codes`."""
    if PER_WORD > 1:
        y = x.reshape(x.shape[0], x.shape[1] // PER_WORD, PER_WORD // 2, 2)
        x = tl.permute(y, (0, 1, 3, 2)).reshape(x.shape[0], x.shape[1])
    return x


@triton.jit
def load_part(
    stored, offsets, real, FIRST: tl.constexpr, PART: tl.constexpr, DIM: tl.constexpr,
    MASKED: tl.constexpr, CODES: tl.constexpr, PER_WORD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[rows, PART] numbers from dimension FIRST on, as DTYPE; zeros where not `real`, and past DIM.

    In the order of `in_order_of_codes`; "e2m1" divided by E2M1_GAIN. Rows that are not `real` are
    not read: they may hold NaN, and 0 * NaN is not 0. Scales of groups are applied, those of tokens
    and blocks are not. `offsets` are in words.
    """
    words = load_columns(
        stored.words, offsets, real, FIRST // PER_WORD, PART // PER_WORD, DIM // PER_WORD, MASKED
    )
    x = numbers_of(words, CODES, DTYPE)
    if CODES == "e2m1":
        # A group is two words. Its scale is multiplied by 2^7 and its numbers by 2^-14, so that
        # both, and their products, are exact in float16.
        COUNT: tl.constexpr = PART // 16
        scales = load_columns(
            stored.groups, offsets // 2, real, FIRST // 16, COUNT, (DIM + 15) // 16, MASKED
        )
        if scales.dtype == tl.uint8:
            scales = small_e4m3(scales.to(tl.uint32)).to(tl.uint16).to(tl.float16, bitcast=True)
            scales = scales * 32768.0
        else:
            scales = scales.to(tl.float16) * 128.0
        x = x.reshape(x.shape[0], COUNT, 16) * scales[:, :, None]
        x = x.reshape(x.shape[0], PART).to(DTYPE)
    return x


@triton.jit
def load_each(ptr, offsets, real, MASKED: tl.constexpr):
    """Load a number of each row, 0 where not `real`."""
    return tl.load(ptr + offsets, mask=real, other=0.0) if MASKED else tl.load(ptr + offsets)
