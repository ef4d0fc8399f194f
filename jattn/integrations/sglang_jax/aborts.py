"""Requests of sglang-jax that end before they have begun.

A request that the host refuses in its scheduler goes through it with a prompt of one token, where
it may wait for room for its whole answer, or has no length at all. One that is aborted while it
waits is never forgotten: the server waits for it when it pauses, and when it is to end.
"""

from __future__ import annotations

import functools
from typing import Any


def enable() -> None:
    """Let such requests end, and no others with them.

    Raises:
      ImportError: sglang-jax is not installed, or is another version.
    """
    from sgl_jax.srt.managers.schedule_batch import Req
    from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

    refuse, end = Req.set_finish_with_abort, TokenizerManager._handle_abort_req

    @functools.wraps(refuse)
    def refuse_and_shorten(request: Any, message: str) -> None:
        refuse(request, message)
        request.sampling_params.max_new_tokens = 1

    @functools.wraps(end)
    def end_and_forget(manager: Any, received: Any) -> None:
        state = manager.rid_to_state.get(received.rid)
        if state is None:
            return  # its client has gone
        end(manager, received)
        del manager.rid_to_state[received.rid]
        manager._notify_state_event(state)

    Req.set_finish_with_abort = refuse_and_shorten
    TokenizerManager._handle_abort_req = end_and_forget
