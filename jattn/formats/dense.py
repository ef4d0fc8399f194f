"""Plain floating-point numbers, stored as words that XLA for CPU leaves alone."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jattn import checks
from jattn.formats import rounding
from jattn.formats.base import Format, Quantized, QuantParams, divided

_WORDS: dict[int, np.dtype] = {2: np.dtype(np.uint16), 4: np.dtype(np.float32)}


@dataclasses.dataclass(frozen=True)
class Dense(Format):
    """Plain floating point: "float32", "bfloat16" or "float16"; has no scale."""

    dtype: str = "bfloat16"

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")

    def __post_init__(self) -> None:
        with checks.checking("Dense") as problems:
            problems.require(
                self.dtype in self.dtypes, "dtype", repr(self.dtype), f"one of {self.dtypes}"
            )

    @property
    def name(self) -> str:
        return self.dtype

    @property
    def triton_dtype(self) -> str:
        return self.dtype

    @property
    def value_dtype(self) -> np.dtype:
        return jnp.dtype(self.dtype)

    @property
    def word_dtype(self) -> np.dtype:
        return _WORDS[self.value_dtype.itemsize]

    @property
    def largest(self) -> float:
        return float(jnp.finfo(self.value_dtype).max)

    def encode(self, values: jax.Array) -> jax.Array:
        """Words for `values`: round to nearest even; overflow to infinity as the dtype does."""
        return rounding.bitcast(values.astype(self.value_dtype), self.word_dtype)

    def decode(self, words: jax.Array) -> jax.Array:
        return rounding.bitcast(words, self.value_dtype)

    def quantize(self, values: jax.Array, scale: jax.Array | None = None) -> Quantized:
        return Quantized(self.encode(divided(values, scale)), QuantParams())
