"""Reading slabs of keys or values out of the paged pool.

A slab is `C` consecutive tokens of one sequence for every KV head, read in pieces: runs of tokens
inside a block, `[piece, D]` each, contiguous in the head-major layout. One gather of whole pieces
lays the slabs of all lanes down as `[P * K, C, D]`, ready to be a dot's operand. That gather is a
copy at the machine's rate; indexing with an array of token ids would go element by element.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn import formats
from jattn.cpu.xla import numbers


@dataclasses.dataclass(frozen=True)
class Slab:
    """How many tokens a slab has and in what pieces it is read; all static.

    Attributes:
      block_size: S.
      piece: tokens read at once; divides S.
      pieces: pieces in a slab.
    """

    block_size: int
    piece: int
    pieces: int

    def __post_init__(self) -> None:
        assert self.block_size % self.piece == 0
        assert self.pieces >= 1

    @property
    def tokens(self) -> int:
        """C: tokens in a slab."""
        return self.piece * self.pieces

    @classmethod
    def of(cls, block_size: int, target: int) -> Slab:
        """The slab of about `target` tokens, a power of two, that pieces of blocks can make.

        Exactly `target` for block sizes that are powers of two or multiples of 8. So a block of
        528 tokens and its 33 kernel blocks of 16 are read in the same slabs: same bits.
        """
        piece = math.gcd(block_size, target)
        if piece < min(block_size, 8):  # whole blocks rather than slivers: 20, or the prime 1009
            piece = block_size
        return cls(block_size, piece, max(1, target // piece))


def words_of(x: jax.Array) -> jax.Array:
    """`x` as unsigned words where it is a 16-bit float: XLA CPU never converts those in passing."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def numbers_of(words: jax.Array, dtype: np.dtype) -> jax.Array:
    """The inverse of `words_of`."""
    return words if words.dtype == dtype else lax.bitcast_convert_type(words, dtype)


def read(
    pool: jax.Array,
    table: jax.Array,
    token: jax.Array,
    slab: Slab,
    kv_layout: str,
    decode: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """`[P * K, C, D]`: every lane's tokens from `token` [P], multiples of `slab.piece`, decoded.

    Ids are clamped to the pool and positions to the table [P, M]: whatever the table holds, this
    reads memory of the pool. What lies outside the sequence is for the caller to mask. `decode`
    turns words into numbers, element by element, as they are copied.
    """
    num_lanes = table.shape[0]
    kv_heads, dim = pool.shape[2 if kv_layout == "NHD" else 1], pool.shape[3]
    if kv_layout == "HND" and (width := _row_width(dim, slab.piece)) != dim:
        rows = slab.block_size * dim // width
        wide = pool.reshape(pool.shape[0], kv_heads, rows, width)
        piece = slab.piece * dim // width
        wide_slab = Slab(rows, piece, slab.pieces)
        wide = read(wide, table, token // slab.piece * piece, wide_slab, kv_layout, decode)
        # Without the barrier the copy would be made in the narrow shape after all.
        return lax.optimization_barrier(wide).reshape(num_lanes * kv_heads, slab.tokens, dim)
    where, axes = _pieces(pool, table, token, slab, kv_layout)
    window = tuple(i + 1 for i in range(len(axes.window)))
    pieces = lax.gather(
        pool,
        where,
        lax.GatherDimensionNumbers(
            offset_dims=window, collapsed_slice_dims=axes.indexed, start_index_map=axes.start
        ),
        slice_sizes=axes.sizes,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    if kv_layout == "NHD":
        pieces = pieces.reshape(num_lanes, slab.tokens, kv_heads, dim).swapaxes(1, 2)
    return decode(pieces.reshape(num_lanes * kv_heads, slab.tokens, dim))


def _row_width(dim: int, piece: int) -> int:
    """Elements of a row of the copy: D, or several tokens' worth where D is a small power of two.

    XLA's loop over a minor axis of 64 elements or fewer is unrolled before it could be vectorized:
    at D = 64 the copy then runs at one element a cycle, a sixth of its speed at D = 128.
    """
    if dim > 64 or dim & (dim - 1):
        return dim
    return dim * math.gcd(piece, 512 // dim)


def add(
    pool: jax.Array,
    slabs: jax.Array,
    table: jax.Array,
    token: jax.Array,
    slab: Slab,
    kv_layout: str,
) -> jax.Array:
    """The transpose of `read`: `pool` with slabs `[P * K, C, D]` added where they were read."""
    num_lanes = table.shape[0]
    kv_heads, dim = pool.shape[2 if kv_layout == "NHD" else 1], pool.shape[3]
    where, axes = _pieces(pool, table, token, slab, kv_layout)
    if kv_layout == "NHD":
        slabs = slabs.reshape(num_lanes, kv_heads, slab.tokens, dim).swapaxes(1, 2)
    return lax.scatter_add(
        pool,
        where,
        slabs.reshape(where.shape[0], *axes.window),
        lax.ScatterDimensionNumbers(
            update_window_dims=tuple(i + 1 for i in range(len(axes.window))),
            inserted_window_dims=axes.indexed,
            scatter_dims_to_operand_dims=axes.start,
        ),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


class _Axes(typing.NamedTuple):
    """How a piece lies in the pool: axes an index starts at, those it drops, and its sizes."""

    start: tuple[int, ...]
    indexed: tuple[int, ...]
    sizes: tuple[int, ...]
    window: tuple[int, ...]


def _pieces(
    pool: jax.Array, table: jax.Array, token: jax.Array, slab: Slab, kv_layout: str
) -> tuple[jax.Array, _Axes]:
    """Where the pieces of all slabs start: [P * K * n, 3] head-major, [P * n, 2] token-major."""
    num_lanes = table.shape[0]
    block, offset = _blocks(table, token, slab, pool.shape[0])
    dim = pool.shape[3]
    if kv_layout == "NHD":  # one piece holds all heads
        where = jnp.stack([block.reshape(-1), offset.reshape(-1)], axis=-1)
        window = (slab.piece, pool.shape[2], dim)
        return where, _Axes((0, 1), (0,), (1, *window), window)
    shape = (num_lanes, pool.shape[1], slab.pieces)
    heads = jnp.arange(pool.shape[1], dtype=jnp.int32)[None, :, None]
    parts = (block[:, None], heads, offset[:, None])
    where = jnp.stack([jnp.broadcast_to(x, shape).reshape(-1) for x in parts], axis=-1)
    window = (slab.piece, dim)
    return where, _Axes((0, 1, 2), (0, 1), (1, 1, *window), window)


class Side(typing.NamedTuple):
    """One side, K or V, of a call's cache: where its words lie and how they are read."""

    words: jax.Array
    quant_params: formats.QuantParams
    format: formats.Format
    kv_layout: str


def read_numbers(
    side: Side, table: jax.Array, token: jax.Array, slab: Slab, dtype: np.dtype
) -> tuple[jax.Array, ...]:
    """One slab `[P * K, C, D]` in `dtype`, before scales and zeros but for those of groups.

    Of formats with two numbers a byte, two of D / 2: the even indices and the odd (`numbers`).
    """
    format, where = side.format, (table, token, slab, side.kv_layout)
    if format.values_per_word == 1:
        decode = functools.partial(numbers.of_words, format=format, dtype=dtype)
        return (read(side.words, *where, decode),)
    return numbers.of_bytes(*read_bytes(side, *where[:3]), format, dtype)


def read_bytes(
    side: Side, table: jax.Array, token: jax.Array, slab: Slab
) -> tuple[jax.Array, jax.Array | None]:
    """Bytes [P * K, C, D / 2] as they are, and their groups' words [P * K, C, D / 16] or None.

    Taking them apart inside the gather would go number by number.
    """
    where = (table, token, slab, side.kv_layout, lambda x: x)
    words = lax.optimization_barrier(read(side.words, *where))
    groups = side.quant_params.group_scale
    if groups is not None:
        groups = lax.optimization_barrier(read(groups, *where))
    return words, groups


def read_scales(
    side: Side, table: jax.Array, token: jax.Array, slab: Slab
) -> tuple[jax.Array | None, jax.Array | None]:
    """`(scale, zero)` [P, K, C] float32 of every lane's tokens, or None for lack of them."""
    per_token = (table, token, slab, side.kv_layout, lambda x: x)

    def along_tokens(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        return read(x[..., None], *per_token).reshape(table.shape[0], -1, slab.tokens)

    scale = side.quant_params.scale
    if side.format.per == "block":
        block = _blocks(table, token, slab, scale.shape[0])[0]
        rows = scale.at[block].get(mode="promise_in_bounds").swapaxes(1, 2)  # [P, K, n]
        return jnp.repeat(rows, slab.piece, axis=-1, total_repeat_length=slab.tokens), None
    return along_tokens(scale), along_tokens(side.quant_params.zero)


def _blocks(
    table: jax.Array, token: jax.Array, slab: Slab, num_blocks: int
) -> tuple[jax.Array, jax.Array]:
    """int32 [P, n]: the block each piece of a slab lies in, and where in it; always in the pool."""
    per_block = slab.block_size // slab.piece
    index = (token // slab.piece)[:, None] + jnp.arange(slab.pieces, dtype=jnp.int32)[None]
    last = table.shape[1] - 1
    block = jnp.take_along_axis(table, jnp.minimum(index // per_block, last), axis=1)
    return jnp.clip(block, 0, num_blocks - 1), index % per_block * slab.piece
