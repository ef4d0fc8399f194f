"""The words of a tile as numbers in the dtype of the dots, exactly, in arithmetic XLA vectorizes.

On CPU, XLA's own conversions of 8-bit floats go element by element through tables of cases. Here
integer arithmetic builds the bits of a float16 from those of the word, and the CPU converts float16
to float32. A word's number always fits a bfloat16, the upper half of a float32, exactly.

Formats with two numbers per byte give two tiles, the even indices of D and the odd ones: each is a
single pass over the bytes. Laid side by side or interleaved in one tile, the same numbers took XLA
two to three times as long. Queries are split the same way for the dots (`split`), and the parts of
a result are joined (`join`), which costs little compared with a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn import formats
from jattn.formats import rounding

_BF16 = np.dtype(jnp.bfloat16)


def of_words(words: jax.Array, format: formats.Format, dtype: np.dtype) -> jax.Array:
    """Convert words, or the numbers of a plain array, to `dtype`, before any scale.

    One number per word. Exact, since `dtype` is never narrower than the format.
    """
    if isinstance(format, formats.Fp8) and words.dtype == format.word_dtype:
        return _narrow(_e5m2(words) if format.kind == "e5m2" else e4m3(words), dtype)
    if isinstance(format, formats.Int8):
        return words.astype(dtype)
    numbers = words if words.dtype == format.value_dtype else format.decode(words)
    return numbers.astype(dtype)


def e4m3(words: jax.Array) -> jax.Array:
    """Convert e4m3 words to float32.

    Shifted, their bits are those of a float16 that is 2^-8 of the number, subnormals included, and
    every machine converts float16; only NaN needs a case of its own.
    """
    words = words.astype(jnp.uint16)
    size = words & 0x7F
    size = jnp.where(size == 0x7F, jnp.uint16(0x7E00), size << 7)
    return from_float16_bits(size | ((words & 0x80) << 8)) * jnp.float32(2**8)


def _e5m2(words: jax.Array) -> jax.Array:
    """Convert e5m2 words to float32: the upper byte of a float16, infinities and NaN included."""
    return from_float16_bits(words.astype(jnp.uint16) << 8)


def from_float16_bits(bits: jax.Array) -> jax.Array:
    """Convert the bits of float16 numbers to float32."""
    return rounding.bitcast(bits, np.dtype(np.float16)).astype(jnp.float32)


def _narrow(wide: jax.Array, dtype: np.dtype) -> jax.Array:
    """Convert float32 numbers that fit bfloat16: to bfloat16 by dropping 16 zero bits."""
    if dtype == np.float32:
        return wide
    bits = rounding.bitcast(wide, np.dtype(np.uint32)) >> 16
    return rounding.bitcast(bits.astype(jnp.uint16), _BF16)


def of_bytes(
    words: jax.Array, groups: jax.Array | None, format: formats.Format, dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Decode bytes into the even and the odd numbers, [..., D / 2] each, times their group's scale.

    Args:
      words: uint8.
      groups: uint8 [..., D / 16] words of e4m3 for `Nvfp4`, None for `Int4`. A product of an e2m1
        and an e4m3 number has at most 6 significant bits, so it too fits a bfloat16.
      format: `Int4` or `Nvfp4`.
      dtype: of the result.
    """
    if groups is None or format.group is None:
        codes = (words & 15, words >> 4)
        even, odd = (rounding.from_int4(x).astype(dtype) for x in codes)
        return even, odd
    scales = wide_rows(groups, lambda x: e4m3(x) * jnp.float32(2**14))
    group = format.group // 2  # of the even indices, and as many of the odd ones
    words = words.astype(jnp.uint16)

    def scaled(sign: int) -> jax.Array:
        # The four bits are those of a float16 that is 2^-14 of the number: see `e4m3`.
        size = words << (12 - sign) & 0x0E00
        numbers = from_float16_bits(size | (words << (15 - sign) & 0x8000))
        rows = numbers.reshape(*groups.shape, group) * scales[..., None]
        return _narrow(rows.reshape(words.shape), dtype)

    return scaled(3), scaled(7)


def wide_rows(x: jax.Array, convert: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`convert(x)`, computed once and in rows long enough to vectorize, whatever the last axis."""
    rows = lax.optimization_barrier(x.reshape(-1, math.gcd(x.size, 512)))
    return lax.optimization_barrier(convert(rows)).reshape(x.shape)


def split(x: jax.Array, format: formats.Format) -> tuple[jax.Array, ...]:
    """`x` [..., D] in parts that belong to the format's tiles."""
    return tuple(x[..., i :: format.values_per_word] for i in range(format.values_per_word))


def join(parts: tuple[jax.Array, ...]) -> jax.Array:
    """The inverse of `split`."""
    if len(parts) == 1:
        return parts[0]
    *axes, last = parts[0].shape
    return jnp.stack(parts, axis=-1).reshape(*axes, last * len(parts))
