"""Convert numbers to the words of narrow formats and back, element by element, in JAX.

All rounding is to nearest even and saturates. Divisions multiply by the reciprocal, as XLA does
when it compiles a division of many numbers by one. A scale's last bit, and which way a tie goes,
then do not depend on what is compiled together, and C++ can do the same (cpu/native/src/encode.h).
Two 4-bit codes share a byte: the number with the even index is in the low nibble, as FlashInfer and
vLLM store NVFP4.
"""

from __future__ import annotations

import numbers

import jax
import jax.numpy as jnp
import numpy as np

from jattn import device

# Infinities count as this when a scale is chosen from the numbers. It is far above any activation,
# and the difference of two such numbers still fits float32.
LIMIT = 2.0**126

# Numbers that call for a scale of at most this count as zeros: the reciprocal of a smaller scale
# would overflow, and XLA for CPU flushes the smallest floats to zero.
SMALLEST_SCALE = 2.0**-100


def as_float32(x: object) -> np.ndarray | None:
    """Return a number or a NumPy array of floats as float32; None for anything else.

    For checks, on the host. As in kernels, numbers too large for float32 become infinite; those
    below its smallest normal number become zero, as XLA may flush them.
    """
    number = isinstance(x, numbers.Real) and not isinstance(x, bool)
    if not number and not (isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)):
        return None
    try:
        with np.errstate(all="ignore"):
            found = np.asarray(x, np.float32)
    except OverflowError:  # an integer beyond every float
        found = np.asarray(np.inf, np.float32)
    return np.where(np.abs(found) < np.finfo(np.float32).tiny, np.float32(0), found)


def bitcast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Read the bits of `x` as `dtype`; one of another size adds or removes a last axis."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def scatter_converts(dtype: np.dtype) -> bool:
    """Return whether XLA for CPU scatters `dtype` by converting the whole pool to float32.

    This also loses the payloads of NaN. It is so for fp8 and, before JAX 0.12, for bfloat16. Starts
    JAX's backend.
    """
    fp8 = dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)
    bfloat16 = dtype == jnp.bfloat16 and jax.__version_info__ < (0, 12)
    return bool(fp8 or bfloat16) and device.platform() == "cpu"


def clamp(x: jax.Array) -> jax.Array:
    """Return `x` as float32, clipped to +-`LIMIT`; NaN stays NaN."""
    return jnp.clip(x.astype(jnp.float32), -LIMIT, LIMIT)


def largest(x: jax.Array, axis: int | tuple[int, ...] = -1) -> jax.Array:
    """Return the largest magnitude along `axis`, ignoring NaN."""
    size = jnp.abs(x)
    return jnp.where(jnp.isnan(size), jnp.zeros((), x.dtype), size).max(axis=axis)


def largest_or_nan(x: jax.Array) -> jax.Array:
    """Return the largest magnitude along the last axis, or NaN if there is one.

    Compares bits as integers, because XLA's compiled maximum of floats on CPUs ignores NaN.
    """
    words = bitcast(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))
    sign = np.array(1 << (8 * x.dtype.itemsize - 1), words.dtype)
    return bitcast((words & ~sign).max(axis=-1), x.dtype)


def divide(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return `x / scale`, or `x` where the scale is zero, because `x` is zero there too."""
    return x * (1 / jnp.where(scale == 0, jnp.float32(1), scale))


def usable_scale(scale: jax.Array) -> jax.Array:
    """Return `scale`, or 1 where it is too small to divide by: its numbers are as good as 0."""
    return jnp.where(scale > jnp.float32(SMALLEST_SCALE), scale, jnp.float32(1))


def to_integer(x: jax.Array, low: int, high: int) -> jax.Array:
    """Round to int8 codes in `[low, high]`; NaN, which integers do not have, becomes 0."""
    codes = jnp.clip(jnp.round(x), low, high)
    return jnp.where(jnp.isnan(codes), jnp.float32(0), codes).astype(jnp.int8)


def to_float(x: jax.Array, mantissa: int, exponent: int, nan: int) -> jax.Array:
    """Encode float32 `x` within the range of an 8-bit float as its uint8 words.

    This computes in integers, which XLA vectorizes; XLA's own conversions to 8-bit floats handle
    one number at a time. To round a normal number, add half the range of the low bits, less one,
    and the last kept bit, then drop the low bits. A subnormal counts multiples of one unit: adding
    the power of two whose last bit is worth that unit makes float32 itself round to them.

    Args:
      x: float32; at most the largest finite number.
      mantissa: bits of the mantissa.
      exponent: of the smallest normal number, 2^exponent.
      nan: the word, without a sign, that a NaN becomes.
    """
    word = bitcast(x, np.dtype(np.uint32))
    magnitude = word & jnp.uint32(0x7FFFFFFF)
    drop = 23 - mantissa
    odd = (magnitude >> drop) & 1
    normal = (magnitude + jnp.uint32((1 << (drop - 1)) - 1) + odd) >> drop
    normal = normal - jnp.uint32((126 + exponent) << mantissa)
    size, shift = jnp.abs(x), jnp.float32(2.0 ** (exponent + drop))
    small = bitcast(size + shift, np.dtype(np.uint32)) - bitcast(shift, np.dtype(np.uint32))
    code = jnp.where(size < jnp.float32(2.0**exponent), small, normal)
    code = jnp.where(jnp.isnan(x), jnp.uint32(nan), code)
    return (code | (word >> 31 << 7)).astype(jnp.uint8)


def to_e4m3(x: jax.Array) -> jax.Array:
    """Encode float32 `x` as uint8 words; NaN stays NaN."""
    return to_float(jnp.clip(x, -448, 448), 3, -6, 0x7F)


def to_e5m2(x: jax.Array) -> jax.Array:
    """Encode float32 `x` as uint8 words; infinities saturate too, NaN stays NaN."""
    return to_float(jnp.clip(x, -57344, 57344), 2, -14, 0x7E)


def to_e2m1(x: jax.Array) -> jax.Array:
    """Encode float32 `x` as codes 0 to 15: a sign and 0, 0.5, 1, 1.5, 2, 3, 4 or 6; NaN is 0."""
    x = jnp.clip(x, -6, 6)
    word = to_float(x, 1, 0, 0)
    return (word & 7) | ((word >> 4) & 8)


def from_e2m1(codes: jax.Array) -> jax.Array:
    """Decode codes 0 to 15 to bfloat16, assembled from their bits."""
    codes = codes.astype(jnp.uint16)
    size = codes & 7
    # From 1 on the code is the exponent and mantissa of a bfloat16; 0.5 has no mantissa bit.
    bits = jnp.where(size >= 2, jnp.uint16(0x3F00) + (size << 6), size * jnp.uint16(0x3F00))
    return bitcast(bits | ((codes & 8) << 12), np.dtype(jnp.bfloat16))


def from_int4(codes: jax.Array) -> jax.Array:
    """Decode two's complement codes 0 to 15 to int8."""
    return bitcast(codes ^ 8, np.dtype(np.int8)) - jnp.int8(8)


def pack(codes: jax.Array) -> jax.Array:
    """Pack the low nibbles of codes [..., D] into bytes [..., D / 2]."""
    # The barrier keeps XLA from computing every other code by itself, one at a time.
    pairs = jax.lax.optimization_barrier(bitcast(codes, np.dtype(np.uint8))) & 15
    pairs = pairs.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(words: jax.Array) -> jax.Array:
    """Unpack bytes [..., D / 2] into codes 0 to 15, [..., D]."""
    pairs = jnp.stack([words & 15, words >> 4], axis=-1)
    return pairs.reshape(*words.shape[:-1], 2 * words.shape[-1])
