"""The common parts of decoder-only models: attention over paged caches, layers, loading.

    x = embed(tokens);   for each layer: x = layer(x);   logits = head(norm(x[logit tokens]))

A *mixer* lets tokens of a sequence see each other: it is attention, or a recurrence. Every mixer is
called as `mixer(x, step, caches) -> (y, caches)`. Parameter paths are a checkpoint's names.

Axes: T tokens, H query heads, K KV heads, D head size, E hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.engine.caches import Caches
from examples.engine.mesh import DeviceMesh, local_part
from examples.engine.model import AttentionCache, Batch, Model, Mtp, StateCache
from examples.models import joined, lora, padding, recurrent
from examples.models.checkpoint import Assembly, Checkpoint, load_parameters, shapes_of
from examples.models.config import tells_of_config
from examples.models.layers import Embedding, Linear, RMSNorm, apply_all, unit_rms
from examples.models.parallel import CONTEXT
from examples.models.rope import Rope, rotate


@dataclasses.dataclass(frozen=True)
class Outline:
    """The parts of a whole model other than its layers."""

    vocab_size: int
    hidden_size: int
    max_positions: int
    tied: bool  # logits come from the embedding table
    eps: float  # of the norms
    dtype: str  # in which the file recommends to compute
    norm_offset: float = 0.0  # added to the norms' weights
    ropes: tuple[Rope, ...] = ()  # all that the layers use
    recurrent: bool = False
    num_devices: int = 1  # devices that share the weights of a layer, each with a part of them
    embedding_name: str = "embed_tokens"  # in checkpoints
    norm_name: str = "norm"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], **others: Any) -> Outline:
        """Read a config.json; `others` are fields that the family reads differently."""
        read = {
            "vocab_size": config["vocab_size"],
            "hidden_size": config["hidden_size"],
            "max_positions": config.get("max_position_embeddings", 32_768),
            "tied": bool(config.get("tie_word_embeddings")),
            "eps": config.get("rms_norm_eps", 1e-6),
            "dtype": config.get("dtype") or config.get("torch_dtype") or "float32",
        }
        return cls(**{**read, **others})

    def make_norm(self, size: int, dtype: jnp.dtype) -> RMSNorm:
        """Make a norm like those of the model's layers."""
        return RMSNorm(size, self.eps, dtype, offset=self.norm_offset)


@dataclasses.dataclass(frozen=True)
class Config:
    """A checkpoint's configuration; families add fields and `from_hf`."""

    outline: Outline
    layers: tuple[Any, ...]  # each has `cache(dtype)`, which says what it caches

    def caches(self, dtype: str) -> dict[int, AttentionCache | StateCache]:
        """Return the cache of each layer, without layers that cache nothing."""
        kept = {index: layer.cache(dtype) for index, layer in enumerate(self.layers)}
        return {index: cache for index, cache in kept.items() if cache is not None}


@dataclasses.dataclass(frozen=True)
class Heads:
    """An attention layer's geometry and its variations."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # keys a query sees, its own included
    rope: Rope | None = None  # None: queries and keys do not depend on positions
    scale: float | None = None  # of the logits; None: 1 / sqrt(head_dim)
    bias: bool = False  # of the projections
    norm: bool = False  # RMS norms of queries and keys
    gate: bool = False  # multiply the output by the sigmoid of a projection, which q_proj computes
    sinks: bool = False  # a logit per head that joins only the denominator
    key_is_value: bool = False  # one projection makes both
    unit_values: bool = False  # values are divided by their RMS
    reads_layer: int | None = None  # attends to this layer's pages and keeps none
    context: int = 1  # devices that share the KV heads, and the tokens if there is no window

    def cache(self, dtype: str) -> AttentionCache | None:
        """Return the layer's cache, if it has one."""
        if self.reads_layer is not None:
            return None
        dealt = self.context if self.window is None else 1
        return AttentionCache(self.num_kv_heads, self.head_dim, window=self.window, context=dealt)


@dataclasses.dataclass(frozen=True)
class Step:
    """One step's batch, and what all layers derive from it."""

    batch: Batch
    angles: Mapping[Rope | None, tuple[jax.Array, jax.Array]]
    rows: recurrent.Rows | None  # each token's sequence, for recurrent layers

    @classmethod
    def of(cls, batch: Batch, outline: Outline) -> Step:
        """Make a model's step."""
        angles, rows = {rope: rope.angles(batch.positions) for rope in outline.ropes}, None
        if outline.recurrent:
            rows = recurrent.ragged_rows(
                batch.query_start_loc, batch.tokens.shape[0], batch.max_query_len
            )
        return cls(batch, angles, rows)


class Attention(nnx.Module):
    """One layer's attention over its own pages, or read-only over another layer's."""

    def __init__(self, index: int, outline: Outline, heads: Heads, dtype: jnp.dtype):
        self.index, self.heads, self.eps = index, heads, outline.eps
        size, bias, head_dim = outline.hidden_size, heads.bias, heads.head_dim
        rows, kv_rows = heads.num_heads * head_dim, heads.num_kv_heads * head_dim
        self.q_proj = Linear(size, rows * (2 if heads.gate else 1), dtype, bias=bias)
        if heads.norm:
            self.q_norm = outline.make_norm(head_dim, dtype)
        if heads.reads_layer is None:
            self.k_proj = Linear(size, kv_rows, dtype, bias=bias)
            if heads.norm:
                self.k_norm = outline.make_norm(head_dim, dtype)
            if not heads.key_is_value:
                self.v_proj = Linear(size, kv_rows, dtype, bias=bias)
        self.o_proj = Linear(rows, size, dtype, bias=bias, sums_parts=True)
        if heads.sinks:
            self.sinks = nnx.Param(jnp.zeros((heads.num_heads,), dtype))

    @property
    def inputs(self) -> tuple[Linear, ...]:
        """The layers whose weights multiply its input."""
        names = ("q_proj", "k_proj", "v_proj")
        return tuple(getattr(self, name) for name in names if hasattr(self, name))

    def __call__(self, x: jax.Array, step: Step, caches: Caches) -> tuple[jax.Array, Caches]:
        num_tokens, heads, gate = x.shape[0], self.heads, None
        query, *others = apply_all(x, self.inputs)
        query = query.reshape(num_tokens, heads.num_heads, -1)
        if heads.gate:
            query, gate = jnp.split(query, 2, axis=-1)
        query = self._normalize_and_rotate(query, "q_norm", step)
        layer, key, value = heads.reads_layer, None, None
        if layer is None:
            layer, key = self.index, others[0].reshape(num_tokens, -1, heads.head_dim)
            value = key if heads.key_is_value else others[1].reshape(key.shape)
            if heads.unit_values:
                value = unit_rms(value, self.eps).astype(x.dtype)
            key = self._normalize_and_rotate(key, "k_norm", step)
        options = {"sinks": self.sinks[...]} if heads.sinks else {}
        out, caches = caches.attend(
            layer, query, step.batch, key=key, value=value, scale=heads.scale, **options
        )
        out = out if gate is None else out * jax.nn.sigmoid(gate)
        return self.o_proj(out.reshape(num_tokens, -1)), caches

    def _normalize_and_rotate(self, x: jax.Array, norm: str, step: Step) -> jax.Array:
        x = getattr(self, norm)(x) if self.heads.norm else x
        return x if self.heads.rope is None else rotate(x, step.angles[self.heads.rope])


def tokens_of_logits(batch: Batch) -> jax.Array | None:
    """Return the tokens that the last layer computes after its mixer.

    None: all, because logits of all are wanted, or because adapters are given for all.
    """
    few = len(batch.logit_tokens) < len(batch.tokens) and batch.adapters is None
    return batch.logit_tokens if few else None


def used_by(batch: Batch) -> padding.Used | None:
    """Return which part of a step is not padding, if the batch says so."""
    if batch.num_tokens is None:
        assert batch.num_logits is None, "num_logits needs num_tokens"
        return None
    assert batch.num_logits is not None, "num_tokens needs num_logits"
    sizes = len(batch.tokens), len(batch.logit_tokens)
    return padding.Used(batch.num_tokens, sizes[0], batch.num_logits, sizes[1])


def pick(x: jax.Array, tokens: jax.Array | None) -> jax.Array:
    """Return rows of x [T, ...], clipping indices that are out of range; None: all rows."""
    return x if tokens is None else x.at[tokens].get(mode="clip")


class DecoderLayer(nnx.Module):
    """`x = x + mixer(norm(x)); x = x + mlp(norm(x))`, the mixer under its name in checkpoints.

    With `only`, it computes only these tokens after the mixer: no later layer needs others.
    """

    def __init__(
        self,
        outline: Outline,
        mixer: nnx.Module,
        mlp: nnx.Module,
        dtype: jnp.dtype,
        *,
        mixer_name: str = "self_attn",
    ):
        self.mixer_name = mixer_name
        setattr(self, mixer_name, mixer)
        self.mlp = mlp
        self.input_layernorm = outline.make_norm(outline.hidden_size, dtype)
        self.post_attention_layernorm = outline.make_norm(outline.hidden_size, dtype)

    def __call__(
        self, x: jax.Array, step: Step, caches: Caches, only: jax.Array | None = None
    ) -> tuple[jax.Array, Caches]:
        y, caches = getattr(self, self.mixer_name)(self.input_layernorm(x), step, caches)
        x = pick(x + y, only)
        return x + self.mlp(self.post_attention_layernorm(x)), caches


class CausalLM(nnx.Module):
    """The whole model: tokens and caches in, next-token logits and written caches out."""

    def __init__(self, outline: Outline, layers: Sequence[nnx.Module], dtype: jnp.dtype):
        size = outline.hidden_size
        self.outline = outline
        rows, on = outline.vocab_size, {"num_devices": outline.num_devices}
        setattr(self, outline.embedding_name, Embedding(rows, size, dtype, **on))
        self.layers = nnx.List(layers)
        setattr(self, outline.norm_name, outline.make_norm(size, dtype))
        if not outline.tied:
            self.lm_head = Embedding(rows, size, dtype, **on)

    def __call__(self, batch: Batch, caches: Caches) -> tuple[jax.Array, Caches]:
        """Return logits after `batch.logit_tokens`, float32 [B, vocabulary], and written caches."""
        only = tokens_of_logits(batch)
        x, caches = self.run_layers(batch, caches, only)
        last = pick(x, batch.logit_tokens) if only is None else x
        return self.head(getattr(self, self.outline.norm_name)(last)), caches

    def run_layers(
        self, batch: Batch, caches: Caches, only: jax.Array | None = None
    ) -> tuple[jax.Array, Caches]:
        """Return the last layer's output [T, E], or that of tokens `only`, and written caches."""
        embedding = getattr(self, self.outline.embedding_name)
        x, step = embedding(batch.tokens), Step.of(batch, self.outline)
        *others, last = self.layers
        for layer in others:
            x, caches = layer(x, step, caches)
        return last(x, step, caches, only)

    def head(self, hidden: jax.Array) -> jax.Array:
        """Compute float32 logits [R, vocabulary] of normed hidden states [R, E]."""
        outline = self.outline
        table = getattr(self, outline.embedding_name) if outline.tied else self.lm_head
        return table.logits(hidden)


def make_attention_model(
    config: Config, make_mlp: Callable[[], nnx.Module], dtype: jnp.dtype
) -> CausalLM:
    """Make a model of zeros, all of whose layers attend: `config.layers` are `Heads`."""
    outline = config.outline
    layers = [
        DecoderLayer(outline, Attention(index, outline, heads, dtype), make_mlp(), dtype)
        for index, heads in enumerate(config.layers)
    ]
    return CausalLM(outline, layers, dtype)


def load_causal_lm(
    read_config: Callable[[Mapping[str, Any]], Any],
    make: Callable[[Any, jnp.dtype], nnx.Module],
    checkpoint: Checkpoint,
    dtype: str | None = None,
    mesh: DeviceMesh | None = None,
    *,
    assemblies: Callable[[Any], Mapping[str, Assembly]] = lambda config: {},
    unused: Callable[[Any], Iterable[str]] = lambda config: (),
    join: bool = False,
) -> Model:
    """Load a checkpoint's parameters into a model for the engine.

    Args:
      read_config: turns config.json into the family's `Config`.
      make: builds a model of zeros from a config; only its shapes are used.
      checkpoint: the opened checkpoint.
      dtype: the dtype to convert to and compute in; None: config.json's.
      mesh: the devices that share the model; None: the default device has all of it.
      assemblies: parameters that the checkpoint may hold in parts.
      unused: names that the checkpoint may have but the model does not need.
      join: on one device, use one product for layers with the same input (`joined.py`).

    Raises:
      ValueError: the config is of a different model, the parameters do not fit it, or it cannot be
        divided among the devices of the mesh.
    """
    with tells_of_config(checkpoint.directory):
        config = read_config(checkpoint.config)
        dtype = dtype or config.outline.dtype
        whole = part = nnx.eval_shape(lambda: make(config, jnp.dtype(dtype)))
    name, local = checkpoint.directory.name, config
    if mesh is not None:
        local = local_part(config, mesh.num_parts, mesh.sizes[CONTEXT], name)
        part = nnx.eval_shape(lambda: make(local, jnp.dtype(dtype)))
    graphdef, params = load_parameters(
        whole, checkpoint, jnp.dtype(dtype), unused(config), assemblies(config), mesh, part
    )
    if join and mesh is None:
        params = joined.join(graphdef, params)

    # The structure is closed over: an nnx module passed as an argument would be split and hashed
    # again at every step.
    def model_of(params: Any, batch: Batch) -> nnx.Module:
        if not isinstance(params, lora.Adapted):
            return joined.merge(graphdef, params)
        model = joined.merge(graphdef, params.base)
        if batch.adapters is not None:  # MTP guesses have none
            lora.attach(model, params, batch.adapters)
        return model

    def step(params: nnx.State, caches: Caches, batch: Batch) -> tuple[jax.Array, Caches]:
        with padding.leave_out(used_by(batch)):
            return model_of(params, batch)(batch, caches)

    def step_with_hidden(params: nnx.State, caches: Caches, batch: Batch):
        with padding.leave_out(used_by(batch)):
            return model_of(params, batch).step(batch, caches)

    def guess(params: nnx.State, caches: Caches, batch: Batch, hidden: jax.Array):
        with padding.leave_out(used_by(batch)):
            return model_of(params, batch).guess(batch, caches, hidden)

    return Model(
        name=name,
        vocab_size=config.outline.vocab_size,
        max_positions=config.outline.max_positions,
        dtype=dtype,
        layers=local.caches(dtype),
        params=params,
        step=step,
        stop_tokens=checkpoint.stop_tokens,
        config=config,
        mesh=mesh,
        whole_layers=config.caches(dtype) if mesh else {},
        parameters=shapes_of(whole, part) if mesh else {},
        linears=lora.linears_of(whole, part),
        unused=frozenset(unused(config)),
        mtp=Mtp(len(config.layers), config.outline.hidden_size, step_with_hidden, guess)
        if hasattr(whole, "mtp")
        else None,
    )
