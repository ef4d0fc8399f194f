"""Qwen3: attention with normalised queries and keys, the plain case of paged attention.

x = x + o_proj(attention(rope(q_norm(q_proj h)), rope(k_norm(k_proj h)), v_proj h)),  h = norm x
x = x + down(silu(gate h) * up h),                                                    h = norm x
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from examples.engine.model import Model
from examples.models.checkpoint import Checkpoint
from examples.models.decoder import (
    Attention,
    CausalLM,
    DecoderLayer,
    Heads,
    Outline,
    load_causal_lm,
)
from examples.models.layers import (
    GatedMLP,
    RMSNorm,
    check_config,
    layer_type_problems,
    rope_frequencies,
    rope_parameters,
    rope_problems,
)

KINDS = ("full_attention", "sliding_attention")
INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """A Qwen3 checkpoint's description of itself. Make one with `from_hf`."""

    outline: Outline
    layers: tuple[Heads, ...]
    intermediate_size: int
    eps: float
    dtype: str

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3Config:
        """Read a `config.json`.

        Raises:
          ValueError: what the file lacks or asks for that this model does not have, all at once.
        """
        rope = rope_parameters(config)
        check_config(
            config,
            ("qwen3",),
            INTEGERS,
            {"hidden_act": ("silu",)},
            lambda: rope_problems(rope) + layer_type_problems(config, KINDS),
        )
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        first = config.get("max_window_layers", 28)
        count = config["num_hidden_layers"]
        kinds = config.get("layer_types") or [
            KINDS[1] if window and i >= first else KINDS[0] for i in range(count)
        ]
        heads = Heads(
            config["num_attention_heads"],
            config["num_key_value_heads"],
            head_dim,
            bias=bool(config.get("attention_bias")),
            norm=True,
        )
        sliding = dataclasses.replace(heads, window=window)
        return cls(
            outline=Outline.from_hf(config, *rope_frequencies(rope, head_dim)),
            layers=tuple(sliding if kind == KINDS[1] else heads for kind in kinds),
            intermediate_size=config["intermediate_size"],
            eps=config.get("rms_norm_eps", 1e-6),
            dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        )


def make(config: Qwen3Config, dtype: jnp.dtype) -> CausalLM:
    """The model, of zeros."""
    size = config.outline.hidden_size
    make_norm = functools.partial(RMSNorm, eps=config.eps, dtype=dtype)
    layers = [
        DecoderLayer(
            size,
            "self_attn",
            Attention(index, size, heads, make_norm, dtype),
            GatedMLP(size, config.intermediate_size, dtype),
            make_norm,
        )
        for index, heads in enumerate(config.layers)
    ]
    return CausalLM(config.outline, layers, make_norm, dtype)


def load(checkpoint: Checkpoint, dtype: str | None = None) -> Model:
    """The model with its parameters in `dtype`, or in what config.json says.

    Raises:
      ValueError: a config of another model, or parameters that do not fit it.
    """
    config = Qwen3Config.from_hf(checkpoint.config)
    dtype = dtype or config.dtype
    return load_causal_lm(
        checkpoint,
        dtype,
        lambda: make(config, jnp.dtype(dtype)),
        {index: heads.cache for index, heads in enumerate(config.layers)},
        config=config,
    )
