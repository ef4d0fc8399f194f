"""Requests of sglang-jax that end before they start.

- A request that the host's scheduler refuses still passes through it, with a prompt of one token.
  It may wait there for room for its whole output, or crash the scheduler if its output has no
  length limit. jattn gives it an output of one token.
- The server never forgets a request that is aborted while it waits. It then waits for that request
  when it pauses or shuts down. jattn makes it forget the request.
- An abort of a request whose client is gone raises an error in the server. jattn ignores it.
"""

from __future__ import annotations

import functools
from typing import Any


def enable() -> None:
    """Let such requests end without harm to others.

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
            return  # its client is gone
        end(manager, received)
        del manager.rid_to_state[received.rid]
        manager._notify_state_event(state)

    Req.set_finish_with_abort = refuse_and_shorten
    TokenizerManager._handle_abort_req = end_and_forget
