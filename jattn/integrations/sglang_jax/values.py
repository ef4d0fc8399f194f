"""Values of a request that crash sglang-jax's scheduler, or that it misreads.

The host parses requests in the server's process and runs them in the scheduler's. There a value of
the wrong type, or one that does not fit the host's arrays, crashes the scheduler for all requests.
"""

from __future__ import annotations

import math

import numpy as np

from jattn import checks
from jattn.integrations.sglang_jax import settings

FLOAT, INTEGER = float(np.finfo(np.float32).max), int(np.iinfo(np.int32).max)


def check(
    request: settings.Request, given: settings.Given, manager: settings.TokenizerManager
) -> None:
    """Raise if a request has a value that the host cannot handle.

    Args:
      request: `sgl_jax.srt.managers.io_struct.TokenizedGenerateReqInput`.
      given: the `GenerateReqInput` it was made from.
      manager: the `TokenizerManager` that made it.

    Raises:
      ValueError: lists every such field, and what it must be.
    """
    with checks.checking("jattn.integrations.sglang_jax") as problems:
        _check_types(problems, request)
    with checks.checking("jattn.integrations.sglang_jax") as problems:
        _check_prompt(problems, request, manager.model_config.vocab_size)
        _check_sizes(problems, request.sampling_params, request)
        _check_settings(problems, request, given, manager.server_args)


def _check_types(problems: checks.Problems, request: settings.Request) -> None:
    """Report lists and wrong types in fields where one request has one value."""
    params = request.sampling_params
    integers = {
        "logprob_start_len": request.logprob_start_len,
        "top_logprobs_num (logprobs, top_logprobs)": request.top_logprobs_num,
        "dp_rank": request.dp_rank,
        "stream_interval": params.stream_interval,
        "top_k": params.top_k,
        "min_new_tokens (min_tokens)": params.min_new_tokens,
    }
    for name, value in integers.items():
        is_whole = value is None or (isinstance(value, int) and not isinstance(value, bool))
        problems.require(is_whole, name, repr(value), "a whole number")
    rid, key = request.rid, request.extra_key
    problems.require(rid is None or isinstance(rid, str), "rid", repr(rid), "a string")
    problems.require(key is None or isinstance(key, str), "extra_key", repr(key), "a string")


def _check_prompt(problems: checks.Problems, request: settings.Request, vocabulary: int) -> None:
    """Report an empty prompt, or tokens outside the vocabulary."""
    tokens = request.input_ids
    if tokens is None or request.mm_inputs is not None:
        return
    problems.require(
        len(tokens) > 0,
        "input_ids (text, prompt)",
        "no tokens",
        "one token at least: the host would continue the prompt of another request",
    )
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    problems.require(
        wrong is None,
        "input_ids (prompt)",
        f"with {wrong}",
        f"tokens from 0 to {vocabulary - 1}: the host would read others in their place",
    )


def _check_sizes(
    problems: checks.Problems, params: settings.SamplingParams, request: settings.Request
) -> None:
    """Report numbers that do not fit the host's arrays."""
    temperature = params.temperature
    problems.require(
        -math.inf < temperature <= FLOAT,
        "temperature",
        str(temperature)[:40],
        f"at most {FLOAT:.3g}: the host stores it in float32",
    )
    for name, value in (
        ("top_k", params.top_k),
        ("min_new_tokens (min_tokens)", params.min_new_tokens),
    ):
        problems.require(
            value <= INTEGER,
            name,
            str(value)[:40],
            f"at most {INTEGER}: the host stores it in 32 bits, and crashes on more",
        )
    problems.require(
        (params.stream_interval or 0) >= 0,
        "stream_interval",
        str(params.stream_interval),
        "at least 1: the host would stream no part of the output",
    )
    start = request.logprob_start_len
    problems.require(
        start is None or start >= -1,
        "logprob_start_len",
        str(start),
        "at least 0, or -1 for none of the prompt: the host crashes on less",
    )


def _check_settings(
    problems: checks.Problems,
    request: settings.Request,
    given: settings.Given,
    arguments: settings.ServerArguments,
) -> None:
    """Report fields that crash an engine with these settings."""
    params = request.sampling_params
    problems.require(
        not request.return_routed_experts or arguments.enable_return_routed_experts,
        "return_routed_experts",
        "given",
        "left out, or --enable-return-routed-experts given: the host crashes without it",
    )
    if arguments.skip_tokenizer_init:
        wanted = "with --skip-tokenizer-init: the host crashes without a tokenizer"
        problems.require(not params.stop_strs, "stop", str(params.stop_strs), f"left out {wanted}")
        problems.require(
            params.min_new_tokens == 0,
            "min_new_tokens (min_tokens)",
            str(params.min_new_tokens),
            f"0 {wanted}",
        )
    problems.require(
        request.bootstrap_room is None or arguments.disaggregation_mode != "null",
        "bootstrap_room",
        str(request.bootstrap_room),
        "left out with --disaggregation-mode null: the host crashes if a prompt has several chunks",
    )
    problems.require(
        not given.lora_id or bool(given.lora_path),
        "lora_id",
        str(given.lora_id),
        "left out, and lora_path given instead: the host knows only ids that it assigned",
    )
