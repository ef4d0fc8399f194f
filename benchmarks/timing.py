"""How a call is timed: cold keys, implementations in turn, medians.

- **Cold keys.** Consecutive calls read different copies of the cache, which together exceed four
  times the last-level cache. Code, queries and tables stay warm, as in a layer of a model.
- **Turns.** Implementations alternate, a few milliseconds each, so that other processes disturb
  all of them. Before a turn the machine rests: threads of the side before may spin for milliseconds
  after their last call, as OpenMP's do by default, and would keep a core from this one.
  The first call of a turn only wakes the threads, unless calls are long.
- **Medians**, with the distance between the quartiles as the spread, and the minimum.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.workloads import Workload, kv_bytes

# The length of a turn, and the most calls in it.
TURN_SECONDS = 5e-3
MAX_CALLS = 32

# Between turns: longer than idle threads spin (GNU's OpenMP: 300,000 times by default).
REST_SECONDS = 30e-3

# Calls that take longer are not disturbed by waking threads.
LONG_SECONDS = 0.1

# Where the last-level cache does not say its size.
DEFAULT_CACHE_BYTES = 32 << 20


class Side(Protocol):
    """One implementation with one workload's data in place."""

    def run(self, count: int) -> list[float]:
        """Seconds of each of `count` calls, every one on the next copy of the keys."""


def seconds_of(call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls, which return when they are done."""
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds


@dataclass(frozen=True)
class Timing:
    """A set of measured calls, in seconds."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    minimum: float
    calls: int

    @property
    def spread(self) -> float:
        """The distance between the quartiles as a share of the median."""
        return (self.high - self.low) / self.median


def summarize(seconds: list[float]) -> Timing:
    low, median, high = (float(x) for x in np.percentile(seconds, (25, 50, 75)))
    return Timing(median, low, high, min(seconds), len(seconds))


def cache_bytes() -> int:
    """The size of the last-level cache, as the kernel reports it."""
    sizes = [
        int(path.read_text().strip().removesuffix("K")) << 10
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=DEFAULT_CACHE_BYTES)


def cold_copies(w: Workload) -> int:
    """How many copies of the KV of `w` make every call find its keys in memory, not in a cache."""
    return -(-4 * cache_bytes() // kv_bytes(w))


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def interleave(sides: Mapping[str, Side], turns: int) -> dict[str, Timing]:
    """Time every side `turns` times, in turn."""
    once = {name: min(side.run(2)) for name, side in sides.items()}
    counts = {name: min(MAX_CALLS, max(1, int(TURN_SECONDS / once[name]))) for name in sides}
    seconds = {name: [] for name in sides}
    for _ in range(turns):
        for name, side in sides.items():
            woken = int(once[name] < LONG_SECONDS)
            time.sleep(REST_SECONDS)
            seconds[name] += side.run(counts[name] + woken)[woken:]
    return {name: summarize(taken) for name, taken in seconds.items()}
