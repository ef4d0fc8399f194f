"""PTX types in NumPy: widths, 16-bit and 8-bit floats, rounding.

A register holds raw bits, as an unsigned integer of its width (a bool for a predicate). An
instruction's type says which numbers they are (PTX ISA, "Fundamental Types").
"""

from __future__ import annotations

import re

import numpy as np

LANES = 32
LANE = np.arange(LANES, dtype=np.uint32)
# What a lane reads from a register that only other lanes have written.
POISON = 0xA5A5A5A5A5A5A5A5
RAW = {1: np.dtype(bool), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4")}
RAW[64] = np.dtype("u8")
PACKED = {"bf16x2": 32, "f16x2": 32, "e4m3x2": 16, "e5m2x2": 16, "f32x2": 64}


class PtxError(Exception):
    """The kernel does something wrong, or something that is not modelled."""


def width_of(kind: str) -> int:
    """Bits of a type such as "s32"; a packed type has those of both numbers."""
    if kind == "pred":
        return 1
    if kind in PACKED:
        return PACKED[kind]
    if not re.fullmatch(r"[bsuf](8|16|32|64)|bf16", kind):
        raise ValueError(f"type {kind}")
    return int(re.sub(r"\D", "", kind))


def numpy_type(kind: str) -> np.dtype:
    """The NumPy type for computing with a PTX type; raw bits for packed types and bf16."""
    if kind == "pred":
        return RAW[1]
    if kind in PACKED or kind == "bf16":
        return RAW[width_of(kind)]
    letter = {"s": "i", "f": "f"}.get(kind[0], "u")
    return np.dtype(f"{letter}{width_of(kind) // 8}")


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16 bits to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even, to bfloat16 bits; every NaN becomes the canonical one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, up).astype(np.uint16)


def _eight_bits(exponent: int) -> np.ndarray:
    """Return all 8-bit floats with this number of exponent bits, as float16."""
    code = np.arange(256)
    mantissa, bias = 7 - exponent, 2 ** (exponent - 1) - 1
    e, m = code >> mantissa & (2**exponent - 1), code & (2**mantissa - 1)
    fraction = m / 2**mantissa + (e > 0)
    x = fraction * 2.0 ** (np.maximum(e, 1) - bias)
    if exponent == 5:
        x = np.where(e == 31, np.where(m == 0, np.inf, np.nan), x)
    else:
        x = np.where((code & 127) == 127, np.nan, x)
    return np.where(code & 128, -x, x).astype(np.float16)


E4M3, E5M2 = _eight_bits(4), _eight_bits(5)


def flushed(x: np.ndarray) -> np.ndarray:
    """Replace subnormal numbers by zeros of their sign: `.ftz`."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """Compute `a b + c` in float32, rounded once.

    The product is exact in float64. The sum is rounded to odd there, so the second rounding is
    right in every direction.
    """
    product = a.astype(np.float64) * b
    wide = c.astype(np.float64)
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)
    inexact = (error != 0) & np.isfinite(total)
    if inexact.any():
        bits = total.view(np.int64)
        away = (error > 0) == (total > 0)  # the exact sum is larger in magnitude
        odd = bits | 1
        odd = np.where(away | (bits & 1 == 1), odd, bits - 1)
        total = np.where(inexact, odd, bits).view(np.float64)
    return to_f32(total, rounding)


def to_f32(x: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """Convert float64 to float32, rounded to nearest, down, up or toward zero."""
    near = x.astype(np.float32)
    if rounding == "rn":
        return near
    down = np.where(near > x, np.nextafter(near, np.float32(-np.inf)), near)
    if rounding == "rm":
        return down
    up = np.where(near < x, np.nextafter(near, np.float32(np.inf)), near)
    return up if rounding == "rp" else np.where(x < 0, up, down)
