"""What a Gemma 4 checkpoint says about itself: `config.json` as a checked, frozen description.

Gemma 4 has two kinds of layer. A *sliding* layer sees the last `sliding_window` tokens with small
heads (D = 256); a *global* layer sees everything with large ones (D = 512). Around that there are
four variations, each of which changes what a layer keeps in its cache:

- the last `num_kv_shared_layers` layers own no cache: they attend to the pages of the last layer
  of their kind that does;
- with `attention_k_eq_v` a global layer projects keys and values with one matrix, though what it
  stores still differs (keys are normalised with a weight and rotated, values are neither);
- any layer may have its own `head_dim` and `num_key_value_heads` (`per_layer_config`; older files
  say `global_head_dim` and `num_global_key_value_heads` instead);
- each layer may be fed a small embedding of its own (`hidden_size_per_layer_input`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

SLIDING, GLOBAL = "sliding", "global"
KINDS = {"sliding_attention": SLIDING, "full_attention": GLOBAL}
MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "sliding_window",
)

DEFAULT_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions of one kind of layer.

    Pair j of a head is its elements (j, j + D / 2); at position p it is rotated by p * f_j with
    `f_j = theta ** (-2 j / D) / factor`. Only the first `fraction` of the pairs turn, the others
    have f_j = 0: "proportional" means that the exponent still divides by all of D.
    """

    theta: float
    fraction: float = 1.0
    factor: float = 1.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Angles per position, float32 [head_dim / 2].

        Rounded to float32 where the models' own code does, at the exponent, the power and its
        reciprocal: one last bit in a frequency is 1e-5 in an angle after a hundred tokens, and
        half of the logits' distance to another implementation.
        """
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        powers = np.power(self.theta, exponents, dtype=np.float64).astype(np.float32)
        frequencies = np.float32(1) / powers / np.float32(self.factor)
        num_turning = int(self.fraction * head_dim // 2)
        return np.where(np.arange(head_dim // 2) < num_turning, frequencies, np.float32(0))


@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer: what its attention looks like and whose pages it reads."""

    index: int
    kind: str  # SLIDING or GLOBAL
    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    key_is_value: bool  # one projection makes both
    reads_layer: int  # the layer whose pages it attends to: itself, unless it owns none

    @property
    def owns_cache(self) -> bool:
        """Whether this layer writes keys and values of its own."""
        return self.reads_layer == self.index


@dataclasses.dataclass(frozen=True)
class Gemma4Config:
    """The text model of a Gemma 4 checkpoint. Make one with `from_hf`."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    layers: tuple[Layer, ...]
    sliding_window: int
    sliding_rope: Rope
    global_rope: Rope
    rms_norm_eps: float
    final_logit_soft_cap: float | None
    per_layer_input_size: int  # 0: the layers have no embeddings of their own
    per_layer_vocab_size: int
    max_positions: int
    dtype: str | None  # what the file recommends to compute in

    def __post_init__(self) -> None:
        for layer in self.layers:
            owner = self.layers[layer.reads_layer]
            assert owner.owns_cache
            assert owner.kind == layer.kind
            assert (owner.head_dim, owner.num_kv_heads) == (layer.head_dim, layer.num_kv_heads)

    @property
    def windows(self) -> dict[str, int | None]:
        """How many tokens a query sees, its own included, for each kind of layer in use."""
        kinds = {layer.kind for layer in self.layers}
        windows = {SLIDING: self.sliding_window, GLOBAL: None}
        return {kind: window for kind, window in windows.items() if kind in kinds}

    @property
    def caching_layers(self) -> tuple[Layer, ...]:
        """The layers that own a cache, in order."""
        return tuple(layer for layer in self.layers if layer.owns_cache)

    def kv_values_per_token(self, kind: str) -> int:
        """How many numbers a token leaves in the caches of all layers of a kind."""
        layers = (layer for layer in self.caching_layers if layer.kind == kind)
        return sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)

    @property
    def unused_parameters(self) -> set[str]:
        """Projections that checkpoints carry for layers that read another layer's pages."""
        names = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
        layers = (layer.index for layer in self.layers if not layer.owns_cache)
        return {f"layers.{index}.self_attn.{name}" for index in layers for name in names}

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma4Config:
        """Read a Hugging Face `config.json`, of the text model or of the whole one.

        Raises:
          ValueError: what the file lacks or asks for that this model does not have, all at once.
        """
        model_type = config.get("model_type")
        text = {**config, **config.get("text_config", {})}
        problems = _problems(text, model_type)
        if problems:
            raise ValueError("config.json: " + "; ".join(problems))

        return cls(
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
            num_heads=text["num_attention_heads"],
            layers=_layers(text),
            sliding_window=text["sliding_window"],
            sliding_rope=_rope(_rope_parameters(text)["sliding_attention"]),
            global_rope=_rope(_rope_parameters(text)["full_attention"]),
            rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            final_logit_soft_cap=text.get("final_logit_softcapping"),
            per_layer_input_size=text.get("hidden_size_per_layer_input") or 0,
            per_layer_vocab_size=text.get("vocab_size_per_layer_input") or text["vocab_size"],
            max_positions=text.get("max_position_embeddings", 131_072),
            dtype=text.get("dtype") or text.get("torch_dtype"),
        )


def _layers(text: Mapping[str, Any]) -> tuple[Layer, ...]:
    """The decoder layers that the flat fields, their overrides and the sharing rule describe."""
    names = _layer_types(text)
    num_owners = len(names) - (text.get("num_kv_shared_layers") or 0)
    layers = []
    for index, name in enumerate(names):
        kind, shares = KINDS[name], index >= num_owners
        key_is_value = bool(text.get("attention_k_eq_v")) and kind == GLOBAL
        geometry = {
            "head_dim": text["head_dim"],
            "num_key_value_heads": text["num_key_value_heads"],
        }
        geometry |= _overrides(text, index, kind, key_is_value)
        widening = 2 if shares and text.get("use_double_wide_mlp") else 1
        layers.append(
            Layer(
                index=index,
                kind=kind,
                head_dim=geometry["head_dim"],
                num_kv_heads=geometry["num_key_value_heads"],
                intermediate_size=text["intermediate_size"] * widening,
                key_is_value=key_is_value,
                reads_layer=max(i for i in range(num_owners) if names[i] == name)
                if shares
                else index,
            )
        )
    return tuple(layers)


def _overrides(text: Mapping[str, Any], index: int, kind: str, key_is_value: bool) -> dict:
    """What one layer says differently from the flat fields, in the new spelling or the old one."""
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
    """The kind of every layer; by default each sixth is global, and the last always is."""
    names = text.get("layer_types")
    if names is None:
        count = text["num_hidden_layers"]
        names = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(count)]
    return [*names[:-1], "full_attention"]


def _rope_parameters(text: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    return text.get("rope_parameters") or DEFAULT_ROPE


def _rope(parameters: Mapping[str, Any]) -> Rope:
    if parameters.get("rope_type", "default") == "default":
        return Rope(parameters["rope_theta"])
    fraction = parameters.get("partial_rotary_factor", 1.0)
    return Rope(parameters["rope_theta"], fraction, parameters.get("factor", 1.0))


def _problems(text: Mapping[str, Any], model_type: str | None) -> list[str]:
    """Everything in a config that would make this model compute something else."""
    if model_type not in MODEL_TYPES:
        return [f"model_type is {model_type!r}, but this program runs {', '.join(MODEL_TYPES)}"]
    found = [f"{key} is missing" for key in REQUIRED if not isinstance(text.get(key), int)]
    if text.get("enable_moe_block"):
        found.append(
            "enable_moe_block is true: mixture-of-experts checkpoints (26B-A4B) are not supported "
            "by this example; E2B, E4B, 12B and 31B are"
        )
    refused = {
        "attention_bias": (False, None),
        "hidden_activation": ("gelu_pytorch_tanh", None),
        "tie_word_embeddings": (True, None),
        "use_bidirectional_attention": ("vision", None),  # text tokens stay causal
        "quantization_config": (None,),
    }
    found += [
        f"{key} is {text[key]!r}, but must be {allowed[0]!r}"
        for key, allowed in refused.items()
        if key in text and text[key] not in allowed
    ]
    types = text.get("layer_types")
    if types is not None and (unknown := sorted(set(types) - set(KINDS))):
        found.append(f"layer_types has {unknown}, but must be of {sorted(KINDS)}")
    if types is not None and len(types) != text.get("num_hidden_layers"):
        found.append(f"layer_types has {len(types)} entries, num_hidden_layers is another number")
    if not found:
        names, shared = _layer_types(text), text.get("num_kv_shared_layers") or 0
        owners = set(names[: len(names) - shared])
        if not 0 <= shared < len(names) or not set(names) <= owners:
            found.append(f"num_kv_shared_layers is {shared}: some layer has no pages to attend to")
    for name in KINDS:
        parameters = _rope_parameters(text).get(name) or {}
        kind = parameters.get("rope_type", "default")
        if kind not in ("default", "proportional") or "rope_theta" not in parameters:
            found.append(f"rope_parameters[{name!r}] lacks rope_theta or has an unknown rope_type")
    return found
