"""Measure how busy other processes keep the machine, and wait until it is quiet.

The kernel counts the busy time of all cores together; the neighbours' share is that minus our own.
Both counts move in steps of a clock tick, so short windows are only roughly known.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

# How many cores others may keep busy before a measurement waits or is repeated.
QUIET = 0.1

# How long a reading takes.
GLANCE_SECONDS = 0.2

# A disturbed measurement is made this many times at most.
ATTEMPTS = 3

T = TypeVar("T")


def busy_seconds() -> float:
    """Return the time that all cores together were busy or taken away since the machine started."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")


class Neighbours:
    """Measures how many cores other processes take, and waits for quiet while patience lasts.

    Args:
      ours: functions that return the CPU seconds of a process of ours.
      patience: seconds of waiting in the whole run.
    """

    def __init__(self, ours: list[Callable[[], float]], patience: float):
        self._ours = [time.process_time, *ours]
        self.patience = patience

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), busy_seconds() - sum(seconds() for seconds in self._ours)

    def during(self, call: Callable[[], T]) -> tuple[T, float]:
        """Return the result of `call`, and the number of cores that others kept busy meanwhile."""
        begin, before = self._now()
        result = call()
        end, after = self._now()
        return result, max(0.0, (after - before) / (end - begin))

    def wait(self) -> None:
        """Return once others leave the cores idle or patience has run out."""
        while self.patience > 0:
            _, busy = self.during(lambda: time.sleep(GLANCE_SECONDS))
            if busy <= QUIET:
                return
            self.patience -= GLANCE_SECONDS

    def quietest(self, call: Callable[[], T]) -> tuple[T, float]:
        """Return the result of the least disturbed run of `call`, and how many cores disturbed it.

        A disturbed call is repeated while patience is left; repeating uses up patience.
        """
        best = None
        for _ in range(ATTEMPTS):
            self.wait()
            begin = time.perf_counter()
            found = self.during(call)
            best = found if best is None else min(best, found, key=lambda pair: pair[1])
            if best[1] <= QUIET or self.patience <= 0:
                break
            self.patience -= time.perf_counter() - begin
        assert best is not None
        return best
