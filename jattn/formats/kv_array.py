"""A cache's words with their scales, zero points and format."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import checks, pytrees
from jattn.formats import rounding
from jattn.formats.base import E4M3, Format, QuantParams

LAYOUTS = ("HND", "NHD")


@pytrees.register()
@dataclasses.dataclass(frozen=True, eq=False)
class KVArray:
    """The keys or the values of a paged cache: words, scales, zero points and their format.

    Invariants: `data.dtype == format.word_dtype`; the other arrays are present if the format has
    them, with the shapes below. It is a registered pytree, which passes through jit, donation,
    scan, vmap, sharding and checkpointing as its arrays do; `format` is static. Arrays that grow
    with the pool have the blocks as their first axis, so copying blocks indexes all of them alike.

    Attributes:
      data: words of `format.word_dtype`, HND [N, K, S, W] or NHD [N, S, K, W]. W is D, or D / 2
        with two numbers a byte.
      scale: float32: [] or [K], or None for 1, if `format.per` is "head"; [N, K] for "block";
        HND [N, K, S] or NHD [N, S, K] for "token"; None for `Dense`.
      format: `Dense`, `Fp8`, `Int8`, `Int4` or `Nvfp4`.
      zero: float32, shaped like a scale per token, if the format has a zero point.
      group_scale: uint8 words of e4m3, HND [N, K, S, D / 16] or NHD [N, S, K, D / 16], in `Nvfp4`.
      kv_layout: "HND" or "NHD", static; a call with another `kv_layout` is refused.
    """

    data: jax.Array
    scale: jax.Array | None
    format: Format = dataclasses.field(metadata={"static": True})
    zero: jax.Array | None = None
    group_scale: jax.Array | None = None
    kv_layout: str = dataclasses.field(default="HND", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers: the shape of the words, but with D last."""
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
    def quant_params(self) -> QuantParams[jax.Array]:
        """The scales and zero points that grow with the pool."""
        scale = None if self.format.takes_scale else self.scale
        return QuantParams(scale, self.zero, self.group_scale)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that grow with the pool: words, scales and zero points."""
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
        """Encode a whole cache from a float array, for tests and conversions. Makes a new array.

        Args:
          values: HND [N, K, S, D] or NHD [N, S, K, D] floats.
          format: the format to store them in. Scales per block follow from each block's largest
            number.
          scale: None or, if `format.takes_scale`, a number or float array [] or [K] that the stored
            values will be multiplied by.
          kv_layout: "HND" or "NHD".

        Raises:
          ValueError: `values` is not a float array or has a size the format cannot hold, `format`
            or `kv_layout` is unknown, the format takes no scale, or the scale is 0 or not finite.
        """
        with checks.checking("KVArray.from_values") as problems:
            is_array = checks.numpy_dtype(values) is not None
            problems.require(is_array, "values", checks.describe(values), "a float array")
            is_format = isinstance(format, Format)
            must = "a jattn.Dense, Fp8, Int8, Int4 or Nvfp4"
            problems.require(is_format, "format", checks.describe(format), must)
            known = kv_layout in LAYOUTS
            problems.require(known, "kv_layout", repr(kv_layout), f"one of {LAYOUTS}")
        nhd = kv_layout == "NHD"
        last, scale_shape = values.shape[-1:], None if scale is None else jnp.shape(scale)
        heads = values.shape[2 if nhd else 1] if values.ndim == 4 else None
        with checks.checking("KVArray.from_values") as problems:
            for ok, argument, value, must in (
                (
                    jnp.issubdtype(values.dtype, jnp.floating) and values.ndim == 4,
                    "values",
                    values,
                    "floating point, 4-d",
                ),
                (
                    all(dim % format.dim_multiple == 0 for dim in last),
                    "values",
                    values,
                    f"with a last axis that is a multiple of {format.dim_multiple} for {format}",
                ),
                (scale is None or format.takes_scale, "scale", scale, f"None for {format}"),
                (scale_shape in (None, (), (heads,)), "scale", scale, f"[] or [K], K = {heads}"),
                (scale is None or _is_sound_scale(scale), "scale", scale, _SCALE),
            ):
                problems.require(ok, argument, checks.describe(value), must)
        values = jnp.asarray(values)
        if format.per == "block":
            values = rounding.clamp(values)
            most = rounding.largest(values, (1, 3) if nhd else (2, 3))
            scale = rounding.usable_scale(most / jnp.float32(format.largest))
        given = None if scale is None else jnp.asarray(scale, jnp.float32)
        aligned = None if given is None else _align_scale(given, nhd)
        words, (chosen, zero, groups) = format.quantize(values, aligned)
        stored = given if chosen is None else chosen
        return cls(words, stored, format, zero, groups, kv_layout)

    def values(self) -> jax.Array:
        """Return the numbers before any scale, as an array of `dtype`. As large as the cache."""
        return self.format.decode(self.data)

    def numbers(self) -> jax.Array:
        """Return the numbers that the cache stands for, in float32. As large as the cache."""
        x, scale = self.values().astype(jnp.float32), self.scale
        if self.group_scale is not None:
            groups = rounding.bitcast(self.group_scale, E4M3).astype(jnp.float32)
            x = x * jnp.repeat(groups, x.shape[-1] // groups.shape[-1], axis=-1)
        if scale is not None:
            nhd = self.kv_layout == "NHD"
            x = x * (scale[..., None] if self.format.per == "token" else _align_scale(scale, nhd))
        return x if self.zero is None else x + self.zero[..., None]

    def replace(self, **changes: Any) -> KVArray:
        """Return a copy with some fields changed, e.g. `cache.replace(scale=amax / 448)`.

        A `scale` that is a number becomes a float32 array.

        Raises:
          ValueError: such a scale is 0 in float32, or not finite, or is a list or a string.
        """
        scale = changes.get("scale")
        # Anything else may stand for an array, as a PartitionSpec does.
        if isinstance(scale, numbers.Real | np.bool_ | list | tuple | str):
            with checks.checking("KVArray.replace") as problems:
                problems.expect(_is_sound_scale(scale), "scale", scale, _SCALE)
            changes["scale"] = jnp.asarray(rounding.as_float32(scale))
        return dataclasses.replace(self, **changes)


_SCALE = "a number or a float array, finite and not 0 in float32"


def _is_sound_scale(scale: object) -> bool:
    """Return whether a scale is what `_SCALE` says, as far as its numbers can be seen."""
    known = rounding.as_float32(scale)
    if known is not None:
        return bool((np.isfinite(known) & (known != 0)).all())
    dtype = checks.numpy_dtype(scale)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.floating))


def _align_scale(scale: jax.Array, nhd: bool) -> jax.Array:
    """Give a scale [], [K] or [N, K] the axes of a cache [N, K, S, D] or, `nhd`, [N, S, K, D]."""
    if np.ndim(scale) == 0:
        return scale
    rows = scale if scale.ndim == 2 else scale[None]
    return rows[:, None, :, None] if nhd else rows[:, :, None, None]
