"""For tests of speculative decoding: a proposer that knows what comes, and runs without drafts."""

from __future__ import annotations

import numpy as np

from examples.engine.drafts.speculation import Guess
from examples.engine.engine import Engine
from examples.engine.request import Request, Sequence
from tests.support.engines import restart


class Foresight:
    """Guesses what comes, and a wrong token in some places."""

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
    """Every request served alone and without drafts."""
    restart(plain, prefix_caching=False)
    return {request: plain.generate([request])[0] for request in requests}


def same(found: Sequence, expected: Sequence) -> None:
    """An aborted one has some of the tokens."""
    if found.finish_reason == "abort":
        assert found.chosen == expected.chosen[: len(found.chosen)]
        return
    assert found.chosen == expected.chosen
    assert found.text == expected.text
    assert found.finish_reason == expected.finish_reason
    np.testing.assert_allclose(found.logits, expected.logits, atol=2e-4)
