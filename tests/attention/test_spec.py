"""The definitions: `spec` against brute force, the oracle against another computation."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn import implementations, spec
from tests.support import budget, dense, matrix, problems

CASES = [
    case for case in matrix.default(implementations.BY_NAME["xla"].row) if case.block_size < 500
]


def sees(query: int, key: int, seq_len: int, causal: bool, window: int | None) -> bool:
    """Whether a query sees a key, as the documentation defines it."""
    if not 0 <= key < seq_len:
        return False
    if causal and key > query:
        return False
    if window is None:
        return True
    # A window counts the keys that a query sees, including its own.
    return query - key <= window - 1 if causal else abs(query - key) < window


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("traced", [False, True], ids=["bool", "array"])
def test_visible(xp, traced):
    seq_len, positions = 9, range(-3, 12)
    query, key = (xp.asarray(x, np.int32) for x in np.meshgrid(positions, positions, indexing="ij"))
    for causal, window in itertools.product((False, True), (None, 1, 2, 5, 30, 2**31 - 1)):
        have = spec.visible(
            query,
            key,
            xp.asarray(seq_len, np.int32),
            spec.Sight(
                xp.asarray(causal) if traced else causal,
                None if window is None else xp.asarray(window, np.int32),
            ),
        )
        want = [[sees(q, k, seq_len, causal, window) for k in positions] for q in positions]
        np.testing.assert_array_equal(np.asarray(have), want)


def test_a_window_holds_that_many_keys():
    keys = np.arange(100)
    for window in (1, 2, 11, 64):
        seen = spec.visible(np.int64(80), keys, 100, spec.Sight(True, window))
        assert seen.sum() == window
        assert seen[80]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    first=st.integers(-12, 30),
    count=st.integers(1, 12),
    seq_len=st.integers(0, 30),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 40) | st.just(2**31 - 1),
    traced=st.booleans(),
)
def test_key_range_is_the_hull_of_what_is_seen(first, count, seq_len, causal, window, traced):
    last = first + count - 1
    xp = jnp if traced else np
    number = (lambda x: jnp.asarray(x, jnp.int32)) if traced else np.int64
    start, end = spec.key_range(
        number(first),
        number(last),
        number(seq_len),
        spec.Sight(
            jnp.asarray(causal) if traced else causal,
            None if window is None else number(window),
        ),
        xp=xp,
    )
    seen = [
        key
        for key in range(seq_len)
        if any(sees(query, key, seq_len, causal, window) for query in range(first, last + 1))
    ]
    if seen:
        assert (int(start), int(end)) == (seen[0], seen[-1] + 1)
    else:
        assert int(start) == int(end)


def test_key_range_broadcasts():
    first = np.array([0, 5, 20])
    start, end = spec.key_range(
        first,
        first + 3,
        np.array([0, 9, 24]),
        spec.Sight(np.array([True, False, True]), np.int64(4)),
        xp=np,
    )
    assert start.tolist() == [0, 2, 17]
    assert end.tolist() == [0, 9, 24]


def test_transform_logits_point_by_point():
    dots = np.linspace(-40, 40, 9)
    common = {"scale": 0.5, "q_pos": np.int64(7), "k_pos": np.arange(9), "xp": np}
    have = spec.transform_logits(dots, logits_soft_cap=3.0, alibi_slopes=0.25, **common)
    want = [3 * np.tanh(0.5 * d / 3) + 0.25 * (k - 7) for k, d in enumerate(dots)]
    np.testing.assert_allclose(have, want, rtol=1e-14)
    have = spec.transform_logits(dots, logits_soft_cap=None, alibi_slopes=None, **common)
    np.testing.assert_array_equal(have, dots * 0.5)


def test_positions_and_empty_rows():
    assert spec.first_query_position(10, 3) == 7
    assert spec.first_query_position(2, 5) == -3
    assert spec.empty_row_lse(None) == -np.inf
    assert spec.empty_row_lse(1.5) == 1.5


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(given, id=given.id, marks=pytest.mark.extended if i % 2 else ())
        for i, given in enumerate(CASES[::2])
    ],
)
def test_the_oracle_is_dense_attention(given):
    """Two independent float64 computations agree: one with pages and loops, one with matrices."""
    batch = problems.build(given.problem())
    out, lse = batch.oracle()
    real = batch.view.starts[-1]
    want_out, want_lse = dense.attend(batch.view)
    np.testing.assert_allclose(out[:real], want_out, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(lse[:real], want_lse, rtol=1e-11, atol=1e-12)
    np.testing.assert_array_equal(out[real:], 0)
    np.testing.assert_array_equal(lse[real:], -np.inf)


def test_by_hand():
    """Two keys and one query, with numbers small enough to do by hand."""
    view = dense.View(
        query=np.array([[[2.0]]]),
        keys=[np.array([[[1.0]], [[0.5]]])],
        values=[np.array([[[10.0]], [[20.0]]])],
        starts=np.array([0, 1]),
        kv_heads=np.array([0]),
        scale=1.0,
        is_causal=np.array([True]),
        window=None,
        cap=None,
        sinks=np.array([0.0]),
        slopes=np.array([0.5]),
        k_scale=np.ones(1),
        v_scale=np.ones(1),
    )
    # logits: 2 * 1 - 0.5 (one before the query), 2 * 0.5; and the sink 0
    a, b = np.exp(1.5), np.exp(1.0)
    out, lse = dense.attend(view)
    np.testing.assert_allclose(out[0, 0], [(10 * a + 20 * b) / (a + b + 1)], rtol=1e-14)
    np.testing.assert_allclose(lse[0, 0], np.log(a + b + 1), rtol=1e-14)


def test_the_budget_follows_the_precision():
    """More precision leaves less room, and no budget is a constant."""
    common = {"query_lens": (1, 8), "seq_lens": (16, 40), "seed": 1}
    sizes = {}
    for dtype in ("float32", "bfloat16", "float16"):
        problem = problems.Problem(**common, query_dtype=dtype, format=dtype)
        sizes[dtype] = budget.of(problems.build(problem)).allowed[0].max()
    assert 50 * sizes["float32"] < sizes["float16"] < sizes["bfloat16"] < 0.2
