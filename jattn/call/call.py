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

from jattn import checks, formats, spec
from jattn.call import arguments
from jattn.call import masks as mask_arguments

QUERY_DTYPES = ("float32", "bfloat16", "float16")
# The options a call may carry, by the name of their argument; rows list the ones they take.
CORE_OPTIONS = (
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
OPTIONS = (*CORE_OPTIONS, *mask_arguments.NAMES, "sinks_per_token", "value_dim")


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
    def values_in_keys(self) -> bool:
        """Whether there is no value cache: values are the first V numbers of every key."""
        return "value_dim" in self.options

    @property
    def return_lse(self) -> bool:
        """Whether the call wants the lse beside the output."""
        return "return_lse" in self.options


class Operands(typing.NamedTuple):
    """The numbers of a call, with every dtype settled. None where an option is absent."""

    query: jax.Array  # [T, H, D]
    key_cache: jax.Array  # words, in the call's layout
    value_cache: jax.Array | None  # None: values are the leading V of the keys
    block_tables: jax.Array  # int32 [B, M]
    seq_lens: jax.Array  # int32 [B]
    query_start_loc: jax.Array  # int32 [B + 1]
    scale: jax.Array  # float32 []
    is_causal: jax.Array | None  # bool [B]
    sliding_window: jax.Array | None  # int32 []
    logits_soft_cap: jax.Array | None  # float32 []
    sinks: jax.Array | None  # float32 [H], or [T, H] where each token has its own
    alibi_slopes: jax.Array | None  # float32 [H]
    k_scale: jax.Array | None  # float32 [K]
    v_scale: jax.Array | None  # float32 [K]
    attention_chunk_size: jax.Array | None = None  # int32 []
    visible_end: jax.Array | None = None  # int32 [T]
    tree_mask: jax.Array | None = None  # uint32 [T, W]
    selected_blocks: jax.Array | None = None  # int32 [B, M']
    relative_bias: jax.Array | None = None  # float32 [H, 2 E + 1]
    k_quant_params: formats.QuantParams = formats.QuantParams()  # in the call's layout
    v_quant_params: formats.QuantParams = formats.QuantParams()

    def sight(self, call: Call) -> spec.Sight:
        """Who sees whom: `is_causal` a bool or per sequence [B], `visible_end` per token [T]."""
        is_causal = call.is_causal if call.is_causal is not None else self.is_causal
        return spec.Sight(
            is_causal, self.sliding_window, self.attention_chunk_size, self.visible_end
        )


def _check_numbers(
    problems: checks.Problems, tokens: int | None, heads: int | None, **given: Any
) -> None:
    """The options: numbers or 0-d arrays, and arrays by head; None for sizes nobody knows."""
    for name, low in (("scale", None), ("logits_soft_cap", 0.0)):
        x = given[name]
        if x is None:
            continue
        if isinstance(x, numbers.Real) and not isinstance(x, bool):
            ok = math.isfinite(x) and (low is None or x > low)
        else:
            ok = (
                arguments.is_array(x)
                and arguments.shape_of(x) == ()
                and jnp.issubdtype(x.dtype, jnp.floating)
            )
        above = "" if low is None else f" above {low:g}"
        problems.require(
            ok, name, checks.describe(x), f"a finite number{above} or a 0-d float array"
        )
    window = given["sliding_window"]
    if window is not None:
        if isinstance(window, numbers.Integral) and not isinstance(window, bool):
            ok = 1 <= window < 2**31
        else:
            ok = (
                arguments.is_array(window)
                and arguments.shape_of(window) == ()
                and arguments.dtype_of(window) == np.int32
            )
        problems.require(
            ok,
            "sliding_window",
            checks.describe(window),
            "an integer of at least 1 (the keys a query sees, its own included) or a 0-d int32",
        )
    for name, per_token in (("sinks", True), ("alibi_slopes", False)):
        x = given[name]
        if x is not None:
            fits = arguments.is_array(x) and (
                arguments.fits(x.shape, (heads,))
                or (per_token and arguments.fits(x.shape, (tokens, heads)))
            )
            problems.require(
                fits and jnp.issubdtype(x.dtype, jnp.floating),
                name,
                checks.describe(x),
                f"floating point of shape [H]{' or [T, H]' if per_token else ''}"
                f"{arguments.axis_is('H', heads)}",
            )


def _check_values(
    problems: checks.Problems, given: dict[str, Any], sizes: dict[str, int] | None
) -> None:
    """`value_dim`, which stands in for a value cache where values are the leading part of keys."""
    size = given["value_dim"]
    if given["value_cache"] is not None:
        problems.require(
            size is None, "value_dim", checks.describe(size), "None: value_cache says V"
        )
        return
    if not problems.require(
        size is not None,
        "value_cache",
        "None without value_dim",
        "a float array or a jattn.KVArray, or None with value_dim where values are the first "
        "value_dim numbers of every key",
    ):
        return
    most = None if sizes is None else sizes["D"]
    whole = isinstance(size, numbers.Integral) and not isinstance(size, bool)
    problems.require(
        whole and size >= 1 and (most is None or size <= most),
        "value_dim",
        checks.describe(size),
        f"an integer from 1 to D{arguments.axis_is('D', most)}",
    )
    _, format = formats.storage(given["key_cache"])
    step = 1 if format is None else format.values_per_word
    problems.require(
        not whole or size % step == 0,
        "value_dim",
        checks.describe(size),
        f"a multiple of {step}: {format} keeps {step} numbers in a word",
    )
    problems.require(
        given["v_scale"] is None,
        "v_scale",
        checks.describe(given["v_scale"]),
        "None: values are part of the keys, and k_scale is theirs too",
    )


def _check_batch(
    problems: checks.Problems, given: dict[str, Any]
) -> tuple[dict[str, int] | None, int | None]:
    """Query, tables, lengths and starts: sizes T, H, B, M or None, and H where the query says it.

    What a broken argument leaves open is not held against the others; the rest of each is judged.
    """
    query = given["query"]
    query_good = problems.require(
        arguments.is_array(query) and len(query.shape) == 3 and min(query.shape) > 0,
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
    tables_good = arguments.check_int32(problems, "block_tables", tables, (None, None), ("B", "M"))
    if tables_good:
        tables_good = problems.require(
            min(tables.shape) > 0,
            "block_tables",
            checks.describe(tables),
            "[B, M] with no empty axis",
        )
    num_tokens, heads = query.shape[:2] if query_good else (None, None)
    num_seqs = tables.shape[0] if tables_good else None
    arguments.check_int32(problems, "seq_lens", given["seq_lens"], (num_seqs,), ("B",))
    starts, longest = given["query_start_loc"], given["max_query_len"]
    if starts is not None:
        num_starts = None if num_seqs is None else num_seqs + 1
        arguments.check_int32(problems, "query_start_loc", starts, (num_starts,), ("B + 1",))
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
            arguments.is_array(causal)
            and arguments.fits(causal.shape, (num_seqs,))
            and causal.dtype == np.bool_,
            "is_causal",
            checks.describe(causal),
            f"a bool or bool[B]{arguments.axis_is('B', num_seqs)}",
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
        caches = arguments.check_caches(problems, key_cache, value_cache, given["kv_layout"])
        tokens, seqs = (None, None) if batch is None else (batch["T"], batch["B"])
        _check_numbers(problems, tokens, heads, **_only_numbers(given))
        mask_arguments.check(problems, given, tokens=tokens, seqs=seqs, heads=heads)
        _check_values(problems, given, None if caches is None else caches[2])
        kv_heads = None if caches is None else caches[2]["K"]
        arguments.check_scale(problems, "k_scale", given["k_scale"], key_cache, kv_heads)
        arguments.check_scale(problems, "v_scale", given["v_scale"], value_cache, kv_heads)
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
        for name in (
            *("sliding_window", "logits_soft_cap", "alibi_slopes", "value_dim"),
            *mask_arguments.NAMES,
        )
        if given[name] is not None
    }
    if given["sinks"] is not None:
        present.add("sinks" if len(given["sinks"].shape) == 1 else "sinks_per_token")
    present |= {"return_lse"} if given["return_lse"] else set()
    present |= {"not_causal"} if static_causal is False else set()
    present |= {"is_causal_per_sequence"} if static_causal is None else set()
    for name, cache in (("k_scale", key_cache), ("v_scale", value_cache)):
        if given[name] is not None or arguments.own_scale(cache) is not None:
            present.add(name)
    if value_cache is None and "k_scale" in present:
        present.add("v_scale")
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
        value_dim=sizes["V"] if value_cache is not None else int(given["value_dim"]),
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
    k_scale = arguments.per_head_scale(given["k_scale"], key_cache, call.num_kv_heads)
    if call.values_in_keys:
        values, v_scale = None, k_scale
    else:
        values = jnp.asarray(formats.storage(value_cache)[0])
        v_scale = arguments.per_head_scale(given["v_scale"], value_cache, call.num_kv_heads)
    return Operands(
        query=jnp.asarray(given["query"]),
        key_cache=jnp.asarray(formats.storage(key_cache)[0]),
        value_cache=values,
        block_tables=jnp.asarray(given["block_tables"]),
        seq_lens=jnp.asarray(given["seq_lens"]),
        query_start_loc=jnp.asarray(starts),
        scale=jnp.asarray(scale, jnp.float32),
        is_causal=jnp.asarray(given["is_causal"]) if call.is_causal is None else None,
        sliding_window=maybe("sliding_window", jnp.int32),
        logits_soft_cap=maybe("logits_soft_cap", jnp.float32),
        sinks=maybe("sinks", jnp.float32),
        alibi_slopes=maybe("alibi_slopes", jnp.float32),
        k_scale=k_scale,
        v_scale=v_scale,
        **mask_arguments.operands(given),
        k_quant_params=arguments.quant_params(key_cache),
        v_quant_params=formats.QuantParams()
        if call.values_in_keys
        else arguments.quant_params(value_cache),
    )
