"""The test matrix on a GPU (`run`), and its pytest plugin: outcomes kept, a budget, an alarm.

    python -m pytest -p benchmarks.gpu.matrix tests/test_matrix.py

The plugin exits with 3 where tests were left. Settings come as environment variables, which
pytest-xdist's workers see too:

    JATTN_MATRIX_FILE      every outcome is added to it, a line of JSON
    JATTN_MATRIX_RESUME    a folder: what has an outcome in its files is not run again
    JATTN_MATRIX_SECONDS   tests that would begin later are skipped and have no outcome
    JATTN_MATRIX_PATIENCE  seconds; a test that takes longer has failed and ends its process
"""

import datetime
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import session as gpu_session

ROOT = Path(__file__).resolve().parents[2]
OVER = "the time is over"
NO_TESTS_LEFT = 5  # pytest's exit status
_began = time.monotonic()
_left: set[str] = set()


def run(implementations: Sequence[str], seconds: float, out: str | None, known: str | None) -> int:
    """Run the test matrix on the GPU; pytest's exit status, or 3 where tests were left.

    Args:
      implementations: whose tests.
      seconds: the budget.
      out: a folder for the outcomes.
      known: a folder with outcomes of an earlier run.
    """
    if importlib.util.find_spec("pytest") is None:
        print("the matrix needs pytest: pip install -e '.[test]'", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.matrix"]
    command += ["tests/test_matrix.py", "-k", " or ".join(f"{n}-head" for n in implementations)]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(max(1, min(8, (os.cpu_count() or 2) // 2)))]
    settings = {"JAX_PLATFORMS": "cuda,cpu", "JATTN_MATRIX_SECONDS": str(seconds)}
    if out is not None:
        os.makedirs(out, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
        settings["JATTN_MATRIX_FILE"] = os.path.join(out, f"{now}-matrix.jsonl")
    if known is not None:
        settings["JATTN_MATRIX_RESUME"] = known
    try:
        # A test that began in time may end after it.
        status = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **settings}, timeout=seconds + 60
        ).returncode
        return 0 if status == NO_TESTS_LEFT else status
    except subprocess.TimeoutExpired:
        print("the matrix did not end in time; run it again with --resume", file=sys.stderr)
        return gpu_session.HUNG


# --- The plugin -----------------------------------------------------------------------------------


def _setting(name: str) -> str | None:
    return os.environ.get(f"JATTN_MATRIX_{name}") or None


def _write(test: str, outcome: str) -> None:
    if (file := _setting("FILE")) is not None:
        with Path(file).open("a") as out:
            out.write(json.dumps({"kind": "test", "name": test, "outcome": outcome}) + "\n")


def outcomes(folder: str | None) -> dict[str, str]:
    """`{test: "passed" or "failed" or "hung"}` of earlier runs; the last of several counts."""
    lines = gpu_session.lines_of(folder)
    return {line["name"]: line["outcome"] for line in lines if line.get("kind") == "test"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is known."""
    known = outcomes(_setting("RESUME"))
    done = [item for item in items if item.nodeid in known]
    items[:] = [item for item in items if item.nodeid not in known]
    if done:
        config.hook.pytest_deselected(items=done)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Every test under the alarm."""

    def ring() -> None:
        _write(item.nodeid, "hung")
        gpu_session.leave(gpu_session.HUNG)

    alarm = threading.Timer(float(_setting("PATIENCE") or 120), ring)
    alarm.daemon = True
    alarm.start()
    try:
        return (yield)
    finally:
        alarm.cancel()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begins nothing when the time is over."""
    if time.monotonic() - _began > float(_setting("SECONDS") or "inf"):
        pytest.skip(OVER)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes an outcome; with workers, where they report to."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.skipped and OVER in str(report.longrepr):
        _left.add(report.nodeid)
    if report.failed or (report.when == "call" and report.passed):
        _write(report.nodeid, report.outcome)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Does not call a run that left something a success."""
    if _left and session.exitstatus == 0:
        session.exitstatus = gpu_session.HUNG
