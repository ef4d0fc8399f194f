"""The native kernel's library in tests: its functions, whether it is built, and Python to run."""

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
    """The library, told what the functions for tests take."""
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
    """What a Python with these arguments and variables prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout
