"""Checks of KV caches and of the scales given with them."""

from __future__ import annotations

import numbers
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jattn import checks, formats, integers
from jattn.call import arrays
from jattn.call.kv_rows import check_rows
from jattn.formats import rounding
from jattn.formats.kv_array import LAYOUTS

# A cache, or its shape for `jattn.explain`, which computes nothing.
Given = formats.Cache | jax.ShapeDtypeStruct


class Caches(typing.NamedTuple):
    """The facts of a checked pair of caches. Axis letters as in `jattn.paged_attention`."""

    key_format: formats.Format
    value_format: formats.Format
    kv_layout: str
    num_blocks: int  # N
    num_kv_heads: int  # K
    block_size: int  # S
    head_dim: int  # D
    value_dim: int  # V
    rows: formats.Rows | None = None  # where keys and values are in one array of both


def check_layout(problems: checks.Problems, kv_layout: object) -> bool:
    """Check that the layout is one of `LAYOUTS`."""
    known = kv_layout in LAYOUTS
    return problems.require(known, "kv_layout", repr(kv_layout), f"one of {LAYOUTS}")


def layout_of(*caches: Given | None, kv_layout: str | None = None) -> str:
    """Return the layout of a pair of caches: a `KVArray`'s, else the one given, else "HND"."""
    stated = [cache.kv_layout for cache in caches if isinstance(cache, formats.KVArray)]
    return stated[0] if stated else kv_layout or "HND"


def _check_layouts(
    problems: checks.Problems, named: list[tuple[str, Given | None]], kv_layout: str | None
) -> bool:
    """Check that the layout is known and that every `KVArray` has it."""
    layout = layout_of(*(cache for _, cache in named), kv_layout=kv_layout)
    good = kv_layout is None or check_layout(problems, kv_layout)
    for name, cache in named:
        if isinstance(cache, formats.KVArray) and good:
            good &= problems.require(
                cache.kv_layout in LAYOUTS and cache.kv_layout == layout,
                f"{name}.kv_layout",
                repr(cache.kv_layout),
                f"{layout!r}, to match key_cache" if layout in LAYOUTS else f"one of {LAYOUTS}",
            )
    if good and kv_layout is not None:
        good = problems.require(
            kv_layout == layout, "kv_layout", repr(kv_layout), f"{layout!r}, as the caches say"
        )
    return good


def check_cache(
    problems: checks.Problems, name: str, cache: Given, kv_layout: str
) -> formats.Format | None:
    """Check a cache of keys or values by itself; return its format, or None if it is wrong."""
    arrays.check_last_axis_is_whole(
        problems, name, cache.data if isinstance(cache, formats.KVArray) else cache
    )
    if isinstance(cache, formats.KVArray):
        words, format = cache.data, cache.format
        good = problems.expect(
            isinstance(format, formats.Format),
            f"{name}.format",
            format,
            "a jattn.Dense, Fp8, Int8, Int4 or Nvfp4",
        )
        good = good and problems.expect(
            arrays.is_array(words) and np.dtype(words.dtype) == format.word_dtype,
            f"{name}.data",
            words,
            f"{format.word_dtype.name} words for {format}",
        )
        return format if good and _check_quant_params(problems, name, cache, kv_layout) else None
    if not arrays.is_array(cache):
        problems.add(
            name,
            f"a {type(cache).__name__}",
            "a float array or a jattn.KVArray, or as key_cache a jattn.KVRows",
        )
        return None
    found = formats.plain_format(cache.dtype)
    must = "float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or a jattn.KVArray"
    if np.dtype(cache.dtype).itemsize == 1:
        must = (
            "a jattn.KVArray: one-byte words may be fp8 or int8 (one number a byte), int4 or NVFP4 "
            "(two numbers a byte), and its format says which. Wrap them with their scales: "
            "jattn.KVArray(data, scale, jattn.Fp8('e4m3' or 'e5m2')), jattn.Int8() or jattn.Int4() "
            "with a scale per token and head, or jattn.Nvfp4() with group_scale="
        )
    problems.expect(found is not None, name, cache, must)
    return found


def _check_quant_params(
    problems: checks.Problems, name: str, cache: formats.KVArray, kv_layout: str
) -> bool:
    """Check scales and zeros against the words: none missing, none too many, all shapes right."""
    format, words = cache.format, arrays.shape_of(cache.data)
    if len(words) != 4 or kv_layout not in LAYOUTS:
        return True  # reported elsewhere
    heads = words[2 if kv_layout == "NHD" else 1]
    wanted = format.quant_param_shapes(words, kv_layout)._asdict()
    good = problems.expect(
        words[3] * format.values_per_word % format.dim_multiple == 0,
        f"{name}.data",
        cache.data,
        f"words of a head size that is a multiple of {format.dim_multiple} for {format}",
    )
    for field, dtype in (("scale", np.float32), ("zero", np.float32), ("group_scale", np.uint8)):
        x, shape = getattr(cache, field), wanted[field]
        of_dtype = x is not None and arrays.dtype_of(x) == dtype
        if field == "scale" and format.takes_scale:
            ok = x is None or (of_dtype and arrays.shape_of(x) in ((), (heads,)))
            must = f"float32 of shape [] or [K], K = {heads}, or None, for {format}"
        elif shape is None:
            ok, must = x is None, f"None for {format}"
        else:
            ok = of_dtype and arrays.shape_of(x) == shape
            must = f"{np.dtype(dtype).name}{list(shape)} for {format}"
        good &= problems.expect(ok, f"{name}.{field}", x, must)
    return good


def check_caches(
    problems: checks.Problems,
    key_cache: Given,
    value_cache: Given | None,
    kv_layout: str | None,
) -> Caches | None:
    """Check a pair of caches; return None if anything is wrong.

    A value cache of None means that keys hold their values: V is then D. A layout of None means the
    caches' own, HND for plain arrays.
    """
    if isinstance(key_cache, formats.KVRows):
        return _check_one_array(problems, key_cache, value_cache, kv_layout)
    caches = [("key_cache", key_cache), ("value_cache", value_cache)]
    good = _check_layouts(problems, caches, kv_layout)
    kv_layout = layout_of(key_cache, value_cache, kv_layout=kv_layout)
    key_format = check_cache(problems, "key_cache", key_cache, kv_layout)
    named: list[tuple[str, Given, str]] = [("key_cache", key_cache, "D")]
    if value_cache is None:
        value_format, value_cache = key_format, key_cache
    else:
        value_format = check_cache(problems, "value_cache", value_cache, kv_layout)
        named.append(("value_cache", value_cache, "V"))
    axes = "[N, S, K, {}]" if kv_layout == "NHD" else "[N, K, S, {}]"
    for name, cache, last in named:
        if arrays.is_array(cache):
            good &= problems.require(
                len(cache.shape) == 4 and min(cache.shape) > 0,
                name,
                f"of shape {list(cache.shape)}",
                f"{axes.format(last)} with no empty axis",
            )
    good &= problems.require(
        isinstance(key_cache, formats.KVArray) == isinstance(value_cache, formats.KVArray),
        "value_cache",
        f"a {type(value_cache).__name__}",
        f"of the same kind as key_cache, a {type(key_cache).__name__}",
    )
    if not good or key_format is None or value_format is None:
        return None
    n, a, b, d = arrays.shape_of(key_cache)
    value_shape = arrays.shape_of(value_cache)
    if not problems.require(
        value_shape[:3] == (n, a, b),
        "value_cache",
        f"of shape {list(value_shape)}",
        f"{[n, a, b, 'V']}, to match key_cache",
    ):
        return None
    heads, block = (b, a) if kv_layout == "NHD" else (a, b)
    integers.require_int32_slots(problems, "key_cache", n, block)
    sizes = (n, heads, block, d, value_shape[3])
    return Caches(key_format, value_format, kv_layout, *sizes)


def _check_one_array(
    problems: checks.Problems,
    cache: formats.KVRows,
    value_cache: Given | None,
    kv_layout: str | None,
) -> Caches | None:
    """`check_caches` for keys and values side by side."""
    problems.expect(
        kv_layout in (None, "NHD"),
        "kv_layout",
        kv_layout,
        "None or 'NHD': a jattn.KVRows keeps the heads of a token together",
    )
    format = check_rows(problems, "key_cache", cache, value_cache)
    if format is None:
        return None
    n, block = cache.data.shape[:2]
    integers.require_int32_slots(problems, "key_cache", n, block)
    sizes = (n, cache.num_kv_heads, block, cache.head_dim, cache.value_dim)
    return Caches(format, format, cache.kv_layout, *sizes, cache.rows())


def check_scale(
    problems: checks.Problems,
    name: str,
    scale: object,
    cache: Given | None,
    num_kv_heads: int | None,
) -> None:
    """Check `k_scale` or `v_scale`: a number or an array [] or [K], and not given twice.

    With `num_kv_heads` None, because the caches do not say K, any length is accepted.
    """
    if scale is None:
        return
    number = isinstance(scale, numbers.Real) and not arrays.is_bool(scale)
    shaped = problems.expect(
        number or arrays.matches(scale, jnp.floating, (), (num_kv_heads,)),
        name,
        scale,
        "a number, or floating point of shape [] or [K]" + arrays.axis_is("K", num_kv_heads),
    )
    if shaped and (known := rounding.as_float32(scale)) is not None:
        sound = bool((np.isfinite(known) & (known != 0)).all())
        what = checks.describe(scale) if number else f"{known.reshape(-1)[:8].tolist()}"
        problems.require(sound, name, what, "finite and not 0 in float32")
    stored = stored_scale(cache) is not None
    problems.expect(not stored, name, scale, "None: the cache carries its own scale")


def stored_scale(cache: Given | None) -> jax.Array | None:
    """Return the scale [] or [K] that a cache carries; None if it has none or another kind."""
    if isinstance(cache, formats.KVArray) and getattr(cache.format, "takes_scale", False):
        return cache.scale
    return None


def quant_params(cache: Given) -> formats.QuantParams[jax.Array]:
    """Return the scales and zeros of a cache that grow with the pool."""
    return cache.quant_params if isinstance(cache, formats.KVArray) else formats.QuantParams()


def per_head_scale(
    scale: ArrayLike | None, cache: Given | None, num_kv_heads: int
) -> jax.Array | None:
    """Return `scale`, or the cache's own, as float32 [K]; None for 1."""
    scale = stored_scale(cache) if scale is None else scale
    if scale is None:
        return None
    return jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (num_kv_heads,))
