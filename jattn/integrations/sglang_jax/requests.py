"""Requests that sglang-jax would end its scheduler with, or answer as if a field were not there.

They are refused where the host makes its own request of one, in the server's process: that one
gets an error (HTTP 400), and the engine lives on.
"""

from __future__ import annotations

import functools
from typing import Any

from jattn import checks
from jattn.integrations.sglang_jax import settings


def enable() -> None:
    """Check requests as the host's `TokenizerManager` makes them.

    Raises:
      ImportError: sglang-jax is not installed.
    """
    from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

    make = TokenizerManager._create_tokenized_object

    @functools.wraps(make)
    def make_and_check(manager: Any, *given: Any, **options: Any) -> Any:
        made = make(manager, *given, **options)
        check(made, manager.server_args)
        return made

    TokenizerManager._create_tokenized_object = make_and_check


def check(request: settings.Request, arguments: settings.ServerArguments) -> None:
    """Raise if a request asks for what sglang-jax does not do.

    Args:
      request: `sgl_jax.srt.managers.io_struct.TokenizedGenerateReqInput`.
      arguments: of the engine that is asked.

    Raises:
      ValueError: every such field, with what it has to be.
    """
    params, algorithm = request.sampling_params, arguments.speculative_algorithm
    with checks.checking("jattn.integrations.sglang_jax") as problems:
        problems.require(
            not (algorithm and (request.return_logprob or request.return_output_logprob_only)),
            "return_logprob (logprobs)",
            "given",
            f"left out with --speculative-algorithm {algorithm}: the host has none for drafts",
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
            "1: the host ignores it (frequency_penalty and presence_penalty work)",
        )
        problems.require(
            params.min_p == 0 or params.top_k == 1,
            "min_p",
            str(params.min_p),
            "0: the host draws tokens that it excludes",
        )
