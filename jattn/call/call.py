"""The two parts of a `paged_attention` call: its checked static description, and its arrays.

`Call` holds everything that may choose a kernel or force a compilation: shapes, dtypes, formats,
layout, and which options are present. `Operands` holds every number. Nothing in `Call` depends on a
value, so a new scale, window, length or table never compiles anything.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import checks, formats, integers, spec
from jattn.call import arrays
from jattn.call import caches as cache_checks
from jattn.call import masks as mask_arguments
from jattn.call.arguments import COUNT, KINDS, MASK_OPTIONS, Arguments, Array, ArrayOrStruct

QUERY_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call's static description. Axis letters as in `jattn.paged_attention`."""

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
    rows: formats.Rows | None = None  # one array of keys and values: where in a token they lie
    tree_words: int = 0  # W of `tree_mask`; 0 for none
    bias_columns: int = 0  # 2 E + 1 of `relative_bias`; 0 for none
    num_selected: int = 0  # M' of `selected_blocks`; 0 for none

    @property
    def group(self) -> int:
        """G: query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def capacity(self) -> int:
        """Keys that a row of the table has room for, or the largest int32."""
        return min(self.table_width * self.block_size, integers.INT32_MAX)

    @property
    def values_in_keys(self) -> bool:
        """Whether values are the first V numbers of every key."""
        in_rows = self.rows is not None and self.rows.value_start == 0
        return in_rows or "value_dim" in self.options

    @property
    def return_lse(self) -> bool:
        """Whether the call returns the lse too."""
        return "return_lse" in self.options

    @property
    def sinks_per_token(self) -> bool:
        """Whether sinks are [T, H], a row for every query token, and not [H]."""
        return "sinks_per_token" in self.options


class Operands(typing.NamedTuple):
    """The numbers of a call, in their final dtypes. None if an option is absent.

    The order is that of `enum Operand` in jattn/cpu/native/src/ffi.cc, which takes all of them.

    Which options a call has is static. To ask for one that has an array, use `x is not None`, or
    `"x" in call.options` where only the call is at hand, as in a GPU kernel's body: both agree. For
    each of the others `Call` has a property.
    """

    query: jax.Array  # [T, H, D]
    key_cache: jax.Array  # words, in the call's layout
    value_cache: jax.Array | None  # None: values are in the array of the keys
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
    k_quant_params: formats.QuantParams[jax.Array] = formats.QuantParams()  # in the call's layout
    v_quant_params: formats.QuantParams[jax.Array] = formats.QuantParams()

    def sight(self, call: Call) -> spec.Sight:
        """Visibility: `is_causal` a bool or per sequence [B], `visible_end` per token [T]."""
        is_causal = call.is_causal if call.is_causal is not None else self.is_causal
        return spec.Sight(
            is_causal, self.sliding_window, self.attention_chunk_size, self.visible_end
        )


# An implementation: `run(call, operands) -> (out, lse)`.
Run = Callable[[Call, Operands], tuple[jax.Array, jax.Array]]


def guarded(operands: Operands) -> Operands:
    """Set scales to NaN if an array holds a number that would be refused as a Python number.

    Refused are a scale or cap that is not finite, and a cap, window or chunk that is not positive.
    Every row that sees a key is then NaN, so none can pass for valid. Refused, too, are a `k_scale`
    or `v_scale` that is 0 or not finite, a cache's own included. These become NaN head by head:
    one answer for all heads would need communication where heads are split over devices.
    """
    sound, changed = jnp.ones((), np.bool_), dict[str, Any]()
    for name, kind in KINDS.items():
        x = getattr(operands, name) if kind.number else None
        if x is None:
            continue
        if kind.per_kv_head:
            changed[name] = jnp.where(jnp.isfinite(x) & (x != 0), x, jnp.nan)
            continue
        if kind.positive:
            sound &= x > 0
        if kind is COUNT:
            changed[name] = jnp.maximum(x, 1)
        else:
            sound &= jnp.isfinite(x)
    changed["scale"] = jnp.where(sound, operands.scale, jnp.nan)
    return operands._replace(**changed)


def broken_promises(
    call: Call, operands: Operands, xp: Any = jnp, *, ids: bool = True
) -> tuple[spec.Array, spec.Array]:
    """Apply `spec.broken_promises` to a call."""
    return spec.broken_promises(
        *(operands.query_start_loc, operands.seq_lens, operands.block_tables),
        operands.sight(call),
        operands.selected_blocks,
        num_tokens=call.num_tokens,
        num_blocks=call.num_blocks,
        block_size=call.block_size,
        max_query_len=call.max_query_len,
        ids=ids,
        xp=xp,
    )


class _Batch(typing.NamedTuple):
    """Sizes of a checked batch; None for those that a wrong argument leaves unknown."""

    tokens: int | None = None  # T
    heads: int | None = None  # H
    seqs: int | None = None  # B
    width: int | None = None  # M


def _check_batch(problems: checks.Problems, given: Arguments[ArrayOrStruct]) -> _Batch:
    """Check the query, tables, lengths, starts and `is_causal`.

    If one argument is wrong, the others are still checked as far as possible.
    """
    tokens = heads = seqs = width = None
    query, tables = given.query, given.block_tables
    if problems.expect(
        arrays.is_array(query) and len(query.shape) == 3 and min(query.shape) > 0,
        "query",
        query,
        "[T, H, D] with no empty axis",
    ):
        tokens, heads = arrays.shape_of(query)[:2]
        known = np.dtype(query.dtype).name in QUERY_DTYPES
        problems.expect(known, "query", query, f"one of {QUERY_DTYPES}")
    if arrays.check_int32(
        problems, "block_tables", tables, (None, None), ("B", "M")
    ) and problems.expect(
        min(arrays.shape_of(tables)) > 0, "block_tables", tables, "[B, M] with no empty axis"
    ):
        seqs, width = arrays.shape_of(tables)
    arrays.check_int32(problems, "seq_lens", given.seq_lens, (seqs,), ("B",))
    if given.query_start_loc is not None:
        size = None if seqs is None else seqs + 1
        arrays.check_int32(problems, "query_start_loc", given.query_start_loc, (size,), ("B + 1",))
    else:
        problems.require(
            tokens is None or seqs is None or tokens == seqs,
            "query_start_loc",
            f"None with {tokens} query tokens for {seqs} sequences",
            "int32[B + 1] unless every sequence has one query token",
        )
    problems.expect(
        given.max_query_len is None or integers.is_int(given.max_query_len, 1),
        "max_query_len",
        given.max_query_len,
        "a Python integer of at least 1, or None (it is static)",
    )
    problems.expect(
        given.static_causal is not None or arrays.matches(given.is_causal, np.bool_, (seqs,)),
        "is_causal",
        given.is_causal,
        f"a bool or bool[B]{arrays.axis_is('B', seqs)}",
    )
    return _Batch(tokens, heads, seqs, width)


def _check_numbers(
    problems: checks.Problems, given: Arguments[ArrayOrStruct], batch: _Batch
) -> None:
    """Check the options that are numbers or 0-d arrays, and arrays per head."""
    meanings = {"sliding_window": " (the keys a query sees, its own included)"}
    for name, kind in KINDS.items():
        if kind is COUNT:
            arrays.check_count(problems, name, getattr(given, name), meanings.get(name, ""))
        elif kind.scalar:
            above = 0.0 if kind.positive else -math.inf
            arrays.check_float(problems, name, getattr(given, name), above)
    per_head, per_token = (batch.heads,), (batch.tokens, batch.heads)
    for name, x, text, shapes in (
        ("sinks", given.sinks, "[H] or [T, H]", (per_head, per_token)),
        ("alibi_slopes", given.alibi_slopes, "[H]", (per_head,)),
    ):
        problems.expect(
            x is None or arrays.matches(x, jnp.floating, *shapes),
            name,
            x,
            f"floating point of shape {text}{arrays.axis_is('H', batch.heads)}",
        )


def _check_value_dim(
    problems: checks.Problems, given: Arguments[ArrayOrStruct], head_dim: int | None
) -> None:
    """Check `value_dim`, which replaces a value cache if values are the leading part of keys."""
    size = given.value_dim
    rows = isinstance(given.key_cache, formats.KVRows)
    if rows or given.value_cache is not None:
        cache = "key_cache" if rows else "value_cache"
        problems.expect(size is None, "value_dim", size, f"None: {cache} has V")
    if given.values_in_keys:
        problems.expect(
            given.v_scale is None,
            "v_scale",
            given.v_scale,
            "None: values are part of the keys, and k_scale applies to them too",
        )
    if rows or given.value_cache is not None:
        return
    if not problems.require(
        size is not None,
        "value_cache",
        "None without value_dim",
        "a float array or a jattn.KVArray, or None with value_dim if values are the first "
        "value_dim numbers of every key",
    ):
        return
    problems.expect(
        integers.is_int(size, 1) and (head_dim is None or size <= head_dim),
        "value_dim",
        size,
        f"an integer from 1 to D{arrays.axis_is('D', head_dim)}",
    )
    _, format = formats.storage(given.key_cache)
    step = format.values_per_word if isinstance(format, formats.Format) else 1
    problems.expect(
        not integers.is_int(size, 1) or size % step == 0,
        "value_dim",
        size,
        f"a multiple of {step}: {format} stores {step} numbers in a word",
    )


def _check_output(problems: checks.Problems, given: Arguments[ArrayOrStruct]) -> None:
    """Check `out_dtype` and `return_lse`."""
    try:
        known = given.out_dtype is None or np.dtype(given.out_dtype).name in QUERY_DTYPES
    except TypeError:
        known = False
    must = f"one of {QUERY_DTYPES} or None"
    problems.require(known, "out_dtype", repr(given.out_dtype), must)
    problems.expect(isinstance(given.return_lse, bool), "return_lse", given.return_lse, "a bool")


def describe_call(given: Arguments[ArrayOrStruct], where: str = "paged_attention") -> Call:
    """Check all arguments of `paged_attention` by shape and dtype, and describe the call.

    Args:
      given: the arguments.
      where: the function that was called, for the message.

    Raises:
      ValueError: arguments do not fit; lists every mismatch.
    """
    arrays.check_given(where, vars(given))
    with checks.checking(where) as problems:
        batch = _check_batch(problems, given)
        tokens, heads, seqs, width = batch
        caches = cache_checks.check_caches(
            problems, given.key_cache, given.value_cache, given.kv_layout
        )
        head_dim = None if caches is None else caches.head_dim
        kv_heads = None if caches is None else caches.num_kv_heads
        _check_numbers(problems, given, batch)
        mask_arguments.check(problems, given, tokens=tokens, seqs=seqs, heads=heads)
        _check_value_dim(problems, given, head_dim)
        cache_checks.check_scale(problems, "k_scale", given.k_scale, given.key_cache, kv_heads)
        cache_checks.check_scale(problems, "v_scale", given.v_scale, given.value_cache, kv_heads)
        if heads is not None and kv_heads is not None:
            have = arrays.shape_of(given.query)[2]
            problems.require(
                have == head_dim,
                "query",
                f"of head size D = {have}",
                f"{head_dim}, to match key_cache",
            )
            problems.require(
                heads % kv_heads == 0,
                "query",
                f"{heads} heads",
                f"a multiple of the {kv_heads} KV heads of key_cache",
            )
        _check_output(problems, given)
    assert tokens is not None
    assert heads is not None
    assert seqs is not None
    assert width is not None
    assert caches is not None
    ragged = given.query_start_loc is not None
    query_dtype = arrays.dtype_of(given.query).name
    return Call(
        num_tokens=tokens,
        num_seqs=seqs,
        num_heads=heads,
        num_kv_heads=caches.num_kv_heads,
        head_dim=caches.head_dim,
        value_dim=caches.value_dim if given.value_dim is None else int(given.value_dim),
        num_blocks=caches.num_blocks,
        block_size=caches.block_size,
        table_width=width,
        max_query_len=min(int(given.max_query_len or tokens), tokens) if ragged else 1,
        query_dtype=query_dtype,
        out_dtype=query_dtype if given.out_dtype is None else np.dtype(given.out_dtype).name,
        key_format=caches.key_format,
        value_format=caches.value_format,
        plain_cache=formats.storage(given.key_cache)[1] is None,
        kv_layout=caches.kv_layout,
        is_causal=given.static_causal,
        ragged=ragged,
        options=given.options,
        rows=caches.rows,
        **mask_arguments.sizes(given),
    )


def take_operands(call: Call, given: Arguments[Array]) -> Operands:
    """Return the arrays of a checked call, with every number as an array of its final dtype.

    Raises:
      ValueError: an argument is only a shape.
    """
    arrays.check_numbers("paged_attention", vars(given))

    def option(name: str) -> jax.Array | None:
        x = getattr(given, name)
        if x is None:
            return None
        if name == "tree_mask":
            return mask_arguments.pack_bits(jnp.asarray(x))
        return jnp.asarray(x, KINDS[name].dtype)

    options = ("sliding_window", "logits_soft_cap", "sinks", "alibi_slopes", *MASK_OPTIONS)
    keys, values = given.key_cache, given.value_cache
    k_scale = cache_checks.per_head_scale(given.k_scale, keys, call.num_kv_heads)
    v_scale = k_scale  # values that are part of the keys have the keys' scale
    if not call.values_in_keys:
        v_scale = cache_checks.per_head_scale(given.v_scale, values, call.num_kv_heads)
    starts = given.query_start_loc
    return Operands(
        query=jnp.asarray(given.query),
        key_cache=jnp.asarray(formats.storage(keys)[0]),
        value_cache=None if values is None else jnp.asarray(formats.storage(values)[0]),
        block_tables=jnp.asarray(given.block_tables),
        seq_lens=jnp.asarray(given.seq_lens),
        query_start_loc=jnp.asarray(
            np.arange(call.num_seqs + 1, dtype=np.int32) if starts is None else starts
        ),
        scale=jnp.asarray(call.head_dim**-0.5 if given.scale is None else given.scale, jnp.float32),
        is_causal=jnp.asarray(given.is_causal) if call.is_causal is None else None,
        k_scale=k_scale,
        v_scale=v_scale,
        **{name: option(name) for name in options},
        k_quant_params=cache_checks.quant_params(keys),
        v_quant_params=formats.QuantParams()
        if values is None
        else cache_checks.quant_params(values),
    )
