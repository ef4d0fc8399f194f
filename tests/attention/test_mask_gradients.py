"""Gradients under masks, along random directions, against differences of the float64 oracle.

The budget is twice the error of jax.grad of a plain float32 computation along the same direction,
plus a few units in the last place of the two vectors' product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import call as calls
from jattn import reference
from tests.attention import test_masks
from tests.support import dense, problems

pytestmark = pytest.mark.usefixtures("each_differentiable_row")

NAMES = ("query", "key_cache", "value_cache", "scale", "sinks", "relative_bias")
BATCHES = {
    "images": (test_masks.IMAGES | {"value_dim", "k_scale"}, {"window": 12, "chunk": 18}),
    "trees": (test_masks.TREES - {"attention_chunk_size"}, {"window": 12}),
}


def build(name: str) -> problems.Batch:
    options, sizes = BATCHES[name]
    return problems.build(
        problems.Problem(
            query_lens=(7, 1, 4, 0),
            seq_lens=(22, 30, 4, 3),
            block_size=4,
            head_dim=8,
            value_dim=6,
            plain=True,
            explicit_scale=True,
            options=options,
            seed=11,
            **sizes,
        )
    )


def plain(batch: problems.Batch, given: dict, w_out, w_lse) -> jax.Array:
    """Compute the same loss by dense attention, with masks from `dense` as constants."""
    view, total = batch.view, jnp.float32(0)
    size = batch.problem.block_size
    tables = np.asarray(batch.kwargs["block_tables"])
    k_scale = jnp.asarray(view.k_scale[view.kv_heads], jnp.float32)
    v_scale = jnp.asarray(view.v_scale[view.kv_heads], jnp.float32)
    for b in range(view.num_seqs):
        rows = slice(int(view.starts[b]), int(view.starts[b + 1]))
        if rows.start == rows.stop:
            continue
        seen = dense.visible(view, b)
        blind = ~seen.any(axis=1)
        at = np.arange(seen.shape[1])
        block, offset = tables[b, at // size], at % size
        k = given["key_cache"][block, :, offset][:, view.kv_heads]
        if given["value_cache"] is None:
            v = k[..., : batch.problem.value_dim]
        else:
            v = given["value_cache"][block, :, offset][:, view.kv_heads]
        s = jnp.einsum("thd,chd->htc", given["query"][rows], k)
        s = s * (given["scale"] * k_scale)[:, None, None]
        query_at, key_at = dense.positions(view, b)
        extent = view.bias.shape[1] // 2
        s = s + given["relative_bias"][:, extent + np.clip(key_at - query_at, -extent, extent)]
        s = jnp.where((seen | blind[:, None])[None], s, -jnp.inf)  # no NaN in unused rows
        sinks = given["sinks"][rows].T
        lse = jnp.where(blind[None], sinks, jnp.logaddexp(jax.nn.logsumexp(s, axis=-1), sinks))
        p = jnp.where(seen[None], jnp.exp(s - lse[..., None]), 0)
        out = jnp.einsum("htc,chv->thv", p, v) * v_scale[None, :, None]
        total += (out * w_out[rows]).sum() + (lse.T * w_lse[rows]).sum()
    return total


@pytest.mark.parametrize("name", [pytest.param("images", marks=pytest.mark.extended), "trees"])
def test_gradients(name):
    batch = build(name)
    rng = np.random.default_rng(2)
    real = int(batch.view.starts[-1])
    tokens, heads = batch.query.shape[:2]
    w_out = np.zeros((tokens, heads, batch.problem.value_dim), np.float32)
    w_lse = np.zeros((tokens, heads), np.float32)
    w_out[:real] = rng.standard_normal(w_out[:real].shape)
    w_lse[:real] = rng.standard_normal(w_lse[:real].shape)
    fixed = {n: x for n, x in batch.kwargs.items() if n not in NAMES} | {"max_query_len": 8}
    given = {n: batch.kwargs.get(n) for n in ("scale", "sinks", "relative_bias")}
    given = {n: jnp.asarray(x, jnp.float32) for n, x in given.items()}
    given |= {"query": jnp.asarray(batch.query)}
    given |= {"key_cache": batch.key_cache, "value_cache": batch.value_cache}

    def ours(given: dict) -> jax.Array:
        out, lse = jattn.paged_attention(**given, **fixed)
        return (out * w_out).sum() + (lse[:real] * w_lse[:real]).sum()

    have = jax.jit(jax.grad(ours))(given)
    naive = jax.jit(jax.grad(lambda given: plain(batch, given, w_out, w_lse)))(given)
    signature = calls.Arguments(**fixed, **given)
    call = calls.describe_call(signature)
    operands = calls.take_operands(call, signature)

    def loss(name: str, x: np.ndarray) -> float:
        out, lse = reference.attention(call, operands._replace(**{name: x}))
        return (out * w_out).sum() + (lse[:real] * w_lse[:real]).sum()

    for number in NAMES:
        if given[number] is None:
            continue
        base = np.asarray(given[number], np.float64)
        grad = np.asarray(have[number], np.float64)
        assert np.isfinite(grad).all()
        owned = np.isfinite(base)  # slots and tokens without an owner hold NaN, and get no gradient
        np.testing.assert_array_equal(grad[~owned], 0)
        for _ in range(2):
            move = np.where(owned, rng.standard_normal(base.shape), 0)
            step = 1e-5
            want = (loss(number, base + step * move) - loss(number, base - step * move)) / (
                2 * step
            )
            plainly = (np.nan_to_num(np.asarray(naive[number], np.float64)) * move).sum()
            size = np.linalg.norm(grad) * np.linalg.norm(move)
            allowed = 2 * abs(plainly - want) + 8 * np.finfo(np.float32).eps * size
            assert abs((grad * move).sum() - want) <= allowed, number
            # An error of one part in a thousand would show.
            assert allowed < 1e-3 * size, number


@pytest.mark.parametrize("cap", [1e-3, 50.0])
def test_huge_logits_under_a_cap(cap):
    """At logits of 10^4 all gradients are finite, and those of values add up to the shares."""
    batch = problems.build(
        problems.Problem(
            query_lens=(7, 1),
            seq_lens=(22, 30),
            head_dim=8,
            value_dim=6,
            plain=True,
            options=frozenset({"logits_soft_cap", "sinks_per_token", "return_lse"}),
        )
    )
    real = int(batch.view.starts[-1])
    fixed = {n: x for n, x in batch.kwargs.items() if n not in ("logits_soft_cap", "sinks")}
    numbers = {
        "query": jnp.asarray(batch.query),
        "key_cache": batch.key_cache,
        "value_cache": batch.value_cache,
        "scale": jnp.float32(1e4),
        "logits_soft_cap": jnp.float32(cap),
        "sinks": batch.kwargs["sinks"],
    }

    def loss(numbers: dict) -> jax.Array:
        out, lse = jattn.paged_attention(**numbers, **fixed, max_query_len=8)
        return out[:real].sum() + lse[:real].sum()

    value, grads = jax.jit(jax.value_and_grad(loss))(numbers)
    assert np.isfinite(value)
    for name, grad in grads.items():
        assert np.isfinite(grad).all(), name
    # Summed over slots, the gradient of a column of V is what the sink leaves of the weights.
    shares = np.asarray(grads["value_cache"]).sum(axis=(0, 1, 2))
    _, lse = exact_at(batch, cap)
    left = 1 - np.exp(batch.view.sinks - lse[:real])
    np.testing.assert_allclose(shares, left.sum(), rtol=1e-5)


def exact_at(batch: problems.Batch, cap: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the oracle's `(out, lse)` at a scale of 10^4 and this cap."""
    call, operands = batch.call()
    return reference.attention(
        call, operands._replace(scale=np.float64(1e4), logits_soft_cap=np.float64(np.float32(cap)))
    )
