"""The base class of all cache formats, and the records that hold encoded rows."""

from __future__ import annotations

import abc
import typing
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

E4M3 = np.dtype(jnp.float8_e4m3fn)


X = typing.TypeVar("X")


class QuantParams(typing.NamedTuple, typing.Generic[X]):
    """The scales and zero points that grow with a cache; None for those that a format lacks.

    Each is an array, or its shape in `Format.quant_param_shapes`.
    """

    scale: X | None = None  # float32 [N, K], or per token and head: HND [N, K, S], NHD [N, S, K]
    zero: X | None = None  # float32, per token and head
    group_scale: X | None = None  # words of e4m3, HND [N, K, S, D / 16], NHD [N, S, K, D / 16]


class Quantized(typing.NamedTuple):
    """Words [..., D or D / 2] and the scales chosen with them: scale, zero [...], group_scale."""

    words: jax.Array
    quant_params: QuantParams[jax.Array]


class Format(abc.ABC):
    """The meaning of a cache's words. The defaults are those of plain numbers.

    Every format is a frozen dataclass in a separate file, listed in `jattn.formats.ALL`.
    """

    values_per_word: ClassVar[int] = 1
    group: ClassVar[int | None] = None  # numbers that share a group_scale
    zero_point: bool = False  # whether each token and head has a zero point

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The format's name in test ids and tables."""

    @property
    @abc.abstractmethod
    def value_dtype(self) -> np.dtype:
        """The dtype of the numbers that words stand for, before any scale."""

    @property
    @abc.abstractmethod
    def word_dtype(self) -> np.dtype:
        """The dtype the words are stored in."""

    @property
    @abc.abstractmethod
    def largest(self) -> float:
        """The largest finite number before the scale."""

    @abc.abstractmethod
    def encode(self, values: jax.Array) -> jax.Array:
        """Encode `values`, already divided by all scales, as words."""

    @abc.abstractmethod
    def decode(self, words: jax.Array) -> jax.Array:
        """Decode words to numbers in `value_dtype`, without applying any scale."""

    @abc.abstractmethod
    def quantize(self, values: jax.Array, scale: jax.Array | None = None) -> Quantized:
        """Encode `values / scale`, with the scales and zero points that the format chooses."""

    @property
    def per(self) -> str | None:
        """What has a scale: "head" (or the whole cache), "block", "token"; None for no scale."""
        return None

    @property
    def takes_scale(self) -> bool:
        """Whether the caller sets `scale`: one number [], or one per KV head [K]."""
        return self.per == "head"

    @property
    def chooses_scales(self) -> bool:
        """Whether writing chooses scales from the numbers: per token, per block or per group."""
        return self.per in ("block", "token") or self.group is not None

    @property
    def narrow(self) -> bool:
        """Whether numbers are stored in 8 bits or fewer, and widened where they are read."""
        return self.word_dtype.itemsize == 1

    @property
    def codes(self) -> str:
        """The name of its numbers, regardless of their scales and zero points."""
        return self.name

    @property
    def triton_dtype(self) -> str:
        """The Triton dtype that kernels read words as."""
        return self.word_dtype.name

    @property
    def triton_codes(self) -> str:
        """The name of the words in `jattn/pallas/triton/pools.py`; "" for numbers of a dtype."""
        return ""

    @property
    def dim_multiple(self) -> int:
        """Head sizes must be a multiple of this."""
        return self.group or self.values_per_word

    def bytes_per_token(self, dim: int) -> int:
        """Return the bytes of one token of one KV head: words, and scale and zero point per token.

        A scale per block adds four bytes per block and head; one per head or cache adds nothing.
        """
        per_token = 4 * (self.per == "token") + 4 * self.zero_point
        groups = dim // self.group if self.group else 0
        return self.word_bytes(dim) + per_token + groups

    def word_bytes(self, dim: int) -> int:
        """Return the bytes of the words of one token of one KV head."""
        return dim // self.values_per_word * self.word_dtype.itemsize

    def quant_param_shapes(
        self, words: tuple[int, ...], kv_layout: str
    ) -> QuantParams[tuple[int, ...]]:
        """Return the shapes of scales and zeros for words of a shape; None for those it lacks."""
        n, a, b, last = words
        per_token = (n, a, b)
        scale = {"block": (n, b if kv_layout == "NHD" else a), "token": per_token}
        groups = (*per_token, last * self.values_per_word // self.group) if self.group else None
        return QuantParams(
            None if self.per is None else scale.get(self.per),
            per_token if self.zero_point else None,
            groups,
        )


def divided(values: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Return `values / scale` in float32, or `values` if there is no scale."""
    return values if scale is None else values.astype(jnp.float32) * (1 / scale)
