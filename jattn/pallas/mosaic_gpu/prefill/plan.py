"""Which tiles of query tokens the prefill kernel computes, and which keys each of them reads.

The plan is made on the device, inside the caller's `jit`, from `query_start_loc` and `seq_lens`: a
fixed number of tiles (an upper bound that depends only on shapes) of which the first ones have
work. A tile is up to `tile_tokens` neighbouring query tokens of one sequence. Long sequences come
first, and within a sequence the last tile does: under a causal mask it has the most keys, and work
that starts early does not leave one multiprocessor running alone at the end.

A tile begins at a multiple of 8 tokens, counted over the batch: TMA cuts the query into tiles of 8
rows, wherever sequences begin. So the first tile of a sequence may hold up to 7 tokens of the one
before it; they are computed and not written.

Tokens after the last sequence form another sequence, without keys: the kernel writes zeros for
them as it does for every query that sees nothing, so the output need not be cleared first.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp

from jattn import call as calls
from jattn import spec
from jattn.integers import NO_LIMIT, ceil_div, round_up
from jattn.pallas.mosaic_gpu import scratch
from jattn.pallas.mosaic_gpu.prefill import tiles

ALIGNMENT = scratch.COPIED_ROWS


class Column(enum.IntEnum):
    """Columns of the plan, int32."""

    SEQUENCE = 0  # row of the block table
    TOKEN = 1  # first token of the tile, a multiple of 8; the tile never runs past the last token
    POSITION = 2  # position of that token in its sequence
    WRITE_START = 3  # tokens [WRITE_START, WRITE_END) of the tile are written; the others are not
    WRITE_END = 4
    BASE = 5  # first key read: a multiple of the copy size
    END = 6  # no token of the tile sees a key from here on
    CLEAR_START = 7  # every written token sees every key in [CLEAR_START, CLEAR_END): no mask there
    CLEAR_END = 8
    NUM_KEYS = 9  # keys the sequence has; slots from here on may hold anything
    IS_CAUSAL = 10
    BROKEN = 11  # 1: the sequence breaks a promise, and its result is NaN
    UNOWNED = 12  # first slot a copy brings that no sequence owns, or NO_LIMIT


def make(
    call: calls.Call,
    operands: calls.Operands,
    counts: jax.Array,
    *,
    num_tokens: int,
    tile_tokens: int,
    copy_tokens: int,
) -> jax.Array:
    """The plan: int32 [tiles, columns].

    Args:
      call: the call.
      operands: its operands as `promises.marked` returns them.
      counts: int32 [B]; query tokens of each sequence, 0 for those of another kernel.
      num_tokens: T rounded up to a multiple of 8, and at least `tile_tokens`.
      tile_tokens: query tokens of a tile.
      copy_tokens: keys that one copy brings; divides the block size.
    """
    num_seqs = call.num_seqs
    starts = jnp.append(operands.query_start_loc, jnp.int32(call.num_tokens))
    queries = jnp.maximum(jnp.diff(starts), 0)
    counts = jnp.append(counts, queries[-1])
    seq_lens = jnp.append(operands.seq_lens, jnp.int32(0))
    keys = jnp.clip(seq_lens, 0, call.capacity)

    # Ranks by comparing all pairs: one fused kernel for any B that a step may have.
    index = jnp.arange(num_seqs + 1, dtype=jnp.int32)
    longer = keys[None, :] > keys[:, None]
    longer |= (keys[None, :] == keys[:, None]) & (index[None, :] < index[:, None])
    rank = longer.sum(axis=1, dtype=jnp.int32)
    order = jnp.where(rank[None, :] == index[:, None], index[None, :], 0).sum(axis=1)
    aligned = starts[:-1] // ALIGNMENT * ALIGNMENT
    covered = jnp.where(counts > 0, starts[:-1] - aligned + counts, 0)
    ends = jnp.cumsum(ceil_div(covered, tile_tokens)[order], dtype=jnp.int32)

    tile = jnp.arange(tiles.max_tiles(call.num_tokens, num_seqs, tile_tokens), dtype=jnp.int32)
    place = jnp.searchsorted(ends, tile, side="right", method="compare_all").astype(jnp.int32)
    place = jnp.minimum(place, num_seqs)
    b = order[place]
    wanted = aligned[b] + jnp.maximum(ends[place] - 1 - tile, 0) * tile_tokens
    write_first = jnp.maximum(wanted, starts[b])
    write_end = jnp.minimum(wanted + tile_tokens, starts[b] + counts[b])
    write_end = jnp.where(tile < ends[-1], write_end, write_first)
    # The very last tile moves back to end with the last token.
    token = jnp.clip(wanted, 0, num_tokens - tile_tokens)
    zero = spec.first_query_position(seq_lens[b], queries[b]) - starts[b]  # where token 0 would be
    first, last = zero + write_first, zero + write_end - 1
    sight = operands.sight(call)
    if call.is_causal is None:
        sight = sight._replace(is_causal=jnp.append(sight.is_causal, True))
    sight = sight.of(b)
    start, end = spec.key_range(first, last, keys[b], sight)
    clear_start, _ = spec.key_range(last, last, keys[b], sight)
    _, clear_end = spec.key_range(first, first, keys[b], sight)
    broken = seq_lens[b] < 0
    nothing = (write_end <= write_first) | (end <= start) | broken
    reach = round_up(end, copy_tokens)
    columns = {
        Column.SEQUENCE: jnp.minimum(b, num_seqs - 1),
        Column.TOKEN: token,
        Column.POSITION: zero + token,
        Column.WRITE_START: write_first - token,
        Column.WRITE_END: write_end - token,
        Column.BASE: jnp.where(nothing, 0, start // copy_tokens * copy_tokens),
        Column.END: jnp.where(nothing, 0, end),
        Column.CLEAR_START: clear_start,
        Column.CLEAR_END: clear_end,
        Column.NUM_KEYS: keys[b],
        Column.IS_CAUSAL: jnp.broadcast_to(jnp.asarray(sight.is_causal, jnp.int32), b.shape),
        Column.BROKEN: broken.astype(jnp.int32),
        Column.UNOWNED: jnp.where(reach > keys[b], keys[b], NO_LIMIT),
    }
    return jnp.stack([columns[column] for column in Column], axis=1)
