"""Latent attention: one cache whose keys hold their values.

`tests/models/test_models.py` compares a whole model with it, DeepSeek-V3, with transformers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import call as calls
from jattn import testing
from tests.support import budget, problems

pytestmark = pytest.mark.usefixtures("each_row")

SIZES = ((576, 512), (320, 256), (288, 256))  # DeepSeek and Kimi; Mistral 4; MiniCPM3


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


@pytest.mark.parametrize(
    "dims",
    [SIZES[0], *(pytest.param(dims, marks=pytest.mark.extended) for dims in SIZES[1:])],
    ids=lambda dims: f"{dims[0]}v{dims[1]}",
)
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
    pair = (jattn.Dense("bfloat16"), jattn.Fp8("e4m3"))
    with pytest.raises(ValueError, match=r"format: .* with values_in_keys, but must be one format"):
        jattn.init_kv_cache(4, 1, 16, 576, values_in_keys=True, format=pair)


def test_what_is_refused():
    cache = jattn.init_kv_cache(4, 1, 16, 576, values_in_keys=True)[0]
    packed = jattn.init_kv_cache(4, 1, 16, 576, values_in_keys=True, format=jattn.Int4())[0]
    given = {
        "query": jnp.ones((1, 2, 576)),
        "key_cache": cache,
        "value_cache": None,
        "block_tables": jnp.zeros((1, 2), jnp.int32),
        "seq_lens": jnp.ones((1,), jnp.int32),
    }
    jattn.explain(**given, value_dim=576)
    # A scale of keys also scales values: rows that lack either option refuse it.
    scaled = calls.Arguments(**given, value_dim=512, k_scale=2.0)
    assert {"k_scale", "v_scale"} <= scaled.options
    for changes, words in (
        ({}, "value_cache: None without value_dim"),
        ({"value_dim": 577}, "value_dim: int 577, but must be an integer from 1 to D, D = 576"),
        ({"value_dim": 0}, "value_dim: int 0"),
        (
            {"value_dim": 511, "key_cache": packed},
            "value_dim: int 511, but must be a multiple of 2",
        ),
        ({"value_dim": 512, "v_scale": 2.0}, "v_scale: float 2.0, but must be None"),
        ({"value_dim": 512, "value_cache": cache}, "value_dim: int 512, but must be None"),
    ):
        with pytest.raises(ValueError, match="1 wrong argument") as error:
            jattn.paged_attention(**(given | changes))
        assert words in str(error.value)
    new = jnp.ones((1, 1, 576))
    with pytest.raises(ValueError, match="value: float32") as error:
        jattn.update_kv_cache(cache, None, new, new, jnp.zeros((1,), jnp.int32))
