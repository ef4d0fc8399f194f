"""Run commands in a process of another Python, one JSON object per line.

    with Worker(python, "benchmarks.cpu.peer_worker") as worker:
        worker.ask("run", count=3)

calls method `run` of the object that the module gave to `serve`. Only NumPy and the standard
library are used, so that both ends can be any Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class WorkerError(Exception):
    """The worker does not start, has ended, or failed at a command."""


def environment(python: str) -> dict[str, str]:
    """Return the environment of a worker's process with this Python.

    PYTHONPATH is the checkout, and for this same Python also this process's path.
    """
    path = [str(ROOT)]
    if os.path.realpath(python) == os.path.realpath(sys.executable):
        path += filter(None, [os.environ.get("PYTHONPATH")])
    # jax-triton sets the name of Triton's cache to an empty string, for itself.
    given = {
        name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR" or value
    }
    # Unbuffered: the last line it printed before it died is the reason.
    return {**given, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


class Worker:
    """A worker process. It starts at the first command, and again after it has ended, so a command
    that crashes it costs one answer. Use as a context manager."""

    def __init__(
        self,
        python: str,
        module: str,
        patience: float | None = None,
        variables: Mapping[str, str] | None = None,
        **opening: Any,
    ):
        """Describe the process.

        Args:
          python: its interpreter.
          module: the module it runs, which calls `serve`.
          patience: seconds to wait for an answer before the process is killed; None: forever.
          variables: environment variables in addition to this process's.
          opening: arguments of the first command, "open", whose answer becomes `info`.
        """
        self._command = [python, "-m", module]
        self._opening, self.patience = opening, patience
        self._variables = dict(variables or {})
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()
        self.info: dict[str, Any] = {}

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and remove its files."""
        self.stop()
        self._folder.cleanup()

    @property
    def runs(self) -> bool:
        """Whether the process runs, as far as is known."""
        return self._process is not None

    def path(self, name: str) -> Path:
        """Return a file that both processes can use."""
        return Path(self._folder.name) / name

    def ask(self, do: str, **given: Any) -> Any:
        """Send one command and return the answer.

        Raises:
          WorkerError: there is no answer; the message says why.
        """
        if self._process is None:
            self._start()
        return self._exchange(do, **given)

    def stop(self) -> None:
        """End the process; the next command starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _start(self) -> None:
        try:
            # A file, because a pipe that is not read fills up and stops the writer.
            with self.path("stderr").open("w") as errors:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    cwd=ROOT,
                    env=environment(self._command[0]) | self._variables,
                )
        except OSError as error:
            raise WorkerError(f"{self._command[0]} does not start: {error}") from error
        try:
            self.info = self._exchange("open", **self._opening)
        except WorkerError:
            self.stop()
            raise

    def _exchange(self, do: str, **given: Any) -> Any:
        process, patience = self._process, self.patience
        assert process is not None
        alarm = threading.Timer(patience or threading.TIMEOUT_MAX, process.kill)
        alarm.daemon = True
        alarm.start()
        try:
            process.stdin.write(json.dumps({"do": do, **given}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late = not alarm.is_alive()
            alarm.cancel()
        if not line:
            errors = self.path("stderr").read_text(errors="replace").strip().splitlines()
            self._process = None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            status = process.wait()
            why = f"no answer to {do!r} in {patience:.0f} s" if late else f"it ended with {status}"
            raise WorkerError(f"{why}: {errors[-1] if errors else 'without a reason'}")
        answer = json.loads(line)
        if answer.get("ends"):
            self.stop()  # the next command starts another
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["ok"]


def serve(worker: Any) -> None:
    """Answer commands with methods of `worker` until there are no more. A failure is an answer.

    If `worker.lost()` says that the device no longer computes, the failure is the last answer:
    all later commands would fail too, although they are not to blame.
    """
    lost = getattr(worker, "lost", lambda: False)
    # What a library prints must not be mistaken for an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        given = json.loads(line)
        try:
            answer = {"ok": getattr(worker, given.pop("do"))(**given)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "ends": lost()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if answer.get("ends"):
            break
