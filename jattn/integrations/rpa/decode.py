"""Decode over pages whose first axis is the KV heads."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jattn import api, checks, formats
from jattn.call import arrays
from jattn.call.arguments import Number
from jattn.formats import rounding
from jattn.integrations.rpa.arguments import check_common

SCALED = ("int8", "float8_e4m3fn", "float8_e5m2")  # dtypes of pages with scales


@runtime_checkable
class QuantizedPages(Protocol):
    """The fields of the original's `QuantizedTensor`: numbers are weight * scale / 127.5."""

    @property
    def weight(self) -> jax.Array:
        """int8 [K, N, S, D]."""

    @property
    def scales(self) -> jax.Array:
        """Floats [K, N, S, 1]."""


def tpu_paged_attention(
    q: jax.Array,
    k_pages: jax.Array | QuantizedPages,
    v_pages: jax.Array | QuantizedPages,
    lengths: jax.Array,
    page_indices: jax.Array,
    *,
    mask_value: float | None = None,
    attn_logits_soft_cap: Number | None = None,
    pages_per_compute_block: int | None = None,
    megacore_mode: str | None = None,
    inline_seq_dim: bool = True,
) -> jax.Array:
    """Attend like JAX's decode kernel for TPUs. The softmax scale is 1: the caller scales queries.

    Args:
      q: [B, H, D].
      k_pages, v_pages: [K, N, S, D] floats, or the original's `QuantizedTensor` of int8 with
        scales [K, N, S, 1].
      lengths: int32 [B].
      page_indices: int32 [B, M].
      mask_value: None, or any number that masks.
      attn_logits_soft_cap: a number or None.
      pages_per_compute_block, megacore_mode, inline_seq_dim: ignored; they tune the original
        kernel.

    Returns:
      out [B, H, D] in q's dtype.

    Raises:
      ValueError, UnsupportedError: as `ragged_paged_attention`.
    """

    def parts(pages: jax.Array | QuantizedPages) -> tuple[jax.Array, jax.Array | None]:
        if not isinstance(pages, QuantizedPages):
            return pages, None
        return pages.weight, pages.scales.astype(jnp.float32)[..., 0] / 127.5

    (keys, k_scales), (values, v_scales) = parts(k_pages), parts(v_pages)
    return _decode(
        *("paged_attention", q, keys, values, k_scales, v_scales, lengths, page_indices),
        table_name="page_indices",
        scaled=("int8",),
        mask_value=mask_value,
        soft_cap=attn_logits_soft_cap,
    )


def gpu_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array | None,
    k_scales_pages: jax.Array | None = None,
    v_scales_pages: jax.Array | None = None,
    *,
    block_h: int = 16,
    pages_per_compute_block: int = 8,
    k_splits: int = 16,
    num_warps: int = 8,
    num_stages: int = 2,
    interpret: bool = False,
    debug: bool = False,
    mask_value: float | None = None,
    attn_logits_soft_cap: Number | None = None,
) -> jax.Array:
    """Attend like JAX's deprecated decode kernel for GPUs.

    The softmax scale is 1: the caller scales queries.

    Args:
      q: [B, H, D].
      k_pages, v_pages: [K, N, S, D] floats; with scales int8, float8_e4m3fn or float8_e5m2.
      block_tables: int32 [B, M].
      lengths: int32 [B]; None for all tokens of the pages in a row of the table.
      k_scales_pages, v_scales_pages: floats [K, N, S] that multiply each token's numbers, or None.
      mask_value: None, or any number that masks.
      attn_logits_soft_cap: a number or None.
      debug: must be False: jattn prints nothing.
      block_h, pages_per_compute_block, k_splits, num_warps, num_stages, interpret: ignored; they
        tune the original kernel.

    Returns:
      out [B, H, D] in q's dtype.

    Raises:
      ValueError, UnsupportedError: as `ragged_paged_attention`.
    """
    with checks.checking("paged_attention") as problems:
        problems.require(not debug, "debug", "True", "False: jattn prints nothing")
        for name, x, num_axes, text in (
            ("k_pages", k_pages, 4, "[K, N, S, D]"),
            ("block_tables", block_tables, 2, "[B, M]"),
        ):
            problems.expect(arrays.is_array(x) and len(x.shape) == num_axes, name, x, text)
    if lengths is None:
        most = block_tables.shape[1] * k_pages.shape[2]
        lengths = jnp.full((block_tables.shape[0],), most, jnp.int32)
    return _decode(
        *("paged_attention", q, k_pages, v_pages, k_scales_pages, v_scales_pages),
        *(lengths, block_tables),
        table_name="block_tables",
        scaled=SCALED,
        mask_value=mask_value,
        soft_cap=attn_logits_soft_cap,
    )


def _decode(
    where: str,
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
    lengths: jax.Array,
    tables: jax.Array,
    *,
    table_name: str,
    scaled: tuple[str, ...],
    mask_value: float | None,
    soft_cap: Number | None,
) -> jax.Array:
    with checks.checking(where) as problems:
        check_common(problems, None, soft_cap, mask_value, False)
        good = [
            problems.expect(arrays.is_array(x) and len(x.shape) == num_axes, name, x, text)
            for name, x, num_axes, text in (
                ("q", q, 3, "[B, H, D]"),
                ("k_pages", keys, 4, "[K, N, S, D]"),
                ("v_pages", values, 4, "[K, N, S, D]"),
            )
        ]
        if all(good):
            batch, num_heads, dim = q.shape
            kv_heads = keys.shape[0]
            problems.require(
                keys.shape[3] == dim and num_heads % kv_heads == 0,
                "q",
                f"{num_heads} heads of {dim}",
                f"a multiple of {kv_heads} heads of {keys.shape[3]}, to match k_pages",
            )
            problems.expect(
                tuple(values.shape) == tuple(keys.shape), "v_pages", values, "of k_pages' shape"
            )
            arrays.check_int32(problems, "lengths", lengths, (batch,), ("B",))
            arrays.check_int32(problems, table_name, tables, (batch, None), ("B", "M"))
            caches = (("k", keys, k_scales), ("v", values, v_scales))
            for letter, pages, scales in caches:
                if scales is None:
                    good_dtype, wanted = jnp.issubdtype(pages.dtype, jnp.floating), "floats without"
                else:
                    good_dtype, wanted = pages.dtype.name in scaled, f"{' or '.join(scaled)} with"
                problems.expect(good_dtype, f"{letter}_pages", pages, f"{wanted} scales")
                problems.expect(
                    scales is None or arrays.matches(scales, np.number, pages.shape[:3]),
                    f"{letter}_scales_pages",
                    scales,
                    f"[K, N, S] = {list(pages.shape[:3])}",
                )
    cap = None if soft_cap is None else jnp.asarray(soft_cap, jnp.float32)
    return _by_head(q, keys, values, k_scales, v_scales, lengths, tables, cap)


@jax.jit
def _by_head(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
    lengths: jax.Array,
    tables: jax.Array,
    soft_cap: jax.Array | None,
) -> jax.Array:
    """Attend with each KV head of a sequence as its own sequence, in a pool of one-head blocks.

    Page `page` of head k is block `k * N + page` of K * N: the same memory, not a copy.
    """
    heads, pages, size, dim = keys.shape
    batch = q.shape[0]
    first = jnp.arange(heads, dtype=jnp.int32)[None, :, None] * pages
    inside = (tables >= 0) & (tables < pages)  # an id outside the pages stays outside
    rows = jnp.where(inside[:, None], tables[:, None] + first, -1).reshape(batch * heads, -1)

    def pool(words: jax.Array, scales: jax.Array | None) -> formats.Cache:
        shape = (heads * pages, 1, size, dim)
        if scales is None and k_scales is None and v_scales is None:
            return words.reshape(shape)
        if scales is None:  # the other one has scales: then both are `KVArray`s
            dense = formats.Dense(words.dtype.name)
            words = rounding.bitcast(words, dense.word_dtype)
            return formats.KVArray(words.reshape(shape), None, dense)
        format: formats.Format = formats.Int8()
        if words.dtype != jnp.int8:
            format = formats.Fp8("e5m2" if words.dtype == jnp.float8_e5m2 else "e4m3", "token")
            words = rounding.bitcast(words, np.dtype(np.uint8))
        scales = scales.astype(jnp.float32).reshape(shape[:3])
        return formats.KVArray(words.reshape(shape), scales, format)

    caches = pool(keys, k_scales), pool(values, v_scales)
    out = api.paged_attention(
        q.reshape(batch * heads, -1, dim),
        *caches,
        block_tables=rows,
        seq_lens=jnp.repeat(lengths, heads),
        scale=1.0,
        logits_soft_cap=soft_cap,
    )
    return out.reshape(q.shape)
