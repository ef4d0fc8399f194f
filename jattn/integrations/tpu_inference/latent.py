"""Latent attention (MLA) in tpu-inference, which cannot register backends for it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.integrations import rpa


def enable(name: str) -> None:
    """Make the backend `name` available for models with MLA.

    - `TpuPlatform.get_attn_backend_cls` refuses it, because such layers always run the host's own
      backend, `FLASH_ATTN_MLA`. The hook selects that backend, and puts jattn's function in place
      of the kernel that its `attention_interface` calls.
    - `mla_attention.quantize_tensor` rounds the layers' weights to the cache's dtype, and returns
      NaN unless that dtype is narrow. jattn needs no narrow weights, so the hook leaves them as
      they were loaded.

    Args:
      name: of the registered backend.

    Raises:
      ImportError: tpu-inference is not installed, or is another version.
    """
    from tpu_inference.layers.common import attention_interface
    from tpu_inference.platforms.tpu_platform import TpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    choose = TpuPlatform.get_attn_backend_cls.__func__
    if getattr(choose, "with_jattn", False):
        return  # done before

    @functools.wraps(choose)
    def choose_latent(
        cls: type[Any], selected_backend: Any, attn_selector_config: Any, **more: Any
    ) -> Any:
        is_ours = selected_backend is not None and selected_backend.name.lower() == name
        if is_ours and attn_selector_config.use_mla:
            from tpu_inference.layers.vllm.custom_ops import mla_attention

            attention_interface.mla_ragged_paged_attention = mla_ragged_paged_attention
            mla_attention.quantize_tensor = _unquantized
            selected_backend = AttentionBackendEnum.FLASH_ATTN_MLA
        return choose(cls, selected_backend, attn_selector_config, **more)

    replaced: Any = choose_latent
    replaced.with_jattn = True
    TpuPlatform.get_attn_backend_cls = classmethod(replaced)


def mla_ragged_paged_attention(
    ql_nope: jax.Array,
    q_pe: jax.Array,
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv: jax.Array,
    *rest: jax.Array,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Call `rpa.mla_ragged_paged_attention` with new latents in the cache's dtype.

    The host rotates in float32 and leaves `new_k_pe` in it, whatever the cache's dtype. Latents for
    an fp8 cache arrive quantized.
    """
    return rpa.mla_ragged_paged_attention(
        *(ql_nope, q_pe, new_kv_c.astype(cache_kv.dtype), new_k_pe.astype(cache_kv.dtype)),
        *(cache_kv, *rest),
        **options,
    )


def _unquantized(dtype: Any, tensor: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Return the tensor unchanged, with scales of one, in place of `quantize_tensor`."""
    return tensor, jnp.ones(np.delete(tensor.shape, axis), jnp.float32)
