"""Print the tiles of Mosaic GPU prefill and predict their speed, without a GPU.

    python -m benchmarks.gpu.mosaic_prefill           # the table of docs/gpu-kernels.md

Nothing is compiled here: `tests/gpu/test_mosaic_prefill.py` does that, and checks that the
compiler uses exactly this shared memory and spills nothing.

The model counts, for one multiprocessor and one tile of n keys, the cycles that the products of a
grid block take and those of shared memory. A block has R rows: 128, or 64 where its two warpgroups
split the columns of V (`jattn.pallas.mosaic_gpu.prefill.wide`).

    products  = 2 R n (D + V) FLOP / 4096
    shared    = (copied in + read as A + read as B [+ fp8: read, written widened]) / 128
    copied in = n (D + V) stored bytes
    read as A = 2 R D bytes, the queries; where columns are split 6 R n more, for weights that are
                written once and read by both warpgroups, else they stay in registers
    read as B = 2 n (D + V) bytes, twice: each warpgroup reads all keys and values; once where
                columns are split, as a tile's keys are one warpgroup's and its values one half's
    widened   = n (D + V) bytes read, 2 n (D + V) written
    predicted = products / max(products, shared), the share of the tensor cores' peak

It ignores softmax, barriers, L2, causal edges and the first fill of the ring, so it shows which
tiles cannot reach their target, not that the others do. Its rates are the data sheet's; none of it
was measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu import report as gpu_report
from benchmarks.gpu.cases import EVERYTHING, FORMATS, Case
from benchmarks.gpu.mosaic_decode import HEADS, SHARED_BYTES
from jattn.pallas.mosaic_gpu.decode import tiles as decode_tiles
from jattn.pallas.mosaic_gpu.prefill import tiles as tiling

FLOP = 4096  # a cycle of one multiprocessor's tensor cores, 16-bit operands


def configurations() -> Iterator[Case]:
    """Yield a mixture for every head size, with all options; fp8 where both kernels take it."""
    for format in ("bfloat16", "fp8_e4m3"):
        for head in sorted(HEADS):
            case = Case(
                head,
                "mixed",
                format=format,
                options=EVERYTHING,
                num_blocks=64,
                implementation="mosaic_gpu",
            )
            stored = FORMATS[format].word_dtype.itemsize
            if decode_tiles.chunk_of(*head, stored) and not tiling.refusals(case.call()):
                yield case


def predict(tiles: tiling.Tiles) -> float:
    """Predict the share of the tensor cores' peak."""
    keys, rows = tiles.block_kv, tiling.ROWS * (1 if tiles.wide else 2)
    elements = keys * (tiles.head_dim + tiles.value_dim)
    products = 2 * rows * elements / FLOP
    copied = elements * tiles.stored_bytes
    as_a = 2 * rows * tiles.head_dim + (6 * rows * keys if tiles.wide else 0)
    as_b = 2 * elements * (1 if tiles.wide else 2)
    widened = 3 * elements if tiles.stored_bytes == 1 else 0
    return products / max(products, (copied + as_a + as_b + widened) / SHARED_BYTES)


def table() -> Iterator[str]:
    """Yield the lines of the page's table."""
    titles = ("D / V", "cache", "keys of a tile x stages", "blocks of a cluster")
    yield from gpu_report.markdown((*titles, "shared memory, bytes", "model"))
    for case in configurations():
        call = case.call()
        tiles = tiling.choose(call)
        cells = (
            *(f"{case.head[0]} / {case.head[1]}", case.format),
            *(f"{tiles.block_kv} x {tiles.stages}", tiles.units if tiles.wide else 1),
            *(f"{tiling.shared_bytes(tiles, call):,}", f"{predict(tiles):.0%}"),
        )
        yield gpu_report.line(cells)


if __name__ == "__main__":
    print("\n".join(table()))
