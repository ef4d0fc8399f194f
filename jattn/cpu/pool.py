"""Reading a slab of keys or values out of the paged pool.

A slab is `C` consecutive tokens of one sequence, `[K, C, D]`, built from whole pieces of blocks.
On CPU the way it is read decides everything: indexing with an array of ids is an element-wise
gather at 1 to 2 GB/s; a `dynamic_slice` of a head-major piece is a copy at the machine's rate.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn import formats

# More pieces than this and they are gathered in one operation instead: compile time grows with the
# number of slices, and slices of a few tokens cost more than the gather does.
MAX_SLICES = 64


@dataclasses.dataclass(frozen=True)
class Slab:
    """How many tokens a slab has and what pieces it is read in; all static.

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
    def of(cls, block_size: int, target_tokens: int) -> Slab:
        """The slab nearest to `target_tokens` that whole pieces of blocks can make."""
        if block_size <= target_tokens:
            return cls(block_size, block_size, max(1, target_tokens // block_size))
        divisors = [d for d in range(1, target_tokens + 1) if block_size % d == 0]
        best = divisors[-1]
        # A block of an awkward size is read whole rather than in slivers.
        return cls(block_size, best if best * 4 >= target_tokens else block_size, 1)


def words_of(x: jax.Array) -> jax.Array:
    """`x` as unsigned words where it is a 16-bit float: XLA CPU never converts those in passing."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def read_slab(
    pool: jax.Array,
    table_row: jax.Array,
    first_token: jax.Array,
    slab: Slab,
    kv_layout: str,
) -> jax.Array:
    """Words `[K, C, D]` of the tokens from `first_token`, a multiple of `slab.piece`.

    Ids are clamped to the pool and positions to the table, so whatever the table holds, this reads
    memory of the pool; what lies past the sequence is for the caller to mask.
    """
    num_blocks, width = pool.shape[0], table_row.shape[0]
    per_block = slab.block_size // slab.piece
    index = first_token // slab.piece + jnp.arange(slab.pieces, dtype=jnp.int32)
    blocks = jnp.take(table_row, jnp.minimum(index // per_block, width - 1), mode="clip")
    blocks = jnp.clip(blocks, 0, num_blocks - 1)
    offsets = (index % per_block) * slab.piece
    token_axis = 1 if kv_layout == "NHD" else 2
    if slab.pieces > MAX_SLICES and per_block == 1:
        gathered = pool.at[blocks].get(mode="promise_in_bounds")
        if kv_layout == "NHD":
            return gathered.reshape(slab.tokens, *pool.shape[2:]).swapaxes(0, 1)
        return gathered.swapaxes(0, 1).reshape(pool.shape[1], slab.tokens, pool.shape[3])
    sizes = list(pool.shape)
    sizes[0], sizes[token_axis] = 1, slab.piece
    pieces = []
    for i in range(slab.pieces):
        start = [np.int32(0)] * 4
        start[0], start[token_axis] = blocks[i], offsets[i]
        piece = lax.dynamic_slice(pool, start, sizes)[0]
        pieces.append(piece.swapaxes(0, 1) if kv_layout == "NHD" else piece)
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)


def decode_slab(words: jax.Array, format: formats.Format, dtype: np.dtype) -> jax.Array:
    """The numbers of a slab in the dtype of the dots; exact, since `dtype` is never narrower."""
    numbers = words if words.dtype == format.value_dtype else format.decode(words)
    return numbers.astype(dtype)
