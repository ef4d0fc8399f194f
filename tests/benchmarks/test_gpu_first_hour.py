"""The first hour on a GPU, without one: order and time limits of steps, second runs, summary."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import first_hour
from benchmarks.gpu import peers as gpu_peers
from benchmarks.gpu import rows as gpu_rows
from benchmarks.gpu import session as gpu_session
from benchmarks.gpu import workloads as gpu_workloads
from tests.support import ptx_kernels

pytestmark = pytest.mark.extended  # a tool for users with a GPU


def step(how: str, minutes: float = 5) -> first_hour.Step:
    return first_hour.Step(how, minutes, "?", ("--part", how), module="tests.support.fake_gpu_step")


@pytest.fixture
def begin(tmp_path, capsys, monkeypatch):
    """A function that runs steps and returns the exit status, the output and the log."""
    monkeypatch.setattr(first_hour, "NAMES", ("right", "wrong", "hangs", "lost", "dies"))

    def run(*steps, minutes=55.0):
        given = ["--state", str(tmp_path / "state"), "--out", str(tmp_path / "out")]
        status = first_hour.main([*given, "--minutes", str(minutes)], steps)
        log = (tmp_path / "out" / "log.txt").read_text()
        return status, capsys.readouterr().out, log

    return run


def test_steps_are_bounded_and_the_most_valuable_first():
    assert first_hour.NAMES[:4] == ("ceilings", "matrix", "decode", "prefill")
    assert sum(step.minutes for step in first_hour.STEPS[:6]) < 40
    assert sum(step.minutes for step in first_hour.STEPS) < 55
    for one in first_hour.STEPS:
        args = gpu.parse(one.command(first_hour.STATE, one.minutes, dry_run=False)[3:])
        assert (args.minutes, args.out, args.resume) == (one.minutes, *[str(first_hour.STATE)] * 2)
        assert gpu.parse(one.command(first_hour.STATE, 1, dry_run=True)[3:]).dry_run
    assert first_hour.STATE.relative_to(gpu_session.ROOT).parts[0] == "build", "git ignores it"


def test_what_is_done_is_not_done_again(begin, tmp_path, monkeypatch):
    """Not even after `--out` was emptied; failures are run again when the code has changed."""
    status, said, log = begin(step("right"), step("wrong"))
    assert status == 1
    assert "wrong      done, and something is wrong" in said
    assert log.count("asked") == 6
    for file in (tmp_path / "out").iterdir():
        file.unlink()
    status, said, log = begin(step("right"), step("wrong"))
    assert status == 1
    assert "right      done, in an earlier run" in said
    assert log.count("asked") == 6
    results = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["kind"] for line in results) == ["none"] * 6 + ["step"] * 2
    monkeypatch.setattr(first_hour.gpu_session, "fingerprint", lambda: "another")
    status, said, log = begin(step("right"), step("wrong"))
    assert "right      done, in an earlier run" in said
    assert "wrong      done, and something is wrong after" in said


def test_a_lost_device_costs_one_result(begin):
    """The step goes on in new processes, as long as each of them gets a result."""
    for how in ("lost", "dies"):
        status, said, log = begin(step(how))
        assert status == 1, "the result that it cost is a failure"
        assert log.count(f"$ -m tests.support.fake_gpu_step --part {how}") == 4
        assert f"{how:<10} done, and something is wrong after" in said


def test_a_step_is_wrong_if_its_last_results_are(tmp_path, monkeypatch):
    def says(step, **line):
        monkeypatch.setenv(gpu_session.STEP, step)
        gpu_session.Lines(str(tmp_path), (step,)).write(**line)
        return first_hour.is_wrong(tmp_path, step)

    row = {"kind": "none", "name": "a"}
    assert not says("tune", **row, implementation="triton[64x64 4w 2s 1c]", why="FAILED: no room")
    assert says("tune", **row, implementation="triton[64x64 4w 2s 1c]", why="WRONG: row 3")
    assert not says("peers", **row, implementation=gpu_peers.NAMES[0], why="WRONG: row 3")
    assert not says("decode", **row, implementation="triton", why="head size D is 8")
    assert says("decode", **row, implementation="triton", why="no answer in 180 s")
    assert not says("decode", kind="row", name="a", implementation="triton")
    assert says("matrix", kind="test", name="t", outcome="hung")
    assert not says("matrix", kind="test", name="t", outcome="passed")


def test_a_step_that_hangs_is_ended_and_the_next_one_runs(begin, monkeypatch):
    monkeypatch.setattr(gpu_session, "GRACE", 0.5)
    monkeypatch.setattr(first_hour, "LEAST", 0.001)
    status, said, _ = begin(step("hangs", 0.01), step("right"))
    assert status == 3
    assert "hangs      ended: it took too long" in said
    assert "right      done after" in said
    status, said, _ = begin(step("lost"), minutes=0)
    assert (status, said) == (3, "lost       left: the time is over\n")


def test_the_summary():
    w = gpu_workloads.workload("gpt-oss", "3q1s70")
    measured = gpu_rows.make_row(w, "triton", [1e-5] * 3, gpu_rows.Ceilings(1e12, 1e14))
    row = {"kind": "row", "code": "x", **dataclasses.asdict(measured)}
    tests = [
        {"kind": "test", "name": "t1", "outcome": "failed", "why": "off by 1"},
        {"kind": "test", "name": "t2", "outcome": "failed"},
        {"kind": "test", "name": "t2", "outcome": "passed"},
    ]
    said = first_hour.summary([row, *tests])
    assert "tests: 1 passed, 1 did not\nt1: failed: off by 1\n" in said
    assert measured.line() in said.splitlines()


@pytest.mark.extended
def test_a_dry_run_of_all_steps(tmp_path, capsys):
    """`benchmarks.gpu` accepts every command, and every kernel compiles."""
    ptx_kernels.needs_compiler()
    names = [name for name in first_hour.NAMES if name != "tune"]  # test_gpu_tune.py covers it
    folder = str(tmp_path)
    given = ["--dry-run", "--state", folder, "--out", folder, "--only", *names]
    assert first_hour.main(given) == 0, (tmp_path / "log.txt").read_text()
    assert capsys.readouterr().out.count(" done after ") == len(names)
