"""Gradients of every number in a call, against finite differences of the float64 oracle.

The budget is twice the error of jax.grad of a plain float32 computation, plus a few units in the
last place of the largest gradient.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import call as calls
from jattn import reference

T, H, K, D, V, S = 7, 4, 2, 16, 24, 8
LENS, STARTS, WINDOW = (13, 30, 1), np.array([0, 5, 6, 7], np.int32), 9
RNG = np.random.default_rng(5)
BLOCKS = [[4, 1], [7, 0, 9, 3], [11]]
TABLES = np.array([row + [10**6] * (4 - len(row)) for row in BLOCKS], np.int32)


def normal(*shape, at=0.0, by=1.0):
    return (at + by * RNG.standard_normal(shape)).astype(np.float32)


QUERY, KEYS, VALUES = normal(T, H, D), normal(12, K, S, D), normal(12, K, S, V)
W_OUT, W_LSE = normal(T, H, V), normal(T, H)
NUMBERS = {
    "scale": np.float32(0.3),
    "logits_soft_cap": np.float32(2.0),
    "sinks": normal(H),
    "alibi_slopes": normal(H, by=0.1),
    "k_scale": normal(K, at=1.0, by=0.2),
    "v_scale": normal(K, at=1.0, by=0.2),
}
FIXED = {
    "block_tables": TABLES,
    "seq_lens": np.array(LENS, np.int32),
    "query_start_loc": STARTS,
    "sliding_window": WINDOW,
    "return_lse": True,
}


def ours(implementation, numbers):
    given = {**FIXED, **numbers, "implementation": implementation}
    out, lse = jattn.paged_attention(QUERY, KEYS, VALUES, **given)
    return (out * W_OUT).sum() + (lse * W_LSE).sum()


def plain(n):
    total = jnp.float32(0)
    for b, length in enumerate(LENS):
        rows = slice(STARTS[b], STARTS[b + 1])
        k, v = (
            jnp.repeat(jnp.concatenate([x[i] for i in BLOCKS[b]], 1)[:, :length], H // K, 0)
            for x in (KEYS, VALUES)
        )
        k_scale, v_scale = jnp.repeat(n["k_scale"], H // K), jnp.repeat(n["v_scale"], H // K)
        q_pos = np.arange(length - (rows.stop - rows.start), length)[:, None]
        k_pos = np.arange(length)[None]
        s = jnp.einsum("thd,hcd->htc", QUERY[rows], k) * (n["scale"] * k_scale)[:, None, None]
        s = n["logits_soft_cap"] * jnp.tanh(s / n["logits_soft_cap"])
        s = s + n["alibi_slopes"][:, None, None] * np.float32(k_pos - q_pos)[None]
        s = jnp.where(((k_pos <= q_pos) & (k_pos > q_pos - WINDOW))[None], s, -jnp.inf)
        lse = jax.nn.logsumexp(s, axis=-1)
        lse = jnp.logaddexp(lse, jnp.broadcast_to(n["sinks"][:, None], lse.shape))
        out = jnp.einsum("htc,hcv->thv", jnp.exp(s - lse[..., None]), v) * v_scale[None, :, None]
        total += (out * W_OUT[rows]).sum() + (lse.T * W_LSE[rows]).sum()
    return total


def exact(name):
    """Return central differences of the oracle's loss, component by component, in float64."""
    given = calls.Arguments(QUERY, KEYS, VALUES, **FIXED, **NUMBERS)
    call = calls.describe_call(given)
    operands = calls.take_operands(call, given)
    base = np.asarray(NUMBERS[name], np.float64)

    def loss(x):
        out, lse = reference.attention(call, operands._replace(**{name: x}))
        return (out * W_OUT).sum() + (lse * W_LSE).sum()

    found, step = np.zeros(base.size), 1e-5
    for i in range(base.size):
        move = np.zeros(base.size)
        move[i] = step
        move = move.reshape(base.shape)
        found[i] = (loss(base + move) - loss(base - move)) / (2 * step)
    return found.reshape(base.shape)


@functools.cache
def gradients(implementation):
    """Return the gradients of all numbers in float64; `implementation=None` is plain code."""
    loss = plain if implementation is None else functools.partial(ours, implementation)
    return jax.tree.map(np.float64, jax.jit(jax.grad(loss))(NUMBERS))


@pytest.mark.parametrize("name", NUMBERS)
def test_the_gradient_of_a_number(name, each_differentiable_row):
    want, naive = exact(name), gradients(None)[name]
    have = gradients(each_differentiable_row.implementation)[name]
    ulp = np.finfo(np.float32).eps * np.abs(want).max()
    # Gradients are sums over all T * H rows, whose rounding is a few ulps of the loss's terms.
    terms = np.finfo(np.float32).eps * np.sqrt(T * H) * np.abs(W_OUT).max()
    budget = 2 * np.abs(naive - want).max() + 4 * ulp + 4 * terms
    assert np.abs(want).min() > 20 * budget  # a missing term would show
    assert np.abs(have - want).max() <= budget


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_the_gradient_of_an_fp8_cache_saturates(dtype, each_differentiable_row):
    pool = jnp.asarray(np.ones((1, 1, 4, 8), dtype))
    given = {"block_tables": np.zeros((1, 1), np.int32), "seq_lens": np.array([2], np.int32)}
    row = each_differentiable_row.implementation
    weights = np.array([[[1e6, -1e6, 1, 0, 0, 0, 0, 0]]], np.float32)

    def loss(values):
        query = np.ones((1, 1, 8), np.float32)
        out = jattn.paged_attention(query, pool, values, **given, implementation=row)
        return (out * weights).sum()

    most = float(jnp.finfo(dtype).max)
    found = np.asarray(jax.grad(loss)(pool)).astype(np.float32)
    np.testing.assert_array_equal(found[0, 0, 0], [most, -most, 0.5, 0, 0, 0, 0, 0])
    assert not found[0, 0, 2:].any()


def test_second_derivatives_are_refused_by_name(each_differentiable_row):
    name = each_differentiable_row.implementation
    given = {"block_tables": np.zeros((1, 1), np.int32), "seq_lens": np.array([2], np.int32)}
    pool, query = np.ones((1, 1, 4, 8), np.float32), np.ones((1, 1, 8), np.float32)

    def loss(query):
        return jattn.paged_attention(query, pool, pool, **given, implementation=name).sum()

    twice = jax.grad(lambda query: jax.grad(loss)(query).sum())
    with pytest.raises(jattn.UnsupportedError, match="second derivatives are not supported"):
        jax.eval_shape(twice, query)
