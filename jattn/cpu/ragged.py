"""Prefill, chunked prefill and the long part of mixtures: tiles of query tokens, one lane each.

for each tile of up to Q tokens of one sequence:              # a traced number of tiles
    q = the tile's rows, [K, Q * G, D]
    m, l, acc = the lane loop over the slabs that some row of the tile sees
    out[the tile's own rows] = acc / l
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jattn import call as calls
from jattn import softmax, spec
from jattn.cpu import lanes, pool, tiles


def run(
    call: calls.Call,
    operands: calls.Operands,
    counts: jax.Array,
    sinks: jax.Array | None,
    tile: tiles.RaggedTiles,
) -> tuple[jax.Array, jax.Array]:
    """`(out, lse)` in float32, heads grouped: [K, T, G, V] and [K, T, G]; zeros and -inf elsewhere.

    Args:
      call, operands: the call.
      counts: int32 [B]; query tokens of each sequence, 0 for those that are not for this loop.
      sinks: [K, G] or None.
      tile: static sizes.
    """
    kv_heads, group, span = call.num_kv_heads, call.group, tile.query_tokens
    num_rows = span * group
    slab, dtype = tile.slab, tiles.compute_dtype(call)
    query = operands.query.reshape(call.num_tokens, kv_heads, group, call.head_dim)
    query = pool.words_of(jnp.pad(query, ((0, span), (0, 0), (0, 0), (0, 0))))
    query = query.transpose(1, 0, 2, 3)
    starts = operands.query_start_loc[:-1]
    tile_ends = jnp.cumsum((counts + span - 1) // span, dtype=jnp.int32)
    if sinks is not None:
        sinks = jnp.tile(sinks, (1, span))

    def body(index: jax.Array, outputs):
        out, lse = outputs
        b = jnp.searchsorted(tile_ends, index, side="right", method="compare_all")
        b = jnp.minimum(b.astype(jnp.int32), call.num_seqs - 1)
        skip = (index - (tile_ends[b] - (counts[b] + span - 1) // span)) * span
        own = jnp.minimum(counts[b] - skip, span)
        row = starts[b] + skip
        words = lax.dynamic_slice_in_dim(query, row, span, axis=1)
        if words.dtype != operands.query.dtype:
            words = lax.bitcast_convert_type(words, operands.query.dtype)
        first = spec.first_query_position(operands.seq_lens[b], counts[b]) + skip
        seq_len = operands.seq_lens[b]
        is_causal = call.is_causal if call.is_causal is not None else operands.is_causal[b]
        start, end = spec.key_range(
            first,
            first + own - 1,
            jnp.minimum(seq_len, call.table_width * call.block_size),
            is_causal=is_causal,
            sliding_window=operands.sliding_window,
        )
        base = start // slab.piece * slab.piece
        part = lanes.attend(
            lanes.Lanes(
                queries=words.astype(dtype).reshape(1, kv_heads, num_rows, call.head_dim),
                positions=(first + jnp.arange(num_rows, dtype=jnp.int32) // group)[None],
                first=first[None],
                last=(first + own - 1)[None],
                seq_len=seq_len[None],
                is_causal=is_causal if isinstance(is_causal, bool) else is_causal[None],
                table=operands.block_tables[b][None],
                start=start[None],
                end=end[None],
                token=base[None],
                active=jnp.ones((1,), bool),
            ),
            jnp.where(end > start, (end - base + slab.tokens - 1) // slab.tokens, 0),
            call,
            operands,
            slab,
            dtype,
        )
        tile_out, tile_lse = softmax.finish(jax.tree.map(lambda x: x[0], part), sinks)
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
