"""Speculative decoding with a model's MTP layer: drafts as published, tokens as without it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from examples.engine.caches import group_layers, init_caches
from examples.engine.drafts.draft_model import check_speculation
from examples.engine.drafts.speculation import Guess, Speculation, read_speculation
from examples.engine.engine import Engine
from examples.engine.model import Batch, Model, StateIds, load_model
from examples.engine.request import Request
from examples.options import CHECKPOINTS
from tests.support.drafts import Noting, Silent, alone, same
from tests.support.engines import (
    build,
    limits,
    restart,
    serve_at_random,
    some_requests,
)
from tests.support.published_mtp import (
    Published,
    PublishedDeepseek,
    write_deepseek,
    write_qwen3_next,
)
from tests.support.tiny_model import dense_guesses, tiny_model

DRAFTS = 3


def make_engine(model: Model) -> Engine:
    return build(model, speculation=Speculation(DRAFTS, mtp=True, backs_off=False))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(tiny_model(mtp=True))


@pytest.mark.extended
@pytest.mark.parametrize(
    "caching",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["prefixes", "no-prefixes"],
)
def test_guesses_are_those_of_the_model_without_a_cache(engine, monkeypatch, caching):
    """With windows, states, preemption and cached prefixes. Tokens are as without drafts."""
    rng = np.random.default_rng(caching)
    requests = some_requests(rng, 24)
    guesser = engine._speculator.proposer
    monkeypatch.setattr(engine._speculator, "proposer", Silent())
    expected = alone(engine, requests)
    coming = {request: sequence.chosen for request, sequence in expected.items()}
    noting = Noting(guesser, coming)
    monkeypatch.setattr(engine._speculator, "proposer", noting)
    counts = {"sliding": 7, "global": 17, "state": 5}
    restart(engine, prefix_caching=caching, num_blocks=counts)
    sequences = serve_at_random(engine, requests, rng)
    for sequence in sequences:
        same(sequence, expected[sequence.request])
    done = engine.statistics
    assert engine.scheduler.num_preemptions > 0
    assert 25 < done.num_accepted_tokens < done.num_drafted_tokens - 25
    params = engine.model.params
    right = [dense_guesses(params, tokens, DRAFTS)[: len(g)] == g for tokens, g in noting.noted]
    assert len(right) > 40
    # The last entry of a reused block was computed with the token that followed it in another text.
    assert np.mean(right) > (0.8 if caching else 0.999)


@pytest.mark.extended
def test_a_prompt_that_is_handed_over_brings_what_drafts_need(engine, monkeypatch):
    """Including the last token's keys and values, which depend on the token that comes next."""
    rng, guesser = np.random.default_rng(2), engine._speculator.proposer
    lengths = (2, 9, 17, 30, 40)
    requests = [Request(tuple(rng.integers(0, 256, size=n).tolist()), 12) for n in lengths]
    given = [Request(r.prompt[:-1], 1, follow=r.prompt[-1:], hands_over=True) for r in requests]
    monkeypatch.setattr(engine._speculator, "proposer", Silent())
    expected = alone(engine, requests)
    contents = [sequence.taken.fetched() for sequence in engine.generate(given)]
    noting = Noting(guesser, {request: expected[request].chosen for request in requests})
    monkeypatch.setattr(engine._speculator, "proposer", noting)
    restart(engine, prefix_caching=False)
    sequences = [engine.add(*pair) for pair in zip(requests, contents, strict=True)]
    assert len(list(engine.stream())) == 12 * len(requests)
    assert [s.chosen for s in sequences] == [expected[r].chosen for r in requests]
    assert engine.statistics.num_received_prompts == len(requests)
    params = engine.model.params
    right = [dense_guesses(params, tokens, len(g)) == g for tokens, g in noting.noted]
    assert len(right) > 15
    assert all(right), right


@pytest.mark.extended
def test_a_guess_needs_the_step_before_it(engine):
    """Without hidden states there are no drafts, as for a sequence that starts over."""
    proposer = engine._speculator.proposer
    restart(engine)
    sequence = engine.add(Request((1, 2, 3), 12))
    engine.step()
    assert len(proposer.propose([sequence], [2])[0].tokens) == 2
    assert proposer.propose([sequence], [0]) == [Guess()]
    sequence.tokens.append(5)
    assert proposer.propose([sequence], [2]) == [Guess()]
    sequence.tokens.pop()
    engine.scheduler.preempt(sequence)
    assert proposer.propose([sequence], [2]) == [Guess()]
    engine.abort(sequence)


def test_models_without_an_mtp_layer_are_refused():
    with pytest.raises(ValueError, match=r"tiny speculates with MTP: it must be loaded with"):
        check_speculation(Speculation(DRAFTS, mtp=True), tiny_model(), limits())
    with pytest.raises(ValueError, match="branches is 2, but must be 1 when a model drafts"):
        read_speculation("mtp=4x2")
    with pytest.raises(ValueError, match="if and only if --draft is given"):
        read_speculation("mtp", tiny_model())
    with pytest.raises(ValueError, match="mtp is True, but there is a draft model"):
        Speculation(2, tiny_model(), mtp=True)
    assert read_speculation("mtp=2") == Speculation(2, mtp=True)
    with pytest.raises(ValueError, match="'qwen3', but must be deepseek_v3 or qwen3_next"):
        load_model(CHECKPOINTS / "qwen3-tiny", mtp=True)
    with pytest.raises(ValueError, match=r"mtp.fc.weight is missing"):
        load_model(CHECKPOINTS / "qwen3-next-tiny", mtp=True)
    with pytest.raises(ValueError, match=r"has no MTP layer: layers.3.eh_proj.weight is missing"):
        load_model(CHECKPOINTS / "deepseek-v3-tiny", mtp=True)


# -- published layers -----------------------------------------------------------------------------


def hidden_states(step, model: Model, tokens: list[int]) -> np.ndarray:
    """Return the hidden states of all tokens, from one jitted step of 64."""
    count = len(tokens)
    groups = group_layers(model.layers)
    caches = init_caches(model.layers, {g.name: 1 for g in groups}, 64, jattn.Dense("float32"))
    where = jnp.arange(64, dtype=jnp.int32)
    starts, zero = jnp.array([0, count], jnp.int32), jnp.zeros(1, jnp.int32)
    slots = jnp.where(where < count, where, -1)
    metadata = jattn.AttentionMetadata(zero[None], starts[1:], starts, slots, 64)
    batch = Batch(
        tokens=jnp.array((tokens + [0] * 64)[:64], jnp.int32),
        positions=where,
        query_start_loc=starts,
        logit_tokens=starts[1:] - 1,
        attention={"global": metadata},
        states={"state": StateIds(zero - 1, zero)} if any(g.is_state for g in groups) else {},
        max_query_len=64,
    )
    return np.asarray(step(model.params, caches, batch)[1][:count], np.float64)


FAMILIES = {  # writes a checkpoint, computes its drafts, has so few blocks that some are preempted
    "qwen3-next": (write_qwen3_next, Published, {"global": 20, "state": 5}),
    "deepseek-v3": (write_deepseek, PublishedDeepseek, {"global": 20}),
}


@pytest.mark.parametrize(
    ("write", "published", "blocks"),
    [
        pytest.param(
            *family,
            id=name,
            marks=pytest.mark.slow if name == "qwen3-next" else pytest.mark.extended,
        )
        for name, family in FAMILIES.items()
    ],
)
def test_a_family_guesses_as_published(write, published, blocks, tmp_path, monkeypatch):
    """With preemption, cached prefixes and states. Tokens are as without drafts."""
    write(tmp_path / "model")
    model = load_model(tmp_path / "model", mtp=True)
    engine, reference = make_engine(model), published(tmp_path / "model")
    guesser = engine._speculator.proposer
    rng = np.random.default_rng(3)
    requests = some_requests(rng, 16)
    monkeypatch.setattr(engine._speculator, "proposer", Silent())
    expected = alone(engine, requests)
    coming = {request: sequence.chosen for request, sequence in expected.items()}
    noting, step = Noting(guesser, coming), jax.jit(model.mtp.step)
    for caching in (False, True):
        monkeypatch.setattr(engine._speculator, "proposer", noting)
        restart(engine, prefix_caching=caching, num_blocks=blocks)
        for sequence in serve_at_random(engine, requests, rng):
            same(sequence, expected[sequence.request])
        assert engine.scheduler.num_preemptions > 0
        assert engine.statistics.num_accepted_tokens > 10
        if not caching:
            checked = noting.noted[:: max(1, len(noting.noted) // 12)]
            assert len(checked) >= 10
            for tokens, guesses in checked:
                hidden = hidden_states(step, model, tokens[:-1])
                assert reference.guesses(hidden, tokens, len(guesses)) == guesses
