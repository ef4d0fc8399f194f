"""Recurrences over ragged steps (`examples/models/recurrent.py`), against a float64 loop."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.models import recurrent

HEADS, KEY, VALUE, CHANNELS, TAPS = 3, 8, 5, 6, 4


def one_by_one(x: dict[str, np.ndarray], state: np.ndarray, dtype: type = np.float64):
    """Return `(out, last state)` of one sequence, computed token by token."""
    state, out = state.astype(dtype), []
    x = {name: array.astype(dtype) for name, array in x.items()}
    for t in range(len(x["query"])):
        state = state * np.exp(x["log_decay"][t])[:, None, None]
        value = x["value"][t]
        if "beta" in x:
            known = np.einsum("hvd,hd->hv", state, x["key"][t])
            value = x["beta"][t][:, None] * (value - known)
        state = state + value[:, :, None] * x["key"][t][:, None, :]
        out.append(np.einsum("hvd,hd->hv", state, x["query"][t]))
    return np.array(out).reshape(-1, HEADS, VALUE), state


def draw(rng: np.random.Generator, length: int, delta: bool) -> dict[str, np.ndarray]:
    """Draw a sequence's inputs, some with strong decay."""
    key = rng.normal(size=(length, HEADS, KEY))
    x = {
        "query": rng.normal(size=(length, HEADS, KEY)) / KEY**0.5,
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": rng.normal(size=(length, HEADS, VALUE)),
        "log_decay": -np.exp(rng.normal(-1.5, 1.5, size=(length, HEADS))),
    }
    if delta:
        x["beta"] = rng.uniform(0.1, 1.0, size=(length, HEADS))
    return {name: array.astype(np.float32) for name, array in x.items()}


def pack(parts: list[dict[str, np.ndarray]], num_tokens: int):
    """Pack sequences into a step's arguments, with NaN in rows that no sequence owns."""
    lengths = [len(part["query"]) for part in parts]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    padding = num_tokens - starts[-1]
    inputs = {
        name: np.concatenate(
            [*(part[name] for part in parts), np.full((padding, *parts[0][name].shape[1:]), np.nan)]
        ).astype(np.float32)
        for name in parts[0]
    }
    return inputs, starts


@functools.partial(jax.jit, static_argnames=("max_query_len", "chunk_size"))
def run(inputs, starts, state, *, max_query_len=None, chunk_size=None):
    rows = recurrent.ragged_rows(starts, len(inputs["query"]), max_query_len)
    return recurrent.recur(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        inputs["log_decay"],
        inputs.get("beta"),
        state,
        rows,
        chunk_size=chunk_size,
    )


def budget(x: dict[str, np.ndarray], state: np.ndarray, wanted: np.ndarray) -> float:
    """Return twice the plain loop's error in float32, plus a few ulps."""
    out, _ = one_by_one(x, state, np.float32)
    worst = np.abs(out - wanted).max(initial=0.0)
    scale = max(np.abs(wanted).max(initial=0.0), 1.0)
    return 2 * worst + 32 * np.finfo(np.float32).eps * scale


@pytest.mark.parametrize("delta", [False, True], ids=["decay", "delta-rule"])
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_ragged_steps(chunk_size, delta):
    lengths = [1, 40, 0, 7, 16, 17]
    rng = np.random.default_rng(len(lengths))
    parts = [draw(rng, n, delta) for n in lengths]
    before = rng.normal(size=(len(lengths), HEADS, VALUE, KEY)).astype(np.float32)
    inputs, starts = pack(parts, sum(lengths) + 3)
    out, after = run(inputs, starts, before, chunk_size=chunk_size)
    for b, part in enumerate(parts):
        wanted, end = one_by_one(part, before[b])
        limit = budget(part, before[b], wanted)
        assert np.abs(np.asarray(after[b]) - end).max() <= limit
        if lengths[b]:
            got = np.asarray(out)[starts[b] : starts[b + 1]]
            assert np.abs(got - wanted).max() <= limit
        if lengths[b] > 1:
            for wrong in wrong_outputs(part, before[b]):
                assert np.abs(wrong - wanted).max() > limit


def wrong_outputs(x, before):
    """Yield results of wrong recurrences: no state, no decay, decay a token late, no delta rule."""
    yield one_by_one(x, np.zeros_like(before))[0]
    yield one_by_one({**x, "log_decay": np.zeros_like(x["log_decay"])}, before)[0]
    yield one_by_one({**x, "log_decay": np.roll(x["log_decay"], 1, axis=0)}, before)[0]
    if "beta" in x:
        yield one_by_one({**x, "beta": np.ones_like(x["beta"])}, before)[0]
        yield one_by_one({k: v for k, v in x.items() if k != "beta"}, before)[0]


@pytest.mark.parametrize("delta", [False, True], ids=["decay", "delta-rule"])
def test_however_a_sequence_is_cut_its_state_is_the_same(delta):
    rng = np.random.default_rng(0)
    whole = draw(rng, 50, delta)
    wanted, end = one_by_one(whole, np.zeros((HEADS, VALUE, KEY)))
    limit = budget(whole, np.zeros((HEADS, VALUE, KEY)), wanted)
    for cuts in ([50], [1] * 50, [20, 1, 1, 28], [49, 1]):
        state, out, done = jnp.zeros((1, HEADS, VALUE, KEY)), [], 0
        for n in cuts:
            part = {name: array[done : done + n] for name, array in whole.items()}
            inputs, starts = pack([part], 1 if n == 1 else 50)
            y, state = run(inputs, starts, state, max_query_len=1 if n == 1 else None)
            out.append(np.asarray(y)[:n])
            done += n
        assert np.abs(np.concatenate(out) - wanted).max() <= limit
        assert np.abs(np.asarray(state[0]) - end).max() <= limit


def test_a_decode_step_leaves_absent_sequences_alone():
    rng = np.random.default_rng(1)
    parts = [draw(rng, n, True) for n in (1, 1, 0, 0)]
    inputs, starts = pack(parts, 4)
    before = rng.normal(size=(4, HEADS, VALUE, KEY)).astype(np.float32)
    out, after = run(inputs, starts, before, max_query_len=1)
    np.testing.assert_array_equal(np.asarray(after)[2:], before[2:])
    for b in (0, 1):
        wanted, _ = one_by_one(parts[b], before[b])
        assert np.abs(np.asarray(out)[b] - wanted[0]).max() <= budget(parts[b], before[b], wanted)


def test_convolutions_carry_their_inputs():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(9, CHANNELS)).astype(np.float32)
    weight = rng.normal(size=(CHANNELS, TAPS)).astype(np.float32)
    bias = rng.normal(size=CHANNELS).astype(np.float32)
    padded = np.concatenate([np.zeros((TAPS - 1, CHANNELS)), x])
    wanted = bias + sum(padded[j : j + 9] * weight[:, j] for j in range(TAPS))

    @jax.jit
    def step(tokens, state, starts):
        rows = recurrent.ragged_rows(starts, 12, None)
        return recurrent.causal_conv(tokens, state, weight, bias, rows)

    for cuts in ([9], [1] * 9, [2, 4, 3], [1, 8]):
        state, out, done = np.zeros((2, TAPS - 1, CHANNELS), np.float32), [], 0
        for n in cuts:
            tokens = np.full((12, CHANNELS), np.nan, np.float32)
            tokens[0] = rng.normal(size=CHANNELS)  # another sequence before it
            tokens[1 : 1 + n] = x[done : done + n]
            y, state = step(tokens, state, np.array([0, 1, 1 + n], np.int32))
            out.append(np.asarray(y)[1 : 1 + n])
            done += n
        np.testing.assert_allclose(np.concatenate(out), wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(state[1]), x[-(TAPS - 1) :])


def test_one_compilation_serves_all_lengths():
    traces = []

    @jax.jit
    def step(inputs, starts, state):
        traces.append(None)
        return run(inputs, starts, state)

    rng = np.random.default_rng(3)
    for lengths in ([3, 4], [0, 7], [7, 0]):
        inputs, starts = pack([draw(rng, n, True) for n in lengths], 8)
        step(inputs, starts, np.zeros((2, HEADS, VALUE, KEY), np.float32))
    assert len(traces) == 1
