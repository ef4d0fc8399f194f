"""Measure how fast all cores read runs of a pool in random order, doing nothing else.

    python -m benchmarks.cpu.random_reads

A block of a KV head is a run: contiguous bytes, anywhere in the pool. Every core reads different
runs, with each line prefetched, over a pool in huge pages several times as large as the last-level
cache. Several prefetch distances and one to eight interleaved runs are tried; the shortest median
counts, since medians of decode are compared with it. The loop is C++ (`random_reads.cc`), compiled
for this machine when it is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks import ceilings, timing
from benchmarks.cpu import loops
from jattn.cpu.native import build

RUNS = tuple(2**n << 10 for n in range(1, 9))  # bytes: 2 KiB to 256 KiB
LINE = 64
AHEAD = (0, 64, 512)  # lines
STREAMS = (1, 2, 4, 8)  # of interleaved runs


class Reader:
    """A pool in huge pages, and the loop that reads runs of it on every core."""

    def __init__(self, read: ctypes._CFuncPtr, memory: mmap.mmap):
        self._read = read
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._pool = np.frombuffer(memory, np.uint8)
        self._pool[:] = 1

    def rate(self, run: int, repeats: int = 5) -> float | None:
        """Return the bytes per second of the variant with the shortest median; `run` is in bytes.

        None if the pool has too few runs for all cores.
        """
        cores, address = timing.num_cores(), self._pool.ctypes.data
        most = len(self._pool) // run
        count = most // cores // max(STREAMS) * max(STREAMS)
        if not count:
            return None
        order = np.random.default_rng(0).permutation(most)[: count * cores].astype(np.int64) * run
        parts = list(order.reshape(cores, count))
        variants = list(itertools.product(AHEAD, STREAMS))
        taken: list[list[float]] = []
        with ThreadPoolExecutor(cores) as pool:

            def read(ahead: int, streams: int) -> None:
                def call(starts: np.ndarray) -> int:  # ctypes lets other threads run
                    return self._read(
                        address, starts.ctypes.data, count, run // LINE, ahead, streams
                    )

                list(pool.map(call, parts))

            for turn in range(repeats + 1):
                seconds = [timing.seconds_of(lambda v=v: read(*v), 1)[0] for v in variants]
                if turn:  # the threads start with the first one
                    taken.append(seconds)
        return count * cores * run / float(np.median(taken, axis=0).min())


def default_pool_bytes() -> int:
    """Return the size of the pool on this machine."""
    shared = timing.num_cores() * max(STREAMS) * max(RUNS)
    return max(4 * timing.cache_bytes(), 256 << 20, shared)


@contextlib.contextmanager
def reader(pool_bytes: int | None = None) -> Iterator[Reader | None]:
    """Open a reader; None without a C++ compiler.

    Args:
      pool_bytes: the pool's size; None: four times the last-level caches, but at least 256 MiB, and
        at least one longest run per stream for every core.
    """
    try:
        read = _loop()
    except (build.BuildError, OSError):
        yield None
        return
    size = pool_bytes or default_pool_bytes()
    # Shared memory, a map's default, is not put into huge pages.
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        made = Reader(read, memory)
        try:
            yield made
        finally:
            del made._pool  # a map with views cannot be closed


@functools.cache
def _loop() -> ctypes._CFuncPtr:
    """Return the compiled function.

    Raises:
      build.BuildError: there is no compiler, or it failed.
      OSError: the compiler cannot be started.
    """
    function = loops.compiled(Path(__file__).with_suffix(".cc")).read_runs
    function.restype = ctypes.c_uint64
    function.argtypes = (
        *(ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
    )
    return function


def main() -> None:
    """Print the table."""
    sequential = ceilings.read_rate()
    print(f"in order, at best: {sequential / 1e9:.1f} GB/s; medians of random runs:")
    with reader() as reads:
        if reads is None:
            raise SystemExit("there is no C++ compiler")
        for run in RUNS:
            print(f"runs of {run >> 10:>3} KiB: {(reads.rate(run) or 0) / 1e9:5.1f} GB/s")


if __name__ == "__main__":
    main()
