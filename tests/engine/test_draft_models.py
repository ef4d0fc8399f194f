"""Draft models and trees of draft tokens: tokens are as without speculative decoding."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest

from examples.engine import arrays
from examples.engine.drafts import trees
from examples.engine.drafts.draft_model import check_speculation
from examples.engine.drafts.speculation import (
    Guess,
    Lookup,
    Speculation,
    read_speculation,
)
from examples.engine.engine import Engine
from examples.engine.mesh import DeviceMesh, make_mesh
from examples.engine.request import Request, Sequence
from examples.engine.scheduler import Scheduler
from tests.support.drafts import alone, same
from tests.support.engines import (
    build,
    limits,
    restart,
    serve_at_random,
    some_requests,
)
from tests.support.tiny_model import tiny_model

DRAFTS = 3
NODES = 6  # in a tree
CONTEXT_MESH = DeviceMesh(types.SimpleNamespace(shape={"tensor": 1, "context": 2}))

# -- a draft model --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attending() -> Engine:
    """An engine without drafts, for a model that supports draft models and trees."""
    return build(tiny_model(only_attends=True))


@pytest.fixture(scope="module")
def drafted() -> Engine:
    """An engine whose draft model is the model itself."""
    model = tiny_model(only_attends=True)
    return build(model, speculation=Speculation(DRAFTS, model, backs_off=False))


@pytest.fixture(scope="module")
def branching() -> Engine:
    """An engine that verifies trees."""
    model = tiny_model(only_attends=True)
    return build(model, speculation=Speculation(NODES, branches=2, backs_off=False))


def serve_drafted(drafted: Engine, attending: Engine, seed: int) -> float:
    """Serve random traffic and return the share of draft tokens that were accepted."""
    rng = np.random.default_rng(seed)
    requests = some_requests(rng, 24)
    restart(drafted, num_blocks={"global": 17, "sliding": 7})
    sequences = serve_at_random(drafted, requests, rng)
    assert drafted.scheduler.num_preemptions > 0
    expected = alone(attending, requests)
    for sequence in sequences:
        same(sequence, expected[sequence.request])
    done = drafted.statistics
    assert done.num_drafted_tokens > 60
    return done.num_accepted_tokens / done.num_drafted_tokens


@pytest.mark.extended
def test_a_model_that_drafts_for_itself_is_always_right(drafted, attending):
    """Even where tokens are drawn: both draw with the same random numbers."""
    assert serve_drafted(drafted, attending, 0) > 0.98


@pytest.mark.extended
def test_a_slightly_different_draft_model_is_sometimes_right(drafted, attending, monkeypatch):
    other = tiny_model(only_attends=True, noise=0.05)
    monkeypatch.setattr(drafted._speculator.proposer, "model", other)
    assert 0.2 < serve_drafted(drafted, attending, 1) < 0.95


@pytest.mark.extended
def test_a_draft_model_starts_over_after_a_failure(drafted, attending, monkeypatch):
    proposer = drafted._speculator.proposer
    restart(drafted)
    for leaf in jax.tree.leaves(proposer.caches):
        leaf.delete()
    request = Request((1, 2, 3), 12)
    (sequence,) = drafted.generate([request])
    same(sequence, alone(attending, [request])[request])
    assert drafted.statistics.num_accepted_tokens > 6


def test_unsuitable_draft_models_are_refused(monkeypatch):
    target = tiny_model(only_attends=True)
    wrong = dataclasses.replace(tiny_model(), vocab_size=300, max_positions=20)
    words = r"draft model tiny: its vocabulary has 300 .*256.*recurrent layers.*for 20 .*support 60"
    with pytest.raises(ValueError, match=words):
        check_speculation(Speculation(DRAFTS, wrong), target, limits())
    elsewhere = dataclasses.replace(target, mesh=make_mesh("tensor=1"))
    with pytest.raises(ValueError, match="on other devices than tiny: load both with one mesh"):
        check_speculation(Speculation(DRAFTS, elsewhere), target, limits())
    dealt = dataclasses.replace(target, mesh=CONTEXT_MESH)
    with pytest.raises(ValueError, match="its mesh has context=2, but must have context=1"):
        check_speculation(Speculation(DRAFTS, dealt), dealt, limits())
    monkeypatch.setattr(arrays, "init_caches", None)  # refused before any caches are made
    with pytest.raises(ValueError, match="draft model tiny: its vocabulary has 300 tokens"):
        Engine(target, limits(), speculation=Speculation(DRAFTS, wrong))
    with pytest.raises(ValueError, match="if and only if --draft is given"):
        read_speculation("draft=4")
    with pytest.raises(ValueError, match="if and only if --draft is given"):
        read_speculation("lookup=4", target)
    assert read_speculation("draft=2", target) == Speculation(2, target)


# -- trees ----------------------------------------------------------------------------------------


class Woods:
    """Random trees with all or some of the coming tokens on one of their paths."""

    is_cheap = True

    def __init__(self, coming: dict[Request, list[int]], rng: np.random.Generator):
        self.coming, self.rng = coming, rng

    def propose(self, sequences, most) -> list[Guess]:
        guesses = []
        for sequence, count in zip(sequences, most, strict=True):
            right = self.coming[sequence.request][len(sequence.chosen) :][:count]
            candidates = []
            for _ in range(4):
                kept = self.rng.integers(len(right) + 1)
                wrong = self.rng.integers(0, 256, size=2).tolist()
                candidates.append((*right[:kept], *wrong))
            tokens, parents = trees.grow(candidates, count)
            guesses.append(Guess(tokens, parents=parents))
        return guesses


def serve_trees(branching: Engine, attending: Engine, seed: int) -> Engine:
    rng = np.random.default_rng(seed)
    requests = some_requests(rng, 24)
    expected = alone(attending, requests)
    coming = {request: sequence.chosen for request, sequence in expected.items()}
    engine = restart(branching, num_blocks={"global": 17, "sliding": 7})
    engine._speculator.proposer = Woods(coming, rng)
    for sequence in serve_at_random(engine, requests, rng):
        same(sequence, expected[sequence.request])
    return engine


@pytest.mark.extended
def test_a_path_through_a_tree_gives_the_tokens_of_runs_without_drafts(
    branching, attending, monkeypatch
):
    """With windows, preemption and reused prefixes, for greedy and for drawn tokens."""
    out_of_place = []
    settle = Scheduler.settle

    def noting(self, chunk, num_accepted):
        out_of_place.append(len(chunk.sequence.tokens) - chunk.stop - 1 - num_accepted)
        settle(self, chunk, num_accepted)

    monkeypatch.setattr(Scheduler, "settle", noting)
    engine = serve_trees(branching, attending, 0)
    done = engine.statistics
    assert 40 < done.num_accepted_tokens < done.num_drafted_tokens - 40
    assert max(out_of_place) > 1
    assert engine.scheduler.num_preemptions > 0


def _chain(parents):
    return np.tril(np.ones((len(parents), len(parents)), bool))


WRONG = {
    "others-are-seen": ("examples.engine.drafts.trees.paths", _chain),
    "a-place-is-a-position": (
        "examples.engine.drafts.trees.depths",
        lambda parents: np.arange(1, len(parents) + 1, dtype=np.int32),
    ),
    "kept-where-they-lie": (
        "examples.engine.scheduler.Scheduler.settle",
        lambda self, chunk, _, settle=Scheduler.settle: settle(
            self, chunk, len(chunk.sequence.tokens) - chunk.stop - 1
        ),
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", WRONG)
def test_wrong_trees_are_caught(branching, attending, monkeypatch, name):
    monkeypatch.setattr(*WRONG[name])

    def serve():
        for seed in range(3):
            serve_trees(branching, attending, seed)

    with pytest.raises((AssertionError, ValueError)):
        serve()
    branching.scheduler = Scheduler(branching.limits)


@pytest.mark.parametrize(
    ("candidates", "most", "tokens", "parents"),
    [
        ([(1, 2, 3), (1, 4)], 6, (1, 2, 3, 4), (-1, 0, 1, 0)),
        ([(1, 2, 3), (5, 2), (1, 2, 6)], 9, (1, 2, 3, 5, 2, 6), (-1, 0, 1, -1, 3, 1)),
        ([(1, 2, 3, 4), (5, 6, 7)], 4, (1, 2, 5, 6), (-1, 0, -1, 2)),
        ([(1, 2)], 1, (1,), (-1,)),
        ([(1, 2)], 0, (), ()),
    ],
)
def test_continuations_share_their_common_prefix(candidates, most, tokens, parents):
    assert trees.grow(candidates, most) == (tokens, parents)
    assert trees.depths((-1, 0, 1, 0, 1)).tolist() == [1, 2, 3, 2, 3]
    assert trees.paths((-1, 0, -1)).tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


def test_lookup_drafts_a_tree_where_text_continued_in_two_ways():
    sequence = Sequence(Request((1, 2, 3, 7, 1, 2, 4, 8, 1, 2), 100))
    (guess,) = Lookup(2, branches=2).propose([sequence], [5])
    assert (guess.tokens, guess.parents) == ((4, 8, 1, 3, 7), (-1, 0, 1, -1, 3))


def test_trees_are_refused_with_states_or_context_parallelism():
    dealt = dataclasses.replace(tiny_model(only_attends=True), mesh=CONTEXT_MESH)
    for model in (tiny_model(), dealt):
        with pytest.raises(ValueError, match="branches is 2, but must be 1 for tiny"):
            check_speculation(Speculation(4, branches=2), model, limits())
    with pytest.raises(ValueError, match="branches is 2, but must be 1 when a model drafts"):
        Speculation(4, tiny_model(), branches=2)
