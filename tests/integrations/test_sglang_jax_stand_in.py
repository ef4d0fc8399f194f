"""jattn in sglang-jax: our part, called directly.

`tests/integrations/test_sglang_jax.py` runs the real host.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.integrations import sglang_jax

N, S, K, G, D = 9, 4, 2, 2, 16  # pages, their tokens, KV heads, queries per KV head, head size
QUERY_LENS, SEQ_LENS = [1, 6, 3], [9, 6, 11]
TOKENS, ROWS = 12, 4  # the padded sizes: more than the step needs


def step(seed: int) -> tuple[dict[str, jax.Array], jattn.AttentionMetadata]:
    """Return a step as the host describes it, and as jattn does; unowned slots hold NaN."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    free, tables = rng.permutation(N).tolist(), []
    pool = np.full((N, S, 2 * K, 1, D), np.nan, np.float32)
    for new, length in zip(QUERY_LENS, SEQ_LENS, strict=True):
        tables.append([free.pop() for _ in range(-(-length // S))])
        for position in range(length - new):
            pool[tables[-1][position // S], position % S] = rng.normal(size=(2 * K, 1, D))
    pages = [page for table in tables for page in table]
    aligned = [len(table) * S for table in tables]
    given = {
        "queries": normal(TOKENS, K * G, D),
        "keys": normal(TOKENS, K, D),
        "values": normal(TOKENS, K, D),
        "kv_cache_fused": jnp.asarray(pool),
        "kv_lens": jnp.asarray([*SEQ_LENS, 0], jnp.int32),
        "page_indices": jnp.asarray(pages + [0] * 5, jnp.int32),
        "cu_q_lens": jnp.asarray([0, *np.cumsum(QUERY_LENS), sum(QUERY_LENS)], jnp.int32),
        "cu_kv_lens": jnp.asarray([0, *np.cumsum(aligned), sum(aligned)], jnp.int32),
        "distribution": jnp.asarray([0, 3, 3], jnp.int32),
    }
    batch = jattn.AttentionMetadata.from_lengths(QUERY_LENS, SEQ_LENS, tables, S)
    return given, batch.pad_to(num_tokens=TOKENS)


CASES = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 3}, {"sliding_window": 3}),
    "no window": ({"sliding_window": 0, "soft_cap": 0.0}, {}),
    "cap": ({"soft_cap": 0.7}, {"logits_soft_cap": 0.7}),
    "both ways": ({"causal": 0}, {"is_causal": False}),
    "sinks": ({"attention_sink": np.linspace(-1, 1, K * G)}, {"sinks": np.linspace(-1, 1, K * G)}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_writes_and_attends(name):
    theirs, ours = CASES[name]
    given, batch = step(len(name))

    @jax.jit
    def layer(given):
        return sglang_jax.ragged_paged_attention(**given, max_seq_len=16, sm_scale=0.4, **theirs)

    out, pool = layer(given)
    caches = [given["kv_cache_fused"][:, :, first::2, 0] for first in (0, 1)]
    keys, values = jattn.update_kv_cache(
        *caches, given["keys"], given["values"], batch.slot_mapping, kv_layout="NHD"
    )
    want = jattn.paged_attention(
        given["queries"], keys, values, **batch.as_kwargs(), kv_layout="NHD", scale=0.4,
        implementation="reference", **ours,
    )  # fmt: skip
    real = sum(QUERY_LENS)
    np.testing.assert_allclose(out[:real], want[:real], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(pool[:, :, ::2, 0], keys)
    np.testing.assert_array_equal(pool[:, :, 1::2, 0], values)


def test_a_layer_of_latents_writes_and_attends():
    """Latents of 16 numbers with a rotated part of 8, each padded to 128 in the cache."""
    given, batch = step(1)
    rng = np.random.default_rng(2)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    latents, rope = normal(TOKENS, 16), normal(TOKENS, 8)
    unowned = np.where(np.isnan(given["kv_cache_fused"][:, :, :1, 0, :1]), np.nan, 0)
    keys = normal(N, S, 1, 24) + unowned
    cache = np.zeros((N, S, 1, 256), np.float32) + unowned
    cache[..., :16], cache[..., 128:136] = keys[..., :16], keys[..., 16:]
    q, q_rope = normal(TOKENS, 4, 16), normal(TOKENS, 4, 8)
    names = ("kv_lens", "page_indices", "cu_q_lens", "cu_kv_lens", "distribution")
    out, found = sglang_jax.latent.mla_ragged_paged_attention(
        *(q, q_rope, latents, rope, jnp.asarray(cache)),
        *(given[name] for name in names),
        max_seq_len=16,
        sm_scale=0.3,
        sliding_window=0,
        soft_cap=0.0,
        decode_batch_size=4,
    )
    new = jnp.concatenate([latents, rope], -1)[:, None]
    keys, _ = jattn.update_kv_cache(keys, None, new, None, batch.slot_mapping, kv_layout="NHD")
    want = jattn.paged_attention(
        jnp.concatenate([q, q_rope], -1), keys, None, **batch.as_kwargs(), kv_layout="NHD",
        value_dim=16, scale=0.3, implementation="reference",
    )  # fmt: skip
    real = sum(QUERY_LENS)
    np.testing.assert_allclose(out[:real], want[:real], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(found[..., :16], keys[..., :16])
    np.testing.assert_array_equal(found[..., 128:136], keys[..., 16:])


@pytest.mark.parametrize(
    "first",
    [2, *(pytest.param(first, marks=pytest.mark.extended) for first in (None, 0))],
)
def test_experts_multiply_their_own_rows(first):
    """This device has two experts, starting at `first`; rows of other experts are zeros."""
    rng = np.random.default_rng(0)
    sizes = np.array([3, 0, 5, 1])
    rows, weights = rng.normal(size=(11, 8)), rng.normal(size=(2, 8, 6))
    bias, scales = rng.normal(size=(2, 1, 6)), rng.uniform(1, 2, (2, 2, 1, 6))
    given = {"rhs_scale": scales, "rhs_bias": bias}
    if first is not None:
        given["group_offset"] = jnp.int32(first)
    out = sglang_jax.experts.gmm(
        *(jnp.asarray(x, jnp.float32) for x in (rows, weights)),
        jnp.asarray(sizes, jnp.int32),
        preferred_element_type=jnp.float32,
        **{k: jnp.asarray(x, x.dtype if x.ndim == 0 else jnp.float32) for k, x in given.items()},
        zero_initialize=True,
    )
    want, starts = np.zeros((11, 6)), np.cumsum(sizes) - sizes
    for i in range(2):
        expert = (first or 0) + i
        mine = slice(starts[expert], starts[expert] + sizes[expert])
        matrix = weights[i] * np.repeat(scales[i, :, 0], 4, axis=0)
        want[mine] = rows[mine] @ matrix + bias[i]
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["custom_mask", "xai_temperature_len"])
def test_what_jattn_does_not_read_is_refused(name):
    given, _ = step(1)
    with pytest.raises(ValueError, match=f"{name}: .*must be None"):
        sglang_jax.ragged_paged_attention(**given, max_seq_len=16, **{name: 3.0})


def test_a_window_without_a_causal_mask_is_refused_by_name():
    given, _ = step(1)
    wrong = "sliding_window: 3 with is_causal=False, but must be None"
    with pytest.raises(ValueError, match=wrong):
        sglang_jax.ragged_paged_attention(**given, max_seq_len=16, causal=0, sliding_window=3)


def test_rows_without_a_slot_are_written_nowhere():
    """DFLASH writes keys and values made of hidden states this way; bfloat16 comes in pairs."""
    rng = np.random.default_rng(4)
    rows = jnp.asarray(rng.normal(size=(4, 1, K, 2, D)), jnp.bfloat16)
    pool = np.full((N, S, K, 2, D), np.nan, np.float32)
    slots = [S * N - 1, -1, 0, 6]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    found = sglang_jax.writes.update_fused_kv_cache_vectorized(
        *(rows, jnp.asarray(slots, jnp.int32), jnp.asarray(pool, jnp.bfloat16)),
        page_size=S,
        mesh=mesh,
    )
    for row, slot in zip(rows[:, 0], slots, strict=True):
        if slot >= 0:
            pool[slot // S, slot % S] = row
    np.testing.assert_array_equal(found.astype(jnp.float32), pool)


def recurrence(lens: list[int], delta: bool) -> tuple[dict[str, np.ndarray], list]:
    """Return rows of sequences of these lengths for linear attention, and its float64 results.

    Each sequence has its own result: what its tokens read, and its last state.
    """
    rng, (heads, keys, dim) = np.random.default_rng(3), (2, 4, 3)
    count = sum(lens)
    given = {
        "q": rng.normal(size=(count, heads, keys)),
        "k": rng.normal(size=(count, heads, keys)) / 2,
        "v": rng.normal(size=(count, heads, dim)),
        "g": rng.normal(size=(count, heads, keys)),
        "beta": rng.uniform(size=(count, heads)),
        "A_log": rng.normal(size=heads),
        "dt_bias": rng.normal(size=(heads, keys)),
        "states": rng.normal(size=(len(lens), heads, keys, dim)),
        "gamma": -rng.uniform(size=heads),
    }
    found, start = [], 0
    for length, state in zip(lens, given["states"].copy(), strict=True):
        rows = []
        for t in range(start, start + length):
            q, k, v = (given[name][t] for name in "qkv")
            if delta:
                gate = np.log1p(np.exp(given["g"][t] + given["dt_bias"]))
                state = state * np.exp(-np.exp(given["A_log"])[:, None] * gate)[..., None]
                v = given["beta"][t][:, None] * (v - (k[..., None] * state).sum(1))
            else:
                state = state * np.exp(given["gamma"])[:, None, None]
            state = state + k[..., None] * v[:, None]
            rows.append((q[..., None] * state).sum(1) * 0.5)
        found.append((np.array(rows).reshape(length, heads, dim), state))
        start += length
    return given, found


@pytest.mark.parametrize("delta", [True, False])
def test_linear_attention_goes_token_by_token(delta):
    """Sequences of several lengths, one of them empty, then padding."""
    lens, padding = [3, 0, 1, 5], 2
    given, want = recurrence(lens, delta)
    rows = {
        name: jnp.asarray(np.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)), jnp.float32)[None]
        for name, x in given.items()
        if len(x) == sum(lens)
    }
    states = jnp.asarray(given["states"], jnp.float32)
    starts = jnp.asarray([0, *np.cumsum(lens)], jnp.int32)
    q, k, v = (rows[name] for name in "qkv")
    if delta:
        out, after = jax.jit(sglang_jax.recurrent.chunk_kda)(
            *(q, k, v, rows["g"], rows["beta"]),
            scale=0.5,
            initial_state=states,
            cu_seqlens=starts,
            A_log=jnp.asarray(given["A_log"], jnp.float32),
            dt_bias=jnp.asarray(given["dt_bias"], jnp.float32),
        )
    else:
        gamma = jnp.asarray(given["gamma"], jnp.float32)
        out, after = sglang_jax.recurrent.simple_gla_fwd(
            *(q, k, v), g_gamma=gamma, h0=states, cu_seqlens_dev=starts
        )
    np.testing.assert_allclose(out[0, : sum(lens)], np.concatenate([row for row, _ in want]), 1e-5)
    np.testing.assert_array_equal(out[0, sum(lens) :], 0)
    np.testing.assert_allclose(after, [state for _, state in want], 1e-5)


def test_a_token_of_lightning_attention_updates_its_slot():
    """Padding rows have slot 0, and new sequences start from zeros, whatever their slot holds."""
    given, want = recurrence([1, 1], False)
    pool = np.full((5, 2, 4, 3), np.nan, np.float32)
    pool[0], pool[3] = 0, given["states"][0]
    q, k, v = (
        jnp.asarray(np.pad(given[name], [(0, 1), (0, 0), (0, 0)]), jnp.float32) for name in "qkv"
    )
    out, after = sglang_jax.recurrent.decode_simple_gla_fused(
        *(q, k, v, jnp.asarray(pool), jnp.asarray([3, 2, 0])),
        jnp.asarray([True, False, False]),
        g_gamma=jnp.asarray(given["gamma"], jnp.float32),
        scale=0.5,
    )
    new = given["k"][1][..., None] * given["v"][1][:, None]
    pool[3], pool[2] = want[0][1], new
    np.testing.assert_allclose(after, pool, 1e-5)
    np.testing.assert_allclose(out[0], want[0][0][0], 1e-5)
    np.testing.assert_allclose(out[1], (given["q"][1][..., None] * new).sum(1) * 0.5, 1e-5)
