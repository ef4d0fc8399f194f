"""8-bit and 4-bit integers, with a scale and an optional zero point per token and head."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jattn import checks
from jattn.formats import rounding
from jattn.formats.base import Format, Quantized, QuantParams, divided


@dataclasses.dataclass(frozen=True)
class _Integer(Format):
    """Integers of `bits` bits; the smallest is -`largest`, or one less with a zero point."""

    zero_point: bool = False

    bits: ClassVar[int]

    value_dtype = np.dtype(np.int8)

    def __post_init__(self) -> None:
        with checks.checking(type(self).__name__) as problems:
            is_bool = isinstance(self.zero_point, bool | np.bool_)
            problems.expect(is_bool, "zero_point", self.zero_point, "a bool")

    @property
    def name(self) -> str:
        return self.codes + ("_zero" if self.zero_point else "")

    @property
    def codes(self) -> str:
        return f"int{self.bits}"

    @property
    def per(self) -> str:
        return "token"

    @property
    def triton_codes(self) -> str:
        return f"int{self.bits}"

    @property
    def largest(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def quantize(self, values: jax.Array, scale: jax.Array | None = None) -> Quantized:
        """Encode rows of `values / scale`: words, scales and zero points."""
        # Computed from `values` directly: a float32 copy of them would be allocated whole.
        values, most = divided(values, scale), self.largest
        if not self.zero_point:
            # A NaN makes the row's scale NaN, and with it every number read from the row.
            row_scale = rounding.clamp(rounding.largest_or_nan(values)) * jnp.float32(1 / most)
            steps = rounding.divide(rounding.clamp(values), row_scale[..., None])
            codes = rounding.to_integer(steps, -most, most)
            return Quantized(self.encode(codes), QuantParams(row_scale))
        low, high = (rounding.clamp(x) for x in (values.min(axis=-1), values.max(axis=-1)))
        high = jnp.where(jnp.isnan(values).any(axis=-1), jnp.float32(jnp.nan), high)
        row_scale = (high - low) * jnp.float32(1 / (2 * most + 1))
        # The maximum changes nothing, but keeps XLA from folding both products into one, which it
        # would round together with the sum on some machines.
        zero = low + jnp.maximum(row_scale, 0) * jnp.float32(most + 1)
        steps = rounding.divide(rounding.clamp(values) - zero[..., None], row_scale[..., None])
        codes = rounding.to_integer(steps, -most - 1, most)
        return Quantized(self.encode(codes), QuantParams(row_scale, zero))


@dataclasses.dataclass(frozen=True)
class Int8(_Integer):
    """8-bit integers, -127 to 127, with a float32 scale per token and head.

    Writing sets `scale = max |x| / 127` from the token's row and rounds to nearest even. With
    `zero_point`, codes -128 to 127 span the row: `scale = (max - min) / 255`, and `zero` is the
    number that code 0 stands for. Integers have no NaN: a row that contains one gets a scale of
    NaN, so that the whole row reads as NaN and no NaN is lost. Infinities count as 2^126.
    """

    bits: ClassVar[int] = 8

    word_dtype = np.dtype(np.int8)

    def encode(self, values: jax.Array) -> jax.Array:
        """Return integers in range as words, unchanged but for the dtype."""
        return values.astype(jnp.int8)

    def decode(self, words: jax.Array) -> jax.Array:
        return words


@dataclasses.dataclass(frozen=True)
class Int4(_Integer):
    """4-bit integers, -7 to 7, two in a byte, with a float32 scale per token and head.

    Like `Int8`, with 7 instead of 127 and 15 instead of 255. The number with the even index is in
    the low nibble; head sizes must be even.
    """

    bits: ClassVar[int] = 4
    values_per_word: ClassVar[int] = 2

    word_dtype = np.dtype(np.uint8)

    def encode(self, values: jax.Array) -> jax.Array:
        """Pack integers [..., D] in range into bytes [..., D / 2]."""
        return rounding.pack(values.astype(jnp.int8))

    def decode(self, words: jax.Array) -> jax.Array:
        """Unpack bytes [..., D / 2] into int8 integers [..., D]."""
        return rounding.from_int4(rounding.unpack(words))
