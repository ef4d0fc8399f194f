"""The configuration of a Qwen3-Next checkpoint: `config.json`, checked and frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jattn.blocks as jb
from examples.engine.model import StateCache
from examples.models.config import check_config
from examples.models.decoder import Heads, Outline
from examples.models.mtp import PredictingConfig
from examples.models.rope import Rope, rope_parameters

KINDS = ("linear_attention", "full_attention")
INTEGERS = (
    *("num_hidden_layers", "head_dim", "linear_conv_kernel_dim", "linear_key_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim", "num_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
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
        """Channels of all queries, and also of all keys."""
        return self.num_k_heads * self.head_k_dim

    @property
    def value_size(self) -> int:
        """Channels of all values."""
        return self.num_v_heads * self.head_v_dim

    @property
    def sections(self) -> tuple[int, int, int]:
        """Channels of the convolution: queries', keys' and values'."""
        return (self.key_size, self.key_size, self.value_size)

    def cache(self, dtype: str) -> StateCache:
        """Return the layer's state: the convolution's inputs in `dtype`, S in float32."""
        layout = jb.gated_delta_net_state(
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            head_k_dim=self.head_k_dim,
            head_v_dim=self.head_v_dim,
            conv_kernel=self.conv_kernel,
            dtypes=(dtype, "float32"),
        )
        return StateCache(layout, (self.sections, ()))


@dataclasses.dataclass(frozen=True)
class Qwen3NextConfig(PredictingConfig):
    """The configuration of a Qwen3-Next checkpoint. Make one with `from_hf`."""

    dense_layers: frozenset[int]  # layers without experts
    intermediate_size: int  # of dense layers
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_expert_size: int
    normalize_shares: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, mtp: bool = False) -> Qwen3NextConfig:
        """Read a `config.json`.

        Args:
          config: the file.
          mtp: also include the MTP layer.

        Raises:
          ValueError: keys are missing or have unsupported values; the error lists them all.
        """
        rope = {"partial_rotary_factor": 0.25, **rope_parameters(config)}
        check_config(
            config,
            ("qwen3_next",),
            INTEGERS,
            {"hidden_act": ("silu",), "attention_bias": (False, None)},
            rope=rope,
            layer_types=KINDS,
        )
        every = config.get("full_attention_interval", 4)
        count = config["num_hidden_layers"]
        kinds = config.get("layer_types") or [KINDS[(i + 1) % every == 0] for i in range(count)]
        heads = Heads(
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            rope=Rope.from_hf(rope, config["head_dim"]),
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
        sparse_every = config.get("decoder_sparse_step", 1)
        dense = config.get("mlp_only_layers") or ()
        return cls(
            outline=Outline.from_hf(config, ropes=(heads.rope,), recurrent=True, norm_offset=1.0),
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
            mtp=heads if mtp else None,
        )
