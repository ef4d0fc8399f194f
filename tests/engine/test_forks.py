"""Several texts of one prompt have the tokens of separate runs, and compute the prompt once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from examples.engine import forks
from examples.engine.request import Request, Sampling
from examples.engine.scheduler import Scheduler
from tests.support.engines import (
    BLOCK,
    LAYOUTS,
    MAX_SEQS,
    SCARCE,
    build,
    compare_with_separate_runs,
    restart,
    serve_at_random,
)


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(request):
    return build(unified=request.param == "unified")


def several(prompt: tuple[int, ...], count: int, new: int = 9) -> list[Request]:
    """Return requests that share one tuple as their prompt, as those of one body do."""
    return [Request(prompt, new, Sampling(1.0, seed=seed)) for seed in range(count)]


@pytest.mark.parametrize("length", [2, BLOCK, BLOCK + 1, 23, 24, 25, 26])
@pytest.mark.parametrize(
    "caching",
    [
        pytest.param(True, id="prefixes"),
        pytest.param(False, id="no-prefixes", marks=pytest.mark.extended),
    ],
)
def test_a_prompt_is_computed_once(engine, length, caching):
    restart(engine, prefix_caching=caching)
    prompt = tuple(range(50, 50 + length))
    sequences = engine.generate(several(prompt, MAX_SEQS))
    computed = length - 1 + MAX_SEQS * 9  # each computes the prompt's last token itself
    assert engine.statistics.num_computed_tokens == computed
    assert [s.num_reused for s in sequences] == [0] + [length - 1] * (MAX_SEQS - 1)
    engine.check_idle()
    compare_with_separate_runs(engine, sequences)
    assert len({tuple(s.chosen) for s in sequences}) == MAX_SEQS


def test_full_blocks_are_shared(engine):
    restart(engine, prefix_caching=False)
    prompt = tuple(range(37))
    for request in several(prompt, MAX_SEQS):
        engine.add(request)
    while len(engine.scheduler.running) < MAX_SEQS:
        engine.step()
    tables = [s.tables["global"].blocks for s in engine.scheduler.running]
    assert len({tuple(blocks[:9]) for blocks in tables}) == 1
    assert len({blocks[9] for blocks in tables}) == MAX_SEQS
    list(engine.stream())
    engine.check_idle()


@pytest.mark.extended
@pytest.mark.parametrize("scarce", [False, True], ids=["ample", "scarce"])
def test_random_traffic_of_forks(engine, scarce):
    forked = preempted = 0
    for seed in range(2):
        rng = np.random.default_rng([seed, scarce])
        restart(engine, num_blocks=SCARCE[engine.limits.unified] if scarce else None)
        requests = []
        for _ in range(8):
            prompt = tuple(rng.integers(0, 256, size=int(rng.integers(1, 30))).tolist())
            some = several(prompt, int(rng.integers(1, 7)), int(rng.integers(1, 20)))
            penalty = Sampling(1.0, seed=9, presence_penalty=1.0)
            requests += [*some, dataclasses.replace(some[0], sampling=penalty)]
        sequences = serve_at_random(engine, requests, rng)
        forked += sum(s.num_reused % BLOCK > 0 for s in sequences)
        preempted += engine.scheduler.num_preemptions
        compare_with_separate_runs(engine, sequences)
    assert forked > 4
    assert (preempted > 0) == scarce


def _share_the_partial_block(sequence, leader):
    sequence.num_computed = forks.fork_point(leader)
    for name, table in sequence.tables.items():
        num_full = len(table.blocks)
        table.grow(sequence.num_computed)
        table.blocks[num_full:] = leader.tables[name].blocks[num_full : len(table.blocks)]
    return {}


def _copy_nothing(sequence, leader):
    forks.take_partial_blocks(sequence, leader)
    return {}


@pytest.mark.parametrize("wrong", [_share_the_partial_block, _copy_nothing])
def test_a_wrong_fork_is_caught(engine, monkeypatch, wrong):
    monkeypatch.setattr("examples.engine.scheduler.take_partial_blocks", wrong)

    def serve_and_compare():
        rng = np.random.default_rng(0)
        restart(engine)
        sequences = serve_at_random(engine, several(tuple(range(22)), MAX_SEQS), rng)
        monkeypatch.undo()
        compare_with_separate_runs(engine, sequences)

    with pytest.raises((AssertionError, ValueError)):
        serve_and_compare()
    engine.scheduler = Scheduler(engine.limits)  # drop what the wrong one left behind
