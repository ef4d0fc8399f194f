"""Dots of a few rows with numbers that share a scale in groups of 16, decoded in registers.

    scores[r, c] = sum over groups g of s[c, g] * (sum over i of q[r, g, i] * x[c, g, i])
    mix[r, g, i] = sum over c of p[r, c] * s[c, g] * x[c, g, i]

A decode step has few rows, and a tile of numbers would cost more to write and read than its dots.
So both sums are loops over bytes that XLA fuses: bytes in, partial sums of 16 tokens or 4 groups
out, all rows at once, since decoding a number takes longer than multiplying it. Two things make
LLVM process 8 numbers at a time, with or without AVX-512, in JAX 0.10 and 0.12 alike:

- The inner axis has 8 elements and a long body: in `scores` 8 tokens, for which the query is a
  scalar; in `mix` the 8 bytes of a group, for which scale and weight are scalars. A loop broadcasts
  a scalar once; along an axis that crosses groups, it would fetch every scale again.
- Rows are the last axis (`_last`). XLA fuses into one result only, so an index inside the loop
  chooses among the rows' sums. The sums do not depend on that index, so LLVM hoists them out of its
  loop, unrolls the choice and stores all rows side by side.

The bits are those of a float16 that is 2^-14 of an e2m1 number (`numbers`). Decoded numbers are
exact, as are float32 products of 8 bits or fewer; sums round like those of any float32 dot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn import formats
from jattn.cpu.xla import numbers
from jattn.formats import rounding

SIMD_WIDTH = 8  # numbers decoded at a time, and half the numbers of a group

# Rows that share one decoding; fewer are padded with zeros, which in JAX 0.10 is 2 to 4 times as
# fast as loops of 1 to 3 rows. 8 rows as two times 4 took 0.7 times as long as a tile in JAX 0.10,
# but 1.1 times in JAX 0.12, so more rows use a tile.
MOST_ROWS = 4

# Tokens that a partial sum of `mix` adds up. Measured at D = 128 with 4 rows: 8 write twice as many
# sums, 32 keep more weights than there are registers; both take 1.0 to 1.1 times as long.
_TOKENS = 16

# Groups that a partial sum of `scores` adds up, or fewer if 4 does not divide D / 16. With 2, JAX
# 0.10 takes another path and 3 times as long; with 8, constants no longer fit the registers.
_GROUPS = 4


def fits(format: formats.Format, num_rows: int, tokens: int) -> bool:
    """Whether these functions take this format with that many rows and tokens in a tile."""
    return format.group is not None and num_rows <= MOST_ROWS and tokens % _TOKENS == 0


def scores(queries: jax.Array, words: jax.Array, groups: jax.Array, step: jax.Array) -> jax.Array:
    """`[B, R, C]` float32: queries times keys.

    Args:
      queries: float32 [B, R, D].
      words: uint8 [B, C, D / 2].
      groups: uint8 [B, C, D / 16], words of e4m3.
      step: int32 [], at least 0, which the surrounding loop changes.
    """
    tokens, num_groups = groups.shape[1:]
    part = math.gcd(num_groups, _GROUPS)
    # [B, C / 8, D / 2, 8]
    words = _last([words[:, i::SIMD_WIDTH] for i in range(SIMD_WIDTH)], step)
    groups = _last([groups[:, i::SIMD_WIDTH] for i in range(SIMD_WIDTH)], step)
    scales = scales_of(groups)
    batch, num_rows, _ = queries.shape
    queries = _filled(queries).reshape(batch, MOST_ROWS, num_groups // part, 16 * part)
    sums = [jnp.float32(0)] * MOST_ROWS  # [B, parts, C / 8, 8]
    for group in range(part):
        dots = [jnp.float32(0)] * MOST_ROWS
        for byte in range(8 * group, 8 * group + 8):
            pair = words[:, :, byte :: 8 * part].swapaxes(1, 2)
            for i, x in enumerate((_low(pair), _high(pair))):
                q = queries[..., 2 * byte + i][..., None, None]
                dots = [dots[r] + x * q[:, r] for r in range(MOST_ROWS)]
        scale = scales[:, :, group::part].swapaxes(1, 2)
        sums = [sums[r] + dots[r] * scale for r in range(MOST_ROWS)]
    summed = lax.optimization_barrier(_last(sums, step).sum(axis=1))
    return summed.reshape(batch, tokens, MOST_ROWS).swapaxes(1, 2)[:, :num_rows]


def mix(
    weights: jax.Array, words: jax.Array, scales: jax.Array, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`[B, R, D / 2]` float32 twice: weights times values, at even indices and at odd ones.

    Args:
      weights: float32 [B, R, C].
      words: uint8 [B, C, D / 2].
      scales: float32 [B, C, D / 16] from `scales_of`; zeros for tokens that do not count.
      step: as in `scores`.
    """
    tokens, num_groups = scales.shape[1:]
    num_rows = weights.shape[1]
    words = words.reshape(-1, tokens, num_groups, SIMD_WIDTH)
    weights = _filled(weights)

    def weigh(decode: Callable[[jax.Array], jax.Array]) -> jax.Array:
        sums = [jnp.float32(0)] * MOST_ROWS  # [B, C / 16, D / 16, 8]
        for i in range(_TOKENS):
            x = decode(words[:, i::_TOKENS]) * scales[:, i::_TOKENS, :, None]
            p = weights[:, :, i::_TOKENS, None, None]
            sums = [sums[r] + x * p[:, r] for r in range(MOST_ROWS)]
        summed = _last(sums, step).sum(axis=1)
        summed = summed.reshape(-1, num_groups * SIMD_WIDTH, MOST_ROWS)
        return summed.swapaxes(1, 2)[:, :num_rows]

    return weigh(_low), weigh(_high)


def _filled(rows: jax.Array) -> jax.Array:
    """Pad `rows` [B, R, X] with zeros to `MOST_ROWS`."""
    return jnp.pad(rows, ((0, 0), (0, MOST_ROWS - rows.shape[1]), (0, 0)))


def scales_of(groups: jax.Array) -> jax.Array:
    """Convert e4m3 words to float32 scales for the numbers that `scores` and `mix` decode."""
    return numbers.wide_rows(groups, lambda x: numbers.e4m3(x) * jnp.float32(2**14))


def _low(words: jax.Array) -> jax.Array:
    """Decode the low four bits, even indices, to float32: 2^-14 of the number."""
    return _e2m1(words.astype(jnp.uint16) * jnp.uint16(2**12))


def _high(words: jax.Array) -> jax.Array:
    """Decode the high four bits, odd indices, to float32: 2^-14 of the number."""
    return _e2m1(words.astype(jnp.uint16) * jnp.uint16(2**8))


def _e2m1(bits: jax.Array) -> jax.Array:
    """Decode the upper four of 16 bits: the sign stays, the others become bits 11 to 9 of float16.

    Callers move them up by multiplying, where a shift would do: XLA passes constants that are used
    this often at run time, and checks a shift by an unknown number with a branch.
    """
    signed = rounding.bitcast(bits, np.dtype(np.int16)) >> 3
    return numbers.from_float16_bits(
        rounding.bitcast(signed & jnp.int16(-0x7200), np.dtype(np.uint16))
    )


def _last(rows: Sequence[jax.Array], step: jax.Array) -> jax.Array:
    """Stack `rows` along a new last axis, in one loop that computes them together.

    The index only seems to depend on `step`: `(step & 1) >> 1` is 0, which LLVM knows and XLA does
    not. Without it XLA would compare indices once, before the surrounding loop, and LLVM could no
    longer tell which row is chosen where.
    """
    shape = (*rows[0].shape, len(rows))
    index = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) + ((step & 1) >> 1)
    chosen = jnp.broadcast_to(rows[0][..., None], shape)
    for i, row in enumerate(rows[1:], 1):
        chosen = jnp.where(index == i, jnp.broadcast_to(row[..., None], shape), chosen)
    return lax.optimization_barrier(chosen)
