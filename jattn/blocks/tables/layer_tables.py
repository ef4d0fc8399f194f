"""One pool for all layers: block tables and slots shifted to a layer's share of it.

Layer l owns the blocks `l * N .. l * N + N - 1` of a pool [L * N, K, S, D], so one table serves
every layer,

    layer_block_tables(tables, l) = tables + l * N,

and the pool can be the carry of a scan over layers: donated, it is updated in place. A cache
stacked as [L, N, ...] and scanned over is copied instead, once in and once out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn.blocks.arguments import Integers, as_int32
from jattn.checks import checking
from jattn.integers import INT32_MAX, require_int, with_python_ints


@with_python_ints
def layer_block_tables(
    block_tables: Integers, layer: int | jax.Array, blocks_per_layer: int
) -> jax.Array:
    """Return the block ids of a layer in the pool of all layers.

    Args:
      block_tables: int32 of up to four axes, ids within a layer.
      layer: int or int32 [], which may be traced (the index of a scan).
      blocks_per_layer: N. Static. `check_slot_range(N, S, num_layers=L)` refuses a pool whose
        slots int32 cannot hold.

    Returns: int32, of the same shape. An id outside 0..N-1 becomes -1, since it could otherwise
      name a block of another layer. So do all ids if `layer` is negative, and an id that int32
      cannot hold once it is shifted.
    Raises: `ValueError` for wrong dtypes or shapes, or `blocks_per_layer` below 1.

    >>> layer_block_tables([[5, 2, 0]], layer=3, blocks_per_layer=64).tolist()
    [[197, 194, 192]]
    """
    return _shift("layer_block_tables", "block_tables", block_tables, layer, blocks_per_layer, 1)


@with_python_ints
def layer_slot_mapping(
    slot_mapping: Integers, layer: int | jax.Array, blocks_per_layer: int, block_size: int
) -> jax.Array:
    """Return the slots of a layer in the pool of all layers; padding stays padding.

    Args:
      slot_mapping: int32 of up to four axes, slots within a layer, -1 for none.
      layer, blocks_per_layer: as for `layer_block_tables`.
      block_size: S. Static.

    Returns: int32, of the same shape. A slot outside 0..N*S-1 becomes -1, since it would otherwise
      name a slot of another layer. So do all slots if `layer` is negative, and a slot that int32
      cannot hold once it is shifted.
    Raises: `ValueError` for wrong dtypes or shapes, or `blocks_per_layer` or `block_size` below 1.

    >>> layer_slot_mapping([36, -1], layer=3, blocks_per_layer=64, block_size=16).tolist()
    [3108, -1]
    """
    with checking("layer_slot_mapping") as problems:
        require_int(problems, "block_size", block_size, 1)
    return _shift(
        "layer_slot_mapping", "slot_mapping", slot_mapping, layer, blocks_per_layer, block_size
    )


def _shift(
    where: str,
    argument: str,
    values: Integers,
    layer: int | jax.Array,
    blocks_per_layer: int,
    size: int,
) -> jax.Array:
    with checking(where) as problems:
        values = as_int32(problems, argument, values, ranks=tuple(range(5)))
        layer = as_int32(problems, "layer", layer, ranks=(0,))
        require_int(problems, "blocks_per_layer", blocks_per_layer, 1)
    end = blocks_per_layer * size
    inside = (values >= 0) & (values <= min(end - 1, INT32_MAX))
    # `layer * end` may wrap around, to the blocks of another layer.
    good = inside & (layer >= 0) & (layer <= INT32_MAX // end)
    first = jnp.where(good, layer, 0) * min(end, INT32_MAX)
    return jnp.where(good & (values <= INT32_MAX - first), values + first, -1)
