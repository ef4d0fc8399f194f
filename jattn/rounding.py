"""From numbers to the words of narrow formats and back, element by element, traced by JAX.

Every rounding is to nearest even and saturates. Two 4-bit codes share a byte: the number with the
even index in the low nibble, as FlashInfer and vLLM store NVFP4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

# Infinities count as this in what chooses its scale from the numbers: far above any activation, and
# the width of a row of such numbers still is a float32.
LIMIT = 2.0**126


def bitcast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """The bits of `x` read as `dtype`."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def tame(x: jax.Array) -> jax.Array:
    """`x` as float32 with infinities at +-`LIMIT`; NaN stays NaN."""
    return jnp.clip(x.astype(jnp.float32), -LIMIT, LIMIT)


def largest(x: jax.Array, axis: int | tuple[int, ...] = -1) -> jax.Array:
    """The largest magnitude along `axis`, NaN left out."""
    size = jnp.abs(x)
    return jnp.where(jnp.isnan(size), jnp.float32(0), size).max(axis=axis)


def divide(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x / scale`, and `x` where the scale is zero: then all of `x` is."""
    return x / jnp.where(scale == 0, jnp.float32(1), scale)


def to_integer(x: jax.Array, low: int, high: int) -> jax.Array:
    """int8 codes in `[low, high]`; NaN, which integers do not have, becomes 0."""
    codes = jnp.clip(jnp.round(x), low, high)
    return jnp.where(jnp.isnan(codes), jnp.float32(0), codes).astype(jnp.int8)


def to_e2m1(x: jax.Array) -> jax.Array:
    """uint8 codes 0 to 15 of float32 `x`: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    size = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    # Halfway between two numbers the even code wins: upwards where the upper one is even.
    for middle, up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5, 0)):
        middle = jnp.float32(middle)
        code += ((size >= middle) if up else (size > middle)).astype(jnp.uint8)
    sign = bitcast(x, np.dtype(np.uint32)) >> 31
    return code | (sign.astype(jnp.uint8) << 3)


def from_e2m1(codes: jax.Array) -> jax.Array:
    """bfloat16 numbers of codes 0 to 15, put together from their bits."""
    codes = codes.astype(jnp.uint16)
    size = codes & 7
    # From 1 on the code is the exponent and mantissa of a bfloat16; 0.5 has no mantissa bit.
    bits = jnp.where(size >= 2, jnp.uint16(0x3F00) + (size << 6), size * jnp.uint16(0x3F00))
    return bitcast(bits | ((codes & 8) << 12), np.dtype(jnp.bfloat16))


def from_int4(codes: jax.Array) -> jax.Array:
    """int8 numbers of two's complement codes 0 to 15."""
    return bitcast(codes ^ 8, np.dtype(np.int8)) - jnp.int8(8)


def pack(codes: jax.Array) -> jax.Array:
    """Bytes [..., D / 2] of codes [..., D], of which the low nibble counts."""
    pairs = bitcast(codes, np.dtype(np.uint8)) & 15
    pairs = pairs.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(words: jax.Array) -> jax.Array:
    """Codes 0 to 15, [..., D], of bytes [..., D / 2]."""
    pairs = jnp.stack([words & 15, words >> 4], axis=-1)
    return pairs.reshape(*words.shape[:-1], 2 * words.shape[-1])
