"""The example engine's products in C++, in tests."""

from __future__ import annotations

import pytest

from examples import native


@pytest.fixture
def nothing_taken():
    """As in a process that never asked for them."""
    before = native._taken[:]
    native._taken.clear()
    yield
    native._taken[:] = before
