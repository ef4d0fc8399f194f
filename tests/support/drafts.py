"""Helpers for tests of speculative decoding: proposers, and runs without it to compare with."""

from __future__ import annotations

import numpy as np

from examples.engine.drafts.speculation import Guess
from examples.engine.engine import Engine
from examples.engine.request import Request, Sampling, Sequence
from tests.support.engines import restart


class Foresight:
    """Guesses the tokens that really follow, with a wrong one in some places."""

    is_cheap = True

    def __init__(self, coming: dict[Request, list[int]], rng: np.random.Generator, wrong: float):
        self.coming, self.rng, self.wrong = coming, rng, wrong

    def propose(self, sequences, most) -> list[Guess]:
        guesses = []
        for sequence, count in zip(sequences, most, strict=True):
            start = len(sequence.chosen)
            count = self.rng.integers(count + 1)
            coming = self.coming.get(sequence.request, [])
            tokens = np.array(coming[start : start + count], int)
            tokens = (tokens + (self.rng.random(len(tokens)) < self.wrong)) % 256
            guesses.append(Guess(tuple(tokens.tolist())))
        return guesses


def alone(plain: Engine, requests: list[Request]) -> dict[Request, Sequence]:
    """Serve every request alone, without speculative decoding."""
    restart(plain, prefix_caching=False)
    return {request: plain.generate([request])[0] for request in requests}


def same(found: Sequence, expected: Sequence) -> None:
    """Check that a sequence is the expected one; an aborted one may have fewer tokens."""
    if found.finish_reason == "abort":
        assert found.chosen == expected.chosen[: len(found.chosen)]
        return
    assert found.chosen == expected.chosen
    assert found.text == expected.text
    assert found.finish_reason == expected.finish_reason
    np.testing.assert_allclose(found.logits, expected.logits, atol=2e-4)


class Noting:
    """Records a proposer's guesses, and makes some of them partly right."""

    is_cheap = False

    def __init__(self, proposer, coming: dict[Request, list[int]], seed: int = 0):
        self.proposer, self.coming = proposer, coming
        self.rng, self.noted = np.random.default_rng(seed), []

    def note_step(self, *step):
        self.proposer.note_step(*step)

    def propose(self, sequences, most) -> list[Guess]:
        guesses = self.proposer.propose(sequences, most)
        for i, (sequence, guess) in enumerate(zip(sequences, guesses, strict=True)):
            if guess.tokens and sequence.request.sampling == Sampling():
                self.noted.append((list(sequence.tokens), guess.tokens))
            right = self.coming.get(sequence.request, [])[len(sequence.chosen) :]
            right = tuple(right[: self.rng.integers(len(guess.tokens) + 1)])
            if self.rng.random() < 0.6:
                guesses[i] = Guess((*right, *guess.tokens[len(right) :]))
        return guesses


class Silent:
    """Guesses nothing."""

    is_cheap = True

    def propose(self, sequences, most) -> list[Guess]:
        return [Guess() for _ in sequences]
