"""jattn in sglang-jax: what is ours, with a stand-in for the host.

`tests/test_sglang_jax.py` runs the real one.
"""

from __future__ import annotations

import importlib.metadata
import pickle
import sys
import tomllib
import types
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.integrations import sglang_jax
from tests.support.processes import ROOT

N, S, K, G, D = 9, 4, 2, 2, 16  # pages, their tokens, KV heads, queries per KV head, head size
QUERY_LENS, SEQ_LENS = [1, 6, 3], [9, 6, 11]
TOKENS, ROWS = 12, 4  # of the bucket: more than the step has


def step(seed: int) -> tuple[dict[str, jax.Array], jattn.AttentionMetadata]:
    """A step as the host describes it, and as jattn does; unowned slots hold NaN."""
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
    sides = [given["kv_cache_fused"][:, :, side::2, 0] for side in (0, 1)]
    keys, values = jattn.update_kv_cache(
        *sides, given["keys"], given["values"], batch.slot_mapping, kv_layout="NHD"
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
    """Latents of 16 numbers, whose rotated part has 8, each up to 128 in the cache."""
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


@pytest.mark.parametrize("first", [None, 0, 2])
def test_experts_multiply_their_own_rows(first):
    """This device has two experts, from `first` on; rows of others' are zeros."""
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
        own = slice(starts[expert], starts[expert] + sizes[expert])
        matrix = weights[i] * np.repeat(scales[i, :, 0], 4, axis=0)
        want[own] = rows[own] @ matrix + bias[i]
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["custom_mask", "xai_temperature_len"])
def test_what_jattn_does_not_read_is_refused(name):
    given, _ = step(1)
    with pytest.raises(ValueError, match=f"{name}: .*must be None"):
        sglang_jax.ragged_paged_attention(**given, max_seq_len=16, **{name: 3.0})


@pytest.fixture
def host(monkeypatch):
    """Modules of sglang-jax as far as jattn knows them."""

    class ModelRunner:
        def __init__(self, **changes):
            self.use_mla_backend = changes.pop("use_mla_backend", False)
            self.page_size = changes.pop("page_size", 16)
            hf_config = SimpleNamespace(**changes.pop("hf_config", {}))
            self.model_config = SimpleNamespace(context_len=128, hf_config=hf_config)
            values = {
                "attention_backend": "fa",
                "device": "cpu",
                "speculative_algorithm": None,
                **changes,
            }
            self.server_args = SimpleNamespace(**values)

        def _get_attention_backend(self):
            if self.use_mla_backend:
                return mla.MLAAttentionBackend(page_size=self.page_size)
            return self.server_args.device

    backend, mla = types.ModuleType("flashattention_backend"), types.ModuleType("mla_backend")
    mla.MLAAttentionBackend = dict  # says what it was made with
    engine, scheduler = types.ModuleType("engine"), types.ModuleType("scheduler")
    modules = {
        "sgl_jax": types.ModuleType("sgl_jax"),
        "sgl_jax.srt": types.ModuleType("srt"),
        "sgl_jax.srt.entrypoints": types.ModuleType("entrypoints"),
        "sgl_jax.srt.entrypoints.engine": engine,
        "sgl_jax.srt.managers": types.ModuleType("managers"),
        "sgl_jax.srt.managers.scheduler": scheduler,
        "sgl_jax.srt.layers": types.ModuleType("layers"),
        "sgl_jax.srt.layers.attention": types.ModuleType("attention"),
        "sgl_jax.srt.layers.attention.flashattention_backend": backend,
        "sgl_jax.srt.layers.attention.mla_backend": mla,
        "sgl_jax.srt.layers.moe": types.ModuleType("moe"),
        "sgl_jax.srt.model_executor": types.ModuleType("model_executor"),
        "sgl_jax.srt.model_executor.model_runner": types.ModuleType("model_runner"),
    }
    modules["sgl_jax.srt.layers.attention"].flashattention_backend = backend
    modules["sgl_jax.srt.layers.attention"].mla_backend = mla
    modules["sgl_jax.srt.layers"].moe = modules["sgl_jax.srt.layers.moe"]
    modules["sgl_jax.srt.entrypoints"].engine = engine
    modules["sgl_jax.srt.model_executor.model_runner"].ModelRunner = ModelRunner
    for name, made in modules.items():
        monkeypatch.setitem(sys.modules, name, made)
    found = SimpleNamespace(version=sglang_jax.TESTED, ModelRunner=ModelRunner, backend=backend)
    found.engine, found.scheduler, found.mla = engine, scheduler, mla
    found.moe = modules["sgl_jax.srt.layers.moe"]
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: found.version if name == "sglang-jax" else version(name),
    )
    return found


def test_install_takes_the_kernels_place_on_cpus(host):
    sglang_jax.install()
    choose = host.ModelRunner._get_attention_backend
    sglang_jax.install()  # once is enough
    assert host.ModelRunner._get_attention_backend is choose
    runner = host.ModelRunner()
    assert runner._get_attention_backend() != "cpu"  # where the host would not take "fa"
    assert runner.server_args.device == "cpu"
    kernel = host.backend.ragged_paged_attention_v3
    assert kernel.func is sglang_jax.ragged_paged_attention
    assert kernel.keywords == {"max_seq_len": 128}
    assert host.moe.gmm is sglang_jax.experts.gmm


def test_latents_have_their_kernel_replaced(host):
    """The host's backend is told what it would ask a TPU for, when it is made and not after."""
    sglang_jax.install()
    made = host.ModelRunner(use_mla_backend=True)._get_attention_backend()
    assert made == {"page_size": 16, "vmem_limit_bytes": 0}
    assert host.mla.MLAAttentionBackend is dict
    kernel = host.mla.mla_ragged_paged_attention
    assert kernel.func is sglang_jax.latent.mla_ragged_paged_attention
    assert kernel.keywords == {"max_seq_len": 128}


def test_the_schedulers_process_has_it_too(host):
    """Spawned, it knows a function by its module and name alone."""
    sglang_jax.install()
    run = pickle.loads(pickle.dumps(host.engine.run_scheduler_process))
    plain = host.ModelRunner._get_attention_backend.__wrapped__
    host.ModelRunner._get_attention_backend = plain  # as in a new process
    seen = []
    host.scheduler.run_scheduler_process = lambda *arguments: seen.append(
        (arguments, host.ModelRunner._get_attention_backend is not plain)
    )
    run("arguments", "ports", None, "pipe")
    assert seen == [(("arguments", "ports", None, "pipe"), True)]


REFUSED = {
    "backend": ({"attention_backend": "native"}, "--attention-backend: native, but must be fa"),
    "latents": (
        {"use_mla_backend": True, "page_size": 1},
        "--page-size: 1, but must be at least 2 for a model with MLA",
    ),
    "drafts": ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm: EAGLE, but must be"),
    "temperatures": (
        {"hf_config": {"attn_temperature_len": 1024}},
        "--model-path: a model with attn_temperature_len=1024, but must be one without",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_at_the_start(host, name):
    changes, message = REFUSED[name]
    sglang_jax.install()
    with pytest.raises(ValueError, match="1 wrong argument") as error:
        host.ModelRunner(**changes)._get_attention_backend()
    assert message in str(error.value)


@pytest.mark.parametrize("length", [-1, None])
def test_no_temperature_is_taken(host, length):
    sglang_jax.install()
    host.ModelRunner(hf_config={"attn_temperature_len": length})._get_attention_backend()


def test_the_extra_is_the_version_that_was_tested():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = sglang_jax.TESTED
    assert extras["optional-dependencies"]["sglang"] == [f"sglang-jax[cpu]=={tested}"]


def test_another_version_is_refused(host, monkeypatch):
    host.version = "0.0.2"
    with pytest.raises(ValueError, match=r"sglang-jax: version 0\.0\.2, but must be 0\.1\.0rc0"):
        sglang_jax.install()
    monkeypatch.setenv(sglang_jax.ANY_VERSION, "1")
    sglang_jax.install()
