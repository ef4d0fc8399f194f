"""Disaggregated prefill and decode without TPUs: one vLLM server fetches another one's blocks.

The host's `TPUConnector` reads blocks of keys and values from one server's caches, sends them
through JAX's transfer server, and writes them to the other's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def enable() -> None:
    """Make XLA write fetched blocks, before the step that reads them.

    In vLLM 0.32 a connector starts its loads after the forward pass, unless the scheduler marks the
    step as one that reads them. The host's connector starts to fetch in one step, and writes what
    has arrived in a later one. That step reads it but is not marked, so the hook marks every step.

    Raises:
      ImportError: tpu-inference is not installed, or is another version.
    """
    from tpu_inference.distributed import kv_transfer
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    kv_transfer.multi_layer_copy = copy_blocks
    around_step = _loads_first(KVConnectorModelRunnerMixin._get_kv_connector_output)
    KVConnectorModelRunnerMixin._get_kv_connector_output = staticmethod(around_step)


def _loads_first(around_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap vLLM's context of a step, to start loads before the step."""

    @functools.wraps(around_step)
    def around(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler_output.has_sync_kv_loads = True
        return around_step(scheduler_output, *args, **kwargs)

    return around


def copy_blocks(
    *,
    src_array: Sequence[jax.Array],
    dest_array: Sequence[jax.Array],
    src_offsets: jax.Array,
    dest_offsets: jax.Array,
    chunk_sizes: jax.Array,
    num_chunks: jax.Array | None = None,
    **placement: object,
) -> list[jax.Array]:
    """Return the layers' caches with runs of blocks written; the given caches are donated.

    Args:
      src_array: blocks [n, ...] per layer.
      dest_array: a cache [N, ...] per layer.
      src_offsets, dest_offsets, chunk_sizes: int32 [C]. Run c copies `chunk_sizes[c]` blocks, from
        `src_offsets[c]` on, to `dest_offsets[c]` and on.
      num_chunks: int32 [1]; only the first `num_chunks[0]` runs are copied. None for all.
      **placement: meshes and shardings, which the arrays carry themselves.
    """
    del placement
    count = jnp.asarray(len(src_offsets) if num_chunks is None else num_chunks[0], jnp.int32)
    given = list(src_array), src_offsets, dest_offsets, chunk_sizes, count
    return _put_blocks(list(dest_array), *given)


@functools.partial(jax.jit, donate_argnums=0)
def _put_blocks(
    caches: list[jax.Array],
    blocks: list[jax.Array],
    sources: jax.Array,
    targets: jax.Array,
    sizes: jax.Array,
    count: jax.Array,
) -> list[jax.Array]:
    run = jnp.arange(len(sources), dtype=jnp.int32)
    offset = jnp.arange(len(blocks[0]), dtype=jnp.int32)[:, None] - sources[None]  # [n, C]
    inside = (offset >= 0) & (offset < sizes[None]) & (run < count)[None]
    ids = jnp.sum(jnp.where(inside, targets[None] + offset, 0), axis=1)
    ids = jnp.where(jnp.any(inside, axis=1), ids, len(caches[0]))  # in no run: dropped
    return [cache.at[ids].set(new, mode="drop") for cache, new in zip(caches, blocks, strict=True)]
