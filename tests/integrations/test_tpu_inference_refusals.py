"""vLLM settings that jattn refuses when an engine of tpu-inference starts, with a stand-in.

`test_tpu_inference_jax_models.py` tests those that concern the host's JAX models.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from jattn.integrations import tpu_inference
from tests.support import stand_in_host

host = stand_in_host.host  # the fixture


REFUSED = {
    "decode context": (
        {"decode_context_parallel_size": 2},
        "--decode-context-parallel-size: 2, but must be 1",
    ),
    "prefill context": (
        {"prefill_context_parallel_size": 4},
        "--prefill-context-parallel-size: 4, but must be 1",
    ),
    "data parallelism, a process each": (
        {"data_parallel_size": 2},
        "--data-parallel-size: 2, but must be 1 on a cpu",
    ),
    "data parallelism, one process": (
        {"model_dp_size": 2, "total_dp_size": 2},
        "--data-parallel-size: 2, but must be 1 on a cpu",
    ),
    "data-parallel attention": (
        {"total_dp_size": 4},
        "enable_dp_attention of --additional_config: true, which has 4 devices attend to different "
        "requests, but must be left out, or given with fewer devices, on a cpu",
    ),
    "latents in pages that are padded": (
        {"use_mla": True, "block_size": 48},
        "--block-size: 48, but must be a multiple of 32 (MLA_KV_PACKING_SIZE) for a model with MLA",
    ),
    "layers that skip a prompt": (
        {"kv_sharing_fast_prefill": True},
        "--kv-sharing-fast-prefill: given, but must be left out",
    ),
    "logits": (
        {"logprobs_mode": "raw_logits"},
        "--logprobs-mode: raw_logits, but must be one of raw_logprobs, processed_logprobs",
    ),
    "processed logits": (
        {"logprobs_mode": "processed_logits"},
        "--logprobs-mode: processed_logits, but must be one of raw_logprobs, processed_logprobs",
    ),
    "log-probabilities of all tokens": (
        {"max_logprobs": -1},
        "--max-logprobs: -1, but must be from 0 to 128, the model's vocabulary",
    ),
    "log-probabilities of more tokens than there are": (
        {"max_logprobs": 129},
        "--max-logprobs: 129, but must be from 0 to 128, the model's vocabulary",
    ),
    "another cache dtype": (
        {"cache_dtype": "nvfp4"},
        "--kv-cache-dtype: nvfp4, but must be one of auto",
    ),
    "latents on two devices": (
        {"use_mla": True, "tensor_parallel_size": 2},
        "--tensor-parallel-size: 2, but must be 1 for a model with MLA layers",
    ),
    "more devices than KV heads": (
        {"tensor_parallel_size": 8},
        "--tensor-parallel-size: 8, but must be at most the model's 4 KV heads",
    ),
    "more devices than KV heads, by a strategy": (
        {"tp_size": 4, "expert_size": 2},
        "tensor_parallelism * expert_parallelism of --additional_config: 8, but must be at most",
    ),
    "a vocabulary that devices cannot share": (
        {"tensor_parallel_size": 2, "vocabulary": 97, "architectures": ["LlamaForCausalLM"]},
        "--tensor-parallel-size: 2, but must be a divisor of 97, the model's vocabulary",
    ),
    "latents on two devices, by a strategy": (
        {"use_mla": True, "tp_size": 2},
        "tensor_parallelism * expert_parallelism of --additional_config: 2, but must be 1 for",
    ),
    "layers with another cache": (
        {"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0", "sliding_window"]},
        "--kv-cache-dtype-skip-layers: 0 sliding_window, but must be left out",
    ),
    "adapters": (
        {"lora_config": SimpleNamespace(target_modules=None)},
        "MODEL_IMPL_TYPE: auto, but must be vllm with --enable-lora",
    ),
    "recurrent layers of another kind": (
        {"is_hybrid": True, "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"]},
        "--model: NemotronHForCausalLM, but must be one whose recurrent layers",
    ),
    "only recurrent layers": (
        {"is_attention_free": True, "architectures": ["MambaForCausalLM"]},
        "--model: MambaForCausalLM, but must be one with attention",
    ),
    "keys chosen by an indexer": (
        {"index_topk": 2048, "architectures": ["DeepseekV32ForCausalLM"]},
        "--model: DeepseekV32ForCausalLM with index_topk, but must be one whose queries attend to",
    ),
    "embeddings in place of tokens": (
        {"architectures": ["Gemma3nForConditionalGeneration"]},
        "--model: Gemma3nForConditionalGeneration, but must be another model",
    ),
    "image features that a model keeps": (
        {
            "is_multimodal_model": True,
            "supports_multimodal_inputs": True,
            "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
        },
        "--limit-mm-per-prompt: not 0 for every modality, but must be 0 for each: Ernie4_5_VL",
    ),
    "windows after a prefix": (
        {"rswa_window": 128},
        "--model: Qwen3ForCausalLM with rswa_window=128, but must be one without",
    ),
    "images whose tokens see each other": (
        {"is_multimodal_model": True, "is_mm_prefix_lm": True},
        "--limit-mm-per-prompt: not 0 for every modality, but must be 0 for each: tokens of",
    ),
    "speculative decoding with recurrent layers": (
        {
            "is_hybrid": True,
            "model_type": "qwen3_next",
            "speculative_config": SimpleNamespace(method="ngram"),
        },
        "--speculative-config: given, but must be left out for a model with recurrent states",
    ),
    "a JAX model with TPU kernels": (
        {"architectures": ["Llama4ForCausalLM"]},
        "MODEL_IMPL_TYPE: auto, but must be vllm",
    ),
    "a text model without a text_config": (
        {"architectures": ["Gemma4ForCausalLM"]},
        "MODEL_IMPL_TYPE: auto, but must be vllm: the host's JAX model of Gemma4ForCausalLM reads",
    ),
    "heads that the host pads": (
        {"head_size": 96},
        "MODEL_IMPL_TYPE: auto, but must be vllm: the host's JAX model of Qwen3ForCausalLM loads "
        "weights for head sizes of 64 and multiples of 128 only, not 96",
    ),
    "an untied output head": (
        {"architectures": ["Qwen2ForCausalLM"]},
        "MODEL_IMPL_TYPE: auto, but must be vllm: the host's JAX model of Qwen2ForCausalLM reads",
    ),
    "prompt embeddings": (
        {"enable_prompt_embeds": True},
        "--enable-prompt-embeds: given, but must be left out",
    ),
    "logits processors": (
        {"logits_processors": ["package:Class"]},
        "--logits-processors: package:Class, but must be left out",
    ),
    "weights quantized as they are loaded": (
        {"quantization": "fp8", "quant_config": type("OnlineQuantizationConfig", (), {})()},
        "--quantization: fp8, but must be left out",
    ),
    "several tokens a step": (
        {"additional_config": {"enable_continue_decode": True}},
        "enable_continue_decode of --additional_config: true, but must be left out, or given with "
        "--no-async-scheduling",
    ),
    "several tokens a step, for layers of two kinds": (
        {
            "additional_config": {"enable_continue_decode": True},
            "async_scheduling": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "enable_continue_decode of --additional_config: true, for layers of full_attention and "
        "sliding_attention, but must be left out",
    ),
    "requests that are sent again": (
        {"use_v2_model_runner": True},
        "VLLM_USE_V2_MODEL_RUNNER: 0, but must be 0: vLLM's scheduler would resend a",
    ),
    "images with speculative decoding": (
        {
            "is_multimodal_model": True,
            "supports_multimodal_inputs": True,
            "speculative_config": SimpleNamespace(method="ngram"),
        },
        "--speculative-config: given, but must be left out for a multimodal model, or given",
    ),
    "dual chunk attention": (
        {"dual_chunk_attention_config": {"chunk_size": 262144}},
        "--model: Qwen3ForCausalLM with dual_chunk_attention_config, but must be one without it "
        """(--hf-overrides '{"dual_chunk_attention_config": null}')""",
    ),
    "memory for the KV cache": (
        {"kv_cache_memory_bytes": 2**30},
        "--kv-cache-memory-bytes: 1073741824, but must be left out",
    ),
    "offloaded blocks": (
        {"kv_offloading_size": 4.0},
        "--kv-offloading-size: 4.0, but must be left out: the host does not offload blocks",
    ),
    "watermarks": (
        {"watermark_config": "gumbel", "use_v2_model_runner": True},
        "--watermark-config: gumbel, but must be left out: the host adds no watermark",
    ),
    "sampling masks": (
        {"return_sampling_mask": True},
        "--return-sampling-mask: True, but must be left out",
    ),
    "image embeddings from elsewhere": (
        {"ec_transfer_config": "a connector"},
        "--ec-transfer-config: a connector, but must be left out",
    ),
    "transferred weights": (
        {"weight_transfer_config": "nccl"},
        "--weight-transfer-config: nccl, but must be left out: the host changes no weights",
    ),
    "pipeline stages that are scheduled ahead": (
        {"pipeline_parallel_size": 2},
        "--async-scheduling: on, but must be off (--no-async-scheduling) with --pipeline-parallel",
    ),
    "embeddings that are scheduled ahead": (
        {"runner_type": "pooling"},
        "--async-scheduling: on, but must be off (--no-async-scheduling) with --runner pooling",
    ),
    "speculative decoding in pipeline stages": (
        {
            "pipeline_parallel_size": 2,
            "async_scheduling": False,
            "speculative_config": SimpleNamespace(method="ngram"),
        },
        "--pipeline-parallel-size: 2, but must be 1 with --speculative-config",
    ),
    "images in pipeline stages": (
        {
            "pipeline_parallel_size": 2,
            "async_scheduling": False,
            "is_multimodal_model": True,
            "supports_multimodal_inputs": True,
        },
        "--pipeline-parallel-size: 2, but must be 1 for a multimodal model, or given with",
    ),
    "per-layer embeddings in pipeline stages": (
        {
            "pipeline_parallel_size": 2,
            "async_scheduling": False,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
        },
        "--pipeline-parallel-size: 2, but must be 1 for a model with hidden_size_per_layer_input:",
    ),
    "pixels in float32": (
        {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "is_multimodal_model": True,
            "supports_multimodal_inputs": True,
            "dtype": "torch.float32",
        },
        "Gemma4ForConditionalGeneration reads pixels as bfloat16, but --dtype is torch.float32",
    ),
    "a JAX model in pipeline stages": (
        {
            "pipeline_parallel_size": 2,
            "async_scheduling": False,
            "architectures": ["Gemma4ForCausalLM"],
            "text_config": {},
        },
        "MODEL_IMPL_TYPE: auto, but must be vllm: the host's JAX model of Gemma4ForCausalLM "
        "crashes",
    ),
    "image embeddings": (
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "is_multimodal_model": True,
            "supports_multimodal_inputs": True,
            "multimodal_config": SimpleNamespace(enable_mm_embeds=True),
        },
        "--enable-mm-embeds: given, but must be left out, or MODEL_IMPL_TYPE=vllm set",
    ),
    "trace replay": (
        {"enable_trace_replay": True},
        "--enable-trace-replay: True, but must be left out",
    ),
}


SERVED = {
    "speculative decoding for a multimodal model without images": {
        "is_multimodal_model": True,
        "speculative_config": SimpleNamespace(method="ngram"),
    },
    "several tokens a step": {
        "additional_config": {"enable_continue_decode": True},
        "async_scheduling": False,
    },
    "pipeline stages of a multimodal model without images": {
        "pipeline_parallel_size": 2,
        "async_scheduling": False,
        "is_multimodal_model": True,
    },
    "a model that keeps image features, without images": {
        "is_multimodal_model": True,
        "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
    },
    "embeddings": {"runner_type": "pooling", "async_scheduling": False},
    "images": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "is_multimodal_model": True,
        "supports_multimodal_inputs": True,
        "multimodal_config": SimpleNamespace(enable_mm_embeds=False),
    },
    "pixels in bfloat16": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "is_multimodal_model": True,
        "supports_multimodal_inputs": True,
    },
    "a multimodal model in float32, without images": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "is_multimodal_model": True,
        "dtype": "torch.float32",
    },
    "a vocabulary that devices share": {"tensor_parallel_size": 2, "vocabulary": 98},
    "pooling with a vocabulary that devices cannot share": {
        "tensor_parallel_size": 2,
        "vocabulary": 97,
        "runner_type": "pooling",
        "async_scheduling": False,
    },
    "latents in pages that are not padded": {"use_mla": True, "block_size": 64},
    "such pages without latents": {"block_size": 48},
    "processed log-probabilities": {"logprobs_mode": "processed_logprobs", "max_logprobs": 128},
    "one token a step": {"additional_config": {"enable_continue_decode": False}},
    "heads of 64": {"head_size": 64},
    "heads of 256": {"head_size": 256},
    "heads of a model that pads its weights": {
        "head_size": 96,
        "architectures": ["LlamaForCausalLM"],
    },
    "a tied output head": {
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
    },
    "a quantized checkpoint": {
        "quantization": "fp8",
        "quant_config": type("VllmFp8Config", (), {})(),
    },
    "a text model with a text_config": {
        "architectures": ["Gemma4ForCausalLM"],
        "text_config": {},
    },
}


@pytest.mark.parametrize("name", SERVED)
def test_settings_close_to_refused_ones_are_served(host, name):
    tpu_inference.register()
    host.start(**SERVED[name])


ADAPTERS = SimpleNamespace(target_modules=None)
TORCH = {
    "Gemma 4, text only": {"architectures": ["Gemma4ForCausalLM"]},
    "any head size": {"head_size": 96},
    "adapters": {"lora_config": ADAPTERS},
    "Gemma 4 in pipeline stages": {
        "pipeline_parallel_size": 2,
        "async_scheduling": False,
        "architectures": ["Gemma4ForCausalLM"],
    },
    "image embeddings": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "multimodal_config": SimpleNamespace(enable_mm_embeds=True),
    },
    "adapters with experts": {
        "lora_config": SimpleNamespace(target_modules=["q_proj"]),
        "experts": 8,
    },
}


@pytest.mark.parametrize("name", TORCH)
def test_some_models_are_served_as_torch_models(host, name):
    tpu_inference.register()
    host.impl = "vllm"
    host.start(**TORCH[name])


@pytest.mark.parametrize("targets", [None, ["q_proj", "experts"]])
def test_adapters_of_experts_are_refused(host, targets):
    tpu_inference.register()
    adapters = SimpleNamespace(target_modules=targets)
    host.impl = "vllm"
    said = "left out" if targets is None else "q_proj experts"
    with pytest.raises(ValueError, match=f"--lora-target-modules: {said}, but must be names of"):
        host.start(lora_config=adapters, experts=8)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_at_the_start(host, name):
    changes, message = REFUSED[name]
    tpu_inference.register()
    with pytest.raises(ValueError, match="--attention-backend jattn") as error:
        host.start(**changes)
    assert message in str(error.value)
    assert "1 wrong argument(s)" in str(error.value)
    host.start()


def test_torch_models_may_have_adapters_and_fewer_kv_heads_than_devices(host):
    """The host also falls back to vLLM's torch model if it has no JAX model."""
    tpu_inference.register()
    changes = {"lora_config": ADAPTERS, "tensor_parallel_size": 8}
    for host.impl, host.has_jax_model in (("vllm", True), ("flax_nnx", False)):
        host.start(**changes)
    with pytest.raises(ValueError, match="--enable-lora: given, for a vocabulary of 96 tokens"):
        host.start(**changes, vocabulary=96)
    host.has_jax_model = True
    with pytest.raises(ValueError, match=r"2 wrong argument\(s\)"):
        host.start(**changes)


@pytest.mark.parametrize("given", [None, "1"])
def test_vllm_schedules_for_the_runner_that_the_host_has(host, monkeypatch, given):
    """A user's own setting stays; the start then refuses it."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", given)
    tpu_inference.register()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == (given or "0")


def test_a_step_is_padded_to_no_more_tokens_than_adapters_have(host):
    tpu_inference.register()
    host.impl = "vllm"
    host.start(max_num_batched_tokens=40)
    host.start(max_num_batched_tokens=48, lora_config=ADAPTERS)
    with pytest.raises(
        ValueError, match="--max-num-batched-tokens: 40, but must be a multiple of 16"
    ):
        host.start(max_num_batched_tokens=40, lora_config=ADAPTERS)


def test_a_variable_does_not_name_experts_for_adapters(host, monkeypatch):
    tpu_inference.register()
    host.impl = "vllm"
    monkeypatch.setenv("LORA_MODULE_PATH", "mlp/(gate|experts)")
    adapted = {"lora_config": SimpleNamespace(target_modules=["q_proj"])}
    host.start(**adapted)
    with pytest.raises(ValueError, match=r"LORA_MODULE_PATH: mlp/\(gate\|experts\), but must be"):
        host.start(**adapted, experts=8)
    monkeypatch.setenv("LORA_MODULE_PATH", "")
    host.start(**adapted, experts=8)
    with pytest.raises(ValueError, match="--lora-target-modules: left out, but must be names of"):
        host.start(lora_config=ADAPTERS, experts=8)


def test_each_of_several_tokens_a_step_is_checked_for_eos(host, monkeypatch):
    tpu_inference.register()
    several = SERVED["several tokens a step"]
    monkeypatch.setenv("CONTINUE_DECODE_EOS_CHECK_INTERVAL", "4")
    host.start()
    with pytest.raises(ValueError, match="CONTINUE_DECODE_EOS_CHECK_INTERVAL: 4, but must be 1"):
        host.start(**several)
    monkeypatch.setenv("CONTINUE_DECODE_EOS_CHECK_INTERVAL", "1")
    host.start(**several)


@pytest.mark.parametrize("setting", ["ENABLE_QUANTIZED_MATMUL_KERNEL", "TPU_ENABLE_D2H_TRANSFER"])
def test_kernels_that_settings_ask_for_are_refused_without_a_tpu(host, setting, monkeypatch):
    tpu_inference.register()
    monkeypatch.setenv(setting, "1")
    with pytest.raises(ValueError, match=f"{setting}: 1, but must be 0"):
        host.start()


def test_pages_of_latents_with_their_tokens_last_are_refused(host, monkeypatch):
    tpu_inference.register()
    monkeypatch.setenv("MLA_TRANSPOSE_KV_CACHE", "1")
    host.start()
    with pytest.raises(ValueError, match="MLA_TRANSPOSE_KV_CACHE: 1, but must be 0"):
        host.start(use_mla=True)


def test_a_frontend_that_skips_the_checks_of_requests_is_refused(host, monkeypatch):
    tpu_inference.register()
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ValueError, match="VLLM_USE_RUST_FRONTEND: 1, but must be 0: requests"):
        host.start()
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "0")
    host.start()


def drafting(method, architecture="Draft", count=3, head_size=128, hidden_size=256, heads=2):
    """Return a vLLM `SpeculativeConfig`."""
    config = SimpleNamespace(hidden_size=hidden_size, num_attention_heads=heads)
    draft = SimpleNamespace(
        architectures=[architecture], hf_config=config, get_head_size=lambda: head_size
    )
    return SimpleNamespace(method=method, num_speculative_tokens=count, draft_model_config=draft)


LLAMA, TIED = {"architectures": ["LlamaForCausalLM"]}, {"tie_word_embeddings": True}
DRAFTS_SERVED = {  # the implementation, the draft model, and changes to the target model
    "EAGLE3 for a JAX model": ("flax_nnx", drafting("eagle3"), LLAMA),
    "EAGLE3 for a torch model": ("vllm", drafting("eagle3", head_size=96), {}),
    "heads that need equal padding": (
        "flax_nnx",
        drafting("eagle3", head_size=96, hidden_size=192),
        {**LLAMA, "head_size": 224},
    ),
    "heads of 64, and of 128": (
        "flax_nnx",
        drafting("eagle3", head_size=64, hidden_size=128),
        LLAMA,
    ),
    "DFLASH": ("flax_nnx", drafting("dflash"), TIED),
    "DFLASH of a Llama": ("flax_nnx", drafting("dflash"), LLAMA),
    "MTP of a JAX model": ("flax_nnx", drafting("mtp", "Gemma4MTPModel"), {}),
    "MTP of a torch model": ("vllm", drafting("mtp", "Glm4MoeMTPModel"), {}),
    "MTP of one token": ("vllm", drafting("mtp", "MiMoMTPModel", count=1), {}),
}


@pytest.mark.parametrize("name", DRAFTS_SERVED)
def test_draft_models_are_served_without_scheduling_ahead(host, name):
    host.impl, draft, changes = DRAFTS_SERVED[name]
    tpu_inference.register()
    host.start(speculative_config=draft, async_scheduling=False, **changes)
    with pytest.raises(ValueError, match="--async-scheduling: on, but must be off") as error:
        host.start(speculative_config=draft, async_scheduling=True, **changes)
    assert "1 wrong argument(s)" in str(error.value)


DRAFTS_REFUSED = {
    "EAGLE": ("vllm", drafting("eagle"), {}, "--speculative-config: method eagle, but must be"),
    "EAGLE3 for another JAX model": (
        "flax_nnx",
        drafting("eagle3"),
        {},
        "MODEL_IMPL_TYPE: auto, but must be vllm, and DRAFT_MODEL_IMPL_TYPE too: of the host's JAX",
    ),
    "DFLASH for a torch model": (
        "vllm",
        drafting("dflash"),
        TIED,
        "MODEL_IMPL_TYPE: auto, but must be flax_nnx, and DRAFT_MODEL_IMPL_TYPE too, with method",
    ),
    "DFLASH for another JAX model": (
        "flax_nnx",
        drafting("dflash"),
        {"architectures": ["Gemma4ForCausalLM"], "text_config": {}},
        "--speculative-config: method dflash, but must be left out: of the host's JAX models, only",
    ),
    "DFLASH for an untied output head": (
        "flax_nnx",
        drafting("dflash"),
        {},
        "must be left out for a Qwen3ForCausalLM without tie_word_embeddings",
    ),
    "heads that need less padding than the target model's": (
        "flax_nnx",
        drafting("eagle3", head_size=64, hidden_size=128),
        {**LLAMA, "head_size": 96},
        "model of --speculative-config: one with head size 64 (hidden_size / heads: 64), but must",
    ),
    "a cache for smaller heads": (
        "flax_nnx",
        drafting("dflash", hidden_size=128),
        TIED,
        "model of --speculative-config: one with head size 128 (hidden_size / heads: 64), but must",
    ),
    "MTP that returns two arrays": (
        "vllm",
        drafting("mtp", "DeepSeekMTPModel"),
        {},
        "--speculative-config: mtp with DeepSeekMTPModel, but must be left out",
    ),
    "two tokens of a one-token MTP": (
        "vllm",
        drafting("mtp", "MiMoMTPModel", count=2),
        {},
        "num_speculative_tokens of --speculative-config: 2, but must be 1: MiMoMTPModel drafts",
    ),
}


@pytest.mark.parametrize("name", DRAFTS_REFUSED)
def test_draft_models_that_the_host_cannot_run_are_refused_at_the_start(host, name):
    host.impl, draft, changes, message = DRAFTS_REFUSED[name]
    tpu_inference.register()
    with pytest.raises(ValueError, match=r"1 wrong argument\(s\)") as error:
        host.start(speculative_config=draft, async_scheduling=False, **changes)
    assert message in str(error.value)
