"""What a Qwen3-Next checkpoint says about itself: `config.json`, checked and frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jattn.blocks as jb
from examples.engine.model import AttentionCache, StateCache
from examples.models.decoder import Heads, Outline
from examples.models.layers import (
    check_config,
    layer_type_problems,
    rope_frequencies,
    rope_parameters,
    rope_problems,
)

KINDS = ("linear_attention", "full_attention")
INTEGERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """The geometry of a gated delta net."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int

    @property
    def key_size(self) -> int:
        """Channels of all queries, and of all keys."""
        return self.num_k_heads * self.head_k_dim

    @property
    def value_size(self) -> int:
        """Channels of all values."""
        return self.num_v_heads * self.head_v_dim

    def cache(self, dtype: str) -> StateCache:
        """What the layer keeps: its convolution's inputs as they come, S in float32."""
        layout = jb.gated_delta_net_state(
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            head_k_dim=self.head_k_dim,
            head_v_dim=self.head_v_dim,
            conv_kernel=self.conv_kernel,
            dtypes=(dtype, "float32"),
        )
        return StateCache(layout)


@dataclasses.dataclass(frozen=True)
class Qwen3NextConfig:
    """A Qwen3-Next checkpoint's description of itself. Make one with `from_hf`."""

    outline: Outline
    layers: tuple[Heads | DeltaNet, ...]
    dense_layers: frozenset[int]  # those without experts
    intermediate_size: int  # of dense layers
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_expert_size: int
    normalize_shares: bool
    eps: float
    dtype: str

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3NextConfig:
        """Read a `config.json`.

        Raises:
          ValueError: what the file lacks or asks for that this model does not have, all at once.
        """
        rope = {"partial_rotary_factor": 0.25, **rope_parameters(config)}
        check_config(
            config,
            ("qwen3_next",),
            INTEGERS,
            {"hidden_act": ("silu",), "attention_bias": (False, None)},
            lambda: rope_problems(rope) + layer_type_problems(config, KINDS),
        )
        every = config.get("full_attention_interval", 4)
        count = config["num_hidden_layers"]
        kinds = config.get("layer_types") or [KINDS[(i + 1) % every == 0] for i in range(count)]
        heads = Heads(
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            norm=True,
            gate=True,
        )
        delta = DeltaNet(
            config["linear_num_key_heads"],
            config["linear_num_value_heads"],
            config["linear_key_head_dim"],
            config["linear_value_head_dim"],
            config["linear_conv_kernel_dim"],
        )
        sparse_every, dense = (
            config.get("decoder_sparse_step", 1),
            config.get("mlp_only_layers") or (),
        )
        return cls(
            outline=Outline.from_hf(
                config, *rope_frequencies(rope, config["head_dim"]), recurrent=True
            ),
            layers=tuple(heads if kind == "full_attention" else delta for kind in kinds),
            dense_layers=frozenset(
                i
                for i in range(count)
                if i in dense or (i + 1) % sparse_every or not config["num_experts"]
            ),
            intermediate_size=config.get("intermediate_size", 0),
            num_experts=config["num_experts"],
            experts_per_token=config["num_experts_per_tok"],
            expert_size=config["moe_intermediate_size"],
            shared_expert_size=config["shared_expert_intermediate_size"],
            normalize_shares=config.get("norm_topk_prob", True),
            eps=config.get("rms_norm_eps", 1e-6),
            dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        )

    def caches(self, dtype: str) -> dict[int, AttentionCache | StateCache]:
        """What each layer keeps."""
        return {
            index: layer.cache if isinstance(layer, Heads) else layer.cache(dtype)
            for index, layer in enumerate(self.layers)
        }
