"""One pool for all layers: block tables and slots shifted to a layer's share of it.

With layer l owning the blocks `l * N .. l * N + N - 1` of a pool [L * N, K, S, D], the same table
serves every layer,

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
    """Block ids of a layer, in the pool of all layers.

    Args:
      block_tables: int32 [..., M], ids within a layer.
      layer: int or int32 [], which may be traced (the index of a scan).
      blocks_per_layer: N. Static. `check_slot_range(N, S, num_layers=L)` refuses a pool whose
        slots int32 cannot hold.

    Returns: int32, of the same shape. An id outside 0..N-1 becomes -1: any other could be a
      block of another layer. So does an id that int32 cannot hold once it is shifted.
    """
    return _shift("layer_block_tables", "block_tables", block_tables, layer, blocks_per_layer, 1)


@with_python_ints
def layer_slot_mapping(
    slot_mapping: Integers, layer: int | jax.Array, blocks_per_layer: int, block_size: int
) -> jax.Array:
    """Slots of a layer, in the pool of all layers; padding stays padding.

    Args:
      slot_mapping: int32 [...], slots within a layer, -1 for none.
      layer, blocks_per_layer: as for `layer_block_tables`.
      block_size: S. Static.

    Returns: int32, of the same shape. A slot outside 0..N*S-1 becomes -1: shifted, it would name
      another layer's slot. So does a slot that int32 cannot hold once it is shifted.
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
