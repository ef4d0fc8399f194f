"""GPT-OSS: attention sinks, windows on every other layer, and experts with clamped gates.

    x = x + o_proj(attention with sinks(rope q, rope k, v)),   windows on half of the layers
    x = x + sum over the chosen experts of share_e down_e((u + 1) g sigmoid(1.702 g)),
            g = min(gate, 7),  u = clip(up, -7, 7),  share = softmax over the chosen ones' logits

Published checkpoints store the experts in MXFP4: blocks of 32 4-bit values that share a power of
two. They are unpacked when read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.models import parallel
from examples.models.checkpoint import Assembly
from examples.models.config import check_config
from examples.models.decoder import (
    CausalLM,
    Config,
    Heads,
    Outline,
    load_causal_lm,
    make_attention_model,
)
from examples.models.layers import Linear
from examples.models.moe import expert_dot, mix_experts
from examples.models.rope import Rope, rope_parameters

FULL, SLIDING = "full_attention", "sliding_attention"
# The 16 4-bit values: a sign bit, two exponent bits, one mantissa bit.
MXFP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclasses.dataclass(frozen=True)
class GptOssConfig(Config):
    """The configuration of a GPT-OSS checkpoint. Make one with `from_hf`."""

    intermediate_size: int
    num_experts: int
    experts_per_token: int
    swiglu_alpha: float
    swiglu_limit: float

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GptOssConfig:
        """Read a `config.json`.

        Raises:
          ValueError: keys are missing or have unsupported values; the error lists them all.
        """
        rope = rope_parameters(config, default_theta=150_000.0)
        quantization = config.get("quantization_config")
        if (quantization or {}).get("quant_method") == "mxfp4":
            quantization = None  # unpacked when read
        check_config(
            {**config, "quantization_config": quantization},
            ("gpt_oss",),
            (
                *("intermediate_size", "num_hidden_layers", "sliding_window"),
                *("num_local_experts", "num_experts_per_tok"),
            ),
            {"hidden_act": ("silu",), "tie_word_embeddings": (False,)},
            rope=rope,
            layer_types=(FULL, SLIDING),
        )
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        kinds = config.get("layer_types") or [
            FULL if i % 2 else SLIDING for i in range(config["num_hidden_layers"])
        ]
        heads = Heads(
            config["num_attention_heads"],
            config["num_key_value_heads"],
            head_dim,
            rope=Rope.from_hf(rope, head_dim),
            bias=config.get("attention_bias", True),
            sinks=True,
        )
        sliding = dataclasses.replace(heads, window=config["sliding_window"])
        eps = config.get("rms_norm_eps", 1e-5)
        return cls(
            outline=Outline.from_hf(config, ropes=(heads.rope,), eps=eps),
            layers=tuple(sliding if kind == SLIDING else heads for kind in kinds),
            intermediate_size=config["intermediate_size"],
            num_experts=config["num_local_experts"],
            experts_per_token=config["num_experts_per_tok"],
            swiglu_alpha=config.get("swiglu_alpha", 1.702),
            swiglu_limit=config.get("swiglu_limit", 7.0),
        )


class Experts(nnx.Module):
    """All experts' matrices [out, in] and biases; gate and up alternate in the rows."""

    def __init__(self, config: GptOssConfig, dtype: jnp.dtype):
        count, size, inner = (
            config.num_experts // config.outline.num_devices,
            config.outline.hidden_size,
            config.intermediate_size,
        )
        self.gate_up_proj = nnx.Param(jnp.zeros((count, 2 * inner, size), dtype))
        self.gate_up_proj_bias = nnx.Param(jnp.zeros((count, 2 * inner), dtype))
        self.down_proj = nnx.Param(jnp.zeros((count, size, inner), dtype))
        self.down_proj_bias = nnx.Param(jnp.zeros((count, size), dtype))
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def __call__(self, rows: jax.Array, experts: jax.Array, counts: jax.Array) -> jax.Array:
        def bias(param: nnx.Param) -> jax.Array:
            return param[...].at[experts].get(mode="clip")

        both = expert_dot(rows, self.gate_up_proj[...], counts)
        both = both + bias(self.gate_up_proj_bias)
        gate = jnp.minimum(both[:, ::2], self.limit)
        up = jnp.clip(both[:, 1::2], -self.limit, self.limit)
        inner = (up + 1) * gate * jax.nn.sigmoid(gate * self.alpha)
        return expert_dot(inner, self.down_proj[...], counts) + bias(self.down_proj_bias)


class MixtureOfExperts(nnx.Module):
    """Experts and the router that chooses some of them for each token."""

    def __init__(self, config: GptOssConfig, dtype: jnp.dtype):
        self.router = Linear(config.outline.hidden_size, config.num_experts, dtype, bias=True)
        self.experts = Experts(config, dtype)
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        chosen, experts = jax.lax.top_k(self.router(x), config.experts_per_token)
        shares, num_devices = jax.nn.softmax(chosen, axis=-1), config.outline.num_devices
        mixed = mix_experts(
            x, experts, shares, config.num_experts, self.experts, num_devices=num_devices
        )
        return parallel.add_up(mixed)


def unpack_mxfp4(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Unpack blocks uint8 [E, out, in / 32, 16] and scales [E, out, in / 32] to [E, out, in].

    The low four bits of a byte come first; a scale s means 2 ** (s - 127).
    """
    blocks, scales = parts
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1)
    values = MXFP4_VALUES.astype(np.float32)[nibbles.reshape(*blocks.shape[:-1], -1)]
    values = np.ldexp(values, scales.astype(np.int32)[..., None] - 127)
    return values.reshape(*blocks.shape[:2], -1)


def turned(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Transpose matrices [E, in, out], as transformers saves them, to [E, out, in]."""
    (weights,) = parts
    return weights.swapaxes(1, 2)


def make(config: GptOssConfig, dtype: jnp.dtype) -> CausalLM:
    """Make the model, of zeros."""
    return make_attention_model(config, lambda: MixtureOfExperts(config, dtype), dtype)


def packed_experts(config: GptOssConfig) -> dict[str, Assembly]:
    """Return assemblies of matrices stored in MXFP4, as published, or else transposed."""
    names = [
        f"layers.{index}.mlp.experts.{name}"
        for index in range(len(config.layers))
        for name in ("gate_up_proj", "down_proj")
    ]
    return {
        name: Assembly(
            (f"{name}_blocks", f"{name}_scales"), unpack_mxfp4, otherwise=Assembly((name,), turned)
        )
        for name in names
    }


load = functools.partial(load_causal_lm, GptOssConfig.from_hf, make, assemblies=packed_experts)
