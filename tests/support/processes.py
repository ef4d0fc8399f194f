"""Run Python in a separate process."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import urllib.request

ROOT = pathlib.Path(__file__).parents[2]


def python(code: str, *given: str, folder: pathlib.Path = ROOT, **environment: str) -> str:
    """Run `code` in a fresh interpreter, with warnings as errors, and return its output."""
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


def start(rank: int, *given: str, code: str, devices: str) -> subprocess.Popen:
    """Start one of several processes that run `code` together, with `devices` devices each."""
    return start_command([sys.executable, "-c", code, str(rank), *given], devices)


def start_command(command: list[str], devices: str) -> subprocess.Popen:
    environment = {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": devices}
    return subprocess.Popen(
        command,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answers(address: str) -> bool:
    """Whether a server at `address` responds with status 200."""
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
