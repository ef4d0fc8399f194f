"""The Gemma 4 text model in flax nnx, with its keys and values in paged caches.

The modules hold only parameters. Caches are an argument and a result: a pytree that a jitted caller
donates, so that writing a token changes its slot in place. Parameter paths are the names in a
Hugging Face checkpoint, and linear weights keep its [out, in] layout, so that loading is a matter
of names.

One decoder layer, for x [T, E] (norms are RMS norms with a weight, `v_norm` has none):

    x = x + post_attention_norm(attention(input_norm(x)))
    x = x + post_feedforward_norm(down(gelu(gate(h)) * up(h))),  h = pre_feedforward_norm(x)
    x = x + post_per_layer_norm(project(gelu(gate_in(x)) * per_layer_input))   (some models)
    x = x * layer_scalar

Axes: T tokens of all sequences, concatenated, B sequences, E hidden size, H query heads, K KV
heads, D head size, L layers, P size of a layer's own embedding.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from examples.engine.caches import Caches
from examples.engine.model import Batch
from examples.models.decoder import Attention, Step, load_causal_lm, pick, tokens_of_logits
from examples.models.gemma4_config import Gemma4Config, Layer
from examples.models.layers import Embedding, GatedMLP, Linear, gelu


class DecoderLayer(nnx.Module):
    """One layer, as in the formula at the top of this file."""

    def __init__(self, index: int, config: Gemma4Config, layer: Layer, dtype: jnp.dtype):
        outline, layer_size = config.outline, config.per_layer_input_size
        size = outline.hidden_size
        self.self_attn = Attention(index, outline, layer.heads, dtype)
        self.mlp = GatedMLP(size, layer.intermediate_size, dtype, gelu)
        self.input_layernorm = outline.make_norm(size, dtype)
        self.post_attention_layernorm = outline.make_norm(size, dtype)
        self.pre_feedforward_layernorm = outline.make_norm(size, dtype)
        self.post_feedforward_layernorm = outline.make_norm(size, dtype)
        if layer_size:
            self.per_layer_input_gate = Linear(size, layer_size, dtype)
            self.per_layer_projection = Linear(layer_size, size, dtype)
            self.post_per_layer_input_norm = outline.make_norm(size, dtype)
        self.layer_scalar = nnx.Param(jnp.ones((1,), dtype))

    def __call__(self, x, per_layer_input, step: Step, caches: Caches, only=None):
        attended, caches = self.self_attn(self.input_layernorm(x), step, caches)
        x = pick(x + self.post_attention_layernorm(attended), only)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        if per_layer_input is not None:
            gated = gelu(self.per_layer_input_gate(x)) * pick(per_layer_input, only)
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar[...][None], caches


class Gemma4(nnx.Module):
    """The text model: tokens and paged caches in, next-token logits and written caches out."""

    def __init__(self, config: Gemma4Config, dtype: jnp.dtype):
        outline, layer_size, count = config.outline, config.per_layer_input_size, len(config.layers)
        size = outline.hidden_size
        self.config = config
        on = {"num_devices": outline.num_devices}
        self.embed_tokens = Embedding(outline.vocab_size, size, dtype, scale=size**0.5, **on)
        if layer_size:
            self.embed_tokens_per_layer = Embedding(
                config.per_layer_vocab_size, count * layer_size, dtype, scale=layer_size**0.5, **on
            )
            self.per_layer_model_projection = Linear(size, count * layer_size, dtype)
            self.per_layer_projection_norm = outline.make_norm(layer_size, dtype)
        self.layers = nnx.List(
            [DecoderLayer(i, config, layer, dtype) for i, layer in enumerate(config.layers)]
        )
        self.norm = outline.make_norm(size, dtype)

    def __call__(self, batch: Batch, caches: Caches) -> tuple[jax.Array, Caches]:
        """Return logits after `batch.logit_tokens`, float32 [B, vocabulary], and written caches."""
        x, step = self.embed_tokens(batch.tokens), Step.of(batch, self.config.outline)
        layer_inputs = self._per_layer_inputs(batch.tokens, x)
        only = tokens_of_logits(batch)
        for index, layer in enumerate(self.layers):
            layer_input = None if layer_inputs is None else layer_inputs[:, index]
            is_last = index == len(self.layers) - 1
            x, caches = layer(x, layer_input, step, caches, only if is_last else None)
        last = pick(x, batch.logit_tokens) if only is None else x
        return self._logits(self.norm(last)), caches

    def _per_layer_inputs(self, tokens: jax.Array, x: jax.Array) -> jax.Array | None:
        """Compute each layer's further input [T, L, P]: its own embedding and a projection of x."""
        if not self.config.per_layer_input_size:
            return None
        shape = (tokens.shape[0], len(self.config.layers), self.config.per_layer_input_size)
        projected = self.per_layer_model_projection(x) * jnp.asarray(x.shape[1] ** -0.5, x.dtype)
        projected = self.per_layer_projection_norm(projected.reshape(shape))
        embedded = self.embed_tokens_per_layer(tokens).reshape(shape)
        return (projected + embedded) * jnp.asarray(2**-0.5, x.dtype)

    def _logits(self, x: jax.Array) -> jax.Array:
        """Compute softly capped float32 logits [B, vocabulary] from the tied embedding table."""
        logits = self.embed_tokens.logits(x)
        cap = self.config.final_logit_soft_cap
        return logits if not cap else cap * jnp.tanh(logits / cap)


load = functools.partial(
    load_causal_lm, Gemma4Config.from_hf, Gemma4, unused=lambda config: config.unused_parameters
)
