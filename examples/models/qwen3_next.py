"""Qwen3-Next: gated delta nets, with gated attention in every fourth layer, and experts.

Most layers keep a state of fixed size instead of keys and values. With x [T, E] of one sequence,
`q k v z` and `b a` its projections, a causal convolution and silu over q, k and v, and unit vectors
q / |q| / sqrt(D) and k / |k|, such a layer computes

    S_t = exp(-exp(A) softplus(a_t + dt)) S_{t-1},    S_t += sigmoid(b_t) (v_t - S_t k_t) k_t^T
    y_t = out_proj(norm(S_t q_t) * silu(z_t))

(`recurrent.py` has the recurrence). It carries S and the convolution's last inputs from step to
step. Attention layers rotate a quarter of each head and multiply their output by a sigmoid. The
weights of all norms except the delta nets' own are stored minus 1.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from examples.engine.caches import Caches
from examples.engine.mesh import DeviceMesh
from examples.engine.model import Model
from examples.models import parallel
from examples.models.checkpoint import Assembly, Checkpoint
from examples.models.decoder import Attention, CausalLM, DecoderLayer, Heads, Step, load_causal_lm
from examples.models.layers import DepthwiseConv, GatedMLP, Linear, RMSNorm
from examples.models.moe import GatedExperts, mix_experts, stacked_experts
from examples.models.mtp import PredictingLM
from examples.models.qwen3_next_config import DeltaNet, Qwen3NextConfig
from examples.models.recurrent import causal_conv, recur


class GatedDeltaNet(nnx.Module):
    """One layer, as in the formula at the top of this file."""

    def __init__(self, index: int, size: int, net: DeltaNet, eps: float, dtype: jnp.dtype):
        self.index, self.net = index, net
        self.in_proj_qkvz = Linear(size, 2 * (net.key_size + net.value_size), dtype)
        self.in_proj_ba = Linear(size, 2 * net.num_v_heads, dtype)
        self.conv1d = DepthwiseConv(net.sections, net.conv_kernel, dtype)
        self.A_log = nnx.Param(jnp.zeros((net.num_v_heads,), dtype))
        self.dt_bias = nnx.Param(jnp.zeros((net.num_v_heads,), dtype))
        self.norm = RMSNorm(net.head_v_dim, eps, dtype)
        self.out_proj = Linear(net.value_size, size, dtype, sums_parts=True)

    def __call__(self, x: jax.Array, step: Step, caches: Caches) -> tuple[jax.Array, Caches]:
        net, num_tokens = self.net, x.shape[0]
        inputs, state = caches.read_states(self.index, step.batch)
        mixed, z, b, a = self._project(x)
        weight = self.conv1d.weight[...][:, 0]
        convolve = functools.partial(causal_conv, mixed, inputs, weight, None)
        mixed, inputs = convolve(step.rows)
        mixed = jax.nn.silu(mixed)
        query, key, value = jnp.split(mixed, (net.key_size, 2 * net.key_size), axis=-1)
        query, key = (
            jnp.repeat(
                unit_vectors(y.reshape(num_tokens, net.num_k_heads, -1)),
                net.num_v_heads // net.num_k_heads,
                axis=1,
            )
            for y in (query, key)
        )
        recurrence = functools.partial(
            recur,
            query * net.head_k_dim**-0.5,
            key,
            value.reshape(num_tokens, net.num_v_heads, -1),
            -jnp.exp(_float(self.A_log))[None] * jax.nn.softplus(a + _float(self.dt_bias)[None]),
            jax.nn.sigmoid(b),
            state,
        )
        out, state = recurrence(step.rows)
        out = self.norm(out).astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))

        def after(lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = step.rows.first(lengths)
            return convolve(rows)[1], recurrence(rows)[1]

        caches = caches.write_states(self.index, step.batch, (inputs, state), after)
        return self.out_proj(out.reshape(num_tokens, -1).astype(x.dtype)), caches

    def _project(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Project x to `q k v` [T, channels], z [T, heads, V], and float32 b and a [T, heads].

        In the weights, a key head's rows are next to those of the value heads that it serves.
        """
        net, groups = self.net, (x.shape[0], self.net.num_k_heads, -1)
        served = net.value_size // net.num_k_heads
        parts = jnp.split(
            self.in_proj_qkvz(x).reshape(groups),
            (net.head_k_dim, 2 * net.head_k_dim, 2 * net.head_k_dim + served),
            axis=-1,
        )
        query, key, value, z = (part.reshape(x.shape[0], -1) for part in parts)
        b, a = jnp.split(self.in_proj_ba(x).reshape(groups).astype(jnp.float32), 2, axis=-1)
        per_head = (x.shape[0], net.num_v_heads)
        mixed = jnp.concatenate([query, key, value], axis=-1)
        return mixed, z.reshape(*per_head, -1), b.reshape(per_head), a.reshape(per_head)


def unit_vectors(x: jax.Array) -> jax.Array:
    """Compute `x / |x|` over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _float(param: nnx.Param) -> jax.Array:
    return param[...].astype(jnp.float32)


class MixtureOfExperts(nnx.Module):
    """Experts, their router, and an expert that sees every token."""

    def __init__(self, config: Qwen3NextConfig, dtype: jnp.dtype):
        size = config.outline.hidden_size
        self.gate = Linear(size, config.num_experts, dtype)
        num_local = config.num_experts // config.outline.num_devices
        self.experts = GatedExperts(num_local, size, config.expert_size, dtype)
        self.shared_expert = GatedMLP(size, config.shared_expert_size, dtype, sums_parts=False)
        self.shared_expert_gate = Linear(size, 1, dtype)
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        chances = jax.nn.softmax(self.gate(x).astype(jnp.float32), axis=-1)
        shares, experts = jax.lax.top_k(chances, config.experts_per_token)
        if config.normalize_shares:
            shares = shares / shares.sum(axis=-1, keepdims=True)
        num_devices = config.outline.num_devices
        mixed = mix_experts(
            x, experts, shares, config.num_experts, self.experts, num_devices=num_devices
        )
        shared = jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return parallel.add_up(mixed + shared)


def make(config: Qwen3NextConfig, dtype: jnp.dtype) -> CausalLM:
    """Make the model, of zeros."""
    outline, layers = config.outline, []
    mixers = (*config.layers, config.mtp) if config.mtp else config.layers
    for index, layer in enumerate(mixers):
        if isinstance(layer, Heads):
            name, mixer = "self_attn", Attention(index, outline, layer, dtype)
        else:
            name = "linear_attn"
            mixer = GatedDeltaNet(index, outline.hidden_size, layer, outline.eps, dtype)
        if index in config.dense_layers or not config.num_experts:
            mlp = GatedMLP(outline.hidden_size, config.intermediate_size, dtype)
        else:
            mlp = MixtureOfExperts(config, dtype)
        layers.append(DecoderLayer(outline, mixer, mlp, dtype, mixer_name=name))
    if config.mtp:
        return PredictingLM(outline, layers[:-1], layers[-1], dtype)
    return CausalLM(outline, layers, dtype)


def separate_experts(config: Qwen3NextConfig) -> dict[str, Assembly]:
    """Return assemblies of the matrices that published checkpoints store per expert."""
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    assemblies = {}
    paths = [f"layers.{i}" for i in range(len(config.layers)) if i not in config.dense_layers]
    for path in (*paths, *(["mtp.layers.0"] if config.mtp else [])):
        assemblies |= stacked_experts(f"{path}.mlp.experts", config.num_experts, parts)
    return assemblies


def load(
    checkpoint: Checkpoint,
    dtype: str | None = None,
    mesh: DeviceMesh | None = None,
    *,
    mtp: bool = False,
    join: bool = False,
) -> Model:
    """Load the model of a checkpoint; arguments are as for `load_model`."""
    read = functools.partial(Qwen3NextConfig.from_hf, mtp=mtp)
    options = {"assemblies": separate_experts, "join": join}
    return load_causal_lm(read, make, checkpoint, dtype, mesh, **options)
