"""Ragged batches for the tests: a frozen description, and the arrays it stands for.

The arrays of a `Problem` reveal reads that the contract forbids: slots that no sequence owns hold
NaN (and infinities where the format has them), tables are shuffled and end in ids of 10^6, 2^31 - 1
and -1, padded query rows are NaN, and padded sequences have garbage tables. The numbers make every
feature matter: logits have a standard deviation of 2 in the first head to 4 in the last, the cap is
6, sinks are as heavy as several keys, the window is shorter than the sequences, and slopes fade
within a few blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import call as calls
from jattn import formats, reference
from jattn.integers import round_up
from tests.support import dense, quantize

GARBAGE_IDS = np.array([10**6, -1, 2**31 - 1, -(2**31)], np.int32)
FORMATS = {format.name: format for format in formats.ALL}
# Formats that a `KVRows` may hold.
IN_ROWS = {
    name: format
    for name, format in FORMATS.items()
    if not format.chooses_scales and format.values_per_word == 1
}

# `jnp.asarray` of a NumPy array, which compiles nothing.
put = functools.partial(jax.device_put, may_alias=False)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A batch of sequences and the options of one call.

    Attributes:
      query_lens, seq_lens: per sequence; the new keys are counted in seq_lens.
      num_heads, num_kv_heads, head_dim, value_dim, block_size: H, K, D, V, S.
      query_dtype, format: names; `format` as in `FORMATS`.
      value_format: that of the values, or None for the same.
      plain: plain float arrays as caches instead of `KVArray`s.
      kv_layout: "HND", "NHD", or "rows" for a `KVRows` of keys and values.
      row_step: a row's width and the start of its value are multiples of it.
      options: which of `call.OPTIONS` are given.
      ragged: False leaves query_start_loc out; every sequence then has one query token.
      padded_tokens, padded_seqs: rows past the batch's own.
      spare_blocks: blocks of the pool that no table names.
      window: the sliding window where it is an option.
      chunk: the chunk of chunked attention where it is an option.
      tree_columns: query tokens that a tree's mask has columns for; packed bits if `seed` is odd.
      explicit_scale: whether the softmax scale is given.
      scale_times: an explicit scale is this factor times `D ** -0.5`.
      frame: T, B, M and N to pad to, whatever the lengths: problems with the same frame and
        options share one compilation. None: as many as the other fields ask for.
      seed: seeds everything random.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    value_dim: int = 32
    block_size: int = 16
    query_dtype: str = "float32"
    format: str = "float32"
    value_format: str | None = None
    plain: bool = False
    kv_layout: str = "HND"
    row_step: int = 1
    options: frozenset[str] = frozenset()
    ragged: bool = True
    padded_tokens: int = 3
    padded_seqs: int = 1
    spare_blocks: int = 3
    window: int = 11
    chunk: int = 13
    tree_columns: int = 16
    explicit_scale: bool = False
    scale_times: float = 0.83
    frame: tuple[int, int, int, int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        assert len(self.query_lens) == len(self.seq_lens)
        assert self.options <= set(calls.OPTIONS)
        assert self.ragged or set(self.query_lens) == {1}
        stored = {self.format, self.value_format or self.format}
        assert stored <= set(FORMATS)
        in_rows = len(stored) == 1 and stored <= set(IN_ROWS) and "value_dim" not in self.options
        assert self.kv_layout != formats.ROWS_LAYOUT or in_rows

    def sizes(self) -> tuple[int, int, int, int]:
        """T, B, M and N."""
        if self.frame is not None:
            return self.frame
        owned = [-(-n // self.block_size) for n in self.seq_lens]
        padded = (self.padded_tokens, self.padded_seqs) if self.ragged else (0, 0)
        return (
            sum(self.query_lens) + padded[0],
            len(self.seq_lens) + padded[1],
            max(*owned, 1) + 2,
            sum(owned) + self.spare_blocks,
        )

    @property
    def group(self) -> int:
        """G: query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def stored(self) -> tuple[formats.Format, formats.Format]:
        """The formats of keys and of values."""
        return FORMATS[self.format], FORMATS[self.value_format or self.format]

    @property
    def values_in_keys(self) -> bool:
        """Whether values are the first numbers of keys, in one cache."""
        return "value_dim" in self.options

    def replace(self, **changes: Any) -> Problem:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def lengths(block_size: int, ragged: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`(query_lens, seq_lens)` with 0, 1, S - 1, S, S + 1 and hundreds of tokens."""
    edges = (0, 1, block_size - 1, block_size, block_size + 1)
    long = 290 if block_size < 200 else block_size + 60
    if not ragged:
        return (1,) * 7, (*edges, long, 21)
    seq_lens = (*edges, long, 18, 50)
    wanted = (0, 1, 1, 9, 1, 21, 18, 4)
    return tuple(min(n, s) for n, s in zip(wanted, seq_lens, strict=True)), seq_lens


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arrays of a problem: a call's arguments, and a dense view of the same data."""

    problem: Problem
    query: np.ndarray
    key_cache: Any
    value_cache: Any
    kwargs: dict[str, Any]
    view: dense.View
    misread: dict[str, dense.View] = dataclasses.field(default_factory=dict)  # by mistake

    def run(self, implementation: str | None = None, **changes: Any) -> Any:
        """Call `jattn.paged_attention` and return `(out, lse or None)` as NumPy arrays."""
        kwargs = {**self.kwargs, **changes}
        found = jattn.paged_attention(
            put(self.query),
            self.key_cache,
            self.value_cache,
            implementation=implementation,
            **kwargs,
        )
        out, lse = found if kwargs.get("return_lse") else (found, None)
        return np.asarray(out), None if lse is None else np.asarray(lse)

    def call(self) -> tuple[calls.Call, calls.Operands]:
        """Return the call's description and operands."""
        given = calls.Arguments(self.query, self.key_cache, self.value_cache, **self.kwargs)
        call = calls.describe_call(given)
        return call, calls.take_operands(call, given)

    def oracle(self) -> tuple[np.ndarray, np.ndarray]:
        """Return `(out, lse)` in float64 from `jattn.reference`."""
        return reference.attention(*self.call())


def build(problem: Problem) -> Batch:
    """Build the arrays of `problem`."""
    # Separate random streams, so that the frame changes no number that a sequence owns.
    p, rng = problem, np.random.default_rng((problem.seed, 0))
    numbers = np.random.default_rng((problem.seed, 1))
    assert p.value_dim <= p.head_dim or not p.values_in_keys
    tables = _tables(p, rng)
    scales = _scales(p)
    stored = _fill(p, tables, scales, rng, numbers)
    query = _query(p, numbers)
    given, options = _options(p, scales, numbers)
    limits, sight = _masks(p, np.random.default_rng((p.seed, 2)))
    starts = np.concatenate([[0], np.cumsum(p.query_lens)]).astype(np.int32)
    view = dense.View(
        query=query[: sum(p.query_lens)].astype(np.float64),
        keys=stored.keys,
        values=stored.values,
        starts=starts,
        kv_heads=np.arange(p.num_heads) // p.group,
        **options,
        **sight,
    )
    wrong = {
        f"{mistake} of {which}": view.replace(**{which: read})
        for (mistake, which), read in stored.misread.items()
    }
    kwargs = {**_lengths(p, tables, starts), **given, **limits}
    return Batch(p, query, *stored.caches, kwargs, view, wrong)


def _tables(p: Problem, rng: np.random.Generator) -> np.ndarray:
    """int32 [B, M]: a block of the shuffled pool for every S keys, and garbage after them."""
    owners = [-(-n // p.block_size) for n in p.seq_lens]
    _, num_seqs, width, num_blocks = p.sizes()
    assert num_blocks >= sum(owners)
    ids = rng.permutation(num_blocks).astype(np.int32)
    tables = rng.choice(GARBAGE_IDS, (num_seqs, width))
    at = 0
    for b, owned in enumerate(owners):
        tables[b, :owned] = ids[at : at + owned]
        at += owned
    return tables


@dataclasses.dataclass(frozen=True)
class _Scales:
    """The scales [K] of keys and values; None for 1."""

    k: np.ndarray | None
    v: np.ndarray | None


def _scales(p: Problem) -> _Scales:
    """Scales that differ between heads, and between keys and values."""

    def spread(name: str, low: float, high: float) -> np.ndarray | None:
        if name not in p.options:
            return None
        return np.linspace(low, high, p.num_kv_heads).astype(np.float32)

    return _Scales(spread("k_scale", 1.6, 0.7), spread("v_scale", 0.6, 1.7))


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Caches, and what they hold for each sequence: keys [m, K, D] and values [m, K, V]."""

    caches: tuple[Any, Any]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    misread: dict[tuple[str, str], list[np.ndarray]]  # by mistake, and "keys" or "values"


def _fill(
    p: Problem,
    tables: np.ndarray,
    scales: _Scales,
    rng: np.random.Generator,
    numbers: np.random.Generator,
) -> _Stored:
    """Build caches full of garbage, with the sequences' keys and values in their blocks.

    Args:
      p, tables, scales: the problem, its tables and its scales.
      rng: for the garbage, whose size depends on the frame.
      numbers: for the keys and values.
    """
    k_format, v_format = p.stored
    parts = [("keys", p.head_dim, k_format, scales.k)]
    if not p.values_in_keys:
        parts.append(("values", p.value_dim, v_format, scales.v))
    caches, pools, kept, misread = [], [], {}, {}
    for which, dim, format, scale in parts:
        pool = _garbage(rng, (p.sizes()[3], p.num_kv_heads, p.block_size), dim, format)
        # Values have a mean of 0.5: otherwise attention to many keys would be near zero everywhere.
        lean = 0.5 if which == "values" or p.values_in_keys else 0.0
        rows = []
        for b, n in enumerate(p.seq_lens):
            new = numbers.standard_normal((n, p.num_kv_heads, dim)) + lean
            new = _uneven(numbers, new, format).astype(np.float32)
            rows.append(quantize.encode(format, new, p.block_size))
            where = tables[b, np.arange(n) // p.block_size], np.arange(n) % p.block_size
            _place(pool, rows[-1], where, format)
        kept[which] = [quantize.decode(format, part) for part in rows]
        for b, part in enumerate(rows):
            for mistake, wrong in quantize.mistakes(format, part, p.block_size):
                found = misread.setdefault((mistake, which), list(kept[which]))
                found[b] = quantize.decode(format, wrong)
        pools.append(pool)
        if p.kv_layout != formats.ROWS_LAYOUT:
            caches.append(_cache(pool, format, scale if format.takes_scale else None, p))
    if p.kv_layout == formats.ROWS_LAYOUT:
        caches.append(_one_array(*(pool.codes for pool in pools), k_format, rng, p))
    caches += [None] * (2 - len(caches))
    if p.values_in_keys:
        kept["values"] = [k[..., : p.value_dim] for k in kept["keys"]]
    return _Stored(tuple(caches), kept["keys"], kept["values"], misread)


def _query(p: Problem, numbers: np.random.Generator) -> np.ndarray:
    """Queries [T, H, D]: larger from head to head, and NaN in padded rows."""
    query = np.full((p.sizes()[0], p.num_heads, p.head_dim), np.nan, np.float32)
    real = sum(p.query_lens)
    spread = np.linspace(2.0, 4.0, p.num_heads)[:, None]
    query[:real] = spread * numbers.standard_normal((real, *query.shape[1:]))
    return query.astype(jnp.dtype(p.query_dtype))


def _lengths(p: Problem, tables: np.ndarray, starts: np.ndarray) -> dict[str, Any]:
    """The arguments of the call that describe the batch, padded, and the layout."""
    padding = (0, tables.shape[0] - len(p.seq_lens))
    given = {
        "block_tables": put(tables),
        "seq_lens": put(np.pad(p.seq_lens, padding).astype(np.int32)),
        "kv_layout": None if p.kv_layout == formats.ROWS_LAYOUT else p.kv_layout,
    }
    if p.ragged:
        given["query_start_loc"] = put(np.pad(starts, padding, mode="edge"))
    return given


def _options(
    p: Problem, scales: _Scales, numbers: np.random.Generator
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that are not masks: arguments of the call, and fields of the dense view."""
    given: dict[str, Any] = {"return_lse": "return_lse" in p.options}
    view: dict[str, Any] = {"window": None, "cap": None, "sinks": None, "slopes": None}
    scale = np.float32(p.head_dim**-0.5)
    if p.explicit_scale:
        scale = np.float32(p.scale_times) * scale
        given["scale"] = float(scale)
    view["scale"] = float(scale)
    if p.values_in_keys:
        given["value_dim"] = p.value_dim
    given |= _scale_arguments(p, scales)
    v_scale = scales.k if p.values_in_keys else scales.v
    for name, x in (("k_scale", scales.k), ("v_scale", v_scale)):
        view[name] = np.ones(p.num_kv_heads) if x is None else x.astype(np.float64)
    causal, view["is_causal"] = _causal(p)
    given |= causal
    if "sliding_window" in p.options:
        view["window"] = given["sliding_window"] = p.window
    if "logits_soft_cap" in p.options:
        view["cap"] = given["logits_soft_cap"] = 6.0
    if "alibi_slopes" in p.options:
        slopes = np.linspace(0.4, 0.03, p.num_heads).astype(np.float32)
        given["alibi_slopes"], view["slopes"] = put(slopes), slopes.astype(np.float64)
    sinks, real = None, sum(p.query_lens)
    if "sinks" in p.options:
        sinks = np.linspace(2.0, 5.0, p.num_heads).astype(np.float32)
    if "sinks_per_token" in p.options:
        sinks = np.full((p.sizes()[0], p.num_heads), np.nan, np.float32)
        sinks[:real] = numbers.uniform(1.0, 5.0, (real, p.num_heads))
    if sinks is not None:
        given["sinks"] = put(sinks)
        view["sinks"] = (sinks if sinks.ndim == 1 else sinks[:real]).astype(np.float64)
    return given, view


def _scale_arguments(p: Problem, scales: _Scales) -> dict[str, jax.Array]:
    """The scales that no cache carries."""
    k_format, v_format = p.stored
    given = {}
    for name, scale, format in (("k_scale", scales.k, k_format), ("v_scale", scales.v, v_format)):
        if name == "v_scale" and p.values_in_keys:
            continue
        carried = format.takes_scale and not p.plain and p.kv_layout != formats.ROWS_LAYOUT
        if scale is not None and not carried:
            given[name] = put(scale)
    return given


def _causal(p: Problem) -> tuple[dict[str, bool | jax.Array], np.ndarray]:
    """Return `is_causal` if it is not the default, and its value for each sequence."""
    if "is_causal_per_sequence" in p.options:
        causal = np.arange(p.sizes()[1]) % 2 == 0
        return {"is_causal": put(causal)}, causal[: len(p.seq_lens)]
    causal = "not_causal" not in p.options
    return {} if causal else {"is_causal": False}, np.full(len(p.seq_lens), causal)


def packed(mask: np.ndarray) -> np.ndarray:
    """Pack bool [T, Q] into uint32 [T, W], with the unused bits of the last word set."""
    columns = -(-mask.shape[1] // 32) * 32
    padded = np.pad(mask, ((0, 0), (0, columns - mask.shape[1])), constant_values=True)
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def _masks(p: Problem, rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """The masks among the options: arguments of the call, and fields of the dense view."""
    num_tokens, num_seqs, width, _ = p.sizes()
    real = sum(p.query_lens)
    given, view = {}, {}
    if "attention_chunk_size" in p.options:
        given["attention_chunk_size"] = view["chunk"] = p.chunk
    if "visible_end" in p.options:  # every other run of 5 positions is an image
        view["ends"] = [
            np.where(at // 5 % 2 == 1, (at // 5 + 1) * 5, 0)
            for at in (np.arange(m - n, m) for n, m in zip(p.query_lens, p.seq_lens, strict=True))
        ]
        ends = np.full(num_tokens, 2**31 - 1, np.int32)
        ends[:real] = np.concatenate(view["ends"])
        given["visible_end"] = put(ends)
    if "tree_mask" in p.options:
        # A tree of up to three branches; tokens that have no column in the mask form a chain.
        back = [np.minimum(rng.integers(1, 4, n), np.arange(n) + 1) for n in p.query_lens]
        view["parents"] = [
            np.arange(n) - np.where(np.arange(n) >= p.tree_columns, 1, steps)
            for n, steps in zip(p.query_lens, back, strict=True)
        ]
        # Bits of later tokens are set at random: no query may see those tokens.
        mask = rng.random((num_tokens, p.tree_columns)) < 0.5
        at = 0
        for parents in view["parents"]:
            on_path = dense.paths(parents)[0][:, : p.tree_columns]
            for i, row in enumerate(on_path):
                before = min(i, p.tree_columns)
                mask[at + i, :before] = row[:before]
            at += len(parents)
        given["tree_mask"] = put(packed(mask) if p.seed % 2 else mask)
    if "selected_blocks" in p.options:
        view["selected"], rows = [], []
        for n in p.seq_lens:
            owned = -(-n // p.block_size)
            chosen = rng.permutation(owned)[: (owned + 1) // 2]
            if owned > 2 and 0 not in chosen:
                chosen[0] = 0
            view["selected"].append(np.isin(np.arange(n) // p.block_size, chosen))
            rows.append([*chosen, *chosen[:1], -1, *GARBAGE_IDS])
        selected = np.full((num_seqs, width // 2 + 7), -1, np.int32)
        for b, row in enumerate(rows):
            selected[b, : len(row)] = rng.permutation(row)
        given["selected_blocks"] = put(selected)
    if "relative_bias" in p.options:
        table = rng.uniform(-2.0, 2.0, (p.num_heads, 2 * 20 + 1)).astype(np.float32)
        given["relative_bias"], view["bias"] = put(table), table.astype(np.float64)
    return given, view


def select(batch: Batch, parts: list[tuple[int, int, int]]) -> Batch:
    """Return a batch over the same pages of `(sequence, first query token, how many)` parts.

    A sequence's keys then end with the part's last token, so parts of one sequence are the chunks
    of a chunked prefill. The batch is padded to the problem's frame, which must be set.
    """
    p, view = batch.problem, batch.view
    assert p.frame is not None
    num_tokens, num_seqs, width, _ = p.frame
    firsts = [p.seq_lens[b] - p.query_lens[b] + first for b, first, _ in parts]
    seq_lens = tuple(first + n for first, (_, _, n) in zip(firsts, parts, strict=True))
    query_lens = tuple(n for _, _, n in parts)
    rows = [np.arange(view.starts[b] + i, view.starts[b] + i + n) for b, i, n in parts]
    rows = np.concatenate(rows).astype(int)
    query = np.full((num_tokens, *batch.query.shape[1:]), np.nan, np.float32)
    query = query.astype(batch.query.dtype)
    query[: len(rows)] = batch.query[rows]
    owners = [b for b, _, _ in parts]
    tables = np.full((num_seqs, width), -1, np.int32)
    tables[: len(parts)] = np.asarray(batch.kwargs["block_tables"])[owners]
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    padding = (0, num_seqs - len(parts))
    kwargs = {
        **batch.kwargs,
        "block_tables": put(tables),
        "seq_lens": put(np.pad(np.asarray(seq_lens, np.int32), padding)),
        "query_start_loc": put(np.pad(starts, padding, mode="edge")),
    }
    is_causal = view.is_causal[owners]
    if "is_causal_per_sequence" in p.options:
        kwargs["is_causal"] = put(np.pad(is_causal, padding))
    return dataclasses.replace(
        batch,
        problem=p.replace(query_lens=query_lens, seq_lens=seq_lens),
        query=query,
        kwargs=kwargs,
        view=view.replace(
            query=view.query[rows],
            keys=[view.keys[b][:n] for b, n in zip(owners, seq_lens, strict=True)],
            values=[view.values[b][:n] for b, n in zip(owners, seq_lens, strict=True)],
            starts=starts,
            is_causal=is_causal,
        ),
    )


def _uneven(rng: np.random.Generator, x: np.ndarray, format: Any) -> np.ndarray:
    """Change rows [n, K, D] so that each scale matters, for formats that choose scales.

    Tokens differ in size by up to four times, and so do groups of 16. Rows of a format with zero
    points are shifted away from zero.
    """
    if format.per in ("token", "block"):
        x = x * np.exp2(rng.uniform(-1, 1, (*x.shape[:-1], 1)))
    if format.group:
        x = x * np.repeat(np.exp2(rng.uniform(-1, 1, (*x.shape[:-1], x.shape[-1] // 16))), 16, -1)
    return x + 2 * rng.standard_normal((*x.shape[:-1], 1)) if format.zero_point else x


def _garbage(
    rng: np.random.Generator, hnd: tuple[int, ...], dim: int, format: Any
) -> quantize.Rows:
    """Return a pool [N, K, S, D] of codes: NaN if the dtype has it, some infinities and denormals.

    Integers are random codes. Scales and zero points are NaN.
    """
    dtype = quantize.number_dtype(format)
    if dtype == np.int8 or dtype == quantize.E2M1:
        codes = rng.integers(0, 16, (*hnd, dim)).astype(np.uint8).view(np.int8)
        codes = codes if dtype == np.int8 else codes.view(np.uint8)
    else:
        numbers = np.full((*hnd, dim), np.nan, np.float32)
        kind = rng.random(hnd)
        if dtype != quantize.E4M3:
            numbers[kind < 0.2] = np.inf
        numbers[kind > 0.9] = 3 * np.float32(jnp.finfo(dtype).smallest_subnormal)
        codes = numbers.astype(dtype).view(format.word_dtype)
    params = format.quant_param_shapes((*hnd, dim // format.values_per_word), "HND")
    return quantize.Rows(
        codes,
        None if params.scale is None else np.full(params.scale, np.nan, np.float32),
        None if params.zero is None else np.full(params.zero, np.nan, np.float32),
        None if params.group_scale is None else np.full(params.group_scale, 0x7F, np.uint8),
    )


def _place(
    pool: quantize.Rows, rows: quantize.Rows, where: tuple[np.ndarray, np.ndarray], format: Any
) -> None:
    """Write a sequence's rows [n, K, ...] into their blocks and offsets."""
    block, offset = where
    for old, new in zip(
        (pool.codes, pool.scale, pool.zero, pool.groups),
        (rows.codes, rows.scale, rows.zero, rows.groups),
        strict=True,
    ):
        if old is not None and old.ndim == 2:
            old[block] = new
        elif old is not None:
            old[block, :, offset] = new


def _cache(pool: quantize.Rows, format: Any, scale: np.ndarray | None, p: Problem) -> Any:
    """Turn a head-major pool of codes into the cache that the problem asks for."""

    def laid(x: np.ndarray | None) -> Any:
        if x is None:
            return None
        swap = p.kv_layout == "NHD" and x.ndim > 2
        return put(np.ascontiguousarray(x.swapaxes(1, 2)) if swap else x)

    if p.plain:
        return laid(pool.codes.view(format.value_dtype))
    scales = laid(pool.scale) if scale is None else put(scale)
    words = laid(quantize.pack(format, pool.codes))
    return jattn.KVArray(words, scales, format, laid(pool.zero), laid(pool.groups), p.kv_layout)


def _one_array(
    keys: np.ndarray, values: np.ndarray, format: Any, rng: np.random.Generator, p: Problem
) -> jattn.KVRows:
    """Join head-major pools of codes; odd seeds have garbage around keys and values."""
    num_blocks, heads, size, dim = keys.shape
    rows, start, width = heads, dim, dim + values.shape[-1]
    if p.seed % 2:
        rows, start = heads + 1, round_up(dim + 3, p.row_step)
        width = round_up(start + values.shape[-1] + 2, p.row_step)
    codes = _garbage(rng, (num_blocks, rows, size), width, format).codes
    codes[:, :heads, :, :dim] = keys
    codes[:, :heads, :, start : start + values.shape[-1]] = values
    token = (rows, 2, dim) if width == 2 * dim else (rows * width,)
    data = np.ascontiguousarray(codes.swapaxes(1, 2)).reshape(num_blocks, size, *token)
    if p.plain:
        data = data.view(format.value_dtype)
    stored = None if p.plain else format
    return jattn.KVRows(put(data), heads, dim, width, start, values.shape[-1], stored)
