"""Prefill, chunked prefill and the long part of mixtures: tiles of query tokens, one at a time.

for each tile of up to Q tokens of one sequence:              # a traced number of tiles
    q = the tile's rows, [K, Q * G, D]
    m, l, acc = the loop over the KV tiles that some row of the tile sees (`kv_loop`)
    out[the tile's rows] = acc / l
"""

from __future__ import annotations

import typing

import jax
import jax.numpy as jnp
from jax import lax

from jattn import call as calls
from jattn import softmax, spec
from jattn.cpu.xla import kv_loop, pool, tiles
from jattn.cpu.xla.work_items import WorkItems, key_run, query_rows
from jattn.formats import rounding
from jattn.integers import ceil_div
from jattn.varying import as_varying


class QueryTile(typing.NamedTuple):
    """Q tokens from `first` on, which of them it computes for one sequence, and the keys they see.

    The tile never runs past the last of all tokens.
    """

    first: jax.Array  # int32 []: its first token, among those of all sequences
    counted: jax.Array  # bool [Q]: which of its tokens are the sequence's and in no other tile
    item: WorkItems  # one work item; the caller fills in its queries
    num_steps: jax.Array  # int32 []: KV tiles to read


def tile_ends(counts: jax.Array, query_tokens: int) -> jax.Array:
    """int32 [B]: how many tiles the sequences up to and including each have."""
    return jnp.cumsum(ceil_div(counts, query_tokens), dtype=jnp.int32)


def locate(
    index: jax.Array,
    ends: jax.Array,
    counts: jax.Array,
    call: calls.Call,
    operands: calls.Operands,
    sizes: tiles.PrefillTiles,
) -> QueryTile:
    """Return the tile with number `index`, which is below `ends[-1]`."""
    span, kv_tile = sizes.query_tokens, sizes.kv_tile
    b = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    b = jnp.minimum(b, call.num_seqs - 1)
    skip = (index - (ends[b] - ceil_div(counts[b], span))) * span
    num_counted = jnp.minimum(counts[b] - skip, span)
    # The very last tile moves back to end with the last token. It then covers tokens of other
    # tiles, which it computes but does not write.
    wanted = operands.query_start_loc[b] + skip
    first_token = jnp.clip(wanted, 0, call.num_tokens - span)
    back = wanted - first_token
    offsets = jnp.arange(span, dtype=jnp.int32)
    counted = (offsets >= back) & (offsets < back + num_counted)
    sequence_first = spec.first_query_position(operands.seq_lens[b], counts[b])
    # A tree's tokens sit at their depth, so the tile's may be as early as the sequence's first.
    first = sequence_first + skip if operands.tree_mask is None else sequence_first
    last = sequence_first + skip + num_counted - 1
    one, first, last, sequence_first = (x[None] for x in (b, first, last, sequence_first))
    tokens = (first_token + offsets)[None]
    run = key_run(call, operands, one, tokens, counted[None], first, last)
    base = run.start // kv_tile.kernel_block * kv_tile.kernel_block
    item = WorkItems(
        queries=operands.query,
        rows=query_rows(call, operands, one, tokens, (skip - back + offsets)[None], sequence_first),
        first=first,
        last=last,
        sequence_first=sequence_first,
        seq_len=operands.seq_lens[one],
        run=run,
        token=base,
        active=jnp.ones((1,), bool),
    )
    num_steps = ceil_div(run.end - base, kv_tile.tokens)
    num_steps = jnp.where(run.end > run.start, num_steps, 0)[0]
    return QueryTile(first_token, counted, item, num_steps)


def rows_of(x: jax.Array, tile: QueryTile, call: calls.Call, span: int) -> jax.Array:
    """A tile of `x` [T, H, X] as rows [K, Q * G, X]."""
    part = lax.dynamic_slice_in_dim(x, tile.first, span, axis=0)
    part = part.reshape(span, call.num_kv_heads, call.group, x.shape[2]).swapaxes(0, 1)
    return part.reshape(call.num_kv_heads, span * call.group, x.shape[2])


def put_rows(
    x: jax.Array, rows: jax.Array, tile: QueryTile, call: calls.Call, span: int
) -> jax.Array:
    """Write the tokens that count in a tile, of rows [K, Q * G, X], into `x` [T, H, X]."""
    part = rows.reshape(call.num_kv_heads, span, call.group, x.shape[2]).swapaxes(0, 1)
    old = lax.dynamic_slice_in_dim(x, tile.first, span, axis=0)
    new = jnp.where(tile.counted[:, None, None], part.reshape(old.shape), old)
    return lax.dynamic_update_slice_in_dim(x, new, tile.first, axis=0)


def run(
    call: calls.Call,
    operands: calls.Operands,
    counts: jax.Array,
    sinks: jax.Array | None,
    sizes: tiles.PrefillTiles,
) -> tuple[jax.Array, jax.Array]:
    """Return `(out [T, H, V] as words of the output dtype, lse [T, H] float32)`.

    Zeros and -inf for tokens of other sequences and for padding.

    Args:
      call, operands: the call.
      counts: int32 [B]; query tokens of each sequence, 0 for those that this loop leaves out.
      sinks: [H] or [T, H], or None.
      sizes: static.
    """
    span = sizes.query_tokens
    dtype = tiles.compute_dtype(call)
    query = pool.words_of(operands.query)
    ends = tile_ends(counts, span)

    def sinks_of(here: QueryTile) -> jax.Array | None:
        if sinks is None:
            return None
        if not call.sinks_per_token:
            return kv_loop.sinks_per_row(call, sinks, span * call.group)
        return rows_of(sinks[..., None], here, call, span)[..., 0]

    def body(index: jax.Array, outputs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, lse = outputs
        here = locate(index, ends, counts, call, operands, sizes)
        rows = rounding.bitcast(rows_of(query, here, call, span), operands.query.dtype)
        item = here.item._replace(queries=rows.astype(dtype)[None])
        partial = kv_loop.attend(item, here.num_steps, call, operands, sizes.kv_tile)
        partial = softmax.Partial(*(x[0] for x in partial))
        tile_out, tile_lse = softmax.finish(partial, sinks_of(here))
        if operands.v_scale is not None:
            tile_out = tile_out * operands.v_scale[:, None, None]
        tile_out = pool.words_of(tile_out.astype(call.out_dtype))
        return (
            put_rows(out, tile_out, here, call, span),
            put_rows(lse, tile_lse[..., None], here, call, span),
        )

    shape = (call.num_tokens, call.num_heads)
    words = pool.words_of(jnp.zeros((), call.out_dtype)).dtype
    out = jnp.zeros((*shape, call.value_dim), words)
    lse = jnp.full((*shape, 1), -jnp.inf, jnp.float32)
    out, lse = lax.fori_loop(0, ends[-1], body, as_varying((out, lse), operands))
    return out, lse[..., 0]
