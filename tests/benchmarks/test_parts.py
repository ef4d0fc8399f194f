"""The parts of the benchmarks: workloads, their data, the oracle, timing and rows."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from benchmarks import neighbours, oracle, timing, workloads
from benchmarks.cpu import (
    ours,
    report,
    tables,
)
from benchmarks.timing import cache_bytes
from tests.support import workloads as support
from tests.support.workloads import BFLOAT16, LIMITS, TINY, WINDOW, Clock

few_copies = support.few_copies  # the fixture


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
    # 6 of 9, 5 of 5 and 6 of 30 keys are visible; the pairs are 6, 1 + ... + 5 and 6.
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


def test_tokens_do_not_depend_on_where_reading_starts():
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


def test_contenders_take_turns():
    log = []
    contenders = {"a": Clock(log, "a", 1e-3), "b": Clock(log, "b", 1.0)}
    found = timing.interleave(contenders, turns=3)
    # Probes tell how many runs fill a turn. One more wakes the threads, unless runs are long.
    assert log == [("a", 2), ("a", 2), ("a", 1), ("b", 2)] + [("a", 6), ("b", 1)] * 3
    assert (found["a"].calls, found["b"].calls) == (15, 3)
    assert (found["a"].median, found["b"].median) == (1e-3, 1.0)


def test_turns_of_all_contenders_are_equally_long():
    log = []
    contenders = {"step": Clock(log, "step", 0.0625), "call": Clock(log, "call", 1e-3)}
    contenders["step"].layers = 64
    found = timing.interleave(contenders, turns=2)
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
    attention = ours.Attention(TINY, 3)
    tables = [np.asarray(next(attention._block_tables)) for _ in range(4)]
    assert np.array_equal(tables[0], tables[3])
    assert not np.array_equal(tables[0], tables[1])
    results = [attention.result() for _ in range(3)]
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
    """The spread misses it where most runs were: vLLM once took 220 times its minimum."""
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
    assert "1 of 2 rows (`odd`)" in tables.left_out(records)


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
