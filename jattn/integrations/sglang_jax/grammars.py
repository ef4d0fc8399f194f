"""Structured output of sglang-jax for several requests at once, and grammars that are none.

The host compiles a grammar in a thread, keeps what it made and hands it to every request with the
same grammar, which share its state: where one is, the others are. A grammar that cannot be
compiled ends its scheduler. The tokens that a request may have next are the set bits of a row; the
host leaves the rows of requests without a grammar empty, or as another batch left them.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)


def enable() -> None:
    """Give every request a grammar of its own, and those without one all tokens.

    Raises:
      ImportError: sglang-jax is not installed.
    """
    from sgl_jax.srt.constrained import base_grammar_backend
    from sgl_jax.srt.managers.schedule_batch import ModelWorkerSamplingInfo

    invalid = base_grammar_backend.INVALID_GRAMMAR_OBJ

    def compiled(backend: Any, key: tuple[str, str]) -> tuple[Any, bool]:
        """Called in the place of `get_cached_or_future_value`: a copy, and whether it is ready.

        It always is. The host's own copies are compiled in this thread, too, and a request that is
        aborted while it waits for a grammar would end the scheduler.
        """
        if key not in backend.cache:
            try:
                backend.cache[key] = backend._dispatch(*key)
            except Exception as error:  # whatever a parser of grammars raises
                logger.warning("no grammar: %s: %s", key, error)
                backend.cache[key] = invalid
        found = backend.cache[key]
        return found if found is invalid else found.copy(), True

    base_grammar_backend.BaseGrammarBackend.get_cached_or_future_value = compiled
    ModelWorkerSamplingInfo.update_grammar_vocab_mask = _complete(
        ModelWorkerSamplingInfo.update_grammar_vocab_mask
    )


def _complete(fill: Any) -> Any:
    """The host's function that makes a step's rows of bits, with all bits where none are meant."""

    @functools.wraps(fill)
    def fill_and_complete(info: Any) -> None:
        grammars = [one for one in info.grammars or () if one]
        for grammar in grammars:
            grammar.bitmask = None  # rows of an earlier step, which may still be read
        open_grammars = {id(one) for one in grammars if not (one.finished or one.is_terminated())}
        fill(info)
        if info.vocab_mask is None:
            return
        rows = list(info.grammars) + [None] * (len(info.vocab_mask) - len(info.grammars))
        for row, grammar in enumerate(rows):
            if id(grammar) not in open_grammars:
                info.vocab_mask[row] = -1

    return fill_and_complete
