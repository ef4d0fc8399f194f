"""Prompts that one server of vLLM reads and another one continues, without TPUs.

The host's `TPUConnector` takes blocks of keys and values out of one server's caches, sends them by
JAX's transfer server, and puts them into the other's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def enable() -> None:
    """Have blocks put in by XLA, and before the step that reads them.

    vLLM 0.32 has a connector start its loads after the forward pass, unless the scheduler says that
    the step reads what they bring. The host's connector begins to fetch in one step and puts in
    what has come in a later one, which reads it; that step is not said to.

    Raises:
      ImportError: tpu-inference is not installed, or is another version.
    """
    from tpu_inference.distributed import kv_transfer
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    kv_transfer.multi_layer_copy = copy_blocks
    around_step = _loads_first(KVConnectorModelRunnerMixin._get_kv_connector_output)
    KVConnectorModelRunnerMixin._get_kv_connector_output = staticmethod(around_step)


def _loads_first(around_step: Callable[..., Any]) -> Callable[..., Any]:
    """The host's context of a step, whose loads start before it."""

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
    """The layers' caches with runs of blocks written; the caches that are given are donated.

    Args:
      src_array: of each layer, [n, ...] blocks.
      dest_array: of each layer, its cache [N, ...].
      src_offsets, dest_offsets, chunk_sizes: int32 [C]. Run c is `chunk_sizes[c]` blocks, from
        `src_offsets[c]` on, to `dest_offsets[c]` and on.
      num_chunks: int32 [1], how many of the runs are meant, the first ones; None: all.
      **placement: meshes and shardings of the arguments, which they bring with them.
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
    ids = jnp.where(jnp.any(inside, axis=1), ids, len(caches[0]))  # what is in no run is dropped
    return [cache.at[ids].set(new, mode="drop") for cache, new in zip(caches, blocks, strict=True)]
