"""A run that may end at any time: a budget, results written as they come, an alarm, a second run.

Every answer is a line of JSON in a file, written when it is known. A later run that is given the
folder (`--resume`) does not ask again what has an answer there, unless it was a failure and the
code has changed since. What hangs is answered too: the alarm writes down what was being measured
and ends the process, because nothing else stops a kernel that waits for itself.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

# What a workload may take with one implementation: it compiles, is checked and timed.
PATIENCE = 180.0
# The alarm may let something finish for as long after the budget.
GRACE = 30.0
HUNG = 3  # exit status


ROOT = pathlib.Path(__file__).resolve().parents[2]
STEP = "JATTN_STEP"  # the variable with a step's name
# What is no longer true, perhaps, of other code. A refusal is an answer.
FAILURES = ("WRONG", "FAILED", "no answer")


@functools.cache
def fingerprint() -> str:
    """Of the package and what measures it: failures of other code may be asked again."""
    found = hashlib.sha256()
    for folder in ("jattn", "benchmarks", "tests/support"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".h", ".cc"):
                found.update(file.read_bytes())
    return found.hexdigest()[:12]


def origin() -> dict[str, str]:
    """Fields of every line: the code that wrote it, and the step of the first hour."""
    step = os.environ.get(STEP)
    return {"code": fingerprint(), **({"step": step} if step else {})}


class Lines:
    """JSON lines in a file of a folder, each written when it is known; nowhere without a folder."""

    def __init__(self, folder: str | None, parts: Sequence[str]):
        self._file = None
        if folder is not None:
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
            now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
            self._file = pathlib.Path(folder) / f"{now}-{'-'.join(parts)}.jsonl"

    def write(self, **fields: Any) -> None:
        """Add a line."""
        if self._file is not None:
            with self._file.open("a") as out:
                out.write(json.dumps({**fields, **origin()}) + "\n")


def lines_of(folder: str | None, but: str | None = None) -> Iterator[dict[str, Any]]:
    """All lines of all files `but` one in a folder; of a line that was cut off, nothing."""
    for file in sorted(pathlib.Path(folder).glob("*.jsonl")) if folder is not None else ():
        if but is not None and file == pathlib.Path(but):
            continue
        for line in file.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def answered(folder: str | None) -> set[tuple[str, str]]:
    """`(workload, implementation)` of which earlier runs say something that still stands."""
    return {
        (line["name"], line["implementation"])
        for line in lines_of(folder)
        if line.get("kind") == "row"
        or (line.get("kind") == "none" and (not failed(line["why"]) or of_this_code(line)))
    }


def failed(why: str) -> bool:
    """Whether a reason for there being no result is a failure of ours."""
    return why.startswith(FAILURES)


def of_this_code(line: dict[str, Any]) -> bool:
    """Whether a line was written by the code as it is now."""
    return line.get("code") == fingerprint()


def device_answers() -> bool:
    """Whether the GPU still computes: after an illegal access it does not, for this process."""
    import jax.numpy as jnp

    try:
        return float(jnp.arange(3.0).sum()) == 3.0
    except Exception:
        return False


def run(command: Sequence[str], seconds: float, **settings: Any) -> int | None:
    """The exit status of a command; None where it took too long, and has been ended, as have the
    processes that it began."""
    with subprocess.Popen(command, start_new_session=True, **settings) as process:
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def leave(status: int) -> None:
    """End the process without waiting for anything that may hang."""
    sys.stdout.flush()
    os._exit(status)


class LostDeviceError(Exception):
    """The GPU does not compute any more, for this process."""


class OverTimeError(Exception):
    """The budget is spent, and something is left."""


def first_line(error: Exception) -> str:
    """The first line of an error, with its type."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


class Session:
    """The budget of a run and the alarm over its parts.

    Args:
      seconds: until nothing new is begun.
      lines: where an alarm is written down.
      end: called with an exit status when the alarm goes off.
    """

    def __init__(self, seconds: float, lines: Lines, end: Callable[[int], None] = leave):
        self.lines = lines
        self._end = end
        self._over = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds of the budget; below zero when it is spent."""
        return self._over - time.monotonic()

    @contextlib.contextmanager
    def watched(self, name: str, implementation: str) -> Iterator[None]:
        """Runs its body under the alarm."""
        patience = min(PATIENCE, self.left + GRACE)

        def ring() -> None:
            why = f"no answer in {patience:.0f} s"
            if patience < PATIENCE:  # it is not to blame, and may be asked again
                self.lines.write(kind="left", names=[name], why=why)
            else:
                self.lines.write(kind="none", name=name, implementation=implementation, why=why)
            print(f"{name:<52} {implementation:<14} {why}; run again with --resume", flush=True)
            self._end(HUNG)

        alarm = threading.Timer(max(patience, 0.0), ring)
        alarm.daemon = True
        alarm.start()
        try:
            yield
        finally:
            alarm.cancel()

    def each(
        self,
        name: str,
        implementations: Sequence[str],
        found: Iterable[tuple[str, Any]],
        answers: Callable[[], bool],
    ) -> Iterator[tuple[str, Any]]:
        """The results of `found` for each implementation, each made under the alarm.

        Raises:
          LostDeviceError: something failed, and the device no longer `answers`.
          OverTimeError: the budget was spent before the last of them.
        """
        found = iter(found)
        for index, implementation in enumerate(implementations):
            if index and self.left <= 0:
                raise OverTimeError
            with self.watched(name, implementation):
                answer = next(found)
            yield answer
            if isinstance(answer[1], str) and not answers():
                raise LostDeviceError
