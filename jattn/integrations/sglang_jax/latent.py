"""sglang-jax's latent attention (MLA) without TPUs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TypeVar

import jax

from jattn.integrations import rpa
from jattn.integrations.sglang_jax import tables

Size = TypeVar("Size", int, float)


@contextlib.contextmanager
def backend() -> Iterator[None]:
    """Let the host make its backend for latent attention without a TPU.

    The backend asks a TPU for its memory size unless it is given one.
    """
    from sgl_jax.srt.layers.attention import mla_backend

    made = mla_backend.MLAAttentionBackend
    mla_backend.MLAAttentionBackend = functools.partial(made, vmem_limit_bytes=0)
    try:
        yield
    finally:
        mla_backend.MLAAttentionBackend = made


def mla_ragged_paged_attention(
    ql_nope: jax.Array,
    q_pe: jax.Array,
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    distribution: jax.Array,
    *,
    max_seq_len: int,
    sm_scale: float | jax.Array = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    **of_the_kernel: object,
) -> tuple[jax.Array, jax.Array]:
    """Write a step's latents, then attend: sglang-jax calls this in every layer with latents.

    Args:
      ql_nope: [T, H, L], queries in the latent space.
      q_pe: [T, H, R], their rotated part.
      new_kv_c, new_k_pe: [T, L] and [T, R].
      cache_kv: [N, S / pack, pack, L and R each up to a multiple of 128].
      kv_lens: int32 [B]; keys of each sequence, including this step's.
      page_indices: int32 [P]; the pages of all sequences, one sequence after another.
      cu_q_lens: int32 [B + 1].
      cu_kv_lens: int32 [B + 1]; where in `page_indices` a sequence's pages begin, times S.
      distribution: int32 [3]; the last one is the number of sequences.
      max_seq_len: static; the most keys that a sequence has.
      sm_scale, sliding_window, soft_cap: of the layer; a window or cap of 0 or less is none.
      **of_the_kernel: block sizes; ignored.

    Returns:
      `(out [T, H, L], cache_kv)`.
    """
    del of_the_kernel
    page_size = cache_kv.shape[1] * cache_kv.shape[2]
    block_tables = tables.tables_of(page_indices, cu_kv_lens, page_size, max_seq_len)
    return rpa.mla_ragged_paged_attention_v1(
        *(ql_nope, q_pe, new_kv_c.astype(cache_kv.dtype), new_k_pe.astype(cache_kv.dtype)),
        *(cache_kv, kv_lens, block_tables.reshape(-1), cu_q_lens, distribution),
        sm_scale=sm_scale,
        sliding_window=positive(sliding_window),
        soft_cap=positive(soft_cap),
    )


def positive(x: Size | None) -> Size | None:
    """Return a window or cap, or None if it is 0 or -1, which mean none in the host."""
    return x if x and x > 0 else None
