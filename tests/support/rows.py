"""The implementations that run on this machine, for tests of what they all promise.

A test with the fixture `each_row` (tests/conftest.py) runs once per row. New rows join by
themselves, and every row stays tested whichever of them is the automatic choice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from jattn import capability, implementations


@functools.cache
def here(*, oracle: bool = False) -> tuple[capability.Row, ...]:
    """Return the rows that this machine can run, with the reference's if `oracle`."""
    rows = [row for row in implementations.ROWS if not row.missing()]
    return tuple(row for row in rows if oracle or row.implementation != "reference")


def fallback() -> str | None:
    """Return the least preferred of the implementations that run here; None if only one does."""
    names = [row.implementation for row in here()]
    return names[-1] if len(names) > 1 else None


def is_of_fallback(callspec: Any) -> bool:
    """Whether a test's parameters name the fallback.

    The parameter is `each_row`, or a `case` of tests/support/matrix.py.
    """
    params = callspec.params if callspec is not None else {}
    row = params.get("each_row", params.get("case"))
    return fallback() is not None and getattr(row, "implementation", None) == fallback()


@contextlib.contextmanager
def automatic(row: capability.Row) -> Iterator[None]:
    """Make `implementation=None` mean `row`; a call that it refuses skips the test and says why."""
    names, choose = implementations.names, implementations.choose

    def only(implementation):
        return names(row.implementation if implementation is None else implementation)

    def choose_or_skip(call, implementation):
        try:
            return choose(call, implementation)
        except capability.UnsupportedError as error:
            if implementation is None:
                pytest.skip(str(error))
            raise

    with (
        mock.patch.object(implementations, "names", only),
        mock.patch.object(implementations, "choose", choose_or_skip),
    ):
        yield
