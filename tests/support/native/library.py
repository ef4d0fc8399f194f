"""The native kernel's library for tests: its functions, and a Python process to run it in."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from jattn import implementations
from jattn.cpu.native import library

REASONS = implementations.BY_NAME["native"].row.missing()
needed = pytest.mark.skipif(bool(REASONS), reason="; ".join(REASONS))


@pytest.fixture(scope="module")
def native() -> ctypes.CDLL:
    """The library, with the argument types of its functions for tests."""
    found = library.load().library
    found.jattn_native_visible.argtypes = [
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_int64, ctypes.c_void_p),
    ]
    found.jattn_native_tree.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    ]
    found.jattn_native_logits.argtypes = [
        *(ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p),
    ]
    found.jattn_native_decode.argtypes = [
        *(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_int64, ctypes.c_void_p),
    ]
    return found


def run_python(*command: str, **environment: str) -> str:
    """Run Python with these arguments and variables, check that it succeeds, return its output."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout
