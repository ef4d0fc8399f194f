"""Where a token's K and V live: slot = block * S + offset, on the rank that keeps the token.

With `local` the token's number on this rank (`jattn.blocks.tables.context`) and R the sequence's
row,

    slot = R[local // S] * S + local % S.

Slots do not depend on the kernel block: cutting blocks into n kernel blocks changes no slot.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jattn.blocks.arguments import Integers, as_int32, inside_or_end, noted, require_shape
from jattn.blocks.tables.local import as_rank, local_positions
from jattn.blocks.tables.tables import BlockTables
from jattn.checks import checking
from jattn.integers import INT32_MAX

PAD_SLOT_ID = -1
"""The slot of a token that is not written: padding, or a token that another rank owns."""


def compute_slot_mapping(
    tables: BlockTables,
    seq_indices: Integers,
    query_start_loc: Integers,
    positions: Integers,
    *,
    rank: int | jax.Array | None = None,
) -> jax.Array:
    """Return the slot of every token of a step, in every group.

    A token has the same position in all groups. Keep cross-attention groups in tables of their own:
    their rows hold the encoder's tokens, which have other positions and counts.

    Args:
      tables: the tables of the sequences.
      seq_indices: int32 [B], the row of each sequence; outside 0..R-1 (-1) for a dummy.
      query_start_loc: int32 [B + 1]: the tokens of sequence i are
        `query_start_loc[i] .. query_start_loc[i + 1] - 1`. Padded sequences repeat the last.
        Starts must not decrease.
      positions: int32 [T], each token's position in its sequence; T may include padding.
      rank: int32 [] or None: the context-parallel rank, where it is known on the device only.

    Returns: int32 [G, T]. `PAD_SLOT_ID` (-1) for tokens past the last sequence, tokens of dummy
      sequences, positions that another rank owns, positions below 0 or past the row's blocks,
      groups without slots, slots that int32 cannot hold (`check_slot_range` refuses caches that
      have such slots) and, under jit, tokens of the first sequence whose start is after its end and
      of all sequences after it. `update_kv_cache` writes none of these tokens.
    Raises: `ValueError` for wrong dtypes or shapes, concrete starts that decrease, or a concrete
      `rank` that a group's context does not have.

    >>> tables = init_block_tables([BlockGroup(block_size=16, max_blocks=3)], max_num_seqs=2)
    >>> tables, _ = append_block_ids(tables, [0, 1], [[[5, 2], [1, 0]]], [[2, 1]])
    >>> compute_slot_mapping(tables, [1, 0], [0, 1, 2], positions=[9, 20, 0]).tolist()
    [[25, 36, -1]]
    """
    with checking("compute_slot_mapping") as problems:
        rows = as_int32(problems, "seq_indices", seq_indices, ranks=(1,))
        starts = as_int32(problems, "query_start_loc", query_start_loc, ranks=(1,))
        positions = as_int32(problems, "positions", positions, ranks=(1,))
        rank = as_rank(problems, rank, [group.context for group in tables.groups])
        if not noted(problems, "seq_indices"):
            wanted = (rows.shape[0] + 1,)
            require_shape(problems, "query_start_loc", starts, wanted, "one more than seq_indices")
        if not isinstance(starts, jax.core.Tracer):
            listed = np.asarray(starts)
            for i in np.flatnonzero(listed[1:] < listed[:-1])[:1].tolist():
                problems.add(
                    "query_start_loc",
                    f"{listed[i + 1]} at [{i + 1}]",
                    f"at least {listed[i]}, the start before it",
                )
    return _slots(tables, rows, starts, positions, rank)


@functools.partial(jax.jit, inline=True)
def _slots(
    tables: BlockTables,
    rows: jax.Array,
    starts: jax.Array,
    positions: jax.Array,
    rank: jax.Array | None,
) -> jax.Array:
    num_tokens, num_seqs = positions.shape[0], rows.shape[0]
    if num_seqs == 0:
        return jnp.full((len(tables.groups), num_tokens), PAD_SLOT_ID, jnp.int32)
    # The index of a token's sequence is the number of sequences that end at or before the token.
    # Where the starts decrease it is unknown whose a token is: no later sequence counts.
    ordered = jnp.cumsum(starts[1:] < starts[:-1]) == 0
    ends = jnp.where(ordered, jnp.clip(starts[1:], 0, num_tokens), num_tokens)
    ended = jnp.zeros((num_tokens,), jnp.int32).at[ends].add(1, mode="drop")
    sequence = jnp.cumsum(ended)
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    real = (tokens >= starts[0]) & (sequence < jnp.sum(ordered))
    sequence = jnp.minimum(sequence, num_seqs - 1)
    named = inside_or_end(rows, tables.max_num_seqs)
    held = tables.num_blocks.at[:, named].get(mode="fill", fill_value=0)
    row = jnp.minimum(named, tables.max_num_seqs - 1)  # `held` is 0 for a dummy
    row = row.at[sequence].get(mode="promise_in_bounds")
    mappings = []
    for g, (group, table) in enumerate(zip(tables.groups, tables.tables, strict=True)):
        if not group.has_slots:
            mappings.append(jnp.full_like(positions, PAD_SLOT_ID))
            continue
        size = tables.entry_size(g)
        local, owned = local_positions(positions, group.context, rank=rank)
        column, offset = local // size, local % size
        width = table.shape[1]
        cell = row * width + jnp.clip(column, 0, width - 1)
        block = table.reshape(-1).at[cell].get(mode="promise_in_bounds")
        fits = (block >= 0) & (block <= (INT32_MAX + 1) // size - 1)
        here = held[g].at[sequence].get(mode="promise_in_bounds")
        owned &= real & (positions >= 0) & (column < here) & fits
        slot = jnp.where(fits, block, 0) * size + offset
        mappings.append(jnp.where(owned, slot, PAD_SLOT_ID))
    return jnp.stack(mappings)
