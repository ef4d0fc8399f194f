"""Engines of the tiny model, random traffic for them, and checks that all of them must pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.engine.caches import group_layers
from examples.engine.drafts.speculation import Speculation
from examples.engine.engine import Engine
from examples.engine.model import Model
from examples.engine.request import Request, Sampling, Sequence
from examples.engine.scheduler import PAGES, Limits
from examples.engine.step import make_buckets
from examples.text import Bytes
from tests.support.tiny_model import tiny_model

MAX_SEQS, BUDGET, BLOCK, MAX_LEN = 4, 12, 4, 60
SCARCE = {False: {"sliding": 7, "global": 17, "state": 5}, True: {PAGES: 30}}
# How caches lie in pools. CI runs all tests with both layouts, the default run the quick ones.
LAYOUTS = ("two-pools", pytest.param("unified", marks=pytest.mark.extended))


def limits(
    model: Model | None = None,
    *,
    budget: int = BUDGET,
    block_size: int = BLOCK,
    max_len: int = MAX_LEN,
    unified: bool = False,
    **more,
) -> Limits:
    groups = group_layers((model or tiny_model()).layers, unified=unified)
    return Limits(groups, MAX_SEQS, budget, block_size, max_len, unified=unified, **more)


def build(
    model: Model | None = None,
    *,
    unified: bool = False,
    sizes: dict[str, int] | None = None,
    speculation: Speculation | None = None,
    **options,
) -> Engine:
    """Build an engine with one step shape for prompts, which keeps logits and checks its steps.

    `sizes` are arguments of `limits`. The same arguments need the same programs, so test files that
    share arguments compile them only once.
    """
    bounds = limits(model, unified=unified, **(sizes or {}))
    drafts = {}
    if speculation:
        drafts = {"num_drafts": speculation.num_drafts, "trees": speculation.branches > 1}
    buckets = make_buckets(bounds, [bounds.max_seqs], [bounds.token_budget], **drafts)
    given = {"tokenizer": Bytes(), "check": True, "keep_logits": True, **options}
    return Engine(model or tiny_model(), bounds, buckets=buckets, speculation=speculation, **given)


def restart(engine: Engine, **changes) -> Engine:
    """Empty a compiled engine: every cache holds NaN, and the scheduler is new.

    `changes` change its limits; fewer blocks than the arrays have compile nothing.
    """

    def poison(array: jax.Array) -> jax.Array:
        kind = jnp.nan if jnp.issubdtype(array.dtype, jnp.floating) else -1
        return jnp.full_like(array, kind)

    engine.caches = jax.tree.map(poison, engine.caches)
    engine.reset(**changes)
    return engine


def some_requests(rng: np.random.Generator, count: int) -> list[Request]:
    """Draw requests, greedy and sampled, long and short; many share a prefix."""
    shared = rng.integers(0, 256, size=(3, 24))
    shared[1, BLOCK:] = shared[0, BLOCK:]  # the same blocks after a different one
    shared = shared.tolist()
    requests = []
    for _ in range(count):
        prefix = shared[rng.integers(3)][: rng.integers(25)]
        rest = rng.integers(0, 256, size=int(rng.integers(1, 16))).tolist()
        sampling = Sampling()
        if rng.random() < 0.4:
            sampling = Sampling(
                temperature=float(rng.choice([0.3, 1.0])),
                top_k=int(rng.choice([0, 3, 40])),
                top_p=float(rng.choice([1.0, 0.7])),
                seed=int(rng.integers(2**32)),
            )
        new = int(rng.integers(1, 21))
        stops = tuple(rng.integers(0, 256, size=20).tolist()) if rng.random() < 0.3 else ()
        requests.append(Request((*prefix, *rest), new, sampling, stops))
    return requests


def held_by_running(engine: Engine, pool) -> list[int]:
    """Return the ids of a pool that running sequences hold, once per holder."""
    ids = []
    for sequence in engine.scheduler.running:
        for table in sequence.tables.values():
            if table.pool is pool:
                ids += table.blocks[table.num_returned :]
        ids += [state.read for state in sequence.states.values() if state.pool is pool]
    return [id for id in ids if id >= 0]


def serve_at_random(engine: Engine, requests: list[Request], rng) -> list[Sequence]:
    """Serve requests that come and go at random steps, and check the pools after each step."""
    sequences, coming = [], list(requests)
    while coming or engine.has_work:
        while coming and rng.random() < 0.4:
            sequences.append(engine.add(coming.pop(0)))
        if sequences and rng.random() < 0.06:
            engine.abort(sequences[rng.integers(len(sequences))])
        outputs = engine.step()
        if engine.speculation is None:
            assert len({output.sequence for output in outputs}) == len(outputs)
        for pool in engine.scheduler.pools.values():
            held = held_by_running(engine, pool)
            assert pool.num_used == len(set(held))
            assert [pool._holders[id] for id in set(held)] == [held.count(i) for i in set(held)]
        rows = [sequence.row for sequence in engine.scheduler.running]
        assert len(set(rows)) == len(rows) <= MAX_SEQS
        assert engine.statistics.num_steps < 100_000
    engine.check_idle()
    return sequences


def compare_with_separate_runs(engine: Engine, sequences: list[Sequence]) -> None:
    """Check that every request has the same tokens when it runs alone and reuses no prefix."""
    restart(engine, prefix_caching=False)
    for sequence in sequences:
        (alone,) = engine.generate([sequence.request])
        assert alone.num_reused == alone.num_preemptions == 0
        if sequence.finish_reason == "abort":
            assert sequence.chosen == alone.chosen[: len(sequence.chosen)]
        else:
            assert sequence.chosen == alone.chosen
            assert sequence.text == alone.text
            assert sequence.finish_reason == alone.finish_reason
