"""Multi-token prediction (MTP): a model's own layer that predicts the token after the next one.

With h_i the hidden state of token i, after the model's last norm, and t_{i+1} the token after it,

    x_i = fc [norm_e(embed(t_{i+1})), norm_h(h_i)],    m_i = norm(layer(x_0 ... x_i)_i)
    logits of t_{i+2} = head(m_i)

where embedding and head are the model's. The layer attends at the positions i of the hidden states,
to its own keys and values. For further tokens, m_i takes the role of h_{i+1} and the guess of
t_{i+2} that of the token after it, and so on.

The formula is that of DeepSeek-V3's report (arXiv 2412.19437, equations 21 to 23). Checkpoints of
Qwen3-Next have one such layer under `mtp.`, with full attention and experts; checkpoints of
DeepSeek-V3 have one after their last layer, under different names (`deepseek.with_predictor`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.engine.caches import Caches
from examples.engine.model import AttentionCache, Batch, StateCache
from examples.models.decoder import CausalLM, Config, DecoderLayer, Outline, Step
from examples.models.layers import Linear


@dataclasses.dataclass(frozen=True)
class PredictingConfig(Config):
    """The configuration of a model that may have an MTP layer."""

    _: dataclasses.KW_ONLY
    mtp: Any = None  # that layer's attention, such as `Heads`, if it is wanted

    def caches(self, dtype: str) -> dict[int, AttentionCache | StateCache]:
        """Return the cache of each layer; the MTP layer comes after all others."""
        kept = super().caches(dtype)
        return kept if self.mtp is None else {**kept, len(self.layers): self.mtp.cache(dtype)}


class Predictor(nnx.Module):
    """The MTP layer and the projection before it, under the names of published checkpoints."""

    def __init__(self, outline: Outline, layer: DecoderLayer, dtype: jnp.dtype):
        size = outline.hidden_size
        self.pre_fc_norm_embedding = outline.make_norm(size, dtype)
        self.pre_fc_norm_hidden = outline.make_norm(size, dtype)
        self.fc = Linear(2 * size, size, dtype)
        self.layers = nnx.List([layer])
        self.norm = outline.make_norm(size, dtype)

    def __call__(
        self, embedded: jax.Array, hidden: jax.Array, step: Step, caches: Caches
    ) -> tuple[jax.Array, Caches]:
        """Return m [T, E] of embedded next tokens and hidden states [T, E], and written caches."""
        both = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)
        x = self.fc(jnp.concatenate(both, axis=-1))
        for layer in self.layers:
            x, caches = layer(x, step, caches)
        return self.norm(x), caches


class PredictingLM(CausalLM):
    """A model with a `Predictor`, which runs only on request."""

    def __init__(
        self,
        outline: Outline,
        layers: Sequence[nnx.Module],
        layer: DecoderLayer,
        dtype: jnp.dtype,
    ):
        super().__init__(outline, layers, dtype)
        self.mtp = Predictor(outline, layer, dtype)

    def step(self, batch: Batch, caches: Caches) -> tuple[jax.Array, jax.Array, Caches]:
        """Run the model; also return the hidden states h [T, E] of all tokens, after the logits."""
        x, caches = self.run_layers(batch, caches)
        hidden = getattr(self, self.outline.norm_name)(x)
        return self._after(hidden, batch), hidden, caches

    def guess(
        self, batch: Batch, caches: Caches, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array, Caches]:
        """Return logits of the tokens after the next ones, m [T, E], and the caches.

        Args:
          batch: `tokens` follow the hidden states' tokens; `positions` are the hidden states'.
          caches: written at the hidden states' slots.
          hidden: h [T, E], or m of the tokens before.
        """
        embedded = getattr(self, self.outline.embedding_name)(batch.tokens)
        hidden, caches = self.mtp(embedded, hidden, Step.of(batch, self.outline), caches)
        return self._after(hidden, batch), hidden, caches

    def _after(self, hidden: jax.Array, batch: Batch) -> jax.Array:
        return self.head(hidden.at[batch.logit_tokens].get(mode="clip"))
