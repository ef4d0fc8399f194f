"""Which machine, versions and day a benchmark's figures are of."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import jattn
from benchmarks import timing


def machine() -> dict[str, Any]:
    """Versions, CPU and date of the run."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, TypeError):  # elsewhere than on Linux; on ARM
        cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    packages = ("jax", "jaxlib", "numpy")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": timing.num_cores(),
        "last_level_cache": timing.cache_bytes(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "jattn": jattn.__version__,
        **{package: importlib.metadata.version(package) for package in packages},
    }


def run_record(**more: Any) -> dict[str, Any]:
    """The first record of a result file: the machine, and what all rows share."""
    return {"kind": "run", **machine(), **more}
