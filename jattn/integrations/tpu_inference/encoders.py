"""Attention of image and audio encoders, in which every token of an item sees all its tokens.

The host has a TPU kernel that takes whole tiles of tokens. Here a tile of queries at a time attends
to all keys, in float32: the logits of all of an image's tokens would not fit in memory at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jattn import checks
from jattn.integers import ceil_div

TILE = 128  # queries at a time
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: a row of padding may see nothing


def enable() -> None:
    """Replace the host's TPU kernel with XLA's operations.

    - `layers.common.attention_interface.flash_attention`, which the host's JAX models call.
    - `scaled_dot_product_attention` and vLLM's `torch_sdpa_wrapper` in the host's table of torch
      functions. The host's versions pad keys to whole tiles, which tokens without segments then
      see, and use a scale of 1 if none is given.

    Raises:
      ImportError: tpu-inference is not installed, or is another version.
    """
    import torch
    import vllm.v1.attention.ops.vit_attn_wrappers  # noqa: F401  (the op that is replaced)
    from torchax.ops.jtorch import register_function
    from tpu_inference.layers.common import attention_interface
    from tpu_inference.layers.vllm import ops  # noqa: F401  (the host's own, which come first)

    attention_interface.flash_attention = flash_attention
    register_function(torch.nn.functional.scaled_dot_product_attention)(dot_product_attention)
    register_function(torch.ops.vllm.torch_sdpa_wrapper)(attend_to_items)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None,
    bias: jax.Array | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """Compute `softmax(scale * q k^T + bias) v` over the keys that a query sees.

    Args:
      q: [B, H, T, D].
      k, v: [B, K, U, D] and [B, K, U, V], with H a multiple of K.
      scale: of the logits; None: `D ** -0.5`.
      bias: [B or 1, H or 1, T or 1, U], numbers to add, or bool: which keys are seen.
      segments: int [B, T] and [B, U]; a query sees only keys of its own segment.
      is_causal: whether query i sees only keys 0 to i.

    Returns: [B, H, T, V].
    """
    count, dim, num_keys = q.shape[2], q.shape[3], k.shape[2]
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    tiles = ceil_div(count, TILE)
    more = tiles * TILE - count
    q = jnp.pad(q, ((0, 0), (0, 0), (0, more), (0, 0)))
    if bias is not None:
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], count, num_keys))
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, more), (0, 0)))
    if segments is not None:
        segments = jnp.pad(segments[0], ((0, 0), (0, more))), segments[1]

    def tile(start: jax.Array) -> jax.Array:
        def of(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, TILE, axis)

        logits = _product("bhtd,bhud->bhtu", of(q, 2), k) * (dim**-0.5 if scale is None else scale)
        seen = jnp.ones((1, 1, TILE, num_keys), bool)
        if bias is not None:
            added = of(bias, 2)
            if added.dtype == bool:
                seen &= added
            else:
                logits += added.astype(jnp.float32)
        if segments is not None:
            seen &= (of(segments[0], 1)[:, :, None] == segments[1][:, None])[:, None]
        if is_causal:
            rows = start + jnp.arange(TILE)
            seen &= (jnp.arange(num_keys)[None] <= rows[:, None])[None, None]
        weights = jax.nn.softmax(jnp.where(seen, logits, MASKED), axis=-1)
        return _product("bhtu,bhud->bhtd", weights, v.astype(jnp.float32)).astype(q.dtype)

    out = jax.lax.map(tile, jnp.arange(tiles) * TILE)  # [tiles, B, H, TILE, V]
    out = jnp.moveaxis(out, 0, 2)
    return out.reshape(*q.shape[:2], -1, v.shape[-1])[:, :, :count]


def _product(what: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(what, x, y, precision="highest", preferred_element_type=jnp.float32)


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ab: jax.Array | None = None,
    segment_ids: Any = None,
    *,
    causal: bool = False,
    sm_scale: float = 1.0,
    **unused: Any,
) -> jax.Array:
    """Replace the host's kernel of this name; `unused` are its tiles."""
    del unused
    segments = None if segment_ids is None else (segment_ids.q, segment_ids.kv)
    return attend(q, k, v, scale=sm_scale, bias=ab, segments=segments, is_causal=causal)


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """Replace `torch.nn.functional.scaled_dot_product_attention`, for inference only.

    Args:
      query, key, value, attn_mask: arrays of at most four axes, while torch accepts more.

    Raises:
      ValueError: an array has more than four axes.
    """
    del dropout_p, enable_gqa
    given = {"query": query, "key": key, "value": value}
    if attn_mask is not None:
        given["attn_mask"] = attn_mask
    with checks.checking("scaled_dot_product_attention") as problems:
        for name, x in given.items():
            problems.expect(x.ndim <= 4, name, x, "an array of at most four axes")
    q, k, v, *bias = (x.reshape(*(1,) * (4 - x.ndim), *x.shape) for x in given.values())
    out = attend(q, k, v, scale=scale, bias=bias[0] if bias else None, is_causal=is_causal)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def attend_to_items(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: float | None = None,
    cu_seqlens: jax.Array | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """Replace vLLM's `torch_sdpa_wrapper`: attend within each item, over tokens [B, T, H, D].

    `cu_seqlens` says where each item begins, and where the last one ends; the rest is padding.
    """
    del enable_gqa
    segments = None
    if cu_seqlens is not None:
        segments = _items(cu_seqlens, query), _items(cu_seqlens, key)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    return jnp.swapaxes(attend(q, k, v, scale=scale, segments=segments), 1, 2)


def _items(cu_seqlens: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return each token's item, [B, T]; padding gets the number after the last item's."""
    ends = jnp.asarray(cu_seqlens)[1:]
    items = jnp.searchsorted(ends, jnp.arange(tokens.shape[1]), side="right")
    return jnp.broadcast_to(items[None], tokens.shape[:2])
