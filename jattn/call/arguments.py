"""Checks of the arguments that several public functions take: caches, scales, index arrays."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import checks, formats

LAYOUTS = ("HND", "NHD")


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of an array, a ShapeDtypeStruct, a KVArray or a nested list."""
    return tuple(x.shape) if hasattr(x, "shape") else np.shape(x)


def dtype_of(x: Any) -> np.dtype:
    """The dtype JAX would give `x`: int32 for NumPy's int64 unless 64-bit types are enabled."""
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def is_array(x: Any) -> bool:
    """Whether `x` has a shape and a dtype: arrays, tracers and ShapeDtypeStructs."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def check_cache(
    problems: checks.Problems, name: str, cache: Any, kv_layout: Any
) -> formats.Format | None:
    """Check one side of a cache on its own; returns its format when it has one that holds up."""
    if isinstance(cache, formats.KVArray):
        words, format = cache.data, cache.format
        good = problems.require(
            isinstance(format, formats.Format),
            f"{name}.format",
            checks.describe(format),
            "a jattn.Dense, Fp8, Int8, Int4 or Nvfp4",
        )
        good = good and problems.require(
            is_array(words) and np.dtype(words.dtype) == format.word_dtype,
            f"{name}.data",
            checks.describe(words),
            f"{format.word_dtype.name} words for {format}",
        )
        return format if good and _check_quant_params(problems, name, cache, kv_layout) else None
    if not problems.require(
        is_array(cache), name, f"a {type(cache).__name__}", "a float array or a jattn.KVArray"
    ):
        return None
    format = formats.plain_format(cache.dtype)
    if format is not None:
        return format
    if np.dtype(cache.dtype).itemsize == 1:
        must = (
            "told apart: one-byte words may be fp8 or int8 (one number a byte), int4 or NVFP4 (two "
            "numbers a byte). Wrap them with their scales: jattn.KVArray(data, scale, "
            "jattn.Fp8('e4m3' or 'e5m2')), jattn.Int8() or jattn.Int4() with a scale per token and "
            "head, or jattn.Nvfp4() with group_scale="
        )
    else:
        must = "float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or a jattn.KVArray"
    problems.add(name, checks.describe(cache), must)
    return None


def _check_quant_params(
    problems: checks.Problems, name: str, cache: formats.KVArray, kv_layout: Any
) -> bool:
    """Check scales and zeros against the words: nothing missing, nothing too much, every shape."""
    format, words = cache.format, shape_of(cache.data)
    if len(words) != 4 or kv_layout not in LAYOUTS:
        return True  # somebody else says so
    heads = words[2 if kv_layout == "NHD" else 1]
    wanted = format.quant_param_shapes(words, kv_layout)._asdict()
    good = problems.require(
        words[3] * format.values_per_word % format.dim_multiple == 0,
        f"{name}.data",
        checks.describe(cache.data),
        f"words of a head size that is a multiple of {format.dim_multiple} for {format}",
    )
    for field, dtype in (("scale", np.float32), ("zero", np.float32), ("group_scale", np.uint8)):
        x, shape = getattr(cache, field), wanted[field]
        if field == "scale" and format.takes_scale:
            ok = x is None or (shape_of(x) in ((), (heads,)) and dtype_of(x) == dtype)
            must = f"float32 of shape [] or [K], K = {heads}, or None, for {format}"
        elif shape is None:
            ok, must = x is None, f"None for {format}"
        else:
            ok = x is not None and shape_of(x) == shape and dtype_of(x) == dtype
            must = f"{np.dtype(dtype).name}{list(shape)} for {format}"
        good &= problems.require(ok, f"{name}.{field}", checks.describe(x), must)
    return good


def check_caches(
    problems: checks.Problems, key_cache: Any, value_cache: Any, kv_layout: Any
) -> tuple[formats.Format, formats.Format, dict[str, int]] | None:
    """Check a pair of caches: `(key format, value format, sizes K, S, N, D, V)`, or None.

    A value cache of None stands for keys that hold their values: V is then D.
    """
    shared = value_cache is None
    good = problems.require(kv_layout in LAYOUTS, "kv_layout", repr(kv_layout), f"one of {LAYOUTS}")
    key_format = check_cache(problems, "key_cache", key_cache, kv_layout)
    value_format = key_format
    if not shared:
        value_format = check_cache(problems, "value_cache", value_cache, kv_layout)
    sides = (("key_cache", key_cache, "D"), ("value_cache", value_cache, "V"))
    if shared:
        sides, value_cache = sides[:1], key_cache
    axes = "[N, S, K, {}]" if kv_layout == "NHD" else "[N, K, S, {}]"
    for name, cache, last in sides:
        if is_array(cache):
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
    n, a, b, d = key_cache.shape
    if not problems.require(
        tuple(value_cache.shape[:3]) == (n, a, b),
        "value_cache",
        f"of shape {list(value_cache.shape)}",
        f"{[n, a, b, 'V']}, as key_cache says",
    ):
        return None
    heads, block = (b, a) if kv_layout == "NHD" else (a, b)
    sizes = {"N": n, "K": heads, "S": block, "D": d, "V": value_cache.shape[3]}
    problems.require(
        n * block < 2**31,
        "key_cache",
        f"{n} blocks of {block} tokens",
        "fewer than 2^31 slots: slots are int32",
    )
    return key_format, value_format, sizes


def check_scale(
    problems: checks.Problems, name: str, scale: Any, cache: Any, num_kv_heads: int | None
) -> None:
    """Check `k_scale` or `v_scale`: a number, [] or [K], and not given twice.

    With `num_kv_heads` None, where the caches do not say K, any length will do.
    """
    if scale is None:
        return
    number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    floating = is_array(scale) and jnp.issubdtype(scale.dtype, jnp.floating)
    per_head = floating and fits(scale.shape, (num_kv_heads,))
    problems.require(
        number or (floating and shape_of(scale) == ()) or per_head,
        name,
        checks.describe(scale),
        f"a number, or floating point of shape [] or [K]{axis_is('K', num_kv_heads)}",
    )
    if own_scale(cache) is not None:
        problems.add(name, checks.describe(scale), "None: the cache carries its own scale")


def fits(shape: tuple, wanted: tuple) -> bool:
    """Whether `shape` is `wanted`, a None in it standing for any length."""
    return len(shape) == len(wanted) and all(
        want in (None, have) for want, have in zip(wanted, shape, strict=True)
    )


def axis_is(axis: str, size: int | None) -> str:
    """`, H = 8` for a message, or nothing where nobody knows the size."""
    return "" if size is None else f", {axis} = {size}"


def own_scale(cache: Any) -> Any:
    """The scale [] or [K] that a cache carries; None where it has none, or others."""
    if isinstance(cache, formats.KVArray) and getattr(cache.format, "takes_scale", False):
        return cache.scale
    return None


def quant_params(cache: Any) -> formats.QuantParams:
    """The arrays of scales and zero points that go with a cache's words."""
    return cache.quant_params if isinstance(cache, formats.KVArray) else formats.QuantParams()


def per_head_scale(scale: Any, cache: Any, num_kv_heads: int) -> jax.Array | None:
    """`scale` or the cache's own as float32 [K], or None for 1."""
    if scale is None:
        scale = own_scale(cache)
    if scale is None:
        return None
    return jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (num_kv_heads,))


def check_int32(
    problems: checks.Problems, name: str, x: Any, shape: tuple, axes: tuple[str, ...]
) -> bool:
    """int32 of `shape`, whose axes have names; a None in it stands for any length."""
    good = is_array(x) and fits(x.shape, shape) and dtype_of(x) == np.int32
    sizes = zip(shape, axes, strict=True)
    text = ", ".join(axis if want is None else str(want) for want, axis in sizes)
    return problems.require(good, name, checks.describe(x), f"int32[{text}]")
