"""The configuration of a Gemma 4 checkpoint: `config.json`, checked and frozen.

Gemma 4 has two kinds of layer. A *sliding* layer sees the last `sliding_window` tokens with small
heads (D = 256); a *global* layer sees everything with large ones (D = 512). There are four
variations of these, most of which change what a layer keeps in its cache:

- the last `num_kv_shared_layers` layers own no cache: they attend to the pages of the last layer
  of their kind that does;
- with `attention_k_eq_v` a global layer projects keys and values with one matrix, though what it
  stores still differs (keys are normalised with a weight and rotated, values are neither);
- any layer may have its own `head_dim` and `num_key_value_heads` (`per_layer_config`; older files
  have `global_head_dim` and `num_global_key_value_heads` instead);
- each layer may have a small embedding of its own as input (`hidden_size_per_layer_input`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from examples.engine.model import AttentionCache
from examples.models.config import check_config
from examples.models.decoder import Config, Heads, Outline
from examples.models.rope import Rope, rope_problems

SLIDING, GLOBAL = "sliding", "global"
KINDS = {"sliding_attention": SLIDING, "full_attention": GLOBAL}
MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
INTEGERS = ("num_hidden_layers", "head_dim", "intermediate_size", "sliding_window")
DEFAULT_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer: its attention and the size of its feed-forward part."""

    kind: str  # SLIDING or GLOBAL
    heads: Heads
    intermediate_size: int

    def cache(self, dtype: str) -> AttentionCache | None:
        """The layer's cache."""
        return self.heads.cache(dtype)


@dataclasses.dataclass(frozen=True)
class Gemma4Config(Config):
    """The text model of a Gemma 4 checkpoint. Make one with `from_hf`."""

    final_logit_soft_cap: float | None
    per_layer_input_size: int  # 0: layers have no embeddings of their own
    per_layer_vocab_size: int

    def __post_init__(self) -> None:
        for layer in self.layers:
            if layer.heads.reads_layer is not None:
                owner = self.layers[layer.heads.reads_layer]
                assert owner.kind == layer.kind
                if owner.heads != dataclasses.replace(layer.heads, reads_layer=None):
                    raise ValueError(
                        f"config.json: a layer reads the keys of layer {layer.heads.reads_layer}, "
                        "but has other heads"
                    )

    @property
    def unused_parameters(self) -> set[str]:
        """Projections that checkpoints have for layers that read another layer's pages."""
        names = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
        readers = (i for i, x in enumerate(self.layers) if x.heads.reads_layer is not None)
        return {f"layers.{index}.self_attn.{name}" for index in readers for name in names}

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma4Config:
        """Read a Hugging Face `config.json`, of the text model or of the whole model.

        Raises:
          ValueError: keys are missing or have unsupported values; the error lists them all.
        """
        text = {**config, **config.get("text_config", {}), "model_type": config.get("model_type")}
        check_config(
            text,
            MODEL_TYPES,
            INTEGERS,
            {
                "attention_bias": (False, None),
                "hidden_activation": ("gelu_pytorch_tanh", None),
                "tie_word_embeddings": (True, None),
                "use_bidirectional_attention": ("vision", None),  # text tokens stay causal
            },
            layer_types=KINDS,
            more=lambda: _problems(text),
        )
        layers = _layers(text)
        return cls(
            outline=Outline.from_hf(
                text,
                max_positions=text.get("max_position_embeddings", 131_072),
                tied=True,
                ropes=tuple(dict.fromkeys(layer.heads.rope for layer in layers)),
            ),
            layers=layers,
            final_logit_soft_cap=text.get("final_logit_softcapping"),
            per_layer_input_size=text.get("hidden_size_per_layer_input") or 0,
            per_layer_vocab_size=text.get("vocab_size_per_layer_input") or text["vocab_size"],
        )


def _layers(text: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Build the decoder layers from the flat fields, their overrides and the sharing rule."""
    names = _layer_types(text)
    num_owners = len(names) - (text.get("num_kv_shared_layers") or 0)
    layers = []
    for index, name in enumerate(names):
        kind, shares = KINDS[name], index >= num_owners
        key_is_value = bool(text.get("attention_k_eq_v")) and kind == GLOBAL
        geometry = {key: text[key] for key in ("head_dim", "num_key_value_heads")}
        geometry |= _overrides(text, index, kind, key_is_value)
        heads = Heads(
            text["num_attention_heads"],
            geometry["num_key_value_heads"],
            geometry["head_dim"],
            window=text["sliding_window"] if kind == SLIDING else None,
            rope=Rope.from_hf(_rope_parameters(text)[name], geometry["head_dim"]),
            scale=1.0,  # the norms of q and k replace it
            norm=True,
            key_is_value=key_is_value,
            unit_values=True,
            reads_layer=max(i for i in range(num_owners) if names[i] == name) if shares else None,
        )
        widening = 2 if shares and text.get("use_double_wide_mlp") else 1
        layers.append(Layer(kind, heads, text["intermediate_size"] * widening))
    return tuple(layers)


def _overrides(text: Mapping[str, Any], index: int, kind: str, key_is_value: bool) -> dict:
    """Read one layer's differences from the flat fields, in the new spelling or the old one."""
    if text.get("per_layer_config") is not None:
        per_layer = text["per_layer_config"]
        override = per_layer.get(str(index)) or per_layer.get(index) or {}
        return {k: override[k] for k in ("head_dim", "num_key_value_heads") if k in override}
    if kind == SLIDING:
        return {}
    override = {"head_dim": text.get("global_head_dim") or 512}
    if key_is_value and text.get("num_global_key_value_heads"):
        override["num_key_value_heads"] = text["num_global_key_value_heads"]
    return override


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer: by default each sixth is global, and the last always is."""
    names = text.get("layer_types")
    if names is None:
        count = text["num_hidden_layers"]
        names = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(count)]
    return [*names[:-1], "full_attention"]


def _rope_parameters(text: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    return text.get("rope_parameters") or DEFAULT_ROPE


def _problems(text: Mapping[str, Any]) -> list[str]:
    """Find problems with the layers' experts, sharing of pages and rotary positions."""
    found = []
    if text.get("enable_moe_block"):
        found.append(
            "enable_moe_block is true: mixture-of-experts checkpoints (26B-A4B) are not supported "
            "by this example; E2B, E4B, 12B and 31B are"
        )
    names, shared = _layer_types(text), text.get("num_kv_shared_layers") or 0
    owners = set(names[: len(names) - shared])
    if not 0 <= shared < len(names) or not set(names) <= owners:
        found.append(f"num_kv_shared_layers is {shared}: some layer has no pages to attend to")
    for name in KINDS:
        parameters = _rope_parameters(text).get(name) or {}
        for problem in rope_problems(parameters, ("default", "proportional")):
            found.append(f"{name}: {problem}")
    return found
