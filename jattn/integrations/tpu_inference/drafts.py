"""Speculative decoding with a draft model: EAGLE3, DFLASH and MTP."""

from __future__ import annotations

import os

import jax

from jattn import checks
from jattn.integrations.tpu_inference.settings import ModelConfig, SpeculativeConfig, VllmConfig

SETTING = "--speculative-config"
# Methods with a draft model that reads hidden states of the target model.
WITH_MODEL = ("eagle3", "dflash", "mtp")
# Methods that the host mistakes for EAGLE3, and then finds no hidden states for.
TAKEN_FOR_EAGLE3 = ("eagle", "dspark")
# The host's JAX models that return hidden states of the layers that a draft model reads.
WITH_HIDDEN_STATES = {
    "eagle3": ("LlamaForCausalLM",),
    "dflash": ("LlamaForCausalLM", "Qwen3ForCausalLM"),
}
NESTED_HEAD = "Qwen3ForCausalLM"  # the host does not find its output head for DFLASH unless tied
# Torch draft models whose step returns two arrays, while the host expects one.
PAIRS = (
    *("DeepSeekMTPModel", "DeepseekV32MTPModel", "Gemma4MTPModel", "Glm5NextMTPModel"),
    *("KimiK3MTPModel", "OpenPanguMTPModel", "Qwen4ExpMTP"),
)
ONE_TOKEN = ("MiMoMTPModel", "ErnieMTPModel")  # they assert that each step is their first


def enable() -> None:
    """Jit the methods that draft tokens as the host does, but without TPU compiler options.

    Raises:
      ImportError: tpu-inference is not installed, or is another version.
    """
    from tpu_inference.spec_decode.jax.dflash import DFlashProposer
    from tpu_inference.spec_decode.jax.eagle3 import Eagle3Proposer

    steps = ("num_speculative_tokens", "layer_name_to_kvcache_index")
    for proposer, static in ((Eagle3Proposer, ("self", *steps)), (DFlashProposer, ("self",))):
        proposer._propose = jax.jit(
            proposer._propose.__wrapped__, static_argnames=static, donate_argnames="kv_caches"
        )


def check(problems: checks.Problems, config: VllmConfig, implementation: str) -> None:
    """Report draft models that crash the host on the first request, or that change its output.

    Args:
      implementation: of the target model, "flax_nnx" or "vllm".
    """
    speculative = config.speculative_config
    if speculative is None:
        return
    method, model = speculative.method, config.model_config
    problems.require(
        method not in TAKEN_FOR_EAGLE3,
        SETTING,
        f"method {method}",
        "eagle3, dflash, mtp or ngram: the host treats it as eagle3, and crashes on the first "
        "request",
    )
    if method not in WITH_MODEL:
        return
    problems.require(
        not config.scheduler_config.async_scheduling,
        "--async-scheduling",
        "on",
        f"off (--no-async-scheduling) with method {method}: the host returns wrong tokens when a "
        "request comes near --max-model-len",
    )
    if method == "mtp":
        _check_mtp(problems, speculative, implementation)
    elif method == "dflash" or implementation != "vllm":
        _check_target(problems, method, model, implementation)
        if implementation != "vllm":
            _check_heads(problems, model, speculative)


def _check_mtp(
    problems: checks.Problems, speculative: SpeculativeConfig, implementation: str
) -> None:
    """Report torch draft models that the host cannot call, or only for a single token."""
    draft, count = speculative.draft_model_config, speculative.num_speculative_tokens
    names = tuple(draft.architectures or ()) if implementation == "vllm" and draft else ()
    pairs = ", ".join(name for name in names if name in PAIRS)
    problems.require(
        not pairs,
        SETTING,
        f"mtp with {pairs}",
        "left out: the host crashes on the first request (for Gemma 4, MTP works with "
        "MODEL_IMPL_TYPE=flax_nnx)",
    )
    single = ", ".join(name for name in names if name in ONE_TOKEN)
    problems.require(
        not single or count == 1,
        f"num_speculative_tokens of {SETTING}",
        str(count),
        f"1: {single} drafts a single token",
    )


def _check_target(
    problems: checks.Problems, method: str, model: ModelConfig, implementation: str
) -> None:
    """Report target models whose hidden states or output head a draft model would not get."""
    names, asked = model.architectures or (), os.environ.get("MODEL_IMPL_TYPE", "auto")
    known = WITH_HIDDEN_STATES[method]
    problems.require(
        implementation != "vllm",
        "MODEL_IMPL_TYPE",
        asked,
        f"flax_nnx, and DRAFT_MODEL_IMPL_TYPE too, with method {method}, for "
        f"{' or '.join(known)}: the host's torch models return no hidden states for it",
    )
    if implementation == "vllm":
        return
    is_known = any(name in known for name in names)
    reason = f"of the host's JAX models, only {' and '.join(known)} return hidden states for it"
    if method == "eagle3":
        wanted = f"vllm, and DRAFT_MODEL_IMPL_TYPE too: {reason}"
        problems.require(is_known, "MODEL_IMPL_TYPE", asked, wanted)
    else:
        problems.require(is_known, SETTING, f"method {method}", f"left out: {reason}")
    problems.require(
        method != "dflash"
        or NESTED_HEAD not in names
        or getattr(model.hf_config, "tie_word_embeddings", False),
        SETTING,
        f"method {method}",
        f"left out for a {NESTED_HEAD} without tie_word_embeddings, whose output head the host "
        "does not find",
    )


def _check_heads(
    problems: checks.Problems, model: ModelConfig, speculative: SpeculativeConfig
) -> None:
    """Report draft models whose heads the host would pad or cache wrongly.

    The host pads a draft model's weights by as much as the target model's heads need, and sizes the
    draft model's cache by `hidden_size // num_attention_heads`.
    """
    draft = speculative.draft_model_config
    if draft is None:
        return
    size, target = draft.get_head_size(), model.get_head_size()
    config = draft.hf_config
    cached = getattr(config, "hidden_size", 0) // getattr(config, "num_attention_heads", 1)
    problems.require(
        _padding(size) == _padding(target) and size + _padding(size) == cached + _padding(cached),
        f"model of {SETTING}",
        f"one with head size {size} (hidden_size / heads: {cached})",
        f"one whose head size needs as much padding to a multiple of 128 as the model's {target} "
        "(64 needs none), and whose hidden_size / heads is padded to the same size",
    )


def _padding(head_size: int) -> int:
    """Return how much padding the host adds to heads of a size."""
    return 0 if head_size == 64 else -head_size % 128
