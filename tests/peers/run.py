"""Fetching a suite, and running it in a process of its own."""

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
import zipfile

from tests.peers.suites import Suite

ROOT = pathlib.Path(__file__).parent.parent.parent


class NotFetchedError(Exception):
    """A suite's files are not here, and why."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a suite's tests: counts, the reasons of those skipped, and the log."""

    passed: int
    failed: int
    skipped: dict[str, int]
    log: str


def sources(suite: Suite, jax_checkout: str | None, cache: pathlib.Path) -> pathlib.Path:
    """The folder that has the suite's file."""
    if suite.wheel is None:
        if not jax_checkout or not (pathlib.Path(jax_checkout) / suite.file).exists():
            raise NotFetchedError(
                "it needs a checkout of https://github.com/jax-ml/jax: set JATTN_PEERS_JAX to its "
                f"folder, which must have {suite.file} (now {jax_checkout!r})"
            )
        return pathlib.Path(jax_checkout).resolve()
    folder = cache / suite.wheel.replace("==", "-")
    if not (folder / suite.file).exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        # Tests are part of the wheel. What it requires of Python and of others is not used.
        options = ["--ignore-requires-python", "--only-binary", ":all:", "--dest", str(folder)]
        done = subprocess.run(
            [*pip, *options, suite.wheel], capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            raise NotFetchedError(f"pip cannot fetch {suite.wheel}: {done.stderr[-300:]}")
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


def run(suite: Suite, folder: pathlib.Path, *, timeout: float = 3000) -> Report:
    """Run a suite's file with jattn in the place of the kernel that it tests."""
    with tempfile.TemporaryDirectory() as scratch:
        results = pathlib.Path(scratch) / "results.xml"
        # Apart from its package, which may be called `tests` as ours is.
        file = shutil.copy(folder / suite.file, scratch)
        environment = {
            **os.environ,
            "JATTN_PEER": suite.name,
            "JATTN_PEER_SOURCES": str(folder),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "",
        }
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull]
        command += ["-p", "tests.peers.kernels", f"--junitxml={results}", "--rootdir", scratch]
        command += ["--noconftest", "-k", suite.select, file]
        with (pathlib.Path(scratch) / "log").open("w+") as file:  # to be looked at as it grows
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
