"""Record the machine, versions and date of a benchmark's figures."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import jattn
from benchmarks import timing
from benchmarks.gpu.session import ROOT, fingerprint
from jattn.cpu.native import library


def processor() -> dict[str, Any]:
    """Return the CPU's name, and what distinguishes generations with the same name."""
    text = ""
    with contextlib.suppress(OSError):  # not on Linux
        text = Path("/proc/cpuinfo").read_text()

    def of(name: str) -> str | None:
        found = re.search(rf"^{name}\s*: (.*)", text, re.M)
        return found[1] if found else None

    native = library.load()
    return {
        "cpu": of("model name") or platform.processor() or platform.machine(),
        "cpu_family": of("cpu family") or of("CPU architecture"),  # x86; ARM
        "cpu_model": of("model") or of("CPU part"),
        "native": native.instruction_set() if native.library is not None else None,
    }


def commit() -> str | None:
    """Return the checkout's commit, with "-dirty" if its files have changed; None outside git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None


def machine() -> dict[str, Any]:
    """Return versions, CPU, code and date of the run."""
    packages = ("jax", "jaxlib", "numpy")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **processor(),
        "cores": timing.num_cores(),
        "last_level_cache": timing.cache_bytes(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "jattn": jattn.__version__,
        "code": fingerprint(),
        "commit": commit(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


def run_record(**more: Any) -> dict[str, Any]:
    """Return the first record of a result file: the machine, and what all rows share."""
    return {"kind": "run", **machine(), **more}
