"""Prefill, chunked prefill and mixtures: tiles of query tokens against slabs of keys.

    for each tile of up to Q tokens of one sequence:              # a traced number of tiles
        q = the tile's rows, [K, Q * G, D]
        for each slab of C keys that some row of the tile sees:   # a traced number of slabs
            s = mask(transform(q k^T));  m, l, acc = online softmax of s, v
        out[the tile's own rows] = acc / l

A slab that every row sees whole takes a body without masks. Elsewhere logits are masked, and rows
of V that nobody may see are replaced by zeros: they can hold NaN, and 0 * NaN is not 0.
"""

from __future__ import annotations

import typing

import jax
import jax.numpy as jnp
from jax import lax

from jattn import call as calls
from jattn import softmax, spec
from jattn.cpu import pool, tiles


class Rows(typing.NamedTuple):
    """One tile: rows of one sequence's queries, and where they stand."""

    queries: jax.Array  # [K, R, D] in the compute dtype
    positions: jax.Array  # int32 [R]; of a row that is not the tile's own, whatever follows
    seq_len: jax.Array  # int32 []
    first: jax.Array  # int32 []: position of the first row
    last: jax.Array  # int32 []: position of the last row that counts
    is_causal: typing.Any  # bool, or bool []
    table_row: jax.Array  # int32 [M]


def attend(rows: Rows, call: calls.Call, operands: calls.Operands, tile: tiles.Tiles):
    """The softmax state of a tile's rows over all keys they see: `Partial` of rows [K, R]."""
    dtype = tiles.compute_dtype(call)
    tokens = tile.slab.tokens
    start, end = spec.key_range(
        rows.first,
        rows.last,
        jnp.minimum(rows.seq_len, call.table_width * call.block_size),
        is_causal=rows.is_causal,
        sliding_window=operands.sliding_window,
    )
    num_rows = rows.queries.shape[1]
    repeat = num_rows // call.group if rows.positions.shape[0] != num_rows else None
    assert repeat is None
    scale = jnp.broadcast_to(operands.scale, (call.num_kv_heads,))
    if operands.k_scale is not None:
        scale = scale * operands.k_scale
    slopes = None
    if operands.alibi_slopes is not None:
        per_head = operands.alibi_slopes.reshape(call.num_kv_heads, 1, call.group)
        slopes = jnp.broadcast_to(
            per_head, (call.num_kv_heads, num_rows // call.group, call.group)
        ).reshape(call.num_kv_heads, num_rows, 1)

    def one_slab(index: jax.Array, state: softmax.Partial, masked: bool) -> softmax.Partial:
        first_key = index * tokens
        k_words = pool.read_slab(
            operands.key_cache, rows.table_row, first_key, tile.slab, call.kv_layout
        )
        v_words = pool.read_slab(
            operands.value_cache, rows.table_row, first_key, tile.slab, call.kv_layout
        )
        k = pool.decode_slab(k_words, call.key_format, dtype)
        v = pool.decode_slab(v_words, call.value_format, dtype)
        k_pos = first_key + jnp.arange(tokens, dtype=jnp.int32)
        dots = jnp.einsum(
            "krd,kcd->krc",
            rows.queries,
            k,
            preferred_element_type=jnp.float32,
            precision=lax.Precision.HIGHEST,
        )
        logits = spec.transform_logits(
            dots,
            scale=scale[:, None, None],
            logits_soft_cap=operands.logits_soft_cap,
            alibi_slopes=slopes,
            q_pos=rows.positions[None, :, None],
            k_pos=k_pos[None, None, :],
        )
        if masked:
            seen = spec.visible(
                rows.positions[:, None],
                k_pos[None, :],
                rows.seq_len,
                is_causal=rows.is_causal,
                sliding_window=operands.sliding_window,
            )
            logits = jnp.where(seen[None], logits, jnp.float32(-jnp.inf))
            mine = (k_pos >= start) & (k_pos < end)
            v = jnp.where(mine[None, :, None], v, jnp.zeros((), dtype))
        m = jnp.maximum(state.m, logits.max(axis=-1))
        base = softmax.finite_max(m)
        p = jnp.exp(logits - base[..., None])
        shrink = jnp.exp(state.m - base)
        pv = jnp.einsum(
            "krc,kcv->krv",
            p.astype(dtype),
            v,
            preferred_element_type=jnp.float32,
            precision=lax.Precision.HIGHEST,
        )
        return softmax.Partial(
            m, state.l * shrink + p.sum(axis=-1), state.acc * shrink[..., None] + pv
        )

    def body(index: jax.Array, state: softmax.Partial) -> softmax.Partial:
        first_key = index * tokens
        whole = (first_key >= start) & (first_key + tokens <= end)
        last_key = first_key + tokens - 1
        for query in (rows.first, rows.last):
            for key in (first_key, last_key):
                whole &= spec.visible(
                    query,
                    key,
                    rows.seq_len,
                    is_causal=rows.is_causal,
                    sliding_window=operands.sliding_window,
                )
        return lax.cond(
            whole,
            lambda s: one_slab(index, s, masked=False),
            lambda s: one_slab(index, s, masked=True),
            state,
        )

    state = softmax.empty((call.num_kv_heads, num_rows), call.value_dim)
    return lax.fori_loop(start // tokens, (end + tokens - 1) // tokens, body, state)


def run(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """`(out, lse)` in float32, heads grouped: [K, T, G, V] and [K, T, G]."""
    tile = tiles.ragged_tiles(call)
    kv_heads, group, span = call.num_kv_heads, call.group, tile.query_tokens
    dtype = tiles.compute_dtype(call)
    query = operands.query.reshape(call.num_tokens, kv_heads, group, call.head_dim)
    query = pool.words_of(jnp.pad(query, ((0, span), (0, 0), (0, 0), (0, 0))))
    query = query.transpose(1, 0, 2, 3)
    starts = jnp.minimum(operands.query_start_loc, call.num_tokens)
    counts = jnp.maximum(starts[1:] - starts[:-1], 0)
    tile_ends = jnp.cumsum((counts + span - 1) // span, dtype=jnp.int32)

    def body(index: jax.Array, outputs):
        out, lse = outputs
        b = jnp.searchsorted(tile_ends, index, side="right").astype(jnp.int32)
        b = jnp.minimum(b, call.num_seqs - 1)
        before = jnp.where(b > 0, tile_ends[jnp.maximum(b - 1, 0)], jnp.int32(0))
        skip = (index - before) * span
        own = jnp.minimum(counts[b] - skip, span)
        row = starts[b] + skip
        words = lax.dynamic_slice_in_dim(query, row, span, axis=1)
        if words.dtype != operands.query.dtype:
            words = lax.bitcast_convert_type(words, operands.query.dtype)
        first = spec.first_query_position(operands.seq_lens[b], counts[b]) + skip
        state = attend(
            Rows(
                queries=words.astype(dtype).reshape(kv_heads, span * group, call.head_dim),
                positions=first + jnp.arange(span * group, dtype=jnp.int32) // group,
                seq_len=operands.seq_lens[b],
                first=first,
                last=first + own - 1,
                is_causal=call.is_causal if call.is_causal is not None else operands.is_causal[b],
                table_row=operands.block_tables[b],
            ),
            call,
            operands,
            tile,
        )
        sink = None
        if operands.sinks is not None:
            sink = operands.sinks.reshape(kv_heads, 1, group)
            sink = jnp.broadcast_to(sink, (kv_heads, span, group)).reshape(kv_heads, span * group)
        tile_out, tile_lse = softmax.finish(state, sink)
        if operands.v_scale is not None:
            tile_out = tile_out * operands.v_scale[:, None, None]
        mine = (jnp.arange(span, dtype=jnp.int32) < own)[None, :, None]

        def put(whole: jax.Array, part: jax.Array, mine: jax.Array) -> jax.Array:
            old = lax.dynamic_slice_in_dim(whole, row, span, axis=1)
            new = jnp.where(mine, part.reshape(old.shape), old)
            return lax.dynamic_update_slice_in_dim(whole, new, row, axis=1)

        return put(out, tile_out, mine[..., None]), put(lse, tile_lse, mine)

    rows = (kv_heads, call.num_tokens + span, group)
    out = jnp.zeros((*rows, call.value_dim), jnp.float32)
    lse = jnp.full(rows, -jnp.inf, jnp.float32)
    out, lse = lax.fori_loop(0, tile_ends[-1], body, (out, lse))
    return out[:, : call.num_tokens], lse[:, : call.num_tokens]
