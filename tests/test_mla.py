"""Latent attention: one cache whose keys hold their values, and a DeepSeek V3 from transformers.

`data/deepseek/reference.npz` holds the weights, prompts, greedy tokens and their logits;
`make_reference.py` next to it made it.
"""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from examples.models import deepseek
from jattn import testing
from tests.support import budget, problems

pytestmark = pytest.mark.usefixtures("each_row")

REFERENCE = pathlib.Path(__file__).parent / "data" / "deepseek" / "reference.npz"
BLOCK = 16
SIZES = ((576, 512), (320, 256), (288, 256))  # DeepSeek and Kimi; Mistral 4; MiniCPM3


def load() -> tuple[deepseek.DeepseekConfig, dict, dict]:
    """`(config, weights, reference)`."""
    arrays = dict(np.load(REFERENCE))
    config = deepseek.DeepseekConfig.from_dict(json.loads(str(arrays["config"])))
    weights = {
        name.removeprefix("weights/"): jnp.asarray(words.view(jnp.bfloat16).astype(np.float32))
        for name, words in arrays.items()
        if name.startswith("weights/")
    }
    return config, weights, arrays


STEP = jax.jit(deepseek.forward, static_argnums=1, donate_argnums=2)


def serve(config, weights, arrays) -> tuple[np.ndarray, np.ndarray]:
    """`(tokens, logits)`: all prompts at once, then greedy steps, over one shuffled pool."""
    lens, num_new = arrays["prompt_lens"], arrays["tokens"].shape[1]
    tables = np.random.default_rng(0).permutation(5 * 3).reshape(5, 3)
    caches = deepseek.init_caches(config, 15, BLOCK, jattn.Dense("float32"))
    ids = [row[:n] for row, n in zip(arrays["prompts"], lens, strict=True)]
    tokens, logits = [], []
    for _ in range(num_new):
        counts = np.array([len(new) for new in ids])
        total = lens + len(tokens)
        batch = jattn.AttentionMetadata.from_lengths(
            counts, total, tables, BLOCK, max_query_len=None if len(tokens) == 0 else 1
        )
        at = np.concatenate([np.arange(n - m, n) for n, m in zip(total, counts, strict=True)])
        found, caches = STEP(
            weights,
            config,
            caches,
            jnp.asarray(np.concatenate(ids), jnp.int32),
            jnp.asarray(at, jnp.int32),
            jax.tree.map(jnp.asarray, batch),
        )
        logits.append(np.asarray(found)[np.cumsum(counts) - 1])
        tokens.append(logits[-1].argmax(axis=-1))
        ids = [np.array([new]) for new in tokens[-1]]
    return np.stack(tokens, 1), np.stack(logits, 1)


def tolerance(arrays) -> float:
    """A thousandth of what would change a token."""
    best = np.sort(arrays["logits"], axis=-1)
    return float((best[..., -1] - best[..., -2]).min()) / 1000


def test_absorbed_attention_is_the_reference():
    """Two float32 computations of one model, one expanding every latent, one never."""
    config, weights, arrays = load()
    assert config.cache_dim == 576
    tokens, logits = serve(config, weights, arrays)
    np.testing.assert_array_equal(tokens, arrays["tokens"])
    assert np.abs(logits - arrays["logits"]).max() < tolerance(arrays)


def test_the_reference_notices_small_mistakes():
    """One norm that is off by a thousandth, in one prefill: outside what the test above allows."""
    config, weights, arrays = load()
    name = "model.layers.0.self_attn.kv_a_layernorm.weight"
    weights[name] = weights[name] * jnp.float32(1.001)
    _, logits = serve(config, weights, {**arrays, "tokens": arrays["tokens"][:, :1]})
    assert np.abs(logits - arrays["logits"][:, :1]).max() > tolerance(arrays)


def problem(dims, **changes) -> problems.Problem:
    return problems.Problem(
        **{
            "query_lens": (1, 3, 9),
            "seq_lens": (17, 3, 40),
            "num_kv_heads": 1,
            "head_dim": dims[0],
            "value_dim": dims[1],
            "options": frozenset({"value_dim", "return_lse"}),
            **changes,
        }
    )


@pytest.mark.parametrize("dims", SIZES, ids=lambda dims: f"{dims[0]}v{dims[1]}")
def test_decode(dims):
    steps = problem(dims, query_lens=(1,) * 3, seq_lens=(17, 1, 40), ragged=False)
    batch = problems.build(steps)
    budget.of(batch).check(*batch.run())


def test_no_value_cache_is_a_sliced_value_cache():
    batch = problems.build(problem(SIZES[0]))
    out, lse = batch.run()
    budget.of(batch).check(out, lse)
    apart = batch.key_cache.replace(data=batch.key_cache.data[..., : SIZES[0][1]])
    kwargs = {name: x for name, x in batch.kwargs.items() if name != "value_dim"}
    want = jattn.paged_attention(jnp.asarray(batch.query), batch.key_cache, apart, **kwargs)
    for have, other in zip((out, lse), want, strict=True):
        np.testing.assert_allclose(have, np.asarray(other), rtol=2e-6, atol=2e-6)


def test_one_cache_is_written_in_place_and_read_without_a_copy():
    mib = 2**20
    format = jattn.Dense("bfloat16")
    cache = jattn.KVArray(
        jax.ShapeDtypeStruct((2**15, 1, 16, 576), format.word_dtype), None, format
    )

    def step(cache, query, new, tables, lens, slots):
        cache, nothing = jattn.update_kv_cache(cache, None, new, None, slots)
        assert nothing is None
        out = jattn.paged_attention(
            query, cache, None, value_dim=512, block_tables=tables, seq_lens=lens
        )
        return cache, out

    struct = jax.ShapeDtypeStruct
    compiled = (
        jax.jit(step, donate_argnums=0)
        .lower(
            cache,
            struct((4, 16, 576), jnp.bfloat16),
            struct((4, 1, 576), jnp.bfloat16),
            struct((4, 8), jnp.int32),
            struct((4,), jnp.int32),
            struct((4,), jnp.int32),
        )
        .compile()
    )
    assert cache.nbytes > 512 * mib
    testing.assert_nothing_pool_sized(compiled, cache, max_temporaries=16 * mib)


def test_init_makes_one_array():
    key_cache, value_cache = jattn.init_kv_cache(4, 1, 16, 576, values_in_keys=True)
    assert key_cache.shape == (4, 1, 16, 576)
    assert value_cache is None
    with pytest.raises(ValueError, match="value_dim: 512 with values_in_keys"):
        jattn.init_kv_cache(4, 1, 16, 576, value_dim=512, values_in_keys=True)


def test_what_is_refused():
    cache = jattn.init_kv_cache(4, 1, 16, 576, values_in_keys=True)[0]
    given = {
        "query": jnp.ones((1, 2, 576)),
        "key_cache": cache,
        "value_cache": None,
        "block_tables": jnp.zeros((1, 2), jnp.int32),
        "seq_lens": jnp.ones((1,), jnp.int32),
    }
    jattn.explain(**given, value_dim=576)
    for changes, words in (
        ({}, "value_cache: None without value_dim"),
        ({"value_dim": 577}, "value_dim: int 577, but must be an integer from 1 to D, D = 576"),
        ({"value_dim": 0}, "value_dim: int 0"),
        ({"value_dim": 512, "v_scale": 2.0}, "v_scale: float 2.0, but must be None"),
        ({"value_dim": 512, "value_cache": cache}, "value_dim: int 512, but must be None"),
    ):
        with pytest.raises(ValueError, match="1 wrong argument") as error:
            jattn.paged_attention(**(given | changes))
        assert words in str(error.value)
    new = jnp.ones((1, 1, 576))
    with pytest.raises(ValueError, match="value: float32") as error:
        jattn.update_kv_cache(cache, None, new, new, jnp.zeros((1,), jnp.int32))
