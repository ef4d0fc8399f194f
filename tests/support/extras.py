"""What files of tests need beyond the core; where it is missing, the file is skipped."""

from __future__ import annotations

import types

import pytest


def serve(*more: str) -> types.ModuleType:
    """httpx, for a file that needs it, `more` and what else the server is made of.

    It is called before the file imports the server.
    """
    __tracebackhide__ = True  # it is the file that is said to be skipped
    for name in ("uvicorn", "starlette", *more):
        pytest.importorskip(name, reason="the server's tests need the serve extra")
    return pytest.importorskip("httpx", reason="the server's tests need the serve extra")
