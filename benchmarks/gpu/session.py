"""Runs that may end at any time: a budget, results written as they come, an alarm, resuming.

Every result is a line of JSON in a file, written when it is known. A later run with that folder
(`--resume`) does not repeat what has a result there, unless it was a failure and the code has
changed since. A hang is a result too: the alarm records what was being measured and ends the
process, because nothing else stops a kernel that waits for itself.
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

# How long a workload may take with one implementation to compile, be checked and be timed.
PATIENCE = 180.0
# How long after the budget the alarm lets something finish.
GRACE = 30.0
HUNG = 3  # exit status


ROOT = pathlib.Path(__file__).resolve().parents[2]
STEP = "JATTN_STEP"  # the variable with a step's name
# Results that may not hold for other code. A refusal is a result.
FAILURES = ("WRONG", "FAILED", "no answer")


@functools.cache
def fingerprint() -> str:
    """Hash the package and what measures it: failures of other code may be repeated."""
    found = hashlib.sha256()
    for folder in ("jattn", "benchmarks", "tests/support"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".h", ".cc"):
                found.update(file.read_bytes())
    return found.hexdigest()[:12]


def origin() -> dict[str, str]:
    """Return the fields of every line: the code that wrote it, and the step of the first hour."""
    step = os.environ.get(STEP)
    return {"code": fingerprint(), **({"step": step} if step else {})}


class Lines:
    """JSON lines in a file of a folder, each written when known; without a folder, none."""

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
    """Yield all lines of a folder's files except `but`, without lines that were cut off."""
    for file in sorted(pathlib.Path(folder).glob("*.jsonl")) if folder is not None else ():
        if but is not None and file == pathlib.Path(but):
            continue
        for line in file.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def answered(folder: str | None) -> set[tuple[str, str]]:
    """Return each `(workload, implementation)` whose result of an earlier run still holds."""
    return {
        (line["name"], line["implementation"])
        for line in lines_of(folder)
        if line.get("kind") == "row"
        or (line.get("kind") == "none" and (not failed(line["why"]) or of_this_code(line)))
    }


def failed(why: str) -> bool:
    """Whether the reason for a missing result is a failure of ours."""
    return why.startswith(FAILURES)


def of_this_code(line: dict[str, Any]) -> bool:
    """Whether the present code wrote a line."""
    return line.get("code") == fingerprint()


def device_answers() -> bool:
    """Whether the GPU still computes for this process; after an illegal access it does not."""
    import jax.numpy as jnp

    try:
        return float(jnp.arange(3.0).sum()) == 3.0
    except Exception:
        return False


def run(command: Sequence[str], seconds: float, **settings: Any) -> int | None:
    """Run a command and return its exit status; None if it took too long and was killed, together
    with the processes it started."""
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
    """The GPU no longer computes for this process."""


class OverTimeError(Exception):
    """The budget is spent, and something is left."""


def first_line(error: Exception) -> str:
    """Return the first line of an error, with its type."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


class Session:
    """The budget of a run and the alarm over its parts.

    Args:
      seconds: the time after which nothing new is started.
      lines: where an alarm is recorded.
      end: called with an exit status when the alarm goes off.
    """

    def __init__(self, seconds: float, lines: Lines, end: Callable[[int], None] = leave):
        self.lines = lines
        self._end = end
        self._over = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left of the budget; below zero when it is spent."""
        return self._over - time.monotonic()

    @contextlib.contextmanager
    def watched(self, name: str, implementation: str) -> Iterator[None]:
        """Run the body under the alarm."""
        patience = min(PATIENCE, self.left + GRACE)

        def ring() -> None:
            why = f"no answer in {patience:.0f} s"
            if patience < PATIENCE:  # it is not to blame, and may be repeated
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
        """Yield the results of `found` for each implementation, each made under the alarm.

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
