"""Whether the recipes in docs/ do what their pages say, each with its stack installed.

Every stack needs its own environment:

    pip install -e '.[vllm]' pytest                   # MaxText, which calls tpu-inference
    pip install -e . pytest keras-hub 'jax[cpu]'      # KERAS_BACKEND=jax
    pip install -e . pytest levanter==1.2.dev1644 haliax==1.4.dev453 jax==0.10.2 chex gitpython
    pip install -e . pytest easydel==0.3.0
    pytest -m hosts tests/integrations/test_recipes.py
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn

pytestmark = pytest.mark.hosts
DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = {
    "MaxText": "ragged-paged-attention.md",
    "levanter": "ragged-paged-attention.md",
    "EasyDeL": "integrations.md",
    "KerasHub": "integrations.md",
}


@pytest.fixture(autouse=True)
def as_users_have_it():
    """Allow promotion as JAX does by default: the stacks promote ranks and dtypes."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def recipe(stack: str) -> dict:
    """Return the names that the first code block after a stack's name defines."""
    page = PAGES[stack]
    text = (DOCS / page).read_text().split(f"\n**{stack}** ", 1)[1]
    code = re.search(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S).group(1)
    namespace: dict = {}
    exec(compile(code, f"{page}: {stack}", "exec"), namespace)
    return namespace


def numbers(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.skipif(
    not importlib.util.find_spec("tpu_inference"), reason="needs pip install 'jattn[vllm]'"
)
@pytest.mark.parametrize("head_dim", [128, 64])
def test_maxtext(monkeypatch, head_dim):
    """Compare tpu-inference's function, called as by MaxText, with the reference that it ships."""
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel, kernel_hd64
    from tpu_inference.layers.common import attention_interface

    for name in ("ragged_paged_attention", "ragged_paged_attention_hd64"):
        monkeypatch.setattr(attention_interface, name, getattr(attention_interface, name))
    recipe("MaxText")
    heads, kv_heads, tokens = 8, 2, 16
    q, k, v = (numbers(i, tokens, n, head_dim) for i, n in enumerate((heads, kv_heads, kv_heads)))
    rest = (kv_heads, 1, 128) if head_dim == 64 else (2 * kv_heads, 1, head_dim)
    cache = numbers(3, 24, 4, *rest)
    pages = np.random.default_rng(4).permutation(24).reshape(4, 6)
    told = {
        "kv_lens": jnp.array([19, 7, 5, 0], jnp.int32),
        "page_indices": jnp.asarray(pages.reshape(-1), jnp.int32),
        "cu_q_lens": jnp.array([0, 1, 8, 11, 11], jnp.int32),
        "distribution": jnp.array([1, 1, 3], jnp.int32),
    }
    sinks = numbers(5, heads) if head_dim == 64 else None
    window = 6 if head_dim == 64 else None
    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:1], (1, 1)), ("data", "model"))
    out, written = attention_interface.sharded_ragged_paged_attention(
        *(mesh, q, k, v, jnp.array(cache)),
        **told,
        attention_sink=sinks,
        sm_scale=head_dim**-0.5,
        attention_chunk_size=window,
    )
    more = {"sm_scale": head_dim**-0.5, "sliding_window": window}
    if head_dim == 64:
        expected = kernel_hd64.ref_ragged_paged_attention_hd64(
            q, k, v, cache, *told.values(), sinks, **more
        )
    else:
        expected = kernel.ref_ragged_paged_attention(q, k, v, cache, *told.values(), **more)
    np.testing.assert_allclose(out[:11], expected[0][:11], atol=2e-6)
    np.testing.assert_array_equal(written, expected[1])


@pytest.mark.skipif(not importlib.util.find_spec("keras_hub"), reason="needs keras-hub")
@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Gemma"])
def test_kerashub(monkeypatch, family):
    """Ragged chunks over a paged cache give the hidden states of KerasHub's dense pass."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    import keras
    import keras_hub

    assert keras.backend.backend() == "jax"
    keras.utils.set_random_seed(0)
    heads, kv_heads, head_dim, layers = 4, 2, 16, 3
    sizes = {"vocabulary_size": 50, "num_layers": layers, "intermediate_dim": 96}
    sizes |= {"num_query_heads": heads, "num_key_value_heads": kv_heads}
    if family == "Gemma":  # Gemma 2, with a window in every other layer and a soft cap
        sizes |= {"hidden_dim": 64, "head_dim": head_dim, "sliding_window_size": 5}
        sizes |= {"use_sliding_window_attention": True, "attention_logit_soft_cap": 2.0}
        sizes |= {"query_head_dim_normalize": True, "use_post_ffw_norm": True}
    else:
        sizes["hidden_dim"] = 64
    if family == "Qwen3":
        sizes["head_dim"] = head_dim
    backbone = getattr(keras_hub.models, f"{family}Backbone")(**sizes)

    step, block_size = recipe("KerasHub")["step"], 4
    texts = np.random.default_rng(0).integers(1, 50, (2, 14)).astype(np.int32)
    tables = jnp.asarray(np.random.default_rng(1).permutation(8).reshape(2, 4), jnp.int32)
    float32 = jattn.Dense("float32")
    caches = [jattn.init_kv_cache(8, kv_heads, block_size, head_dim, format=float32)] * layers
    found = [[], []]
    done = np.zeros(2, np.int32)
    for chunk in ((9, 11), (1, 1), (1, 1), (1, 1), (2, 0)):
        there = [done[i] + np.arange(n, dtype=np.int32) for i, n in enumerate(chunk)]
        positions = np.concatenate(there)
        slots = [
            tables[i, where // block_size] * block_size + where % block_size
            for i, where in enumerate(there)
        ]
        done = done + np.array(chunk, np.int32)
        metadata = jattn.AttentionMetadata(
            tables,
            jnp.asarray(done),
            jnp.asarray(np.cumsum((0, *chunk)), jnp.int32),
            jnp.concatenate(slots),
            max(chunk),
        )
        tokens = np.concatenate([texts[i, where] for i, where in enumerate(there)])
        hidden, caches = step(
            backbone, jnp.asarray(tokens), jnp.asarray(positions), caches, metadata
        )
        for i, part in enumerate(np.split(np.asarray(hidden), [chunk[0]])):
            found[i].append(part)
    dense = np.asarray(backbone({"token_ids": texts, "padding_mask": np.ones_like(texts)}))
    assert done.tolist() == [14, 14]
    np.testing.assert_allclose(
        np.stack([np.concatenate(parts) for parts in found]), dense, atol=2e-5 * np.abs(dense).max()
    )


@pytest.mark.skipif(not importlib.util.find_spec("levanter"), reason="needs levanter")
@pytest.mark.filterwarnings("ignore")  # warnings of the stack itself
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_levanter(monkeypatch, kv_heads):
    """In levanter's engine, a batch of prompts gets the tokens of the model's dense pass."""
    import haliax
    from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
    from levanter.inference.jit_scheduler import SeqDecodingParams
    from levanter.layers import attention
    from levanter.models.llama import LlamaConfig

    monkeypatch.setattr(attention, "default_ragged_paged_attention", None)
    recipe("levanter")
    sizes = {"hidden_dim": 64, "intermediate_dim": 96, "num_layers": 2, "num_heads": 4}
    config = LlamaConfig(seq_len=64, num_kv_heads=kv_heads, gradient_checkpointing=False, **sizes)
    model = config.build(haliax.Axis("vocab", 50), key=jax.random.PRNGKey(0))
    # With untrained weights, attention would be nearly the mean of the values.
    model = jax.tree.map(lambda x: 4 * x if getattr(x, "ndim", 0) > 1 else x, model)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50, n).tolist() for n in (3, 9, 6, 14)]
    limits = {"max_seq_len": 64, "page_size": 4, "max_seqs": 4, "max_pages": 48}
    more = {"max_prefill_size": 40, "max_seqs_in_prefill": 4, "max_queued_tokens": 40}
    engine = InferenceEngine.from_model_with_config(
        model, None, InferenceEngineConfig(compute_dtype=jnp.float32, **limits, **more)
    )
    requests = [
        Request(
            prompt,
            i,
            SeqDecodingParams(
                jnp.asarray(len(prompt) + 10), None, jnp.asarray(0.0), jax.random.PRNGKey(i)
            ),
            1,
        )
        for i, prompt in enumerate(prompts)
    ]
    found = engine.generate(requests).tokens
    mask = attention.AttentionMask.causal()
    dense = haliax.named_jit(lambda model, tokens: model(tokens, attn_mask=mask))
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == 10
        everything = haliax.named(jnp.asarray(prompt + tokens), "position")
        chosen = dense(model, everything).array.argmax(axis=-1)
        assert chosen[len(prompt) - 1 : -1].tolist() == tokens


@pytest.mark.skipif(not importlib.util.find_spec("easydel"), reason="needs easydel")
@pytest.mark.filterwarnings("ignore")  # warnings of the stack itself
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 7}, {"logits_soft_cap": 5.0}, {"sinks": True}],
    ids=["plain", "window", "cap", "sinks"],
)
def test_easydel(monkeypatch, options):
    """Compare EasyDeL's operation, on a CPU posing as a GPU, with ejkernel's reference."""
    from easydel.operations import OperationMetadata
    from easydel.operations.kernels import unified_attention as operation
    from ejkernel.kernels._xla.unified_attention import unified_attention as reference

    monkeypatch.setattr(operation, "unified_attention", None)
    recipe("EasyDeL")

    class OnGpu:
        default_backend = staticmethod(lambda: "gpu")

        def __getattr__(self, name):
            return getattr(jax, name)

    monkeypatch.setattr(operation, "jax", OnGpu())
    heads, kv_heads, head_dim, tokens = 4, 2, 64, 11
    q = numbers(0, tokens, heads, head_dim)
    keys, values = (numbers(i, 24, 4, kv_heads, head_dim) for i in (1, 2))
    pages = np.random.default_rng(3).permutation(24).reshape(4, 6)
    told = types.SimpleNamespace(
        context_lens=jnp.array([19, 7, 5, 0], jnp.int32),
        pages_tables=jnp.asarray(pages, jnp.int32),
        query_start_loc=jnp.array([0, 1, 8, 11, 11], jnp.int32),
    )
    view = types.SimpleNamespace(
        key_cache=keys, value_cache=values, metadata=types.SimpleNamespace(data_parallel_size=1)
    )
    sinks = numbers(4, heads) if options.get("sinks") else None
    given = {name: x for name, x in options.items() if name != "sinks"}
    mesh = jax.sharding.Mesh(
        np.reshape(jax.devices()[:1], (1,) * 5), ("dp", "fsdp", "ep", "tp", "sp")
    )
    attend = operation.UnifiedAttn(
        OperationMetadata(jnp.float32, platform="jax", _stored_mesh=mesh)
    )
    found = attend.forward_native(
        q, view, told, softmax_scale=head_dim**-0.5, softmax_aux=sinks, **given
    )
    expected = reference(
        *(q, keys, values, told.context_lens, told.pages_tables, told.query_start_loc),
        softmax_aux=sinks,
        softmax_scale=head_dim**-0.5,
        **given,
    )
    error = np.abs(found.attention_outputs - expected).max()
    assert error <= 16 * np.finfo(np.float32).eps
