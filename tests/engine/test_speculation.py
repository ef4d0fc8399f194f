"""Speculative decoding: the tokens of a run without it, whatever is drafted, where it pays."""

from __future__ import annotations

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.engine import programs
from examples.engine.caches import group_layers
from examples.engine.drafts.speculation import (
    Guess,
    Lookup,
    Speculation,
    Speculator,
    read_speculation,
)
from examples.engine.engine import Engine
from examples.engine.http import metrics
from examples.engine.model import AttentionCache, Model
from examples.engine.request import Request, Sampling, Sequence
from examples.engine.sampling import SamplingRows
from examples.engine.scheduler import Limits, Scheduler
from examples.engine.step import Bucket, make_buckets
from tests.support.devices import on_eight_devices
from tests.support.drafts import Foresight, alone, same
from tests.support.engines import (
    BLOCK,
    LAYOUTS,
    SCARCE,
    build,
    limits,
    restart,
    serve_at_random,
    some_requests,
)

DRAFTS = 3


@pytest.fixture(scope="module")
def plain() -> Engine:
    return build()


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(request) -> Engine:
    speculation = Speculation(DRAFTS, backs_off=False)
    return build(unified=request.param == "unified", speculation=speculation)


@pytest.mark.extended
@pytest.mark.parametrize("scarce", [False, True], ids=["ample", "scarce"])
@pytest.mark.parametrize("caching", [True, False], ids=["prefixes", "no-prefixes"])
def test_random_traffic_gives_the_tokens_of_runs_without_drafts(
    engine, plain, monkeypatch, caching, scarce
):
    """With windows, states, prefix caches, preemption and stop tokens, for good and bad drafts."""
    accepted = refused = reused = preempted = 0
    for seed, wrong in ((0, 0.2), (1, 0.6)):
        rng = np.random.default_rng([seed, caching, scarce])
        requests = some_requests(rng, 32)
        expected = alone(plain, requests)
        coming = {request: sequence.chosen for request, sequence in expected.items()}
        monkeypatch.setattr(engine._speculator, "proposer", Foresight(coming, rng, wrong))
        counts = SCARCE[engine.limits.unified] if scarce else None
        restart(engine, prefix_caching=caching, num_blocks=counts)
        sequences = serve_at_random(engine, requests, rng)
        for sequence in sequences:
            same(sequence, expected[sequence.request])
        done = engine.statistics
        accepted += done.num_accepted_tokens
        refused += done.num_drafted_tokens - done.num_accepted_tokens
        reused += sum(sequence.num_reused for sequence in sequences)
        preempted += engine.scheduler.num_preemptions
    assert accepted > 25
    assert refused > 25
    assert (reused > 0, preempted > 0) == (caching, scarce)


def test_refused_drafts_leave_nothing_behind(engine, plain, monkeypatch):
    """Blocks past the tokens are freed, and no published block holds refused tokens."""
    request = Request(tuple(range(30)), 24)
    expected = alone(plain, [request])
    chosen = {request: expected[request].chosen}
    wrong = Foresight(chosen, np.random.default_rng(0), wrong=0.5)
    monkeypatch.setattr(engine._speculator, "proposer", wrong)
    restart(engine)
    sequence = engine.add(request)
    while engine.has_work:
        engine.step()
        if sequence.finish_reason is None:
            length = len(sequence.tokens)
            tables = sequence.tables.values()
            assert all(len(table.blocks) <= -(-length // BLOCK) for table in tables)
            assert len(sequence.hashes) * BLOCK < length
            assert all(table.num_published * BLOCK < length for table in tables)
    # A conversation continues from the cache, with the tokens it has without one.
    longer = Request((*request.prompt, *sequence.chosen, 1), 2)
    same(engine.generate([longer])[0], alone(plain, [longer])[longer])


def test_options_of_requests_work_with_drafts(engine, plain, monkeypatch):
    """Shared prompts, stop strings and log-probabilities; with penalties there are no drafts."""
    prompt = tuple(range(40, 67))
    (free,) = alone(plain, [Request(prompt, 20)]).values()
    requests = [
        *(Request(prompt, 14, Sampling(1.0, seed=seed)) for seed in range(3)),  # share the prompt
        Request(prompt, 20, stop_strings=(free.text[5:7],)),
        Request(prompt, 12, logprobs=2),
        Request(prompt, 12, Sampling(presence_penalty=1.5)),
    ]
    expected = alone(plain, requests)
    coming = {request: sequence.chosen for request, sequence in expected.items()}
    right = Foresight(coming, np.random.default_rng(2), wrong=0.2)
    monkeypatch.setattr(engine._speculator, "proposer", right)
    restart(engine)
    sequences = engine.generate(requests)
    for sequence in sequences:
        same(sequence, expected[sequence.request])
    engine.check_idle()
    assert sequences[3].finish_reason == "stop"
    assert max(sequence.num_reused for sequence in sequences) == len(prompt) - 1
    found, wanted = sequences[4].likelihoods, expected[requests[4]].likelihoods
    assert len(found) == 12
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.token == theirs.token
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [t for t, _ in ours.alternatives] == [t for t, _ in theirs.alternatives]
    assert engine.statistics.num_accepted_tokens > 10
    restart(engine)
    engine.generate(requests[5:])
    assert engine.statistics.num_drafted_tokens == 0


def test_a_draft_never_preempts(monkeypatch):
    """If no block is free for it, the chunk stays as it is."""
    bounds = limits(num_blocks=SCARCE[False])
    scheduler = Scheduler(bounds)
    sequence = Sequence(Request(tuple(range(8)), 20))
    scheduler.add(sequence)
    (chunk,) = scheduler.schedule()
    assert chunk.stop == 4
    assert scheduler.add_drafts(chunk, (1, 2, 3)).end == 7
    pool = scheduler.pools["global"]
    pool.allocate(pool.num_free)
    free = {name: pool.num_free for name, pool in scheduler.pools.items()}
    chunk = dataclasses.replace(chunk, stop=chunk.stop + 4)
    assert scheduler.add_drafts(chunk, (1, 2, 3)) == chunk
    assert free == {name: pool.num_free for name, pool in scheduler.pools.items()}


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param("tensor=2", marks=pytest.mark.extended),
        pytest.param("context=2", marks=pytest.mark.slow),
    ],
)
def test_drafts_are_verified_on_several_devices(axes):
    on_eight_devices(f"""
from examples.engine.drafts.speculation import Speculation
model = load_model(checkpoints.CHECKPOINTS / "qwen3-tiny", mesh=make_mesh({axes!r}))
wanted = checkpoints.reference("qwen3-tiny")
buckets = (checkpoints.MIXED, checkpoints.Bucket(40, 8, 5, 4))
engine = checkpoints.make_engine(
    model, buckets=buckets, speculation=Speculation(4, backs_off=False)
)
engine._speculator.proposer = checkpoints.HalfRight(wanted)
tokens, error = checkpoints.serve(engine, wanted, 12)
np.testing.assert_array_equal(tokens, wanted["tokens"][:, :12])
assert error.max() <= checkpoints.MAX_ERROR, error.max()
assert engine.statistics.num_accepted_tokens > 10
""")


@pytest.mark.extended
def test_trees_and_a_draft_model_on_several_devices():
    """On two groups of two devices; the second of two paths holds the coming tokens."""
    on_eight_devices("""
from examples.engine.drafts import trees
from examples.engine.mesh import make_meshes
from examples.engine.drafts.speculation import Guess, Speculation

class Woods(checkpoints.HalfRight):
    def propose(self, sequences, most):
        guesses = []
        for sequence, count in zip(sequences, most, strict=True):
            start = len(sequence.chosen)
            right = self.coming[sequence.request.prompt][start : start + 2]
            candidates = [((right + 1) % 256).tolist(), right.tolist()]
            tokens, parents = trees.grow(candidates, count)
            guesses.append(Guess(tokens, parents=parents))
        return guesses

def load(mesh):
    return load_model(checkpoints.CHECKPOINTS / "qwen3-tiny", mesh=mesh)

wanted = checkpoints.reference("qwen3-tiny")
for mesh in make_meshes("data=2,tensor=2"):
    for speculation in (
        Speculation(4, load(mesh), backs_off=False),
        Speculation(4, branches=2, backs_off=False),
    ):
        buckets = checkpoints.MIXED, checkpoints.Bucket(40, 8, 5, 4, speculation.branches > 1)
        engine = checkpoints.make_engine(load(mesh), buckets=buckets, speculation=speculation)
        if speculation.branches > 1:
            engine._speculator.proposer = Woods(wanted)
        tokens, error = checkpoints.serve(engine, wanted, 12)
        np.testing.assert_array_equal(tokens, wanted["tokens"][:, :12])
        assert error.max() <= checkpoints.MAX_ERROR, error.max()
        done = engine.statistics
        assert done.num_accepted_tokens > 20, done
        if speculation.draft is not None:
            assert done.num_accepted_tokens == done.num_drafted_tokens, done
""")


# -- the distribution -----------------------------------------------------------------------------

WORDS, NEW = 5, 3
TABLE = np.random.default_rng(3).normal(size=(WORDS, WORDS)).astype(np.float32) * 1.2
DRAWN = Sampling(temperature=0.8, top_k=4, top_p=0.95)


def markov() -> Model:
    """Build a model whose next token depends only on the last one, not on the cache."""

    def step(params, caches, batch):
        _, caches = caches.attend(0, *(jnp.ones((len(batch.tokens), 1, 8)),), batch)
        last = batch.tokens.at[batch.logit_tokens].get(mode="clip")
        return params.at[last].get(mode="clip"), caches

    return Model(
        "markov", WORDS, 64, "float32", {0: AttentionCache(1, 8)}, jnp.asarray(TABLE), step
    )


def probabilities() -> np.ndarray:
    """Return the probabilities of the next token after each token, by NumPy."""
    rows = []
    for logits in TABLE.astype(np.float64) / DRAWN.temperature:
        order = np.argsort(-logits)[: DRAWN.top_k]
        p = np.exp(logits[order] - logits.max())
        p /= p.sum()
        kept = order[: np.searchsorted(np.cumsum(p), DRAWN.top_p) + 1]
        row = np.zeros(WORDS)
        row[kept] = np.exp(logits[kept])
        rows.append(row / row.sum())
    return np.array(rows)


def make_dice() -> Engine:
    model = markov()
    bounds = Limits(group_layers(model.layers), 64, 256, 4, 8, prefix_caching=False)
    return Engine(
        model,
        bounds,
        buckets=make_buckets(bounds, [64], [256], NEW - 1),
        speculation=Speculation(NEW - 1, backs_off=False),
    )


@pytest.fixture(scope="module")
def dice() -> Engine:
    return make_dice()


class Likely:
    """Proposes drafts that are often right."""

    is_cheap = True

    def propose(self, sequences, most) -> list[Guess]:
        guesses = []
        for sequence, count in zip(sequences, most, strict=True):
            tokens = sequence.tokens[-1:]
            for _ in range(count):
                tokens.append(int(TABLE[tokens[-1]].argmax()))
            guesses.append(Guess(tuple(tokens[1:])))
        return guesses


def distance(engine: Engine, monkeypatch) -> float:
    """Return chi-square per cell, of sequences of three tokens against their probabilities."""
    monkeypatch.setattr(engine._speculator, "proposer", Likely())
    engine.reset()
    count, p = 4000, probabilities()
    requests = [Request((0,), NEW, dataclasses.replace(DRAWN, seed=i)) for i in range(count)]
    found = np.zeros((WORDS,) * NEW)
    for sequence in engine.generate(requests):
        found[tuple(sequence.chosen)] += 1
    assert engine.statistics.num_accepted_tokens > count // 3
    assert engine.statistics.accepted_length > 1.3
    expected = count * p[0][:, None, None] * p[:, :, None] * p[None, :, :]
    assert found[expected == 0].sum() == 0
    often = expected >= 5
    return float(np.mean((found - expected)[often] ** 2 / expected[often]))


MOST = 1.6  # for a mean of some 60 squares, whose deviation is about 0.18


@pytest.mark.extended
def test_drawn_tokens_keep_their_distribution(dice, monkeypatch):
    assert distance(dice, monkeypatch) < MOST


@pytest.mark.extended
def test_accepting_a_draft_that_was_not_drawn_is_caught(dice, monkeypatch):
    """A wrong engine keeps a refused draft instead of the token that was drawn."""
    run = dice.run

    def wrong(bucket, inputs):
        tokens, *rest = run(bucket, inputs)
        tokens = np.array(tokens)
        for row, (count, start) in enumerate(
            zip(inputs.num_drafts, inputs.query_start_loc[1:] - inputs.num_drafts, strict=True)
        ):
            if count and tokens[row, 0] % 2:  # for half of the tokens
                tokens[row, 0] = inputs.tokens[start]
        return tokens, *rest

    monkeypatch.setattr(dice, "run", wrong)
    assert distance(dice, monkeypatch) > 2 * MOST


@pytest.mark.extended
def test_drawing_with_the_same_numbers_twice_is_caught(monkeypatch):
    """A wrong engine makes all choices of a chunk with the random numbers of the first."""

    def again(self, num_tokens):
        return jax.tree.map(lambda x: jnp.repeat(x, num_tokens), self)

    monkeypatch.setattr(SamplingRows, "of_next", again)
    assert distance(make_dice(), monkeypatch) > 2 * MOST


# -- lookup ---------------------------------------------------------------------------------------


def guess(tokens: list[int], most: int, shortest: int = 2) -> tuple[int, ...]:
    lookup = Lookup(shortest)
    sequence = Sequence(Request(tuple(tokens[:1]), 100))
    guesses = []
    for token in (None, *tokens[1:]):  # as it grows
        if token is not None:
            sequence.tokens.append(token)
        guesses = lookup.propose([sequence], [most])
    return guesses[0].tokens


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2], (3, 4, 5)),
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], (4, 1, 2)),  # the latest of equal matches
        ([7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], (3, 9, 1)),  # the longest match rather than the latest
        ([1, 2, 1, 2, 1, 2], (1, 2, 1)),
        ([5, 5, 5], (5, 5, 5)),
        ([1, 2, 3, 4], ()),
        ([2, 2], ()),
        ([2], ()),
    ],
)
def test_lookup_drafts_what_followed_the_same_tokens(tokens, drafts):
    assert guess(tokens, 3) == drafts


def test_lookup_matches_a_slow_search():
    rng = np.random.default_rng(1)
    for _ in range(60):
        tokens = rng.integers(0, 3, size=int(rng.integers(1, 40))).tolist()
        count, best = len(tokens), (0, 0)
        for end in range(2, count):
            length = 0
            while length < end and tokens[end - 1 - length] == tokens[-1 - length]:
                length += 1
            if length >= 2:
                best = max(best, (min(length, Lookup.LONGEST), end))
        expected = [*tokens[best[1] :]] if best[0] else []
        while expected and len(expected) < 4:
            expected.append(expected[len(expected) - (count - best[1])])
        assert list(guess(tokens, 4)) == expected[:4]


# -- backing off ----------------------------------------------------------------------------------


class Four:
    """Drafts as many tokens as it may."""

    is_cheap = True

    def propose(self, sequences, most) -> list[Guess]:
        return [Guess((1,) * n) for n in most]


def drafted_steps(right: float, cost: float, steps: int = 600, lives: int = 600) -> list[bool]:
    """Return which steps have drafts, `right` at a rate, for sequences of `lives` steps."""
    rng = np.random.default_rng(0)

    bounds = limits(prefix_caching=False)
    bounds = dataclasses.replace(bounds, token_budget=20)
    scheduler = Scheduler(bounds)
    without, drafted = Bucket(4, 4, 1), Bucket(20, 4, 5, 4)
    speculator = Speculator(Speculation(4), Four(), (without, drafted))
    done: list[bool] = []
    while len(done) < steps:
        if len(done) % lives == 0:
            scheduler.waiting.clear()
            scheduler.add(Sequence(Request((1,), 50)))
        plan = scheduler.schedule()
        plan = speculator.draft(plan, scheduler, without)
        done.append(any(chunk.drafts for chunk in plan))
        scheduler.commit(plan)
        for chunk in plan:
            if chunk.drafts:
                accepted = int(np.argmin([*(rng.random(4) < right), False]))
                scheduler.settle(chunk, 0)
                speculator.note_accepted(chunk.sequence, accepted)
            scheduler.preempt(chunk.sequence)  # it starts over, and so never ends
        bucket, seconds = (drafted, cost) if done[-1] else (without, 1.0)
        speculator.note_step(plan, bucket, seconds)
    return done


@pytest.mark.parametrize(
    ("right", "cost", "least", "most"),
    [
        (0.0, 1.5, 0.0, 0.03),  # never right
        (1.0, 1.5, 0.95, 1.0),
        (0.6, 1.3, 0.85, 1.0),  # 1.3 accepted, at a cost of 0.3 steps
        (0.3, 2.5, 0.0, 0.06),  # 0.4 accepted, at a cost of 1.5 steps
        (1.0, 6.0, 0.0, 0.06),  # all accepted, at a cost of 5 steps
    ],
)
def test_drafts_are_made_where_they_pay(right, cost, least, most):
    share = np.mean(drafted_steps(right, cost))
    assert least <= share <= most


def test_a_new_sequence_expects_what_others_gained():
    """With short requests in turn, not each one tries again what failed for the last."""
    assert np.mean(drafted_steps(0.0, 1.5, lives=8)) < 0.03
    assert np.mean(drafted_steps(1.0, 1.5, lives=8)) > 0.95


def test_fruitless_searches_take_little_time(monkeypatch):
    """However long a search takes. Steps between two searches neither search nor learn."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        "examples.engine.drafts.speculation.time",
        types.SimpleNamespace(perf_counter=lambda: clock.now),
    )

    class Slow:
        is_cheap, searches, notes = True, 0, 0

        def propose(self, sequences, most) -> list[Guess]:
            self.searches += 1
            clock.now += 0.05
            return [Guess() for _ in sequences]

        def note_step(self, plan):
            self.notes += 1

    slow, scheduler = Slow(), Scheduler(limits(prefix_caching=False))
    without = Bucket(4, 4, 1)
    speculator = Speculator(Speculation(3), slow, (without, Bucket(12, 4, 4, 3)))
    scheduler.add(Sequence(Request((1,), 50)))
    plan = scheduler.schedule()
    searches = []
    for _ in range(4000):
        assert speculator.draft(plan, scheduler, without) is plan
        speculator.note_step(plan, without, 1.0)
        searches.append(slow.searches)
    assert searches[:9] == [1, 2, 2, 2, 3, 3, 3, 3, 4]  # it rests two steps, then three, and so on
    share = 0.05 * (searches[-1] - searches[1999]) / 2000
    assert share == pytest.approx(Speculator.SEARCHES, rel=0.1)
    assert slow.notes <= slow.searches + 1


def test_a_step_without_drafts_has_the_program_of_an_engine_without(engine, plain):
    """The programs differ only in metadata about the lines of Python that made them."""

    def programs(engine: Engine) -> dict[Bucket, list[str]]:
        texts = {b: p.as_text() for b, p in engine.steps.programs.items() if not b.num_drafts}
        return {
            bucket: [
                re.sub(r", metadata=\{.*?\}", "", line)
                for line in text.splitlines()
                if not line[:1].isdigit()  # lines of the tables of source locations
            ]
            for bucket, text in texts.items()
        }

    wanted = programs(build(unified=True) if engine.limits.unified else plain)
    assert len(wanted) == 2
    assert programs(engine) == wanted


def test_a_step_that_scores_a_prompt_has_no_drafts():
    """No program does both."""
    bounds = limits(prefix_caching=False)
    scheduler, drafted = Scheduler(bounds), Bucket(12, 4, 4, 3)
    speculator = Speculator(Speculation(3, backs_off=False), Four(), (drafted,))
    request = Request((1, 2), 9, logprobs=0, prompt_logprobs=True)
    scheduler.add(Sequence(request))
    plan = scheduler.schedule()
    scoring = Bucket(12, 4, 12, scores=True)
    assert scoring.holds(plan)
    assert speculator.draft(plan, scheduler, scoring) is plan
    assert speculator.draft(plan, scheduler, dataclasses.replace(scoring, scores=False))[0].drafts


def test_wrong_settings_are_reported():
    with pytest.raises(ValueError, match=r"num_drafts is 0, .*shortest is -1"):
        Speculation(0, shortest=-1)
    for text in ("lookup=-1", "lookup=8x", "guess=4", "lookup=x", ""):
        with pytest.raises(ValueError, match="must be lookup=N, draft=N or mtp=N"):
            read_speculation(text)
    assert read_speculation("lookup=6") == Speculation(6)
    assert read_speculation("lookup") == Speculation()
    assert read_speculation("lookup=8x2") == Speculation(8, branches=2)


def test_accepted_drafts_are_counted(engine, plain, monkeypatch):
    request = Request((1, 2, 3), 13)
    coming = {request: alone(plain, [request])[request].chosen}

    class All(Foresight):
        def propose(self, sequences, most):
            at = [len(sequence.chosen) for sequence in sequences]
            both = zip(at, most, strict=True)
            return [Guess(tuple(coming[request][i : i + n])) for i, n in both]

    monkeypatch.setattr(engine._speculator, "proposer", All(coming, np.random.default_rng(0), 0))
    restart(engine, prefix_caching=False)
    (sequence,) = engine.generate([request])
    done = engine.statistics
    assert sequence.chosen == coming[request]
    assert (done.num_steps, done.num_new_tokens) == (4, 13)  # 3 with the prompt, then 4, 4, 2
    assert done.accepted_length == 13 / 4
    assert done.num_drafted_tokens == done.num_accepted_tokens == 9
    assert done.tokens_per_second > 0
    text = metrics.exposition(engine, {})
    assert "jattn_accepted_tokens_total 9" in text
    assert "jattn_accepted_length 3.25" in text
    # While programs are compiled in the background, nothing is drafted.
    monkeypatch.setattr(programs.Programs, "num_coming", 1)
    restart(engine, prefix_caching=False)
    assert engine.generate([request])[0].chosen == coming[request]
    assert engine.statistics.num_drafted_tokens == 0
