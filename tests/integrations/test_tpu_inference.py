"""jattn as an attention backend of tpu-inference: our part, with a stand-in for the host.

`tests/integrations/test_vllm.py` runs the real host.
"""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.integrations import rpa, tpu_inference
from jattn.integrations.tpu_inference import latent
from tests.support import stand_in_host
from tests.support.stand_in_host import Backends

host = stand_in_host.host  # the fixture


N, S, K, G, D = 12, 4, 2, 3, 16  # blocks, their tokens, KV heads, queries per KV head, head size


QUERY_LENS, SEQ_LENS = [1, 6, 3], [9, 6, 14]


TOKENS, ROWS, WIDTH = 16, 5, 5  # the padded sizes: more than the step needs


def step(seed: int, dim: int = D) -> dict[str, jax.Array]:
    """Return a step's arrays, padded with garbage; slots that no sequence owns hold NaN."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    tables = np.full((ROWS, WIDTH), 10**6, np.int32)
    free = rng.permutation(N).tolist()
    pool = np.full((N, S, K, 2, D), np.nan, np.float32)
    for row, (new, length) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True)):
        blocks = -(-length // S)
        tables[row, :blocks] = [free.pop() for _ in range(blocks)]
        for position in range(length - new):
            kept = np.zeros((K, 2, D), np.float32)
            kept[..., :dim] = rng.normal(size=(K, 2, dim))
            pool[tables[row, position // S], position % S] = kept
    return {
        "query": normal(TOKENS, K * G, dim),
        "key": normal(TOKENS, K, dim),
        "value": normal(TOKENS, K, dim),
        "kv_cache": jnp.asarray(pool),
        "seq_lens": jnp.asarray([*SEQ_LENS, 77, 77], jnp.int32),
        "block_tables": jnp.asarray(tables.ravel()),
        "query_start_loc": jnp.asarray([0, *np.cumsum(QUERY_LENS), 77, 77], jnp.int32),
        "distribution": jnp.asarray([1, 1, len(SEQ_LENS)], jnp.int32),
        "sinks": None,
    }


@functools.cache
def layer(write: bool):
    """Return `attend`, jitted as in the host."""
    return jax.jit(lambda given: tpu_inference.attend(**given, write=write))


def expected(given: dict[str, jax.Array], *, write: bool = True, **options: object):
    """Return the oracle's output, and the keys and values that it read, as separate arrays."""
    batch = jattn.AttentionMetadata.from_lengths(
        QUERY_LENS,
        SEQ_LENS,
        np.asarray(given["block_tables"]).reshape(ROWS, WIDTH)[: len(SEQ_LENS)],
        S,
    ).pad_to(num_tokens=TOKENS)
    dim = given["query"].shape[2]
    pools = [given["kv_cache"][:, :, :, part, :dim] for part in (0, 1)]
    if write:
        pools = jattn.update_kv_cache(
            *pools, given["key"], given["value"], batch.slot_mapping, kv_layout="NHD"
        )
    return jattn.paged_attention(
        given["query"], *pools, **batch.as_kwargs(), kv_layout="NHD",
        implementation="reference", **options,
    ), pools  # fmt: skip


CASES = {
    "plain": {},
    "window": {"sliding_window": 3},
    "cap": {"logits_soft_cap": 0.7, "scale": 0.9},
    "both ways": {"is_causal": False},
    "scales": {"k_scale": 1.7, "v_scale": 0.6},
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_writes_and_attends(name):
    given, options = step(len(name)), CASES[name]
    out, pool = jax.jit(lambda given: tpu_inference.attend(**given, write=True, **options))(given)
    want, (keys, values) = expected(given, **options)
    real = sum(QUERY_LENS)
    np.testing.assert_allclose(out[:real], want[:real], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(pool[:, :, :, 0], keys)
    np.testing.assert_array_equal(pool[:, :, :, 1], values)
    plain, _ = expected(given)
    assert name == "plain" or np.abs(out - plain)[:real].max() > 0.01


def test_a_layer_that_shares_anothers_keys_writes_nothing():
    given = step(3)
    _, first = layer(True)(given)
    given["kv_cache"], given["key"] = first, given["key"] * 100
    out, pool = layer(False)(given)
    np.testing.assert_array_equal(pool, first)
    want, _ = expected(given, write=False)
    real = sum(QUERY_LENS)
    np.testing.assert_allclose(out[:real], want[:real], rtol=2e-5, atol=2e-5)


def test_heads_may_be_smaller_than_the_hosts_padded_cache():
    given = step(4, dim=11)
    out, pool = layer(True)(given)
    want, _ = expected(given)
    real = sum(QUERY_LENS)
    assert out.shape == given["query"].shape
    np.testing.assert_allclose(out[:real], want[:real], rtol=2e-5, atol=2e-5)
    assert pool.shape == tpu_inference.cache_shape(N, S, K, D)


def test_latents_are_computed_by_the_host_s_backend_with_jattn_s_kernel(host):
    tpu_inference.register()
    tpu_inference.register()
    choose = sys.modules["tpu_inference.platforms.tpu_platform"].TpuPlatform.get_attn_backend_cls
    interface = sys.modules["tpu_inference.layers.common.attention_interface"]
    layers = sys.modules["tpu_inference.layers.vllm.custom_ops.mla_attention"]
    plain, latents = (SimpleNamespace(use_mla=mla) for mla in (False, True))
    ours = SimpleNamespace(name="JATTN", value="ours")
    assert choose(ours, attn_selector_config=plain) == "ours"
    assert choose(Backends.FLASH_ATTN, latents) == "a class of vLLM"
    assert not hasattr(interface, "mla_ragged_paged_attention")
    assert choose(ours, attn_selector_config=latents, num_heads=4) == "the host's for latents"
    assert interface.mla_ragged_paged_attention is latent.mla_ragged_paged_attention
    weights = jnp.ones((4, 3, 2), jnp.bfloat16)
    for dtype in (None, jnp.bfloat16, jnp.float8_e4m3fn):  # of the cache; weights stay unchanged
        kept, scale = layers.quantize_tensor(dtype, weights, axis=1)
        assert kept is weights
        np.testing.assert_array_equal(scale, np.ones((4, 2), np.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_rotated_keys_of_another_dtype_are_stored_in_the_caches(dtype):
    """The host applies rotary embeddings in float32, even if its caches are bfloat16."""
    given, rng = step(5), np.random.default_rng(6)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    pack = 4 // jnp.dtype(dtype).itemsize
    q, q_rope, new, rope = (
        normal(*x) for x in ((3, TOKENS, 16), (TOKENS, 3, 8), (TOKENS, 16), (TOKENS, 8))
    )
    names = ("seq_lens", "block_tables", "query_start_loc", "distribution")
    batch = [given[name] for name in names]
    found = latent.mla_ragged_paged_attention(
        *(q.astype(dtype), q_rope, new.astype(dtype), rope),
        jnp.zeros((N, S // pack, pack, 256), dtype),
        *batch,
        sm_scale=0.3,
    )
    want = rpa.mla_ragged_paged_attention(
        *(x.astype(dtype) for x in (q, q_rope, new, rope)),
        jnp.zeros((N, S // pack, pack, 256), dtype),
        *batch,
        sm_scale=0.3,
    )
    for ours, theirs in zip(found, want, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_array_equal(ours.astype(float), theirs.astype(float))


def test_the_hosts_jax_models_fall_back_to_the_same_backend(host):
    tpu_inference.register()
    backend = host.told["jattn"]["attention"]()
    interface = sys.modules["tpu_inference.layers.common.attention_interface"]
    assert type(interface.RPAAttentionBackend()) is type(backend)
    shape = backend.get_kv_cache_shape(N, S, K, D, jnp.bfloat16)
    assert shape == (N, S, K, 2, D)


def test_layers_of_torch_models_name_the_backend_and_keep_their_cap(host):
    tpu_inference.register()
    path, _, name = host.told["jattn"]["vllm_backend"].rpartition(".")
    backend = getattr(sys.modules[path], name)
    assert backend.get_name() == "JATTN"
    impl = backend.get_impl_cls()
    assert impl().attention_backend == "jattn"
    assert impl(cap=0.5).attention_backend == "jattn_cap_0_5"
    assert host.told["jattn_cap_0_5"]["attention"]().soft_cap == 0.5
    with pytest.raises(ValueError, match="attention of type encoder_only"):
        impl(attn_type="encoder_only")


def test_chunked_layers_keep_their_chunks_and_other_masks_of_builders_are_refused(host):
    """For such layers vLLM derives a class with its own builder, and adds a prefix to its name."""
    tpu_inference.register()
    backend = tpu_inference.VllmBackend

    def derived(prefix):
        return type(f"{prefix}VllmBackend", (backend,), {"get_builder_cls": None})

    chunked = derived("ChunkedLocalAttention_16_").get_impl_cls()(cap=0.5)
    layer = SimpleNamespace(attention_chunk_size=16)
    name = chunked.forward(layer, "query")
    assert name == "jattn_cap_0_5_chunk_16"
    made = host.told[name]["attention"]()
    assert (made.soft_cap, made.chunk) == (0.5, 16)
    assert backend.get_impl_cls()().forward(SimpleNamespace(), "query") == "jattn"
    with pytest.raises(ValueError, match="a layer has EncoderOnlyAttention, whose mask vLLM"):
        derived("EncoderOnlyAttention_").get_impl_cls()()


def attend_on_mesh(backend, given, **changes):
    """Call the backend as the host does; return the cache and the output."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    options = {
        "head_dim_original": D,
        "sm_scale": 0.8,
        "attention_chunk_size": 5,
        "q_scale": None,
        "k_scale": None,
        "v_scale": None,
        "update_kv_cache": True,
        "use_causal_mask": True,
        "attn_logits_soft_cap": None,
        "decode_query_size": 1,
        **changes,
    }

    @jax.jit
    def layer(given):
        meta = SimpleNamespace(
            block_tables=given["block_tables"],
            seq_lens=given["seq_lens"],
            query_start_loc=given["query_start_loc"],
            request_distribution=given["distribution"],
        )
        arrays = (given[name] for name in ("kv_cache", "query", "key", "value"))
        return backend.attention(*arrays, *(meta, meta, mesh), sinks=given["sinks"], **options)

    return layer(given)


@pytest.mark.parametrize(("cap", "chunk"), [(None, None), (0.7, 4)])
def test_the_backend_attends_on_the_hosts_mesh(host, cap, chunk):
    tpu_inference.register()
    backend = host.told["jattn"]["attention"](cap, chunk)
    given = step(9)
    given["sinks"] = sinks = jnp.linspace(-1, 1, K * G)
    pool, out = attend_on_mesh(backend, given)
    options = {"sliding_window": 5, "scale": 0.8, "attention_chunk_size": chunk}
    want, (keys, _) = expected(given, sinks=sinks, logits_soft_cap=cap, **options)
    real = sum(QUERY_LENS)
    np.testing.assert_allclose(out[:real], want[:real], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(pool[:, :, :, 0], keys)


def test_a_window_without_a_causal_mask_is_refused_by_name(host):
    """The host's kernel hides only keys before a window; jattn also hides keys after it."""
    tpu_inference.register()
    backend, given = host.told["jattn"]["attention"](), step(9)
    with pytest.raises(ValueError, match="sliding_window: 5 with is_causal=False, but must be"):
        attend_on_mesh(backend, given, use_causal_mask=False)
    attend_on_mesh(backend, given, use_causal_mask=False, attention_chunk_size=None)
