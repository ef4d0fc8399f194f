"""The fields of sglang-jax's objects that jattn reads: it does not import the classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from jax.typing import DTypeLike


class ServerArguments(Protocol):
    """`sgl_jax.srt.server_args.ServerArgs`."""

    attention_backend: str | None
    chunked_prefill_size: int | None
    max_total_tokens: int | None
    device: str | None
    disable_overlap_schedule: bool
    disaggregation_mode: str
    dp_size: int
    enable_deterministic_sampling: bool
    enable_lora: bool
    enable_mixed_chunk: bool
    enable_return_routed_experts: bool
    gdn_prefill_impl: str
    is_embedding: bool
    kv_cache_dtype: str
    lora_paths: Sequence[object] | None
    max_loras_per_batch: int
    max_prefill_tokens: int
    moe_backend: str
    multimodal: bool
    quantization_config_path: str | None
    skip_tokenizer_init: bool
    speculative_algorithm: str | None
    speculative_eagle_topk: int
    speculative_num_draft_tokens: int
    speculative_num_steps: int


class ModelConfig(Protocol):
    """`sgl_jax.srt.configs.model_config.ModelConfig`."""

    context_len: int
    dtype: DTypeLike
    hf_config: object
    hf_eos_token_id: Iterable[int] | None
    hf_text_config: object
    moe_backend: str
    quantization_config: object
    vocab_size: int


class ReqToTokenPool(Protocol):
    """`sgl_jax.srt.mem_cache.memory_pool.ReqToTokenPool`."""

    max_context_len: int


class ModelRunner(Protocol):
    """`sgl_jax.srt.model_executor.model_runner.ModelRunner`."""

    server_args: ServerArguments
    model_config: ModelConfig
    page_size: int
    req_to_token_pool: ReqToTokenPool | None
    use_mla_backend: bool
    linear_recurrent_config: object
    qwen3_5_hybrid_config: object


class TokenizerManager(Protocol):
    """`sgl_jax.srt.managers.tokenizer_manager.TokenizerManager`."""

    model_config: ModelConfig
    server_args: ServerArguments


class SamplingParams(Protocol):
    """`sgl_jax.srt.sampling.sampling_params.SamplingParams`."""

    ebnf: str | None
    frequency_penalty: float
    ignore_eos: bool
    json_schema: str | None
    logit_bias: Mapping[str, float] | None
    min_new_tokens: int
    min_p: float
    n: int
    presence_penalty: float
    regex: str | None
    repetition_penalty: float
    sampling_seed: int | None
    stop_strs: list[str]
    stop_token_ids: set[int] | None
    stream_interval: int | None
    structural_tag: object
    temperature: float
    top_k: int


class Given(Protocol):
    """`sgl_jax.srt.managers.io_struct.GenerateReqInput`, which a request is made from."""

    lora_id: str | None
    lora_path: str | None


class Request(Protocol):
    """`sgl_jax.srt.managers.io_struct.TokenizedGenerateReqInput`."""

    bootstrap_room: int | None
    dp_rank: int | None
    extra_key: str | None
    input_ids: Sequence[int] | None
    logprob_start_len: int | None
    mm_inputs: object
    return_logprob: bool
    return_output_logprob_only: bool
    return_routed_experts: bool
    rid: str | None
    token_ids_logprob: Sequence[int] | None
    top_logprobs_num: int | None
    sampling_params: SamplingParams
