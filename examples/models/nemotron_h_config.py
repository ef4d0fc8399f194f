"""The configuration of a Nemotron-H checkpoint: `config.json`, checked and frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jattn.blocks as jb
from examples.engine.model import StateCache
from examples.models.config import check_config
from examples.models.decoder import Config, Heads, Outline
from examples.models.moe import ExpertSizes

MAMBA, ATTENTION, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
# How older files spell a layer, in `hybrid_override_pattern` and in `layers_block_type`.
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}
OLD_NAMES = {"mamba": MAMBA, "attention": ATTENTION}
INTEGERS = (
    *("head_dim", "intermediate_size", "mamba_num_heads", "mamba_head_dim"),
    *("n_groups", "ssm_state_size", "conv_kernel"),
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
        """Channels of x, and also of z."""
        return self.num_heads * self.head_dim

    @property
    def sections(self) -> tuple[int, int, int]:
        """Channels of the convolution: x's, B's and C's."""
        return (self.size, *(self.num_groups * self.state_size,) * 2)

    @property
    def channels(self) -> int:
        """All channels of the convolution."""
        return sum(self.sections)

    def cache(self, dtype: str) -> StateCache:
        """Return the layer's state: the convolution's inputs in `dtype`, S in its own dtype."""
        layout = jb.mamba2_state(
            intermediate_size=self.size,
            num_groups=self.num_groups,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            state_size=self.state_size,
            conv_kernel=self.conv_kernel,
            dtypes=(dtype, self.state_dtype),
        )
        return StateCache(layout, (self.sections, ()))


@dataclasses.dataclass(frozen=True)
class KeepsNothing:
    """A feed-forward layer, which has no cache."""

    def cache(self, dtype: str) -> None:
        """Return None."""


@dataclasses.dataclass(frozen=True)
class NemotronHConfig(Config):
    """The configuration of a Nemotron-H checkpoint. Make one with `from_hf`."""

    kinds: tuple[str, ...]
    heads: Heads
    mamba: MambaSizes
    experts: ExpertSizes
    intermediate_size: int
    mlp_bias: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> NemotronHConfig:
        """Read a `config.json`.

        Raises:
          ValueError: keys are missing or have unsupported values; the error lists them all.
        """
        kinds = _kinds(config)

        def more() -> list[str]:
            unknown = sorted(set(kinds) - set(LETTERS.values()))
            if unknown or not kinds:
                known = sorted(LETTERS.values())
                return [f"layers_block_type has {unknown or 'nothing'}, but must have only {known}"]
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
            more=more,
        )
        low, high = (_number(x) for x in config.get("time_step_limit") or (0.0, float("inf")))
        heads = Heads(
            config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        )
        mamba = MambaSizes(
            num_heads=config["mamba_num_heads"],
            head_dim=config["mamba_head_dim"],
            num_groups=config["n_groups"],
            state_size=config["ssm_state_size"],
            conv_kernel=config["conv_kernel"],
            conv_bias=config.get("use_conv_bias", True),
            bias=bool(config.get("use_bias")),
            time_step_limit=(low, high),
            state_dtype=config.get("mamba_ssm_cache_dtype", "float32"),
        )
        keeping = {ATTENTION: heads, MAMBA: mamba}
        return cls(
            outline=Outline.from_hf(
                config,
                max_positions=config.get("max_position_embeddings", 4096),
                eps=config.get("layer_norm_epsilon", 1e-5),
                recurrent=True,
                embedding_name="embeddings",
                norm_name="norm_f",
            ),
            layers=tuple(keeping.get(kind, KeepsNothing()) for kind in kinds),
            kinds=kinds,
            heads=heads,
            mamba=mamba,
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
        )


def _kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    listed = config.get("layers_block_type") or config.get("layer_types")
    if listed is None:
        listed = [LETTERS.get(c, c) for c in config.get("hybrid_override_pattern") or ""]
    return tuple(OLD_NAMES.get(kind, kind) for kind in listed)


def _number(x: Any) -> float:
    """Read a config's number, which may spell infinity as an object."""
    return float(x["__float__"]) if isinstance(x, Mapping) else float(x)
