"""Tokens that a small model drafts, and the host's model checks: EAGLE3, DFLASH and MTP."""

from __future__ import annotations

import os

import jax

from jattn import checks
from jattn.integrations.tpu_inference.settings import ModelConfig, SpeculativeConfig, VllmConfig

SETTING = "--speculative-config"
# Methods that draft with a model, which reads hidden states of the one that checks.
WITH_MODEL = ("eagle3", "dflash", "mtp")
# Methods that it takes for EAGLE3, and then finds no hidden states for.
TAKEN_FOR_EAGLE3 = ("eagle", "dspark")
# JAX models of the host that return hidden states of the layers that a draft reads.
WITH_HIDDEN_STATES = {
    "eagle3": ("LlamaForCausalLM",),
    "dflash": ("LlamaForCausalLM", "Qwen3ForCausalLM"),
}
NESTED_HEAD = "Qwen3ForCausalLM"  # whose head, unless tied, the host does not find for DFLASH
# Drafts of torch whose step returns two arrays, where the host takes one.
PAIRS = (
    *("DeepSeekMTPModel", "DeepseekV32MTPModel", "Gemma4MTPModel", "Glm5NextMTPModel"),
    *("KimiK3MTPModel", "OpenPanguMTPModel", "Qwen4ExpMTP"),
)
ONE_TOKEN = ("MiMoMTPModel", "ErnieMTPModel")  # drafts that assert that it is their first step


def enable() -> None:
    """Jit the methods that draft tokens as the host does, but without options of a compiler.

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
    """Note drafts that end the host at the first request, or change tokens.

    Args:
      implementation: of the model: "flax_nnx" or "vllm".
    """
    speculative = config.speculative_config
    if speculative is None:
        return
    method, model = speculative.method, config.model_config
    problems.require(
        method not in TAKEN_FOR_EAGLE3,
        SETTING,
        f"method {method}",
        "eagle3, dflash, mtp or ngram: the host treats it as eagle3, and ends at the first request",
    )
    if method not in WITH_MODEL:
        return
    problems.require(
        not config.scheduler_config.async_scheduling,
        "--async-scheduling",
        "on",
        f"off (--no-async-scheduling) with drafts of {method}: the host answers with wrong tokens "
        "where a request comes near --max-model-len",
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
    """Drafts of torch that the host can call, as often as it will."""
    draft, count = speculative.draft_model_config, speculative.num_speculative_tokens
    names = tuple(draft.architectures or ()) if implementation == "vllm" and draft else ()
    pairs = ", ".join(name for name in names if name in PAIRS)
    problems.require(
        not pairs,
        SETTING,
        f"mtp with {pairs}",
        "left out: the host ends with the first request (Gemma 4 has such drafts with "
        "MODEL_IMPL_TYPE=flax_nnx)",
    )
    single = ", ".join(name for name in names if name in ONE_TOKEN)
    problems.require(
        not single or count == 1,
        f"num_speculative_tokens of {SETTING}",
        str(count),
        f"1: {single} drafts no more",
    )


def _check_target(
    problems: checks.Problems, method: str, model: ModelConfig, implementation: str
) -> None:
    """A model that returns hidden states, and whose head is found."""
    names, asked = model.architectures or (), os.environ.get("MODEL_IMPL_TYPE", "auto")
    known = WITH_HIDDEN_STATES[method]
    problems.require(
        implementation != "vllm",
        "MODEL_IMPL_TYPE",
        asked,
        f"flax_nnx, and DRAFT_MODEL_IMPL_TYPE too, with drafts of {method}, for "
        f"{' or '.join(known)}: the host's torch models return no hidden states for it",
    )
    if implementation == "vllm":
        return
    is_known = any(name in known for name in names)
    reason = f"hidden states for it come only from {' and '.join(known)} of the host's JAX models"
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
        f"left out for a {NESTED_HEAD} without tie_word_embeddings, whose head the host does not "
        "find",
    )


def _check_heads(
    problems: checks.Problems, model: ModelConfig, speculative: SpeculativeConfig
) -> None:
    """Heads that the host pads as it does the model's, and makes a cache for.

    It pads the weights of a draft by what the model's heads lack, and sizes its cache by
    `hidden_size // num_attention_heads`.
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
        f"one whose head size lacks as much to a multiple of 128 as the model's {target} does (64 "
        "lacks nothing), and whose hidden_size / heads is padded to the same size",
    )


def _padding(head_size: int) -> int:
    """What the host adds to heads of a size."""
    return 0 if head_size == 64 else -head_size % 128
