"""jattn.nnx: caches as state of a module, with the same results, written in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
import jattn.nnx
from jattn import testing

N, K, S, D, H = 64, 2, 16, 64, 4
BEFORE = jattn.AttentionMetadata.from_lengths([17, 4], [17, 4], [[4, 9], [2, 5]], S)
AFTER = jattn.AttentionMetadata.from_lengths([5, 16], [22, 20], [[4, 9], [2, 5]], S)


def numbers(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


class Model(nnx.Module):
    """A layer that writes, one that reads the first one's cache, and a parameter."""

    def __init__(self, **options):
        self.attention = jattn.nnx.PagedAttention(N, K, S, D, **options)
        self.gain = nnx.Param(jnp.asarray(2.0, jnp.bfloat16))

    def __call__(self, query, key, value, batch):
        first = self.attention(query, key, value, batch, sliding_window=7)
        return self.attention.attend(first * self.gain[...], batch)


def test_a_step_is_what_the_functions_do_and_copies_nothing():
    """Caches of two formats are split off the module, donated and put back."""
    formats = (jattn.Int8(), jattn.Fp8("e4m3"))
    model = Model(format=formats)
    graph, caches, params = nnx.split(model, jattn.nnx.KVCache, nnx.Param)
    assert len(jax.tree.leaves(params)) == 1

    def step(params, caches, query, key, value, batch):
        model = nnx.merge(graph, caches, params)
        out = model(query, key, value, batch)
        return out, nnx.state(model, jattn.nnx.KVCache)

    def functions(mine, query, key, value, batch):
        mine = jattn.update_kv_cache(*mine, key, value, batch.slot_mapping)
        first = jattn.paged_attention(query, *mine, **batch.as_kwargs(), sliding_window=7)
        return jattn.paged_attention(first * jnp.bfloat16(2), *mine, **batch.as_kwargs()), mine

    mine = jattn.init_kv_cache(N, K, S, D, format=formats)
    given = (numbers(0, 21, H, D), numbers(1, 21, K, D), numbers(2, 21, K, D))
    program = jax.jit(step, donate_argnums=1).lower(params, caches, *given, BEFORE).compile()
    testing.assert_nothing_pool_sized(program, caches)
    functions = jax.jit(functions)
    for batch in (BEFORE, AFTER):
        want, mine = functions(mine, *given, batch)
        out, caches = program(params, caches, *given, batch)
        np.testing.assert_array_equal(out, want)
        given = tuple(-x[::-1] for x in given)
    words = caches["attention"]["key_cache"].get_value().data
    np.testing.assert_array_equal(words, mine[0].data)


def test_a_latent_cache_and_its_layout():
    attention = jattn.nnx.PagedAttention(
        N, 1, S, 96, value_dim=64, values_in_keys=True, kv_layout="NHD"
    )
    assert attention.value_cache is None
    assert attention.key_cache.get_value().shape == (N, S, 1, 96)
    key, query = numbers(1, 21, 1, 96), numbers(2, 21, H, 96)
    out, lse = attention(query, key, None, BEFORE, return_lse=True, scale=0.1)
    cache, _ = jattn.update_kv_cache(
        jattn.init_kv_cache(N, 1, S, 96, kv_layout="NHD", values_in_keys=True)[0],
        None,
        key,
        None,
        BEFORE.slot_mapping,
        kv_layout="NHD",
    )
    want = jattn.paged_attention(
        *(query, cache, None),
        **BEFORE.as_kwargs(),
        kv_layout="NHD",
        value_dim=64,
        return_lse=True,
        scale=0.1,
    )
    assert out.shape == (21, H, 64)
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(lse, want[1])
    assert attention.attend(query, BEFORE, value_dim=32).shape == (21, H, 32)


def test_scales_are_of_what_is_written_and_read_and_nothing_is_written_before_checks():
    attention = jattn.nnx.PagedAttention(N, K, S, D, format=jattn.Int8())
    query, key, value = numbers(6, 21, H, D), numbers(7, 21, K, D), numbers(8, 21, K, D)
    scales = {"k_scale": jnp.asarray([2.0, 0.5]), "v_scale": 4.0}
    before = attention.key_cache.get_value().data
    for wrong in (
        {"sinks": jnp.ones(3)},
        {"scale": "1"},
        {"sinks": jax.ShapeDtypeStruct((H,), jnp.float32)},
        {"implementation": "cuda"},
        {"implementation": ("mosaic_gpu", "triton"), "out_dtype": jnp.float32},
    ):
        with pytest.raises((ValueError, jattn.UnsupportedError), match=next(iter(wrong))):
            attention(query, key, value, BEFORE, **wrong)
    assert attention.key_cache.get_value().data is before
    out = attention(query, key, value, BEFORE, **scales, implementation="xla")
    mine = jattn.init_kv_cache(N, K, S, D, format=jattn.Int8())
    mine = jattn.update_kv_cache(*mine, key, value, BEFORE.slot_mapping, **scales)
    want = jattn.paged_attention(query, *mine, **BEFORE.as_kwargs(), **scales, implementation="xla")
    assert (out == want).all()
    written = attention.key_cache.get_value()
    assert (written.data == mine[0].data).all()
    with pytest.raises(ValueError, match="implementation: 'triton', but must be None"):
        attention.update(key, value, BEFORE.slot_mapping, implementation="triton")


def test_misspelt_options_are_named_by_the_public_function():
    attention = jattn.nnx.PagedAttention(N, K, S, D)
    query, new = numbers(6, 21, H, D), numbers(7, 21, K, D)
    with pytest.raises(TypeError, match=r"^PagedAttention.__call__\(\) got an .* 'sinkz'"):
        attention(query, new, new, BEFORE, sinkz=1)


def test_shapes_without_memory_and_refusals():
    shapes = nnx.eval_shape(Model)
    assert isinstance(shapes.attention.key_cache.get_value().data, jax.ShapeDtypeStruct)
    narrow = nnx.eval_shape(lambda: jattn.nnx.PagedAttention(N, 1, S, 96, value_dim=64))
    assert narrow.value_cache.get_value().shape == (N, 1, S, 64)
    with pytest.raises(ValueError, match="value_dim is None, but must be"):
        jattn.nnx.PagedAttention(N, 1, S, 96, values_in_keys=True)
    for wrong in ("a", 0, 97, True):
        with pytest.raises(ValueError, match=r"value_dim: .*an integer from 1 to head_dim = 96"):
            jattn.nnx.PagedAttention(N, 1, S, 96, value_dim=wrong, values_in_keys=True)
    with pytest.raises(ValueError, match=r"value_dim: int 33, but must be a multiple of 2"):
        jattn.nnx.PagedAttention(
            N, 1, S, 96, value_dim=33, values_in_keys=True, format=jattn.Int4()
        )
    with pytest.raises(ValueError, match="head_dim"):
        jattn.nnx.PagedAttention(N, 1, S, 0)
