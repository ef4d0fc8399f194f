"""The oracle: paged attention in NumPy, with float64 and loops, obviously right.

If this and a kernel differ, the kernel is wrong. It takes the arguments of `jattn.paged_attention`
with concrete values, and reads nothing that the contract says must not be read.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jattn import call as calls
from jattn import formats, spec


def stored_numbers(
    cache: calls.Array,
    format: formats.Format,
    params: formats.QuantParams[jax.Array],
    kv_layout: str,
) -> np.ndarray:
    """Return a cache's numbers before a scale per head, as HND [N, K, S, D] in float64.

    This defines the formats a second time, by table and by ml_dtypes. float64 words are the numbers
    themselves, so that finite differences can move them by less than a format can hold.
    """
    words, numbers = np.asarray(cache), None
    if isinstance(format, formats.Int4 | formats.Nvfp4):
        codes = np.zeros((*words.shape[:-1], 2 * words.shape[-1]), np.uint8)
        codes[..., 0::2], codes[..., 1::2] = words % 16, words // 16
        if isinstance(format, formats.Nvfp4):
            numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        else:
            numbers = np.where(codes < 8, codes, codes - 16.0)
    elif words.dtype in (format.value_dtype, np.dtype(np.float64)):
        numbers = words
    else:
        numbers = words.view(format.value_dtype)
    scale, zero, group_scale = (None if x is None else np.asarray(x) for x in params)
    if kv_layout == "NHD":
        numbers = numbers.swapaxes(1, 2)
        zero, group_scale = (None if x is None else x.swapaxes(1, 2) for x in (zero, group_scale))
        if format.per == "token" and scale is not None:
            scale = scale.swapaxes(1, 2)
    with np.errstate(invalid="ignore"):  # garbage in slots no sequence owns
        numbers = numbers.astype(np.float64)
        if group_scale is not None and format.group is not None:
            groups = group_scale.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
            numbers = numbers * np.repeat(groups, format.group, axis=-1)
        if scale is not None:
            per_block = format.per == "block"
            numbers = numbers * (scale[:, :, None, None] if per_block else scale[..., None])
        return numbers if zero is None else numbers + zero[..., None]


def attention(call: calls.Call, operands: calls.Operands) -> tuple[np.ndarray, np.ndarray]:
    """`(out [T, H, V], lse [T, H])` in float64, for concrete operands."""
    query = np.asarray(operands.query).astype(np.float64)
    keys: Any = operands.key_cache
    values: Any = operands.value_cache
    layout = call.kv_layout
    if call.rows is not None:
        keys, values = _taken_apart(np.asarray(keys), call, call.rows)
        layout = "NHD"
    keys = stored_numbers(keys, call.key_format, operands.k_quant_params, layout)
    if call.values_in_keys:
        values = keys[..., : call.value_dim]
    else:
        values = stored_numbers(values, call.value_format, operands.v_quant_params, layout)
    tables = np.asarray(operands.block_tables)
    seq_lens = np.asarray(operands.seq_lens)
    starts = np.asarray(operands.query_start_loc)

    out = np.zeros((call.num_tokens, call.num_heads, call.value_dim))
    lse = np.full((call.num_tokens, call.num_heads), -np.inf)
    broken, all_broken = calls.broken_promises(call, jax.tree.map(np.asarray, operands), xp=np)
    if all_broken:
        return np.full_like(out, np.nan), np.full_like(lse, np.nan)
    for b in range(call.num_seqs):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        if broken[b]:
            out[rows], lse[rows] = np.nan, np.nan
            continue
        seq_len, num_queries = max(int(seq_lens[b]), 0), int(starts[b + 1] - starts[b])
        k, v = _gather(keys, values, tables[b], seq_len)
        for t in range(int(starts[b]), min(int(starts[b + 1]), call.num_tokens)):
            first = spec.first_query_position(seq_len, num_queries)
            position = first + t - int(starts[b])
            for head in range(call.num_heads):
                out[t, head], lse[t, head] = _one_row(
                    query[t, head], k, v, position, first, seq_len, b, t, head, call, operands
                )
    return out, lse


def _taken_apart(
    cache: np.ndarray, call: calls.Call, rows: formats.Rows
) -> tuple[np.ndarray, np.ndarray]:
    """Return keys [N, S, K, D] and values [N, S, K, V] of an array that holds both."""
    heads = cache.reshape(*cache.shape[:2], rows.count, rows.width)[:, :, : call.num_kv_heads]
    end = rows.value_start + call.value_dim
    return heads[..., : call.head_dim], heads[..., rows.value_start : end]


def _gather(
    keys: np.ndarray, values: np.ndarray, table: np.ndarray, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Gather a sequence's keys and values `[K, seq_len, D or V]`, token by token."""
    size = keys.shape[2]
    # Blocks before a window or outside a chunk may have any id.
    ids = np.clip(table, 0, len(keys) - 1)
    where = [(int(ids[i // size]), i % size) for i in range(seq_len)]
    empty = np.zeros((keys.shape[1], 0, 1))
    if not where:
        return empty, empty
    k = np.stack([keys[block, :, offset] for block, offset in where], axis=1)
    v = np.stack([values[block, :, offset] for block, offset in where], axis=1)
    return k.astype(np.float64), v.astype(np.float64)


def _one_row(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    position: int,
    first: int,
    seq_len: int,
    b: int,
    t: int,
    head: int,
    call: calls.Call,
    operands: calls.Operands,
) -> tuple[np.ndarray, float]:
    """Attend with one query row `[D]` to one sequence; return its output `[V]` and lse."""

    def number(x: Any, index: Any = ()) -> Any:
        return None if x is None else np.asarray(x)[index].astype(np.float64)

    kv_head = head // call.group
    sink = number(operands.sinks, (t, head) if call.sinks_per_token else head)
    q_pos, k_pos = np.int64(position), np.arange(seq_len)
    on_path = np.ones(seq_len, bool)
    if operands.tree_mask is not None:
        query, keys = np.asarray(position - first), k_pos - first
        path = spec.path_bits(np.asarray(operands.tree_mask)[t], query, xp=np)
        on_path, distance = spec.tree_path(path, query, keys, xp=np)
        depth = spec.tree_path(path, query, np.asarray(-1), xp=np)[1] - 1
        q_pos = np.int64(first + depth)
        k_pos = q_pos - distance
    sight = jax.tree.map(np.asarray, operands.sight(call).of(b, t))
    seen = on_path & spec.visible(q_pos, k_pos, seq_len, sight)
    if operands.selected_blocks is not None:
        selected = np.asarray(operands.selected_blocks)[b]
        seen = seen & spec.is_selected(np.arange(seq_len), selected, call.block_size)
    if not seen.any():
        return np.zeros(call.value_dim), spec.empty_row_lse(sink)
    k_scale = 1.0 if operands.k_scale is None else number(operands.k_scale, kv_head)
    v_scale = 1.0 if operands.v_scale is None else number(operands.v_scale, kv_head)
    bias = None
    if operands.relative_bias is not None:
        table = number(operands.relative_bias, head)
        bias = table[spec.relative_index(q_pos, k_pos[seen], len(table), xp=np)]
    logits = spec.transform_logits(
        (k[kv_head][seen] @ q) * k_scale,
        scale=number(operands.scale),
        logits_soft_cap=number(operands.logits_soft_cap),
        alibi_slopes=number(operands.alibi_slopes, head),
        q_pos=q_pos,
        k_pos=k_pos[seen],
        position_bias=bias,
        xp=np,
    )
    top = logits.max() if sink is None else max(logits.max(), sink)
    weights = np.exp(logits - top)
    total = weights.sum() + (0.0 if sink is None else np.exp(sink - top))
    return weights @ (v[kv_head][seen] * v_scale) / total, top + np.log(total)


def run(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """Run the oracle as an implementation: float64 in a host callback, so it works under jit."""

    def host(operands: calls.Operands) -> tuple[np.ndarray, np.ndarray]:
        out, lse = attention(call, operands)
        return out.astype(np.dtype(call.out_dtype)), lse.astype(np.float32)

    shapes = (
        jax.ShapeDtypeStruct((call.num_tokens, call.num_heads, call.value_dim), call.out_dtype),
        jax.ShapeDtypeStruct((call.num_tokens, call.num_heads), jnp.float32),
    )
    return jax.pure_callback(host, shapes, operands, vmap_method="sequential")
