"""Multi-head latent attention of DeepSeek V2 and V3 over one paged cache: absorbed, no value cache.

A token leaves one row in the cache, whatever the number of heads: its latent `c` (512 numbers) and
a rotated key `r` that all heads share (64). A head would expand the latent into its own keys and
values, `k = [W_k c, r]` and `v = W_v c`. Absorbed, nothing is expanded: since

    q . k = q_nope . W_k c + q_rope . r = [W_k^T q_nope, q_rope] . [c, r]
    sum_j p_j v_j = W_v sum_j p_j c_j

the heads attend with queries of 576 numbers to one KV head whose values are the first 512 numbers
of its keys. `jattn.paged_attention` takes that as `value_cache=None, value_dim=512`, and reads
every row once for both.

Plain functions over a dict of weights by their Hugging Face names. Dense layers only: the experts
of the large models change nothing about attention.

On a mesh of devices each has some of the heads and all of the cache, since every head reads every
latent: `split_weights` deals the weights out, and `forward` runs under `DeviceMesh.on_all`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from examples.engine.mesh import DeviceMesh, Parameter
from examples.models import parallel
from examples.models.layers import unit_rms

Weights = Mapping[str, jax.Array]
# The axis of a weight that is split over devices, by the name it ends in; others lie whole on each.
SPLIT_AXES = {
    **dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
    **dict.fromkeys(("embed_tokens", "lm_head"), 0),
}


@dataclasses.dataclass(frozen=True)
class DeepseekConfig:
    """What `config.json` says, as far as a dense model needs it; names are its own."""

    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None  # None in V2 Lite: queries straight from the hidden state
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DeepseekConfig:
        """From the dict of a `config.json`."""
        return cls(**{field.name: config[field.name] for field in dataclasses.fields(cls)})

    @property
    def cache_dim(self) -> int:
        """Numbers a token leaves in the cache of a layer: 576 = 512 + 64."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """The softmax scale: of the expanded head, not of the absorbed one."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5


def split_weights(weights: Weights, mesh: DeviceMesh) -> dict[str, jax.Array]:
    """Weights on a mesh: what heads, columns and rows of the vocabulary a device has of each.

    Raises:
      ValueError: a weight that does not divide evenly.
    """
    placed = {}
    for name, weight in weights.items():
        axis, own = SPLIT_AXES.get(name.split(".")[-2]), list(weight.shape)
        if axis is not None:
            if own[axis] % mesh.num_parts:
                raise ValueError(
                    f"{name}: axis {axis} is {own[axis]}, but must be a multiple of the "
                    f"{mesh.num_parts} devices"
                )
            own[axis] //= mesh.num_parts
        shapes = Parameter(weight.shape), Parameter(tuple(own))
        placed[name] = mesh.array(*shapes, np.asarray(weight).__getitem__)
    return placed


def init_caches(
    config: DeepseekConfig, num_blocks: int, block_size: int, format: Any = None
) -> list[jattn.KVArray]:
    """One pool of latents per layer."""
    return [
        jattn.init_kv_cache(
            num_blocks, 1, block_size, config.cache_dim, format=format, values_in_keys=True
        )[0]
        for _ in range(config.num_hidden_layers)
    ]


def forward(
    weights: Weights,
    config: DeepseekConfig,
    caches: list[jattn.KVArray],
    tokens: jax.Array,
    positions: jax.Array,
    batch: jattn.AttentionMetadata,
) -> tuple[jax.Array, list[jattn.KVArray]]:
    """`(logits [T, vocabulary], caches)` of one step: prefills, chunks and decodes mixed.

    Args:
      weights: float32 arrays by Hugging Face name.
      config: the model's; on a mesh that of a device's part (`own_part`).
      caches: from `init_caches`; donate them.
      tokens, positions: int32 [T].
      batch: which of them belong to whom, and where they are written.
    """
    split = parallel.num_devices(*parallel.MODEL) > 1
    x = parallel.lookup_rows(weights["model.embed_tokens.weight"], tokens, split=split)
    written = []
    for layer, cache in enumerate(caches):
        own = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        normed = _rms_norm(x, own["input_layernorm.weight"], config)
        attended, cache = _attention(own, config, cache, normed, positions, batch)
        x = x + attended
        normed = _rms_norm(x, own["post_attention_layernorm.weight"], config)
        gate = jax.nn.silu(normed @ own["mlp.gate_proj.weight"].T)
        inner = gate * (normed @ own["mlp.up_proj.weight"].T)
        x = x + parallel.add_up(inner @ own["mlp.down_proj.weight"].T)
        written.append(cache)
    x = _rms_norm(x, weights["model.norm.weight"], config)
    return parallel.join_columns(x @ weights["lm_head.weight"].T, split=split), written


def _attention(
    own: Weights,
    config: DeepseekConfig,
    cache: jattn.KVArray,
    x: jax.Array,
    positions: jax.Array,
    batch: jattn.AttentionMetadata,
) -> tuple[jax.Array, jattn.KVArray]:
    heads, rank, nope = config.num_attention_heads, config.kv_lora_rank, config.qk_nope_head_dim
    if config.q_lora_rank is None:
        query = x @ own["self_attn.q_proj.weight"].T
    else:
        low = x @ own["self_attn.q_a_proj.weight"].T
        low = _rms_norm(low, own["self_attn.q_a_layernorm.weight"], config)
        query = low @ own["self_attn.q_b_proj.weight"].T
    query = query.reshape(x.shape[0], heads, -1)
    latent = x @ own["self_attn.kv_a_proj_with_mqa.weight"].T
    row = jnp.concatenate(
        [
            _rms_norm(latent[:, :rank], own["self_attn.kv_a_layernorm.weight"], config),
            _rotate(latent[:, None, rank:], positions, config)[:, 0],
        ],
        axis=-1,
    )
    cache, _ = jattn.update_kv_cache(cache, None, row[:, None], None, batch.slot_mapping)

    expand = own["self_attn.kv_b_proj.weight"].reshape(heads, nope + config.v_head_dim, rank)
    absorbed = jnp.einsum("thn,hnr->thr", query[..., :nope], expand[:, :nope])
    rotated = _rotate(query[..., nope:], positions, config)
    out = jattn.paged_attention(
        jnp.concatenate([absorbed, rotated], axis=-1),
        cache,
        None,
        value_dim=rank,
        scale=config.scale,
        **batch.as_kwargs(),
    )
    values = jnp.einsum("thr,hvr->thv", out, expand[:, nope:])
    out = values.reshape(x.shape[0], -1) @ own["self_attn.o_proj.weight"].T
    return parallel.add_up(out), cache


def _rms_norm(x: jax.Array, weight: jax.Array, config: DeepseekConfig) -> jax.Array:
    return unit_rms(x, config.rms_norm_eps) * weight[None]


def _rotate(x: jax.Array, positions: jax.Array, config: DeepseekConfig) -> jax.Array:
    """Rotary embedding of [T, heads, R], of adjacent pairs, which come out R / 2 apart."""
    half = config.qk_rope_head_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half, dtype=np.float32) / np.float32(half))
    angles = positions.astype(jnp.float32)[:, None] * frequencies.astype(np.float32)[None]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.concatenate([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
