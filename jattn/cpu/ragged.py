"""Prefill, chunked prefill and the long part of mixtures: tiles of query tokens, one lane each.

for each tile of up to Q tokens of one sequence:              # a traced number of tiles
    q = the tile's rows, [K, Q * G, D]
    m, l, acc = the lane loop over the slabs that some row of the tile sees
    out[the tile's own rows] = acc / l
"""

from __future__ import annotations

import typing

import jax
import jax.numpy as jnp
from jax import lax

from jattn import call as calls
from jattn import softmax, spec
from jattn.cpu import lanes, pool, tiles


class Tile(typing.NamedTuple):
    """One tile: `own` query tokens of sequence `b`, and the slabs that they see. All scalars."""

    b: jax.Array
    row: jax.Array  # index of its first query token among all tokens
    own: jax.Array  # query tokens of the tile that are the sequence's own, at most Q
    lane: lanes.Lanes  # its one lane; the queries are for the caller to fill in
    steps: jax.Array  # slabs to look at


def tile_ends(counts: jax.Array, query_tokens: int) -> jax.Array:
    """int32 [B]: how many tiles the sequences up to each one have; the last is the total."""
    return jnp.cumsum((counts + query_tokens - 1) // query_tokens, dtype=jnp.int32)


def locate(
    index: jax.Array,
    ends: jax.Array,
    counts: jax.Array,
    call: calls.Call,
    operands: calls.Operands,
    tile: tiles.RaggedTiles,
) -> Tile:
    """The tile of a number below `ends[-1]`."""
    span, slab = tile.query_tokens, tile.slab
    b = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    b = jnp.minimum(b, call.num_seqs - 1)
    skip = (index - (ends[b] - (counts[b] + span - 1) // span)) * span
    own = jnp.minimum(counts[b] - skip, span)
    seq_len = operands.seq_lens[b]
    first = spec.first_query_position(seq_len, counts[b]) + skip
    is_causal = call.is_causal if call.is_causal is not None else operands.is_causal[b]
    start, end = spec.key_range(
        first,
        first + own - 1,
        jnp.minimum(seq_len, call.table_width * call.block_size),
        is_causal=is_causal,
        sliding_window=operands.sliding_window,
    )
    base = start // slab.piece * slab.piece
    row_tokens = jnp.arange(span * call.group, dtype=jnp.int32) // call.group
    lane = lanes.Lanes(
        queries=operands.query,
        positions=(first + row_tokens)[None],
        first=first[None],
        last=(first + own - 1)[None],
        seq_len=seq_len[None],
        is_causal=is_causal if isinstance(is_causal, bool) else is_causal[None],
        table=operands.block_tables[b][None],
        start=start[None],
        end=end[None],
        token=base[None],
        active=jnp.ones((1,), bool),
    )
    steps = jnp.where(end > start, (end - base + slab.tokens - 1) // slab.tokens, 0)
    return Tile(b, operands.query_start_loc[b] + skip, own, lane, steps)


def grouped(x: jax.Array, call: calls.Call, padding: int) -> jax.Array:
    """[T, H, X] as [K, T + padding, G, X], so that a tile of one KV head is a plain slice."""
    x = x.reshape(call.num_tokens, call.num_kv_heads, call.group, -1)
    return jnp.pad(x, ((0, padding), (0, 0), (0, 0), (0, 0))).transpose(1, 0, 2, 3)


def ungrouped(x: jax.Array, call: calls.Call) -> jax.Array:
    """The inverse of `grouped`: [K, T + padding, G, X] as [T, H, X]."""
    x = x[:, : call.num_tokens].transpose(1, 0, 2, 3)
    return x.reshape(call.num_tokens, call.num_heads, -1)


def run(
    call: calls.Call,
    operands: calls.Operands,
    counts: jax.Array,
    sinks: jax.Array | None,
    tile: tiles.RaggedTiles,
) -> tuple[jax.Array, jax.Array]:
    """`(out [T, H, V], lse [T, H])` in float32; zeros and -inf for tokens of other sequences.

    Args:
      call, operands: the call.
      counts: int32 [B]; query tokens of each sequence, 0 for those that are not for this loop.
      sinks: [K, G] or None.
      tile: static sizes.
    """
    kv_heads, group, span = call.num_kv_heads, call.group, tile.query_tokens
    num_rows = span * group
    dtype = tiles.compute_dtype(call)
    query = grouped(pool.words_of(operands.query), call, span)
    ends = tile_ends(counts, span)
    if sinks is not None:
        sinks = jnp.tile(sinks, (1, span))

    def body(index: jax.Array, outputs):
        out, lse = outputs
        here = locate(index, ends, counts, call, operands, tile)
        words = lax.dynamic_slice_in_dim(query, here.row, span, axis=1)
        if words.dtype != operands.query.dtype:
            words = lax.bitcast_convert_type(words, operands.query.dtype)
        queries = words.astype(dtype).reshape(1, kv_heads, num_rows, call.head_dim)
        part = lanes.attend(
            here.lane._replace(queries=queries), here.steps, call, operands, tile.slab, dtype
        )
        tile_out, tile_lse = softmax.finish(jax.tree.map(lambda x: x[0], part), sinks)
        mine = (jnp.arange(span, dtype=jnp.int32) < here.own)[None, :, None, None]

        def put(whole: jax.Array, part: jax.Array) -> jax.Array:
            old = lax.dynamic_slice_in_dim(whole, here.row, span, axis=1)
            new = jnp.where(mine, part.reshape(old.shape), old)
            return lax.dynamic_update_slice_in_dim(whole, new, here.row, axis=1)

        return put(out, tile_out), put(lse, tile_lse)

    rows = (kv_heads, call.num_tokens + span, group)
    out = jnp.zeros((*rows, call.value_dim), jnp.float32)
    lse = jnp.full((*rows, 1), -jnp.inf, jnp.float32)
    out, lse = lax.fori_loop(0, ends[-1], body, (out, lse))
    return ungrouped(out, call), ungrouped(lse, call)[..., 0]
