"""Requests that would crash sglang-jax's scheduler, or of which it would ignore a field.

jattn refuses them in the server's process, where the host makes its internal request from one. The
client gets an error (HTTP 400), and the engine keeps running. `values` checks single values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from jattn import checks
from jattn.integrations.sglang_jax import settings, values

# Methods of the host's `TokenizerManager` that send its scheduler messages which crash it.
UNSERVED = (
    "open_session",
    "close_session",
    "release_memory_occupation",
    "resume_memory_occupation",
)
GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")


def enable() -> None:
    """Check requests when the host's `TokenizerManager` makes them, and those of OpenAI clients.

    Also pass on the `seed` of OpenAI clients, which the host drops, as its `sampling_seed`, and
    give each request of a batch its `extra_key`.

    Raises:
      ImportError: sglang-jax is not installed.
    """
    from sgl_jax.srt.entrypoints.openai.serving_base import OpenAIServingBase
    from sgl_jax.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sgl_jax.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
    from sgl_jax.srt.managers.io_struct import GenerateReqInput
    from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

    make = TokenizerManager._create_tokenized_object

    @functools.wraps(make)
    def make_and_check(manager: Any, *given: Any, **options: Any) -> Any:
        made = make(manager, *given, **options)
        values.check(made, given[0], manager)
        vocabulary, adapter = manager.model_config.vocab_size, given[0].lora_path
        check(made, manager.server_args, vocabulary, adapter)
        mend(made.sampling_params, manager.model_config.hf_eos_token_id)
        return made

    send = TokenizerManager._send_one_request

    @functools.wraps(send)
    def check_and_send(manager: Any, given: Any, made: Any, *more: Any, **options: Any) -> Any:
        with checks.checking("jattn.integrations.sglang_jax") as problems:
            problems.require(
                made.rid not in manager.rid_to_state,
                "rid",
                str(made.rid),
                "unused: the host would mix this request up with the running one",
            )
        return send(manager, given, made, *more, **options)

    pick = GenerateReqInput.__getitem__

    @functools.wraps(pick)
    def pick_with_key(batch: Any, index: int) -> Any:
        one, key = pick(batch, index), batch.extra_key
        with checks.checking("jattn.integrations.sglang_jax") as problems:
            fits = not isinstance(key, list) or index < len(key)
            problems.require(fits, "extra_key", str(key), "a string, or one string per prompt")
        one.extra_key = key[index] if isinstance(key, list) else key  # the host drops it
        return one

    validate = OpenAIServingBase._validate_request

    @functools.wraps(validate)
    def validate_and_check(serving: Any, request: Any) -> str | None:
        if getattr(request, "return_hidden_states", False):
            return "return_hidden_states: true, but must be left out: the host returns none"
        if getattr(request, "suffix", None):
            return "suffix: given, but must be left out: the host ignores it"
        if getattr(request, "session_params", None):
            return "session_params: given, but must be left out: the host ignores it"
        best_of = getattr(request, "best_of", None)
        if best_of is not None and best_of != request.n:
            wanted = f"n ({request.n}), or left out: the host ignores it"
            return f"best_of: {best_of}, but must be {wanted}"
        if hasattr(request, "messages") and getattr(request, "lora_path", None):
            return "lora_path: given, but must be left out of a chat: the host ignores it there"
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(request, name, None) == 0:
                return f"{name}: 0, but must be at least 1: the host reads it as no limit"
        found: str | None = validate(serving, request)
        return found

    TokenizerManager._create_tokenized_object = make_and_check
    TokenizerManager._send_one_request = check_and_send
    GenerateReqInput.__getitem__ = pick_with_key
    for name in UNSERVED:
        setattr(TokenizerManager, name, _refused(name))
    OpenAIServingBase._validate_request = validate_and_check
    for serving in (OpenAIServingChat, OpenAIServingCompletion):
        serving._build_sampling_params = _with_seed(serving._build_sampling_params)


def _refused(name: str) -> Any:
    """Make a method that refuses all calls."""

    async def refuse(*given: object, **options: object) -> None:
        del given, options
        raise ValueError(
            f"/{name}: called, but must not be: the host's scheduler lacks it, and crashes"
        )

    return refuse


def mend(params: settings.SamplingParams, ends: Iterable[int] | None) -> None:
    """Set the sampling parameters that the host's scheduler does not apply as documented.

    Args:
      params: the parameters of a request.
      ends: the model's end tokens.
    """
    if params.top_k == 1:
        params.temperature = 1.0  # next to sampled requests it would change log-probabilities
    if params.min_new_tokens > 0 and not params.ignore_eos:
        # Up to min_new_tokens the host suppresses only the tokenizer's end tokens and these.
        params.stop_token_ids = {*(params.stop_token_ids or ()), *(ends or ())}


def _with_seed(build: Any) -> Any:
    """Wrap the host's function that makes sampling parameters from an OpenAI request."""

    @functools.wraps(build)
    def build_with_seed(serving: Any, request: Any, *more: Any, **options: Any) -> Any:
        params = build(serving, request, *more, **options)
        return params if request.seed is None else {**params, "sampling_seed": request.seed}

    return build_with_seed


def check(
    request: settings.Request,
    arguments: settings.ServerArguments,
    vocabulary: int,
    adapter: str | None,
) -> None:
    """Raise if a request asks for something that sglang-jax does not do.

    Args:
      request: `sgl_jax.srt.managers.io_struct.TokenizedGenerateReqInput`.
      arguments: the engine's settings.
      vocabulary: number of tokens in the model's vocabulary.
      adapter: the request's `lora_path`.

    Raises:
      ValueError: lists every such field, and what it must be.
    """
    params, algorithm = request.sampling_params, arguments.speculative_algorithm
    with checks.checking("jattn.integrations.sglang_jax") as problems:
        problems.require(
            not (algorithm and (request.return_logprob or request.return_output_logprob_only)),
            "return_logprob (logprobs)",
            "given",
            f"left out with --speculative-algorithm {algorithm}: the host computes none",
        )
        problems.expect(
            not any((params.logit_bias or {}).values()),
            "logit_bias",
            params.logit_bias,
            "left out: the host ignores it",
        )
        problems.require(
            params.repetition_penalty == 1,
            "repetition_penalty",
            str(params.repetition_penalty),
            "1: the host ignores it (frequency_penalty and presence_penalty work, with "
            "--disable-overlap-schedule)",
        )
        problems.require(
            params.min_p == 0 or params.top_k == 1,
            "min_p",
            str(params.min_p),
            "0: the host samples tokens that min_p excludes",
        )
        problems.require(
            params.sampling_seed is None
            or params.top_k == 1
            or arguments.enable_deterministic_sampling,
            "sampling_seed (seed)",
            str(params.sampling_seed),
            "left out, or --enable-deterministic-sampling given: the host ignores seeds without it",
        )
        problems.require(
            not adapter or arguments.enable_lora,
            "lora_path",
            str(adapter),
            "left out, or --enable-lora given: the host would ignore the adapter",
        )
        seed = params.sampling_seed
        problems.require(
            seed is None or -(2**31) <= seed < 2**31,
            "sampling_seed (seed)",
            str(seed),
            "from -2147483648 to 2147483647: the host stores it in 32 bits, and crashes on others",
        )
        problems.require(
            params.n == 1 or params.top_k == 1 or not arguments.enable_deterministic_sampling,
            "n",
            str(params.n),
            "1 with --enable-deterministic-sampling: the host samples the same output n times",
        )
        _check_logprobs(problems, request, vocabulary)
        _check_grammar(problems, params, arguments)
        if algorithm:
            _check_drafted(problems, params, algorithm)
        elif not arguments.disable_overlap_schedule:
            _check_penalties(problems, params)


def _check_logprobs(problems: checks.Problems, request: settings.Request, vocabulary: int) -> None:
    """Report log-probabilities of tokens that are not in the vocabulary."""
    count, tokens = request.top_logprobs_num or 0, request.token_ids_logprob or ()
    problems.require(
        0 <= count <= vocabulary,
        "top_logprobs_num (logprobs, top_logprobs)",
        str(count),
        f"from 0 to {vocabulary}, the model's vocabulary",
    )
    problems.require(
        all(0 <= token < vocabulary for token in tokens),
        "token_ids_logprob",
        str(list(tokens)),
        f"tokens from 0 to {vocabulary - 1}",
    )


def _check_penalties(problems: checks.Problems, params: settings.SamplingParams) -> None:
    """Report penalties, which the host applies wrongly where it schedules a step ahead."""
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(params, name)
        problems.require(
            value == 0,
            name,
            str(value),
            "0, or --disable-overlap-schedule given: the host would not know the last token, "
            "and would count one of the prompt instead",
        )


def _check_grammar(
    problems: checks.Problems, params: settings.SamplingParams, arguments: settings.ServerArguments
) -> None:
    """Report a grammar that the host would not apply, or would apply to another request."""
    algorithm = arguments.speculative_algorithm
    if algorithm:
        why = f"with --speculative-algorithm {algorithm}: the host would not apply it"
    else:
        why = "with --dp-size over 1: the host would apply it to another request"
    for name in GRAMMARS:
        problems.require(
            getattr(params, name) is None or not (algorithm or arguments.dp_size > 1),
            name,
            "given",
            f"left out {why}",
        )


def _check_drafted(
    problems: checks.Problems, params: settings.SamplingParams, algorithm: str
) -> None:
    """Report options that the host applies to sampled tokens, but not to draft tokens."""
    for name in ("frequency_penalty", "presence_penalty", "min_new_tokens"):
        value = getattr(params, name)
        problems.require(
            value == 0,
            name,
            str(value),
            f"0 with --speculative-algorithm {algorithm}: the host would not apply it",
        )
    problems.require(
        algorithm != "DFLASH" or params.top_k == 1,
        "temperature",
        str(params.temperature),
        "0 (or top_k 1) with --speculative-algorithm DFLASH: the host supports greedy requests "
        "only, and may crash with others",
    )
