"""Words of a slab as numbers in the dtype of the dots, exact, in arithmetic that XLA vectorizes.

XLA's own conversions of 8-bit floats on CPU go element by element through tables of cases. Here the
bits of a bfloat16 are put together from those of the word, in integers; what a word stands for
always fits a bfloat16 exactly, and a bfloat16 becomes a float32 by 16 zero bits.

Two numbers a byte come out as two slabs, the even indices of D and the odd ones: each is a straight
pass over the bytes. Laid side by side or interleaved, as one slab, the same numbers took XLA two to
three times as long. Who takes dots with them cuts its own D alike (`split`), or puts the halves of
a result together (`join`): little beside a slab.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn import formats, rounding

_BF16 = np.dtype(jnp.bfloat16)


def of_words(words: jax.Array, format: formats.Format, dtype: np.dtype) -> jax.Array:
    """Numbers before any scale, in `dtype`, of words or of a plain array's own numbers.

    One number a word. Exact, since `dtype` is never narrower than the format.
    """
    if isinstance(format, formats.Fp8) and words.dtype == format.word_dtype:
        return _widen(_e5m2(words) if format.kind == "e5m2" else _e4m3(words), dtype)
    if isinstance(format, formats.Int8):
        return words.astype(dtype)
    numbers = words if words.dtype == format.value_dtype else format.decode(words)
    return numbers.astype(dtype)


def _e4m3(words: jax.Array) -> jax.Array:
    """bfloat16 of e4m3 words.

    Bits 3 to 6 are an exponent with a bias of 7 where bfloat16 has 127; below 8 the number is
    sub-normal, `size * 2^-9`, and the line that the bits follow between two powers of two is as
    straight there, only steeper.
    """
    words = words.astype(jnp.uint16)
    size = words & 0x7F
    one = jnp.where(size == 0, jnp.uint16(0), jnp.uint16(118 << 7))  # 2^-9, and zero
    two = jnp.uint16((119 << 7) - (2 << 6)) + (size << 6)
    four = jnp.uint16((120 << 7) - (4 << 5)) + (size << 5)
    small = jnp.where(size >= 4, four, jnp.where(size >= 2, two, one))
    bits = jnp.where(size >= 8, jnp.uint16(120 << 7) + (size << 4), small)
    bits = jnp.where(size == 0x7F, jnp.uint16(0x7FC0), bits)
    return rounding.bitcast(bits | ((words & 0x80) << 8), _BF16)


def _e5m2(words: jax.Array) -> jax.Array:
    """float16 of e5m2 words: their upper byte, infinities, NaN and sub-normals included."""
    return rounding.bitcast(words.astype(jnp.uint16) << 8, np.dtype(np.float16))


def _widen(numbers: jax.Array, dtype: np.dtype) -> jax.Array:
    """16-bit floats in `dtype`, where they fit exactly: bfloat16 by dropping a float32's zeros."""
    if numbers.dtype == dtype:
        return numbers
    wide = numbers.astype(jnp.float32)
    return wide if dtype == np.float32 else _shorten(wide)


def _shorten(wide: jax.Array) -> jax.Array:
    """bfloat16 of float32 numbers that are bfloat16 numbers."""
    bits = rounding.bitcast(wide, np.dtype(np.uint32)) >> 16
    return rounding.bitcast(bits.astype(jnp.uint16), _BF16)


def of_bytes(
    words: jax.Array, groups: jax.Array | None, format: formats.Format, dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """The even and the odd numbers, [..., D / 2] each, of bytes, times their group's scale.

    Args:
      words: uint8.
      groups: uint8 [..., D / 16] words of e4m3, or None. A product of an e2m1 and an e4m3 number
        has at most 6 significant bits, so it too fits a bfloat16.
      format: `Int4` or `Nvfp4`.
      dtype: of the result.
    """
    halves = (words & 15, words >> 4)
    if groups is None:
        even, odd = (_nibble(half, format, dtype) for half in halves)
        return even, odd
    group = format.group // 2  # of the even indices, and as many of the odd ones
    scales = _widen(_e4m3(groups), np.dtype(np.float32))
    # A group's scale is read as often as it has numbers: computed once, it is a load.
    scales = lax.optimization_barrier(scales)

    def scaled(half: jax.Array) -> jax.Array:
        numbers = _widen(rounding.from_e2m1(half), np.dtype(np.float32))
        rows = numbers.reshape(*groups.shape, group) * scales[..., None]
        rows = rows.reshape(words.shape)
        return rows if dtype == np.float32 else _shorten(rows)

    return scaled(halves[0]), scaled(halves[1])


def _nibble(codes: jax.Array, format: formats.Format, dtype: np.dtype) -> jax.Array:
    if isinstance(format, formats.Int4):
        return rounding.from_int4(codes).astype(dtype)
    return _widen(rounding.from_e2m1(codes), dtype)


def split(x: jax.Array, format: formats.Format) -> tuple[jax.Array, ...]:
    """`x` [..., D] in parts that belong to the format's slabs."""
    return tuple(x[..., i :: format.word_numbers] for i in range(format.word_numbers))


def join(parts: tuple[jax.Array, ...]) -> jax.Array:
    """The inverse of `split`."""
    if len(parts) == 1:
        return parts[0]
    *axes, last = parts[0].shape
    return jnp.stack(parts, axis=-1).reshape(*axes, last * len(parts))
