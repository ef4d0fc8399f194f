"""Structured output of sglang-jax for several requests at once, and invalid grammars.

- The host compiles a grammar in a thread, caches the result and hands it to every request with the
  same grammar. They then share one state, so each request advances the others. jattn gives every
  request its own copy.
- A grammar that cannot be compiled crashes the host's scheduler. With jattn only its request fails.
- The tokens that a request may generate next are the set bits of a row. The host leaves the rows of
  requests without a grammar empty, or as another batch left them. jattn sets all their bits.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)


def enable() -> None:
    """Give every request its own grammar, and requests without one all tokens.

    Raises:
      ImportError: sglang-jax is not installed.
    """
    from sgl_jax.srt.constrained import base_grammar_backend
    from sgl_jax.srt.managers.schedule_batch import ModelWorkerSamplingInfo

    invalid = base_grammar_backend.INVALID_GRAMMAR_OBJ

    def compiled(backend: Any, key: tuple[str, str]) -> tuple[Any, bool]:
        """Replace `get_cached_or_future_value`: return a copy, and whether it is ready.

        It always is: compiling in this thread costs little more, because making a copy compiles
        here anyway. A request aborted while it waits for a grammar would crash the scheduler.
        """
        if key not in backend.cache:
            try:
                backend.cache[key] = backend._dispatch(*key)
            except Exception as error:  # whatever a parser of grammars raises
                logger.warning("invalid grammar %s: %s", key, error)
                backend.cache[key] = invalid
        found = backend.cache[key]
        return found if found is invalid else found.copy(), True

    base_grammar_backend.BaseGrammarBackend.get_cached_or_future_value = compiled
    ModelWorkerSamplingInfo.update_grammar_vocab_mask = _complete(
        ModelWorkerSamplingInfo.update_grammar_vocab_mask
    )


def _complete(fill: Any) -> Any:
    """Wrap the host's function that makes a step's rows of bits: no grammar means all bits."""

    @functools.wraps(fill)
    def fill_and_complete(info: Any) -> None:
        grammars = [one for one in info.grammars or () if one]
        for grammar in grammars:
            grammar.bitmask = None  # rows of an earlier step, which may still be in use
        open_grammars = {id(one) for one in grammars if not (one.finished or one.is_terminated())}
        fill(info)
        if info.vocab_mask is None:
            return
        rows = list(info.grammars) + [None] * (len(info.vocab_mask) - len(info.grammars))
        for row, grammar in enumerate(rows):
            if id(grammar) not in open_grammars:
                info.vocab_mask[row] = -1

    return fill_and_complete
