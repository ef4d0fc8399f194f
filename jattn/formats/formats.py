"""How the words of a KV cache are read: a type, never a guess from a storage dtype.

A format says which numbers a word stands for, and which arrays lie beside the words. A cache is a
plain float array, or a `KVArray`: the stored words, what lies beside them, and the format. The
words of formats narrower than 32 bits are integers, because XLA for CPU runs many operations on
bfloat16 (JAX 0.10) and float8 (all versions) by converting the *whole* operand to float32: a pool
would be copied on every step. An integer is never converted; only the slab that is read or written
is.

    number = decode(word) * group_scale * scale + zero

with `group_scale` one per 16 numbers (NVFP4), `scale` one for the cache, per KV head, per block and
head or per token and head, and `zero` per token and head: each where the format has it.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jattn import checks
from jattn.formats import rounding

_WORDS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.float32)}
_E4M3 = np.dtype(jnp.float8_e4m3fn)


class QuantParams(typing.NamedTuple):
    """The arrays beside a cache's words that are as long as the pool; None for what is absent."""

    scale: Any = None  # float32 [N, K], or one per token and head: HND [N, K, S], NHD [N, S, K]
    zero: Any = None  # float32, one per token and head
    group_scale: Any = None  # uint8 words of e4m3, HND [N, K, S, D / 16], NHD [N, S, K, D / 16]


class Quantized(typing.NamedTuple):
    """Words [..., D or D / 2] and what was chosen with them: scale, zero [...], group_scale."""

    words: jax.Array
    quant_params: QuantParams


class _Format:
    """What all formats share; the defaults are those of plain numbers."""

    values_per_word: ClassVar[int] = 1  # numbers in a word
    group: ClassVar[int | None] = None  # numbers that share a group_scale
    zero_point: bool = False  # whether a zero lies beside each token and head

    @property
    def per(self) -> str | None:
        """What a scale belongs to: "head" (or the whole cache), "block", "token", or None."""
        return None

    @property
    def takes_scale(self) -> bool:
        """Whether `scale` is one number, [] or one per KV head [K], that somebody sets."""
        return self.per == "head"

    @property
    def dim_multiple(self) -> int:
        """Head sizes must be a multiple of this."""
        return self.group or self.values_per_word

    def bytes_per_token(self, dim: int) -> int:
        """Bytes of one token of one KV head: words, and what lies beside them per token.

        A scale per block adds four bytes to a block and head, one per head or cache nothing.
        """
        params = 4 * (self.per == "token") + 4 * self.zero_point
        groups = dim // self.group if self.group else 0
        return dim // self.values_per_word * self.word_dtype.itemsize + params + groups

    def quant_param_shapes(self, words: tuple[int, ...], kv_layout: str) -> QuantParams:
        """Shapes of what lies beside words of that shape; None for what the format has not."""
        n, a, b, last = words
        heads = b if kv_layout == "NHD" else a
        scale = {"block": (n, heads), "token": (n, a, b)}.get(self.per)
        groups = (n, a, b, last * self.values_per_word // self.group) if self.group else None
        return QuantParams(scale, (n, a, b) if self.zero_point else None, groups)


@dataclasses.dataclass(frozen=True)
class Dense(_Format):
    """Plain floating point: "float32", "bfloat16" or "float16"; takes no scale of its own."""

    dtype: str = "bfloat16"

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
        return np.dtype(jnp.dtype(self.dtype))

    @property
    def word_dtype(self) -> np.dtype:
        """The dtype the words are stored in."""
        return _WORDS[self.value_dtype.itemsize]

    def encode(self, values: jax.Array) -> jax.Array:
        """Words for `values`: round to nearest even; overflow to infinity as the dtype does."""
        return rounding.bitcast(values.astype(self.value_dtype), self.word_dtype)

    def decode(self, words: jax.Array) -> jax.Array:
        """The numbers the words stand for, in `value_dtype`."""
        return rounding.bitcast(words, self.value_dtype)

    def quantize(self, values: jax.Array, scale: jax.Array | None = None) -> Quantized:
        """Words of `values / scale`."""
        return Quantized(self.encode(_divided(values, scale)), QuantParams())


@dataclasses.dataclass(frozen=True)
class Fp8(_Format):
    """8-bit floats with a float32 scale: "e4m3" (largest 448, no infinity) or "e5m2".

    Writing rounds to nearest even and saturates at the largest finite value; NaN stays NaN.

    Attributes:
      kind: "e4m3" or "e5m2".
      scale_per: "head": `scale` is [] or [K] and yours to set (`jattn.calibrate`); "block":
        [N, K], set by the call that writes a block's first slot; "token": [N, K, S], set by every
        write from the token's own largest number.
    """

    kind: str = "e4m3"
    scale_per: str = "head"

    kinds: ClassVar[dict[str, str]] = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
    scales: ClassVar[tuple[str, ...]] = ("head", "block", "token")

    def __post_init__(self) -> None:
        with checks.checking("Fp8") as problems:
            problems.require(
                self.kind in self.kinds, "kind", repr(self.kind), f"one of {tuple(self.kinds)}"
            )
            problems.require(
                self.scale_per in self.scales,
                "scale_per",
                repr(self.scale_per),
                f"one of {self.scales}",
            )

    @property
    def name(self) -> str:
        """The format's name in test ids and tables."""
        return f"fp8_{self.kind}" + ("" if self.scale_per == "head" else f"_{self.scale_per}")

    @property
    def per(self) -> str:
        """What a scale belongs to."""
        return self.scale_per

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype whose numbers the words stand for, before the scale."""
        return np.dtype(jnp.dtype(self.kinds[self.kind]))

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
        to_words = {"e4m3": rounding.to_e4m3, "e5m2": rounding.to_e5m2}[self.kind]
        return to_words(values.astype(jnp.float32))

    def decode(self, words: jax.Array) -> jax.Array:
        """The numbers the words stand for, in `value_dtype`; the scale is not applied."""
        return rounding.bitcast(words, self.value_dtype)

    def quantize(self, values: jax.Array, scale: jax.Array | None = None) -> Quantized:
        """Words of `values / scale`, and of what is left divided by each row's own scale."""
        values = _divided(values, scale)
        if self.scale_per != "token":
            return Quantized(self.encode(values), QuantParams())
        own = rounding.clamp(rounding.largest(values)) / jnp.float32(self.largest)
        values = rounding.clamp(values)
        return Quantized(self.encode(rounding.divide(values, own[..., None])), QuantParams(own))


@dataclasses.dataclass(frozen=True)
class _Integer(_Format):
    """Integers with a scale, and perhaps a zero point, per token and head."""

    zero_point: bool = False

    bits: ClassVar[int]

    @property
    def name(self) -> str:
        """The format's name in test ids and tables."""
        return f"int{self.bits}" + ("_zero" if self.zero_point else "")

    @property
    def per(self) -> str:
        """What a scale belongs to."""
        return "token"

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype of the integers, before scale and zero point."""
        return np.dtype(np.int8)

    @property
    def largest(self) -> int:
        """The largest integer; the smallest is its negative, or one less with a zero point."""
        return 2 ** (self.bits - 1) - 1

    def quantize(self, values: jax.Array, scale: jax.Array | None = None) -> Quantized:
        """Words, scales and zeros of rows of `values / scale`."""
        # From what came in, not from a float32 copy of it, which would lie in memory whole.
        values = _divided(values, scale)
        if not self.zero_point:
            # max hands a NaN on: the row's scale is then NaN, and so is all that is read of it.
            own = rounding.clamp(jnp.abs(values).max(axis=-1)) / jnp.float32(self.largest)
            codes = rounding.to_integer(
                rounding.divide(rounding.clamp(values), own[..., None]), -self.largest, self.largest
            )
            return Quantized(self.encode(codes), QuantParams(own))
        low, high = (rounding.clamp(x) for x in (values.min(axis=-1), values.max(axis=-1)))
        values = rounding.clamp(values)
        own = (high - low) / jnp.float32(2 * self.largest + 1)
        zero = low + own * jnp.float32(self.largest + 1)
        codes = rounding.to_integer(
            rounding.divide(values - zero[..., None], own[..., None]),
            -self.largest - 1,
            self.largest,
        )
        return Quantized(self.encode(codes), QuantParams(own, zero))


@dataclasses.dataclass(frozen=True)
class Int8(_Integer):
    """8-bit integers, -127 to 127, with a float32 scale per token and head.

    Writing takes `scale = max |x| / 127` of the token's own row and rounds to nearest even. With
    `zero_point`, codes -128 to 127 span the row: `scale = (max - min) / 255`, and `zero` is the
    number that code 0 stands for. Integers have no NaN: a row that holds one gets a scale of NaN,
    so all of that token and head reads as NaN and none is lost; infinities count as 2^126.
    """

    bits: ClassVar[int] = 8

    @property
    def word_dtype(self) -> np.dtype:
        """The dtype the words are stored in."""
        return np.dtype(np.int8)

    def encode(self, codes: jax.Array) -> jax.Array:
        """Words for integers in range: themselves."""
        return codes.astype(jnp.int8)

    def decode(self, words: jax.Array) -> jax.Array:
        """The integers the words stand for."""
        return words


@dataclasses.dataclass(frozen=True)
class Int4(_Integer):
    """4-bit integers, -7 to 7, two in a byte, with a float32 scale per token and head.

    As `Int8`, with 7 for 127 and 15 for 255. The even index lies in the low nibble; head sizes must
    be even.
    """

    bits: ClassVar[int] = 4
    values_per_word: ClassVar[int] = 2

    @property
    def word_dtype(self) -> np.dtype:
        """The dtype the words are stored in."""
        return np.dtype(np.uint8)

    def encode(self, codes: jax.Array) -> jax.Array:
        """Bytes [..., D / 2] for integers [..., D] in range."""
        return rounding.pack(codes.astype(jnp.int8))

    def decode(self, words: jax.Array) -> jax.Array:
        """The integers [..., D] that the bytes [..., D / 2] stand for, int8."""
        return rounding.from_int4(rounding.unpack(words))


@dataclasses.dataclass(frozen=True)
class Nvfp4(_Format):
    """NVFP4: two e2m1 numbers a byte, an e4m3 scale per 16 of them, a float32 scale over all.

    e2m1 has 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign. `scale`, [] or [K], is yours to set
    (`jattn.calibrate`): `max |x| / (6 * 448)` uses the whole range. Writing takes for each group
    `group_scale = e4m3(max |x| / scale / 6)` and rounds `x / (group_scale * scale)` to nearest
    even, saturating at 6. e2m1 has no NaN: a group that holds one gets a group scale of NaN, and
    all 16 read as NaN. Head sizes must be multiples of 16. The words and group scales are those of
    FlashInfer's `kv_cache_sf` [N, K, S, D / 16], not swizzled, the even index in the low nibble.
    """

    values_per_word: ClassVar[int] = 2
    group: ClassVar[int] = 16
    largest: ClassVar[float] = 6.0 * 448.0  # of a number before the scale

    @property
    def name(self) -> str:
        """The format's name in test ids and tables."""
        return "nvfp4"

    @property
    def per(self) -> str:
        """What a scale belongs to."""
        return "head"

    @property
    def value_dtype(self) -> np.dtype:
        """A dtype that holds every number exactly, before the scales and after the group's."""
        return np.dtype(jnp.bfloat16)

    @property
    def word_dtype(self) -> np.dtype:
        """The dtype the words are stored in."""
        return np.dtype(np.uint8)

    def encode(self, values: jax.Array) -> jax.Array:
        """Bytes [..., D / 2] for numbers [..., D], already divided by both scales."""
        return rounding.pack(rounding.to_e2m1(values.astype(jnp.float32)))

    def decode(self, words: jax.Array) -> jax.Array:
        """The numbers [..., D] of bytes [..., D / 2], bfloat16; no scale is applied."""
        return rounding.from_e2m1(rounding.unpack(words))

    def quantize(self, values: jax.Array, scale: jax.Array | None = None) -> Quantized:
        """Words and group scales of `values / scale`."""
        groups = values.reshape(*values.shape[:-1], -1, self.group)
        # The largest before the division: the same number, and no float32 of everything to keep.
        # max hands a NaN on to the group's scale; e4m3 has one.
        most = rounding.clamp(jnp.abs(_divided(jnp.abs(groups).max(axis=-1), scale)))
        own = Fp8("e4m3").encode(most / jnp.float32(6))
        size = rounding.bitcast(own, _E4M3).astype(jnp.float32)
        groups = rounding.clamp(_divided(values, scale)).reshape(groups.shape)
        words = self.encode(rounding.divide(groups, size[..., None]).reshape(values.shape))
        return Quantized(words, QuantParams(group_scale=own))


Format = Dense | Fp8 | Int8 | Int4 | Nvfp4
ALL: tuple[Format, ...] = (
    *map(Dense, Dense.dtypes),
    *(Fp8(kind, per) for per in Fp8.scales for kind in Fp8.kinds),
    *(kind(zero) for kind in (Int8, Int4) for zero in (False, True)),
    Nvfp4(),
)


def _divided(values: jax.Array, scale: jax.Array | None) -> jax.Array:
    return values if scale is None else values.astype(jnp.float32) / scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVArray:
    """One side (K or V) of a paged cache: words, what lies beside them, and their format.

    Invariants: `data.dtype == format.word_dtype`; the other arrays are there where the format has
    them, and then of the shapes below. A registered pytree: it goes through jit, donation, scan,
    vmap, sharding and checkpointing as its arrays do, and `format` is static. What grows with the
    pool has the blocks first, so whoever copies or moves blocks moves all of it alike.

    Attributes:
      data: words, HND [N, K, S, W] or NHD [N, S, K, W], of `format.word_dtype`, W being D or, two
        numbers a byte, D / 2.
      scale: float32: [] or [K], or None for 1, where `format.per` is "head"; [N, K] for "block";
        HND [N, K, S] or NHD [N, S, K] for "token"; None for `Dense`.
      format: `Dense`, `Fp8`, `Int8`, `Int4` or `Nvfp4`.
      zero: float32, as a scale per token, where the format has a zero point.
      group_scale: uint8 words of e4m3, HND [N, K, S, D / 16] or NHD [N, S, K, D / 16]: `Nvfp4`.
    """

    data: jax.Array
    scale: jax.Array | None
    format: Format = dataclasses.field(metadata={"static": True})
    zero: jax.Array | None = None
    group_scale: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers: that of the words, with D last."""
        *axes, last = self.data.shape
        return (*axes, last * self.format.values_per_word)

    @property
    def ndim(self) -> int:
        """The rank of the words."""
        return self.data.ndim

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the numbers the words stand for (not of the words)."""
        return self.format.value_dtype

    @property
    def quant_params(self) -> QuantParams:
        """What lies beside the words and is as long as the pool."""
        scale = None if self.format.takes_scale else self.scale
        return QuantParams(scale, self.zero, self.group_scale)

    @property
    def nbytes(self) -> int:
        """Bytes of what grows with the pool: the words and what lies beside them."""
        arrays = (self.data, *(x for x in self.quant_params if x is not None))
        return sum(x.size * np.dtype(x.dtype).itemsize for x in arrays)

    @classmethod
    def from_values(
        cls,
        values: jax.Array,
        format: Format,
        scale: jax.Array | float | None = None,
        kv_layout: str = "HND",
    ) -> KVArray:
        """Encode a float array of a whole cache. Makes a new array: for tests and conversions.

        Args:
          values: HND [N, K, S, D] or NHD [N, S, K, D] floats.
          format: the format to store them in. Scales per block are taken from each block's largest
            number.
          scale: None, or a number or float array [] or [K] that the stored values will be
            multiplied by, where `format.takes_scale`.
          kv_layout: "HND" or "NHD".

        Raises:
          ValueError: `values` is not floating point or of a size the format cannot hold, or the
            format takes no scale.
        """
        nhd = kv_layout == "NHD"
        with checks.checking("KVArray.from_values") as problems:
            problems.require(
                jnp.issubdtype(values.dtype, jnp.floating) and values.ndim == 4,
                "values",
                checks.describe(values),
                "floating point, 4-d",
            )
            problems.require(
                values.shape[-1] % format.dim_multiple == 0,
                "values",
                checks.describe(values),
                f"of a last axis that is a multiple of {format.dim_multiple} for {format}",
            )
            problems.require(
                scale is None or format.takes_scale,
                "scale",
                checks.describe(scale),
                f"None for {format}",
            )
            heads = values.shape[2 if nhd else 1] if values.ndim == 4 else None
            problems.require(
                scale is None or jnp.shape(scale) in ((), (heads,)),
                "scale",
                checks.describe(scale),
                f"[] or [K], K = {heads}",
            )
        if format.per == "block":
            values = rounding.clamp(values)
            most = rounding.largest(values, (1, 3) if nhd else (2, 3))
            scale = jnp.where(most == 0, jnp.float32(1), most / jnp.float32(format.largest))
        scale = None if scale is None else jnp.asarray(scale, jnp.float32)
        words, params = format.quantize(values, align_scale(scale, nhd))
        own = scale if params.scale is None else params.scale
        return cls(words, own, format, params.zero, params.group_scale)

    def values(self) -> jax.Array:
        """The numbers before any scale, as an array of `dtype`. As large as the cache."""
        return self.format.decode(self.data)

    def numbers(self, kv_layout: str = "HND") -> jax.Array:
        """The numbers the cache stands for, float32, everything applied. As large as the cache."""
        x = self.values().astype(jnp.float32)
        if self.group_scale is not None:
            groups = rounding.bitcast(self.group_scale, _E4M3).astype(jnp.float32)
            x = x * jnp.repeat(groups, self.format.group, axis=-1)
        if self.format.per == "token":
            x = x * self.scale[..., None]
        elif self.scale is not None:
            x = x * align_scale(self.scale, kv_layout == "NHD")
        return x if self.zero is None else x + self.zero[..., None]

    def replace(self, **changes: Any) -> KVArray:
        """A copy with some fields changed, e.g. `cache.replace(scale=amax / 448)`."""
        return dataclasses.replace(self, **changes)


def align_scale(scale: jax.Array | None, nhd: bool) -> jax.Array | None:
    """A scale [], [K] or [N, K] as it stands beside a cache [N, K, S, D] or [N, S, K, D]."""
    if scale is None or scale.ndim == 0:
        return scale
    rows = scale if scale.ndim == 2 else scale[None]
    return rows[:, None, :, None] if nhd else rows[:, :, None, None]


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
