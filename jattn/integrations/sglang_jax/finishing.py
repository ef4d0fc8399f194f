"""Where an output of sglang-jax ends.

The host gets these ends wrong, and jattn cuts the output there:

- A step of speculative decoding gives a request several tokens. If they exceed its
  `max_new_tokens`, the host stops but keeps them all, even those after an end token.
- The prefill generates the first token of an output, even if `max_new_tokens` is 0.
- With `ignore_eos` the host also ignores the request's own `stop_token_ids`.
"""

from __future__ import annotations

import functools
from typing import Any


def enable() -> None:
    """Cut outputs at the length that a request asks for, or at an end token before that.

    Raises:
      ImportError: sglang-jax is not installed, or is another version.
    """
    from sgl_jax.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN, Req

    check, find = Req.check_finished, Req._check_token_based_finish

    @functools.wraps(find)
    def find_named_too(request: Any, new_accepted_tokens: list[int]) -> bool:
        params = request.sampling_params
        if not (params.ignore_eos and params.stop_token_ids):
            return bool(find(request, new_accepted_tokens))
        first = len(request.output_ids) - len(new_accepted_tokens)
        for position, token in enumerate(new_accepted_tokens, first):
            if token in params.stop_token_ids:
                request.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
                request.finished_len = position + 1
                return True
        return False

    @functools.wraps(check)
    def check_and_cut(request: Any, new_accepted_len: int = 1) -> None:
        tokens, limit = request.output_ids, request.sampling_params.max_new_tokens
        over = len(tokens) - limit
        is_plain = over < 0 or (over == 0 and new_accepted_len == 1)
        if request.finished() or request.to_finish or is_plain:
            check(request, new_accepted_len)
            return
        within = new_accepted_len - over
        request.output_ids = tokens[:limit]
        try:
            is_ended = within > 0 and request._check_token_based_finish(
                tokens[limit - within : limit]
            )
        finally:
            request.output_ids = tokens  # the host frees as many keys and values
        if not is_ended:
            check(request, new_accepted_len)
            request.finished_len = limit

    Req._check_token_based_finish = find_named_too
    Req.check_finished = check_and_cut
