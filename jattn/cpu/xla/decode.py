"""Decode: sequences with few query tokens, their slabs dealt out evenly to lanes.

    cut every sequence's visible keys into slabs; number all slabs, sequence after sequence
    lane p takes the p-th of P equal runs of that numbering
    while a lane has slabs left:
        step all lanes until one of them comes to the end of its sequence or of its run
        merge every lane's softmax state into its sequence's

So the work follows the lengths alone: one long sequence is split over all lanes, and many short
ones are dealt out whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jattn import call as calls
from jattn import softmax, spec
from jattn.cpu.xla import lanes, masks, tiles


def run(
    call: calls.Call, operands: calls.Operands, counts: jax.Array, tile: tiles.DecodeTiles
) -> softmax.Partial:
    """The softmax state of rows [B, K, Q * G] of sequences with 1 to Q query tokens.

    Args:
      call, operands: the call.
      counts: int32 [B]; query tokens of each sequence. Those with 0 or more than Q are left empty.
      tile: static sizes, Q among them.
    """
    dtype = tiles.compute_dtype(call)
    queries = rows_of_tokens(operands.query, call, operands, tile.query_tokens).astype(dtype)
    first = spec.first_query_position(operands.seq_lens, counts)
    mine = (counts > 0) & (counts <= tile.query_tokens)
    offsets = jnp.arange(tile.query_tokens, dtype=jnp.int32)[None]
    own = jnp.broadcast_to(offsets, (call.num_seqs, tile.query_tokens))
    tokens = operands.query_start_loc[:-1, None] + own
    rows = masks.row_data(operands, tokens, own, first, call.group)
    sequences = jnp.arange(call.num_seqs, dtype=jnp.int32)
    start, end = masks.key_range(
        call, operands, sequences, tokens, own < counts[:, None], first, first + counts - 1
    )
    run = masks.key_run(call, operands, sequences, operands.block_tables, start, end)
    slab = tile.slab
    base = run.start // slab.piece * slab.piece
    num_slabs = (run.end - base + slab.tokens - 1) // slab.tokens
    num_slabs = jnp.where(mine & (run.end > run.start), num_slabs, 0)
    slab_ends = jnp.cumsum(num_slabs, dtype=jnp.int32)
    total = slab_ends[-1]
    share = (total + tile.num_lanes - 1) // tile.num_lanes
    lane_ids = jnp.arange(tile.num_lanes, dtype=jnp.int32)
    lane_ends = jnp.minimum((lane_ids + 1) * share, total)

    def unfinished(carry) -> jax.Array:
        return (carry[0] < lane_ends).any()

    def body(carry):
        at, state = carry
        b = jnp.searchsorted(slab_ends, at, side="right", method="compare_all").astype(jnp.int32)
        b = jnp.minimum(b, call.num_seqs - 1)
        active = at < lane_ends
        left = jnp.where(active, jnp.minimum(slab_ends[b], lane_ends) - at, jnp.int32(2**30))
        steps = left.min()
        skipped = at - (slab_ends[b] - num_slabs[b])
        part = lanes.attend(
            lanes.Lanes(
                queries=jnp.take(queries, b, axis=0, mode="clip"),
                rows=jax.tree.map(lambda x: jnp.take(x, b, axis=0, mode="clip"), rows),
                first=first[b],
                last=first[b] + counts[b] - 1,
                first_own=first[b],
                seq_len=operands.seq_lens[b],
                sight=masks.row_sight(call, operands, b, tokens[b]),
                run=jax.tree.map(lambda x: jnp.take(x, b, axis=0, mode="clip"), run),
                start=start[b],
                end=end[b],
                token=base[b] + skipped * slab.tokens,
                active=active,
            ),
            steps,
            call,
            operands,
            slab,
            dtype,
        )
        for p in range(tile.num_lanes):  # in turn: two lanes may hold parts of one sequence
            state = _merge_into(state, b[p], jax.tree.map(lambda x, p=p: x[p], part), active[p])
        return at + jnp.where(active, steps, 0), state

    shape = (call.num_seqs, call.num_kv_heads, tile.query_tokens * call.group)
    empty = softmax.empty(shape, call.value_dim)
    return lax.while_loop(unfinished, body, (lane_ids * share, empty))[1]


def rows_of_tokens(
    x: jax.Array, call: calls.Call, operands: calls.Operands, query_tokens: int
) -> jax.Array:
    """`x` [T, H, X] as rows [B, K, Q * G, X]; rows past a sequence's own hold somebody else's."""
    kv_heads, group, last = call.num_kv_heads, call.group, x.shape[2]
    if not (query_tokens == 1 and call.num_tokens == call.num_seqs and not call.ragged):
        offsets = jnp.arange(query_tokens, dtype=jnp.int32)
        where = operands.query_start_loc[:-1, None] + offsets[None]
        x = jnp.take(x, where.reshape(-1), axis=0, mode="clip")
    rows = x.reshape(call.num_seqs, query_tokens, kv_heads, group, last)
    return rows.swapaxes(1, 2).reshape(call.num_seqs, kv_heads, query_tokens * group, last)


def _merge_into(
    state: softmax.Partial, b: jax.Array, part: softmax.Partial, active: jax.Array
) -> softmax.Partial:
    """`state` with `part` merged into sequence `b`'s rows, or as it was."""
    old = softmax.Partial(*(lax.dynamic_index_in_dim(x, b, 0, keepdims=False) for x in state))
    new = softmax.merge(old, part)
    new = softmax.Partial(*(jnp.where(active, x, y) for x, y in zip(new, old, strict=True)))
    return softmax.Partial(
        *(lax.dynamic_update_index_in_dim(x, y, b, 0) for x, y in zip(state, new, strict=True))
    )
