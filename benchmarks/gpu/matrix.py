"""Run the test matrix on a GPU (`run`), with a pytest plugin: stored outcomes, budget, alarm.

A test whose kernel hangs, or leaves the GPU unable to compute for the process, ends the process, so
it costs later tests nothing: with pytest-xdist another worker replaces the process, without it the
next run continues after that test.

    python -m pytest -p benchmarks.gpu.matrix tests/attention/test_matrix.py

The plugin exits with 3 if tests are left. Settings come as environment variables, which
pytest-xdist's workers inherit:

    JATTN_MATRIX_FILE      the file to which every outcome is appended, a line of JSON
    JATTN_MATRIX_RESUME    a folder: tests with an outcome in its files do not run again, except
                           failures if the code has changed
    JATTN_MATRIX_SECONDS   tests that would start later are skipped and have no outcome
    JATTN_MATRIX_PATIENCE  seconds; a test that takes longer fails and ends its process
"""

import datetime
import importlib.util
import json
import os
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
LOST = "the GPU does not answer any more"
NO_TESTS_LEFT = 5  # pytest's exit status
WORKERS = 8
_began = time.monotonic()
_left: set[str] = set()
_failed: set[str] = set()


def command(implementations: Sequence[str]) -> list[str]:
    """Return the pytest command for the implementations' tests, including CI's `extended` ones.

    It loads no installed plugins except those named here.
    """
    found = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.matrix"]
    found += ["tests/attention/test_matrix.py"]
    found += ["-k", " or ".join(f"{n}-head" for n in implementations)]
    # The machine's other packages may warn, which has nothing to do with the kernels.
    found += ["-W", "default", "-m", "not slow and not transformers"]
    if importlib.util.find_spec("xdist") is not None:
        count = max(1, min(WORKERS, (os.cpu_count() or 2) // 2))
        found += ["-p", "xdist", "-n", str(count), "--max-worker-restart", "1000"]
    return found


def run(implementations: Sequence[str], seconds: float, out: str | None, known: str | None) -> int:
    """Run the test matrix on the GPU; return pytest's exit status, or 3 if tests are left.

    Args:
      implementations: the implementations to test.
      seconds: the budget.
      out: a folder for the outcomes.
      known: a folder with outcomes of an earlier run.
    """
    if importlib.util.find_spec("pytest") is None:
        print("the matrix needs pytest: pip install -e '.[test]'", file=sys.stderr)
        return 2
    settings = {
        "JAX_PLATFORMS": "cuda,cpu",
        "JATTN_MATRIX_SECONDS": str(seconds),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # The tests' own flags make XLA compile fast, but to slow code.
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    if out is not None:
        os.makedirs(out, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
        settings["JATTN_MATRIX_FILE"] = os.path.join(out, f"{now}-{os.getpid()}-matrix.jsonl")
    if known is not None:
        settings["JATTN_MATRIX_RESUME"] = known
    # A test that started in time may end late.
    environment = {**os.environ, **settings}
    status = gpu_session.run(command(implementations), seconds + 60, cwd=ROOT, env=environment)
    if status is None:
        print("the matrix did not end in time; run it again with --resume", file=sys.stderr)
        return gpu_session.HUNG
    if status == NO_TESTS_LEFT:
        if outcomes(known):
            return 0
        print(f"the matrix has no test of {', '.join(implementations)} here", file=sys.stderr)
        return 2
    return status


# --- The plugin -----------------------------------------------------------------------------------


def _setting(name: str) -> str | None:
    return os.environ.get(f"JATTN_MATRIX_{name}") or None


def _write(test: str, outcome: str, why: str = "") -> None:
    if (file := _setting("FILE")) is not None:
        line = {"kind": "test", "name": test, "outcome": outcome, "why": why}
        with Path(file).open("a") as out:
            out.write(json.dumps({**line, **gpu_session.origin()}) + "\n")


def outcomes(folder: str | None, standing: bool = False, but: str | None = None) -> dict[str, str]:
    """Return `{test: "passed", "failed", "hung" or "lost"}` of earlier runs; the last counts.

    Args:
      folder: the folder with their files.
      standing: only outcomes that a run of this code would not repeat.
      but: a file to skip.
    """
    return {
        line["name"]: line["outcome"]
        for line in gpu_session.lines_of(folder, but)
        if line.get("kind") == "test"
        and (not standing or line["outcome"] == "passed" or gpu_session.of_this_code(line))
    }


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is known; begin with a few tests of everything, plain calls first."""
    # Ignores what this run has found so far: a worker that replaces another must collect the same.
    known = outcomes(_setting("RESUME"), standing=True, but=_setting("FILE"))
    done = [item for item in items if item.nodeid in known]
    items[:] = [item for item in items if item.nodeid not in known]
    items.sort(key=lambda item: ("pairwise" in item.nodeid, "-causal-" not in item.nodeid))
    if done:
        config.hook.pytest_deselected(items=done)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Run every test under the alarm."""

    def ring() -> None:
        _write(item.nodeid, "hung")
        gpu_session.leave(gpu_session.HUNG)

    alarm = threading.Timer(float(_setting("PATIENCE") or 120), ring)
    alarm.daemon = True
    alarm.start()
    try:
        done = yield
    finally:
        alarm.cancel()
    if item.nodeid in _failed and not gpu_session.device_answers():
        _write(item.nodeid, "lost", LOST)
        gpu_session.leave(gpu_session.HUNG)
    return done


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the test if the time is over."""
    if time.monotonic() - _began > float(_setting("SECONDS") or "inf"):
        pytest.skip(OVER)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write an outcome; with workers, in the process they report to."""
    if report.failed:
        _failed.add(report.nodeid)
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.skipped and OVER in str(report.longrepr):
        _left.add(report.nodeid)
    if report.failed or (report.when == "call" and report.passed):
        _write(report.nodeid, report.outcome, _why(report) if report.failed else "")


def _why(report: pytest.TestReport) -> str:
    """Return the first line that pytest marks as the error."""
    lines = report.longreprtext.splitlines()
    said = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (said or lines or [""])[0][:300]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Set the exit status to 3 if something is left, even after failures, so that it continues."""
    if _left and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.exitstatus = gpu_session.HUNG
