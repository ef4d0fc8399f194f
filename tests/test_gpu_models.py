"""The tables of Mosaic's tiles in docs/gpu-kernels.md against rule and model; none compiles."""

from __future__ import annotations

import dataclasses
import pathlib

from benchmarks.gpu import mosaic_decode, mosaic_prefill
from benchmarks.gpu.cases import Case
from jattn.pallas.mosaic_gpu.prefill import tiles as prefill_tiles

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "gpu-kernels.md"


def table(title: str) -> list[list[str]]:
    """The cells of the table whose head begins with a title."""
    text = DOCS.read_text().split(f"\n| {title}", 1)[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def test_the_decode_table_is_the_rule_s():
    """Registers are the compiler's."""
    cases = mosaic_decode.configurations()
    found = {tuple(mosaic_decode.said(mosaic_decode.tiles_of(case))) for case in cases}
    rows = table("D | V | bytes")
    listed = [(*row[:7], *row[9:]) for row in rows]
    # By head, bytes, R, and blocks of a multiprocessor.
    assert listed == sorted(found, key=lambda cells: tuple(map(int, (*cells[:4], cells[6]))))
    assert {row[8] for row in rows} == {"0"}


def test_the_prefill_table_is_what_the_command_prints():
    assert "\n\n" + "\n".join(mosaic_prefill.table()) + "\n\n" in DOCS.read_text()


def tiles(head: tuple[int, int], format: str = "bfloat16", **changes) -> prefill_tiles.Tiles:
    call = Case(head, "mixed", format=format, implementation="mosaic_gpu").call()
    return dataclasses.replace(prefill_tiles.choose(call), **changes)


def test_the_model_of_prefill_by_hand():
    """The cycles of shared memory, in bytes, and of products."""
    # 128 rows, 64 keys: keys and values in, for each warpgroup out again, and its queries.
    shared = (64 * 320 * 2 + 2 * 64 * 320 * 2 + 128 * 192 * 2) / 128
    assert mosaic_prefill.predict(tiles((192, 128))) == 128 * 64 * 320 * 2 / 4096 / shared
    # fp8: one byte in and out and two in again, for each number.
    shared = (64 * 320 * 4 + 2 * 64 * 320 * 2 + 128 * 192 * 2) / 128
    assert mosaic_prefill.predict(tiles((192, 128), "fp8_e4m3")) == 1280 / shared
    # 64 rows, 32 keys: keys and values in and out once, queries, and weights in and twice out.
    shared = (2 * 32 * 1024 * 2 + 64 * 512 * 2 + 3 * 64 * 32 * 2) / 128
    assert mosaic_prefill.predict(tiles((512, 512))) == 1024 / shared


def test_what_the_page_says_of_other_tiles_and_of_registers():
    page = " ".join(DOCS.read_text().split())
    others = tiles((512, 512), block_kv=64), tiles((192, 192), "fp8_e4m3", block_kv=128, stages=1)
    for changed in others:
        assert f"(model {mosaic_prefill.predict(changed):.0%})" in page
    consumer, producer = prefill_tiles.REGISTERS
    assert f"{(2 * consumer + producer) // 3} registers a thread at launch ({consumer} for" in page
