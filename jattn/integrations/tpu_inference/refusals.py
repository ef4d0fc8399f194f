"""Refuse vLLM settings that jattn or tpu-inference cannot follow, as an engine starts.

An error names each setting as its user gives it, and what it must be.
"""

from __future__ import annotations

import os

import jax

from jattn import checks
from jattn.integrations import versions
from jattn.integrations.tpu_inference import drafts, experts, jax_models
from jattn.integrations.tpu_inference.settings import VllmConfig, is_off

NAME = "jattn"
HOST = "tpu-inference"
TESTED = "0.32.0"  # of tpu-inference, and of the vLLM that it needs
ONLINE = "OnlineQuantizationConfig"  # vLLM's: quantizes a bfloat16 checkpoint as it is loaded
STEP = "MIN_TOKEN_BUCKET"  # the host's variable: it pads a step to a multiple of this many tokens
VOCABULARY = 64  # vLLM pads a vocabulary to a multiple of this many tokens
DELTA_NETS = ("qwen3_next", "qwen3_5")  # how the types of models with gated delta nets begin
EOS_INTERVAL = "CONTINUE_DECODE_EOS_CHECK_INTERVAL"  # the host's: in steps
NEWER_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # vLLM's: whether its scheduler is for a newer runner
FRONTEND = "VLLM_USE_RUST_FRONTEND"  # vLLM's: whether a server's requests skip Python
PACKING = "MLA_KV_PACKING_SIZE"  # the host's: the latents of this many tokens lie together
WITHOUT_CHUNKS = """--hf-overrides '{"dual_chunk_attention_config": null}'"""
LOGPROBS = ("raw_logprobs", "processed_logprobs")  # modes that the host has
# Torch models that keep the finer features of an image in a module for the step that follows. That
# step was traced earlier, so the host computes with the features of another step, or crashes.
KEEPING_IMAGES = (
    *("CohereCompassForConditionalGeneration", "Ernie4_5_VLMoeForConditionalGeneration"),
    *("Granite4VisionForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"),
)
# Settings of models whose layers need data of the first or another stage (Gemma 4 E2B and E4B).
SHARED = ("hidden_size_per_layer_input", "num_kv_shared_layers")
EMBEDDED = "Gemma3nForConditionalGeneration"  # takes embeddings only; the host gives it tokens
CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")


def check(config: VllmConfig) -> None:
    """Raise if a vLLM configuration asks for something that jattn or the host cannot do.

    Args:
      config: `vllm.config.VllmConfig`.

    Raises:
      ValueError: names every such setting and what it must be.
    """
    platform = jax.default_backend()
    with checks.checking(f"--attention-backend {NAME}") as problems:
        versions.check(problems, HOST, TESTED)
        _check_devices(problems, config, platform)
        _check_cache(problems, config)
        _check_steps(problems, config)
        implementation = _implementation(config)
        _check_shards(problems, config, implementation)
        _check_kernels(problems, config, platform)
        _check_model(problems, config, implementation)
        _check_stages(problems, config)
        if implementation != "vllm":
            jax_models.check(problems, config)
        _check_adapters(problems, config, implementation)
        _check_unread(problems, config)
        drafts.check(problems, config, implementation)


def _implementation(config: VllmConfig) -> str:
    """Return "flax_nnx", or "vllm", which the host falls back to if it has no JAX model."""
    from tpu_inference.models.common import model_loader

    asked: str = model_loader.resolve_model_impl_type(config)
    if asked == "flax_nnx":
        try:
            model_loader._get_model_architecture(config.model_config.hf_config)
        except model_loader.UnsupportedArchitectureError:
            return "vllm"
    return asked


def _check_devices(problems: checks.Problems, config: VllmConfig, platform: str) -> None:
    """Report context parallelism, and replicas without TPUs."""
    parallel = config.parallel_config
    for phase in ("decode", "prefill"):
        ranks = getattr(parallel, f"{phase}_context_parallel_size")
        problems.require(
            ranks == 1,
            f"--{phase}-context-parallel-size",
            str(ranks),
            "1: use --tensor-parallel-size",
        )
    # In one process the host counts replicas in its own sharding, and sets vLLM's number to 1.
    sharding = config.sharding_config
    whole = sharding.model_dp_size
    of_attention = sharding.total_dp_size // whole
    problems.require(
        of_attention == 1 or platform == "tpu",
        "enable_dp_attention of --additional_config",
        f"true, which has {of_attention} devices attend to different requests",
        f"left out, or given with fewer devices, on a {platform}, where the host's schedulers for "
        "them do not respond",
    )
    replicas = max(parallel.data_parallel_size, whole)
    problems.require(
        replicas == 1 or platform == "tpu",
        "--data-parallel-size",
        str(replicas),
        f"1 on a {platform} in one process, or with experts: for other models `vllm serve` starts "
        "a process for each replica",
    )


def _check_cache(problems: checks.Problems, config: VllmConfig) -> None:
    """Report unsupported cache dtypes and layouts, and MLA on several devices."""
    dtype, use_mla = config.cache_config.cache_dtype, config.model_config.use_mla
    problems.require(
        dtype in CACHE_DTYPES, "--kv-cache-dtype", dtype, f"one of {', '.join(CACHE_DTYPES)}"
    )
    others = config.cache_config.kv_cache_dtype_skip_layers
    problems.require(
        not others,
        "--kv-cache-dtype-skip-layers",
        " ".join(others),
        "left out: the host gives all caches the same dtype",
    )
    setting, devices = _devices_of_heads(config)
    problems.require(
        not use_mla or devices == 1,
        setting,
        str(devices),
        "1 for a model with MLA layers, because the host cannot shard their scales; more are "
        "possible with VLLM_MLA_DISABLE=1, which caches whole keys and values",
    )
    block, packing = config.cache_config.block_size, int(os.environ.get(PACKING, "32"))
    problems.require(
        not use_mla or block % packing == 0,
        "--block-size",
        str(block),
        f"a multiple of {packing} ({PACKING}) for a model with MLA layers: the host pads "
        "pages to such a multiple, but vLLM counts them without the padding",
    )
    transposed = os.environ.get("MLA_TRANSPOSE_KV_CACHE", "0")
    problems.require(
        not use_mla or is_off(transposed),
        "MLA_TRANSPOSE_KV_CACHE",
        transposed,
        "0: jattn would have to copy pages with their tokens last to read them",
    )


def _check_steps(problems: checks.Problems, config: VllmConfig) -> None:
    """Report ways to schedule steps in which the host or vLLM would lose track of tokens."""
    problems.require(
        not config.use_v2_model_runner or config.watermark_config is not None,
        NEWER_RUNNER,
        os.environ.get(NEWER_RUNNER, "left out"),
        "0: vLLM's scheduler would resend a preempted request as a new one, and the host would "
        "restart its output",
    )
    ahead = config.scheduler_config.async_scheduling
    problems.require(
        not ahead or config.parallel_config.pipeline_parallel_size == 1,
        "--async-scheduling",
        "on",
        "off (--no-async-scheduling) with --pipeline-parallel-size: the first stages wait for "
        "tokens that vLLM then does not send, and crash",
    )
    problems.require(
        not ahead or config.model_config.runner_type != "pooling",
        "--async-scheduling",
        "on",
        "off (--no-async-scheduling) with --runner pooling: the host changes which requests the "
        "embeddings that it returned belong to, while vLLM reads them",
    )
    if not config.additional_config.get("enable_continue_decode"):
        return
    setting = "enable_continue_decode of --additional_config"
    problems.require(
        not config.scheduler_config.async_scheduling,
        setting,
        "true",
        "left out, or given with --no-async-scheduling: the host otherwise loses count of the "
        "tokens that it has decoded, and returns wrong ones",
    )
    kinds = sorted(set(getattr(config.model_config.hf_text_config, "layer_types", None) or ()))
    problems.require(
        len(kinds) < 2,
        setting,
        f"true, for layers of {' and '.join(kinds)}",
        "left out: the host crashes on the first request if caches are in several groups",
    )
    interval = os.environ.get(EOS_INTERVAL) or "1"
    problems.require(
        interval == "1",
        EOS_INTERVAL,
        interval,
        "1: the host otherwise overwrites the last key of an output that ended earlier, and other "
        "requests may share that key",
    )


def _check_shards(problems: checks.Problems, config: VllmConfig, implementation: str) -> None:
    """Report numbers of devices over which the host cannot split the vocabulary or KV heads."""
    model = config.model_config
    kv_heads, (setting, devices) = model.get_total_num_kv_heads(), _devices_of_heads(config)
    vocabulary = model.get_vocab_size()
    problems.require(
        vocabulary % devices == 0 or model.runner_type == "pooling",  # which has no logits
        setting,
        str(devices),
        f"a divisor of {vocabulary}, the model's vocabulary: the host otherwise samples tokens "
        "past its end, or crashes on the first request",
    )
    problems.require(
        implementation == "vllm" or model.use_mla or devices <= kv_heads,
        setting,
        str(devices),
        f"at most the model's {kv_heads} KV heads, or given with MODEL_IMPL_TYPE=vllm: the host's "
        "JAX models load no weights for more devices",
    )


def _devices_of_heads(config: VllmConfig) -> tuple[str, int]:
    """Return the setting that splits heads over devices, and the number of devices."""
    by_flag = config.parallel_config.tensor_parallel_size
    sharding = config.sharding_config
    by_strategy = sharding.tp_size * sharding.expert_size
    if by_strategy > by_flag:
        return "tensor_parallelism * expert_parallelism of --additional_config", by_strategy
    return "--tensor-parallel-size", by_flag


def _check_kernels(problems: checks.Problems, config: VllmConfig, platform: str) -> None:
    """Report settings that select TPU kernels on other devices."""
    kernels = experts.KERNELS if config.model_config.get_num_experts() else ()
    for setting in ("ENABLE_QUANTIZED_MATMUL_KERNEL", "TPU_ENABLE_D2H_TRANSFER", *kernels):
        value = os.environ.get(setting, "0")
        problems.require(
            platform == "tpu" or is_off(value),
            setting,
            value,
            f"0 on a {platform}: it selects a TPU kernel",
        )


def _check_model(problems: checks.Problems, config: VllmConfig, implementation: str) -> None:
    """Report models that the host does not compute, or not as vLLM or jattn would."""
    model = config.model_config
    names = ", ".join(model.architectures or ())
    kind = getattr(model.hf_text_config, "model_type", "")
    has_delta_nets = kind.startswith(DELTA_NETS)
    problems.require(
        not model.is_hybrid or has_delta_nets,
        "--model",
        names,
        "one whose recurrent layers are Qwen's gated delta nets: the host implements no others",
    )
    problems.require(
        not model.is_attention_free,
        "--model",
        names,
        "one with attention layers: the host implements no recurrent layers other than Qwen's "
        "gated delta nets",
    )
    problems.require(
        getattr(model.hf_text_config, "index_topk", None) is None,
        "--model",
        f"{names} with index_topk",
        "one whose queries attend to all keys: for others the host has only TPU kernels, or none",
    )
    problems.require(
        EMBEDDED not in (model.architectures or ()),
        "--model",
        names,
        "another model: this one takes only embeddings, but the host passes it a text's tokens",
    )
    keeping = ", ".join(name for name in model.architectures or () if name in KEEPING_IMAGES)
    problems.require(
        not keeping or not model.supports_multimodal_inputs,
        "--limit-mm-per-prompt",
        "not 0 for every modality",
        f"0 for each: {keeping} keeps image features from one call to the next, and the host "
        "compiles those of one step into all steps",
    )
    problems.require(
        not (config.speculative_config and model.is_hybrid and has_delta_nets),
        "--speculative-config",
        "given",
        "left out for a model with recurrent states: the host leaves rejected draft tokens in them",
    )
    problems.require(
        not (config.speculative_config and model.supports_multimodal_inputs),
        "--speculative-config",
        "given",
        "left out for a multimodal model, or given with --limit-mm-per-prompt 0 for every "
        "modality: the host crashes on the first image",
    )
    problems.require(
        getattr(model.hf_text_config, "dual_chunk_attention_config", None) is None,
        "--model",
        f"{names} with dual_chunk_attention_config",
        f"one without it ({WITHOUT_CHUNKS}): neither jattn nor the host implements such chunks",
    )
    window = getattr(model.hf_config, "rswa_window", None)
    problems.require(
        window is None,
        "--model",
        f"{names} with rswa_window={window}",
        "one without such windows: the host would compute full attention instead",
    )
    problems.require(
        not (model.is_multimodal_model and model.is_mm_prefix_lm),
        "--limit-mm-per-prompt",
        "not 0 for every modality",
        f"0 for each: tokens of an image see each other in {names}, but the host computes causal "
        "attention for them",
    )


def _check_stages(problems: checks.Problems, config: VllmConfig) -> None:
    """Report pipeline stages for what the host supports only in a single stage."""
    stages, setting = config.parallel_config.pipeline_parallel_size, "--pipeline-parallel-size"
    problems.require(
        stages == 1 or config.speculative_config is None,
        setting,
        str(stages),
        "1 with --speculative-config: the host verifies draft tokens in the last stage, but asks "
        "every stage for them",
    )
    problems.require(
        stages == 1 or not config.model_config.supports_multimodal_inputs,
        setting,
        str(stages),
        "1 for a multimodal model, or given with --limit-mm-per-prompt 0 for every modality: the "
        "host would run the encoder in each stage",
    )
    text = config.model_config.hf_text_config
    shared = [field for field in SHARED if getattr(text, field, None)]
    problems.require(
        stages == 1 or not shared,
        setting,
        str(stages),
        f"1 for a model with {' and '.join(shared)}: the host passes neither embeddings of the "
        "first stage nor shared keys on to later stages",
    )


def _check_adapters(problems: checks.Problems, config: VllmConfig, implementation: str) -> None:
    """Report LoRA adapters for models, layers and steps that the host cannot apply them to."""
    adapters, model = config.lora_config, config.model_config
    if adapters is None:
        return
    names = ", ".join(model.architectures or ())
    problems.require(
        implementation == "vllm",
        "MODEL_IMPL_TYPE",
        os.environ.get("MODEL_IMPL_TYPE", "auto"),
        f"vllm with --enable-lora: the host's JAX model of {names} does not support adapters",
    )
    vocabulary = model.get_vocab_size()
    problems.require(
        vocabulary % VOCABULARY == 0,
        "--enable-lora",
        f"given, for a vocabulary of {vocabulary} tokens",
        f"left out: the host applies adapters only to logits of a multiple of {VOCABULARY} tokens",
    )
    budget, step = config.scheduler_config.max_num_batched_tokens, int(os.environ.get(STEP) or "16")
    problems.require(
        budget % step == 0,
        "--max-num-batched-tokens",
        str(budget),
        f"a multiple of {step} ({STEP}) with --enable-lora: the host pads steps to such "
        "a multiple, but applies adapters to only --max-num-batched-tokens tokens (vLLM lowers the "
        "setting to --max-num-seqs times --max-model-len)",
    )
    targets, by_variable = adapters.target_modules, os.environ.get("LORA_MODULE_PATH") or None
    problems.require(
        not model.get_num_experts()
        or by_variable is not None
        or (targets is not None and not any("experts" in name for name in targets)),
        "--lora-target-modules",
        "left out" if targets is None else " ".join(targets),
        f"names of layers other than experts (q_proj v_proj) for {names}: the host's experts do "
        "not support adapters",
    )
    problems.require(
        not model.get_num_experts() or not by_variable,
        "LORA_MODULE_PATH",
        str(by_variable),
        f"left out for {names} in favor of --lora-target-modules: the host's experts do not "
        "support adapters",
    )


def _check_unread(problems: checks.Problems, config: VllmConfig) -> None:
    """Report settings that vLLM accepts and the host does not implement."""
    model = config.model_config
    problems.require(
        not model.enable_prompt_embeds,
        "--enable-prompt-embeds",
        "given",
        "left out: the host takes only prompts of tokens, and crashes on a request without them",
    )
    problems.require(
        not model.logits_processors,
        "--logits-processors",
        " ".join(map(str, model.logits_processors or ())),
        "left out: the host never calls them",
    )
    problems.require(
        not config.cache_config.kv_sharing_fast_prefill,
        "--kv-sharing-fast-prefill",
        "given",
        "left out: the host makes no metadata for layers that skip a prompt, and crashes",
    )
    problems.require(
        model.logprobs_mode in LOGPROBS,
        "--logprobs-mode",
        str(model.logprobs_mode),
        f"one of {', '.join(LOGPROBS)}: the host returns no logits",
    )
    for flag, given, why in (
        (
            "--kv-cache-memory-bytes",
            config.cache_config.kv_cache_memory_bytes,
            "the host sizes caches by --gpu-memory-utilization and --num-gpu-blocks-override",
        ),
        (
            "--kv-offloading-size",
            config.cache_config.kv_offloading_size,
            "the host does not offload blocks",
        ),
        (
            "--ec-transfer-config",
            config.ec_transfer_config,
            "the host receives no image embeddings from other processes",
        ),
        (
            "--weight-transfer-config",
            config.weight_transfer_config,
            "the host changes no weights, but reports that it did",
        ),
        ("--watermark-config", config.watermark_config, "the host adds no watermark"),
        ("--return-sampling-mask", model.return_sampling_mask or None, "the host returns none"),
        ("--enable-trace-replay", model.enable_trace_replay or None, "the host ignores it"),
    ):
        problems.require(given is None, flag, str(given), f"left out: {why}")
    frontend = os.environ.get(FRONTEND, "0")
    problems.require(
        is_off(frontend),
        FRONTEND,
        frontend,
        "0: requests that the host cannot follow are refused only in vLLM's Python frontend",
    )
    vocabulary = model.get_vocab_size()
    problems.require(
        0 <= model.max_logprobs <= vocabulary,
        "--max-logprobs",
        str(model.max_logprobs),
        f"from 0 to {vocabulary}, the model's vocabulary: the host selects this many tokens in "
        "each step",
    )
    problems.require(
        type(config.quant_config).__name__ != ONLINE,
        "--quantization",
        str(model.quantization),
        "left out, or replaced by a quantized checkpoint: the host does not quantize weights as it "
        "loads them",
    )
