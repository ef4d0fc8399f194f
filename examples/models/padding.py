"""Which rows of a step's arrays are padding and need not be computed.

A step is padded to the shape of its program (`examples/engine/step.py`). Its tokens come first, and
so do the rows whose logits are wanted: products with weights (`examples/native`) and mixtures of
experts skip the rest. Only other padded rows ever read what padded rows hold instead.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Used:
    """How many rows are not padding, while a model's step is traced."""

    tokens: jax.Array  # int32 [], of T
    most_tokens: int  # T
    logits: jax.Array  # int32 [], of R
    most_logits: int  # R


_used: contextvars.ContextVar[Used | None] = contextvars.ContextVar("used", default=None)


@contextlib.contextmanager
def leave_out(used: Used | None) -> Iterator[None]:
    """Skip padded rows in what is traced inside; None: it is unknown which rows are padded."""
    token = _used.set(used)
    try:
        yield
    finally:
        _used.reset(token)


def used_rows(count: int, *, logits: bool = False) -> jax.Array | None:
    """Return how many of a step's `count` rows are not padding, int32 []; None: unknown.

    Rows are identified by their number, so a model must not give layers R rows of anything else.

    Args:
      count: T for the step's tokens, R for the rows that become logits.
      logits: the rows become logits, which decides if R equals T.
    """
    used = _used.get()
    if used is None:
        return None
    if count == used.most_tokens and not logits:
        return used.tokens
    return used.logits if count == used.most_logits else None
