"""Time calls on cold keys, implementations in turn, and report medians.

- **Cold keys.** Consecutive calls read different copies of the cache, which together exceed four
  times the last-level cache. Code, queries and tables stay warm, as in a layer of a model.
- **Turns.** Implementations alternate, so that other processes disturb all of them. All turns have
  the same length: 5 ms, or one run of the slowest contender if that is longer, up to 0.1 s. If a
  run takes longer than that, its turns are one run. Before a turn the machine rests: threads of the
  previous turn may spin for milliseconds after their last call, as OpenMP's do by default, and
  would occupy a core. Runs at the start of a turn only wake the threads and are not counted, for
  the same time in every turn; if runs are long there are none.
- **Medians**, with the distance between the quartiles as the spread, and the minimum.

A run may be several calls, such as the layers of a step. Figures are per call.
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

# The shortest turn, and the most runs in a turn.
TURN_SECONDS = 5e-3
MAX_RUNS = 1000

# The least number of runs before the first turn, which show how many runs fill a turn.
PROBES = 4

# The rest between turns, longer than idle threads spin (GNU's OpenMP: 300,000 times by default).
REST_SECONDS = 30e-3

# Waking threads does not disturb runs that take longer than this.
LONG_SECONDS = 0.1

# If the median is this many times the minimum, something other than the code was timed.
DISTURBED = 1.5

# Used if the system does not report the size of the last-level cache.
DEFAULT_CACHE_BYTES = 32 << 20

CPUS = Path("/sys/devices/system/cpu")


class Contender(Protocol):
    """One implementation with one workload's data in place."""

    @property
    def layers(self) -> int:
        """The number of calls in one run."""

    def run(self, count: int) -> list[float]:
        """Return the seconds of each of `count` runs, every call on the next copy of the keys."""


@dataclass(frozen=True)
class Calls:
    """A contender that calls a function, which returns when it is done."""

    call: Callable[[], object]
    layers: int = 1

    def run(self, count: int) -> list[float]:
        return seconds_of(self.call, count)


def seconds_of(call: Callable[[], object], count: int) -> list[float]:
    """Return the seconds of each of `count` calls, which return when they are done."""
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds


@dataclass(frozen=True)
class Timing:
    """A set of measured runs, in seconds per call."""

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
    """Return the logical processors that this process may use.

    Raises:
      SystemExit: the system is not Linux, the only one that reports them and how busy they are.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise SystemExit(f"the benchmarks need Linux, but this is {platform.system()}")
    return os.sched_getaffinity(0)


def cache_bytes(allowed: Iterable[int] | None = None, folder: Path = CPUS) -> int:
    """Return the total size of the last-level caches of the processors this process may use.

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
    """Return how many copies of `size` bytes, read in turn, are in memory and not in a cache."""
    return -(-4 * cache_bytes() // size)


def cold_copies(w: Workload) -> int:
    """Return how many copies of the KV of `w` make every call read its keys from memory."""
    return copies_of(kv_bytes(w))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(cpus())


def interleave(contenders: Mapping[str, Contender], turns: int) -> dict[str, Timing]:
    """Time every contender `turns` times, in turn."""
    # The shortest run so far: disturbed probes shorten turns only until a run is quiet.
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
    """Return how many runs of `once` seconds fill `seconds`."""
    return min(MAX_RUNS, max(1, round(seconds / once)))


def _probe(contender: Contender) -> float:
    """Return the shortest of the runs that fill a turn. The first may compile."""
    taken = contender.run(2)
    if min(taken) < LONG_SECONDS:
        taken += contender.run(PROBES - 2)
    while len(taken) < _runs(TURN_SECONDS, min(taken)):
        taken += contender.run(_runs(TURN_SECONDS, min(taken)) - len(taken))
    return min(taken)
