"""Latent attention (MLA): one vector per token, whose first numbers are its value."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jattn import api, cache, checks, formats, metadata
from jattn.call import arrays
from jattn.call.arguments import Number
from jattn.integrations.rpa.arguments import (
    Numbers,
    check_batch,
    check_common,
    product,
    up_to_vectors,
    widened,
)


def mla_ragged_paged_attention(
    ql_nope: jax.Array,
    q_pe: jax.Array,
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    sm_scale: Number = 1.0,
    sliding_window: int | jax.Array | None = None,
    soft_cap: Number | None = None,
    mask_value: float | None = None,
    q_scale: Number | None = None,
    k_scale: Number | None = None,
    v_scale: Number | None = None,
    chunk_prefill_size: int | None = None,
    num_kv_pages_per_block: tuple[int, int, int] | int | None = None,
    num_queries_per_block: tuple[int, int, int] | int | None = None,
    vmem_limit_bytes: int | None = None,
    decode_batch_size: int = 1,
    mixed_q_split: int = 1,
    s_dtype: DTypeLike = jnp.bfloat16,
    transpose_kv_cache: bool = False,
    two_step_flash_attention: bool = True,
    p_same_dtype_as_v: bool = True,
    debug_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Write a step's latents, and attend, like version 2 of tpu-inference's MLA kernel.

    Each token has one vector, whose latent is its value.

    Args:
      ql_nope: [H, T, L], queries in the latent space.
      q_pe: [T, H, R], their rotated part.
      new_kv_c, new_k_pe: [T, L] and [T, R], in the cache's dtype.
      cache_kv: [N, S / pack, pack, L and R each up to a multiple of 128]; donated.
      q_scale, k_scale: the logits are multiplied by them; queries are not scaled.
      v_scale: the output is multiplied by it.
      transpose_kv_cache: must be False: pages with tokens last are not supported.
      kv_lens, page_indices, cu_q_lens, distribution, sm_scale, sliding_window, soft_cap,
        mask_value, debug_mode: as in `ragged_paged_attention`.
      chunk_prefill_size, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes,
        decode_batch_size, mixed_q_split, s_dtype, two_step_flash_attention, p_same_dtype_as_v:
        ignored; they tune the original kernel. Logits and weights are float32 here.

    Returns:
      out [H, T, L] in the queries' dtype, and the cache.

    Raises:
      ValueError, UnsupportedError: as `ragged_paged_attention`.
    """
    with checks.checking("mla_ragged_paged_attention") as problems:
        problems.require(
            not transpose_kv_cache,
            "transpose_kv_cache",
            "True",
            "False: jattn would have to copy pages with their tokens last to read them",
        )
    tokens_first = jnp.swapaxes(ql_nope, 0, 1) if np.ndim(ql_nope) == 3 else ql_nope
    out, cache_kv = _mla(
        "mla_ragged_paged_attention",
        *(tokens_first, q_pe, new_kv_c, new_k_pe, cache_kv),
        *(kv_lens, page_indices, cu_q_lens, distribution),
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        mask_value=mask_value,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        debug_mode=debug_mode,
    )
    return jnp.swapaxes(out, 0, 1), cache_kv


def mla_ragged_paged_attention_v1(
    ql_nope: jax.Array,
    q_pe: jax.Array,
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    sm_scale: Number = 1.0,
    sliding_window: int | jax.Array | None = None,
    soft_cap: Number | None = None,
    mask_value: float | None = None,
    q_scale: Number | None = None,
    k_scale: Number | None = None,
    v_scale: Number | None = None,
    chunk_prefill_size: int | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    debug_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`mla_ragged_paged_attention` with tokens first, like version 1 of tpu-inference's kernel.

    Args:
      ql_nope: [T, H, L].
      q_pe, new_kv_c, new_k_pe, cache_kv, kv_lens, page_indices, cu_q_lens, distribution, sm_scale,
        sliding_window, soft_cap, mask_value, q_scale, k_scale, v_scale, chunk_prefill_size,
        num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes, debug_mode: as in
        `mla_ragged_paged_attention`.

    Returns:
      out [T, H, L] in the queries' dtype, and the cache.

    Raises:
      ValueError, UnsupportedError: as `ragged_paged_attention`.
    """
    return _mla(
        "mla_ragged_paged_attention_v1",
        *(ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv),
        *(kv_lens, page_indices, cu_q_lens, distribution),
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        mask_value=mask_value,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        debug_mode=debug_mode,
    )


def _mla(
    where: str,
    ql_nope: jax.Array,
    q_pe: jax.Array,
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    sm_scale: Number,
    sliding_window: int | jax.Array | None,
    soft_cap: Number | None,
    mask_value: float | None,
    q_scale: Number | None,
    k_scale: Number | None,
    v_scale: Number | None,
    debug_mode: bool,
) -> tuple[jax.Array, jax.Array]:
    """Check and run either version, with tokens first."""
    with checks.checking(where) as problems:
        check_common(problems, sliding_window, soft_cap, mask_value, debug_mode)
        check_batch(problems, kv_lens, page_indices, cu_q_lens, distribution)
        has_cache = problems.expect(arrays.is_array(cache_kv), "cache_kv", cache_kv, "an array")
        if problems.expect(
            arrays.matches(ql_nope, jnp.floating, (None, None, None)),
            "ql_nope",
            ql_nope,
            "queries with three axes: tokens, heads and latent, with heads first in version 2",
        ):
            tokens, heads, latent = ql_nope.shape
            has_rope = problems.expect(
                arrays.matches(q_pe, jnp.floating, (tokens, heads, None)),
                "q_pe",
                q_pe,
                f"floats [T, H, R], T = {tokens}, H = {heads}",
            )
            if has_rope and has_cache:
                rope, dtype = q_pe.shape[2], cache_kv.dtype
                for name, x, size in (("new_kv_c", new_kv_c, latent), ("new_k_pe", new_k_pe, rope)):
                    problems.expect(
                        arrays.matches(x, jnp.floating, (tokens, size)) and x.dtype == dtype,
                        name,
                        x,
                        f"{np.dtype(dtype).name}[{tokens}, {size}]",
                    )
                width = up_to_vectors(latent) + up_to_vectors(rope)
                problems.expect(
                    len(cache_kv.shape) == 4 and cache_kv.shape[3] == width,
                    "cache_kv",
                    cache_kv,
                    f"[N, S / pack, pack, {width}]",
                )
    numbers = Numbers.of(
        scale=product(sm_scale, q_scale, k_scale),
        v_scale=v_scale,
        sliding_window=sliding_window,
        logits_soft_cap=soft_cap,
    )
    return _latent(
        *(cache_kv, ql_nope, q_pe, new_kv_c, new_k_pe),
        *(page_indices, kv_lens, cu_q_lens, distribution[2]),
        numbers,
    )


@functools.partial(jax.jit, donate_argnames="cache_kv")
def _latent(
    cache_kv: jax.Array,
    ql_nope: jax.Array,
    q_pe: jax.Array,
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    page_indices: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    numbers: Numbers,
) -> tuple[jax.Array, jax.Array]:
    tokens, _, latent = ql_nope.shape
    pages, outer, pack, width = cache_kv.shape
    first = up_to_vectors(latent)

    def join(a: jax.Array, b: jax.Array) -> jax.Array:
        padding = [(0, 0)] * (a.ndim - 1) + [(0, first - latent)]
        return jnp.concatenate([jnp.pad(a, padding), b], axis=-1)

    # Axes of length 1 stay: XLA copies a donated array that loses them.
    data = cache_kv if pack == 1 else cache_kv.reshape(pages, outer * pack, width)
    dim = first + q_pe.shape[-1]
    pool = formats.KVRows(data, 1, dim, width, 0, latent)
    batch = metadata.AttentionMetadata.from_arrays(
        *(page_indices, kv_lens, cu_q_lens),
        num_tokens=tokens,
        block_size=outer * pack,
        num_seqs=num_seqs,
    )
    new = widened(join(new_kv_c, new_k_pe)[:, None])
    pool, _ = cache.update_kv_cache(pool, None, new, None, batch.slot_mapping)
    query = join(ql_nope, q_pe.astype(ql_nope.dtype))
    query = widened(query)
    v_scale = numbers.v_scale
    out = api.paged_attention(
        *(query, pool, None),
        **batch.as_kwargs(),
        scale=numbers.scale,
        sliding_window=numbers.sliding_window,
        logits_soft_cap=numbers.logits_soft_cap,
        out_dtype=query.dtype if v_scale is None else jnp.float32,
    )
    out = out if v_scale is None else out * v_scale
    return out.astype(ql_nope.dtype), pool.data.reshape(cache_kv.shape)
