"""Plain floating-point numbers, stored as words that XLA for CPU does not convert."""

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
    """Plain floating point: "float32", "bfloat16" or "float16", without a scale.

    Attributes:
      dtype: the name; a dtype or scalar type, such as `x.dtype` or `jnp.float32`, becomes its name.
    """

    dtype: str = "bfloat16"

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")

    def __post_init__(self) -> None:
        given: object = self.dtype
        if isinstance(given, np.dtype | type):  # a dtype equals its name, but hashes differently
            object.__setattr__(self, "dtype", np.dtype(given).name)
        with checks.checking("Dense") as problems:
            known = isinstance(self.dtype, str) and self.dtype in self.dtypes
            problems.require(known, "dtype", repr(given), f"one of {self.dtypes}")

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
        """Encode `values`: round to nearest even, and overflow to infinity as the dtype does."""
        return rounding.bitcast(values.astype(self.value_dtype), self.word_dtype)

    def decode(self, words: jax.Array) -> jax.Array:
        return rounding.bitcast(words, self.value_dtype)

    def quantize(self, values: jax.Array, scale: jax.Array | None = None) -> Quantized:
        return Quantized(self.encode(divided(values, scale)), QuantParams())
