"""How a call is timed: cold keys, implementations in turn, medians.

- **Cold keys.** Consecutive calls read different copies of the cache, which together exceed four
  times the last-level cache. Code, queries and tables stay warm, as in a layer of a model.
- **Turns.** Implementations alternate, so that other processes disturb all of them. All turns last
  as long: 5 ms, or one run of the slowest contender if that is longer, up to 0.1 s. One whose run
  is longer still has turns of one run. Before a turn the machine rests: threads of the turn before
  may spin for milliseconds after their last call, as OpenMP's do by default, and would keep a core
  from this one. Runs at the start of a turn only wake the threads and are not counted, for the same
  time in every turn; there are none where runs are long.
- **Medians**, with the distance between the quartiles as the spread, and the minimum.

A run may be several calls, such as the layers of a step. Figures are of a call.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.workloads import Workload, kv_bytes

# The least length of a turn, and the most runs in it.
TURN_SECONDS = 5e-3
MAX_RUNS = 1000

# The least number of runs before the first turn, which tell how many fill one.
PROBES = 4

# Between turns: longer than idle threads spin (GNU's OpenMP: 300,000 times by default).
REST_SECONDS = 30e-3

# Runs that take longer are not disturbed by waking threads.
LONG_SECONDS = 0.1

# A median this many times the minimum is not of the code that was timed.
DISTURBED = 1.5

# Where the last-level cache does not say its size.
DEFAULT_CACHE_BYTES = 32 << 20

CPUS = Path("/sys/devices/system/cpu")


class Contender(Protocol):
    """One implementation with one workload's data in place."""

    @property
    def layers(self) -> int:
        """The calls of one run."""

    def run(self, count: int) -> list[float]:
        """Seconds of each of `count` runs, every call on the next copy of the keys."""


@dataclass(frozen=True)
class Calls:
    """The contender that calls a function, which returns when it is done."""

    call: Callable[[], object]
    layers: int = 1

    def run(self, count: int) -> list[float]:
        return seconds_of(self.call, count)


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
    """A set of measured runs, in seconds of a call."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    minimum: float
    calls: int  # the number of runs

    @property
    def spread(self) -> float:
        """The distance between the quartiles as a share of the median."""
        return (self.high - self.low) / self.median

    @property
    def disturbed(self) -> bool:
        """Whether half of the runs or more took much longer than the code takes."""
        return self.median > DISTURBED * self.minimum


def summarize(seconds: list[float]) -> Timing:
    low, median, high = (float(x) for x in np.percentile(seconds, (25, 50, 75)))
    return Timing(median, low, high, min(seconds), len(seconds))


def cpus() -> set[int]:
    """The logical processors that this process may use.

    Raises:
      SystemExit: the system is not Linux, which alone says it, and how busy they are.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise SystemExit(f"the benchmarks measure on Linux; this is {platform.system()}")
    return os.sched_getaffinity(0)


def cache_bytes(allowed: Iterable[int] | None = None, folder: Path = CPUS) -> int:
    """The size of all last-level caches of the processors that this process may use, together.

    An EPYC of 64 cores has eight of 32 MiB, each shared by eight cores.

    Args:
      allowed: the processors; None: `cpus()`.
      folder: where the kernel describes them.
    """
    sizes: dict[str, int] = {}
    for cpu in cpus() if allowed is None else allowed:
        caches = [
            (int((cache / "level").read_text()), (cache / "size").read_text().strip(), cache)
            for cache in (folder / f"cpu{cpu}/cache").glob("index*")
            if (cache / "size").exists()
        ]
        if caches:
            _, size, cache = max(caches)
            sizes[(cache / "shared_cpu_list").read_text()] = int(size.removesuffix("K")) << 10
    return sum(sizes.values()) or DEFAULT_CACHE_BYTES


def copies_of(size: int) -> int:
    """How many copies of so many bytes, read in turn, are in memory and not in a cache."""
    return -(-4 * cache_bytes() // size)


def cold_copies(w: Workload) -> int:
    """How many copies of the KV of `w` make every call find its keys in memory, not in a cache."""
    return copies_of(kv_bytes(w))


def num_cores() -> int:
    """The cores that this process may use."""
    return len(cpus())


def interleave(contenders: Mapping[str, Contender], turns: int) -> dict[str, Timing]:
    """Time every contender `turns` times, in turn."""
    # The least seconds of a run so far: disturbed probes shorten turns only until a run is quiet.
    least = {name: _probe(contender) for name, contender in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, contender in contenders.items():
            short = [once for once in least.values() if once < LONG_SECONDS]
            turn = max([TURN_SECONDS, *short])
            is_short = least[name] < LONG_SECONDS
            woken = _runs(max(short), least[name]) if is_short else 0
            time.sleep(REST_SECONDS)
            taken = contender.run(woken + _runs(turn, least[name]))
            least[name] = min(least[name], *taken)
            seconds[name] += [run / contender.layers for run in taken[woken:]]
    return {name: summarize(taken) for name, taken in seconds.items()}


def _runs(seconds: float, once: float) -> int:
    """How many runs that take `once` fill so many seconds."""
    return min(MAX_RUNS, max(1, round(seconds / once)))


def _probe(contender: Contender) -> float:
    """The least seconds of a run, of as many as fill a turn. The first may compile."""
    taken = contender.run(2)
    if min(taken) < LONG_SECONDS:
        taken += contender.run(PROBES - 2)
    while len(taken) < _runs(TURN_SECONDS, min(taken)):
        taken += contender.run(_runs(TURN_SECONDS, min(taken)) - len(taken))
    return min(taken)
