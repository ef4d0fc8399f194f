"""A fixture for tests of the example engine's products in C++."""

from __future__ import annotations

import pytest

from examples import native


@pytest.fixture
def nothing_taken():
    """Run the test as in a process that never asked for native products."""
    before = native._taken[:]
    native._taken.clear()
    yield
    native._taken[:] = before
