"""The settings of sglang-jax that jattn cannot serve, refused when the engine starts.

`unread` checks the settings of a model's configuration that the host does not read.
"""

from __future__ import annotations

import os
import re

import jax
import jax.numpy as jnp

from jattn import checks
from jattn.integrations.sglang_jax import settings, unread

FUSED = ("fused", "fused_v2")
GDN = "chunked_jax"  # the prefill of gated delta nets that needs no TPU
# Algorithms whose draft tokens a TPU kernel verifies, and one whose layers fail in the host.
TREES, FAILING = ("EAGLE", "STANDALONE"), "NEXTN"
# How many tokens before itself a block of draft tokens (DFLASH) sees; it also sees itself.
PREFIX_WINDOW = "SGL_JAX_DFLASH_DRAFT_PREFIX_WINDOW"
# Whether EAGLE3 makes and verifies draft tokens by TPU kernels (1) instead of XLA.
RECURRENT = "SGL_JAX_DISABLE_FUSED_EAGLE3_RECURRENT_DRAFT"
# Models whose dense layers use a TPU kernel, unless their weights are quantized.
FUSED_DENSE = {"Glm5ForCausalLM", "GlmMoeDsaForCausalLM"}


def check(runner: settings.ModelRunner) -> None:
    """Raise if a model runner of sglang-jax has settings that jattn does not support.

    Args:
      runner: `sgl_jax.srt.model_executor.model_runner.ModelRunner`.

    Raises:
      ValueError: lists every such setting, and what it must be.
    """
    arguments = runner.server_args
    with checks.checking("jattn.integrations.sglang_jax") as problems:
        problems.require(
            arguments.attention_backend == "fa",
            "--attention-backend",
            str(arguments.attention_backend),
            "fa, the backend that jattn replaces",
        )
        check_pages(problems, runner)
        check_prefill(problems, runner)
        check_adapters(problems, arguments)
        unread.check(problems, runner.model_config)
        if arguments.speculative_algorithm:
            check_drafts(problems, runner)
        if jax.default_backend() != "tpu":
            check_kernels(problems, runner)
        length = getattr(runner.model_config.hf_config, "attn_temperature_len", None) or -1
        problems.require(
            length <= 0,
            "--model-path",
            f"a model with attn_temperature_len={length}",
            "one without: jattn has no temperature that grows with the position (Grok)",
        )


def check_device(arguments: settings.ServerArguments) -> None:
    """Raise if the host would run on TPUs but JAX has none.

    Raises:
      ValueError: says which device it must be.
    """
    found = jax.default_backend()
    with checks.checking("jattn.integrations.sglang_jax") as problems:
        problems.require(
            arguments.device != "tpu" or found == "tpu",
            "--device",
            "tpu, the host's default unless --device or JAX_PLATFORMS is set",
            f"{found}, the device that JAX found",
        )


def check_uses(arguments: settings.ServerArguments) -> None:
    """Raise if settings let the host start and then make requests fail.

    Raises:
      ValueError: lists every such setting, and what it must be.
    """
    with checks.checking("jattn.integrations.sglang_jax") as problems:
        problems.require(
            not arguments.is_embedding,
            "--is-embedding",
            "given",
            "left out: the host cannot process requests for embeddings, and fails them",
        )
        problems.require(
            not arguments.multimodal,
            "--multimodal",
            "given",
            "left out, with a model that the host serves without it: the stages of this mode would "
            "run without jattn, and an Engine fails the requests",
        )
        problems.require(
            not arguments.enable_mixed_chunk,
            "--enable-mixed-chunk",
            "given",
            "left out: the host loses running requests next to one with n over 1, and crashes",
        )


def check_pages(problems: checks.Problems, runner: settings.ModelRunner) -> None:
    """Report latent page sizes that the host pads, which changes how many tokens a page holds."""
    narrow = runner.server_args.kv_cache_dtype == "bf16"
    packing = 2 if narrow else max(1, 4 // jnp.dtype(runner.model_config.dtype).itemsize)
    problems.require(
        not runner.use_mla_backend or (runner.page_size > 1 and runner.page_size % packing == 0),
        "--page-size",
        str(runner.page_size),
        f"{'even' if packing == 2 else 'at least 2'} for a model with MLA",
    )


def check_prefill(problems: checks.Problems, runner: settings.ModelRunner) -> None:
    """Report a limit below the longest prompt, if prompts are prefilled at once."""
    arguments, length = runner.server_args, runner.model_config.context_len
    length = min(length, arguments.max_total_tokens or length)
    chunk = arguments.chunked_prefill_size
    problems.require(
        (chunk is not None and chunk > 0) or arguments.max_prefill_tokens >= length,
        "--max-prefill-tokens",
        str(arguments.max_prefill_tokens),
        f"at least {length}, the longest prompt, with --chunked-prefill-size {chunk}",
    )


def check_adapters(problems: checks.Problems, arguments: settings.ServerArguments) -> None:
    """Report a limit of adapters that the host exceeds: it counts 'no adapter' as one of them."""
    count = len(arguments.lora_paths or ())
    problems.require(
        not arguments.enable_lora or count < arguments.max_loras_per_batch,
        "--max-loras-per-batch",
        str(arguments.max_loras_per_batch),
        f"at least {count + 1}, one more than --lora-paths: the host crashes with fewer",
    )


def check_drafts(problems: checks.Problems, runner: settings.ModelRunner) -> None:
    """Report settings of speculative decoding that are not supported."""
    arguments = runner.server_args
    problems.require(
        not runner.use_mla_backend and runner.linear_recurrent_config is None,
        "--speculative-algorithm",
        str(arguments.speculative_algorithm),
        "left out: the host cannot verify draft tokens of models with MLA or linear attention",
    )
    problems.require(
        arguments.speculative_eagle_topk == 1,
        "--speculative-eagle-topk",
        str(arguments.speculative_eagle_topk),
        "1, for chains of draft tokens: jattn does not read the masks of trees",
    )
    problems.require(
        not arguments.enable_deterministic_sampling,
        "--enable-deterministic-sampling",
        "given",
        "left out with --speculative-algorithm: the host samples draft tokens without the seeds",
    )
    window = os.environ.get(PREFIX_WINDOW, "0")
    has_none = re.fullmatch(r"\s*(0|-\d+)\s*", window) is not None
    problems.require(
        arguments.speculative_algorithm != "DFLASH" or has_none,
        PREFIX_WINDOW,
        window,
        "0: without a causal mask, a window of jattn hides keys after the query too",
    )


def check_kernels(problems: checks.Problems, runner: settings.ModelRunner) -> None:
    """Report settings for which the host has only TPU kernels."""
    arguments, model = runner.server_args, runner.model_config
    if model.moe_backend in FUSED and arguments.moe_backend == "epmoe":
        problems.add(
            "--model-path",
            "a mixture of experts that the host always computes with its fused kernel for TPUs",
            "one that the host can also compute with --moe-backend epmoe",
        )
    elif model.moe_backend in FUSED:
        problems.add(
            "--moe-backend",
            str(arguments.moe_backend),
            "epmoe: the fused kernels need a TPU",
        )
    names = FUSED_DENSE.intersection(getattr(model.hf_config, "architectures", None) or ())
    problems.require(
        not names or model.quantization_config is not None,
        "--model-path",
        f"a model of {', '.join(sorted(names))} without quantization",
        "another model: the host computes the dense layers of this one with a TPU kernel",
    )
    block = getattr(model.quantization_config, "weight_block_size", None)
    problems.require(
        block is None,
        "--quantization-config-path" if arguments.quantization_config_path else "--model-path",
        f"weights with scales for blocks of {block} (weight_block_size)",
        "bfloat16 or scaled per channel: the host needs a TPU to multiply by these weights",
    )
    check_verifying(problems, arguments)
    problems.require(
        runner.qwen3_5_hybrid_config is None
        or arguments.gdn_prefill_impl == GDN
        or not asked_for(arguments, "--gdn-prefill-impl"),
        "--gdn-prefill-impl",
        str(arguments.gdn_prefill_impl),
        f"{GDN}, or left out: the other choice needs a TPU",
    )


def check_verifying(problems: checks.Problems, arguments: settings.ServerArguments) -> None:
    """Report draft tokens that the host verifies with a TPU kernel, which crashes its scheduler."""
    algorithm, steps = arguments.speculative_algorithm, arguments.speculative_num_steps
    problems.require(
        algorithm not in TREES,
        "--speculative-algorithm",
        str(algorithm),
        "EAGLE3: the host verifies these draft tokens with a TPU kernel",
    )
    problems.require(
        algorithm != FAILING,
        "--speculative-algorithm",
        str(algorithm),
        "EAGLE3: the host's draft layers for it (MiMo's) fail",
    )
    if algorithm != "EAGLE3":
        return
    given = os.environ.get(RECURRENT, "0")
    problems.require(
        given != "1", RECURRENT, given, "0: with 1 the host verifies draft tokens with a TPU kernel"
    )
    problems.require(
        steps > 1,
        "--speculative-num-steps",
        str(steps),
        "at least 2: the host verifies a single draft token with a TPU kernel",
    )
    problems.require(
        arguments.speculative_num_draft_tokens == steps + 1,
        "--speculative-num-draft-tokens",
        str(arguments.speculative_num_draft_tokens),
        f"{steps + 1}, one more than --speculative-num-steps: the host verifies any other number "
        "of draft tokens with a TPU kernel",
    )


def asked_for(arguments: settings.ServerArguments, flag: str) -> bool:
    """Whether a flag is on the server's command line; an `Engine` does not record flags."""
    given = getattr(arguments, "_explicit_cli_args", ())
    return any(str(word).split("=")[0] == flag for word in given)
