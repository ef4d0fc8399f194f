"""Which keys the rows of work items see, and what positions add to their logits.

`jattn.spec` defines visibility; these functions ask it about `P` work items at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn import call as calls
from jattn import spec
from jattn.cpu.xla.work_items import QueryRows, WorkItems, key_positions


def seen(items: WorkItems, k_pos: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`(bool [P, R, C], positions [P, R or 1, C])`: whether rows see the keys at `k_pos`."""
    rows, keys = items.rows, k_pos[:, None, :]
    queries, seq_len = rows.positions[:, :, None], items.seq_len[:, None, None]
    if rows.path is None or rows.query_index is None:
        return spec.visible(queries, keys, seq_len, rows.sight), keys
    index = keys - items.sequence_first[:, None, None]
    on_path, distance = spec.tree_path(rows.path[:, :, None], rows.query_index[:, :, None], index)
    keys = queries - distance
    return on_path & spec.visible(queries, keys, seq_len, rows.sight), keys


def sees_whole(items: WorkItems, token: jax.Array, count: int, call: calls.Call) -> jax.Array:
    """bool [P]: whether every row of a work item sees all `count` keys from `token` on.

    It does if its four corners do. Keys that only a visible end lets rows see are left to the mask.
    """
    run = items.run
    whole = (token >= run.start) & (token + count <= run.end)
    keys = jnp.stack([token, token + (count - 1)], axis=1)
    if run.columns is not None:
        ends = (key_positions(run, keys[:, i], 1, call.block_size) for i in range(2))
        keys = jnp.concatenate(tuple(ends), axis=1)
        whole &= (keys[:, 0] >= run.first_key) & (keys[:, 1] < run.end_key)
    if items.rows.path is not None:  # between query tokens the path decides
        whole &= keys[:, 1] < items.sequence_first
    queries = jnp.stack([items.first, items.last], axis=1)[:, :, None]
    sight = items.rows.sight._replace(visible_end=None)
    corners = spec.visible(queries, keys[:, None], items.seq_len[:, None, None], sight)
    return whole & corners.all(axis=(1, 2))


def position_bias(
    table: jax.Array, items: WorkItems, keys: jax.Array, call: calls.Call
) -> jax.Array:
    """float32 [P, K, R, C]: what the table [H, 2 E + 1] adds for rows and `keys` [P, R or 1, C].

    In a tree, and with selected blocks, every distance is looked up, once per query token and key
    for all heads: the table is transposed to have heads last.
    """
    rows = items.rows
    if rows.path is None and items.run.columns is None:
        return _bias_of_neighbours(table, rows, keys, call)
    queries = rows.positions[:, :: call.group, None]
    keys = keys if keys.shape[1] == 1 else keys[:, :: call.group]
    index = spec.relative_index(queries, keys, table.shape[1])
    bias = jnp.take(table.T, index, axis=0, mode="clip")  # [P, Q, C, H]
    num_items, tokens, count = index.shape
    bias = bias.reshape(num_items, tokens, count, call.num_kv_heads, call.group)
    bias = bias.transpose(0, 3, 1, 4, 2)
    return bias.reshape(num_items, call.num_kv_heads, tokens * call.group, count)


def _bias_of_neighbours(
    table: jax.Array, rows: QueryRows, keys: jax.Array, call: calls.Call
) -> jax.Array:
    """The same where query tokens are consecutive, and so are the keys [P, 1, C].

    Then there are only L = Q + C - 1 distances, and each query token takes a run of them. Looking
    up all Q x C costs a prefill a fifth of its time; moving runs costs a twentieth.
    """
    num_items, num_rows = rows.positions.shape
    tokens, count = num_rows // call.group, keys.shape[2]
    length = tokens + count - 1
    reach = keys[:, 0, :1] + jnp.arange(length, dtype=jnp.int32)[None]
    index = spec.relative_index(rows.positions[:, -1:], reach, table.shape[1])
    heads = table.reshape(call.num_kv_heads, call.group, -1)
    strip = jnp.moveaxis(jnp.take(heads, index, axis=2, mode="clip"), 2, 0)  # [P, K, G, L]
    # Copies of the strip, each padded by one number, are laid end to end and cut into rows of L:
    # each row begins one number further back in the strip than the row before it.
    copies = jnp.pad(strip, ((0, 0), (0, 0), (0, 0), (0, 1)))[:, :, :, None]
    copies = jnp.broadcast_to(copies, (*strip.shape[:3], tokens, length + 1))
    rolled = copies.reshape(*strip.shape[:3], -1)[..., : tokens * length]
    rolled = rolled.reshape(*strip.shape[:3], tokens, length)[..., tokens - 1 :]
    return rolled.swapaxes(2, 3).reshape(num_items, call.num_kv_heads, num_rows, count)
