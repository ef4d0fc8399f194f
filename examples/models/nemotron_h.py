"""Nemotron-H: Mamba-2 layers, some attention without positions, and feed-forward layers or experts.

Every layer is one of these: `x = x + mixer(norm(x))`. A Mamba-2 layer projects x to
`z, x B C, dt`, passes `x B C` through a causal convolution and silu, and computes per head, with
dt = softplus(dt + bias),

    S_t = exp(-exp(A) dt_t) S_{t-1} + dt_t x_t B_t^T
    y_t = S_t C_t + D x_t,    out_proj(norm(y * silu(z)))

where B and C are shared by groups of heads and the norm is over each group's channels
(`recurrent.py` has the recurrence). It carries S and the convolution's last inputs from step to
step. Feed-forward layers square: `down(relu(up x) ** 2)`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jattn.blocks as jb
from examples.engine.caches import Caches
from examples.engine.model import AttentionCache, Model, StateCache
from examples.models.checkpoint import Checkpoint
from examples.models.decoder import Attention, CausalLM, Heads, Outline, Step, load_causal_lm
from examples.models.layers import Linear, RMSNorm, check_config, over_last_axis, unit_rms
from examples.models.moe import expert_dot, mix_experts, stacked_experts
from examples.models.recurrent import causal_conv, recur

MAMBA, ATTENTION, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
# How older files spell a layer, in `hybrid_override_pattern` and in `layers_block_type`.
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}
OLD_NAMES = {"mamba": MAMBA, "attention": ATTENTION}
INTEGERS = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
)


@dataclasses.dataclass(frozen=True)
class MambaSizes:
    """The geometry of a Mamba-2 layer."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_kernel: int
    conv_bias: bool
    bias: bool  # of the projections
    time_step_limit: tuple[float, float]
    state_dtype: str

    @property
    def size(self) -> int:
        """Channels of x, and of z."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.size + 2 * self.num_groups * self.state_size

    def cache(self, dtype: str) -> StateCache:
        """What the layer keeps: its convolution's inputs as they come, S in its own dtype."""
        layout = jb.mamba2_state(
            intermediate_size=self.size,
            num_groups=self.num_groups,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            state_size=self.state_size,
            conv_kernel=self.conv_kernel,
            dtypes=(dtype, self.state_dtype),
        )
        return StateCache(layout)


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """A mixture's experts and how its router chooses among them."""

    count: int
    per_token: int
    size: int
    shared_size: int
    latent_size: int | None  # what experts read and write, None: the hidden size
    num_groups: int  # experts are chosen among those of some groups
    chosen_groups: int
    normalize: bool
    scale: float


@dataclasses.dataclass(frozen=True)
class NemotronHConfig:
    """A Nemotron-H checkpoint's description of itself. Make one with `from_hf`."""

    outline: Outline
    kinds: tuple[str, ...]
    heads: Heads
    mamba: MambaSizes
    experts: ExpertSizes
    intermediate_size: int
    mlp_bias: bool
    eps: float
    dtype: str

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> NemotronHConfig:
        """Read a `config.json`.

        Raises:
          ValueError: what the file lacks or asks for that this model does not have, all at once.
        """
        kinds = _kinds(config)

        def more() -> list[str]:
            unknown = sorted(set(kinds) - set(LETTERS.values()))
            if unknown or not kinds:
                known = sorted(LETTERS.values())
                return [f"layers_block_type has {unknown or 'nothing'}, but must be of {known}"]
            return []

        check_config(
            config,
            ("nemotron_h",),
            INTEGERS + (("n_routed_experts", "num_experts_per_tok") if MOE in kinds else ()),
            {
                "attention_bias": (False, None),
                "mamba_hidden_act": ("silu",),
                "mlp_hidden_act": ("relu2",),
                "sliding_window": (None,),
            },
            more,
        )
        low, high = (_number(x) for x in config.get("time_step_limit") or (0.0, float("inf")))
        return cls(
            outline=Outline(
                vocab_size=config["vocab_size"],
                hidden_size=config["hidden_size"],
                max_positions=config.get("max_position_embeddings", 4096),
                tied=bool(config.get("tie_word_embeddings")),
                recurrent=True,
                embedding_name="embeddings",
                norm_name="norm_f",
            ),
            kinds=kinds,
            heads=Heads(
                config["num_attention_heads"],
                config["num_key_value_heads"],
                config["head_dim"],
                rotates=False,
            ),
            mamba=MambaSizes(
                num_heads=config["mamba_num_heads"],
                head_dim=config["mamba_head_dim"],
                num_groups=config["n_groups"],
                state_size=config["ssm_state_size"],
                conv_kernel=config["conv_kernel"],
                conv_bias=config.get("use_conv_bias", True),
                bias=bool(config.get("use_bias")),
                time_step_limit=(low, high),
                state_dtype=config.get("mamba_ssm_cache_dtype", "float32"),
            ),
            experts=ExpertSizes(
                count=config.get("n_routed_experts") or 0,
                per_token=config.get("num_experts_per_tok") or 0,
                size=config.get("moe_intermediate_size") or 0,
                shared_size=config.get("moe_shared_expert_intermediate_size") or 0,
                latent_size=config.get("moe_latent_size"),
                num_groups=config.get("n_group", 1),
                chosen_groups=config.get("topk_group", 1),
                normalize=config.get("norm_topk_prob", True),
                scale=config.get("routed_scaling_factor", 1.0),
            ),
            intermediate_size=config["intermediate_size"],
            mlp_bias=bool(config.get("mlp_bias")),
            eps=config.get("layer_norm_epsilon", 1e-5),
            dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        )

    def caches(self, dtype: str) -> dict[int, AttentionCache | StateCache]:
        """What each layer keeps; feed-forward layers keep nothing."""
        kept = {ATTENTION: self.heads.cache, MAMBA: self.mamba.cache(dtype)}
        return {index: kept[kind] for index, kind in enumerate(self.kinds) if kind in kept}


def _kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    listed = config.get("layers_block_type") or config.get("layer_types")
    if listed is None:
        listed = [LETTERS.get(c, c) for c in config.get("hybrid_override_pattern") or ""]
    return tuple(OLD_NAMES.get(kind, kind) for kind in listed)


def _number(x: Any) -> float:
    """A number of a config, which may spell infinity as an object."""
    return float(x["__float__"]) if isinstance(x, Mapping) else float(x)


class Conv(nnx.Module):
    """The weights [channels, 1, taps] and the bias of a convolution per channel."""

    def __init__(self, channels: int, taps: int, bias: bool, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((channels, 1, taps), dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros((channels,), dtype))
        self.has_bias = bias


class GroupNorm(nnx.Module):
    """`unit_rms` over each group of channels, times a weight per channel."""

    def __init__(self, size: int, num_groups: int, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.num_groups, self.eps = num_groups, eps

    def __call__(self, x: jax.Array) -> jax.Array:
        grouped = unit_rms(x.reshape(x.shape[0], self.num_groups, -1), self.eps)
        weight = self.weight[...].astype(jnp.float32)
        return grouped.reshape(x.shape) * over_last_axis(weight, x)


class Mamba2(nnx.Module):
    """One layer, as the formula at the head of this file says."""

    def __init__(self, index: int, size: int, sizes: MambaSizes, eps: float, dtype: jnp.dtype):
        self.index, self.sizes = index, sizes
        num_out = sizes.size + sizes.channels + sizes.num_heads
        self.in_proj = Linear(size, num_out, dtype, bias=sizes.bias)
        self.conv1d = Conv(sizes.channels, sizes.conv_kernel, sizes.conv_bias, dtype)
        self.A_log = nnx.Param(jnp.zeros((sizes.num_heads,), dtype))
        self.D = nnx.Param(jnp.zeros((sizes.num_heads,), dtype))
        self.dt_bias = nnx.Param(jnp.zeros((sizes.num_heads,), dtype))
        self.norm = GroupNorm(sizes.size, sizes.num_groups, eps, dtype)
        self.out_proj = Linear(sizes.size, size, dtype, bias=sizes.bias)

    def __call__(self, x: jax.Array, step: Step, caches: Caches) -> tuple[jax.Array, Caches]:
        sizes, num_tokens = self.sizes, x.shape[0]
        inputs, state = caches.read_states(self.index, step.batch)
        z, mixed, dt = jnp.split(
            self.in_proj(x), (sizes.size, sizes.size + sizes.channels), axis=-1
        )
        bias = self.conv1d.bias[...] if sizes.conv_bias else None
        mixed, inputs = causal_conv(mixed, inputs, self.conv1d.weight[...][:, 0], bias, step.rows)
        mixed = jax.nn.silu(mixed).astype(jnp.float32)
        ends = (sizes.size, sizes.size + sizes.num_groups * sizes.state_size)
        y, key, query = jnp.split(mixed, ends, axis=-1)
        y = y.reshape(num_tokens, sizes.num_heads, -1)
        key, query = (
            jnp.repeat(
                shared.reshape(num_tokens, sizes.num_groups, -1),
                sizes.num_heads // sizes.num_groups,
                axis=1,
            )
            for shared in (key, query)
        )
        dt_bias, a_log, skip = (
            param[...].astype(jnp.float32)[None] for param in (self.dt_bias, self.A_log, self.D)
        )
        dt = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + dt_bias), *sizes.time_step_limit)
        out, after = recur(
            query,
            key,
            y * dt[..., None],
            -jnp.exp(a_log) * dt,
            None,
            state.astype(jnp.float32),
            step.rows,
        )
        out = (out + y * skip[..., None]).reshape(num_tokens, -1)
        out = self.norm(out * jax.nn.silu(z.astype(jnp.float32)))
        caches = caches.write_states(self.index, step.batch, (inputs, after.astype(state.dtype)))
        return self.out_proj(out.astype(x.dtype)), caches


class SquaredMLP(nnx.Module):
    """`down(relu(up(x)) ** 2)`."""

    def __init__(self, size: int, inner: int, bias: bool, dtype: jnp.dtype):
        self.up_proj = Linear(size, inner, dtype, bias=bias)
        self.down_proj = Linear(inner, size, dtype, bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jnp.square(jax.nn.relu(self.up_proj(x))))


class Experts(nnx.Module):
    """All experts' matrices [out, in]."""

    def __init__(self, count: int, size: int, inner: int, dtype: jnp.dtype):
        self.up_proj = nnx.Param(jnp.zeros((count, inner, size), dtype))
        self.down_proj = nnx.Param(jnp.zeros((count, size, inner), dtype))

    def __call__(self, rows: jax.Array, experts: jax.Array, counts: jax.Array) -> jax.Array:
        inner = jnp.square(
            jax.nn.relu(expert_dot(rows, self.up_proj[...], counts, transposed=True))
        )
        return expert_dot(inner, self.down_proj[...], counts, transposed=True)


class Router(nnx.Module):
    """Chooses the experts of a token by sigmoids, corrected for balance, within some groups."""

    def __init__(self, size: int, sizes: ExpertSizes, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((sizes.count, size), dtype))
        self.e_score_correction_bias = nnx.Param(jnp.zeros((sizes.count,), dtype))
        self.sizes = sizes

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Experts int32 [T, k] and their shares [T, k]."""
        sizes = self.sizes
        weight = self.weight[...].astype(jnp.float32)
        scores = jnp.einsum("ti,ei->te", x.astype(jnp.float32), weight, precision="highest")
        scores = jax.nn.sigmoid(scores)
        wanted = scores + self.e_score_correction_bias[...].astype(jnp.float32)[None]
        if sizes.num_groups > 1:
            grouped = wanted.reshape(x.shape[0], sizes.num_groups, -1)
            best = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
            _, groups = jax.lax.top_k(best, sizes.chosen_groups)
            allowed = jax.nn.one_hot(groups, sizes.num_groups, dtype=bool).any(axis=1)
            wanted = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(wanted.shape)
        _, experts = jax.lax.top_k(wanted, sizes.per_token)
        shares = jnp.take_along_axis(scores, experts, axis=1)
        if sizes.normalize:
            shares = shares / (shares.sum(axis=-1, keepdims=True) + 1e-20)
        return experts, shares * sizes.scale


class MixtureOfExperts(nnx.Module):
    """Experts, their router, and an expert that sees every token."""

    def __init__(self, size: int, sizes: ExpertSizes, bias: bool, dtype: jnp.dtype):
        self.sizes = sizes
        self.gate = Router(size, sizes, dtype)
        inside = sizes.latent_size or size
        self.experts = Experts(sizes.count, inside, sizes.size, dtype)
        self.shared_experts = SquaredMLP(size, sizes.shared_size, bias, dtype)
        if sizes.latent_size:
            self.fc1_latent_proj = Linear(size, inside, dtype, bias=bias)
            self.fc2_latent_proj = Linear(inside, size, dtype, bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        experts, shares = self.gate(x)
        inside = self.fc1_latent_proj(x) if self.sizes.latent_size else x
        mixed = mix_experts(inside, experts, shares, self.sizes.count, self.experts)
        mixed = self.fc2_latent_proj(mixed) if self.sizes.latent_size else mixed
        return mixed + self.shared_experts(x)


class Layer(nnx.Module):
    """`x + mixer(norm(x))`."""

    def __init__(self, mixer: nnx.Module, norm: nnx.Module, mixes_tokens: bool):
        self.mixer, self.norm, self.mixes_tokens = mixer, norm, mixes_tokens

    def __call__(self, x: jax.Array, step: Step, caches: Caches) -> tuple[jax.Array, Caches]:
        if not self.mixes_tokens:
            return x + self.mixer(self.norm(x)), caches
        y, caches = self.mixer(self.norm(x), step, caches)
        return x + y, caches


def make(config: NemotronHConfig, dtype: jnp.dtype) -> CausalLM:
    """The model, of zeros."""
    size = config.outline.hidden_size
    make_norm = functools.partial(RMSNorm, eps=config.eps, dtype=dtype)
    mixers = {
        MAMBA: lambda index: Mamba2(index, size, config.mamba, config.eps, dtype),
        ATTENTION: lambda index: Attention(index, size, config.heads, make_norm, dtype),
        MLP: lambda _: SquaredMLP(size, config.intermediate_size, config.mlp_bias, dtype),
        MOE: lambda _: MixtureOfExperts(size, config.experts, config.mlp_bias, dtype),
    }
    layers = [
        Layer(mixers[kind](index), make_norm(size), kind in (MAMBA, ATTENTION))
        for index, kind in enumerate(config.kinds)
    ]
    return CausalLM(config.outline, layers, make_norm, dtype)


def load(checkpoint: Checkpoint, dtype: str | None = None) -> Model:
    """The model with its parameters in `dtype`, or in what config.json says.

    Raises:
      ValueError: a config of another model, or parameters that do not fit it.
    """
    config = NemotronHConfig.from_hf(checkpoint.config)
    dtype = dtype or config.dtype
    assemblies = {}
    for index, kind in enumerate(config.kinds):
        if kind == MOE:
            path, pieces = f"layers.{index}.mixer.experts", ("up_proj", "down_proj")
            each = {name: (name,) for name in pieces}
            assemblies |= stacked_experts(path, config.experts.count, each)
    return load_causal_lm(
        checkpoint,
        dtype,
        lambda: make(config, jnp.dtype(dtype)),
        config.caches(dtype),
        assemblies=assemblies,
        config=config,
    )
