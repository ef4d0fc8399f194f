"""The tables of Mosaic's tiles in docs/gpu-kernels.md against rule and model; nothing compiles."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from benchmarks.gpu import mosaic_decode, mosaic_prefill
from benchmarks.gpu.cases import Case
from jattn import call as calls
from jattn.pallas.mosaic_gpu import fragments, scratch
from jattn.pallas.mosaic_gpu.decode import tiles as decode_tiles
from jattn.pallas.mosaic_gpu.prefill import tiles as prefill_tiles
from jattn.pallas.triton import needs

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "gpu-kernels.md"


def table(title: str) -> list[list[str]]:
    """Return the cells of the table whose header begins with a title."""
    text = DOCS.read_text().split(f"\n| {title}", 1)[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def test_the_decode_table_follows_the_rule():
    """Except for registers, which the compiler chooses."""
    cases = mosaic_decode.configurations()
    found = {tuple(mosaic_decode.said(mosaic_decode.tiles_of(case))) for case in cases}
    rows = table("D | V | bytes")
    listed = [(*row[:7], *row[9:]) for row in rows]
    # Sorted by head size, bytes, R, and blocks per multiprocessor.
    assert listed == sorted(found, key=lambda cells: tuple(map(int, (*cells[:4], cells[6]))))
    assert {row[8] for row in rows} == {"0"}


def test_tiles_of_decode_fit_every_size_that_the_row_takes():
    """With any number of rows that a group and query tokens give."""
    for head_dim, value_dim, stored in itertools.product(
        range(64, 577, 16), range(64, 513, 16), ("bfloat16", "fp8_e4m3")
    ):
        format = jattn.Dense(stored) if stored == "bfloat16" else jattn.Fp8("e4m3")
        size = format.word_dtype.itemsize
        if decode_tiles.chunk_of(head_dim, value_dim, size) is None:
            continue  # the row refuses it
        for group, span in ((1, 1), (16, 1), (4, 4), (8, 8)):
            call = types.SimpleNamespace(
                group=group,
                key_format=format,
                head_dim=head_dim,
                value_dim=value_dim,
                max_query_len=span,
                block_size=16,
                options=(),
            )
            tiles = decode_tiles.pick(call, span)
            assert tiles.shared_bytes <= scratch.MOST_BYTES, (head_dim, value_dim, stored, group)


@pytest.mark.parametrize(
    ("layout", "size", "taken"), [("HND", 2**20, 0), ("HND", 2**19, 1), ("NHD", 2**20, 1)]
)
def test_heads_of_a_block_that_begin_past_int32(layout, size, taken):
    cache = jax.ShapeDtypeStruct((1, 17, size, 128), jnp.bfloat16)
    if layout == "NHD":
        cache = jax.ShapeDtypeStruct((1, size, 17, 128), jnp.bfloat16)
    call = calls.describe_call(
        calls.Arguments(
            *(jax.ShapeDtypeStruct((1, 17, 128), jnp.bfloat16), cache, cache),
            block_tables=jax.ShapeDtypeStruct((1, 1), jnp.int32),
            seq_lens=jax.ShapeDtypeStruct((1,), jnp.int32),
            kv_layout=layout,
        )
    )
    assert bool(taken) == (not needs.refuses(call))


def test_an_empty_row_with_a_sink_of_minus_infinity_is_empty():
    """As on devices that hold no keys of a sequence and not its sink."""
    m, l = jnp.asarray([-np.inf, 2.0, -np.inf]), jnp.asarray([0.0, 4.0, 0.0])
    sink = jnp.asarray([-np.inf, -np.inf, 1.5])
    factor, lse = fragments.finish(m, l, sink)
    np.testing.assert_allclose(factor, [0.0, 0.25, 0.0], rtol=2.0**-21)  # that of `reciprocal`
    rounded = 4 * np.finfo(np.float32).eps
    np.testing.assert_allclose(lse, [-np.inf, np.log(16.0), 1.5 * np.log(2.0)], rtol=rounded)


def test_the_prefill_table_is_what_the_command_prints():
    assert "\n\n" + "\n".join(mosaic_prefill.table()) + "\n\n" in DOCS.read_text()


def tiles(head: tuple[int, int], format: str = "bfloat16", **changes) -> prefill_tiles.Tiles:
    call = Case(head, "mixed", format=format, implementation="mosaic_gpu").call()
    return dataclasses.replace(prefill_tiles.choose(call), **changes)


def test_the_model_of_prefill_by_hand():
    """Cycles of shared memory, from bytes, and of products."""
    # 128 rows, 64 keys: keys and values in, out again for each warpgroup, and queries out.
    shared = (64 * 320 * 2 + 2 * 64 * 320 * 2 + 128 * 192 * 2) / 128
    assert mosaic_prefill.predict(tiles((192, 128))) == 128 * 64 * 320 * 2 / 4096 / shared
    # fp8: for each number, one byte in and out, and two in again.
    shared = (64 * 320 * 4 + 2 * 64 * 320 * 2 + 128 * 192 * 2) / 128
    assert mosaic_prefill.predict(tiles((192, 128), "fp8_e4m3")) == 1280 / shared
    # 64 rows, 32 keys: keys and values in and out once, queries out, weights in and twice out.
    shared = (2 * 32 * 1024 * 2 + 64 * 512 * 2 + 3 * 64 * 32 * 2) / 128
    assert mosaic_prefill.predict(tiles((512, 512))) == 1024 / shared


def test_what_the_page_says_of_other_tiles_and_of_registers():
    page = " ".join(DOCS.read_text().split())
    others = tiles((512, 512), block_kv=64), tiles((192, 192), "fp8_e4m3", block_kv=128, stages=1)
    for changed in others:
        assert f"(model {mosaic_prefill.predict(changed):.0%})" in page
    consumer, producer = prefill_tiles.REGISTERS
    assert f"{(2 * consumer + producer) // 3} registers a thread at launch ({consumer} for" in page
