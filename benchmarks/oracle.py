"""Check a result against float64 attention over the tokens, within an error budget.

The budget of a sequence is twice the largest error that a plain computation in the precision of
the data makes on it, plus one unit in the last place of the true value, plus sqrt(D) float32 units
in the last place of the sequence's largest value. The last term is there because the D products of
a logit may be added in any order: their roundings are a random walk, and how far it got in the
plain computation depends on its matrix library. Sequences of equal lengths share the plain
computation's largest error, because on a single one it is a matter of luck. The budget is never a
constant: long sequences, peaked softmaxes and large values move it as they move any computation.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.workloads import (
    Workload,
    make_queries,
    make_tokens,
    to_bfloat16_words,
    to_float32,
)

# The distance between 1 and the next number.
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7}

# Query tokens attended at a time: large enough for fast products, small enough for the caches.
CHUNK = 256


@dataclass(frozen=True)
class Answer:
    """The correct result of a workload, and how far off a plain computation is.

    Attributes:
      exact: float64 array [T, H, V].
      error: float64 array [B], the plain computation's largest error on sequences of such lengths.
    """

    exact: np.ndarray
    error: np.ndarray


class WrongResultError(Exception):
    """A result is outside its budget, so it is not timed."""


def answer(w: Workload) -> Answer:
    """Compute the float64 result of `w` and the error of a plain computation.

    The last answer is cached, because workloads that differ only in their blocks share it.
    """
    return _answer(dataclasses.replace(w, name="", group="", block_size=1))


@functools.lru_cache(maxsize=1)
def _answer(w: Workload) -> Answer:
    return answer_from(
        w, to_float32(make_queries(w)), lambda b: make_tokens(w, b, w.first_visible(b))
    )


def answer_from(
    w: Workload, queries: np.ndarray, tokens: Callable[[int], tuple[np.ndarray, np.ndarray]]
) -> Answer:
    """Compute the answer to float32 `queries` [T, H, D] over what a cache holds.

    Args:
      w: the workload.
      queries: used instead of `make_queries(w)`.
      tokens: keys and values [n, K, D] of a sequence from its first visible position on, float32 or
        words of bfloat16.
    """
    exact = np.empty((w.num_tokens, w.num_heads, w.value_dim))
    error = np.zeros(w.num_seqs)
    start = w.query_start()
    group = w.num_heads // w.num_kv_heads
    for b in range(w.num_seqs):
        first = w.first_visible(b)
        keys, values = tokens(b)
        for kv_head in range(w.num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            k32 = to_float32(np.ascontiguousarray(keys[:, kv_head]))
            v32 = to_float32(np.ascontiguousarray(values[:, kv_head]))
            k64, v64 = k32.astype(np.float64), v32.astype(np.float64)
            for rows, positions in _chunks(w, b):
                q = queries[start[b] + rows.start : start[b] + rows.stop, heads]
                truth = _attend(w, q.astype(np.float64), k64, v64, positions, first)
                plain = _rounded(w, _attend(w, q, k32, v32, positions, first))
                exact[start[b] + rows.start : start[b] + rows.stop, heads] = truth
                error[b] = max(error[b], np.abs(plain - truth).max())
    alike: dict[tuple[int, int], float] = {}
    lengths = list(zip(w.query_lens, w.seq_lens, strict=True))
    for key, worst in zip(lengths, error, strict=True):
        alike[key] = max(alike.get(key, 0.0), worst)
    return Answer(exact, np.array([alike[key] for key in lengths]))


def check(
    w: Workload, expected: Answer, result: np.ndarray, implementation: str, slack: float = 1.0
) -> float:
    """Return the largest share of the budget that `result` uses.

    Args:
      w: the workload.
      expected: `answer(w)`.
      result: [T, H, V], float32 or uint16 words of bfloat16.
      implementation: its name, for the message.
      slack: how many budgets are allowed.

    Raises:
      WrongResultError: `result` uses more than `slack` budgets, or has another shape.
    """
    if result.shape != expected.exact.shape:
        raise WrongResultError(
            f"{w.name}: {implementation} has shape {result.shape}, must be {expected.exact.shape}"
        )
    size = np.abs(expected.exact)
    largest = np.maximum.reduceat(size.max((1, 2)), w.query_start()[:-1])
    of_sequence = 2 * expected.error + w.head_dim**0.5 * EPS["float32"] * largest
    budget = np.repeat(of_sequence, w.query_lens)[:, None, None] + EPS[w.dtype] * size
    off = np.abs(to_float32(result) - expected.exact)
    used = np.where(np.isnan(off), np.inf, off / budget)
    worst = np.unravel_index(np.argmax(used), used.shape)
    if used[worst] > slack:
        b = int(np.searchsorted(w.query_start(), worst[0], side="right")) - 1
        raise WrongResultError(
            f"{w.name}: {implementation} is wrong at token {worst[0]} (sequence {b}), "
            f"head {worst[1]}, element {worst[2]}: {to_float32(result)[worst]:.6g}, must be "
            f"{expected.exact[worst]:.6g} within {slack * budget[worst]:.2g}; "
            f"{int((used > slack).sum())} of {used.size} elements are outside their budget"
        )
    return float(used[worst])


def _chunks(w: Workload, b: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield query tokens of sequence `b`, some at a time, with their positions."""
    n = w.query_lens[b]
    for i in range(0, n, CHUNK):
        stop = min(i + CHUNK, n)
        yield slice(i, stop), np.arange(i, stop) + w.seq_lens[b] - n


def _attend(w, q, k, v, positions, first):
    """Attend with queries [n, G, D] at `positions` over keys from position `first` on."""
    hi = positions[-1] + 1 - first
    lo = 0 if w.sliding_window is None else max(0, positions[0] - w.sliding_window + 1 - first)
    n, group, _ = q.shape
    logits = (q.reshape(n * group, -1) @ k[lo:hi].T).reshape(n, group, hi - lo)
    logits *= q.dtype.type(w.scale)
    behind = positions[:, None] - np.arange(first + lo, first + hi)
    visible = behind >= 0
    if w.sliding_window is not None:
        visible &= behind < w.sliding_window
    if not visible.all():
        logits[~np.broadcast_to(visible[:, None], logits.shape)] = -np.inf
    logits -= logits.max(-1, keepdims=True)
    weights = np.exp(logits, out=logits)
    total = weights.sum(-1, keepdims=True)
    if q.dtype == np.float32:
        weights = _rounded(w, weights)
    return (weights.reshape(n * group, -1) @ v[lo:hi]).reshape(n, group, -1) / total


def _rounded(w: Workload, x: np.ndarray) -> np.ndarray:
    """Round float32 `x` to the workload's dtype."""
    return to_float32(to_bfloat16_words(x)) if w.dtype == "bfloat16" else x
