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


@pytest.mark.parametrize(
    "first",
    [2, *(pytest.param(first, marks=pytest.mark.extended) for first in (None, 0))],
)
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


def test_a_window_without_a_causal_mask_is_refused_by_name():
    given, _ = step(1)
    wrong = "sliding_window: 3 with is_causal=False, but must be None"
    with pytest.raises(ValueError, match=wrong):
        sglang_jax.ragged_paged_attention(**given, max_seq_len=16, causal=0, sliding_window=3)


def recurrence(lens: list[int], delta: bool) -> tuple[dict[str, np.ndarray], list]:
    """Rows of sequences of these lengths for linear attention, and its results in float64.

    The results are those of each sequence alone: what its tokens read, and its last state.
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
    """Rows of padding have slot 0, and new sequences begin with zeros whatever their slot holds."""
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


@pytest.fixture
def host(monkeypatch):
    """Modules of sglang-jax as far as jattn knows them."""

    class ModelRunner:
        def __init__(self, **changes):
            self.use_mla_backend = changes.pop("use_mla_backend", False)
            self.page_size = changes.pop("page_size", 16)
            hf_config = SimpleNamespace(**changes.pop("hf_config", {}))
            self.qwen3_5_hybrid_config = changes.pop("qwen3_5_hybrid_config", None)
            self.linear_recurrent_config = changes.pop("linear_recurrent_config", None)
            self.hybrid = changes.pop("hybrid", False)
            self.model_config = SimpleNamespace(
                context_len=changes.pop("context_len", 128),
                hf_config=hf_config,
                moe_backend=changes.pop("effective_moe_backend", "epmoe"),
                quantization_config=changes.pop("quantization_config", None),
            )
            values = {
                "attention_backend": "fa",
                "device": "cpu",
                "gdn_prefill_impl": "fused_chunk_parallel",
                "moe_backend": "epmoe",
                "quantization_config_path": None,
                "speculative_algorithm": None,
                "speculative_eagle_topk": 5,
                "speculative_num_draft_tokens": 4,
                "speculative_num_steps": 3,
                **changes,
            }
            self.server_args = SimpleNamespace(**values)

        def get_available_device_memory(self):
            return 1000

        def _get_attention_backend(self):
            if self.use_mla_backend:
                return mla.MLAAttentionBackend(page_size=self.page_size)
            full = backend.FlashAttention(device=self.server_args.device)
            return SimpleNamespace(full_attn_backend=full) if self.hybrid else full

    class Backend:
        def __init__(self, **made_with):
            self.made_with = made_with

        def __call__(self, *args):
            return self.kernel()(*args)

    class FlashAttention(Backend):
        def kernel(self):
            return backend.ragged_paged_attention_v3

    class MLAAttentionBackend(Backend):
        def kernel(self):
            return mla.mla_ragged_paged_attention

    backend, mla = types.ModuleType("flashattention_backend"), types.ModuleType("mla_backend")
    backend.FlashAttention, mla.MLAAttentionBackend = FlashAttention, MLAAttentionBackend
    utils, jax_utils = types.ModuleType("utils"), types.ModuleType("jax_utils")
    utils.jax_utils = jax_utils
    jax_utils.device_array = backend.device_array = lambda data, sharding: (data, sharding)
    linear = types.ModuleType("linear")
    kda, lightning = types.ModuleType("kda_backend"), types.ModuleType("lightning_backend")
    linear.kda_backend, linear.lightning_backend = kda, lightning
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
        "sgl_jax.srt.layers.attention.linear": linear,
        "sgl_jax.srt.layers.attention.mla_backend": mla,
        "sgl_jax.srt.layers.moe": types.ModuleType("moe"),
        "sgl_jax.srt.utils": utils,
        "sgl_jax.srt.utils.jax_utils": jax_utils,
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
    found.kda, found.lightning = kda, lightning
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
    made = runner._get_attention_backend()
    assert made.made_with != {"device": "cpu"}  # where the host would not take "fa"
    assert runner.server_args.device == "cpu"
    kernel = host.backend.ragged_paged_attention_v3
    assert kernel.__wrapped__ is sglang_jax.ragged_paged_attention
    assert host.moe.gmm is sglang_jax.experts.gmm
    assert host.kda.chunk_kda is sglang_jax.recurrent.chunk_kda
    assert host.lightning.simple_gla_fwd is sglang_jax.recurrent.simple_gla_fwd
    decode = sglang_jax.recurrent.decode_simple_gla_fused
    assert host.lightning.decode_simple_gla_fused is decode


def test_what_the_host_goes_on_to_change_is_copied(host):
    """A CPU's arrays may be NumPy's memory; modules have the host's function by its name."""
    sglang_jax.install()
    for _ in range(2):  # of engines
        host.ModelRunner()._get_attention_backend()
    lens = np.arange(3)
    (found, kept), sharding = host.backend.device_array((lens, "a"), "sharding")
    assert sharding == "sharding"
    assert kept == "a"
    assert not np.shares_memory(found, lens)
    np.testing.assert_array_equal(found, lens)


def test_latents_have_their_kernel_replaced(host):
    """The host's backend is told what it would ask a TPU for, when it is made and not after."""
    plain = host.mla.MLAAttentionBackend
    sglang_jax.install()
    made = host.ModelRunner(use_mla_backend=True)._get_attention_backend()
    assert made.made_with == {"page_size": 16, "vmem_limit_bytes": 0}
    assert host.mla.MLAAttentionBackend is plain
    kernel = host.mla.mla_ragged_paged_attention
    assert kernel.__wrapped__ is sglang_jax.latent.mla_ragged_paged_attention


@pytest.mark.parametrize("changes", [{}, {"hybrid": True}, {"use_mla_backend": True}])
def test_engines_of_a_process_keep_their_own_lengths(host, monkeypatch, changes):
    """The kernels are functions of modules, which the engines share; the second is shorter."""
    for module in (sglang_jax, sglang_jax.latent):
        name = (
            "mla_ragged_paged_attention" if module is not sglang_jax else "ragged_paged_attention"
        )
        monkeypatch.setattr(module, name, lambda *args, max_seq_len: (args, max_seq_len))
    sglang_jax.install()
    made = [
        host.ModelRunner(context_len=length, **changes)._get_attention_backend()
        for length in (64, 32)
    ]
    first, second = (getattr(one, "full_attn_backend", one) for one in made)
    assert first("q") == (("q",), 64)
    assert second("q") == (("q",), 32)
    with pytest.raises(LookupError):
        host.backend.ragged_paged_attention_v3("q")


def test_drafts_come_on_top_of_the_longest_sequence(host, monkeypatch):
    monkeypatch.setattr(sglang_jax, "ragged_paged_attention", lambda *, max_seq_len: max_seq_len)
    sglang_jax.install()
    drafts = {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 1}
    assert host.ModelRunner(context_len=32, **drafts)._get_attention_backend()() == 36


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
    "trees of drafts": (
        {"speculative_algorithm": "EAGLE3"},
        "--speculative-eagle-topk: 5, but must be 1, for chains of drafts",
    ),
    "drafts of latents": (
        {"use_mla_backend": True, "speculative_algorithm": "NEXTN", "speculative_eagle_topk": 1},
        "--speculative-algorithm: NEXTN, but must be left out: the host verifies no drafts",
    ),
    "drafts of recurrences": (
        {
            "linear_recurrent_config": {},
            "speculative_algorithm": "NEXTN",
            "speculative_eagle_topk": 1,
        },
        "--speculative-algorithm: NEXTN, but must be left out: the host verifies no drafts",
    ),
    "the host's own number of drafts": (
        {
            "speculative_algorithm": "EAGLE3",
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
            "speculative_num_steps": 4,
        },
        "--speculative-num-draft-tokens: 4, but must be 5, one more than --speculative-num-steps",
    ),
    "single drafts": (
        {
            "speculative_algorithm": "NEXTN",
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 2,
            "speculative_num_steps": 1,
        },
        "--speculative-num-steps: 1, but must be at least 2: the host verifies single drafts",
    ),
    "drafts verified as trees": (
        {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1},
        "--speculative-algorithm: EAGLE, but must be EAGLE3: the host verifies these drafts with",
    ),
    "fused dense layers": (
        {"hf_config": {"architectures": ["GlmMoeDsaForCausalLM"]}},
        "--model-path: a model of GlmMoeDsaForCausalLM without quantization, but must be another",
    ),
    "fused experts": (
        {"moe_backend": "auto", "effective_moe_backend": "fused"},
        "--moe-backend: auto, but must be epmoe: ",
    ),
    "only fused experts": (
        {"effective_moe_backend": "fused"},
        "--model-path: a mixture of experts that the host always computes with its fused kernel",
    ),
    "blocks": (
        {"quantization_config": SimpleNamespace(weight_block_size=(128, 128))},
        "--model-path: weights with scales for blocks of (128, 128) (weight_block_size), but must",
    ),
    "configured blocks": (
        {
            "quantization_config": SimpleNamespace(weight_block_size=(128, 128)),
            "quantization_config_path": "fp8.yaml",
        },
        "--quantization-config-path: weights with scales for blocks of (128, 128)",
    ),
    "delta nets": (
        {
            "qwen3_5_hybrid_config": {},
            "_explicit_cli_args": {"--gdn-prefill-impl=fused_chunk_parallel"},
        },
        "--gdn-prefill-impl: fused_chunk_parallel, but must be chunked_jax, or left out",
    ),
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


def test_a_device_that_jax_does_not_find_is_refused(host):
    """Before the host asks a CPU how much memory a TPU has."""
    sglang_jax.install()
    assert host.ModelRunner(device="cpu").get_available_device_memory() == 1000
    with pytest.raises(ValueError, match=r"--device: tpu, .* but must be cpu,"):
        host.ModelRunner(device="tpu").get_available_device_memory()


def test_quantized_dense_layers_are_not_fused(host):
    sglang_jax.install()
    host.ModelRunner(
        hf_config={"architectures": ["GlmMoeDsaForCausalLM"]},
        quantization_config=SimpleNamespace(weight_block_size=None),
    )._get_attention_backend()


@pytest.mark.parametrize("model", [None, {}])
def test_gated_delta_nets_prefill_without_a_tpu(host, caplog, model):
    """Where nothing else was asked for; other models keep what they do not read."""
    sglang_jax.install()
    runner = host.ModelRunner(qwen3_5_hybrid_config=model)
    with caplog.at_level("INFO", "jattn.integrations.sglang_jax"):
        runner._get_attention_backend()
    want = "fused_chunk_parallel" if model is None else "chunked_jax"
    assert runner.server_args.gdn_prefill_impl == want
    assert ("--gdn-prefill-impl is chunked_jax" in caplog.text) == (model is not None)


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
