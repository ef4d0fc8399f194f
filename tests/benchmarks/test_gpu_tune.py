"""Tiles that the GPU benchmark tries instead of the rule's, and their model, without a GPU."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import rows as gpu_rows
from benchmarks.gpu import session as gpu_session
from benchmarks.gpu import shared_memory
from benchmarks.gpu import targets as gpu_targets
from benchmarks.gpu import triton_tiles as model
from benchmarks.gpu import tune as gpu_tune
from benchmarks.gpu import workloads as gpu_workloads
from benchmarks.gpu.cases import Case
from jattn.pallas import machine
from jattn.pallas.triton import launch as triton_launch
from jattn.pallas.triton.tiles import Tiles
from tests.support import ptx_kernels

H200 = machine.Machine(90, 132)
DECODE = gpu_workloads.workload("gemma4-31b", "64q1s8k")
PREFILL = gpu_workloads.workload("gemma4-31b", "q2k")
# 128 new tokens after 64k: few enough rows for the decode kernel.
EXTEND = gpu_workloads.workload("gemma4-31b-tp4", "q128s64k")


def launched(w) -> dict[str, Tiles]:
    found = triton_launch.launches(gpu_tune.call_of(w), H200)
    return {launch.kernel: launch.tiles for launch in found}


@pytest.mark.parametrize("w", [DECODE, PREFILL, EXTEND], ids=lambda w: w.name)
def test_candidates(w):
    call = gpu_tune.call_of(w)
    kernel = "prefill" if w is PREFILL else "decode"
    assert gpu_tune.tuned_kernel(call, H200) == kernel
    found = gpu_tune.candidates(call, kernel, H200)
    rule = launched(w)[kernel]
    assert found[0] == rule
    assert len(set(found)) == len(found) > 10
    changes = [
        sum(a != b for a, b in zip(dataclasses.astuple(t), dataclasses.astuple(rule), strict=True))
        for t in found
    ]
    assert changes == sorted(changes)
    assert set(changes) >= {0, 1, 2}
    assert all(shared_memory.shared_bytes(call, t) <= H200.block_shared for t in found)
    assert any(t.per_core != rule.per_core for t in found) == (kernel == "decode")


@pytest.mark.extended
@pytest.mark.parametrize("w", [DECODE, PREFILL, EXTEND], ids=lambda w: w.name)
def test_a_candidate_is_launched_inside_and_the_rule_outside(w):
    before = launched(w)
    kernel = "prefill" if w is PREFILL else "decode"
    for name in (gpu_tune.names(w, H200)[0], *gpu_tune.names(w, H200)[-2:]):
        with gpu_tune.chosen(name, w, H200) as implementation:
            inside = launched(w)
        assert implementation == "triton"
        assert gpu_tune.name_of(inside[kernel]) == name
        assert set(inside) == set(before), "tuning does not change which kernels run"
        assert launched(w) == before
    with gpu_tune.chosen("mosaic_gpu", w, None) as implementation:
        assert implementation == "mosaic_gpu"
        assert launched(w) == before


def row(name: str, seconds: float, workload: str = DECODE.name) -> gpu_rows.Row:
    found = gpu_rows.make_row(DECODE, name, [seconds] * 3, gpu_rows.Ceilings(4e12, 8e14))
    return dataclasses.replace(found, name=workload)


def test_the_best_are_compared_with_the_rule_s_tiles(tmp_path):
    names = [f"triton[{n}x32 8w 5s 1c]" for n in (16, 32, 64)]
    earlier = [row(names[0], 4e-3), row("triton", 1e-3), row(names[1], 1e-3, "another")]
    lines = [json.dumps({"kind": "row", **dataclasses.asdict(r)}) for r in earlier]
    (tmp_path / "run.jsonl").write_text("\n".join([json.dumps({"kind": "run"}), *lines]))
    tuned = gpu_tune.Tuned(DECODE, str(tmp_path))
    found = [(names[1], row(names[1], 2e-3)), (names[2], "out of shared memory")]
    assert list(tuned.seen(found)) == found
    first, second = tuned.best(names[0])
    assert names[0] in first
    assert first.endswith("1.00x")
    assert names[1] in second
    assert second.endswith("2.00x")
    assert gpu_tune.Tuned(DECODE, None).best(names[0]) == []


def test_tiles_that_do_not_fit_are_a_result_and_wrong_rows_a_failure(capsys):
    lines = gpu_session.Lines(None, ())
    assert not gpu.report(DECODE, [("triton[16x32 8w 5s 1c]", "FAILED: no memory")], lines)
    assert gpu.report(DECODE, [("triton[16x32 8w 5s 1c]", "WRONG: off by 1")], lines)
    assert gpu.report(DECODE, [("triton", "FAILED: no memory")], lines)
    assert "no memory" in capsys.readouterr().out


def test_a_workload_ends_when_the_time_is_over():
    session = gpu_session.Session(-1.0, gpu_session.Lines(None, ()))
    found = session.each("w", ("a", "b"), iter([("a", 1), ("b", 2)]), lambda: True)
    assert next(found) == ("a", 1)
    with pytest.raises(gpu_session.OverTimeError):
        next(found)


@pytest.mark.extended
@pytest.mark.extended
def test_candidates_are_checked_and_timed_once(tmp_path, capsys, monkeypatch):
    """The whole part, with the XLA path in place of the kernels and one wrong candidate."""
    w = gpu_workloads.workload("gpt-oss-window", "q20s300_q1s150")
    names = gpu_tune.names(w, H200)[:3]
    tiles = gpu_tune.candidates(gpu_tune.call_of(w), "prefill", H200)[:3]
    monkeypatch.setattr(gpu_tune, "candidates", lambda *_: tiles)
    monkeypatch.setattr(machine, "here", lambda: H200)
    attend, asked = gpu.attend, []

    def stand_in(w, data, implementation, table):
        inside = gpu_tune.name_of(launched(w)["prefill"])
        asked.append((implementation, inside))
        out = attend(w, data, "xla", table)
        return out * 2 if inside == names[1] else out

    monkeypatch.setattr(gpu, "attend", stand_in)

    def run(*more: str) -> int:
        args = gpu.parse(["--part", "tune", *more])
        session = gpu_session.Session(60.0, gpu_session.Lines(str(tmp_path), args.part))
        limits = gpu_rows.Ceilings(1e10, 1e11)
        return gpu.measure_all([w], args, (), {}, limits, session, 2**10, H200)

    assert run() == 1, "one candidate is wrong"
    assert {implementation for implementation, _ in asked} == {"triton"}
    assert {inside for _, inside in asked} == set(names)
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if names[1] in line and "WRONG" in line]
    assert names[0] in said[-2]
    assert said[-2].endswith("1.00x")
    assert names[2] in said[-1]
    asked.clear()
    assert run("--resume", str(tmp_path)) == 0
    assert not asked


@pytest.mark.extended
def test_dry_run_compiles_candidates(capsys, monkeypatch):
    ptx_kernels.needs_compiler()
    first = gpu_tune.candidates

    def two(*arguments):
        rule = first(*arguments)[0]
        return [rule, dataclasses.replace(rule, warps=12 - rule.warps)]

    monkeypatch.setattr(gpu_tune, "candidates", two)
    assert gpu.main(["--dry-run", "--part", "tune", "--filter", "^gpt-oss-64q1s8k"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "]: decode" in line]
    assert len(said) == 2
    assert said[0].split(":")[1] != said[1].split(":")[1], "other tiles, other registers"


# --- The model ------------------------------------------------------------------------------------


def test_the_model_of_decode_by_hand():
    """D = 512, 16 rows, 32 keys of 2 KiB: 65,536 bytes at 18.4 a cycle are 3,568 cycles."""
    gpu = dataclasses.replace(gpu_targets.GPUS[90], bandwidth=4800, cores=132, clock=1.98)
    call = Case(kind="decode").call()
    load = 65536 / (4800e9 / 132 / 1.98e9)
    assert load == pytest.approx(3568, abs=1)
    # Shared memory moves 65,536 bytes in, as many out, and 16 rows of 512 + 32 numbers for each of
    # 8 warps: 2,112 cycles. Three tiles ahead hide that and the latency.
    shared = (2 * 65536 + 8 * 16 * 544 * 2) / 128
    chain = shared + 16 * (32 * 14 + 512) / 128 + 320
    found = model.predict(call, Tiles(16, 32, 8, 7, 1), "decode", gpu)
    assert (found.share, found.bound, found.in_flight) == (1.0, "memory", 3 * 65536)
    for stages, ahead in ((3, 1), (5, 2)):
        found = model.predict(call, Tiles(16, 32, 8, stages, 1), "decode", gpu)
        assert found.bound == "latency"
        assert found.share == pytest.approx(load * ahead / (chain + load + 1200))


def test_the_model_of_prefill_by_hand():
    """D = 512: 65,536 bytes at 21 a cycle for 32 keys; both groups of warps compute all logits."""
    call, h200 = Case(kind="mixed").call(), gpu_targets.GPUS[90]
    shared = (65536 + 2 * 2 * (2 * 64 + 32) * 512 + 2 * 32 * 512) / 128
    chain = shared + 64 * (32 * 14 + 512) / 128 + 320
    found = model.predict(call, Tiles(64, 32, 8, 3, 1), "prefill", h200)
    assert found.bound == "latency"
    assert found.share == pytest.approx(1024 / (chain + 65536 / 21 + 1200))
    # D = 128, 128 rows, 64 keys: each group has its own rows, and reads all keys and values.
    call = Case((128, 128), "mixed").call()
    shared = (32768 + 2 * (128 * 128 + 2 * 64 * 256)) / 128
    chain = max(1024, shared) + 128 * (64 * 14 + 128) / 128 + 320
    found = model.predict(call, Tiles(128, 64, 8, 7, 1), "prefill", h200)
    assert found.bound == "one step"
    assert found.share == pytest.approx(1024 / chain)


DOCS = pathlib.Path(__file__).parents[2] / "docs" / "gpu-kernels.md"


@pytest.mark.parametrize("sm", model.FORMATS)
def test_the_tables_of_tiles_match_the_rule(sm):
    """The tables repeat the rule and the model; registers and spills come from the compiler."""
    gpu = gpu_targets.GPUS[sm]
    text = DOCS.read_text().split(f"{gpu.kind}, sm_{sm}\n\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    cases = list(model.chosen(sm))
    assert len(rows) == len(cases)
    for row, case in zip(rows, cases, strict=True):
        assert row[:6] + row[10:] == model.said(case, gpu), case.label
        assert row[7] == "0", case.label
        if sm == 80:  # where `shared_bytes` says the most
            needed = shared_memory.shared_bytes(case.call(), model.rule(case.call(), gpu)[row[0]])
            assert int(row[8].replace(",", "")) <= needed, case.label
