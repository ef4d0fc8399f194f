"""A plugin of pytest that keeps one test in `JATTN_PEER_EVERY`, always the same ones.

Tests that draw their lengths from Python's `random` without a seed are given one, the same for
all: cases are then the same in every run, and those that differ in tuning arguments alone have the
same lengths, so that XLA compiles the programs of a reference once for all of them.
"""

from __future__ import annotations

import os
import random
import zlib

import pytest


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Names are hashed: every n-th test would always have the same last parameter.
    every = int(os.environ.get("JATTN_PEER_EVERY", "1"))
    kept = [item for item in items if zlib.crc32(item.name.encode()) % every == 0]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    random.seed(0)
