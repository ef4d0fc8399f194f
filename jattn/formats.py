"""How the words of a KV cache are read: a type, never a guess from a storage dtype.

A format says which numbers a word stands for. A cache is a plain float array, or a `KVArray`: the
stored words, an optional scale, and the format. The words of formats narrower than 32 bits are
unsigned integers, because XLA for CPU runs many operations on bfloat16 (JAX 0.10) and float8 (all
versions) by converting the *whole* operand to float32: a pool would be copied on every step. An
integer is never converted; only the slab that is read or written is bitcast.

    number = decode(word) * scale

with `scale` float32, one for the whole cache `[]` or one per KV head `[K]`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jattn import checks

_WORDS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.float32)}


def _dtype(name: str) -> np.dtype:
    return np.dtype(jnp.dtype(name))


@dataclasses.dataclass(frozen=True)
class Dense:
    """Plain floating point: "float32", "bfloat16" or "float16"; takes no scale of its own."""

    dtype: str = "bfloat16"

    takes_scale: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")

    def __post_init__(self) -> None:
        with checks.checking("Dense") as problems:
            problems.require(
                self.dtype in self.dtypes, "dtype", repr(self.dtype), f"one of {self.dtypes}"
            )

    @property
    def name(self) -> str:
        """The format's name in test ids and tables."""
        return self.dtype

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype whose numbers the words stand for."""
        return _dtype(self.dtype)

    @property
    def word_dtype(self) -> np.dtype:
        """The dtype the words are stored in."""
        return _WORDS[self.value_dtype.itemsize]

    def encode(self, values: jax.Array) -> jax.Array:
        """Words for `values`: round to nearest even; overflow to infinity as the dtype does."""
        return _bitcast(values.astype(self.value_dtype), self.word_dtype)

    def decode(self, words: jax.Array) -> jax.Array:
        """The numbers the words stand for, in `value_dtype`."""
        return _bitcast(words, self.value_dtype)


@dataclasses.dataclass(frozen=True)
class Fp8:
    """8-bit floats with a float32 scale: "e4m3" (largest 448, no infinity) or "e5m2".

    Writing rounds to nearest even and saturates at the largest finite value; NaN stays NaN.
    """

    kind: str = "e4m3"

    takes_scale: ClassVar[bool] = True
    kinds: ClassVar[dict[str, str]] = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}

    def __post_init__(self) -> None:
        with checks.checking("Fp8") as problems:
            problems.require(
                self.kind in self.kinds, "kind", repr(self.kind), f"one of {tuple(self.kinds)}"
            )

    @property
    def name(self) -> str:
        """The format's name in test ids and tables."""
        return f"fp8_{self.kind}"

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype whose numbers the words stand for, before the scale."""
        return _dtype(self.kinds[self.kind])

    @property
    def word_dtype(self) -> np.dtype:
        """The dtype the words are stored in."""
        return np.dtype(np.uint8)

    @property
    def largest(self) -> float:
        """The largest finite number before the scale: 448 or 57344."""
        return float(jnp.finfo(self.value_dtype).max)

    def encode(self, values: jax.Array) -> jax.Array:
        """Words for `values`, already divided by the scale."""
        limit = jnp.float32(self.largest)
        return _bitcast(
            jnp.clip(values.astype(jnp.float32), -limit, limit).astype(self.value_dtype),
            self.word_dtype,
        )

    def decode(self, words: jax.Array) -> jax.Array:
        """The numbers the words stand for, in `value_dtype`; the scale is not applied."""
        return _bitcast(words, self.value_dtype)


Format = Dense | Fp8


def _bitcast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVArray:
    """One side (K or V) of a paged cache: words, scale, and the format to read them by.

    Invariants: `data.dtype == format.word_dtype`; `scale` is None or float32 of shape [] or [K],
    and None for formats that take no scale. A registered pytree: it goes through jit, donation,
    scan, vmap, sharding and checkpointing as its arrays do, and `format` is static.

    Attributes:
      data: words, HND [N, K, S, D] or NHD [N, S, K, D], of `format.word_dtype`.
      scale: what a stored value is multiplied by, or None for 1.
      format: `Dense` or `Fp8`.
    """

    data: jax.Array
    scale: jax.Array | None
    format: Format = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the words."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """The rank of the words."""
        return self.data.ndim

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the numbers the words stand for (not of the words)."""
        return self.format.value_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the words."""
        return self.data.size * self.format.word_dtype.itemsize

    @classmethod
    def from_values(
        cls, values: jax.Array, format: Format, scale: jax.Array | float | None = None
    ) -> KVArray:
        """Encode a float array of a whole cache. Makes a new array: for tests and conversions.

        Args:
          values: [N, K, S, D] or [N, S, K, D] floats.
          format: the format to store them in.
          scale: None, or a number or 0-d float array that the stored values will be multiplied by.

        Raises:
          ValueError: `values` is not floating point, or the format takes no scale.
        """
        with checks.checking("KVArray.from_values") as problems:
            problems.require(
                jnp.issubdtype(values.dtype, jnp.floating),
                "values",
                checks.describe(values),
                "floating point",
            )
            problems.require(
                scale is None or format.takes_scale,
                "scale",
                checks.describe(scale),
                f"None for {format}",
            )
            problems.require(
                scale is None or jnp.ndim(scale) == 0, "scale", checks.describe(scale), "0-d"
            )
        if scale is None:
            return cls(format.encode(values), None, format)
        scale = jnp.asarray(scale, jnp.float32)
        return cls(format.encode(values.astype(jnp.float32) / scale), scale, format)

    def values(self) -> jax.Array:
        """The numbers before the scale, as an array of `dtype`. As large as the cache."""
        return self.format.decode(self.data)

    def replace(self, **changes: Any) -> KVArray:
        """A copy with some fields changed, e.g. `cache.replace(scale=amax / 448)`."""
        return dataclasses.replace(self, **changes)


def storage(cache: Any) -> tuple[Any, Format | None]:
    """`(array of words, format)` of a cache; a plain array has no format and is its own words."""
    if isinstance(cache, KVArray):
        return cache.data, cache.format
    return cache, None


def plain_format(dtype: Any) -> Format | None:
    """The format whose numbers a plain array of `dtype` holds, or None if no format has them."""
    for format in (*map(Dense, Dense.dtypes), *map(Fp8, Fp8.kinds)):
        if format.value_dtype == np.dtype(dtype):
            return format
    return None
