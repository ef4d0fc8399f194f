"""One attention layer of a host that stores each head's key and value next to each other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jattn import api, cache, checks, formats, metadata


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    kv_cache: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    distribution: jax.Array,
    sinks: jax.Array | None,
    *,
    write: bool,
    is_causal: bool = True,
    sliding_window: int | jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Write a step's keys and values, and attend: one layer on one device.

    Args:
      query: [T, H, D'], with D' at most D.
      key, value: [T, K, D'].
      kv_cache: [N, S, ..., D], donated by the host: one pair of key and value per KV head.
      seq_lens: int32 [B]; entries past this step's sequences may be anything.
      block_tables: int32 [B, M] or [B * M].
      query_start_loc: int32 [B + 1]; entries past this step's sequences may be anything.
      distribution: int32 [3]; the last number is how many sequences this step has.
      sinks: [H], or None.
      write: whether to write key and value. False if they are in the cache already, where another
        layer has written them.
      is_causal, sliding_window: as in `jattn.paged_attention`; a window needs a causal mask.
      **options: other numbers of `jattn.paged_attention`, or None.

    Returns:
      `(out [T, H, D'], kv_cache)`.

    Raises:
      ValueError: if there is a window but no causal mask.
    """
    with checks.checking("attention of a layer") as problems:
        check_window(problems, sliding_window, is_causal, "is_causal")
    batch = metadata.AttentionMetadata.from_arrays(
        *(block_tables, seq_lens, query_start_loc),
        num_tokens=query.shape[0],
        block_size=kv_cache.shape[1],
        distribution=distribution,
    )
    pool = formats.KVRows.pairs(kv_cache, key.shape[1], query.shape[2])
    if write:
        pool, _ = cache.update_kv_cache(pool, None, key, value, batch.slot_mapping)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
    out = api.paged_attention(
        *(query, pool, None),
        **batch.as_kwargs(),
        is_causal=is_causal,
        sliding_window=sliding_window,
        sinks=sinks,
        **options,
    )
    return out, pool.data


def check_window(
    problems: checks.Problems,
    sliding_window: int | jax.Array | None,
    is_causal: bool,
    causal: str,
) -> None:
    """Report a window without a causal mask.

    jattn would then hide keys before and after a query; hosts hide only those before it.

    Args:
      causal: the host's name for `is_causal`.
    """
    problems.require(
        is_causal or sliding_window is None,
        "sliding_window",
        f"{sliding_window} with {causal}=False",
        "None: without a causal mask jattn would also hide keys after a query",
    )
