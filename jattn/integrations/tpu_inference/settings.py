"""The fields of vLLM's classes that jattn reads, as protocols: it does not import the classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class MultiModalConfig(Protocol):
    """`vllm.config.MultiModalConfig`."""

    enable_mm_embeds: bool


class ModelConfig(Protocol):
    """`vllm.config.ModelConfig`."""

    dtype: object  # torch's, or JAX's while the host makes a model
    runner_type: str  # "generate", "pooling" or "draft"
    use_mla: bool
    is_attention_free: bool
    is_hybrid: bool  # with layers that keep recurrent states
    is_multimodal_model: bool
    supports_multimodal_inputs: bool  # and --limit-mm-per-prompt allows some
    is_mm_prefix_lm: bool  # whether tokens of an image see each other
    multimodal_config: MultiModalConfig | None
    enable_prompt_embeds: bool
    logprobs_mode: str
    max_logprobs: int
    logits_processors: Sequence[object] | None
    quantization: str | None
    return_sampling_mask: bool
    enable_trace_replay: bool
    model: str  # a folder, or a repository's name
    revision: str | None
    convert_type: str  # "none", "embed" or "classify"
    architectures: Sequence[str] | None
    hf_config: object  # of transformers
    hf_text_config: object  # its part for text, or all of it

    def get_head_size(self) -> int: ...

    def get_total_num_kv_heads(self) -> int: ...

    def get_sliding_window(self) -> int | None: ...

    def get_num_experts(self) -> int: ...

    def get_vocab_size(self) -> int: ...


class ParallelConfig(Protocol):
    """`vllm.config.ParallelConfig`."""

    data_parallel_size: int
    decode_context_parallel_size: int
    prefill_context_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int


class CacheConfig(Protocol):
    """`vllm.config.CacheConfig`."""

    block_size: int
    cache_dtype: str
    kv_cache_dtype_skip_layers: Sequence[str]
    kv_sharing_fast_prefill: bool
    kv_cache_memory_bytes: int | None
    kv_offloading_size: float | None


class SchedulerConfig(Protocol):
    """`vllm.config.SchedulerConfig`."""

    async_scheduling: bool
    max_num_batched_tokens: int


class ShardingConfig(Protocol):
    """tpu-inference's addition to the configuration."""

    model_dp_size: int
    total_dp_size: int
    tp_size: int
    expert_size: int


class LoRAConfig(Protocol):
    """`vllm.config.LoRAConfig`."""

    target_modules: Sequence[str] | None


class SpeculativeConfig(Protocol):
    """`vllm.config.SpeculativeConfig`."""

    method: str
    num_speculative_tokens: int
    draft_model_config: ModelConfig | None  # for methods that draft with a model


class KVTransferConfig(Protocol):
    """`vllm.config.KVTransferConfig`."""

    kv_connector: str | None
    is_kv_producer: bool


class LoadConfig(Protocol):
    """`vllm.config.LoadConfig`."""

    load_format: str


class VllmConfig(Protocol):
    """`vllm.config.VllmConfig`."""

    model_config: ModelConfig
    parallel_config: ParallelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    sharding_config: ShardingConfig
    load_config: LoadConfig
    kv_transfer_config: KVTransferConfig | None
    additional_config: Mapping[str, object]
    speculative_config: SpeculativeConfig | None
    lora_config: LoRAConfig | None
    quant_config: object | None
    watermark_config: object | None
    ec_transfer_config: object | None
    weight_transfer_config: object | None
    use_v2_model_runner: bool


class SamplingParams(Protocol):
    """`vllm.SamplingParams`."""

    temperature: float
    seed: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_token_ids: Sequence[int] | None
    allowed_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str] | None
    min_p: float
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int] | None
    thinking_token_budget: int | None
    structured_outputs: object | None
    extra_args: Mapping[str, Any] | None


class Feature(Protocol):
    """`vllm.multimodal.inputs.MultiModalFeatureSpec`."""

    modality: str


class EngineRequest(Protocol):
    """`vllm.v1.engine.EngineCoreRequest`."""

    mm_features: Sequence[Feature] | None
    resumable: bool


def is_off(setting: str) -> bool:
    """Whether an environment variable's value turns it off."""
    return setting.lower() in ("0", "false", "")
