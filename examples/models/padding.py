"""Which rows of a step's arrays are padding, for what need not be computed.

A step is padded to the shape of its program (`examples/engine/step.py`). Its tokens come first, and
so do the rows whose logits are wanted: products with weights (`examples/native`) and mixtures of
experts leave out the rest. What padded rows hold instead is read by nothing that is not padding.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Used:
    """How many rows are no padding, while a model's step is traced."""

    tokens: jax.Array  # int32 [], of T
    most_tokens: int  # T
    logits: jax.Array  # int32 [], of R
    most_logits: int  # R


_used: contextvars.ContextVar[Used | None] = contextvars.ContextVar("used", default=None)


@contextlib.contextmanager
def leave_out(used: Used | None) -> Iterator[None]:
    """Have what is traced inside leave padded rows out; None: nothing is known of them."""
    token = _used.set(used)
    try:
        yield
    finally:
        _used.reset(token)


def used_rows(count: int, *, logits: bool = False) -> jax.Array | None:
    """How many of a step's `count` rows are no padding, int32 []; None: that is not known.

    Rows are told apart by their number: a model must give layers no R rows of anything else.

    Args:
      count: T rows are the step's tokens, R rows those that logits are computed of.
      logits: they become logits, so they are R rows where R equals T.
    """
    used = _used.get()
    if used is None:
        return None
    if count == used.most_tokens and not logits:
        return used.tokens
    return used.logits if count == used.most_logits else None
