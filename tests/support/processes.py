"""Python in a process of its own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def python(code: str, *given: str, folder: pathlib.Path = ROOT, **environment: str) -> str:
    """The output of `code` in a fresh interpreter, where every warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *given],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
