"""Measure how fast all cores multiply and add in registers, and the share that prefill reaches.

    python -m benchmarks.cpu.arithmetic_peak [--filter REGEX] [--repeat N] [--json FILE]

The loop is C++ (`arithmetic_peak.cc`), compiled for this machine: float32 with the widest vectors,
and pairs of bfloat16 if one instruction multiplies them (AVX-512 BF16; the loop leaves out matrix
units). A matrix product also reads memory, so `jax.numpy.dot` stays below the loop. The workloads
are the prefills of `benchmarks.cpu.sdpa`, and the columns those of `benchmarks.cpu`, where `of
ceiling` is the share of the loop's rate.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import ceilings, oracle, timing
from benchmarks.cpu import loops, report, sdpa
from benchmarks.cpu.__main__ import measure
from benchmarks.machine import run_record
from benchmarks.neighbours import Neighbours
from benchmarks.options import add_json, positive
from benchmarks.serving.records import append
from benchmarks.workloads import ITEM_BYTES
from jattn.cpu.native import build

STEPS = 10**6


@functools.cache
def _loop() -> ctypes.CDLL:
    library = loops.compiled(Path(__file__).with_suffix(".cc"))
    library.operations_of_a_step.restype = ctypes.c_int64
    library.operations_of_a_step.argtypes = (ctypes.c_int,)
    library.multiply_and_add.restype = ctypes.c_float
    library.multiply_and_add.argtypes = (ctypes.c_int64, ctypes.c_int)
    return library


def rate(dtype: str, steps: int = STEPS, repeats: int = 9) -> float | None:
    """Return the loop's operations per second on all cores; None if no instruction has the dtype.

    Raises:
      build.BuildError, OSError: as `loops.compiled`.
    """
    library, bfloat16 = _loop(), dtype == "bfloat16"
    operations = library.operations_of_a_step(bfloat16) * steps * timing.num_cores()
    if not operations:
        return None

    def all_cores(pool: ThreadPoolExecutor) -> None:  # ctypes lets other threads run
        calls = [steps] * timing.num_cores()
        list(pool.map(lambda each: library.multiply_and_add(each, bfloat16), calls))

    with ThreadPoolExecutor(timing.num_cores()) as pool:
        return operations / ceilings.best_seconds(lambda: all_cores(pool), repeats)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.arithmetic_peak", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--filter", default="", metavar="REGEX", help="only matching workloads")
    parser.add_argument(
        "--repeat", type=positive, default=9, metavar="N", help="turns (%(default)s)"
    )
    add_json(parser)
    args = parser.parse_args(arguments)
    chosen = sdpa.prefills(args.filter)
    if not chosen:
        print(f"no workload matches {args.filter!r}", file=sys.stderr)
        return 2
    try:
        found = {dtype: rate(dtype) for dtype in ITEM_BYTES}
    except (build.BuildError, OSError) as error:
        print(f"the loop cannot be compiled: {error}", file=sys.stderr)
        return 1
    loop = {dtype: peak for dtype, peak in found.items() if peak is not None}
    dot = {dtype: ceilings.matrix_rate(dtype) for dtype in loop}
    append(args.json, run_record(loop=loop, dot=dot))
    for dtype, peak in loop.items():
        print(
            f"{dtype}: {peak / 1e9:.0f} GFLOP/s in registers, of which jax.numpy.dot reaches "
            f"{dot[dtype] / peak:.0%}"
        )
    print(f"\n{report.HEADER}", flush=True)
    limits = ceilings.Ceilings(ceilings.read_rate(), loop)
    neighbours = Neighbours([], patience=0)
    for w in chosen:
        if w.dtype not in loop:
            continue
        try:
            row = measure(w, limits=limits, peer=None, neighbours=neighbours, turns=args.repeat)
        except oracle.WrongResultError as error:
            print(f"{w.name}: not timed: {error}", file=sys.stderr)
            return 1
        append(args.json, row.as_json())
        print(row.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
