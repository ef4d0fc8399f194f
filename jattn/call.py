"""A call of `paged_attention`, taken apart: its checked static description, and its arrays.

`Call` holds everything that may choose a kernel or force a compilation: shapes, dtypes, formats,
layout, and which options are present. `Operands` holds every number. Nothing in `Call` depends on a
value, so a new scale, window, length or table never compiles anything.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import checks, formats

QUERY_DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("HND", "NHD")
# The options a call may carry, by the name of their argument; rows list the ones they take.
OPTIONS = (
    "not_causal",
    "is_causal_per_sequence",
    "sliding_window",
    "logits_soft_cap",
    "sinks",
    "alibi_slopes",
    "k_scale",
    "v_scale",
    "return_lse",
)


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call asks, without its numbers. Axis letters as in `jattn.paged_attention`."""

    num_tokens: int  # T
    num_seqs: int  # B
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    value_dim: int  # V
    num_blocks: int  # N
    block_size: int  # S
    table_width: int  # M
    max_query_len: int  # an upper bound on a sequence's query tokens
    query_dtype: str
    out_dtype: str
    key_format: formats.Format
    value_format: formats.Format
    plain_cache: bool  # the caches are plain float arrays, not KVArrays
    kv_layout: str
    is_causal: bool | None  # None: an array says so per sequence
    ragged: bool  # query_start_loc was given; otherwise every sequence has one query token
    options: frozenset[str]  # a subset of OPTIONS

    @property
    def group(self) -> int:
        """G: query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def return_lse(self) -> bool:
        """Whether the call wants the lse beside the output."""
        return "return_lse" in self.options


class Operands(typing.NamedTuple):
    """The numbers of a call, with every dtype settled. None where an option is absent."""

    query: jax.Array  # [T, H, D]
    key_cache: jax.Array  # words, in the call's layout
    value_cache: jax.Array
    block_tables: jax.Array  # int32 [B, M]
    seq_lens: jax.Array  # int32 [B]
    query_start_loc: jax.Array  # int32 [B + 1]
    scale: jax.Array  # float32 []
    is_causal: jax.Array | None  # bool [B]
    sliding_window: jax.Array | None  # int32 []
    logits_soft_cap: jax.Array | None  # float32 []
    sinks: jax.Array | None  # float32 [H]
    alibi_slopes: jax.Array | None  # float32 [H]
    k_scale: jax.Array | None  # float32 [K]
    v_scale: jax.Array | None  # float32 [K]


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


def check_cache(problems: checks.Problems, name: str, cache: Any) -> formats.Format | None:
    """Check one side of a cache on its own; returns its format when it has one that holds up."""
    if isinstance(cache, formats.KVArray):
        words, format = cache.data, cache.format
        good = problems.require(
            is_array(words) and np.dtype(words.dtype) == format.word_dtype,
            f"{name}.data",
            checks.describe(words),
            f"{format.word_dtype.name} words for {format}",
        )
        if cache.scale is not None:
            shape = shape_of(cache.scale)
            good &= problems.require(
                format.takes_scale, f"{name}.scale", checks.describe(cache.scale), f"None: {format}"
            )
            good &= problems.require(
                len(shape) <= 1 and jnp.issubdtype(dtype_of(cache.scale), jnp.floating),
                f"{name}.scale",
                checks.describe(cache.scale),
                "float32 of shape [] or [K]",
            )
        return format if good else None
    if not problems.require(
        is_array(cache), name, f"a {type(cache).__name__}", "a float array or a jattn.KVArray"
    ):
        return None
    format = formats.plain_format(cache.dtype)
    if format is not None:
        return format
    if np.dtype(cache.dtype).itemsize == 1:
        must = (
            "told apart: one-byte words may be fp8 (one number a byte) or NVFP4 (two numbers a "
            "byte). Wrap fp8 words as jattn.KVArray(data, scale, jattn.Fp8('e4m3' or 'e5m2')); "
            "NVFP4 has no implementation here yet"
        )
    else:
        must = "float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or a jattn.KVArray"
    problems.add(name, checks.describe(cache), must)
    return None


def check_caches(
    problems: checks.Problems, key_cache: Any, value_cache: Any, kv_layout: Any
) -> tuple[formats.Format, formats.Format, dict[str, int]] | None:
    """Check a pair of caches: `(key format, value format, sizes K, S, N, D, V)`, or None."""
    good = problems.require(kv_layout in LAYOUTS, "kv_layout", repr(kv_layout), f"one of {LAYOUTS}")
    key_format = check_cache(problems, "key_cache", key_cache)
    value_format = check_cache(problems, "value_cache", value_cache)
    sides = (("key_cache", key_cache, "D"), ("value_cache", value_cache, "V"))
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
    for name, cache, _ in sides:
        scale = getattr(cache, "scale", None)
        if scale is not None and shape_of(scale) not in ((), (heads,)):
            problems.add(
                f"{name}.scale", checks.describe(scale), f"of shape [] or [K], K = {heads}"
            )
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
        f"a number, or floating point of shape [] or [K]{_where('K', num_kv_heads)}",
    )
    if getattr(cache, "scale", None) is not None:
        problems.add(name, checks.describe(scale), "None: the cache carries its own scale")


def fits(shape: tuple, wanted: tuple) -> bool:
    """Whether `shape` is `wanted`, a None in it standing for any length."""
    return len(shape) == len(wanted) and all(
        want in (None, have) for want, have in zip(wanted, shape, strict=True)
    )


def _where(axis: str, size: int | None) -> str:
    return "" if size is None else f", {axis} = {size}"


def per_head_scale(scale: Any, cache: Any, num_kv_heads: int) -> jax.Array | None:
    """`scale` or the cache's own as float32 [K], or None for 1."""
    if scale is None:
        scale = getattr(cache, "scale", None)
    if scale is None:
        return None
    return jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (num_kv_heads,))


def _check_numbers(problems: checks.Problems, heads: int | None, **given: Any) -> None:
    """The options: numbers or 0-d arrays, and per-head vectors; `heads` None if nobody knows H."""
    for name, low in (("scale", None), ("logits_soft_cap", 0.0)):
        x = given[name]
        if x is None:
            continue
        if isinstance(x, numbers.Real) and not isinstance(x, bool):
            ok = math.isfinite(x) and (low is None or x > low)
        else:
            ok = is_array(x) and shape_of(x) == () and jnp.issubdtype(x.dtype, jnp.floating)
        above = "" if low is None else f" above {low:g}"
        problems.require(
            ok, name, checks.describe(x), f"a finite number{above} or a 0-d float array"
        )
    window = given["sliding_window"]
    if window is not None:
        if isinstance(window, numbers.Integral) and not isinstance(window, bool):
            ok = 1 <= window < 2**31
        else:
            ok = is_array(window) and shape_of(window) == () and dtype_of(window) == np.int32
        problems.require(
            ok,
            "sliding_window",
            checks.describe(window),
            "an integer of at least 1 (the keys a query sees, its own included) or a 0-d int32",
        )
    for name in ("sinks", "alibi_slopes"):
        x = given[name]
        if x is not None:
            problems.require(
                is_array(x) and fits(x.shape, (heads,)) and jnp.issubdtype(x.dtype, jnp.floating),
                name,
                checks.describe(x),
                f"floating point of shape [H]{_where('H', heads)}",
            )


def _check_int32(
    problems: checks.Problems, name: str, x: Any, shape: tuple, axes: tuple[str, ...]
) -> bool:
    """int32 of `shape`, whose axes have names; a None in it stands for any length."""
    good = is_array(x) and fits(x.shape, shape) and dtype_of(x) == np.int32
    sizes = zip(shape, axes, strict=True)
    text = ", ".join(axis if want is None else str(want) for want, axis in sizes)
    return problems.require(good, name, checks.describe(x), f"int32[{text}]")


def _check_batch(
    problems: checks.Problems, given: dict[str, Any]
) -> tuple[dict[str, int] | None, int | None]:
    """Query, tables, lengths and starts: sizes T, H, B, M or None, and H where the query says it.

    What a broken argument leaves open is not held against the others; the rest of each is judged.
    """
    query = given["query"]
    query_good = problems.require(
        is_array(query) and len(query.shape) == 3 and min(query.shape) > 0,
        "query",
        checks.describe(query),
        "[T, H, D] with no empty axis",
    )
    if query_good:
        problems.require(
            np.dtype(query.dtype).name in QUERY_DTYPES,
            "query",
            checks.describe(query),
            f"one of {QUERY_DTYPES}",
        )
    tables = given["block_tables"]
    tables_good = _check_int32(problems, "block_tables", tables, (None, None), ("B", "M"))
    if tables_good:
        tables_good = problems.require(
            min(tables.shape) > 0,
            "block_tables",
            checks.describe(tables),
            "[B, M] with no empty axis",
        )
    num_tokens, heads = query.shape[:2] if query_good else (None, None)
    num_seqs = tables.shape[0] if tables_good else None
    _check_int32(problems, "seq_lens", given["seq_lens"], (num_seqs,), ("B",))
    starts, longest = given["query_start_loc"], given["max_query_len"]
    if starts is not None:
        num_starts = None if num_seqs is None else num_seqs + 1
        _check_int32(problems, "query_start_loc", starts, (num_starts,), ("B + 1",))
    elif query_good and tables_good:
        problems.require(
            num_tokens == num_seqs,
            "query_start_loc",
            f"None with {num_tokens} query tokens for {num_seqs} sequences",
            "int32[B + 1] unless every sequence has one query token",
        )
    if longest is not None:
        ok = isinstance(longest, numbers.Integral) and not isinstance(longest, bool)
        problems.require(
            ok and longest >= 1,
            "max_query_len",
            checks.describe(longest),
            "a Python integer of at least 1, or None (it is static)",
        )
    causal = given["is_causal"]
    if not isinstance(causal, bool | np.bool_):
        problems.require(
            is_array(causal) and fits(causal.shape, (num_seqs,)) and causal.dtype == np.bool_,
            "is_causal",
            checks.describe(causal),
            f"a bool or bool[B]{_where('B', num_seqs)}",
        )
    if not query_good or not tables_good:
        return None, heads
    return {"T": num_tokens, "H": heads, "B": num_seqs, "M": tables.shape[1]}, heads


def describe_call(given: dict[str, Any]) -> Call:
    """Check all arguments of `paged_attention` by shape and dtype, and describe the call.

    Args:
      given: every argument by name, except `implementation`. Arrays may be ShapeDtypeStructs.

    Raises:
      ValueError: with every mismatch.
    """
    with checks.checking("paged_attention") as problems:
        batch, heads = _check_batch(problems, given)
        key_cache, value_cache = given["key_cache"], given["value_cache"]
        caches = check_caches(problems, key_cache, value_cache, given["kv_layout"])
        _check_numbers(problems, heads, **_only_numbers(given))
        kv_heads = None if caches is None else caches[2]["K"]
        check_scale(problems, "k_scale", given["k_scale"], key_cache, kv_heads)
        check_scale(problems, "v_scale", given["v_scale"], value_cache, kv_heads)
        if batch is not None and caches is not None:
            problems.require(
                given["query"].shape[2] == caches[2]["D"],
                "query",
                f"of head size D = {given['query'].shape[2]}",
                f"{caches[2]['D']}, as key_cache says",
            )
            problems.require(
                batch["H"] % caches[2]["K"] == 0,
                "query",
                f"{batch['H']} heads",
                f"a multiple of the {caches[2]['K']} KV heads of key_cache",
            )
        out_dtype = given["out_dtype"]
        if out_dtype is not None:
            try:
                known = np.dtype(out_dtype).name in QUERY_DTYPES
            except TypeError:
                known = False
            problems.require(known, "out_dtype", repr(out_dtype), f"one of {QUERY_DTYPES} or None")
        problems.require(
            isinstance(given["return_lse"], bool),
            "return_lse",
            checks.describe(given["return_lse"]),
            "a bool",
        )
    assert batch is not None
    assert caches is not None
    key_format, value_format, sizes = caches
    causal = given["is_causal"]
    static_causal = bool(causal) if isinstance(causal, bool | np.bool_) else None
    present = {
        name
        for name in ("sliding_window", "logits_soft_cap", "sinks", "alibi_slopes")
        if given[name] is not None
    }
    present |= {"return_lse"} if given["return_lse"] else set()
    present |= {"not_causal"} if static_causal is False else set()
    present |= {"is_causal_per_sequence"} if static_causal is None else set()
    for name, cache in (("k_scale", key_cache), ("v_scale", value_cache)):
        if given[name] is not None or getattr(cache, "scale", None) is not None:
            present.add(name)
    if given["query_start_loc"] is None:
        max_query_len = 1
    else:
        max_query_len = min(int(given["max_query_len"] or batch["T"]), batch["T"])
    query_dtype = np.dtype(given["query"].dtype).name
    return Call(
        num_tokens=batch["T"],
        num_seqs=batch["B"],
        num_heads=batch["H"],
        num_kv_heads=sizes["K"],
        head_dim=sizes["D"],
        value_dim=sizes["V"],
        num_blocks=sizes["N"],
        block_size=sizes["S"],
        table_width=batch["M"],
        max_query_len=max_query_len,
        query_dtype=query_dtype,
        out_dtype=query_dtype if out_dtype is None else np.dtype(out_dtype).name,
        key_format=key_format,
        value_format=value_format,
        plain_cache=not isinstance(key_cache, formats.KVArray),
        kv_layout=given["kv_layout"],
        is_causal=static_causal,
        ragged=given["query_start_loc"] is not None,
        options=frozenset(present),
    )


def _only_numbers(given: dict[str, Any]) -> dict[str, Any]:
    names = ("scale", "logits_soft_cap", "sliding_window", "sinks", "alibi_slopes")
    return {name: given[name] for name in names}


def take_operands(call: Call, given: dict[str, Any]) -> Operands:
    """The arrays of a checked call, every number an array of its settled dtype."""

    def maybe(name: str, dtype: Any) -> jax.Array | None:
        return None if given[name] is None else jnp.asarray(given[name], dtype)

    starts = given["query_start_loc"]
    if starts is None:
        starts = np.arange(call.num_seqs + 1, dtype=np.int32)
    scale = call.head_dim**-0.5 if given["scale"] is None else given["scale"]
    key_cache, value_cache = given["key_cache"], given["value_cache"]
    return Operands(
        query=jnp.asarray(given["query"]),
        key_cache=jnp.asarray(formats.storage(key_cache)[0]),
        value_cache=jnp.asarray(formats.storage(value_cache)[0]),
        block_tables=jnp.asarray(given["block_tables"]),
        seq_lens=jnp.asarray(given["seq_lens"]),
        query_start_loc=jnp.asarray(starts),
        scale=jnp.asarray(scale, jnp.float32),
        is_causal=jnp.asarray(given["is_causal"]) if call.is_causal is None else None,
        sliding_window=maybe("sliding_window", jnp.int32),
        logits_soft_cap=maybe("logits_soft_cap", jnp.float32),
        sinks=maybe("sinks", jnp.float32),
        alibi_slopes=maybe("alibi_slopes", jnp.float32),
        k_scale=per_head_scale(given["k_scale"], key_cache, call.num_kv_heads),
        v_scale=per_head_scale(given["v_scale"], value_cache, call.num_kv_heads),
    )
