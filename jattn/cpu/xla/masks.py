"""What the rows of lanes see: their part of every mask, the keys they run over, and the answer.

`jattn.spec` says who sees whom; here are the arrays it is asked about, gathered by row.
"""

from __future__ import annotations

import typing

import jax
import jax.numpy as jnp
from jax import lax

from jattn import call as calls
from jattn import spec

if typing.TYPE_CHECKING:
    from jattn.cpu.xla.lanes import Lanes


class Rows(typing.NamedTuple):
    """P lanes of R query rows each, `R = query tokens * G`, token-major."""

    positions: jax.Array  # int32 [P, R]: of each row's query token; in a tree, by its depth
    path: jax.Array | None  # uint32 [P, R, W]: `spec.tree_rows`
    own: jax.Array | None  # int32 [P, R]: which of its sequence's query tokens; with a tree


class Run(typing.NamedTuple):
    """The keys that P lanes run over, numbered without gaps: all of them, or selected blocks."""

    table: jax.Array  # int32 [P, M or M']
    columns: jax.Array | None  # int32 [P, M']: true column of each of the table's, ascending
    start: jax.Array  # int32 [P]: the first key to look at, in the run's own numbering
    end: jax.Array  # int32 [P]


def row_data(
    operands: calls.Operands, tokens: jax.Array, own: jax.Array, first: jax.Array, group: int
) -> Rows:
    """The rows of query tokens.

    Args:
      operands: the call's.
      tokens: int32 [P, Q]; which tokens of the call; clipped to those there are.
      own: int32 [P, Q]; which of its sequence's query tokens each is.
      first: int32 [P]; the position of the sequence's first query token.
      group: G.
    """

    def of(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.take(x, tokens, axis=0, mode="clip")

    def by_row(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.repeat(x, group, axis=1)

    positions, path = first[:, None] + own, None
    if operands.tree_mask is not None:
        path = spec.tree_rows(of(operands.tree_mask), own)
        depth = spec.tree_path(path, own, jnp.full_like(own, -1))[1] - 1
        positions = first[:, None] + depth
    return Rows(
        by_row(positions),
        by_row(path),
        None if path is None else by_row(own),
    )


def row_sight(
    call: calls.Call, operands: calls.Operands, sequences: jax.Array, tokens: jax.Array
) -> spec.Sight:
    """The sight of lanes of `sequences` [P] and query tokens [P, Q], to meet `[P, R, C]`."""
    sight = operands.sight(call).of(sequences, jnp.minimum(tokens, call.num_tokens - 1))
    end = sight.visible_end
    end = None if end is None else jnp.repeat(end, call.group, axis=1)[:, :, None]
    if not isinstance(sight.is_causal, bool):
        sight = sight._replace(is_causal=sight.is_causal[:, None, None])
    return sight._replace(visible_end=end)


def key_range(
    call: calls.Call,
    operands: calls.Operands,
    sequences: jax.Array,
    tokens: jax.Array,
    mine: jax.Array,
    first: jax.Array,
    last: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`spec.key_range` of lanes of `sequences` [P] whose query tokens [P, Q] are those `mine`."""
    sight = operands.sight(call).of(sequences)
    if operands.visible_end is not None:
        ends = jnp.take(operands.visible_end, tokens, axis=0, mode="clip")
        sight = sight._replace(visible_end=jnp.where(mine, ends, 0).max(axis=1))
    seq_len = jnp.minimum(operands.seq_lens[sequences], call.table_width * call.block_size)
    return spec.key_range(first, last, seq_len, sight)


def key_run(
    call: calls.Call,
    operands: calls.Operands,
    sequences: jax.Array,
    table: jax.Array,
    start: jax.Array,
    end: jax.Array,
) -> Run:
    """What lanes of `sequences` [P] run over, of keys in `[start, end)` of tables [P, M]."""
    if operands.selected_blocks is None:
        return Run(table, None, start, end)
    size, nowhere = call.block_size, call.table_width
    columns = jnp.take(operands.selected_blocks, sequences, axis=0, mode="clip")
    first, last = start // size, (end - 1) // size
    inside = (columns >= first[:, None]) & (columns <= last[:, None]) & (end > start)[:, None]
    columns = jnp.sort(jnp.where(inside, columns, nowhere), axis=1)
    again = jnp.pad(columns[:, 1:] == columns[:, :-1], ((0, 0), (1, 0)))
    columns = jnp.sort(jnp.where(again, nowhere, columns), axis=1)
    count = (columns < nowhere).sum(axis=1, dtype=jnp.int32)
    table = jnp.take_along_axis(table, jnp.minimum(columns, nowhere - 1), axis=1)
    return Run(table, columns, jnp.zeros_like(start), count * size)


def key_positions(run: Run, token: jax.Array, count: int, block_size: int) -> jax.Array:
    """int32 [P, C]: true positions of the run's `count` keys from `token` [P] on.

    Past the run's last column they are past every key that a table could hold.
    """
    keys = token[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    if run.columns is None:
        return keys
    index = keys // block_size
    width = run.columns.shape[1]
    column = jnp.take_along_axis(run.columns, jnp.minimum(index, width - 1), axis=1)
    keys = jnp.where(index < width, column * block_size + keys % block_size, jnp.int32(2**31 - 1))
    return lax.optimization_barrier(keys)  # XLA would look the columns up again for every row


def seen(lanes: Lanes, k_pos: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`(bool [P, R, C], positions [P, R or 1, C])`: who sees the keys at `k_pos`, and where."""
    rows, keys = lanes.rows, k_pos[:, None, :]
    queries, on_path = rows.positions[:, :, None], None
    if rows.path is not None:
        mine = keys - lanes.first_own[:, None, None]
        on_path, distance = spec.tree_path(rows.path[:, :, None], rows.own[:, :, None], mine)
        keys = queries - distance
    found = spec.visible(queries, keys, lanes.seq_len[:, None, None], lanes.sight)
    return found if on_path is None else found & on_path, keys


def sees_whole(lanes: Lanes, token: jax.Array, count: int, call: calls.Call) -> jax.Array:
    """bool [P]: whether every row of a lane sees all `count` keys from `token` on.

    Its four corners see each other then. What only a visible end lets rows see is left to the mask.
    """
    run = lanes.run
    whole = (token >= run.start) & (token + count <= run.end)
    ends = (token, token + (count - 1))
    if run.columns is not None:
        ends = tuple(key_positions(run, key, 1, call.block_size)[:, 0] for key in ends)
        whole &= (ends[0] >= lanes.start) & (ends[1] < lanes.end)
    if lanes.rows.path is not None:  # among the query tokens the path decides
        whole &= ends[1] < lanes.first_own
    queries = jnp.stack([lanes.first, lanes.last], axis=1)[:, :, None]
    keys = jnp.stack(ends, axis=1)[:, None]
    sight = lanes.sight._replace(visible_end=None)
    corners = spec.visible(queries, keys, lanes.seq_len[:, None, None], sight)
    return whole & corners.all(axis=(1, 2))


def position_bias(table: jax.Array, lanes: Lanes, keys: jax.Array, call: calls.Call) -> jax.Array:
    """float32 [P, K, R, C]: what the table [H, 2 E + 1] adds where rows meet `keys` [P, R or 1, C].

    In a tree, and among selected blocks, every distance is looked up, once per query token and key
    for all heads of both: the table is turned to have them last.
    """
    rows = lanes.rows
    if rows.path is None and lanes.run.columns is None:
        return _bias_of_neighbours(table, rows, keys, call)
    queries = rows.positions[:, :: call.group, None]
    keys = keys if keys.shape[1] == 1 else keys[:, :: call.group]
    index = spec.relative_index(queries, keys, table.shape[1])
    bias = jnp.take(table.T, index, axis=0, mode="clip")  # [P, Q, C, H]
    lanes, tokens, count = index.shape
    bias = bias.reshape(lanes, tokens, count, call.num_kv_heads, call.group)
    bias = bias.transpose(0, 3, 1, 4, 2)
    return bias.reshape(lanes, call.num_kv_heads, tokens * call.group, count)


def _bias_of_neighbours(
    table: jax.Array, rows: Rows, keys: jax.Array, call: calls.Call
) -> jax.Array:
    """The same where query tokens follow one another, and keys [P, 1, C] do.

    Then there are but L = Q + C - 1 distances, and what a query adds is a run of theirs. Looking
    all Q x C up costs a prefill a fifth of its time; moving runs costs a twentieth.
    """
    num_lanes, num_rows = rows.positions.shape
    tokens, count = num_rows // call.group, keys.shape[2]
    length = tokens + count - 1
    reach = keys[:, 0, :1] + jnp.arange(length, dtype=jnp.int32)[None]
    index = spec.relative_index(rows.positions[:, -1:], reach, table.shape[1])
    heads = table.reshape(call.num_kv_heads, call.group, -1)
    strip = jnp.moveaxis(jnp.take(heads, index, axis=2, mode="clip"), 2, 0)  # [P, K, G, L]
    # Copies of the strip, each one number longer than it is, laid end to end and cut into rows of
    # L: a row begins one number further back in the strip than the row before it.
    copies = jnp.pad(strip, ((0, 0), (0, 0), (0, 0), (0, 1)))[:, :, :, None]
    copies = jnp.broadcast_to(copies, (*strip.shape[:3], tokens, length + 1))
    rolled = copies.reshape(*strip.shape[:3], -1)[..., : tokens * length]
    rolled = rolled.reshape(*strip.shape[:3], tokens, length)[..., tokens - 1 :]
    return rolled.swapaxes(2, 3).reshape(num_lanes, call.num_kv_heads, num_rows, count)
