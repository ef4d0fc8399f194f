"""Reading slabs of keys or values out of the paged pool.

A slab is `C` consecutive tokens of one sequence for every KV head, read in pieces: runs of tokens
inside a block, `[piece, D]` each, contiguous in the head-major layout. One gather of whole pieces
lays the slabs of all lanes down as `[P * K, C, D]`, ready to be a dot's operand. That gather is a
copy at the machine's rate; indexing with an array of token ids would go element by element.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn import formats


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
        """The slab of about `target` tokens, a power of two, that pieces of blocks can make."""
        if block_size <= target:
            return cls(block_size, block_size, target // block_size)
        divisors = [d for d in range(1, target + 1) if block_size % d == 0]
        piece = divisors[-1]
        # A block of an awkward size (1009, a prime) is read whole rather than in slivers.
        return cls(block_size, piece if piece * 8 >= target else block_size, 1)


def words_of(x: jax.Array) -> jax.Array:
    """`x` as unsigned words where it is a 16-bit float: XLA CPU never converts those in passing."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def read(
    pool: jax.Array, table: jax.Array, token: jax.Array, slab: Slab, kv_layout: str
) -> jax.Array:
    """Words `[P * K, C, D]` of every lane's tokens from `token` [P], multiples of `slab.piece`.

    Ids are clamped to the pool and positions to the table [P, M]: whatever the table holds, this
    reads memory of the pool. What lies outside the sequence is for the caller to mask.
    """
    num_lanes, width = table.shape
    per_block = slab.block_size // slab.piece
    index = (token // slab.piece)[:, None] + jnp.arange(slab.pieces, dtype=jnp.int32)[None]
    block = jnp.take_along_axis(table, jnp.minimum(index // per_block, width - 1), axis=1)
    block = jnp.clip(block, 0, pool.shape[0] - 1)
    offset = index % per_block * slab.piece
    if kv_layout == "NHD":
        return _read_token_major(pool, block, offset, slab)
    kv_heads, dim = pool.shape[1], pool.shape[3]
    shape = (num_lanes, kv_heads, slab.pieces)
    heads = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    where = jnp.stack(
        [jnp.broadcast_to(x, shape).reshape(-1) for x in (block[:, None], heads, offset[:, None])],
        axis=-1,
    )
    pieces = lax.gather(
        pool,
        where,
        lax.GatherDimensionNumbers(
            offset_dims=(1, 2), collapsed_slice_dims=(0, 1), start_index_map=(0, 1, 2)
        ),
        slice_sizes=(1, 1, slab.piece, dim),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return pieces.reshape(num_lanes * kv_heads, slab.tokens, dim)


def _read_token_major(
    pool: jax.Array, block: jax.Array, offset: jax.Array, slab: Slab
) -> jax.Array:
    """The same from [N, S, K, D]: whole pieces of all heads, then heads to the front."""
    num_lanes, kv_heads, dim = block.shape[0], pool.shape[2], pool.shape[3]
    pieces = lax.gather(
        pool,
        jnp.stack([block.reshape(-1), offset.reshape(-1)], axis=-1),
        lax.GatherDimensionNumbers(
            offset_dims=(1, 2, 3), collapsed_slice_dims=(0,), start_index_map=(0, 1)
        ),
        slice_sizes=(1, slab.piece, kv_heads, dim),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    tokens = pieces.reshape(num_lanes, slab.tokens, kv_heads, dim).swapaxes(1, 2)
    return tokens.reshape(num_lanes * kv_heads, slab.tokens, dim)


def decode(words: jax.Array, format: formats.Format, dtype: np.dtype) -> jax.Array:
    """The numbers of slabs in the dtype of the dots; exact, since `dtype` is never narrower."""
    numbers = words if words.dtype == format.value_dtype else format.decode(words)
    return numbers.astype(dtype)
