"""Compile every configuration of Mosaic GPU decode without a GPU, and predict its speed.

    python -m benchmarks.gpu.mosaic_decode            # the table of docs/gpu-kernels.md
    python -m benchmarks.gpu.report benchmarks/gpu/mosaic_decode.py:cases

The model counts, for one multiprocessor and one tile of 64 keys, the cycles for reading K and V
from memory, those of shared memory, and those of the one warpgroup that computes:

    memory    = 64 (D + V) bytes / (bandwidth / cores / clock)
    shared    = (copied in + read as A + read as B [+ fp8: read, written widened]) / 128
    consumer  = A and B read + softmax + rescaling [+ fp8: widening] + waiting
    predicted = memory / max(memory, shared, consumer / blocks on a multiprocessor)

Its numbers are the data sheet's, and guesses marked as such; none of it was measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.cases import FORMATS, Case
from jattn.pallas.mosaic_gpu.decode import tiles as tiling

# H200: the copy bandwidth seen on one (read and write), its multiprocessors and highest clock.
BANDWIDTH, CORES, CLOCK = 4.3e12, 132, 1.98e9
SHARED_BYTES = 128  # per cycle
# Guesses, in cycles: a wait for products or a barrier; a logit through mask, exponential and
# stores; widening 64 rows of one column of fp8, spread over a multiprocessor.
WAIT, LOGIT, WIDEN = 80, 14, 1.0

HEADS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
HEADS = (*HEADS, (512, 512), (576, 512))
# Every mask and bias.
EVERYTHING = (
    "is_causal_per_sequence",
    "sliding_window",
    "logits_soft_cap",
    "sinks",
    "alibi_slopes",
)


def configuration(
    head: tuple[int, int],
    format: str,
    group: int,
    block_size: int,
    kv_layout: str,
    everything: bool,
    num_blocks: int = 64,
) -> Case:
    """Make a call from all that the kernel's code depends on; fp8 gets a bfloat16 query."""
    return Case(
        head,
        "decode",
        query_dtype="float16" if format == "float16" else "bfloat16",
        format=format,
        options=EVERYTHING if everything else (),
        block_size=block_size,
        kv_layout=kv_layout,
        heads=(group, 1),
        num_blocks=num_blocks,
        implementation="mosaic_gpu",
    )


def tiles_of(case: Case) -> tiling.DecodeTiles:
    """Return the tiles that dispatch picks."""
    return tiling.pick(case.call(), 1)


def configurations(thorough: bool = False) -> Iterator[Case]:
    """Yield the cases that dispatch distinguishes.

    They differ in head, element size, rows, kernel block, layout and options.

    bfloat16 and float16 are the same code except for the names of instructions, and so are the two
    fp8, so they alternate. Unless `thorough`, kernel blocks and options have only two combinations:
    8 tokens with every option and 64 with none.
    """
    ends = [(8, True), (64, False)]
    if thorough:
        ends = [(size, all_) for size in (8, 16, 32, 64) for all_ in (False, True)]
    turn = 0
    for head in HEADS:
        for formats in (("bfloat16", "float16"), ("fp8_e4m3", "fp8_e5m2")):
            if tiling.chunk_of(*head, FORMATS[formats[0]].word_dtype.itemsize) is None:
                continue
            seen = set()
            for group in (8, 16, 32, *((64,) if thorough else ())):
                first = configuration(head, formats[0], group, 16, "HND", everything=False)
                rows = tiles_of(first).row_block
                if rows in seen:
                    continue
                seen.add(rows)
                for size, everything in ends:
                    turn += 1
                    layout = ("HND", "NHD")[turn // 2 % 2]
                    format = formats[turn % 2]
                    yield configuration(head, format, group, size, layout, everything)


def cases() -> list[tuple[str, Callable, tuple[Any, ...]]]:
    """Return the cases for `benchmarks.gpu.report`."""
    return [(case.label, *case.function()) for case in configurations(thorough=True)]


def predict(tile: tiling.DecodeTiles) -> tuple[float, str]:
    """Predict the share of the memory's read rate, and what bounds it."""
    columns, rows = tile.head_dim + tile.value_dim, tile.rows
    stored = tiling.TILE * columns * tile.stored_bytes
    memory = stored / (BANDWIDTH / CORES / CLOCK)
    as_a = tiling.TILE * (tile.head_dim + tile.stored_rows) * 2 / SHARED_BYTES
    steps = tile.head_dim / 16 + tile.stored_rows / 64 * tiling.TILE / 16
    as_b = steps * rows * 16 * 2 / SHARED_BYTES
    widened = (stored + 2 * stored) / SHARED_BYTES if tile.stored_bytes == 1 else 0
    shared = stored / SHARED_BYTES + tile.consumers * (as_a + as_b) + widened
    consumer = as_a + as_b + tiling.TILE * rows / 128 * LOGIT
    consumer += 2 * tile.stored_rows * rows / 128 + WAIT * (3 + tile.value_chunks)
    if tile.stored_bytes == 1:
        consumer += widened + WIDEN * columns + WAIT * (tile.key_chunks + tile.value_chunks)
    bounds = {"memory": memory, "shared": shared, "consumer": consumer / tile.blocks_per_core}
    bound = max(bounds, key=bounds.get)
    return memory / bounds[bound], bound


def said(tile: tiling.DecodeTiles) -> list[str]:
    """Return the cells of a row that come from rule and model, not from a compiler."""
    share, bound = predict(tile)
    cells = (
        *(tile.head_dim, tile.value_dim, tile.stored_bytes, tile.row_block),
        *(tile.chunk, tile.ring, tile.blocks_per_core),
        *(tile.shared_bytes, f"{share:.0%}, {bound}"),
    )
    return list(map(str, cells))


def main() -> int:
    """Print the table, with the worst of each configuration's variants; return 1 on spills."""
    from benchmarks.gpu import report as gpu_report

    rows: dict[tuple, list] = {}
    for case in configurations():
        tile = tiles_of(case)
        fn, arguments = case.function()
        kernels = gpu_report.report(fn, *arguments, sm=90)
        kernel = max((k for k in kernels if k.kind == "mosaic"), key=lambda k: k.shared)
        key = (case.head, tile.stored_bytes, tile.row_block, tile.blocks_per_core)
        rows.setdefault(key, []).append((tile, kernel))
        counts = (kernel.registers, kernel.spill_bytes)
        print(case.label, *counts, file=sys.stderr, flush=True)
    titles = ("D", "V", "bytes", "R", "columns", "ring", "blocks", "registers", "spills", "shared")
    print("\n".join(gpu_report.markdown((*titles, "predicted"))))
    spills = 0
    for _, found in sorted(rows.items(), key=lambda row: row[0]):
        cells = said(found[0][0])
        registers = max(kernel.registers for *_, kernel in found)
        spilled = max(kernel.spill_bytes for *_, kernel in found)
        assert {str(kernel.shared) for *_, kernel in found} == {cells[7]}, cells
        spills += spilled
        print(gpu_report.line((*cells[:7], registers, spilled, *cells[7:])))
    return int(spills > 0)


if __name__ == "__main__":
    sys.exit(main())
