"""The Gemma 4 text model in flax nnx, with its keys and values in paged caches.

The modules hold parameters and nothing else. Caches are an argument and a result: a plain pytree
`{layer index: (key_cache, value_cache)}` that a jitted caller donates, so that writing a token
changes its slot in place. Parameter paths are the names in a Hugging Face checkpoint, and linear
weights keep its [out, in] layout, so that loading is a matter of names.

One decoder layer, for x [T, E] (norms are RMS norms with a weight, `v_norm` has none):

    x = x + post_attention_norm(attention(input_norm(x)))
    x = x + post_feedforward_norm(down(gelu(gate(h)) * up(h))),  h = pre_feedforward_norm(x)
    x = x + post_per_layer_norm(project(gelu(gate_in(x)) * per_layer_input))   (some models)
    x = x * layer_scalar

Axes: T tokens of all sequences one after another, B sequences, E hidden size, H query heads,
K KV heads, D head size, L layers, P size of a layer's own embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from examples.models.checkpoint import Checkpoint, load_parameters
from examples.models.gemma4_config import GLOBAL, SLIDING, Gemma4Config, Layer

Caches = dict[int, tuple[jax.Array | jattn.KVArray, jax.Array | jattn.KVArray]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """One step's work: some tokens of every scheduled sequence, padded to a bucket.

    Every field is an array (or a pytree of arrays). Padded tokens have slot -1, padded sequences
    have length 0.
    """

    tokens: jax.Array  # int32 [T]
    positions: jax.Array  # int32 [T], of each token in its sequence
    last_tokens: jax.Array  # int32 [B], which of the T tokens is each sequence's last
    attention: dict[str, jattn.AttentionMetadata]  # by kind of layer: each has its own blocks


class Linear(nnx.Module):
    """`x @ weight.T` with weight [out, in]; float32 stays float32 on every machine."""

    def __init__(self, num_in: int, num_out: int, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((num_out, num_in), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("ti,oi->to", x, self.weight[...], precision="highest")


class Embedding(nnx.Module):
    """Rows of a table [vocabulary, E] times a constant, which is rounded to the table's dtype."""

    def __init__(self, num_rows: int, num_columns: int, scale: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((num_rows, num_columns), dtype))
        self.scale = scale

    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.weight[...]
        return table.at[tokens].get(mode="clip") * jnp.asarray(self.scale, table.dtype)


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x ** 2) + eps)` over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """`unit_rms(x) * weight`, computed in float32 and returned in x's dtype."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = jnp.expand_dims(self.weight[...].astype(jnp.float32), range(x.ndim - 1))
        return (unit_rms(x, self.eps) * weight).astype(x.dtype)


def rope_angles(frequencies: np.ndarray, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every token's angles, float32 [T, 1, D / 2] each."""
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn each pair (x[..., j], x[..., j + D / 2]) of x [T, heads, D] by its angle."""
    cos, sin = (a.astype(x.dtype) for a in angles)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Attention(nnx.Module):
    """One layer's attention over its own pages, or read-only over another layer's."""

    def __init__(self, config: Gemma4Config, layer: Layer, dtype: jnp.dtype):
        size, eps, head_dim = config.hidden_size, config.rms_norm_eps, layer.head_dim
        self.layer, self.eps = layer, eps
        self.window = config.sliding_window if layer.kind == SLIDING else None
        self.q_proj = Linear(size, config.num_heads * head_dim, dtype)
        self.q_norm = RMSNorm(head_dim, eps, dtype)
        if layer.owns_cache:
            self.k_proj = Linear(size, layer.num_kv_heads * head_dim, dtype)
            self.k_norm = RMSNorm(head_dim, eps, dtype)
            if not layer.key_is_value:
                self.v_proj = Linear(size, layer.num_kv_heads * head_dim, dtype)
        self.o_proj = Linear(config.num_heads * head_dim, size, dtype)

    def __call__(self, x, angles, caches: Caches, metadata, implementation):
        num_tokens, head_dim, layer = x.shape[0], self.layer.head_dim, self.layer

        def heads(y: jax.Array) -> jax.Array:
            return y.reshape(num_tokens, -1, head_dim)

        query = rotate(self.q_norm(heads(self.q_proj(x))), angles)
        if layer.owns_cache:
            projected = heads(self.k_proj(x))
            key = rotate(self.k_norm(projected), angles)
            value = unit_rms(projected if layer.key_is_value else heads(self.v_proj(x)), self.eps)
            written = jattn.update_kv_cache(
                *caches[layer.index], key, value.astype(x.dtype), metadata.slot_mapping
            )
            caches = {**caches, layer.index: written}
        attended = jattn.paged_attention(
            query,
            *caches[layer.reads_layer],
            **metadata.as_kwargs(),
            scale=1.0,  # the norms of q and k have taken its place
            sliding_window=self.window,
            implementation=implementation,
        )
        return self.o_proj(attended.reshape(num_tokens, -1)), caches


class MLP(nnx.Module):
    """`down(gelu(gate(x)) * up(x))`."""

    def __init__(self, size: int, intermediate_size: int, dtype: jnp.dtype):
        self.gate_proj = Linear(size, intermediate_size, dtype)
        self.up_proj = Linear(size, intermediate_size, dtype)
        self.down_proj = Linear(intermediate_size, size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.gelu(self.gate_proj(x), approximate=True) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """One layer, as the formula at the head of this file says."""

    def __init__(self, config: Gemma4Config, layer: Layer, dtype: jnp.dtype):
        size, eps, own = config.hidden_size, config.rms_norm_eps, config.per_layer_input_size
        self.self_attn = Attention(config, layer, dtype)
        self.mlp = MLP(size, layer.intermediate_size, dtype)
        self.input_layernorm = RMSNorm(size, eps, dtype)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype)
        self.pre_feedforward_layernorm = RMSNorm(size, eps, dtype)
        self.post_feedforward_layernorm = RMSNorm(size, eps, dtype)
        if own:
            self.per_layer_input_gate = Linear(size, own, dtype)
            self.per_layer_projection = Linear(own, size, dtype)
            self.post_per_layer_input_norm = RMSNorm(size, eps, dtype)
        self.layer_scalar = nnx.Param(jnp.ones((1,), dtype))

    def __call__(self, x, per_layer_input, angles, caches: Caches, metadata, implementation):
        attended, caches = self.self_attn(
            self.input_layernorm(x), angles, caches, metadata, implementation
        )
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        if per_layer_input is not None:
            gated = jax.nn.gelu(self.per_layer_input_gate(x), approximate=True) * per_layer_input
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar[...][None], caches


class Gemma4(nnx.Module):
    """The text model: tokens and paged caches in, next-token logits and written caches out."""

    def __init__(self, config: Gemma4Config, dtype: jnp.dtype):
        size, own, count = config.hidden_size, config.per_layer_input_size, len(config.layers)
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, size, size**0.5, dtype)
        if own:
            self.embed_tokens_per_layer = Embedding(
                config.per_layer_vocab_size, count * own, own**0.5, dtype
            )
            self.per_layer_model_projection = Linear(size, count * own, dtype)
            self.per_layer_projection_norm = RMSNorm(own, config.rms_norm_eps, dtype)
        self.layers = nnx.List([DecoderLayer(config, layer, dtype) for layer in config.layers])
        self.norm = RMSNorm(size, config.rms_norm_eps, dtype)

    def __call__(
        self,
        batch: Batch,
        caches: Caches,
        *,
        implementation: str | None = None,
    ) -> tuple[jax.Array, Caches]:
        """Run one step.

        Args:
          batch: T tokens of B sequences.
          caches: key and value cache of every layer that owns one, by layer index.
          implementation: which of `jattn.paged_attention`'s implementations, or None.

        Returns:
          Logits after `batch.last_tokens`, float32 [B, vocabulary], and the written caches.
        """
        x = self.embed_tokens(batch.tokens)
        own_inputs = self._per_layer_inputs(batch.tokens, x)
        angles = self._angles(batch.positions)
        for layer, module in zip(self.config.layers, self.layers, strict=True):
            own_input = None if own_inputs is None else own_inputs[:, layer.index]
            metadata = batch.attention[layer.kind]
            x, caches = module(
                x, own_input, angles[layer.kind, layer.head_dim], caches, metadata, implementation
            )
        last = self.norm(x.at[batch.last_tokens].get(mode="clip"))
        return self._logits(last), caches

    def _angles(self, positions: jax.Array) -> dict[tuple[str, int], tuple[jax.Array, jax.Array]]:
        """Rotary angles for every kind of layer and head size in use."""
        uses = {(layer.kind, layer.head_dim) for layer in self.config.layers}
        rope = {SLIDING: self.config.sliding_rope, GLOBAL: self.config.global_rope}
        return {
            (kind, head_dim): rope_angles(rope[kind].frequencies(head_dim), positions)
            for kind, head_dim in sorted(uses)
        }

    def _per_layer_inputs(self, tokens: jax.Array, x: jax.Array) -> jax.Array | None:
        """What each layer is fed beside x, [T, L, P]: its own embedding and a projection of x."""
        if not self.config.per_layer_input_size:
            return None
        shape = (tokens.shape[0], len(self.config.layers), self.config.per_layer_input_size)
        projected = self.per_layer_model_projection(x) * jnp.asarray(x.shape[1] ** -0.5, x.dtype)
        projected = self.per_layer_projection_norm(projected.reshape(shape))
        embedded = self.embed_tokens_per_layer(tokens).reshape(shape)
        return (projected + embedded) * jnp.asarray(2**-0.5, x.dtype)

    def _logits(self, x: jax.Array) -> jax.Array:
        """Softly capped float32 logits [B, vocabulary] from the embedding table, which is tied."""
        logits = jnp.einsum(
            "be,ve->bv",
            x,
            self.embed_tokens.weight[...],
            precision="highest",
            preferred_element_type=jnp.float32,
        )
        cap = self.config.final_logit_soft_cap
        return logits if not cap else cap * jnp.tanh(logits / cap)


def load(
    config: Gemma4Config, checkpoint: Checkpoint, dtype: str
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure and its parameters in `dtype`; `nnx.merge` of the two is the model.

    Raises:
      ValueError: parameters that the checkpoint lacks, or has and the model would ignore.
    """
    shapes = nnx.eval_shape(lambda: Gemma4(config, jnp.dtype(dtype)))
    return load_parameters(shapes, checkpoint, jnp.dtype(dtype), config.unused_parameters)


def init_caches(
    config: Gemma4Config,
    num_blocks: Mapping[str, int],
    block_size: int,
    kv_format: Any,
) -> Caches:
    """Empty pools for every layer that owns a cache, `num_blocks` blocks by kind of layer.

    `kv_format` is a format of jattn's, or a pair of them for keys and values.
    """
    return {
        layer.index: jattn.init_kv_cache(
            num_blocks[layer.kind],
            layer.num_kv_heads,
            block_size,
            layer.head_dim,
            format=kv_format,
        )
        for layer in config.caching_layers
    }
