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

from examples.models.config import check_config
from examples.models.decoder import (
    CausalLM,
    Config,
    Heads,
    Outline,
    load_causal_lm,
    make_attention_model,
)
from examples.models.layers import GatedMLP
from examples.models.rope import Rope, rope_parameters

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Qwen3Config(Config):
    """The configuration of a Qwen3 checkpoint. Make one with `from_hf`."""

    intermediate_size: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3Config:
        """Read a `config.json`.

        Raises:
          ValueError: keys are missing or have unsupported values; the error lists them all.
        """
        rope = rope_parameters(config)
        check_config(
            config,
            ("qwen3",),
            ("intermediate_size", "num_hidden_layers"),
            {"hidden_act": ("silu",)},
            rope=rope,
            layer_types=(FULL, SLIDING),
        )
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        first = config.get("max_window_layers", 28)
        kinds = config.get("layer_types") or [
            SLIDING if window and i >= first else FULL for i in range(config["num_hidden_layers"])
        ]
        heads = Heads(
            config["num_attention_heads"],
            config["num_key_value_heads"],
            head_dim,
            rope=Rope.from_hf(rope, head_dim),
            bias=bool(config.get("attention_bias")),
            norm=True,
        )
        sliding = dataclasses.replace(heads, window=window)
        return cls(
            outline=Outline.from_hf(config, ropes=(heads.rope,)),
            layers=tuple(sliding if kind == SLIDING else heads for kind in kinds),
            intermediate_size=config["intermediate_size"],
        )


def make(config: Qwen3Config, dtype: jnp.dtype) -> CausalLM:
    """Make the model, of zeros."""
    sizes = config.outline.hidden_size, config.intermediate_size
    return make_attention_model(config, lambda: GatedMLP(*sizes, dtype), dtype)


load = functools.partial(load_causal_lm, Qwen3Config.from_hf, make)
