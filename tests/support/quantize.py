"""The formats in NumPy and ml_dtypes, written independently of `jattn`.

`encode` turns rows `[n, K, D]` of one sequence into what must be stored, `decode` returns the
numbers this stands for, and `mistakes` what wrong readers would make of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import ml_dtypes
import numpy as np

E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
F32 = np.float32


@dataclasses.dataclass(frozen=True)
class Rows:
    """Unpacked codes [n, K, D], and their scales per token: `scale` [n, K] and so on.

    `codes` hold int8 for integers, and the words of floats. The `scale` of a block is repeated for
    its tokens.
    """

    codes: np.ndarray
    scale: np.ndarray | None = None
    zero: np.ndarray | None = None
    groups: np.ndarray | None = None  # words of e4m3, [n, K, D / 16]

    def replace(self, **changes) -> Rows:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def number_dtype(format) -> np.dtype:
    """The ml_dtypes type of a code, int8 for integers."""
    if format.name.startswith("int"):
        return np.dtype(np.int8)
    return E2M1 if format.name == "nvfp4" else np.dtype(format.value_dtype)


def saturated(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round float32 `x` to nearest even in `dtype`, and saturate at its largest number."""
    most = F32(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -most, most).astype(dtype)


def encode(
    format,
    x: np.ndarray,
    block_size: int = 1,
    scale: np.ndarray | None = None,
    zero: np.ndarray | None = None,
) -> Rows:
    """Encode float32 rows [n, K, D] in `format`; a block's scale follows from its largest number.

    Scales and zeros per token may be given: one that differs in its last bit decides ties
    differently. Rows are multiplied by a scale's reciprocal, as in jattn.
    """
    given = scale, zero
    dtype, name = number_dtype(format), format.name
    with np.errstate(divide="ignore", invalid="ignore"):
        if name.endswith("_zero"):
            low, high = x.min(-1), x.max(-1)
            half = 2 ** (format.bits - 1)
            scale = (high - low) / F32(2 * half - 1)
            zero = low + scale * F32(half)
            scale = scale if given[0] is None else given[0]
            zero = zero if given[1] is None else given[1]
            steps = np.nan_to_num((x - zero[..., None]) * (1 / scale[..., None]), nan=0.0)
            return Rows(np.clip(np.rint(steps), -half, half - 1).astype(np.int8), scale, zero)
        if name.startswith("int"):
            most = 2 ** (format.bits - 1) - 1
            scale = np.abs(x).max(-1) / F32(most) if scale is None else scale
            steps = np.nan_to_num(x * (1 / scale[..., None]), nan=0.0)
            return Rows(np.clip(np.rint(steps), -most, most).astype(np.int8), scale)
        if name == "nvfp4":
            parts = x.reshape(*x.shape[:-1], x.shape[-1] // 16, 16)
            groups = saturated(np.abs(parts).max(-1) / F32(6), E4M3)
            size = groups.astype(F32)[..., None]
            parts = np.where(size > 0, parts * (1 / size), parts)
            codes = saturated(parts, E2M1).reshape(x.shape)
            return Rows(codes.view(np.uint8), groups=groups.view(np.uint8))
        if name.endswith(("_token", "_block")):
            if scale is None:
                scale = np.abs(x).max(-1) / F32(ml_dtypes.finfo(dtype).max)
            if name.endswith("_block"):
                for at in range(0, len(scale), block_size):
                    scale[at : at + block_size] = scale[at : at + block_size].max(0)
            rows = np.where(scale[..., None] > 0, x * (1 / scale[..., None]), x)
            return Rows(saturated(rows, dtype).view(np.uint8), scale)
    if format.takes_scale:
        return Rows(saturated(x, dtype).view(np.uint8))
    return Rows(x.astype(dtype).view(format.word_dtype))


def decode(format, rows: Rows) -> np.ndarray:
    """Decode `rows` into float64 numbers."""
    x = rows.codes.view(number_dtype(format)).astype(np.float64)
    if rows.groups is not None:
        x = x * np.repeat(rows.groups.view(E4M3).astype(np.float64), 16, axis=-1)
    if rows.scale is not None:
        x = x * rows.scale[..., None].astype(np.float64)
    return x if rows.zero is None else x + rows.zero[..., None].astype(np.float64)


def pack(format, codes: np.ndarray) -> np.ndarray:
    """Pack codes [..., D] into words; of two 4-bit codes, the even index is the low nibble."""
    if format.values_per_word == 1:
        return codes
    nibbles = codes.view(np.uint8) % 16
    return nibbles[..., 0::2] + 16 * nibbles[..., 1::2]


def mistakes(format, rows: Rows, block_size: int) -> Iterator[tuple[str, Rows]]:
    """Yield `(name, rows as a wrong reader understands them)`."""
    if rows.scale is not None:
        step = 1 if format.per == "token" else block_size
        what = "token" if format.per == "token" else "block"
        yield f"scale per {what} ignored", rows.replace(scale=np.ones_like(rows.scale))
        if len(rows.scale) > step:
            blocks = np.arange(len(rows.scale)) // step
            after = (blocks + 1) % (blocks[-1] + 1) * step
            yield f"scale of the next {what}", rows.replace(scale=rows.scale[after])
        if rows.scale.shape[1] > 1:
            moved = np.roll(rows.scale, 1, 1)
            yield f"scale per {what} of the next head", rows.replace(scale=moved)
    if rows.zero is not None:
        yield "no zero point", rows.replace(zero=np.zeros_like(rows.zero))
    if rows.groups is not None:
        one = np.full_like(rows.groups, np.array(1, E4M3).view(np.uint8))
        yield "group scale ignored", rows.replace(groups=one)
        if rows.groups.shape[-1] > 1:
            yield "scale of the next group", rows.replace(groups=np.roll(rows.groups, 1, -1))
    if format.values_per_word == 2:
        swapped = rows.codes.reshape(*rows.codes.shape[:-1], rows.codes.shape[-1] // 2, 2)[
            ..., ::-1
        ]
        yield "nibbles swapped", rows.replace(codes=swapped.reshape(rows.codes.shape).copy())


MISTAKES = (
    "scale per token ignored",
    "scale of the next token",
    "scale per token of the next head",
    "scale per block ignored",
    "scale of the next block",
    "scale per block of the next head",
    "no zero point",
    "group scale ignored",
    "scale of the next group",
    "nibbles swapped",
)
