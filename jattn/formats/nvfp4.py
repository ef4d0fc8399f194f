"""NVFP4: 4-bit floats in groups of 16 that share an 8-bit scale."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jattn.formats import rounding
from jattn.formats.base import E4M3, Format, Quantized, QuantParams, divided


@dataclasses.dataclass(frozen=True)
class Nvfp4(Format):
    """NVFP4: two e2m1 numbers a byte, an e4m3 scale per 16 numbers, and a float32 scale over all.

    e2m1 has 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign. The caller sets `scale`, [] or [K]
    (`jattn.calibrate`): `max |x| / (6 * 448)` uses the whole range. For each group, writing sets
    `group_scale = e4m3(max |x| / scale / 6)` and rounds `x / (group_scale * scale)` to nearest
    even, saturating at 6. e2m1 has no NaN: a group that contains one gets a group scale of NaN, and
    all 16 read as NaN. Head sizes must be multiples of 16. Words and group scales are laid out like
    FlashInfer's `kv_cache_sf` [N, K, S, D / 16]: not swizzled, the even index in the low nibble.
    """

    values_per_word: ClassVar[int] = 2
    group: ClassVar[int] = 16

    name = "nvfp4"
    per = "head"
    largest = 6.0 * 448.0
    value_dtype = np.dtype(jnp.bfloat16)  # exact for every number times its group's scale
    word_dtype = np.dtype(np.uint8)
    triton_codes = "e2m1"

    def encode(self, values: jax.Array) -> jax.Array:
        """Pack numbers [..., D], already divided by both scales, into bytes [..., D / 2]."""
        return rounding.pack(rounding.to_e2m1(values.astype(jnp.float32)))

    def decode(self, words: jax.Array) -> jax.Array:
        """Decode bytes [..., D / 2] to bfloat16 numbers [..., D], without applying any scale."""
        return rounding.from_e2m1(rounding.unpack(words))

    def quantize(self, values: jax.Array, scale: jax.Array | None = None) -> Quantized:
        """Encode `values / scale` as words and group scales."""
        groups = values.reshape(*values.shape[:-1], values.shape[-1] // self.group, self.group)
        # The largest before the division is the same number, and needs no float32 copy of them all.
        # A NaN goes into the group's scale, since e4m3 has one.
        most = rounding.clamp(jnp.abs(divided(rounding.largest_or_nan(groups), scale)))
        group_scale = rounding.to_e4m3(most * jnp.float32(1 / 6))
        size = rounding.bitcast(group_scale, E4M3).astype(jnp.float32)
        groups = rounding.clamp(divided(values, scale)).reshape(groups.shape)
        words = self.encode(rounding.divide(groups, size[..., None]).reshape(values.shape))
        return Quantized(words, QuantParams(group_scale=group_scale))
