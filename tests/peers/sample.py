"""A plugin of pytest that keeps one test in `JATTN_PEER_EVERY`, always the same ones."""

from __future__ import annotations

import os
import zlib

import pytest


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Names are hashed: every n-th test would always have the same last parameter.
    every = int(os.environ.get("JATTN_PEER_EVERY", "1"))
    kept = [item for item in items if zlib.crc32(item.name.encode()) % every == 0]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
