"""Ragged paged attention over keys and values that are stored side by side in one array."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jattn import api, cache, checks, formats, metadata
from jattn.call import arrays
from jattn.call.arguments import Number
from jattn.integers import ceil_div
from jattn.integrations.layer import check_window
from jattn.integrations.rpa.arguments import (
    VECTOR_SIZE,
    Numbers,
    check_batch,
    check_cache,
    check_common,
    check_step,
    packing,
    product,
    up_to_vectors,
    widened,
)


def ragged_paged_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    skip_kv_mask: bool = False,
    sm_scale: Number = 1.0,
    sliding_window: int | jax.Array | None = None,
    soft_cap: Number | None = None,
    out_dtype: DTypeLike | None = None,
    mask_value: float | None = None,
    q_scale: Number | None = None,
    k_scale: Number | None = None,
    v_scale: Number | None = None,
    chunk_prefill_size: int | None = None,
    d_block_sizes: tuple[int, int, int, int] | None = None,
    p_block_sizes: tuple[int, int, int, int] | None = None,
    m_block_sizes: tuple[int, int, int, int] | None = None,
    vmem_limit_bytes: int | None = None,
    debug_mode: bool = False,
    disable_bounds_checks: bool = True,
    disable_semaphore_checks: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Write a step's keys and values, and attend, like version 3 of tpu-inference's kernel.

        out = softmax(soft_cap(sm_scale * q_scale * k_scale * q k^T)) v * v_scale

    Args:
      queries: [T, H, D].
      keys, values: [T, K, D], in the cache's dtype: the caller quantizes them.
      kv_cache: [N, S, ceil(2 K / pack), pack, D up to a multiple of 128], with pack numbers in 32
        bits; donated.
      kv_lens: int32 [B]; the number of keys of each sequence, including this step's.
      page_indices: int32 [B * M].
      cu_q_lens: int32 [B + 1].
      distribution: int32 [3]; the last number is how many of the B rows are sequences.
      use_causal_mask: False if queries see all keys of their sequence.
      update_kv_cache: False to write nothing and attend to what the cache holds.
      skip_kv_mask: a promise of the caller, only without a causal mask; keys past a sequence's
        length are masked all the same.
      sm_scale, soft_cap: numbers.
      sliding_window: the number of keys that a query sees, including its own. Refused without a
        causal mask, where the original hides only keys before a query.
      out_dtype: None means float32 for float32 queries, and bfloat16 for others.
      mask_value: None, or any number that masks.
      q_scale: queries are divided by it and rounded to the cache's dtype.
      k_scale, v_scale: stored numbers are multiplied by them.
      debug_mode: must be False.
      chunk_prefill_size, d_block_sizes, p_block_sizes, m_block_sizes, vmem_limit_bytes,
        disable_bounds_checks, disable_semaphore_checks: ignored; they tune the original kernel.

    Returns:
      out [T, H, D], and the cache.

    Raises:
      ValueError: names every argument that does not fit.
      UnsupportedError: if no implementation takes the call on this machine.

    Example:
      >>> import jax.numpy as jnp
      >>> from jattn.integrations import rpa
      >>> new, lens = jnp.ones((2, 2, 128)), jnp.array([17, 0], jnp.int32)
      >>> out, pool = rpa.ragged_paged_attention(
      ...     jnp.ones((2, 4, 128)), new, new, jnp.zeros((8, 16, 4, 1, 128)), lens,
      ...     jnp.array([3, 5, 0, 0]), jnp.array([0, 1, 1]), jnp.array([1, 1, 1]))
      >>> out.shape, float(pool[5, 0].min()), float(pool[5, 1:].max())
      ((2, 4, 128), 1.0, 0.0)
    """
    with checks.checking("ragged_paged_attention") as problems:
        check_common(problems, sliding_window, soft_cap, mask_value, debug_mode)
        _check_masks(problems, sliding_window, use_causal_mask, skip_kv_mask)
        check_step(problems, queries, keys, values, kv_cache)
        check_batch(problems, kv_lens, page_indices, cu_q_lens, distribution)
        if not problems.found:
            heads, dim = keys.shape[1:]
            pack = packing(kv_cache.dtype)
            check_cache(
                problems,
                kv_cache,
                (ceil_div(2 * heads, pack), pack, up_to_vectors(dim)),
                "[N, S, ceil(2 K / pack), pack, D up to a multiple of 128]",
            )
    numbers = Numbers.of(
        scale=product(sm_scale, q_scale),
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sliding_window=sliding_window,
        logits_soft_cap=soft_cap,
    )
    if out_dtype is None:
        out_dtype = jnp.float32 if queries.dtype == jnp.float32 else jnp.bfloat16
    return _ragged(
        kv_cache,
        queries,
        *(keys, values, page_indices, kv_lens, cu_q_lens, distribution[2]),
        numbers,
        width=2 * kv_cache.shape[-1],
        value_start=kv_cache.shape[-1],
        is_causal=use_causal_mask,
        write=update_kv_cache,
        out_dtype=np.dtype(out_dtype),
    )


def _check_masks(
    problems: checks.Problems,
    sliding_window: int | jax.Array | None,
    use_causal_mask: bool,
    skip_kv_mask: bool,
) -> None:
    """Report a window without a causal mask, and `skip_kv_mask` with one."""
    check_window(problems, sliding_window, use_causal_mask, "use_causal_mask")
    problems.require(
        not (use_causal_mask and skip_kv_mask),
        "skip_kv_mask",
        "True with use_causal_mask=True",
        "False",
    )


def ragged_paged_attention_hd64(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    attention_sink: jax.Array | None = None,
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
    """`ragged_paged_attention` for head size 64, with a key and its value in one row of 128.

    Args:
      kv_cache: [N, S, ceil(K / pack), pack, 128]; donated.
      attention_sink: float [H]; a logit per head that only joins the denominator.
      queries, keys, values, kv_lens, page_indices, cu_q_lens, distribution, sm_scale,
        sliding_window, soft_cap, mask_value, q_scale, k_scale, v_scale, debug_mode: as in
        `ragged_paged_attention`.
      chunk_prefill_size, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes: ignored;
        they tune the original kernel.

    Returns:
      out [T, H, 64] in the queries' dtype, and the cache.

    Raises:
      ValueError, UnsupportedError: as `ragged_paged_attention`.
    """
    with checks.checking("ragged_paged_attention_hd64") as problems:
        check_common(problems, sliding_window, soft_cap, mask_value, debug_mode)
        check_step(problems, queries, keys, values, kv_cache)
        check_batch(problems, kv_lens, page_indices, cu_q_lens, distribution)
        if not problems.found:
            problems.require(keys.shape[2] == 64, "keys", f"heads of {keys.shape[2]}", "of 64")
            pack = packing(kv_cache.dtype)
            want = (ceil_div(keys.shape[1], pack), pack, VECTOR_SIZE)
            check_cache(problems, kv_cache, want, "[N, S, ceil(K / pack), pack, 128]")
    numbers = Numbers.of(
        scale=product(sm_scale, q_scale),
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sliding_window=sliding_window,
        logits_soft_cap=soft_cap,
        sinks=attention_sink,
    )
    return _ragged(
        kv_cache,
        queries,
        *(keys, values, page_indices, kv_lens, cu_q_lens, distribution[2]),
        numbers,
        width=VECTOR_SIZE,
        value_start=64,
        is_causal=True,
        write=True,
        out_dtype=np.dtype(queries.dtype),
    )


def tpu_ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: Number = 1.0,
    sliding_window: int | jax.Array | None = None,
    soft_cap: Number | None = None,
    mask_value: float | None = None,
    k_scale: Number | None = None,
    v_scale: Number | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> jax.Array:
    """Attend to pages that are already written, like JAX's ragged paged attention for TPUs.

    Args:
      q: [T, H, D].
      kv_pages: [N, S, 2 K, D], keys and values alternating.
      kv_lens: int32 [B].
      page_indices: int32 [B, M].
      cu_q_lens: int32 [B + 1].
      num_seqs: int32 [1].
      sm_scale, sliding_window, soft_cap, mask_value, k_scale, v_scale: as in
        `ragged_paged_attention`.
      num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes: ignored; they tune the
        original kernel.

    Returns:
      out [T, H, D] in the queries' dtype.

    Raises:
      ValueError, UnsupportedError: as `ragged_paged_attention`.
    """
    with checks.checking("ragged_paged_attention") as problems:
        check_common(problems, sliding_window, soft_cap, mask_value, False)
        good = problems.expect(arrays.is_array(q) and len(q.shape) == 3, "q", q, "[T, H, D]")
        dim = q.shape[2] if good else None
        problems.expect(
            arrays.matches(kv_pages, jnp.floating, (None, None, None, dim))
            and kv_pages.shape[2] % 2 == 0,
            "kv_pages",
            kv_pages,
            "floats [N, S, 2 K, D]" + arrays.axis_is("D", dim),
        )
        check_batch(problems, kv_lens, page_indices, cu_q_lens, flat=False)
        problems.expect(arrays.matches(num_seqs, np.int32, (1,)), "num_seqs", num_seqs, "int32[1]")
    numbers = Numbers.of(
        scale=sm_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sliding_window=sliding_window,
        logits_soft_cap=soft_cap,
    )
    found, _ = _ragged_only(
        kv_pages,
        q,
        *(None, None, page_indices, kv_lens, cu_q_lens, num_seqs[0]),
        numbers,
        width=2 * q.shape[-1],
        value_start=q.shape[-1],
        is_causal=True,
        write=False,
        out_dtype=np.dtype(q.dtype),
    )
    return found


_STATIC = ("width", "value_start", "is_causal", "write", "out_dtype")


def _attend_ragged(
    kv_cache: jax.Array,
    queries: jax.Array,
    keys: jax.Array | None,
    values: jax.Array | None,
    page_indices: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    numbers: Numbers,
    *,
    width: int,
    value_start: int,
    is_causal: bool,
    write: bool,
    out_dtype: np.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Write keys and values if `write`, and attend."""
    tokens, _, dim = queries.shape
    stored = math.prod(kv_cache.shape[2:]) // width
    heads = stored if keys is None else keys.shape[1]
    pool = formats.KVRows(kv_cache, heads, dim, width, value_start, dim)
    batch = metadata.AttentionMetadata.from_arrays(
        *(page_indices, kv_lens, cu_q_lens),
        num_tokens=tokens,
        block_size=kv_cache.shape[1],
        num_seqs=num_seqs,
    )
    if write:
        assert keys is not None
        assert values is not None
        keys, values = widened(keys), widened(values)
        pool, _ = cache.update_kv_cache(pool, None, keys, values, batch.slot_mapping)
    if numbers.q_scale is not None:
        limits = jnp.finfo(kv_cache.dtype)
        scaled = queries.astype(jnp.float32) / numbers.q_scale
        scaled = jnp.clip(scaled, float(limits.min), float(limits.max))
        queries = scaled.astype(kv_cache.dtype).astype(queries.dtype)
    out = api.paged_attention(
        *(queries, pool, None),
        **batch.as_kwargs(),
        is_causal=is_causal,
        scale=numbers.scale,
        k_scale=numbers.k_scale,
        v_scale=numbers.v_scale,
        sliding_window=numbers.sliding_window,
        logits_soft_cap=numbers.logits_soft_cap,
        sinks=numbers.sinks,
        out_dtype=out_dtype,
    )
    return out, pool.data


_ragged = jax.jit(_attend_ragged, static_argnames=_STATIC, donate_argnames="kv_cache")
_ragged_only = jax.jit(_attend_ragged, static_argnames=_STATIC)
