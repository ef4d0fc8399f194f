"""Optional packages that test files need; a file is skipped if one is missing."""

from __future__ import annotations

import types

import pytest


def serve(*more: str) -> types.ModuleType:
    """Return httpx; skip the test file if it, `more` or a package of the server is missing.

    Call it before the file imports the server.
    """
    __tracebackhide__ = True  # so that pytest reports the file as skipped, not this line
    for name in ("uvicorn", "starlette", *more):
        pytest.importorskip(name, reason="the server's tests need the serve extra")
    return pytest.importorskip("httpx", reason="the server's tests need the serve extra")
