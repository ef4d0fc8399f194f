"""The serving engine under random traffic, each request compared with a separate run."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.serving import __main__ as serving
from benchmarks.serving import peer as serving_peer
from examples.engine import sampling
from examples.engine.caches import Group, group_layers
from examples.engine.engine import Engine
from examples.engine.request import Request, Sampling, Sequence
from examples.engine.sampling import SamplingRows, keep_likeliest, sample, sampling_rows
from examples.engine.scheduler import PAGES, Limits, Scheduler
from examples.engine.statistics import count_compilations
from examples.engine.step import make_buckets, pack
from examples.text import Bytes, Subwords, TextStream, WholeTextDecoder
from tests.support.engines import (
    BLOCK,
    BUDGET,
    LAYOUTS,
    MAX_SEQS,
    SCARCE,
    build,
    compare_with_separate_runs,
    limits,
    restart,
    serve_at_random,
    some_requests,
)
from tests.support.tiny_model import LAYERS, WINDOW, dense_logits, tiny_model


@pytest.fixture(scope="module")
def two_pools() -> Engine:
    return build()


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(request) -> Engine:
    if request.param == "unified":
        return build(unified=True)
    return request.getfixturevalue("two_pools")


@pytest.mark.parametrize(
    "scarce",
    [pytest.param(False, id="ample", marks=pytest.mark.extended), pytest.param(True, id="scarce")],
)
@pytest.mark.parametrize(
    "caching",
    [True, pytest.param(False, marks=pytest.mark.extended)],
    ids=["prefixes", "no-prefixes"],
)
def test_random_traffic_gives_the_tokens_of_separate_runs(engine, caching, scarce):
    reused = preempted = 0
    for seed in range(3):
        rng = np.random.default_rng([seed, caching, scarce])
        counts = SCARCE[engine.limits.unified] if scarce else None
        restart(engine, prefix_caching=caching, num_blocks=counts)
        with count_compilations() as compilations:
            sequences = serve_at_random(engine, some_requests(rng, 24), rng)
        assert compilations.count == 0
        assert {"length", "abort"} <= {s.finish_reason for s in sequences}
        reused += sum(sequence.num_reused for sequence in sequences)
        preempted += engine.scheduler.num_preemptions
        compare_with_separate_runs(engine, sequences)
    assert (reused > 0, preempted > 0) == (caching, scarce)


def test_prompts_that_were_handed_over_give_the_same_tokens(two_pools):
    """Their keys and values are taken from the caches and put into caches that hold NaN."""
    rng = np.random.default_rng(5)
    restart(two_pools)
    requests = [r for r in some_requests(rng, 16) if len(r.prompt) > 1]
    read = two_pools.generate([Request(r.prompt[:-1], 1, hands_over=True) for r in requests])
    contents = [sequence.taken.fetched() for sequence in read]
    restart(two_pools, prefix_caching=False)
    sequences = [two_pools.add(*pair) for pair in zip(requests, contents, strict=True)]
    list(two_pools.stream())
    done = two_pools.statistics
    assert done.num_received_prompts == len(requests)
    assert done.num_computed_tokens == done.num_new_tokens
    compare_with_separate_runs(two_pools, sequences)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_more_random_traffic(engine, seed):
    rng = np.random.default_rng([seed, 7])
    counts = SCARCE[engine.limits.unified] if rng.random() < 0.6 else None
    every = int(rng.choice([BLOCK, 2 * BLOCK, 4 * BLOCK]))
    restart(engine, checkpoint_every=every, num_blocks=counts)
    compare_with_separate_runs(engine, serve_at_random(engine, some_requests(rng, 40), rng))


def test_tokens_match_the_model_without_a_cache(engine):
    rng = np.random.default_rng(5)
    restart(engine)
    requests = [
        Request(tuple(rng.integers(0, 256, size=n).tolist()), 12) for n in (1, 3, 4, 5, 11, 37)
    ]
    for sequence in engine.generate(requests):
        tokens = list(sequence.request.prompt)
        for token in sequence.chosen:
            assert token == int(dense_logits(tiny_model().params, tokens).argmax())
            tokens.append(token)


# -- wrong engines --------------------------------------------------------------------------------


def _forget_the_parent(self, num_tokens, block_size):
    while (len(self.hashes) + 1) * block_size <= num_tokens:
        start = len(self.hashes) * block_size
        self.hashes.append(repr(self.tokens[start : start + block_size]).encode())


def _first_seen_a_block_too_late(self, position):
    seen = max(0, position - self.window + 1) // self.block_size if self.window else 0
    return seen + (self.window is not None and seen > 0)


def _write_in_place(self):
    return int(self.read < 0)


def _forget_to_share(self, blocks, num_blocks):
    for block in blocks:
        if self.pool.is_free(block):
            self.pool.share(block)
    self.num_returned = self.num_published = num_blocks - len(blocks)
    self.blocks = [0] * self.num_returned + blocks


def _append_to_what_was_there(plan, bucket, limits):
    inputs = pack(plan, bucket, limits)
    return dataclasses.replace(inputs, begins=np.zeros_like(inputs.begins))


WRONG = {
    "hash-of-one-block": ("examples.engine.request.Sequence.extend_hashes", _forget_the_parent),
    "window-a-block-short": ("BlockTable.first_seen", _first_seen_a_block_too_late),
    "checkpoint-overwritten": ("StateTable.num_missing", property(_write_in_place)),
    "not-counted": ("BlockTable.adopt", _forget_to_share),
    "stale-rows": ("examples.engine.engine.pack", _append_to_what_was_there),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_engine_is_caught(two_pools, monkeypatch, name):
    where, wrong = WRONG[name]
    if not where.startswith("examples"):
        where = f"examples.engine.blocks.{where}"
    monkeypatch.setattr(where, wrong)
    rng = np.random.default_rng(0)
    restart(two_pools)

    def serve_and_compare():
        sequences = serve_at_random(two_pools, some_requests(rng, 40), rng)
        monkeypatch.undo()
        compare_with_separate_runs(two_pools, sequences)

    with pytest.raises((AssertionError, ValueError)):
        serve_and_compare()
    two_pools.scheduler = Scheduler(two_pools.limits)  # drop what the wrong one left behind


# -- what a prefix cache is for -------------------------------------------------------------------


def test_a_prompt_is_not_computed_twice(engine):
    restart(engine)
    prompt = tuple(range(7, 7 + 34))
    (first,) = engine.generate([Request(prompt, 6)])
    computed = engine.statistics.num_computed_tokens
    (again,) = engine.generate([Request(prompt, 6)])
    assert again.chosen == first.chosen
    np.testing.assert_allclose(again.logits, first.logits, atol=1e-4)
    assert (first.num_reused, again.num_reused) == (0, 32)  # all of its full blocks
    assert engine.statistics.num_computed_tokens == computed + 2 + 5
    # The generated tokens are cached as well, so that a conversation continues where it was.
    longer = (*prompt, *first.chosen, 1)
    (third,) = engine.generate([Request(longer, 2)])
    assert third.num_reused == 36


def test_another_engine_can_continue_after_given_tokens(two_pools):
    """Tokens and texts are the same, also with stop strings and penalties."""
    engine, rng = restart(two_pools), np.random.default_rng(12)
    penalized = Sampling(temperature=1.0, seed=5, frequency_penalty=1.5)
    requests = [
        *some_requests(rng, 2),
        Request((5, 6, 7), 20, Sampling(repetition_penalty=1.5), logprobs=2),
        Request((5, 6, 7), 20, penalized, prompt_logprobs=True, logprobs=0),
    ]
    whole = engine.generate(requests)
    stop = whole[-1].text[9:11]
    requests.append(dataclasses.replace(requests[-1], stop_strings=(stop,)))
    whole += engine.generate(requests[-1:])
    assert whole[-1].finish_reason == "stop"
    for one in whole:
        for num_given in (len(one.chosen) // 2, len(one.chosen) - 1):
            given, text = one.chosen[:num_given], ""
            restart(engine)
            sequence = engine.add(one.request, chosen=given)
            given_text = sequence.text
            for output in engine.stream():
                text += output.text
            assert sequence.chosen == one.chosen
            assert given_text + text == sequence.text == one.text
            assert sequence.finish_reason == one.finish_reason
            found, wanted = sequence.likelihoods, one.likelihoods[num_given:]
            np.testing.assert_allclose(
                [f.logprob for f in found], [w.logprob for w in wanted], atol=1e-4
            )
            assert len(sequence.prompt_likelihoods) == len(one.prompt_likelihoods)
    with pytest.raises(ValueError, match=f"the request ends at {len(one.chosen)}"):
        engine.add(one.request, chosen=[*one.chosen, 1])
    with pytest.raises(ValueError, match=r"tokens \[256\], but must be in 0..255"):
        engine.add(one.request, chosen=[256])
    aborted = engine.add(whole[0].request, chosen=whole[0].chosen[:2])
    engine.abort(aborted)
    engine.check_idle()


def test_one_token_of_a_prompt_is_always_computed(two_pools):
    restart(two_pools)
    prompt = tuple(range(8))
    two_pools.generate([Request(prompt, 1)])
    (again,) = two_pools.generate([Request(prompt, 1)])
    assert again.num_reused == 4


def test_states_are_kept_as_often_as_asked(two_pools):
    restart(two_pools, checkpoint_every=8)
    prompt = tuple(range(100, 123))
    two_pools.generate([Request(prompt, 1)])
    (same,) = two_pools.generate([Request(prompt, 1)])
    (shorter,) = two_pools.generate([Request((*prompt[:13], 1), 1)])
    assert (same.num_reused, shorter.num_reused) == (16, 8)


def test_blocks_that_are_free_the_longest_are_evicted_first(two_pools):
    restart(two_pools, num_blocks={"global": 15})
    prompts = [tuple(range(i, i + 17)) for i in (0, 40, 80, 120)]
    for prompt in prompts[:3]:  # 5 blocks each: the pool is full
        two_pools.generate([Request(prompt, 1)])
    two_pools.generate([Request(prompts[0], 1)])  # used again, so the second is the oldest
    two_pools.generate([Request(prompts[3], 1)])
    reused = [two_pools.generate([Request(prompts[i], 1)])[0].num_reused for i in (0, 1)]
    assert reused == [16, 0]


# -- in place, and counted -------------------------------------------------------------------------


def test_caches_and_tables_are_written_in_place(engine):
    before = jax.tree.leaves((engine.caches, engine.tables))
    restart(engine).generate([Request((1, 2, 3), 2)])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before[-3:]))
    caches = sum(leaf.nbytes for leaf in jax.tree.leaves((engine.caches, engine.tables)))
    for program in engine.steps.programs.values():
        assert program.memory_analysis().alias_size_in_bytes >= caches


def test_statistics_add_up(two_pools):
    restart(two_pools)
    sequences = two_pools.generate([Request((1, 2, 3), 5), Request((4,), 2)])
    done = two_pools.statistics
    assert (done.num_requests, done.num_new_tokens, done.num_prompt_tokens) == (2, 7, 4)
    assert done.finished == {"length": 2}
    assert done.num_computed_tokens == 4 + 5
    assert 0 < done.host_share < 1
    assert all(s.arrived < s.first_token <= s.finished for s in sequences)


def test_the_benchmark_waits_for_arrivals_and_counts_tokens(two_pools):
    restart(two_pools)
    load = serving.Load(num_requests=8, concurrent=4, shared=9, own=(1, 5))
    prompts, arrivals = load.prompts(256), load.arrivals(rate=40.0)
    assert {tuple(prompt[:9]) for prompt in prompts} == {tuple(prompts[0][:9])}
    assert {len(prompt) for prompt in prompts} <= set(range(10, 15))
    sequences = serving.run(two_pools, prompts, 5, arrivals)
    waited = [s.arrived - sequences[0].arrived for s in sequences]
    np.testing.assert_allclose(waited, arrivals - arrivals[0], atol=1e-6)
    assert all(s.first_token > s.arrived for s in sequences)
    row = serving.measure(two_pools, sequences)
    assert row["tokens_per_s"] == pytest.approx(5 * row["requests_per_s"])
    assert row["first_p99_ms"] >= row["first_ms"] > 0
    assert row["each_p99_ms"] >= row["each_ms"] > 0
    assert row["reused"] > 0
    gaps = np.diff(serving.Load(num_requests=4000).arrivals(rate=5.0))
    assert abs(gaps.mean() - 0.2) < 0.02  # exponential: mean and deviation are equal
    assert abs(gaps.std() - 0.2) < 0.02
    outputs = serving.Load(num_requests=400, new=(3, 7)).outputs
    assert set(outputs) == set(range(3, 8))
    ours = [s.chosen for s in sequences]

    class Peer:  # takes one second, and its last token is off by `off`
        def __init__(self, off: int):
            self.off = off

        def serve(self, way: str, prompts: list, new: list[int]) -> dict:
            tokens = [row[:n] for row, n in zip(ours, new, strict=True)]
            tokens[-1][-1] += self.off
            return {"tokens": tokens, "seconds": 1.0, "cpu": 1.0}

    both = (prompts, [5] * 8, ("single",), 1)
    found = serving_peer.compare(lambda: ours, Peer(0), *both, exact=True)
    assert (found["single_tokens_per_s"], found["same_as_single"]) == (40.0, 1.0)
    assert "one after another" in serving_peer.summary(found, 0.1)
    assert serving_peer.compare(lambda: ours, Peer(1), *both, exact=False)["same_as_single"] < 1
    with pytest.raises(SystemExit, match=r"97\.5% of the peer's tokens"):
        serving_peer.compare(lambda: ours, Peer(1), *both, exact=True)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Request((), 0), r"prompt is empty.*max_new_tokens is 0"),
        (lambda: Request((1,), 1, stop_strings=("",)), "empty string"),
        (lambda: Request((1,), 2, follow=(1,)), "follow has 1 tokens"),
        (
            lambda: Sampling(temperature=-1, top_k=-1, top_p=0, seed=-1),
            "temperature is -1.*top_k is -1.*top_p is 0.*seed is -1",
        ),
        (lambda: Sampling(temperature=float("nan")), "temperature is nan"),
        (lambda: limits(num_blocks={"global": 14}), "14 global blocks of 4 tokens are too few"),
        (lambda: limits(num_blocks={"state": 1}), "1 state blocks"),
        (lambda: limits(num_blocks={"pages": 9}), r"'pages', but the pools are \['global', 'sl"),
        (lambda: limits(unified=True, num_blocks={PAGES: 9}), "needs 26"),
        (lambda: limits(checkpoint_every=6), "multiple of block_size"),
        (lambda: dataclasses.replace(limits(), token_budget=3), r"at least max_seqs \(4\)"),
        (lambda: dataclasses.replace(limits(), max_len=0), "max_len is 0"),
    ],
)
def test_wrong_sizes_are_reported(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_requests_that_can_never_run_are_refused(two_pools):
    restart(two_pools)
    for request, words in (
        (Request((1,) * 50, 20), "make 70 tokens, but this server was built for 60"),
        (Request((1, 256), 2), r"tokens \[256\], but must be in 0..255"),
    ):
        with pytest.raises(ValueError, match=words):
            two_pools.add(request)
    two_pools.check_idle()


def test_a_state_too_large_for_a_page_is_refused():
    from examples.engine.caches import aligned_block_size, init_caches
    from jattn import Dense

    groups = {group.name: 4 for group in group_layers(LAYERS, unified=True)}
    with pytest.raises(ValueError, match=r"a page of 64 bytes cannot hold layer 1's state of 104"):
        init_caches(LAYERS, groups, 1, Dense("float32"), unified=True)
    assert aligned_block_size(LAYERS, 4, 1) == 2


# -- the scheduler, without a model ---------------------------------------------------------------


def plan_steps(scheduler: Scheduler, requests: list[Request]):
    """Yield every plan, and make up the tokens."""
    for request in requests:
        scheduler.add(Sequence(request))
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        assert plan
        yield plan
        scheduler.commit(plan)
        for chunk in plan:
            if chunk.is_last:
                chunk.sequence.append(7)
                if chunk.sequence.finish_reason:
                    scheduler.remove(chunk.sequence)
    assert all(pool.num_used == 0 for pool in scheduler.pools.values())


@pytest.mark.parametrize("seed", range(4))
def test_the_scheduler_respects_its_limits(seed):
    bounds = limits(num_blocks=SCARCE[False])
    scheduler = Scheduler(bounds, seed)
    for plan in plan_steps(scheduler, some_requests(np.random.default_rng(seed), 30)):
        assert sum(chunk.num_tokens for chunk in plan) <= BUDGET
        assert len(plan) <= len(scheduler.running) <= MAX_SEQS
        planned = {chunk.sequence for chunk in plan}
        assert scheduler.running[0] in planned  # the oldest never waits
        lengths = [chunk.num_tokens for chunk in plan]
        decoding = [s.num_pending == 1 for s in (chunk.sequence for chunk in plan)]
        assert decoding == sorted(decoding, reverse=True)  # decodes first
        assert min(lengths) >= 1
        for group in bounds.groups:
            for sequence in scheduler.running:
                if not group.is_state:
                    table = sequence.tables[group.name]
                    held = len(table.blocks) - table.num_returned
                    assert held <= bounds.most_blocks(group)


def test_prompts_are_read_while_others_decode_and_none_starves():
    scheduler = Scheduler(limits())
    requests = [Request((i,), 20) for i in range(3)] + [Request((6,) * 40, 2)]
    steps = list(plan_steps(scheduler, requests))
    mixed = [plan for plan in steps if len({chunk.num_tokens > 1 for chunk in plan}) == 2]
    assert len(mixed) >= 4  # each step reads 8 of its 40 tokens, or fewer up to a border
    last = max(
        i for i, p in enumerate(steps) if any(len(c.sequence.request.prompt) == 40 for c in p)
    )
    assert last < 12


def test_blocks_behind_the_window_are_freed():
    scheduler = Scheduler(limits())
    held = []
    for _ in plan_steps(scheduler, [Request(tuple(range(40)), 20)]):
        (sequence,) = scheduler.running
        held.append(scheduler.pools["sliding"].num_used)
        table = sequence.tables["sliding"]
        assert table.num_returned == max(0, sequence.num_computed - WINDOW + 1) // BLOCK
        assert sequence.tables["global"].num_returned == 0
    assert max(held) <= (WINDOW - 1 + BUDGET) // BLOCK + 2
    assert scheduler.pools["global"].num_used == 0


# -- choosing tokens ------------------------------------------------------------------------------


draw, keep = jax.jit(sample), jax.jit(keep_likeliest)


def rows_of(count: int, **given) -> SamplingRows:
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 5, **given}
    return SamplingRows(
        temperature=jnp.full(count, values["temperature"], jnp.float32),
        top_p=jnp.full(count, values["top_p"], jnp.float32),
        top_k=jnp.full(count, values["top_k"], jnp.int32),
        min_p=jnp.full(count, values["min_p"], jnp.float32),
        seed=jnp.full(count, values["seed"], jnp.uint32),
        count=jnp.arange(count, dtype=jnp.int32),
    )


@pytest.mark.parametrize("size", [7, 192])
def test_the_likeliest_token_is_the_first_with_the_largest_logit(size):
    logits = np.random.default_rng(size).integers(-9, 9, size=(40, size)).astype(np.float32)
    logits[0], logits[1, 5:] = 0, np.inf
    logits[2], logits[3, 6] = -np.inf, np.nan
    assert (logits == logits.max(1, keepdims=True)).sum(1).max() > 1
    np.testing.assert_array_equal(jax.jit(sampling.likeliest)(logits), logits.argmax(1))


def test_a_single_prompt_is_padded_little():
    limits = Limits((Group("global", (0,)),), 64, 1024, 16, 256, {"global": 4096})
    buckets = make_buckets(limits)
    smallest = [
        next(b for b in buckets if b.num_tokens >= n and b.num_seqs >= seqs and b.max_query_len > 1)
        for n, seqs in ((20, 1), (64, 1), (80, 10), (100, 2), (140, 50), (700, 64), (1024, 64))
    ]
    assert [b.num_tokens for b in smallest] == [32, 64, 80, 128, 192, 1024, 1024]
    assert {b.num_tokens for b in buckets if b.max_query_len == 1} == {1, 4, 16, 32, 64}


def likeliest(logits: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """Return the tokens that may be drawn, found the slow way."""
    order = np.argsort(-logits)[: top_k or None]
    weights = np.exp(logits[order] - logits.max())
    kept, total = set(), 0.0
    for token, weight in zip(order, weights / weights.sum(), strict=True):
        if total >= top_p:
            break
        kept.add(int(token))
        total += weight
    return kept


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 5, 64])
def test_only_the_likeliest_are_kept(top_k, top_p):
    logits = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32) * 3
    rows = rows_of(6, top_k=top_k, top_p=top_p)
    kept = np.isfinite(keep(jnp.asarray(logits), rows.top_k, rows.top_p))
    for row, logit in zip(np.asarray(kept), logits, strict=True):
        assert set(np.flatnonzero(row).tolist()) == likeliest(logit, top_k, top_p)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_have_the_distribution_of_the_softmax(temperature):
    count, logits = 4000, np.array([0.0, 1.0, 2.0, -1.0, 1.5], np.float32)
    drawn = draw(jnp.tile(logits, (count, 1)), rows_of(count, temperature=temperature))
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    found = np.bincount(np.asarray(drawn), minlength=5) / count
    assert (np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / count)).all()


def test_each_row_is_drawn_with_its_own_options():
    logits = jnp.tile(jnp.asarray([1.0, 3.0, 2.0, 0.0], jnp.float32), (4, 1))
    rows = dataclasses.replace(
        rows_of(4),
        temperature=jnp.asarray([0.0, 50.0, 50.0, 50.0], jnp.float32),
        top_k=jnp.asarray([0, 1, 2, 0], jnp.int32),
        seed=jnp.asarray([1, 2, 3, 4], jnp.uint32),
    )
    drawn = np.array(
        [draw(logits, dataclasses.replace(rows, count=rows.count + i)) for i in range(40)]
    )
    assert [set(column.tolist()) for column in drawn.T] == [{1}, {1}, {1, 2}, {0, 1, 2, 3}]


def test_a_temperature_near_zero_is_greedy():
    """Logits divided by it would overflow."""
    asked = (1e-38, 1e-30, 9e-6, 1e-5)
    sequences = [Sequence(Request((1,), 2, Sampling(temperature))) for temperature in asked]
    logits = jnp.tile(jnp.asarray([1.0, 300.0, -200.0, 0.0], jnp.float32), (len(asked), 1))
    drawn = draw(logits, sampling_rows(sequences, len(asked)))
    assert np.asarray(drawn).tolist() == [1] * len(asked)
    assert [sequence.request.sampling.draws for sequence in sequences] == [False] * 3 + [True]


# -- streamed text --------------------------------------------------------------------------------


class Words:
    """A tokenizer that omits a leading space and splits a character in two."""

    def decode(self, tokens) -> str:
        data = b"".join((b"a", b" b", b"\xc3", b"\xa9")[token] for token in tokens)
        return data.decode(errors="replace").removeprefix(" ")

    def decoder(self, *, special_tokens: bool = False) -> WholeTextDecoder:
        return WholeTextDecoder(self.decode)


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "rest"),
    [
        (Bytes(), [*b"a b", 0xC3, 0xA9, *b" b", 0xC3], "\\xc3"),
        (Words(), [0, 1, 2, 3, 1, 2], "\ufffd"),
    ],
    ids=["bytes", "words"],
)
def test_characters_are_sent_when_complete(tokenizer, tokens, rest):
    stream = TextStream(tokenizer)
    texts = [stream.push([token])[0] for token in tokens]
    assert "".join(texts) == "a bé b"
    assert "é" in texts
    assert stream.push([], end=True) == (rest, False)


def test_text_that_cannot_be_encoded_is_a_value_error():
    for tokenizer in (Bytes(), Subwords(lambda *_: [], lambda *_: "", str)):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            tokenizer.encode("\ud800")


def test_text_ends_before_the_first_stop_string():
    stream = TextStream(Bytes(), ("END", "ENOUGH"))
    given = [stream.push([byte]) for byte in b"xENxENOUxENDyy"]
    assert "".join(text for text, _ in given[:12]) == "xENxENOUx"
    assert given[2] == ("", False)  # "EN" may still become one
    assert given[3] == ("ENx", False)
    assert given[11] == ("", True)


def test_a_sequence_stops_at_tokens_strings_and_its_length():
    ways = {
        "token": Request((1,), 9, stop_tokens=(ord("c"),)),
        "string": Request((1,), 9, stop_strings=("bc",)),
        "length": Request((1,), 2),
    }
    ends = {}
    for name, request in ways.items():
        sequence = Sequence(request, TextStream(Bytes(), request.stop_strings))
        for byte in b"abcd":
            if sequence.finish_reason is None:
                sequence.append(byte)
        ends[name] = (sequence.text, len(sequence.chosen), sequence.finish_reason)
    assert ends == {
        "token": ("ab", 3, "stop"),
        "string": ("a", 3, "stop"),
        "length": ("ab", 2, "length"),
    }
