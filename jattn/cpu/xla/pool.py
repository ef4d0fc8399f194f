"""Reading tiles of keys or values out of the paged pool.

A KV tile is `C` consecutive tokens of one sequence for every KV head, read in kernel blocks: runs
of tokens inside a block, `[kernel_block, D]` each, contiguous in the head-major layout. One gather
of whole kernel blocks writes the tiles of all work items as `[P * K, C, D]`, ready to be a dot's
operand. That gather copies at the machine's bandwidth; indexing with an array of token ids would go
element by element.
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

from jattn import call as calls
from jattn import formats
from jattn.cpu.xla import numbers
from jattn.formats import rounding


@dataclasses.dataclass(frozen=True)
class KVTile:
    """How many tokens a tile has and in which kernel blocks it is read; all static.

    Attributes:
      block_size: S.
      kernel_block: tokens read at once; divides S.
      num_kernel_blocks: kernel blocks in a tile.
    """

    block_size: int
    kernel_block: int
    num_kernel_blocks: int

    def __post_init__(self) -> None:
        assert self.block_size % self.kernel_block == 0
        assert self.num_kernel_blocks >= 1

    @property
    def tokens(self) -> int:
        """C: tokens in a tile."""
        return self.kernel_block * self.num_kernel_blocks

    @classmethod
    def of(cls, block_size: int, target: int) -> KVTile:
        """Return a tile of about `target` tokens, a power of two, in whole kernel blocks.

        Exactly `target` for block sizes that are powers of two or multiples of 8. So blocks of 528
        tokens are read in the same tiles as their 33 kernel blocks of 16, and give the same bits.
        """
        kernel_block = math.gcd(block_size, target)
        if kernel_block < min(block_size, 8):  # 20, or the prime 1009: whole blocks, not slivers
            kernel_block = block_size
        return cls(block_size, kernel_block, max(1, target // kernel_block))


class Place(typing.NamedTuple):
    """Which tokens of the pool are in the tiles of P work items."""

    table: jax.Array  # int32 [P, M]
    token: jax.Array  # int32 [P]: a tile's first, a multiple of the kernel block
    tile: KVTile
    kv_layout: str


class Part(typing.NamedTuple):
    """Which numbers of a token that holds keys and values are its keys, or values; all static."""

    heads: int  # K
    rows: int  # of a token, K or more
    start: int  # in a row
    size: int
    width: int  # of a row


class Source(typing.NamedTuple):
    """The keys or the values of a call's cache, and how they are read."""

    words: jax.Array
    quant_params: formats.QuantParams[jax.Array]
    format: formats.Format
    part: Part | None = None  # None: all of the words


def of_call(call: calls.Call, operands: calls.Operands) -> tuple[Source, Source]:
    """The call's keys and values."""
    keys = Source(operands.key_cache, operands.k_quant_params, call.key_format)
    if call.rows is not None:
        count, width, start = call.rows.count, call.rows.width, call.rows.value_start
        keys = keys._replace(part=Part(call.num_kv_heads, count, 0, call.head_dim, width))
        if call.values_in_keys:
            return keys, keys
        return keys, keys._replace(
            part=Part(call.num_kv_heads, count, start, call.value_dim, width)
        )
    if operands.value_cache is None:
        return keys, keys
    return keys, Source(operands.value_cache, operands.v_quant_params, call.value_format)


def words_of(x: jax.Array) -> jax.Array:
    """`x`, as unsigned words if it is a 16-bit float: XLA for CPU copies these without converting.

    `rounding.bitcast` is the inverse.
    """
    return rounding.bitcast(x, np.dtype(np.uint16)) if x.dtype.itemsize == 2 else x


def read(
    pool: jax.Array,
    place: Place,
    decode: Callable[[jax.Array], jax.Array],
    part: Part | None = None,
) -> jax.Array:
    """Read the tokens at a place, or a part of them, decoded: `[P * K, C, D]`.

    Ids are clamped to the pool and positions to the table [P, M]: whatever the table holds, this
    reads memory of the pool. The caller masks what lies outside the sequence. `decode` turns words
    into numbers, element by element, as they are copied.
    """
    table, token, tile, kv_layout = place
    num_items = table.shape[0]
    if part is not None:
        tokens = _gather(pool, place).reshape(num_items, tile.tokens, part.rows, part.width)
        end = part.start + part.size
        # Slice the tile, not the pool: what is left out of a token is not copied.
        x = tokens[:, :, : part.heads, part.start : end].swapaxes(1, 2)
        return decode(x.reshape(num_items * part.heads, tile.tokens, part.size))
    kv_heads, dim = pool.shape[2 if kv_layout == "NHD" else 1], pool.shape[3]
    if kv_layout == "HND" and (width := _row_width(dim, tile.kernel_block)) != dim:
        rows = tile.block_size * dim // width
        wide = pool.reshape(pool.shape[0], kv_heads, rows, width)
        kernel_block = tile.kernel_block * dim // width
        token = token // tile.kernel_block * kernel_block
        wide_tile = KVTile(rows, kernel_block, tile.num_kernel_blocks)
        wide = read(wide, Place(table, token, wide_tile, kv_layout), decode)
        # Without the barrier the copy would be made in the narrow shape after all.
        return lax.optimization_barrier(wide).reshape(num_items * kv_heads, tile.tokens, dim)
    blocks = _gather(pool, place)
    if kv_layout == "NHD":
        blocks = blocks.reshape(num_items, tile.tokens, kv_heads, dim).swapaxes(1, 2)
    return decode(blocks.reshape(num_items * kv_heads, tile.tokens, dim))


def _gather(pool: jax.Array, place: Place) -> jax.Array:
    """The kernel blocks of a place, one after another."""
    where, axes = _locate(pool, place)
    window = tuple(i + 1 for i in range(len(axes.window)))
    return lax.gather(
        pool,
        where,
        lax.GatherDimensionNumbers(
            offset_dims=window, collapsed_slice_dims=axes.indexed, start_index_map=axes.start
        ),
        slice_sizes=axes.sizes,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def _row_width(dim: int, kernel_block: int) -> int:
    """Elements of a row of the copy: D, or several tokens' worth where D is a small power of two.

    XLA unrolls a loop over a minor axis of 64 elements or fewer before it could be vectorized: at
    D = 64 the copy then runs at one element a cycle, a sixth of its speed at D = 128.
    """
    if dim > 64 or dim & (dim - 1):
        return dim
    return dim * math.gcd(kernel_block, 512 // dim)


def add(pool: jax.Array, tiles: jax.Array, place: Place, part: Part | None = None) -> jax.Array:
    """The transpose of `read`: add tiles `[P * K, C, D]` to `pool` where they were read."""
    where, axes = _locate(pool, place)
    if part is not None:
        shape = (place.table.shape[0], part.heads, place.tile.tokens, part.size)
        around = ((0, part.rows - part.heads), (part.start, part.width - part.start - part.size))
        tiles = jnp.pad(tiles.reshape(shape).swapaxes(1, 2), ((0, 0), (0, 0), *around))
    elif place.kv_layout == "NHD":
        shape = (place.table.shape[0], pool.shape[2], place.tile.tokens, pool.shape[3])
        tiles = tiles.reshape(shape).swapaxes(1, 2)
    return lax.scatter_add(
        pool,
        where,
        tiles.reshape(where.shape[0], *axes.window),
        lax.ScatterDimensionNumbers(
            update_window_dims=tuple(i + 1 for i in range(len(axes.window))),
            inserted_window_dims=axes.indexed,
            scatter_dims_to_operand_dims=axes.start,
        ),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


class _Axes(typing.NamedTuple):
    """How a kernel block lies in the pool: the axes an index sets or drops, and its sizes."""

    start: tuple[int, ...]
    indexed: tuple[int, ...]
    sizes: tuple[int, ...]
    window: tuple[int, ...]


def _locate(pool: jax.Array, place: Place) -> tuple[jax.Array, _Axes]:
    """Where all kernel blocks start: [P * K * n, 3] head-major, [P * n, 2] token-major."""
    block, offset = _blocks(place, pool.shape[0])
    size = place.tile.kernel_block
    if place.kv_layout != "HND":  # a kernel block has all heads, in any number of axes
        where = jnp.stack([block.reshape(-1), offset.reshape(-1)], axis=-1)
        window = (size, *pool.shape[2:])
        return where, _Axes((0, 1), (0,), (1, *window), window)
    dim = pool.shape[3]
    shape = (block.shape[0], pool.shape[1], block.shape[1])
    heads = jnp.arange(pool.shape[1], dtype=jnp.int32)[None, :, None]
    parts = (block[:, None], heads, offset[:, None])
    where = jnp.stack([jnp.broadcast_to(x, shape).reshape(-1) for x in parts], axis=-1)
    return where, _Axes((0, 1, 2), (0, 1), (1, 1, size, dim), (size, dim))


def read_numbers(source: Source, place: Place, dtype: np.dtype) -> tuple[jax.Array, ...]:
    """Read one tile `[P * K, C, D]` in `dtype`, before scales (except of groups) and zero points.

    Formats with two numbers per byte give two of D / 2: even indices and odd ones (`numbers`).
    """
    if source.format.values_per_word == 1:
        decode = functools.partial(numbers.of_words, format=source.format, dtype=dtype)
        return (read(source.words, place, decode, source.part),)
    return numbers.of_bytes(*read_bytes(source, place), source.format, dtype)


def read_bytes(source: Source, place: Place) -> tuple[jax.Array, jax.Array | None]:
    """Read bytes [P * K, C, D / 2] as stored, and their groups' words [P * K, C, D / 16] or None.

    Unpacking them inside the gather would go number by number.
    """
    words = lax.optimization_barrier(read(source.words, place, lambda x: x))
    groups = source.quant_params.group_scale
    if groups is not None:
        groups = lax.optimization_barrier(read(groups, place, lambda x: x))
    return words, groups


def read_scales(source: Source, place: Place) -> tuple[jax.Array | None, jax.Array | None]:
    """Read `(scale, zero)` [P, K, C] float32 of every item's tokens; each may be None."""
    tokens = place.tile.tokens

    def along_tokens(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        rows = read(x[..., None], place, lambda x: x)
        return rows.reshape(place.table.shape[0], -1, tokens)

    scale = source.quant_params.scale
    if scale is not None and source.format.per == "block":
        block = _blocks(place, scale.shape[0])[0]
        rows = scale.at[block].get(mode="promise_in_bounds").swapaxes(1, 2)  # [P, K, n]
        size = place.tile.kernel_block
        return jnp.repeat(rows, size, axis=-1, total_repeat_length=tokens), None
    return along_tokens(scale), along_tokens(source.quant_params.zero)


def _blocks(place: Place, num_blocks: int) -> tuple[jax.Array, jax.Array]:
    """int32 [P, n]: the block of every kernel block, always in the pool, and its offset there."""
    table, tile = place.table, place.tile
    per_block = tile.block_size // tile.kernel_block
    steps = jnp.arange(tile.num_kernel_blocks, dtype=jnp.int32)[None]
    index = (place.token // tile.kernel_block)[:, None] + steps
    last = table.shape[1] - 1
    block = jnp.take_along_axis(table, jnp.minimum(index // per_block, last), axis=1)
    return jnp.clip(block, 0, num_blocks - 1), index % per_block * tile.kernel_block
