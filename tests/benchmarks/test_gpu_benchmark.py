"""The GPU benchmark, without a GPU: workloads, floors, rows, timing loops, checks of results."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import data as gpu_data
from benchmarks.gpu import readers as gpu_readers
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import rows as gpu_rows
from benchmarks.gpu import targets as gpu_targets
from benchmarks.gpu import timing as gpu_timing
from benchmarks.gpu import workloads as gpu_workloads
from benchmarks.workloads import flops
from jattn.pallas import machine
from tests.support import ptx, ptx_kernels


def test_batches():
    assert gpu_workloads.parse_batch("q2k_3q4s2051") == ((2048, 4, 4, 4), (2048, *(2051,) * 3))
    with pytest.raises(ValueError, match="'x7' is not"):
        gpu_workloads.parse_batch("q1s8_x7")


def test_the_suite_is_the_published_one():
    """Bytes and FLOPs of some rows match those computed by hand."""
    suite = gpu_workloads.suite()
    assert len(suite) == 34
    assert len({w.name for w in suite}) == 34
    w = gpu_workloads.workload("llama-8b", "q8k")
    assert round(flops(w) / 1e9, 1) == 549.8
    assert round(gpu_workloads.moved_bytes(w) / 1e6, 1) == 167.8
    w = gpu_workloads.workload("gemma4-31b", "64q1s8k")
    assert round(flops(w) / 1e9, 1) == 34.4
    assert round(gpu_workloads.moved_bytes(w) / 1e6, 1) == 4299.2
    seconds, bound = gpu_workloads.floor(w, 4.3e12, 790e12)
    assert (round(seconds * 1e6, 1), bound) == (999.8, "read")
    assert gpu_workloads.floor(gpu_workloads.workload("gemma4-31b", "q8k"), 4.3e12, 790e12)[1] == (
        "matrix"
    )


def test_a_row():
    w = gpu_workloads.workload("gemma4-31b", "64q1s8k")
    limits = gpu_rows.Ceilings(4.3e12, 790e12)
    row = gpu_rows.make_row(w, "triton", [1.1e-3, 1.2e-3, 1.3e-3], limits)
    assert row.median == pytest.approx(1.2e-3)
    assert row.share == pytest.approx(999.8e-6 / 1.2e-3, rel=1e-3)
    assert row.bound == "read"
    assert len(row.line()) <= len(gpu.HEADER) + 8


SMALL = gpu_workloads.workload("gpt-oss-window", "q20s300_q1s150")


def small_data() -> gpu_data.Data:
    return gpu_data.make_data(SMALL, 2**10)


@pytest.mark.extended
def test_results_are_checked():
    """The right output passes; a scaled one, NaN and the output of another table do not."""
    data = small_data()
    first, other = (gpu_data.expected_rows(SMALL, data, t) for t in np.asarray(data.tables[:2]))
    rows = np.asarray(gpu_data.sampled_tokens(SMALL))
    out = np.asarray(gpu.attend(SMALL, data, None, data.tables[0])[rows]).astype(np.float32)
    assert not gpu_data.wrong_rows(SMALL, first, out)
    assert gpu_data.wrong_rows(SMALL, first, out * 1.05)
    assert gpu_data.wrong_rows(SMALL, other, out)
    assert gpu_data.wrong_rows(SMALL, first, np.full_like(out, np.nan))


@pytest.mark.extended
def test_a_measured_row():
    data, limits = small_data(), gpu_rows.Ceilings(1e10, 1e11)
    want = gpu_data.expected_rows(SMALL, data, np.asarray(data.tables[0]))
    found = gpu.measure(SMALL, "xla", data, limits, want)
    assert isinstance(found, gpu_rows.Row)
    assert found.median > 0
    assert "it runs on gpu" in gpu.measure(SMALL, "triton", data, limits, want)
    assert gpu.measure(SMALL, "xla", data, limits, want + 1).startswith("WRONG")


def test_time_loop_runs_every_table():
    seen = []

    def step(scale, table):
        jax.debug.callback(lambda t: seen.append(int(t)), table)
        return scale * table.astype(jnp.float32)

    tables = jnp.arange(3, dtype=jnp.int32)
    times = gpu_timing.time_loop(step, jnp.ones((2,), jnp.float32), tables, turns=2)
    jax.effects_barrier()
    assert len(times) == 2
    assert sorted(seen) == sorted([0, 1, 2] * 3)


def test_a_chain_runs_one_copy_after_another():
    seen = []

    def step(query, scale, copy):
        jax.debug.callback(lambda q, c: seen.append((int(q[0]), int(c))), query, copy)
        return query + scale

    chain = jax.jit(gpu_timing.chain_of(step))
    copies = [jnp.int32(c) for c in range(3)]
    ones = jnp.ones((2,), jnp.float32)
    assert len(gpu_timing.time_chain(chain, ones, ones[0], copies, turns=2, repeats=2)) == 2
    jax.effects_barrier()
    assert sorted(seen) == sorted([(1 + i, i % 3) for i in range(6)] * 3)
    with pytest.raises(AssertionError, match="no query of the next step"):
        gpu_timing.chain_of(lambda query, _, copy: query[:1])(ones, None, copies)


def test_a_missing_gpu_is_reported(capsys):
    assert gpu.main(["--filter", "q1s8k"]) == 2
    assert gpu.main(["--filter", "nothing"]) == 2
    assert "not a GPU" in capsys.readouterr().err


@pytest.mark.extended
def test_dry_run(capsys):
    ptx_kernels.needs_compiler()
    assert gpu.main(["--dry-run", "--filter", "^gpt-oss-window-64q1s8k"]) == 0
    said = capsys.readouterr().out
    assert "triton: decode" in said
    assert " 0 bytes spilled" in said


def compiled_text(run, *arrays):
    device = gpu_targets.device_for(90)
    sharding = jax.sharding.SingleDeviceSharding(device)
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arrays]
    with jax.default_device(device):
        return jax.jit(run).lower(*arrays).compile().as_text()


@pytest.mark.extended
def test_the_loops_of_the_ceilings_survive_compilation():
    """XLA, compiling for a GPU, keeps the loops and what they read or multiply."""
    ptx_kernels.needs_compiler()
    words, index = jax.ShapeDtypeStruct((2, 2**20), jnp.int32), jnp.zeros((4,), jnp.int32)
    for name, reader in gpu_readers.readers(machine.Machine(90, 132)).items():
        text = compiled_text(gpu_timing.loop_of(reader), words, index)
        assert " while(" in text, name
        assert (" reduce(" if name.startswith("xla") else "triton_kernel_call_ffi") in text, name
    square = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    text = compiled_text(functools.partial(gpu_rows.products, count=4), square)
    assert " while(" in text
    assert "dot(" in text or "gemm" in text


@pytest.mark.extended
def test_readers_read_every_word():
    """Each finds the largest word of a half anywhere; Triton's runs as PTX, 16 bytes at a time."""
    words = 3 * gpu_readers.ROW
    for at in (0, words // 2 + 1, words - 1):
        numbers = np.asarray(gpu_rows.random_words(words)) >> 8
        numbers[:, at] = 2**24 + np.arange(2)
        for half in (0, 1):
            for read in (gpu_readers.xla_words, gpu_readers.xla_rows):
                assert read(numbers, jnp.int32(half)).view(jnp.int32) == 2**24 + half
            low = np.where(numbers & 0xFFFF >= 2**15, 0, numbers)
            found = gpu_readers.xla_half_words(low, jnp.int32(half)).view(jnp.int32)
            assert int(found[0]) == int(low[half].view(np.uint16).max())
    ptx_kernels.needs_compiler()
    gpu = machine.Machine(90, 2)
    sizes = (2, 1024, 4, 1)
    reader = gpu_readers.triton_reader(gpu, *sizes)
    given = jax.ShapeDtypeStruct((2, words), jnp.int32), jnp.int32(0)
    with gpu_report.lowering(reader, *given, sm=90) as lowered:
        (launch,) = gpu_report.launches_of(lowered, 90, xla=False)
    assert "ld.global.v4" in launch.ptx
    for half in (0, 1):
        memory = ptx.Memory()
        out = np.zeros(4, np.int32)
        address = [memory.put("numbers", numbers), memory.put("half", np.full(1, half, np.int32))]
        last = memory.put("out", out, written=False)
        kernel = ptx.parse(launch.ptx)
        given = [*address, -(-words // (4 * 1024)), last]
        given += [0] * (len(kernel.parameters) - len(given))
        ptx.launch(kernel, memory, launch.grid, given, dynamic_shared=launch.dynamic_shared)
        assert memory.get("out").max() == 2**24 + half
        assert memory.buffer("out").written.all()


@pytest.mark.extended
@pytest.mark.parametrize(
    "implementation", ["triton", pytest.param("mosaic_gpu", marks=pytest.mark.newer)]
)
def test_calls_are_timed_in_one_graph(implementation, tmp_path):
    """The calls on all copies become one command buffer, with nothing between them."""
    ptx_kernels.needs_compiler()
    if implementation == "mosaic_gpu" and jax.__version_info__ < (0, 11, 2):
        pytest.skip("Mosaic GPU's kernels need jax 0.11.2")
    w = gpu_workloads.workload("gpt-oss", "3q1s70")
    data = gpu_data.described(w)

    def thunks(copies):
        given = gpu.split(data._replace(tables=[data.tables] * copies))
        with gpu_report.lowering(gpu.chain_of(w, implementation), *given, sm=90) as lowered:
            return gpu_report.thunks_of(lowered, tmp_path).rstrip().split("\n")

    one = [line for line in thunks(1) if "kCommandBuffer" not in line]
    buffer, *commands = thunks(3)
    assert "kCommandBuffer" in buffer
    assert all(line.startswith(" ") for line in commands)
    # XLA computes what depends only on constants once for all three calls.
    assert 2 * len(one) < len(commands) <= 3 * len(one)
    assert str(commands).count("kCustomCall ") == 3 * str(one).count("kCustomCall ") > 0


def test_occupancy():
    """By hand: 65,536 registers hold two programs of 256 threads with 128 registers each, and
    227 KiB of shared memory hold one of 150 KiB."""
    h200 = gpu_targets.GPUS[90]
    assert gpu_targets.occupancy(h200, 256, 128, 1024) == (2, "registers")
    assert gpu_targets.occupancy(h200, 128, 64, 150 * 1024) == (1, "shared memory")
    assert gpu_targets.occupancy(h200, 128, 32, 228 * 1024)[0] == 0
    assert dataclasses.replace(h200, sm=91).sm == 91
