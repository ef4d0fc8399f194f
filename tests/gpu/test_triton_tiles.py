"""The sizes of the Triton kernels' tiles: they cover every call and fit every GPU."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

import jattn
from benchmarks.gpu import shared_memory
from jattn import call as calls
from jattn.pallas import capability_rows as gpu_rows
from jattn.pallas import machine
from jattn.pallas.triton import launch as triton_launch
from jattn.pallas.triton import tiles as triton_tiles
from tests.support import problems


def test_parts_hold_every_head_size():
    for size in range(1, 577):
        first, second = triton_tiles.parts(size)
        assert first + second >= size
        assert first + second < 2 * max(size, 32)
        for part in (first, second):
            assert part & (part - 1) == 0
    assert triton_tiles.parts(576) == (512, 64)
    assert triton_tiles.parts(512) == (512, 0)
    assert triton_tiles.parts(80) == (64, 32)


@pytest.mark.parametrize("sm", [86, pytest.param(89, marks=pytest.mark.extended), 120])
def test_tiles_fit_where_a_block_has_99_kib(sm):
    """For every head size, format, group and kind of call, with masks in turn.

    test_triton_compiled.py compares the counted shared memory with the compiler's. The largest
    tiles come near enough to the limit to need a rule.
    """
    gpu = machine.Machine(sm, 60)
    assert gpu.block_shared == 99 * machine.KIB
    call = problems.build(problems.Problem(query_lens=(1, 12), seq_lens=(40, 17))).call()[0]
    largest = 0
    masks = itertools.cycle(
        [{}, {"bias_columns": 257}, {"tree_words": 2, "bias_columns": 257}, {"num_selected": 9}, {}]
    )
    for dtype, format in itertools.product(
        ("float32", "bfloat16", "float16"),
        (problems.FORMATS[f] for f in gpu_rows.TRITON.formats),
    ):
        for size, group, queries in itertools.product(
            (*range(16, 577, 16), 80, 576), (1, 8, 32, 128), (1, 4, 100)
        ):
            changed = dataclasses.replace(
                call, head_dim=size, value_dim=min(size, 512), num_heads=2 * group,
                num_kv_heads=2, query_dtype=dtype, key_format=format, value_format=format,
                max_query_len=queries, **next(masks),
            )  # fmt: skip
            for tiles in (
                triton_tiles.decode_tiles(changed, gpu),
                triton_tiles.prefill_tiles(changed, gpu),
            ):
                needed = shared_memory.shared_bytes(changed, tiles)
                assert needed <= gpu.block_shared, (dtype, format.name, size, group, tiles)
                largest = max(largest, needed)
    assert largest > 60 * machine.KIB


def test_every_line_of_the_tables_is_used():
    """A line hidden by an earlier one would be a rule that no call uses."""
    widths = (16, 64, 96, 128, 160, 192, 256, 288, 512, 576)
    facts = [
        *itertools.product(triton_tiles.Arch, triton_tiles.ProductOperands, widths, (16, 32, 64))
    ]
    for table in (triton_tiles.DECODE, triton_tiles.PREFILL):
        taken = {next(i for i, rule in enumerate(table) if rule.fits(*f)) for f in facts}
        assert taken == set(range(len(table)))


def test_nvfp4_has_32_keys_or_more():
    """With 16 keys, Triton 3.6 adds every key's value twice, as executing its PTX showed."""
    call = problems.build(problems.Problem(query_lens=(1, 12), seq_lens=(40, 17))).call()[0]
    in_16_bits = 0
    for sm, dtype, keys, size, group in itertools.product(
        (80, 86, 90, 100, 120), calls.QUERY_DTYPES, problems.FORMATS.values(),
        (16, 64, 80, 128, 192, 256, 288, 512, 576), (1, 32, 64),
    ):  # fmt: skip
        gpu = machine.Machine(sm, 100)
        changed = dataclasses.replace(
            call, head_dim=size, value_dim=min(size, 512), num_heads=2 * group, num_kv_heads=2,
            query_dtype=dtype, key_format=keys, value_format=jattn.Nvfp4(), max_query_len=1,
        )  # fmt: skip
        assert min(triton_tiles.parts_of(changed, gpu, size)[0], 32) == 32
        if triton_tiles.dot_dtypes(changed)[1] == "float32":
            continue  # without tensor cores
        in_16_bits += 1
        for pick in (triton_tiles.decode_tiles, triton_tiles.prefill_tiles):
            assert pick(changed, gpu).keys >= 32, (sm, dtype, keys, size, group)
    assert in_16_bits


def test_new_shapes_share_kernels():
    """Batch, tokens, table width and pool size are arguments of a kernel, never constants."""

    gpu = machine.Machine(sm=90, cores=7)

    def constants(**sizes):
        problem = problems.Problem(query_lens=(1, 12), seq_lens=(40, 17), frame=(24, 4, 5, 16))
        call = problems.build(problem).call()[0]
        call = dataclasses.replace(call, **sizes)
        return [launch.constants for launch in triton_launch.launches(call, gpu)]

    assert constants() == constants(num_tokens=40, num_seqs=9, table_width=70, num_blocks=999)
    assert constants() != constants(head_dim=64)


def test_the_row_is_in_the_table():
    assert "triton" in jattn.support_table()
