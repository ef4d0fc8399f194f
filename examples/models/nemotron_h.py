"""Nemotron-H: Mamba-2 layers, some attention without positions, and feed-forward layers or experts.

Every layer is one of these: `x = x + mixer(norm(x))`. A Mamba-2 layer projects x to
`z, x B C, dt`, passes `x B C` through a causal convolution and silu, and computes per head, with
dt = softplus(dt + bias),

    S_t = exp(-exp(A) dt_t) S_{t-1} + dt_t x_t B_t^T
    y_t = S_t C_t + D x_t,    out_proj(norm(y * silu(z)))

where groups of heads share B and C, and the norm is over each group's channels
(`recurrent.py` has the recurrence). It carries S and the convolution's last inputs from step to
step. Feed-forward layers square: `down(relu(up x) ** 2)`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from examples.engine.caches import Caches
from examples.models import parallel
from examples.models.checkpoint import Assembly
from examples.models.decoder import Attention, CausalLM, Outline, Step, load_causal_lm, pick
from examples.models.layers import DepthwiseConv, Linear, over_last_axis, unit_rms
from examples.models.moe import ExpertSizes, Router, expert_dot, mix_experts, stacked_experts
from examples.models.nemotron_h_config import (
    ATTENTION,
    MAMBA,
    MLP,
    MOE,
    MambaSizes,
    NemotronHConfig,
)
from examples.models.recurrent import causal_conv, recur


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
    """One layer, as in the formula at the top of this file."""

    def __init__(self, index: int, size: int, sizes: MambaSizes, eps: float, dtype: jnp.dtype):
        self.index, self.sizes = index, sizes
        rows = (sizes.size, *sizes.sections, sizes.num_heads)
        self.in_proj = Linear(size, sum(rows), dtype, bias=sizes.bias, sections=rows)
        self.conv1d = DepthwiseConv(sizes.sections, sizes.conv_kernel, dtype, bias=sizes.conv_bias)
        self.A_log = nnx.Param(jnp.zeros((sizes.num_heads,), dtype))
        self.D = nnx.Param(jnp.zeros((sizes.num_heads,), dtype))
        self.dt_bias = nnx.Param(jnp.zeros((sizes.num_heads,), dtype))
        self.norm = GroupNorm(sizes.size, sizes.num_groups, eps, dtype)
        self.out_proj = Linear(sizes.size, size, dtype, bias=sizes.bias, sums_parts=True)

    def __call__(self, x: jax.Array, step: Step, caches: Caches) -> tuple[jax.Array, Caches]:
        sizes, num_tokens = self.sizes, x.shape[0]
        inputs, state = caches.read_states(self.index, step.batch)
        z, mixed, dt = jnp.split(
            self.in_proj(x), (sizes.size, sizes.size + sizes.channels), axis=-1
        )
        bias = self.conv1d.bias[...] if sizes.conv_bias else None
        weight = self.conv1d.weight[...][:, 0]
        convolve = functools.partial(causal_conv, mixed, inputs, weight, bias)
        mixed, inputs = convolve(step.rows)
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
        recurrence = functools.partial(
            recur,
            query,
            key,
            y * dt[..., None],
            -jnp.exp(a_log) * dt,
            None,
            state.astype(jnp.float32),
        )
        out, state_after = recurrence(step.rows)
        out = (out + y * skip[..., None]).reshape(num_tokens, -1)
        out = self.norm(out * jax.nn.silu(z.astype(jnp.float32)))

        def after(lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = step.rows.first(lengths)
            return convolve(rows)[1], recurrence(rows)[1].astype(state.dtype)

        states = inputs, state_after.astype(state.dtype)
        caches = caches.write_states(self.index, step.batch, states, after)
        return self.out_proj(out.astype(x.dtype)), caches


class SquaredMLP(nnx.Module):
    """`down(relu(up(x)) ** 2)`."""

    def __init__(self, size: int, inner: int, bias: bool, dtype: jnp.dtype):
        self.up_proj = Linear(size, inner, dtype, bias=bias)
        self.down_proj = Linear(inner, size, dtype, bias=bias, sums_parts=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jnp.square(jax.nn.relu(self.up_proj(x))))


class Experts(nnx.Module):
    """All experts' matrices [out, in]."""

    def __init__(self, count: int, size: int, inner: int, dtype: jnp.dtype):
        self.up_proj = nnx.Param(jnp.zeros((count, inner, size), dtype))
        self.down_proj = nnx.Param(jnp.zeros((count, size, inner), dtype))

    def __call__(self, rows: jax.Array, experts: jax.Array, counts: jax.Array) -> jax.Array:
        inner = jnp.square(jax.nn.relu(expert_dot(rows, self.up_proj[...], counts)))
        return expert_dot(inner, self.down_proj[...], counts)


class MixtureOfExperts(nnx.Module):
    """Experts, their router, and an expert that sees every token."""

    def __init__(self, outline: Outline, sizes: ExpertSizes, bias: bool, dtype: jnp.dtype):
        self.sizes, size = sizes, outline.hidden_size
        self.num_devices = outline.num_devices
        self.gate = Router(size, sizes, dtype)
        inside = sizes.latent_size or size
        self.experts = Experts(sizes.count // self.num_devices, inside, sizes.size, dtype)
        self.shared_experts = SquaredMLP(size, sizes.shared_size, bias, dtype)
        if sizes.latent_size:
            self.fc1_latent_proj = Linear(size, inside, dtype, bias=bias)
            self.fc2_latent_proj = Linear(inside, size, dtype, bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        experts, shares = self.gate(x)
        inside = self.fc1_latent_proj(x) if self.sizes.latent_size else x
        mixed = mix_experts(
            inside, experts, shares, self.sizes.count, self.experts, num_devices=self.num_devices
        )
        mixed = parallel.add_up(mixed)
        mixed = self.fc2_latent_proj(mixed) if self.sizes.latent_size else mixed
        return mixed + self.shared_experts(x)


class Layer(nnx.Module):
    """`x + mixer(norm(x))`, only for the tokens `only` if no later layer needs others."""

    def __init__(self, mixer: nnx.Module, norm: nnx.Module, mixes_tokens: bool):
        self.mixer, self.norm, self.mixes_tokens = mixer, norm, mixes_tokens

    def __call__(
        self, x: jax.Array, step: Step, caches: Caches, only: jax.Array | None = None
    ) -> tuple[jax.Array, Caches]:
        if not self.mixes_tokens:
            x = pick(x, only)
            return x + self.mixer(self.norm(x)), caches
        y, caches = self.mixer(self.norm(x), step, caches)
        return pick(x + y, only), caches


def make(config: NemotronHConfig, dtype: jnp.dtype) -> CausalLM:
    """Make the model, of zeros."""
    outline = config.outline
    size = outline.hidden_size
    mixers = {
        MAMBA: lambda index: Mamba2(index, size, config.mamba, outline.eps, dtype),
        ATTENTION: lambda index: Attention(index, outline, config.heads, dtype),
        MLP: lambda _: SquaredMLP(size, config.intermediate_size, config.mlp_bias, dtype),
        MOE: lambda _: MixtureOfExperts(outline, config.experts, config.mlp_bias, dtype),
    }
    layers = [
        Layer(mixers[kind](index), outline.make_norm(size, dtype), kind in (MAMBA, ATTENTION))
        for index, kind in enumerate(config.kinds)
    ]
    return CausalLM(outline, layers, dtype)


def separate_experts(config: NemotronHConfig) -> dict[str, Assembly]:
    """Return assemblies of the matrices that published checkpoints store per expert."""
    parts, assemblies = {name: (name,) for name in ("up_proj", "down_proj")}, {}
    for index, kind in enumerate(config.kinds):
        if kind == MOE:
            path = f"layers.{index}.mixer.experts"
            assemblies |= stacked_experts(path, config.experts.count, parts)
    return assemblies


load = functools.partial(load_causal_lm, NemotronHConfig.from_hf, make, assemblies=separate_experts)
