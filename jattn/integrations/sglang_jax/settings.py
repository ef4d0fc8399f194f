"""The fields of sglang-jax's model runner that jattn reads: it does not import the classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from jax.typing import DTypeLike


class ServerArguments(Protocol):
    """`sgl_jax.srt.server_args.ServerArgs`."""

    attention_backend: str | None
    device: str | None
    disable_overlap_schedule: bool
    dp_size: int
    enable_deterministic_sampling: bool
    enable_lora: bool
    gdn_prefill_impl: str
    is_embedding: bool
    kv_cache_dtype: str
    moe_backend: str
    multimodal: bool
    quantization_config_path: str | None
    speculative_algorithm: str | None
    speculative_eagle_topk: int
    speculative_num_draft_tokens: int
    speculative_num_steps: int


class ModelConfig(Protocol):
    """`sgl_jax.srt.configs.model_config.ModelConfig`."""

    context_len: int
    dtype: DTypeLike
    hf_config: object
    hf_text_config: object
    moe_backend: str
    quantization_config: object


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


class SamplingParams(Protocol):
    """`sgl_jax.srt.sampling.sampling_params.SamplingParams`."""

    ebnf: str | None
    frequency_penalty: float
    json_schema: str | None
    logit_bias: Mapping[str, float] | None
    min_new_tokens: int
    min_p: float
    n: int
    presence_penalty: float
    regex: str | None
    repetition_penalty: float
    sampling_seed: int | None
    structural_tag: object
    temperature: float
    top_k: int


class Request(Protocol):
    """`sgl_jax.srt.managers.io_struct.TokenizedGenerateReqInput`."""

    return_logprob: bool
    return_output_logprob_only: bool
    token_ids_logprob: Sequence[int] | None
    top_logprobs_num: int | None
    sampling_params: SamplingParams
