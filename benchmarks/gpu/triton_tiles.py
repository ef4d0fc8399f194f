"""Compile the Triton kernels' tiles without a GPU, and predict their speed.

    python -m benchmarks.gpu.triton_tiles [--sm 80 90 100]   # tables of docs/gpu-kernels.md

The model counts, for one multiprocessor, the cycles that the parts of a step take:

    load    = bytes of a tile of keys and values / what memory (decode) or L2 (prefill) gives
    matrix  = 2 rows keys (D + V) FLOP / the matrix units' rate, with D and V as padded
    shared  = (copied in + read by every warp that needs it) / 128
    chain   = max(matrix, shared) + softmax + rescaling + waiting, + widening if it is 8-bit
    trip    = (latency + load + chain) / tiles ahead
    step    = max(chain, trip, and for all programs of a multiprocessor load, matrix and shared)

    decode  = load of all programs / step, the share of the memory's read rate
    prefill = matrix of all at the fastest unit's rate / step, the share of the matrix units' peak

A tile is requested at the end of a step: with 3 stages for the very next step, which begins by
waiting for it, with 5 and 7 for the second and third. The numbers are the data sheets', and guesses
marked as such; none was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence

from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu import targets as gpu_targets
from benchmarks.gpu.cases import Case
from jattn import call as calls
from jattn.pallas.triton import launch as triton_launch
from jattn.pallas.triton import tiles as triton_tiles
from jattn.pallas.triton.tiles import Tiles

SHARED_BYTES = 128  # a cycle, of one multiprocessor
# bfloat16 FLOP a cycle of one multiprocessor: with `mma.sync`, and with the unit that tiles of 64
# rows use. From A100's data sheet; for Hopper what others measured, 62 % and all; from B200's data
# sheet, with a guess for its `mma.sync`.
MATRIX = {80: (2048, 2048), 90: (2540, 4096), 100: (2540, 8192)}
# Guesses, in cycles: from a load's issue to its data; a barrier or a wait for products; and on each
# of a multiprocessor's 128 cores, a logit through mask, exponential and sums, rescaling a number of
# an accumulator, and widening a number of 8 bits.
LATENCY, WAIT, LOGIT, RESCALE, WIDEN = 1200, 80, 14, 1, 2
L2_BYTES = 21  # a cycle of one multiprocessor: a guess, 5.5 TB/s on an H200

HEADS = gpu_cases.HEADS
FORMATS = {80: ("bfloat16", "fp8_e5m2"), 90: ("bfloat16", "fp8_e4m3"), 100: ("bfloat16",)}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The model's prediction for one kernel.

    Attributes:
      share: the share of the memory's read rate (decode) or the matrix units' peak (prefill).
      bound: the part that takes longest.
      in_flight: bytes of keys and values that one multiprocessor waits for at a time.
    """

    share: float
    bound: str
    in_flight: int


def predict(call: calls.Call, tiles: Tiles, kernel: str, gpu: gpu_targets.Gpu) -> Prediction:
    """Predict the speed of one kernel, "decode" or "prefill", on a full multiprocessor."""
    rows, keys = tiles.rows, tiles.keys
    d, v = (sum(triton_tiles.parts(size)) for size in (call.head_dim, call.value_dim))
    key, value = call.key_format, call.value_format
    loaded = keys * (key.bytes_per_token(call.head_dim) + value.bytes_per_token(call.value_dim))
    rate = L2_BYTES
    if kernel == "decode":
        rate = gpu.bandwidth * 1e9 / gpu.cores / (gpu.clock * 1e9)

    small, large = MATRIX[gpu.sm]
    flops, wide = 2 * rows * keys * (d + v), rows >= 64 and gpu.sm >= 90
    matrix, reads = flops / (large if wide else small), _reads(tiles, d, v, gpu.sm)
    if wide and gpu.sm < 100 and tiles.warps > rows // 16:
        matrix += 2 * rows * keys * d / large  # both groups of four warps compute the same logits
    shared = (loaded + reads) / SHARED_BYTES
    cores = min(128, 32 * tiles.warps)
    chain = max(matrix, shared) + rows * (keys * LOGIT + v * RESCALE) / cores + 4 * WAIT
    chain += sum(keys * n * WIDEN / cores for n, format in ((d, key), (v, value)) if format.narrow)
    ahead = max(1, (tiles.stages - 1) // 2)
    n = tiles.per_core
    bounds = {
        "memory" if kernel == "decode" else "L2": n * loaded / rate,
        "matrix units": n * matrix,
        "shared memory": n * shared,
        "one step": chain,
        "latency": (LATENCY + loaded / rate + chain) / ahead,
    }
    bound = max(bounds, key=bounds.__getitem__)
    ideal = n * loaded / rate if kernel == "decode" else n * flops / large
    return Prediction(ideal / bounds[bound], bound, n * ahead * loaded)


def _reads(tiles: Tiles, d: int, v: int, sm: int) -> int:
    """Count the bytes of shared memory that a step's products read, by Triton's layouts."""
    rows, keys = tiles.rows, tiles.keys
    if rows < 64 or sm < 90:  # mma.sync: a warp has 16 rows or more, the others have columns
        along = min(tiles.warps, rows // 16)
        return 2 * (tiles.warps // along * rows * (d + keys) + along * keys * (d + v))
    if sm >= 100:  # tcgen05: one thread issues a product for all
        return 2 * (rows * (d + keys) + keys * (d + v))
    groups = tiles.warps // 4
    if rows >= 64 * groups:  # wgmma, probabilities in registers
        return 2 * (rows * d + rows // 64 * keys * (d + v))
    # Fewer rows than groups have room for: each computes all logits, half the keys at a time.
    return 2 * (groups * (2 * rows + keys) * d + keys * v)


def rule(call: calls.Call, gpu: gpu_targets.Gpu) -> dict[str, Tiles]:
    """Return the tiles that the rule picks for a call's kernels."""
    found = triton_launch.launches(call, gpu.machine)
    return {launch.kernel: launch.tiles for launch in found if launch.kernel != "merge_splits"}


def chosen(sm: int) -> Iterator[Case]:
    """Yield calls of one query token per sequence, and mixed ones, for every size and format."""
    for format in FORMATS[sm]:
        for head in HEADS:
            for kind in ("decode", "mixed"):
                yield Case(head, kind, format=format)


def said(case: Case, gpu: gpu_targets.Gpu) -> list[str]:
    """Return the cells of a row that come from rule and model, not from the compiler."""
    kernel = "decode" if case.kind == "decode" else "prefill"
    call = case.call()
    tiles = rule(call, gpu)[kernel]
    found = predict(call, tiles, kernel, gpu)
    cells = (
        *(kernel, f"{case.head[0]} / {case.head[1]}", case.format),
        *(f"{tiles.rows} x {tiles.keys}", tiles.warps, tiles.stages),
        *(f"{found.in_flight:,}", f"{found.share:.0%}, {found.bound}"),
    )
    return list(map(str, cells))


def table(sm: int) -> Iterator[str]:
    """Compile every kernel, and yield the lines of one GPU's table."""
    from benchmarks.gpu import report as gpu_report

    titles = ("kernel", "D / V", "cache", "rows x keys", "warps", "stages", "registers", "spills")
    titles += ("shared", "fit", "in flight", "model")
    yield from gpu_report.markdown(titles)
    for case in chosen(sm):
        fn, (given,) = case.function()
        cells = said(case, gpu_targets.GPUS[sm])
        kernels = gpu_report.report(fn, given, sm=sm, xla=False)
        (k,) = (kernel for kernel in kernels if kernel.name == cells[0])
        used = (k.registers, k.spill_bytes, f"{k.shared:,}", k.blocks_per_core)
        yield gpu_report.line((*cells[:6], *used, *cells[6:]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.triton_tiles")
    parser.add_argument("--sm", nargs="+", type=int, choices=tuple(FORMATS), default=[80, 90, 100])
    for sm in parser.parse_args(arguments).sm:
        print(f"\n{gpu_targets.GPUS[sm].kind}, sm_{sm}\n")
        for line in table(sm):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
