"""Decode: sequences with few query tokens, their KV tiles distributed evenly over workers.

    cut every sequence's visible keys into tiles; number all tiles, sequence after sequence
    worker p takes the p-th of P equal runs of that numbering
    while a worker has tiles left:
        each worker's work item is the rest of its run within its current sequence
        step all items (`kv_loop`) until one of them is finished
        merge every item's softmax state into its sequence's

So the work depends only on the lengths: one long sequence is split over all workers, and many short
ones are assigned whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jattn import call as calls
from jattn import softmax, spec
from jattn.cpu.xla import kv_loop, tiles
from jattn.cpu.xla.work_items import WorkItems, key_run, query_rows
from jattn.integers import NO_LIMIT, ceil_div
from jattn.varying import as_varying


def run(
    call: calls.Call, operands: calls.Operands, counts: jax.Array, sizes: tiles.DecodeTiles
) -> softmax.Partial:
    """The softmax state of rows [B, K, Q * G] of sequences with 1 to Q query tokens.

    Args:
      call, operands: the call.
      counts: int32 [B]; query tokens of each sequence. Those with 0 or more than Q are left empty.
      sizes: static; they include Q.
    """
    span, tile = sizes.query_tokens, sizes.kv_tile
    queries = rows_of_tokens(operands.query, call, operands, span).astype(tiles.compute_dtype(call))
    first = spec.first_query_position(operands.seq_lens, counts)
    last = first + counts - 1
    index = jnp.broadcast_to(jnp.arange(span, dtype=jnp.int32)[None], (call.num_seqs, span))
    tokens = operands.query_start_loc[:-1, None] + index
    sequences = jnp.arange(call.num_seqs, dtype=jnp.int32)
    run = key_run(call, operands, sequences, tokens, index < counts[:, None], first, last)
    base = run.start // tile.kernel_block * tile.kernel_block
    num_tiles = ceil_div(run.end - base, tile.tokens)
    has_work = (counts > 0) & (counts <= span) & (run.end > run.start)
    num_tiles = jnp.where(has_work, num_tiles, 0)
    tile_ends = jnp.cumsum(num_tiles, dtype=jnp.int32)
    total = tile_ends[-1]
    share = ceil_div(total, sizes.num_workers)
    workers = jnp.arange(sizes.num_workers, dtype=jnp.int32)
    worker_ends = jnp.minimum((workers + 1) * share, total)

    def unfinished(carry: tuple[jax.Array, softmax.Partial]) -> jax.Array:
        return (carry[0] < worker_ends).any()

    def body(carry: tuple[jax.Array, softmax.Partial]) -> tuple[jax.Array, softmax.Partial]:
        at, state = carry
        b = jnp.searchsorted(tile_ends, at, side="right", method="compare_all").astype(jnp.int32)
        b = jnp.minimum(b, call.num_seqs - 1)
        active = at < worker_ends
        left = jnp.where(active, jnp.minimum(tile_ends[b], worker_ends) - at, jnp.int32(NO_LIMIT))
        steps = left.min()
        skipped = at - (tile_ends[b] - num_tiles[b])
        items = WorkItems(
            queries=jnp.take(queries, b, axis=0, mode="clip"),
            rows=query_rows(call, operands, b, tokens[b], index[b], first[b]),
            first=first[b],
            last=last[b],
            sequence_first=first[b],
            seq_len=operands.seq_lens[b],
            run=jax.tree.map(lambda x: jnp.take(x, b, axis=0, mode="clip"), run),
            token=base[b] + skipped * tile.tokens,
            active=active,
        )
        partial = kv_loop.attend(items, steps, call, operands, tile)
        for p in range(sizes.num_workers):  # one by one: two items may belong to one sequence
            state = _merge_into(state, b[p], softmax.Partial(*(x[p] for x in partial)), active[p])
        return at + jnp.where(active, steps, 0), state

    shape = (call.num_seqs, call.num_kv_heads, span * call.group)
    start = (workers * share, softmax.init(shape, call.value_dim))
    return lax.while_loop(unfinished, body, as_varying(start, operands))[1]


def rows_of_tokens(
    x: jax.Array, call: calls.Call, operands: calls.Operands, query_tokens: int
) -> jax.Array:
    """`x` [T, H, X] as rows [B, K, Q * G, X]; rows past a sequence's tokens belong to others."""
    kv_heads, group, last = call.num_kv_heads, call.group, x.shape[2]
    if call.ragged:
        offsets = jnp.arange(query_tokens, dtype=jnp.int32)
        where = operands.query_start_loc[:-1, None] + offsets[None]
        x = jnp.take(x, where.reshape(-1), axis=0, mode="clip")
    rows = x.reshape(call.num_seqs, query_tokens, kv_heads, group, last)
    return rows.swapaxes(1, 2).reshape(call.num_seqs, kv_heads, query_tokens * group, last)


def _merge_into(
    state: softmax.Partial, b: jax.Array, partial: softmax.Partial, active: jax.Array
) -> softmax.Partial:
    """Merge `partial` into the rows of sequence `b` if it is active."""
    old = softmax.Partial(*(lax.dynamic_index_in_dim(x, b, 0, keepdims=False) for x in state))
    new = softmax.merge(old, partial)
    new = softmax.Partial(*(jnp.where(active, x, y) for x, y in zip(new, old, strict=True)))
    return softmax.Partial(
        *(lax.dynamic_update_index_in_dim(x, y, b, 0) for x, y in zip(state, new, strict=True))
    )
