"""What decoder-only models have in common: attention over paged caches, layers, the whole.

    x = embed(tokens);   for each layer: x = layer(x);   logits = head(norm(x[logit tokens]))

A *mixer* is what lets tokens of a sequence see each other: attention, or a recurrence. Every mixer
is called as `mixer(x, step, caches) -> (y, caches)`. Parameter paths are a checkpoint's names.

Axes: T tokens, H query heads, K KV heads, D head size, E hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.engine.caches import Caches
from examples.engine.model import AttentionCache, Batch, Model, StateCache
from examples.models import recurrent
from examples.models.checkpoint import Assembly, Checkpoint, load_parameters
from examples.models.layers import Embedding, Head, Linear, logits_from, rope_angles, rotate

MakeNorm = Callable[[int], nnx.Module]  # of a size


@dataclasses.dataclass(frozen=True)
class Step:
    """One step's batch, and what all layers need of it."""

    batch: Batch
    angles: tuple[jax.Array, jax.Array] | None  # cosines and sines, where positions rotate
    rows: recurrent.Rows | None  # whose token is whose, for recurrent layers


@dataclasses.dataclass(frozen=True)
class Heads:
    """An attention layer's geometry and its variations."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # keys a query sees, its own included
    bias: bool = False  # of the projections
    norm: bool = False  # RMS norms of queries and keys
    gate: bool = False  # the output times the sigmoid of a projection that q_proj makes too
    sinks: bool = False  # a logit per head that joins the denominator only
    rotates: bool = True  # queries and keys by their positions

    @property
    def cache(self) -> AttentionCache:
        """What the layer keeps."""
        return AttentionCache(self.num_kv_heads, self.head_dim, window=self.window)


class Attention(nnx.Module):
    """One layer's attention over its own pages."""

    def __init__(self, index: int, size: int, heads: Heads, make_norm: MakeNorm, dtype: jnp.dtype):
        self.index, self.heads = index, heads
        rows, bias = heads.num_heads * heads.head_dim, heads.bias
        self.q_proj = Linear(size, rows * (2 if heads.gate else 1), dtype, bias=bias)
        self.k_proj = Linear(size, heads.num_kv_heads * heads.head_dim, dtype, bias=bias)
        self.v_proj = Linear(size, heads.num_kv_heads * heads.head_dim, dtype, bias=bias)
        self.o_proj = Linear(rows, size, dtype, bias=bias)
        if heads.norm:
            self.q_norm, self.k_norm = make_norm(heads.head_dim), make_norm(heads.head_dim)
        if heads.sinks:
            self.sinks = nnx.Param(jnp.zeros((heads.num_heads,), dtype))

    def __call__(self, x: jax.Array, step: Step, caches: Caches) -> tuple[jax.Array, Caches]:
        num_tokens, heads, gate = x.shape[0], self.heads, None
        query = self.q_proj(x).reshape(num_tokens, heads.num_heads, -1)
        if heads.gate:
            query, gate = jnp.split(query, 2, axis=-1)
        key = self.k_proj(x).reshape(num_tokens, -1, heads.head_dim)
        value = self.v_proj(x).reshape(num_tokens, -1, heads.head_dim)
        if heads.norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if heads.rotates:
            query, key = rotate(query, step.angles), rotate(key, step.angles)
        options = {"sinks": self.sinks[...]} if heads.sinks else {}
        out, caches = caches.attend(self.index, query, step.batch, key=key, value=value, **options)
        out = out if gate is None else out * jax.nn.sigmoid(gate)
        return self.o_proj(out.reshape(num_tokens, -1)), caches


class DecoderLayer(nnx.Module):
    """`x = x + mixer(norm(x)); x = x + mlp(norm(x))`, the mixer under its name in checkpoints."""

    def __init__(
        self, size: int, mixer_name: str, mixer: nnx.Module, mlp: nnx.Module, make_norm: MakeNorm
    ):
        self.mixer_name = mixer_name
        setattr(self, mixer_name, mixer)
        self.mlp = mlp
        self.input_layernorm, self.post_attention_layernorm = make_norm(size), make_norm(size)

    def __call__(self, x: jax.Array, step: Step, caches: Caches) -> tuple[jax.Array, Caches]:
        y, caches = getattr(self, self.mixer_name)(self.input_layernorm(x), step, caches)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), caches


@dataclasses.dataclass(frozen=True)
class Outline:
    """What a whole model has besides its layers."""

    vocab_size: int
    hidden_size: int
    max_positions: int
    tied: bool  # logits come from the embedding table
    frequencies: tuple[float, ...] | None = None  # rotary; None: no layer rotates
    rope_factor: float = 1.0
    recurrent: bool = False
    embedding_name: str = "embed_tokens"  # in checkpoints
    norm_name: str = "norm"

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], frequencies: np.ndarray, rope_factor: float, **others: Any
    ) -> Outline:
        """The outline of a config.json whose layers rotate positions by these frequencies."""
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            max_positions=config.get("max_position_embeddings", 32_768),
            tied=bool(config.get("tie_word_embeddings")),
            frequencies=tuple(map(float, frequencies)),  # static in jit, so it must compare
            rope_factor=rope_factor,
            **others,
        )


class CausalLM(nnx.Module):
    """The whole model: tokens and caches in, next-token logits and written caches out."""

    def __init__(
        self,
        outline: Outline,
        layers: Sequence[nnx.Module],
        make_norm: MakeNorm,
        dtype: jnp.dtype,
    ):
        size = outline.hidden_size
        self.outline = outline
        setattr(self, outline.embedding_name, Embedding(outline.vocab_size, size, dtype))
        self.layers = nnx.List(layers)
        setattr(self, outline.norm_name, make_norm(size))
        if not outline.tied:
            self.lm_head = Head(outline.vocab_size, size, dtype)

    def __call__(self, batch: Batch, caches: Caches) -> tuple[jax.Array, Caches]:
        """Logits after `batch.logit_tokens`, float32 [B, vocabulary], and the written caches."""
        outline = self.outline
        angles = rows = None
        if outline.frequencies is not None:
            frequencies = np.array(outline.frequencies, np.float32)
            angles = rope_angles(frequencies, batch.positions, outline.rope_factor)
        if outline.recurrent:
            rows = recurrent.ragged_rows(
                batch.query_start_loc, batch.tokens.shape[0], batch.max_query_len
            )
        embedding = getattr(self, outline.embedding_name)
        x, step = embedding(batch.tokens), Step(batch, angles, rows)
        for layer in self.layers:
            x, caches = layer(x, step, caches)
        last = getattr(self, outline.norm_name)(x.at[batch.logit_tokens].get(mode="clip"))
        if outline.tied:
            return logits_from(last, embedding.weight[...]), caches
        return self.lm_head(last), caches


def load_causal_lm(
    checkpoint: Checkpoint,
    dtype: str,
    make: Callable[[], CausalLM],
    layers: Mapping[int, AttentionCache | StateCache],
    *,
    assemblies: Mapping[str, Assembly] | None = None,
    unused: Iterable[str] = (),
    config: Any = None,
) -> Model:
    """A checkpoint's parameters in a model, as the engine takes it.

    Args:
      checkpoint: where the parameters are.
      dtype: what to convert them to and compute in.
      make: builds the model, of zeros; only its shapes are used.
      layers: what each layer keeps of a sequence.
      assemblies: parameters that a checkpoint may hold in pieces.
      unused: names the checkpoint may have and the model does without.
      config: the family's own description, passed on.
    """
    shapes = nnx.eval_shape(make)
    graphdef, params = load_parameters(shapes, checkpoint, jnp.dtype(dtype), unused, assemblies)

    def step(params: nnx.State, caches: Caches, batch: Batch) -> tuple[jax.Array, Caches]:
        return nnx.merge(graphdef, params)(batch, caches)

    return Model(
        name=checkpoint.directory.name,
        vocab_size=shapes.outline.vocab_size,
        max_positions=shapes.outline.max_positions,
        dtype=dtype,
        layers=layers,
        params=params,
        step=step,
        stop_tokens=checkpoint.stop_tokens,
        config=config,
    )
