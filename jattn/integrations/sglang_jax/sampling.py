"""Sampling in sglang-jax: temperature before `top_p`, and the first of the most likely tokens.

The host cuts by `top_p` before it divides by the temperature, which keeps the wrong tokens. If two
tokens are equally likely, a greedy request in a batch with a sampled one gets either. jattn divides
by the temperature first, and gives greedy requests the argmax.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def enable() -> None:
    """Wrap the host's sampling function, the one that does not sort.

    Raises:
      ImportError: sglang-jax is not installed, or is another version.
    """
    from sgl_jax.srt.layers import sampler

    choose = sampler.top_k_top_p_min_p_sampling_from_probs_jax_with_mask

    @functools.wraps(choose)
    def divide_and_choose(args: tuple[Any, ...]) -> Any:
        logits, other, top_k, top_p, min_p, positions, temperatures, *rest = args
        divided = logits.astype(jnp.float32) / temperatures.astype(jnp.float32)
        one = jnp.ones_like(temperatures)
        sampled = choose((divided, other, top_k, top_p, min_p, positions, one, *rest))
        likeliest = jnp.argmax(logits, axis=-1).astype(sampled.dtype)
        is_greedy = top_k.reshape(-1) == 1
        return jnp.where(_placed_as(is_greedy, sampled), _placed_as(likeliest, sampled), sampled)

    sampler.top_k_top_p_min_p_sampling_from_probs_jax_with_mask = divide_and_choose


def _placed_as(x: jax.Array, other: jax.Array) -> jax.Array:
    """Return `x`, sharded as `other` is if the host has a mesh."""
    sharding = jax.typeof(other).sharding
    return x if sharding.mesh.empty else jax.sharding.reshard(x, sharding)
