"""Penalties, biases, `min_p` and log-probabilities, compared with NumPy and under preemption."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from examples.engine.drafts.speculation import Speculation
from examples.engine.engine import Engine
from examples.engine.request import Request, Sampling
from examples.engine.sampling import keep_likely
from examples.engine.statistics import count_compilations
from examples.engine.step import Bucket
from tests.support.engines import BUDGET, MAX_SEQS, SCARCE, build

WAYS = {
    "presence": Sampling(presence_penalty=1.5),
    "frequency": Sampling(frequency_penalty=-0.7),
    "repetition": Sampling(repetition_penalty=1.3),
    "bias": Sampling(logit_bias=((3, 2.5), (200, -100.0), (77, 4.0))),
    "all": Sampling(0.0, 0, 1.0, 0.0, 0, 0.4, 0.9, 0.8, ((9, 5.0),)),
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    # Drafts wherever possible.
    return build(speculation=Speculation(3, shortest=1, backs_off=False))


def adjusted(logits: np.ndarray, prompt, generated, sampling: Sampling) -> np.ndarray:
    """Apply a request's biases and penalties to logits [vocabulary], token by token."""
    found = logits.astype(np.float64)
    for token, bias in sampling.logit_bias:
        found[token] += bias
    for token in {*prompt, *generated}:
        by = sampling.repetition_penalty
        found[token] = found[token] / by if found[token] > 0 else found[token] * by
    for token in set(generated):
        times = generated.count(token)
        found[token] -= sampling.frequency_penalty * times + sampling.presence_penalty
    return found


def check_choices(sequence) -> int:
    """Check greedy choices against adjusted logits; return how many the adjustment changed."""
    request, changed = sequence.request, 0
    for i, (token, logits) in enumerate(zip(sequence.chosen, sequence.logits, strict=True)):
        wanted = adjusted(logits, request.prompt, sequence.chosen[:i], request.sampling)
        assert wanted[token] >= wanted.max() - 1e-4
        changed += token != logits.argmax()
    return changed


@pytest.mark.parametrize("way", WAYS)
def test_choices_match_numpy(engine, way):
    engine.reset()
    prompts = [(5, 5, 9), (1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2), (7,)]
    sequences = engine.generate([Request(prompt, 16, WAYS[way]) for prompt in prompts])
    assert sum(map(check_choices, sequences)) > 0


def test_requests_in_one_batch_do_not_affect_each_other(engine):
    engine.reset()
    prompt = (4, 4, 8, 15, 16, 23)
    requests = [Request(prompt, 14, sampling) for sampling in (Sampling(), *WAYS.values())]
    requests += [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, temperature=1.0, seed=i))
        for i, r in enumerate(requests)
    ]
    alone = []
    for request in requests:
        alone += [engine.generate([request])[0].chosen]
    engine.generate(requests[:2])  # they share a prompt, and compile the copy of its blocks
    engine.reset(num_blocks=SCARCE[False])
    with count_compilations() as compilations:
        together = engine.generate(requests)
    assert compilations.count == 0
    assert engine.scheduler.num_preemptions > 0  # preempted rows are filled in again
    assert [sequence.chosen for sequence in together] == alone
    assert len({tuple(tokens) for tokens in alone}) > 8


@pytest.mark.parametrize("min_p", [0.0, 0.01, 0.3, 1.0])
def test_unlikely_tokens_are_left_out(min_p):
    logits = np.random.default_rng(3).normal(size=(5, 40)).astype(np.float32) * 3
    kept = np.isfinite(keep_likely(jnp.asarray(logits), jnp.full(5, min_p, jnp.float32)))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    clear = np.abs(weights - min_p) > 1e-5
    assert (kept == (weights >= min_p))[clear].all()
    assert kept[np.arange(5), logits.argmax(axis=1)].all()


def log_softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def test_log_probabilities_are_those_of_unadjusted_logits(engine):
    engine.reset()
    requests = [
        Request((1, 2, 3), 6, logprobs=4),
        Request((1, 2, 3), 6, Sampling(2.0, seed=3, presence_penalty=1.0), logprobs=0),
        Request((9,), 6),
    ]
    several, one, none = engine.generate(requests)
    assert none.likelihoods == []
    for sequence, count in ((several, 4), (one, 0)):
        assert [found.token for found in sequence.likelihoods] == sequence.chosen
        for found, logits in zip(sequence.likelihoods, sequence.logits, strict=True):
            wanted = log_softmax(logits)
            assert found.logprob == pytest.approx(wanted[found.token], abs=1e-5)
            best = np.argsort(-wanted)[:count].tolist()
            assert [token for token, _ in found.alternatives] == best
            given = [logprob for _, logprob in found.alternatives]
            assert given == pytest.approx(wanted[best].tolist(), abs=1e-5)


@pytest.mark.extended
def test_a_prompt_is_scored_even_if_it_was_cached_or_preempted(engine):
    engine.reset()
    prompt = tuple(np.random.default_rng(0).integers(0, 256, size=23).tolist())
    expected = []
    for at in range(1, len(prompt)):
        (one,) = engine.generate([Request(prompt[:at], 1)])
        expected.append(log_softmax(one.logits[0])[prompt[at]])
    for counts in (None, SCARCE[False]):
        engine.reset(num_blocks=counts)
        engine.generate([Request(prompt, 1)])
        scored = Request(prompt, 20, logprobs=2, prompt_logprobs=True)
        others = [Request((i,) * 9, 25) for i in range(3)]
        *_, sequence, plain = engine.generate([*others, scored, Request(prompt, 20)])
        found = [one.logprob for one in sequence.prompt_likelihoods]
        assert found == pytest.approx(expected, abs=1e-4)
        assert [one.token for one in sequence.prompt_likelihoods] == list(prompt[1:])
        assert all(len(one.alternatives) == 2 for one in sequence.prompt_likelihoods)
        assert sequence.chosen == plain.chosen
        assert plain.prompt_likelihoods == []
    assert engine.scheduler.num_preemptions > 0
    assert Bucket(BUDGET, MAX_SEQS, BUDGET, scores=True) in engine.steps.programs


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sampling(min_p=-1, presence_penalty=9), "min_p is -1.*presence_penalty is 9"),
        (lambda: Sampling(repetition_penalty=float("nan")), "repetition_penalty is nan"),
        (lambda: Sampling(logit_bias=((1, float("nan")),)), "its values must be in"),
        (lambda: Request((1,), 1, logprobs=21), "logprobs is 21, but must be in 0..20"),
        (lambda: Request((1,), 1, prompt_logprobs=True), "prompt_logprobs needs logprobs"),
        (
            lambda: Request((1,), 1, Sampling(presence_penalty=1), follow=(1,)),
            "follow is given, but penalties",
        ),
    ],
)
def test_impossible_options_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
