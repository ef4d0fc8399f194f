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
from jattn.cpu.xla import lanes, masks, pool, tiles


class Tile(typing.NamedTuple):
    """One tile: Q tokens from `row` on, `own` of them its own, and the slabs that those see."""

    row: jax.Array  # int32 []: its first token among all tokens; the tile never runs past the last
    own: jax.Array  # bool [Q]: which of its tokens are the sequence's own and not done elsewhere
    lane: lanes.Lanes  # its one lane; the queries are for the caller to fill in
    steps: jax.Array  # int32 []: slabs to look at
    broken: jax.Array  # bool []: the sequence has more query tokens than the call said; no steps


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
    num_own = jnp.minimum(counts[b] - skip, span)
    # The last tile of all steps back so that it ends with the tokens; what it then covers besides
    # its own is computed in vain and not written.
    wanted = operands.query_start_loc[b] + skip
    row = jnp.clip(wanted, 0, call.num_tokens - span)
    back = wanted - row
    offsets = jnp.arange(span, dtype=jnp.int32)
    seq_len = operands.seq_lens[b]
    first_own = spec.first_query_position(seq_len, counts[b])
    own = (offsets >= back) & (offsets < back + num_own)
    last = first_own + skip + num_own - 1
    # A tree's tokens sit at their depth: the tile's may be as early as the sequence's first.
    first = first_own + skip if operands.tree_mask is None else first_own
    tokens, places = (row + offsets)[None], (skip - back + offsets)[None]
    start, end = masks.key_range(
        call, operands, b[None], tokens, own[None], first[None], last[None]
    )
    run = masks.key_run(call, operands, b[None], operands.block_tables[b][None], start, end)
    base = run.start // slab.piece * slab.piece
    lane = lanes.Lanes(
        queries=operands.query,
        rows=masks.row_data(operands, tokens, places, first_own[None], call.group),
        first=first[None],
        last=last[None],
        first_own=first_own[None],
        seq_len=seq_len[None],
        sight=masks.row_sight(call, operands, b[None], tokens),
        run=run,
        start=start,
        end=end,
        token=base,
        active=jnp.ones((1,), bool),
    )
    steps = jnp.where(run.end > run.start, (run.end - base + slab.tokens - 1) // slab.tokens, 0)[0]
    broken = counts[b] > call.max_query_len
    return Tile(row, own, lane, jnp.where(broken, 0, steps), broken)


def rows_of(x: jax.Array, tile: Tile, call: calls.Call, span: int) -> jax.Array:
    """A tile of `x` [T, H, X] as rows [K, Q * G, X]."""
    part = lax.dynamic_slice_in_dim(x, tile.row, span, axis=0)
    part = part.reshape(span, call.num_kv_heads, call.group, x.shape[2]).swapaxes(0, 1)
    return part.reshape(call.num_kv_heads, span * call.group, x.shape[2])


def put_rows(x: jax.Array, rows: jax.Array, tile: Tile, call: calls.Call, span: int) -> jax.Array:
    """`x` [T, H, X] with a tile's own tokens taken from rows [K, Q * G, X]."""
    part = rows.reshape(call.num_kv_heads, span, call.group, x.shape[2]).swapaxes(0, 1)
    old = lax.dynamic_slice_in_dim(x, tile.row, span, axis=0)
    new = jnp.where(tile.own[:, None, None], part.reshape(old.shape), old)
    return lax.dynamic_update_slice_in_dim(x, new, tile.row, axis=0)


def run(
    call: calls.Call,
    operands: calls.Operands,
    counts: jax.Array,
    sinks: jax.Array | None,
    tile: tiles.RaggedTiles,
) -> tuple[jax.Array, jax.Array]:
    """`(out [T, H, V] as words of the output dtype, lse [T, H] float32)`.

    Zeros and -inf for tokens of other sequences and for padding.

    Args:
      call, operands: the call.
      counts: int32 [B]; query tokens of each sequence, 0 for those that are not for this loop.
      sinks: [H] or [T, H], or None.
      tile: static sizes.
    """
    span = tile.query_tokens
    dtype = tiles.compute_dtype(call)
    query = pool.words_of(operands.query)
    ends = tile_ends(counts, span)
    if sinks is not None and sinks.ndim == 1:
        by_row = jnp.tile(sinks.reshape(call.num_kv_heads, call.group), (1, span))

    def sinks_of(here: Tile) -> jax.Array | None:
        if sinks is None or sinks.ndim == 1:
            return None if sinks is None else by_row
        return rows_of(sinks[..., None], here, call, span)[..., 0]

    def body(index: jax.Array, outputs):
        out, lse = outputs
        here = locate(index, ends, counts, call, operands, tile)
        rows = pool.numbers_of(rows_of(query, here, call, span), operands.query.dtype)
        lane = here.lane._replace(queries=rows.astype(dtype)[None])
        part = lanes.attend(lane, here.steps, call, operands, tile.slab, dtype)
        tile_out, tile_lse = softmax.finish(jax.tree.map(lambda x: x[0], part), sinks_of(here))
        if operands.v_scale is not None:
            tile_out = tile_out * operands.v_scale[:, None, None]
        tile_out = jnp.where(here.broken, jnp.nan, tile_out)
        tile_lse = jnp.where(here.broken, jnp.nan, tile_lse)
        tile_out = pool.words_of(tile_out.astype(call.out_dtype))
        return (
            put_rows(out, tile_out, here, call, span),
            put_rows(lse, tile_lse[..., None], here, call, span),
        )

    shape = (call.num_tokens, call.num_heads)
    words = pool.words_of(jnp.zeros((), call.out_dtype)).dtype
    out = jnp.zeros((*shape, call.value_dim), words)
    lse = jnp.full((*shape, 1), -jnp.inf, jnp.float32)
    out, lse = lax.fori_loop(0, ends[-1], body, (out, lse))
    return out, lse[..., 0]
