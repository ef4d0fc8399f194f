"""8-bit floats, with a scale per head, per block or per token."""

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
class Fp8(Format):
    """8-bit floats with a float32 scale: "e4m3" (largest 448, no infinity) or "e5m2".

    Writing rounds to nearest even and saturates at the largest finite value; NaN stays NaN.

    Attributes:
      kind: "e4m3" or "e5m2".
      scale_per: "head": `scale` is [] or [K], and the caller sets it (`jattn.calibrate`); "block":
        [N, K], set by the call that writes a block's first slot; "token": [N, K, S], set by every
        write from the token's largest number.
    """

    kind: str = "e4m3"
    scale_per: str = "head"

    kinds: ClassVar[dict[str, str]] = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
    scales: ClassVar[tuple[str, ...]] = ("head", "block", "token")

    word_dtype = np.dtype(np.uint8)

    def __post_init__(self) -> None:
        with checks.checking("Fp8") as problems:
            for field, allowed in (("kind", tuple(self.kinds)), ("scale_per", self.scales)):
                value = getattr(self, field)
                problems.require(value in allowed, field, repr(value), f"one of {allowed}")

    @property
    def name(self) -> str:
        return f"fp8_{self.kind}" + ("" if self.scale_per == "head" else f"_{self.scale_per}")

    @property
    def per(self) -> str:
        return self.scale_per

    @property
    def codes(self) -> str:
        return self.kind

    @property
    def triton_dtype(self) -> str:
        return "float8e4nv" if self.kind == "e4m3" else "uint8"

    @property
    def triton_codes(self) -> str:
        return "" if self.kind == "e4m3" else self.kind

    @property
    def value_dtype(self) -> np.dtype:
        return jnp.dtype(self.kinds[self.kind])

    @property
    def largest(self) -> float:
        """The largest finite number before the scale: 448 or 57344."""
        return float(jnp.finfo(self.value_dtype).max)

    def encode(self, values: jax.Array) -> jax.Array:
        """Encode `values`, already divided by the scale, as words."""
        to_words = {"e4m3": rounding.to_e4m3, "e5m2": rounding.to_e5m2}[self.kind]
        return to_words(values.astype(jnp.float32))

    def decode(self, words: jax.Array) -> jax.Array:
        return rounding.bitcast(words, self.value_dtype)

    def quantize(self, values: jax.Array, scale: jax.Array | None = None) -> Quantized:
        """Encode `values / scale`; per token, each row is also divided by its own scale."""
        values = divided(values, scale)
        if self.scale_per != "token":
            return Quantized(self.encode(values), QuantParams())
        row_scale = rounding.clamp(rounding.largest(values)) * jnp.float32(1 / self.largest)
        values = rounding.divide(rounding.clamp(values), row_scale[..., None])
        return Quantized(self.encode(values), QuantParams(row_scale))
