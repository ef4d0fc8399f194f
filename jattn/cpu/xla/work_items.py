"""Work items: some query rows of one sequence, and a run of that sequence's keys.

`P` of them step through their keys together (`kv_loop`). This file defines the records and builds
them: where their query tokens are, and which keys these see.
"""

from __future__ import annotations

import typing

import jax
import jax.numpy as jnp
from jax import lax

from jattn import call as calls
from jattn import spec
from jattn.integers import INT32_MAX


class QueryRows(typing.NamedTuple):
    """R query rows of each of P work items, `R = query tokens * G`, token-major."""

    positions: jax.Array  # int32 [P, R]: of each row's query token; in a tree, by its depth
    sight: spec.Sight  # of every row; broadcasts against [P, R, C]
    path: jax.Array | None  # uint32 [P, R, W]: `spec.path_bits`
    query_index: jax.Array | None  # int32 [P, R]: which query token of its sequence; with a tree


class KeyRun(typing.NamedTuple):
    """The keys of P work items, numbered without gaps: all that are visible, or selected blocks."""

    table: jax.Array  # int32 [P, M or M']
    columns: jax.Array | None  # int32 [P, M']: selected columns of the block table, ascending
    start: jax.Array  # int32 [P]: the first key to read, in the run's own numbering
    end: jax.Array  # int32 [P]
    first_key: jax.Array  # int32 [P]: no row sees a key at a position before this
    end_key: jax.Array  # int32 [P]: nor at or after this


class WorkItems(typing.NamedTuple):
    """Query rows and runs of keys of P work items."""

    queries: jax.Array  # [P, K, R, D] in the compute dtype
    rows: QueryRows
    first: jax.Array  # int32 [P]: no row that counts is at a position before this
    last: jax.Array  # int32 [P]: nor after this
    sequence_first: jax.Array  # int32 [P]: position of the sequence's first query token
    seq_len: jax.Array  # int32 [P]
    run: KeyRun
    token: jax.Array  # int32 [P]: where in the run the item begins, a multiple of the kernel block
    active: jax.Array  # bool [P]: whether there are keys at all


def query_rows(
    call: calls.Call,
    operands: calls.Operands,
    sequences: jax.Array,
    tokens: jax.Array,
    index: jax.Array,
    sequence_first: jax.Array,
) -> QueryRows:
    """Return the rows of query tokens.

    Args:
      call, operands: the call.
      sequences: int32 [P].
      tokens: int32 [P, Q]; which tokens of the call; those past the last count as the last.
      index: int32 [P, Q]; which of its sequence's query tokens each is.
      sequence_first: int32 [P]; the position of the sequence's first query token.
    """

    def by_row(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, call.group, axis=1)

    tokens = jnp.minimum(tokens, call.num_tokens - 1)
    sight = operands.sight(call).of(sequences, tokens)
    if not isinstance(sight.is_causal, bool):
        sight = sight._replace(is_causal=sight.is_causal[:, None, None])
    if sight.visible_end is not None:
        sight = sight._replace(visible_end=by_row(sight.visible_end)[:, :, None])
    if operands.tree_mask is None:
        return QueryRows(by_row(sequence_first[:, None] + index), sight, None, None)
    path = spec.path_bits(operands.tree_mask[tokens], index)
    depth = spec.tree_path(path, index, jnp.full_like(index, -1))[1] - 1
    return QueryRows(by_row(sequence_first[:, None] + depth), sight, by_row(path), by_row(index))


def key_run(
    call: calls.Call,
    operands: calls.Operands,
    sequences: jax.Array,
    tokens: jax.Array,
    counted: jax.Array,
    first: jax.Array,
    last: jax.Array,
) -> KeyRun:
    """The keys visible to queries at positions `first` to `last` [P] of `sequences` [P].

    Args:
      call, operands, sequences: as above.
      tokens: int32 [P, Q]; the query tokens; those past the last count as the last.
      counted: bool [P, Q]; which of them count.
      first, last: int32 [P].
    """
    size, width = call.block_size, call.table_width
    sight = operands.sight(call).of(sequences)
    if operands.visible_end is not None:
        ends = jnp.take(operands.visible_end, tokens, axis=0, mode="clip")
        sight = sight._replace(visible_end=jnp.where(counted, ends, 0).max(axis=1))
    seq_lens = jnp.minimum(operands.seq_lens[sequences], call.capacity)
    start, end = spec.key_range(first, last, seq_lens, sight)
    table = operands.block_tables[sequences]
    if operands.selected_blocks is None:
        return KeyRun(table, None, start, end, start, end)
    columns = jnp.take(operands.selected_blocks, sequences, axis=0, mode="clip")
    columns, count = spec.selected_columns(columns, start, end, size, width)
    table = jnp.take_along_axis(table, jnp.minimum(columns, width - 1), axis=1)
    return KeyRun(table, columns, jnp.zeros_like(start), count * size, start, end)


def key_positions(run: KeyRun, token: jax.Array, count: int, block_size: int) -> jax.Array:
    """int32 [P, C]: the positions in the sequence of the run's `count` keys from `token` [P] on.

    Past the run's last column, they are past every key that a table could hold.
    """
    keys = token[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    if run.columns is None:
        return keys
    index = keys // block_size
    width = run.columns.shape[1]
    column = jnp.take_along_axis(run.columns, jnp.minimum(index, width - 1), axis=1)
    keys = jnp.where(index < width, column * block_size + keys % block_size, jnp.int32(INT32_MAX))
    return lax.optimization_barrier(keys)  # XLA would gather the columns again for every row
