"""Kernel times from CUPTI and from profiler traces, without a GPU."""

from __future__ import annotations

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import kernels as gpu_kernels
from benchmarks.gpu import rows as gpu_rows
from benchmarks.gpu import since
from benchmarks.gpu import workloads as gpu_workloads
from benchmarks.gpu.cases import Case


def event(name, pid, tid, microseconds, **args):
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "dur": microseconds, "args": args}


def named(kind, pid, name, **more):
    return {"ph": "M", "name": kind, "pid": pid, "args": {"name": name}, **more}


TRACE = {
    "traceEvents": [
        named("process_name", 1, "/device:GPU:0"),
        named("process_name", 2, "/host:CPU"),
        named("thread_name", 1, "Stream #13(Compute)", tid=13),
        named("thread_name", 1, "XLA Ops", tid=20),
        named("thread_name", 2, "Stream #13(Compute)", tid=13),
        event("decode_1", 1, 13, 4.0, kernel_details="regs:128"),
        event("merge_splits", 1, 13, 2.0, kernel_details="regs:64"),
        event("decode_2", 1, 13, 6.0, kernel_details="regs:128"),
        event("MemcpyD2D", 1, 13, 9.0, memcpy_details="size:4"),
        event("decode_1", 1, 20, 4.0, kernel_details="regs:128"),
        event("decode_1", 2, 13, 4.0, kernel_details="regs:128"),
        {"ph": "X"} | event("no arguments", 1, 13, 1.0) | {"args": {}},
    ]
}


def test_a_trace():
    """Only kernels on the GPU's streams count: not copies, nor kernels listed again as XLA ops."""
    found = list(gpu_kernels.kernels_of_trace(TRACE))
    assert [name for name, _ in found] == ["decode_1", "merge_splits", "decode_2"]
    times = gpu_kernels.summed(found, 2, "profiler")
    assert times.kernels == pytest.approx(6e-6)
    assert times.launches == 1.5
    assert times.parts == {"decode": 5.0, "merge_splits": 1.0}
    w = gpu_workloads.workload("gpt-oss", "3q1s70")
    row = gpu_rows.make_row(w, "triton", [1e-5] * 3, gpu_rows.Ceilings(1e12, 1e14), "so", times)
    assert row.line().split()[-2:] == ["6.0", "1.5"]
    assert (row.kernels, row.parts, row.source) == (times.kernels, times.parts, "profiler")


@pytest.mark.extended
def test_the_profiler_is_asked_where_cupti_fails(monkeypatch):
    """Its trace is read, and if neither has times the row says why."""
    from jax.experimental.mosaic.gpu import profiler

    def fails(run, aggregate):
        raise RuntimeError("no CUPTI\nat all")

    def run(x):
        return x + 1

    monkeypatch.setattr(profiler, "measure", fails)
    none = gpu_kernels.measure(jax.jit(run), [jnp.ones(())], 1)
    assert none.kernels is None
    assert "CUPTI: RuntimeError: no CUPTI;" in none.source
    assert "profiler: no kernels" in none.source, "on a CPU it has none"
    decompress = gzip.decompress
    monkeypatch.setattr(gzip, "decompress", lambda data: json.dumps(TRACE).encode())
    assert gpu_kernels.measure(jax.jit(run), [jnp.ones(())], 2).launches == 1.5
    monkeypatch.setattr(gzip, "decompress", decompress)

    def measured(run, aggregate):
        return lambda *given: (run(*given), [("decode_1", 0.5), ("decode_2", 0.25)])

    monkeypatch.setattr(profiler, "measure", measured)
    times = gpu_kernels.measure(jax.jit(run), [jnp.ones(())], 2)
    assert (times.kernels, times.launches, times.source) == (0.000375, 1.0, "CUPTI")


def test_kernels_are_compared_with_those_of_a_commit():
    """Names of registers and labels are ignored; any other difference is listed."""
    assert len({Case(**call) for call in since.calls()}) == len(since.calls()) == 22
    old = since.normalized(".loc 1 2\n$L1:\n  @%p1 bra $L1; // again\n  add.s32 %r1, %r2, 1;")
    assert old == since.normalized("$L7:\n@%p3 bra $L7;\nadd.s32 %r9, %r1, 1;")
    new = since.normalized("$L7:\n@%p3 bra $L7;\nsub.s32 %r9, %r1, 1;")
    assert since.compare({"a": old, "b": old, "c": old}, {"a": old, "b": new}) == [
        "b: 3 lines then, 3 now: -1 add.s32, +1 sub.s32",
        "c: only then",
        "1 of 3 kernels are the same",
    ]
