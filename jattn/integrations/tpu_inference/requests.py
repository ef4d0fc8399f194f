"""Refuse requests that would crash tpu-inference's engine, or that it would serve unlike vLLM.

The checks run where vLLM validates a request, in the server's process: only that request gets an
error (HTTP 400), and the engine keeps running.
"""

from __future__ import annotations

import functools
from typing import Any

from jattn import checks
from jattn.integrations.tpu_inference import images
from jattn.integrations.tpu_inference.settings import EngineRequest, SamplingParams, VllmConfig

PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
GREEDY = 1e-5  # below this temperature vLLM does not sample
# If a request does not set these, a server takes them from the model's generation_config.json.
SET_ELSEWHERE = " (--generation-config vllm, if the request did not set it)"
CONNECTORS = ("TPUConnector", "TPUConnectorHMA")
PULLED = ("uuid", "remote_block_ids", "remote_host", "remote_port")  # to fetch a prompt's blocks


def enable(name: str) -> None:
    """Make vLLM run these checks when it validates a request to an engine whose backend is `name`.

    Args:
      name: of the registered backend.

    Raises:
      ImportError: tpu-inference or vLLM is not installed, or is another version.
    """
    from tpu_inference.layers.common.attention_backend import attention_backend_name
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    validate, process = InputProcessor._validate_params, InputProcessor.process_inputs
    if hasattr(validate, "__wrapped__"):
        return  # done before

    def refuse(config: Any, check_one: Any, given: Any) -> None:
        if attention_backend_name(config) != name:
            return
        try:
            check_one(given, config, name)
        except ValueError as error:  # a server would return a bare 500 for it
            raise VLLMValidationError(str(error)) from None

    @functools.wraps(validate)
    def validate_and_check(processor: Any, params: Any, *more: Any, **options: Any) -> Any:
        found = validate(processor, params, *more, **options)
        if isinstance(params, SamplingParams):
            refuse(processor.vllm_config, check, params)
        return found

    @functools.wraps(process)
    def process_and_check(processor: Any, *given: Any, **options: Any) -> Any:
        found = process(processor, *given, **options)
        refuse(processor.vllm_config, check_inputs, found)
        return found

    InputProcessor._validate_params = validate_and_check
    InputProcessor.process_inputs = process_and_check


def check(params: SamplingParams, config: VllmConfig, name: str) -> None:
    """Raise if a request asks for something that tpu-inference does not do.

    Args:
      params: `vllm.SamplingParams`.
      config: `vllm.config.VllmConfig` of the request's engine.
      name: of the backend.

    Raises:
      ValueError: names every such field and what it must be.
    """
    with checks.checking(f"--attention-backend {name}") as problems:
        _check_logprobs(problems, params, config)
        _check_sampling(problems, params)
        problems.require(
            params.structured_outputs is None or not config.speculative_config,
            "structured_outputs",
            "given (or response_format, or a tool_choice)",
            "left out with --speculative-config: the host puts grammar masks on the wrong tokens",
        )
        _check_transfer(problems, params, config)


def check_inputs(request: EngineRequest, config: VllmConfig, name: str) -> None:
    """Raise if a request has inputs that tpu-inference does not read.

    Args:
      request: `vllm.v1.engine.EngineCoreRequest`, whose prompt vLLM has processed.
      config: `vllm.config.VllmConfig` of the request's engine.
      name: of the backend.

    Raises:
      ValueError: names every such field and what it must be.
    """
    with checks.checking(f"--attention-backend {name}") as problems:
        problems.require(
            not request.resumable,
            "prompt",
            "a stream of inputs",
            "a single input: the host crashes on the second input of a stream",
        )
        kinds = sorted({feature.modality for feature in request.mm_features or ()} - {"image"})
        problems.require(
            not kinds or not images.are_seen_by_jax_model(config),
            "multi_modal_data",
            " and ".join(kinds),
            "of images, or MODEL_IMPL_TYPE=vllm set: the host's JAX model crashes on other "
            "modalities",
        )


def _check_transfer(problems: checks.Problems, params: SamplingParams, config: VllmConfig) -> None:
    """Report a request for another server's blocks that lacks fields the host's connector needs."""
    transfer, given = config.kv_transfer_config, (params.extra_args or {}).get("kv_transfer_params")
    if transfer is None or transfer.is_kv_producer or transfer.kv_connector not in CONNECTORS:
        return
    if not given:
        return
    problems.expect(
        all(key in given for key in PULLED),
        "kv_transfer_params",
        given,
        f"those that the prefill server returned for the prompt, with {', '.join(PULLED)}, or left "
        "out",
    )


def _check_logprobs(problems: checks.Problems, params: SamplingParams, config: VllmConfig) -> None:
    """Report log-probabilities that the host cannot return."""
    for field in ("logprobs", "prompt_logprobs"):
        count = getattr(params, field)
        problems.require(
            count is None or not config.speculative_config,
            field,
            str(count),
            "left out with --speculative-config: the host returns them for other tokens, or none",
        )
    problems.require(
        params.logprobs is None or params.logprobs > 0 or bool(config.speculative_config),
        "logprobs",
        str(params.logprobs),
        "at least 1 (top_logprobs of a chat): the host returns nothing for 0 and -1",
    )
    problems.require(
        params.prompt_logprobs is None or not config.model_config.is_multimodal_model,
        "prompt_logprobs",
        str(params.prompt_logprobs),
        "left out for a multimodal model: the host does not compute them for it",
    )
    problems.expect(
        params.logprob_token_ids is None,
        "logprob_token_ids",
        params.logprob_token_ids,
        "left out: the host returns only the most likely tokens (logprobs)",
    )


def _check_sampling(problems: checks.Problems, params: SamplingParams) -> None:
    """Report sampling fields other than temperature, top_k, top_p and structured outputs."""
    problems.require(
        params.seed is None or params.temperature < GREEDY,
        "seed",
        str(params.seed),
        "left out: the host samples only with the engine's seed (--seed)",
    )
    problems.expect(
        not params.allowed_token_ids,
        "allowed_token_ids",
        params.allowed_token_ids,
        "left out: the host crashes as it makes their mask; to restrict text, use "
        "structured_outputs",
    )
    reason = "the host would ignore it"
    problems.expect(
        not any((params.logit_bias or {}).values()),
        "logit_bias",
        params.logit_bias,
        f"left out: {reason}",
    )
    problems.expect(not params.bad_words, "bad_words", params.bad_words, f"left out: {reason}")
    problems.require(params.min_p == 0, "min_p", str(params.min_p), f"0{SET_ELSEWHERE}: {reason}")
    for field, none in PENALTIES.items():
        value = getattr(params, field)
        problems.require(value == none, field, str(value), f"{none:g}{SET_ELSEWHERE}: {reason}")
    problems.require(
        # Even for a request that passes, vLLM would keep the end-of-text token, which ends nothing
        # there, out of the first min_tokens tokens; the host does not.
        not params.min_tokens or (params.ignore_eos and not params.stop_token_ids),
        "min_tokens",
        str(params.min_tokens),
        "0, or given with ignore_eos and without stop_token_ids: the host would let a stop token "
        "end the output earlier",
    )
    problems.require(
        params.thinking_token_budget is None,
        "thinking_token_budget",
        str(params.thinking_token_budget),
        f"left out: {reason}",
    )
