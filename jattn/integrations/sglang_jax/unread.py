"""What a model's configuration asks for and sglang-jax ignores, so its outputs would be wrong."""

from __future__ import annotations

from collections.abc import Callable

from jattn import checks
from jattn.integrations.sglang_jax import settings

# Fields of a model's configuration that the host does not read, and what they ask for.
UNREAD = {
    "num_kv_shared_layers": "layers that share keys and values",
    "hidden_size_per_layer_input": "embeddings per layer",
}
# Models that the host runs as Llama.
LLAMAS = ("LlamaForCausalLM", "Phi3ForCausalLM", "InternLM3ForCausalLM")
# Models for which the host has only one activation.
QWENS = ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
# Name prefixes of the models for which the host has sliding windows.
WITH_WINDOWS = ("Gemma2", "Gemma4", "MiMoV2")
# Ling models without linear attention.
LING = ("BailingMoeForCausalLM", "BailingMoEForCausalLM", "BailingMoeV2ForCausalLM")
# Name prefixes of the models whose rotary embeddings the host does not scale.
UNSCALED = (
    *LING,
    "DFlash",
    "Gemma2",
    "Glm5",
    "GlmMoeDsa",
    "MiniMaxM2",
    "QWen",
    "Qwen2Moe",
    "Qwen3",
)
# A condition, what the model has, and what it must be.
Require = Callable[[bool, str, str], None]


def check(problems: checks.Problems, model: settings.ModelConfig) -> None:
    """Report what a model's configuration asks for and the host's model does not do."""
    text = model.hf_text_config
    names: list[str] = getattr(model.hf_config, "architectures", None) or []

    def require(ok: bool, what: str, wanted: str) -> None:
        problems.require(ok, "--model-path", f"a model of {', '.join(names)} with {what}", wanted)

    for name, what in UNREAD.items():
        count = getattr(text, name, None) or 0
        problems.require(
            count == 0,
            "--model-path",
            f"a model with {name}={count}",
            f"one without (Gemma 4 26B and 31B): the host does not compute the model's {what}",
        )
    window = getattr(text, "sliding_window", None) or 0
    problems.require(
        window <= 0
        or not getattr(text, "use_sliding_window", True)
        or not names
        or model.context_len <= window
        or any(name.startswith(WITH_WINDOWS) for name in names),
        "--context-length",
        str(model.context_len),
        f"at most {window}, the sliding window of {', '.join(names)}, which the host ignores",
    )
    quantized = getattr(model.hf_config, "quantization_config", None)
    method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
    require(
        not quantized or model.quantization_config is not None,
        f"weights quantized by {method}",
        "one with unquantized weights: the host reads these as unquantized",
    )
    require(
        "DeepseekV2ForCausalLM" not in names or hasattr(text, "scoring_func"),
        "no scoring_func",
        'one with "scoring_func": "softmax" in its config.json: the host defaults to sigmoid',
    )
    _check_layers(require, text, names)
    _check_rotary(require, text, names)


def _check_layers(require: Require, text: object, names: list[str]) -> None:
    """Report biases and activations that the host's layers lack."""
    is_llama = any(name in LLAMAS for name in names)
    require(
        not (is_llama and getattr(text, "mlp_bias", False)),
        "mlp_bias",
        "one without: the host leaves those biases out",
    )
    act = getattr(text, "hidden_act", None) or "silu"
    require(
        act in ("silu", "swish") or not (is_llama or any(name in QWENS for name in names)),
        f"hidden_act={act}",
        "one with silu: the host has no other",
    )
    for name in ("use_qkv_bias", "use_bias"):
        require(
            not (any(one in LING for one in names) and getattr(text, name, False)),
            name,
            "one without: the host leaves those biases out",
        )


def _check_rotary(require: Require, text: object, names: list[str]) -> None:
    """Report rotary embeddings that the host computes differently."""
    part = getattr(text, "partial_rotary_factor", None) or 1
    require(
        part == 1 or not any(name in LLAMAS for name in names),
        f"partial_rotary_factor={part}",
        "one without: the host always rotates whole heads",
    )
    scaling = getattr(text, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    require(
        kind == "default" or not any(name.startswith(UNSCALED) for name in names),
        f"rope_scaling of rope_type {kind}",
        "one without: the host does not scale its rotary embeddings",
    )
    require(
        scaling.get("attention_factor") is None,
        f"attention_factor={scaling.get('attention_factor')} of rope_scaling",
        "one without: the host does not read it",
    )
    require(
        scaling.get("truncate") is not False,
        "truncate=False of rope_scaling",
        "one without: the host does not read it",
    )
    parameters = getattr(text, "rope_parameters", None) or {}
    require(
        not any(isinstance(part, dict) for part in parameters.values())
        or any(name.startswith("Gemma4") for name in names),
        "rope_parameters of several kinds of layers",
        "one with a config.json of transformers 4 (rope_theta): the host reads such parameters for "
        "Gemma 4 only",
    )
