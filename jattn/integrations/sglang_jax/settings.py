"""The fields of sglang-jax's model runner that jattn reads: it does not import the classes."""

from __future__ import annotations

from typing import Protocol


class ServerArguments(Protocol):
    """`sgl_jax.srt.server_args.ServerArgs`."""

    attention_backend: str | None
    device: str | None
    speculative_algorithm: str | None


class ModelConfig(Protocol):
    """`sgl_jax.srt.configs.model_config.ModelConfig`."""

    context_len: int
    hf_config: object


class ModelRunner(Protocol):
    """`sgl_jax.srt.model_executor.model_runner.ModelRunner`."""

    server_args: ServerArguments
    model_config: ModelConfig
    page_size: int
    use_mla_backend: bool
