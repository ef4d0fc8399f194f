"""`examples/minimal.py` writes the same texts as its model without caches."""

from __future__ import annotations

import types

import numpy as np
import pytest


@pytest.fixture(scope="module")
def minimal() -> types.ModuleType:
    """Import the example, which computes its vectors on import."""
    from examples import minimal

    return minimal


def dense_next(minimal: types.ModuleType, text: bytes, vectors: np.ndarray) -> int:
    """Return the next byte, computed from the whole text at once in float64.

    `vectors` are the position vectors from position -BACK on.
    """

    def attend(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        logits = minimal.SCALE * query @ key.T
        logits[np.triu_indices(len(key), 1)] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True) @ value

    x = np.asarray(minimal.EMBEDDING, np.float64)[list(text)]
    shifted = [vectors[minimal.BACK - back :][: len(text)] for back in range(minimal.BACK + 1)]
    before = [attend(query, shifted[0], x) for query in shifted[1:]]
    importance = np.asarray(minimal.IMPORTANCE)
    context = [w * y for w, y in zip(importance, [x, *before[:-1]], strict=True)]
    following = attend(np.concatenate(context, axis=1), np.concatenate(before, axis=1), x)
    return int(np.argmax(np.asarray(minimal.EMBEDDING, np.float64) @ following[-1]))


def test_texts_match_the_model_without_caches(minimal):
    prompts = [b"How much wood would a woodchuck chuck? How much", b"ab abc ab"]
    before = minimal.step._cache_size()
    texts = minimal.generate(prompts, 20)
    assert minimal.step._cache_size() == before + 2  # one program for prefill, one for decode
    assert texts[0] == b" wood would a woodch"
    vectors = np.asarray(minimal.position_vectors(np.arange(-minimal.BACK, 100)), np.float64)
    for prompt, text in zip(prompts, texts, strict=True):
        for i, byte in enumerate(text):
            assert byte == dense_next(minimal, prompt + text[:i], vectors)
