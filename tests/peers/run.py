"""Running a suite in a separate process."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

from tests.peers.suites import Suite

# Each reference runs only once: otherwise most of the time would go to optimizing them.
FAST = "--xla_backend_optimization_level=0"
ROOT = pathlib.Path(__file__).parent.parent.parent


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of a suite's tests: counts, reasons for skips, and the log."""

    passed: int
    failed: int
    skipped: dict[str, int]
    log: str


def run(suite: Suite, folder: pathlib.Path, *, timeout: float = 3000) -> Report:
    """Run a suite's files with jattn instead of the kernel that they test."""
    with tempfile.TemporaryDirectory() as scratch:
        results = pathlib.Path(scratch) / "results.xml"
        # Copy them out of their package, which may be called `tests` like ours.
        files = [shutil.copy(folder / file, scratch) for file in suite.files]
        environment = {
            **os.environ,
            "JATTN_PEER": suite.name,
            "JATTN_PEER_SOURCES": str(folder),
            "JATTN_PEER_EVERY": str(suite.every),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", FAST),
            # JAX's own tests fail if there is a cache that they did not create.
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        }
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull]
        command += ["-p", "tests.peers.sample", "-p", f"tests.peers.{suite.plugin}"]
        command += [f"--junitxml={results}", "--rootdir", scratch, "--noconftest"]
        command += ["-k", suite.select, *files]
        with (pathlib.Path(scratch) / "log").open("w+") as file:  # can be read while tests run
            both = {"stdout": file, "stderr": subprocess.STDOUT}
            subprocess.run(command, env=environment, cwd=ROOT, timeout=timeout, check=False, **both)
            file.seek(0)
            log = file.read()
        if not results.exists():
            return Report(0, 1, {}, log)
        cases = list(ElementTree.parse(results).iter("testcase"))
    skipped: collections.Counter[str] = collections.Counter()
    failed = 0
    for case in cases:
        if (skip := case.find("skipped")) is not None:
            skipped[skip.get("message", "")] += 1
        failed += case.find("failure") is not None or case.find("error") is not None
    passed = len(cases) - failed - sum(skipped.values())
    return Report(passed, failed, dict(skipped), log)
