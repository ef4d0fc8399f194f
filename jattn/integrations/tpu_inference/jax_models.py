"""Refuse tpu-inference's JAX models where they differ from vLLM's models.

The host prefers its JAX models. `MODEL_IMPL_TYPE=vllm` selects vLLM's torch model instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from jattn import checks
from jattn.integrations.tpu_inference import images
from jattn.integrations.tpu_inference.settings import ModelConfig, VllmConfig

# Models that call a TPU kernel directly instead of the registered backend.
WITH_TPU_KERNELS = (
    *("DeepseekV3ForCausalLM", "GptOssForCausalLM"),
    *("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
)
# A text model that the host makes from the configuration of a multimodal model.
TEXT_OF_MORE = "Gemma4ForCausalLM"
# Models whose weights are loaded as they are, although their heads may be padded.
UNPADDED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Reads a multimodal model's text_config for its output head, if that has its own weights.
UNTIED_OF_MORE = "Qwen2ForCausalLM"
IMAGES = "Qwen2_5_VLForConditionalGeneration"
# Models with only a causal mask, and only plain and Llama 3's rotary embeddings.
PLAIN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", IMAGES)
# Models whose weights the host downloads from a repository's main branch.
OF_MAIN = ("LlamaForCausalLM", IMAGES)
PIXELS = "Gemma4ForConditionalGeneration"  # reads pixels as bfloat16, whatever their dtype
UNSTAGED = (TEXT_OF_MORE, PIXELS)  # crash in pipelines
POOLERS = ("none", "embed")  # kinds of pooling that they have, as --convert names them


def check(problems: checks.Problems, config: VllmConfig) -> None:
    """Report what the host's JAX model would load or compute differently from vLLM's."""
    model = config.model_config
    architectures = model.architectures or ()

    def require(ok: bool, why: str) -> None:
        asked = os.environ.get("MODEL_IMPL_TYPE", "auto")
        problems.require(ok, "MODEL_IMPL_TYPE", asked, f"vllm: {why}")

    past_the_backend = ", ".join(name for name in architectures if name in WITH_TPU_KERNELS)
    require(not past_the_backend, f"the host's JAX model of {past_the_backend} calls no backend")
    is_whole = hasattr(model.hf_config, "text_config")
    require(
        is_whole or TEXT_OF_MORE not in architectures,
        f"the host's JAX model of {TEXT_OF_MORE} reads only a config.json with a text_config",
    )
    require(
        is_whole
        or UNTIED_OF_MORE not in architectures
        or getattr(model.hf_config, "tie_word_embeddings", False),
        f"the host's JAX model of {UNTIED_OF_MORE} reads only a config.json with a text_config, "
        "unless tie_word_embeddings is set there",
    )
    unpadded = ", ".join(name for name in architectures if name in UNPADDED)
    size = model.get_head_size()
    require(
        not unpadded or size == 64 or size % 128 == 0,
        f"the host's JAX model of {unpadded} loads weights for head sizes of 64 and multiples of "
        f"128 only, not {size}",
    )
    plain = ", ".join(name for name in architectures if name in PLAIN)
    rotary = "" if not plain else _other_rotary(model)
    require(not rotary, f"the host's JAX model of {plain} does not support {rotary}")
    staged = ", ".join(name for name in architectures if name in UNSTAGED)
    require(
        not staged or config.parallel_config.pipeline_parallel_size == 1,
        f"the host's JAX model of {staged} crashes on the first request with "
        "--pipeline-parallel-size",
    )
    window = model.get_sliding_window()
    require(
        not plain or window is None,
        f"the host's JAX model of {plain} has no sliding window, but this model's is {window}",
    )
    require(
        not plain or getattr(model.hf_text_config, "is_causal", True),
        f"the host's JAX model of {plain} is causal, but is_causal is false",
    )
    require(
        model.convert_type in POOLERS,
        f"the host's JAX models have no pooler for --convert {model.convert_type}",
    )
    seeing = ", ".join(name for name in architectures if name in images.JAX_MODELS)
    inputs = model.multimodal_config
    problems.require(
        not seeing or inputs is None or not inputs.enable_mm_embeds,
        "--enable-mm-embeds",
        "given",
        f"left out, or MODEL_IMPL_TYPE=vllm set: the host's JAX model of {seeing} takes only "
        "images, and crashes on their embeddings",
    )
    require(
        PIXELS not in architectures
        or not model.supports_multimodal_inputs
        or "bfloat16" in str(model.dtype),
        f"the host's JAX model of {PIXELS} reads pixels as bfloat16, but --dtype is {model.dtype}",
    )
    of_main = ", ".join(name for name in architectures if name in OF_MAIN)
    problems.require(
        not of_main or model.revision in (None, "main") or os.path.isdir(model.model),
        "--revision",
        str(model.revision),
        f"left out, with --model a folder that has that revision, or given with "
        f"MODEL_IMPL_TYPE=vllm: for {of_main} the host downloads the weights of the main branch",
    )


def _other_rotary(model: ModelConfig) -> str:
    """Return what a model's rotary embedding has beyond plain and Llama 3's, or nothing."""
    found = getattr(model.hf_text_config, "rope_parameters", None) or {}
    if any(isinstance(part, Mapping) for part in found.values()):
        return "rope_parameters of several kinds of layers"
    kind = found.get("rope_type", found.get("type", "default"))
    has_images = IMAGES in (model.architectures or ())
    known = ("default", "mrope") if has_images else ("default", "llama3")
    if kind not in known:
        return f"rope_type {kind}"
    if kind == "default" and ("factor" in found or "scale_factor" in found):
        return "rope_type default with a factor as vLLM does"
    part = found.get("partial_rotary_factor", 1)
    return "" if part == 1 else f"partial_rotary_factor {part}"
