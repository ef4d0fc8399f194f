"""Attention over keys distributed to several devices, for sequences with too many keys for one.

Devices along `context` (c of them) share a KV head. In a layer without a window, the token at
position p is on device p mod c: a block of S tokens has S / c on each device, under one id, so the
scheduler knows nothing about it (`jattn.blocks.ContextParallel`). Layers with a window keep all
their keys on every device, because they are few.

    q      all-gather over context        [T, H / (t c), D] -> [T, H / t, D]
    part   attention to the keys here, with their log-sum-exp
    out    all-to-all: a device gets the parts of its own heads, and merges them

This is meant for decode. A prompt's token attends as a sequence of its own, since its position
decides how many of the keys here it sees. This is correct, but reads the keys once per token.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jattn
import jattn.blocks as jb
from examples.models import parallel
from examples.models.parallel import CONTEXT


def deal(
    metadata: jattn.AttentionMetadata, positions: jax.Array, size: int
) -> jattn.AttentionMetadata:
    """Return the metadata with which one of `size` devices attends in a step.

    Args:
      metadata: of whole sequences, with the slots of the tokens that this device keeps.
      positions: int32 [T].
      size: devices along `context`.

    Returns: the same sequences if each has one token in the step, otherwise a sequence per token.
    """
    tables, seq_lens, starts = metadata.block_tables, metadata.seq_lens, metadata.query_start_loc
    if metadata.max_query_len != 1:
        num_seqs, tokens = seq_lens.shape[0], jnp.arange(positions.shape[0], dtype=jnp.int32)
        sequence = jnp.searchsorted(starts[1:], tokens, side="right").astype(jnp.int32)
        tables = tables.at[sequence].get(mode="clip")
        seq_lens = jnp.where(sequence < num_seqs, positions + 1, 0)
        starts = jnp.arange(positions.shape[0] + 1, dtype=jnp.int32)
    here = jb.local_lengths(seq_lens, jb.ContextParallel(size), rank=parallel.rank(CONTEXT))
    return jattn.AttentionMetadata(tables, here, starts, metadata.slot_mapping, 1)


def attend(
    query: jax.Array,
    pool: Any,
    metadata: jattn.AttentionMetadata,
    *,
    dealt: bool,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Compute `jattn.paged_attention` of this device's heads over keys that several devices keep.

    Args:
      query: [T, h, D], of this device's heads.
      pool: keys and values of the KV heads that devices along `context` share.
      metadata: of the step; from `deal` if the keys are distributed.
      dealt: whether they are; otherwise every device keeps all of them.
      sinks: [h] or None.
      return_lse: also return the log-sum-exp.
      options: of `jattn.paged_attention`.

    Returns: the output [T, h, V], and with `return_lse` the log-sum-exp [T, h].
    """
    num_tokens, num_local, _ = query.shape
    gather = functools.partial(jax.lax.all_gather, axis_name=CONTEXT, tiled=True)
    query, given = gather(query, axis=1), {**metadata.as_kwargs(), **options}
    if not dealt:
        sinks = None if sinks is None else gather(sinks, axis=0)
        found = jattn.paged_attention(query, *pool, sinks=sinks, return_lse=return_lse, **given)
        start = parallel.rank(CONTEXT) * num_local
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, num_local, axis=1), found
        )
    part = jattn.paged_attention(query, *pool, return_lse=True, **given)

    def of_local_heads(x: jax.Array) -> jax.Array:
        """Return all devices' parts of this one's heads, [c, T, h, ...]."""
        by_device = x.reshape(num_tokens, -1, num_local, *x.shape[2:]).swapaxes(0, 1)
        return jax.lax.all_to_all(by_device, CONTEXT, split_axis=0, concat_axis=0)

    merged = functools.reduce(
        lambda a, b: jattn.merge_attention_states(*a, *b),
        zip(*map(of_local_heads, part), strict=True),
    )
    if sinks is not None:  # once, and without a value
        out, lse = merged
        nothing = (jnp.zeros_like(out), jnp.broadcast_to(sinks.astype(lse.dtype)[None], lse.shape))
        merged = jattn.merge_attention_states(out, lse, *nothing)
    return merged if return_lse else merged[0]
