"""sglang-jax's writes to its caches outside attention, without TPUs.

Draft models for blocks of tokens (DFLASH) make keys and values from the served model's hidden
states, without queries. The host writes them with a TPU kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


def update_fused_kv_cache_vectorized(
    fused_kv: jax.Array,
    loc: jax.Array,
    kv_cache: jax.Array,
    page_size: int,
    kv_partition_axis: str = "tensor",
    data_partition_axis: str = "data",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Write rows of keys and values into their slots, on each device its own.

    Args:
      fused_kv: [T, 1, 2 K / pack, pack, D].
      loc: int32 [T]; the slot of each row, -1 for none.
      kv_cache: [N, S, 2 K / pack, pack, D].
      page_size: ignored.
      kv_partition_axis, data_partition_axis: axes of the mesh, of heads and of tokens and pages.
      mesh: the devices.

    Returns: the cache.
    """
    del page_size
    rows = P(data_partition_axis, None, kv_partition_axis, None, None)
    in_specs = (rows, P(data_partition_axis), rows)
    write = jax.shard_map(write_rows, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False)
    return write(fused_kv, loc, kv_cache)


def write_rows(fused_kv: jax.Array, loc: jax.Array, kv_cache: jax.Array) -> jax.Array:
    """One device's part of `update_fused_kv_cache_vectorized`."""
    slots = kv_cache.reshape(-1, *kv_cache.shape[2:])
    where = jnp.where(loc < 0, slots.shape[0], loc)
    return slots.at[where].set(fused_kv[:, 0], mode="drop").reshape(kv_cache.shape)
