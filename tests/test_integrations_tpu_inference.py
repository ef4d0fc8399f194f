"""jattn as a backend of tpu-inference: what is ours, with a stand-in for the host.

`tests/test_vllm.py` runs the real one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import pickle
import sys
import tomllib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.integrations import rpa, tpu_inference
from jattn.integrations.tpu_inference import cpu, encoders, experts, linear, memory, processes
from tests.support import stand_in_host
from tests.support.processes import ROOT
from tests.support.stand_in_host import Backends, module

host = stand_in_host.host  # the fixture

N, S, K, G, D = 12, 4, 2, 3, 16  # blocks, their tokens, KV heads, queries per KV head, head size
QUERY_LENS, SEQ_LENS = [1, 6, 3], [9, 6, 14]
TOKENS, ROWS, WIDTH = 16, 5, 5  # of the bucket: more than the step has


def step(seed: int, dim: int = D) -> dict[str, jax.Array]:
    """A step's arrays, in a bucket whose rest is garbage; unowned slots hold NaN."""
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
    """`attend` as the host runs it: jitted."""
    return jax.jit(lambda given: tpu_inference.attend(**given, write=write))


def expected(given: dict[str, jax.Array], *, write: bool = True, **options: object):
    """The oracle's answer, with keys and values in arrays of their own."""
    batch = jattn.AttentionMetadata.from_lengths(
        QUERY_LENS,
        SEQ_LENS,
        np.asarray(given["block_tables"]).reshape(ROWS, WIDTH)[: len(SEQ_LENS)],
        S,
    ).pad_to(num_tokens=TOKENS)
    dim = given["query"].shape[2]
    pools = [given["kv_cache"][:, :, :, side, :dim] for side in (0, 1)]
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


# Experts.

EXPERTS, PER_TOKEN, INNER = 5, 32, 6


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("first", "count"), [(0, 5), (2, 3), (0, 2), (1, 3)])
def test_experts_multiply_their_own_rows(host, first, count, scaled):
    """Of all experts, or of some: the last, the first, those between."""
    tpu_inference.register()
    rng = np.random.default_rng(first)
    sizes = np.array([3, 0, 4, 1, 2])
    expert = np.repeat(np.arange(EXPERTS), sizes) - first
    rows = rng.normal(size=(sizes.sum(), 8)).astype(np.float32)
    weights, bias = (rng.normal(size=(count, n, 2 * INNER)).astype(np.float32) for n in (8, 1))
    scales = rng.uniform(0.5, 2, (count, 2, 1, 2 * INNER)).astype(np.float32) if scaled else None
    multiply = sys.modules["tpu_inference.layers.common.fused_moe_gmm"].gmm_wrapper
    given = (rows, weights, scales, bias, jnp.asarray(sizes), jnp.asarray([first]))
    plain, gated = (
        jax.jit(functools.partial(multiply, fuse_act=name))(*given) for name in (None, "relu")
    )
    full = weights * (np.repeat(scales[:, :, 0], 4, axis=1) if scaled else 1)
    here = (expert >= 0) & (expert < count)
    expert = np.where(here, expert, 0)
    want = np.einsum("ni,nio->no", rows, full[expert]) + bias[expert, 0]
    np.testing.assert_allclose(plain[here], want[here], rtol=1e-5, atol=1e-5)
    want = np.maximum(want[:, :INNER], 0) * want[:, INNER:]
    np.testing.assert_allclose(gated[here], want[here], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_experts_found_is_added_up_in_float32(host, dtype):
    """And rows of other devices' experts, which hold anything, count for nothing."""
    tpu_inference.register()
    gmm = sys.modules["tpu_inference.layers.common.fused_moe_gmm"]
    rng = np.random.default_rng(2)
    count = 2 * PER_TOKEN
    rows = jnp.asarray(rng.normal(size=(count, 3)), dtype)
    order = rng.permutation(count)
    weights = rng.uniform(size=(2, PER_TOKEN)).astype(np.float32)
    each = np.asarray(rows, np.float64)[order].reshape(2, PER_TOKEN, 3) * weights[..., None]
    half = 0.51 * float(jnp.finfo(dtype).eps)  # what rounding once may cost
    tolerance = {"rtol": half, "atol": 2e-6}
    found = gmm.dense_gather_reduce(rows, order, weights, PER_TOKEN)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(float), each.sum(1), **tolerance)
    valid = np.arange(count) % 3 > 0
    rows = rows.at[order[~valid]].set(jnp.nan)
    found = gmm.ragged_gather_reduce(rows, order, weights.ravel(), valid, PER_TOKEN)
    assert found.dtype == dtype
    want = np.where(valid.reshape(2, PER_TOKEN, 1), each, 0).sum(1)
    np.testing.assert_allclose(found.astype(float), want, **tolerance)
    picked = gmm.ragged_gather(rows, order, 0, 3, max_row_subchunks=4, trim_rows=True)
    np.testing.assert_array_equal(picked.astype(float), rows[order].astype(float))


@pytest.mark.parametrize("kept", [jnp.int4, jnp.float8_e4m3fn])
def test_a_matrix_with_scales_of_blocks_needs_no_tpu(host, kept):
    tpu_inference.register()
    rng = np.random.default_rng(4)
    rows = jnp.asarray(rng.normal(size=(3, 8)), jnp.bfloat16)
    matrix = jnp.asarray(rng.integers(-7, 8, (1, 8, 5)), kept)
    scales = jnp.asarray(rng.uniform(0.5, 2, (1, 2, 1, 5)), jnp.float32)
    found = sys.modules["tpu_inference.layers.common.linear"].gmm_v2(
        lhs=rows, rhs=matrix, rhs_scale=scales, rhs_bias=None, group_sizes=jnp.array([3]),
        group_offset=jnp.array([0]), tile_info=None, zero_initialize=False,
        preferred_element_type=jnp.float32, maybe_quantize_lhs=True,
    )  # fmt: skip
    full = np.asarray(matrix[0], np.float64) * np.repeat(scales[0, :, 0], 4, axis=0)
    rounded = np.asarray(jnp.asarray(full, jnp.bfloat16), np.float64)  # as the rows are
    np.testing.assert_allclose(found, rows.astype(float) @ rounded, rtol=1e-5, atol=1e-5)


# Encoders.


def dense(q, k, v, seen, scale, added=0.0):
    """Attention [B, H, T, D] in float64, over the keys that are seen."""
    k, v = (np.repeat(np.asarray(x, np.float64), q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights = np.where(seen, np.exp(np.einsum("bhtd,bhud->bhtu", q, k) * scale + added), 0)
    return np.einsum("bhtu,bhud->bhtd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("name", ["numbers", "mask and segments", "causal"])
def test_tokens_of_an_encoder_see_all_of_their_item(name):
    """More tokens than a tile, and no whole tiles; two query heads for each head of keys."""
    rng = np.random.default_rng(11)
    count, keys, dim = 130, 137, 8
    q, k, v = (rng.normal(size=shape) for shape in ((2, 4, count, dim), *[(2, 2, keys, dim)] * 2))
    scale, options = 0.3 if name == "numbers" else dim**-0.5, {}
    seen, added = np.ones((2, 4, count, keys), bool), rng.normal(size=(1, 4, count, keys))
    if name == "numbers":
        options = {"scale": scale, "bias": jnp.asarray(added, jnp.float32)}
    elif name == "mask and segments":
        of_q, of_k = (np.sort(rng.integers(0, 3, (2, n)), 1) for n in (count, keys))
        seen = (added > 0) & (of_q[:, :, None] == of_k[:, None])[:, None]
        segments = jnp.asarray(of_q), jnp.asarray(of_k)
        options = {"bias": jnp.asarray(added > 0), "segments": segments}
    elif name == "causal":
        seen &= np.arange(keys) <= np.arange(count)[:, None]
        options = {"is_causal": True}
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    found = encoders.attend(*arrays, **{"scale": None, **options})
    want = dense(q, k, v, seen, scale, added if name == "numbers" else 0.0)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_encoders_call_no_kernel_for_tpus(host):
    """By each of the three names that the host knows; items of 3, 0 and 2 tokens, and padding."""
    tpu_inference.enable_cpu()
    interface = sys.modules["tpu_inference.layers.common.attention_interface"]
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=(1, 7, 2, 8)).astype(np.float32) for _ in range(3))
    found = jax.jit(host.functions["items"])(q, k, v, cu_seqlens=np.array([0, 3, 3, 5]))
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    item = np.array([0, 0, 0, 2, 2, 3, 3])
    want = dense(q, k, v, item[:, None] == item, 8**-0.5)
    np.testing.assert_allclose(np.swapaxes(found, 1, 2), want, rtol=1e-5, atol=1e-6)
    first = item == 0
    want = dense(q, k, v, first, 8**-0.5)
    found = jax.jit(host.functions["attention"])(q, k, v, attn_mask=first)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    ids = SimpleNamespace(q=jnp.zeros((1, 7), int), kv=jnp.where(first, 0, 1)[None])
    found = interface.flash_attention(*(jnp.asarray(x) for x in (q, k, v)), None, ids, sm_scale=0.3)
    np.testing.assert_allclose(found, dense(q, k, v, first, 0.3), rtol=1e-5, atol=1e-6)


# Routing.


def experts_layer(**changes: object) -> SimpleNamespace:
    """vLLM's `RoutedExperts` of twelve experts, as far as the host reads it."""
    plain = {"top_k": 3, "renormalize": True, "scoring_func": "sigmoid", "global_num_experts": 12}
    rule = {"use_grouped_topk": False, "num_expert_group": None, "topk_group": None}
    rule |= {"custom_routing_function": None, "apply_router_weight_on_input": False}
    return SimpleNamespace(**{**plain, **rule, "routed_scaling_factor": 1.0, **changes})


def routed(host, layer: SimpleNamespace, bias: jax.Array | None = None):
    """What experts get, and their weights and ids, as the host is told them."""
    tpu_inference.register()
    host.told["jattn"]["attention"]()
    rng = np.random.default_rng(7)
    rows, logits = (jnp.asarray(rng.normal(size=(9, n)), jnp.float32) for n in (4, 12))
    moe = sys.modules["tpu_inference.layers.vllm.interface.moe"]

    @jax.jit
    def apply(rows, logits, extra):
        return moe.moe_apply(
            layer=layer, x=rows, gating_output=logits, weights=None, moe_backend=None, mesh=None,
            extra_backend_kwargs=extra,
        )  # fmt: skip

    found = apply(rows, logits, {} if bias is None else {"e_score_correction_bias": bias})
    return rows, np.asarray(logits, np.float64), found


@pytest.mark.parametrize(("biased", "renormalize"), [(False, True), (True, False)])
def test_experts_are_of_the_best_groups(host, biased, renormalize):
    """Written out: a group is as good as its best expert, with a bias as its best two."""
    bias = np.tile([0.3, -0.2, -0.3], 4) if biased else np.zeros(12)
    grouped = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
    layer = experts_layer(**grouped, renormalize=renormalize, routed_scaling_factor=2.5)
    given = jnp.asarray(bias, jnp.float32) if biased else None
    _, logits, (_, weights, ids) = routed(host, layer, given)
    plain = 0
    for token, row in enumerate(logits):
        scores = 1 / (1 + np.exp(-row))
        choice = scores + bias
        groups = [sorted(choice[3 * group :][:3])[::-1] for group in range(4)]
        best = np.argsort([sum(group[: 2 if biased else 1]) for group in groups])[::-1][:2]
        allowed = [3 * group + i for group in best for i in range(3)]
        want = sorted(allowed, key=lambda expert: -choice[expert])[:3]
        plain += want == np.argsort(-choice)[:3].tolist()
        assert ids[token].tolist() == want
        weight = scores[want] / (scores[want].sum() if renormalize else 1)
        np.testing.assert_allclose(weights[token], 2.5 * weight, rtol=1e-5)
    assert plain < 5  # of 9 tokens; the host's own choice


def test_a_function_of_the_model_may_choose_experts_and_weight_what_they_get(host):
    def last(hidden_states, gating_output, topk, renormalize):
        assert (hidden_states.shape, topk, renormalize) == ((9, 4), 1, False)
        return gating_output[:, -1:], jnp.full((9, 1), 11)

    layer = experts_layer(top_k=1, renormalize=False, custom_routing_function=last)
    rows, logits, (x, weights, ids) = routed(host, layer)
    assert set(ids.ravel().tolist()) == {11}
    np.testing.assert_allclose(weights, logits[:, -1:], rtol=1e-6)
    np.testing.assert_array_equal(x, rows)
    layer.apply_router_weight_on_input = True
    _, _, (x, weights, ids) = routed(host, layer)
    np.testing.assert_array_equal(weights, np.ones((9, 1)))
    np.testing.assert_allclose(x, rows * logits[:, -1:], rtol=1e-6)


def test_the_highest_scores_are_the_hosts_own_choice(host):
    layer = experts_layer()
    _, logits, (_, weights, ids) = routed(host, layer)
    np.testing.assert_array_equal(ids, np.argsort(-logits)[:, :3])
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    _, _, (_, scaled, _) = routed(host, experts_layer(routed_scaling_factor=2.0))
    np.testing.assert_allclose(scaled, 2 * weights, rtol=1e-6)


def test_rules_that_the_host_cannot_follow_are_refused_by_name(host, monkeypatch):
    tpu_inference.register()
    host.told["jattn"]["attention"]()
    runner = sys.modules["vllm.model_executor.layers.fused_moe.runner.moe_runner"].MoERunner

    def router(name, **more):
        return type(name, (), more)()

    grouped = experts_layer(use_grouped_topk=True, num_expert_group=4, topk_group=2)
    runner(router("GroupedTopKRouter"), grouped)
    runner(router("FusedTopKRouter"), experts_layer())
    with pytest.raises(ValueError, match=r"layers\.0\.experts are chosen by ZeroExpertRouter"):
        runner(router("ZeroExpertRouter"), experts_layer())
    with pytest.raises(ValueError, match="FusedTopKBiasRouter with a bias of images"):
        runner(router("FusedTopKBiasRouter", bias_vl=1), experts_layer())
    monkeypatch.setenv("USE_MOE_EP_KERNEL", "1")
    runner(router("FusedTopKRouter"), experts_layer())
    with pytest.raises(ValueError, match="USE_MOE_EP_KERNEL: 1, but must be 0 for layers"):
        runner(router("GroupedTopKRouter"), grouped)
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    with pytest.raises(ValueError, match="SIMULATION_STRATEGY: uniform_random, but must be left"):
        runner(router("FusedTopKRouter"), experts_layer())


def config(**changes: object) -> SimpleNamespace:
    """A vLLM configuration that jattn serves, but for `changes`."""
    values = {
        "cache_dtype": "auto",
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "total_dp_size": 1,
        "tp_size": 1,
        "expert_size": 1,
        "kv_cache_dtype_skip_layers": [],
        "is_hybrid": False,
        "is_multimodal_model": False,
        "is_mm_prefix_lm": False,
        "use_mla": False,
        "architectures": ["Qwen3ForCausalLM"],
        "experts": 0,
        "vocabulary": 128,
        **changes,
    }
    found = SimpleNamespace(
        **values,
        get_num_experts=lambda: values["experts"],
        get_total_num_kv_heads=lambda: 4,
        get_vocab_size=lambda: values["vocabulary"],
    )
    found.hf_config = found.hf_text_config = found
    names = ("model_config", "parallel_config", "cache_config", "sharding_config")
    given = {name: changes.get(name) for name in ("speculative_config", "lora_config")}
    return SimpleNamespace(**dict.fromkeys(names, found), **given)


def test_vllm_finds_the_plugin_by_its_entry_point():
    text = (ROOT / "pyproject.toml").read_text()
    plugins = tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]
    point = importlib.metadata.EntryPoint("jattn", plugins["jattn"], "vllm.general_plugins")
    assert point.load() is tpu_inference.register


def test_the_extra_is_the_version_that_was_tested():
    text = (ROOT / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    tested = tpu_inference.TESTED
    assert extras["vllm"] == [f"tpu-inference=={tested}", f"vllm-tpu=={tested}"]


def test_the_plugin_does_nothing_without_its_host(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tpu_inference", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    tpu_inference.register()
    assert not caplog.records


def test_the_plugin_only_logs_where_the_host_takes_no_backends(host, caplog):
    host.version = "0.27.0"
    del sys.modules["tpu_inference.layers.common.attention_backend"].register_attention_backend
    tpu_inference.register()
    [record] = caplog.records
    assert "0.27.0" in record.getMessage()
    assert tpu_inference.TESTED in record.getMessage()
    assert not host.told


def test_another_version_is_refused_when_jattn_is_asked_for_and_not_before(host, monkeypatch):
    host.version = "0.33.1"
    tpu_inference.register()
    assert not hasattr(sys.modules["tpu_inference.utils"], "hbm_usage_bytes")
    host.config = config()
    with pytest.raises(ValueError, match=r"tpu-inference: version 0\.33\.1, but must be 0\.32\.0"):
        host.told["jattn"]["attention"]()
    monkeypatch.setenv(tpu_inference.ANY_VERSION, "1")
    host.told["jattn"]["attention"]()


@pytest.mark.parametrize("chips", [0, 4])
def test_hooks_are_for_machines_without_tpus(host, chips):
    host.chips = chips
    tpu_inference.register()
    utils = sys.modules["tpu_inference.utils"]
    assert hasattr(utils, "hbm_usage_bytes") == (chips == 0)
    if chips:
        return
    mesh = utils.make_optimized_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "model": 1}
    [(used, there)] = utils.hbm_usage_bytes(jax.devices()[:1])
    assert 0 == used < 2**20 < there
    assert utils.get_device_name(2) == "cpu-2"
    options = sys.modules["tpu_inference.models.common.compiler_options"]
    assert options.get_step_fn_compiler_options() == {}
    overwritten = np.zeros(3)
    sent, kept = utils.general_device_put((overwritten, None), sharding=None)
    overwritten[:] = 1
    assert not sent.any()
    assert kept is None
    put = utils.general_device_put
    tpu_inference.enable_cpu()
    assert utils.general_device_put is put  # once is enough
    t2j = sys.modules["tpu_inference.layers.vllm.quantization.unquantized"].t2j
    assert t2j(SimpleNamespace(clone=lambda: "a copy"), use_dlpack=False) == "a copy"


def test_blocks_that_come_are_in_the_caches_before_the_step(host):
    tpu_inference.enable_cpu()
    mixin = sys.modules["vllm.v1.worker.kv_connector_model_runner_mixin"]
    step = SimpleNamespace(has_sync_kv_loads=False)
    with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(step, defer_finalize=True):
        assert step.has_sync_kv_loads


def test_runs_of_blocks_are_put_into_every_layer(host):
    tpu_inference.enable_cpu()
    copy = sys.modules["tpu_inference.distributed.kv_transfer"].multi_layer_copy
    blocks = [jnp.zeros((5, 3)) + jnp.arange(1.0, 6.0)[:, None] * layer for layer in (1, 10)]
    found = {}
    for count in (2, None):
        caches = [jnp.zeros((9, 3)) for _ in blocks]
        put = copy(
            src_array=blocks,
            dest_array=caches,
            src_offsets=jnp.array([3, 0, 2], jnp.int32),
            dest_offsets=jnp.array([1, 6, 8], jnp.int32),
            chunk_sizes=jnp.array([2, 2, 1], jnp.int32),
            num_chunks=None if count is None else jnp.array([count], jnp.int32),
            mesh=None,
        )
        assert all(cache.is_deleted() for cache in caches)  # written in place
        np.testing.assert_array_equal(put[1], 10 * put[0])
        found[count] = put[0][:, 0].tolist()
    assert found == {2: [0, 4, 5, 0, 0, 0, 1, 2, 0], None: [0, 4, 5, 0, 0, 0, 1, 2, 3]}


def test_torch_weights_are_loaded_on_this_process_s_cpu(host, monkeypatch):
    processes.use_own_cpus()
    ours = [jax.devices()[-1]]
    monkeypatch.setattr(jax, "local_devices", lambda *, backend: ours)
    for name in ("models.vllm.vllm_model_wrapper", "layers.vllm.process_weights.cleanup_sharding"):
        seen = sys.modules[f"tpu_inference.{name}"].jax
        assert seen.devices("cpu") is ours
        assert seen.devices() == jax.devices()
        assert seen.default_device is jax.default_device


def test_a_process_that_was_not_forked_finds_the_backend(host):
    path = f"{tpu_inference.__name__}.VllmBackend"
    member = Backends.register("JATTN", path)
    sent = [pickle.dumps(member)]
    tpu_inference.register()
    sent.append(pickle.dumps([member, Backends.FLASH_ATTN]))
    Backends.forget("JATTN")
    with pytest.raises(ValueError, match="is not a valid Backends"):
        pickle.loads(sent[0])
    try:
        found, other = pickle.loads(sent[1])
        assert (found.name, found.value, other) == ("JATTN", path, Backends.FLASH_ATTN)
        assert pickle.loads(sent[1])[0] is found
    finally:
        Backends.forget("JATTN")


def test_the_host_takes_jattn_in_any_process_and_no_other_backend(host):
    tpu_inference.register()
    tpu_inference.register()
    check = sys.modules["tpu_inference.platforms.tpu_platform"].check_attention_backend_config
    check(SimpleNamespace(backend=SimpleNamespace(name="JATTN")))
    with pytest.raises(ValueError, match="forked processes only"):
        check(SimpleNamespace(backend=SimpleNamespace(name="ANOTHER")))


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
    assert interface.mla_ragged_paged_attention is rpa.mla_ragged_paged_attention
    weights = jnp.ones((4, 3, 2), jnp.bfloat16)
    for dtype in (None, jnp.bfloat16, jnp.float8_e4m3fn):  # of the cache; weights stay as they are
        kept, scale = layers.quantize_tensor(dtype, weights, axis=1)
        assert kept is weights
        np.testing.assert_array_equal(scale, np.ones((4, 2), np.float32))


def test_several_machines_without_tpus_get_a_worker_that_brings_them_together(host, monkeypatch):
    tpu_inference.register()
    platform = sys.modules["tpu_inference.platforms.tpu_platform"].TpuPlatform
    asked = config()
    asked.backend = SimpleNamespace(name="JATTN")
    platform.check_and_update_config(asked)
    assert asked.parallel_config.worker_cls == "the host's"
    monkeypatch.setenv("TPU_MULTIHOST_BACKEND", "ray")
    platform.check_and_update_config(asked)
    path, _, name = asked.parallel_config.worker_cls.rpartition(".")
    joined = []
    monkeypatch.setattr(processes, "join", lambda *given: joined.append(given))
    worker = getattr(sys.modules[path], name)()
    worker.init_device()
    assert hasattr(sys.modules["tpu_inference.models.vllm.vllm_model_wrapper"], "jax")
    assert worker.ready
    assert joined == [("tcp://10.0.0.1:4321", 1, 2)]
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(ValueError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND: 0, but must be 1"):
        platform.check_and_update_config(asked)


def test_processes_agree_on_where_they_meet(monkeypatch):
    kept, asked, started = {}, [], []

    class Store:
        def __init__(self, *where, **options):
            asked.append((where, options["is_master"]))

        def set(self, key, value):
            kept[key] = value.encode()

        def get(self, key):
            return kept[key]

    monkeypatch.setitem(sys.modules, "torch", module("torch", __path__=[]))
    monkeypatch.setitem(
        sys.modules, "torch.distributed", module("torch.distributed", TCPStore=Store)
    )
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda address, **given: started.append((address, given))
    )
    for rank in range(2):
        processes.join("tcp://127.0.0.1:4321", rank, 2)
    assert asked == [(("127.0.0.1", 4321), False)] * 2
    (first, zero), (second, one) = started
    assert first == second
    assert first.startswith("127.0.0.1:")
    assert first != "127.0.0.1:4321"
    assert zero == {"num_processes": 2, "process_id": 0}
    assert one == {"num_processes": 2, "process_id": 1}


def test_the_memory_of_other_processes_is_taken_to_be_as_ours():
    here = SimpleNamespace(
        platform="gpu",
        process_index=0,
        memory_stats=lambda: {"bytes_in_use": 3, "bytes_limit": 10},
    )
    there = SimpleNamespace(platform="gpu", process_index=1)
    assert cpu._memory([there, here]) == [(3, 10), (3, 10)]


GIB = 1 << 30
MACHINE = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n"}
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
CONTAINERS = {  # its files, and how many GiB are left
    "none": ({}, 32),
    "version 2, unlimited": (
        {
            "proc/self/cgroup": "0::/\n",
            f"{V2}/memory.max": "max\n",
            f"{V2}/memory.current": f"{3 * GIB}\n",
            f"{V2}/memory.stat": "anon 5\n",
        },
        32,
    ),
    "version 2, by the group above": (
        {
            "proc/self/cgroup": "0::/pods/one\n",
            f"{V2}/pods/memory.max": f"{16 * GIB}\n",
            f"{V2}/pods/memory.current": f"{12 * GIB}\n",
            f"{V2}/pods/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            f"{V2}/pods/one/memory.max": f"{20 * GIB}\n",
            f"{V2}/pods/one/memory.current": f"{GIB}\n",
            f"{V2}/pods/one/memory.stat": "anon 5\n",
        },
        6,
    ),
    "version 1, seen from inside": (
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/pods\n4:memory:/not/mounted/here\n0::/\n",
            f"{V1}/memory.limit_in_bytes": f"{8 * GIB}\n",
            f"{V1}/memory.usage_in_bytes": f"{5 * GIB}\n",
            f"{V1}/memory.stat": f"cache 7\ntotal_inactive_file {GIB}\n",
        },
        4,
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_memory_is_what_the_machine_and_the_container_have_left(tmp_path, name):
    files, left = CONTAINERS[name]
    for path, text in {**MACHINE, **files}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert memory.available(tmp_path) == left * GIB


def test_workers_of_one_machine_share_its_memory(host, monkeypatch):
    tpu_inference.register()
    monkeypatch.setattr(memory, "available", lambda: 24 * GIB)
    monkeypatch.setattr(cpu, "local_workers", 1)
    here = SimpleNamespace(platform="cpu", process_index=0)
    shares = {}
    for stages in (1, 3):
        host.config = config(pipeline_parallel_size=stages)
        host.told["jattn"]["attention"]()
        shares[stages] = cpu._memory([here, here])
    assert shares == {1: [(0, 6 * GIB)] * 2, 3: [(0, 2 * GIB)] * 2}
    monkeypatch.setenv("TPU_MULTIHOST_BACKEND", "ray")  # a machine for each
    host.told["jattn"]["attention"]()
    assert cpu._memory([here]) == [(0, 12 * GIB)]


REFUSED = {
    "decode context": (
        {"decode_context_parallel_size": 2},
        "--decode-context-parallel-size: 2, but must be 1",
    ),
    "prefill context": (
        {"prefill_context_parallel_size": 4},
        "--prefill-context-parallel-size: 4, but must be 1",
    ),
    "data, a process each": (
        {"data_parallel_size": 2},
        "--data-parallel-size: 2, but must be 1 on a cpu",
    ),
    "data, one process": (
        {"total_dp_size": 2},
        "--data-parallel-size: 2, but must be 1 on a cpu",
    ),
    "cache": ({"cache_dtype": "nvfp4"}, "--kv-cache-dtype: nvfp4, but must be one of auto"),
    "latents on two devices": (
        {"use_mla": True, "tensor_parallel_size": 2},
        "--tensor-parallel-size: 2, but must be 1 for a model with MLA layers",
    ),
    "more devices than KV heads": (
        {"tensor_parallel_size": 8},
        "--tensor-parallel-size: 8, but must be at most the model's 4 KV heads",
    ),
    "more devices than KV heads, by a strategy": (
        {"tp_size": 4, "expert_size": 2},
        "tensor_parallelism * expert_parallelism of --additional_config: 8, but must be at most",
    ),
    "latents on two devices, by a strategy": (
        {"use_mla": True, "tp_size": 2},
        "tensor_parallelism * expert_parallelism of --additional_config: 2, but must be 1 for",
    ),
    "layers with another cache": (
        {"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0", "sliding_window"]},
        "--kv-cache-dtype-skip-layers: 0 sliding_window, but must be left out",
    ),
    "adapters": (
        {"lora_config": {"max_loras": 1}},
        "MODEL_IMPL_TYPE: auto, but must be vllm with --enable-lora",
    ),
    "recurrent layers of another kind": (
        {"is_hybrid": True, "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"]},
        "--model: NemotronHForCausalLM, but must be one whose recurrent layers",
    ),
    "windows after a prefix": (
        {"rswa_window": 128},
        "--model: Qwen3ForCausalLM with rswa_window=128, but must be one without",
    ),
    "images whose tokens see each other": (
        {"is_multimodal_model": True, "is_mm_prefix_lm": True},
        "--limit-mm-per-prompt: not 0 for all kinds of input, but must be 0 for each",
    ),
    "drafts": (
        {
            "is_hybrid": True,
            "model_type": "qwen3_next",
            "speculative_config": {"method": "ngram"},
        },
        "--speculative-config: given, but must be left out for a model with recurrent states",
    ),
    "kernels": (
        {"architectures": ["Llama4ForCausalLM"]},
        "MODEL_IMPL_TYPE: auto, but must be vllm",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_at_the_start(host, name):
    changes, message = REFUSED[name]
    tpu_inference.register()
    host.config = config(**changes)
    with pytest.raises(ValueError, match="--attention-backend jattn") as error:
        host.told["jattn"]["attention"]()
    assert message in str(error.value)
    assert "1 wrong argument(s)" in str(error.value)
    host.config = config()
    host.told["jattn"]["attention"]()


def test_models_of_torch_may_have_adapters_and_fewer_kv_heads_than_devices(host):
    """The host also takes vLLM's model where it has none of its own."""
    tpu_inference.register()
    host.config = config(lora_config={"max_loras": 1}, tensor_parallel_size=8)
    for host.impl, host.has_jax_model in (("vllm", True), ("flax_nnx", False)):
        host.told["jattn"]["attention"]()
    host.config = config(lora_config={"max_loras": 1}, tensor_parallel_size=8, vocabulary=96)
    with pytest.raises(ValueError, match="--enable-lora: given, for a vocabulary of 96 tokens"):
        host.told["jattn"]["attention"]()
    host.config = config(lora_config={"max_loras": 1}, tensor_parallel_size=8)
    host.has_jax_model = True
    with pytest.raises(ValueError, match=r"2 wrong argument\(s\)"):
        host.told["jattn"]["attention"]()


@pytest.mark.parametrize("setting", ["ENABLE_QUANTIZED_MATMUL_KERNEL", "TPU_ENABLE_D2H_TRANSFER"])
def test_kernels_that_settings_ask_for_are_refused_without_a_tpu(host, setting, monkeypatch):
    tpu_inference.register()
    host.config = config()
    monkeypatch.setenv(setting, "1")
    with pytest.raises(ValueError, match=f"{setting}: 1, but must be 0"):
        host.told["jattn"]["attention"]()


def test_pages_of_latents_with_their_tokens_last_are_refused(host, monkeypatch):
    tpu_inference.register()
    monkeypatch.setenv("MLA_TRANSPOSE_KV_CACHE", "1")
    host.config = config()
    host.told["jattn"]["attention"]()
    host.config = config(use_mla=True)
    with pytest.raises(ValueError, match="MLA_TRANSPOSE_KV_CACHE: 1, but must be 0"):
        host.told["jattn"]["attention"]()


@pytest.mark.parametrize("setting", experts.KERNELS)
def test_kernels_for_experts_are_refused_without_a_tpu(host, setting, monkeypatch):
    tpu_inference.register()
    host.config = config(experts=8)
    for value in ("", "0", "False"):
        monkeypatch.setenv(setting, value)
        host.told["jattn"]["attention"]()
    monkeypatch.setenv(setting, "true")
    with pytest.raises(ValueError, match=f"{setting}: true, but must be 0 on a cpu"):
        host.told["jattn"]["attention"]()
    host.config = config()
    host.told["jattn"]["attention"]()


def test_delta_nets_are_the_hosts_own_on_a_tpu_and_xlas_elsewhere(host, monkeypatch):
    tpu_inference.register()
    backend = host.told["jattn"]["linear_attention"]()
    assert backend.conv1d_gdn_kernel() is linear.convolve_and_scan
    common = sys.modules["tpu_inference.layers.common.attention_backend"]
    assert isinstance(backend, common.LinearAttentionBackend)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert type(host.told["jattn"]["linear_attention"]()) is common.GDNLinearAttentionBackend


@pytest.mark.parametrize(("step", "dtype"), [("decode", jnp.float32), ("mixed", jnp.bfloat16)])
def test_a_delta_nets_state_is_read_and_written_where_the_host_says(host, monkeypatch, step, dtype):
    """A new sequence starts from zeros, whatever its slot holds; other slots stay as they are."""
    heads, size, count = 2, 3, 4
    width = 3 * heads * size
    rng = np.random.default_rng(5)
    states = [
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((9, count - 1, width), (9, heads, size, size))
    ]
    used = []

    def convolve(x, state, weight, bias, starts, slots, distribution, resumed, *, kernel_size):
        used.append((slots, resumed, kernel_size, {x.dtype, state.dtype, weight.dtype}))
        return x, state.at[slots].add(1.0)

    def scan(mode, *, query, key, value, recurrent_state, state_indices, **given):
        used.append((mode, state_indices, [x.shape for x in (query, key, value)]))
        new = recurrent_state.at[state_indices].add(1.0)
        return new, value.reshape(len(query), -1)

    reference = "tpu_inference.kernels.gdn.reference.ragged_gated_delta_rule_chunked"
    convolutions = sys.modules["tpu_inference.layers.common.ragged_conv1d_jax"]
    monkeypatch.setattr(convolutions, "ragged_conv1d", convolve, raising=False)
    for mode in ("decode_only", "mixed_prefill"):
        of_mode = functools.partial(scan, mode)
        name = f"ragged_gated_delta_rule_{mode}"
        monkeypatch.setattr(sys.modules[reference], name, of_mode, raising=False)
    # Old, new, and moved to another slot; the last two rows are not of this step.
    lengths, done = [1, 1 if step == "decode" else 3, 1, 7, 7], [4, 0, 6, 7, 7]
    write, read = [3, 5, 6, 8, 8], [3, 2, 1, 8, 8]
    decodes = 3 if step == "decode" else 1
    integers = (
        [0, *np.cumsum(lengths[:3]), 99, 99], write, [decodes, decodes, 3],
        np.add(lengths, done), read,
    )  # fmt: skip
    (conv, recurrent), out = linear.convolve_and_scan(
        jnp.asarray(rng.normal(size=(8, width)), dtype),
        *[jnp.zeros((8, heads))] * 2,
        *states,
        *(jnp.zeros((width, 1, count), dtype), None, *[jnp.zeros(heads)] * 2),
        *(jnp.asarray(x, jnp.int32) for x in integers),
        n_kq=heads,
        n_v=heads,
        d_k=size,
        d_v=size,
        kernel_size=count,
    )
    (slots, resumed, kernel_size, dtypes), *scans = used
    assert slots.tolist() == [1, 2, 3, 0, 0]
    assert resumed.tolist() == [True, False, True, False, False]
    assert kernel_size == count
    assert dtypes == {jnp.dtype("float32")}
    assert {mode for mode, *_ in scans} == {"decode_only", "mixed_prefill"}  # `cond` traces both
    for mode, of_rows, shapes in scans:
        assert len(of_rows) == (8 if mode == "decode_only" else 5)  # tokens, or sequences
        assert shapes == [(8, heads, size)] * 3
    assert (out.shape, out.dtype) == ((8, heads * size), dtype)
    for before, after in zip(states, (conv, recurrent), strict=True):
        assert after.dtype == dtype
        want = np.array(before, np.float32)
        want[[3, 5, 6]] = np.stack([want[3], np.zeros_like(want[5]), want[1]]) + 1
        eps = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(after.astype(np.float32), want, rtol=eps, atol=eps)
        others = np.array([0, 1, 2, 4, 7, 8])
        np.testing.assert_array_equal(*(x[others].astype(jnp.float32) for x in (after, before)))


def test_lower_triangles_are_inverted():
    rng = np.random.default_rng(1)
    lower = np.tril(rng.normal(size=(3, 5, 5)), -1) + np.eye(5)
    found = linear._inverse(jnp.asarray(lower, jnp.float32))
    np.testing.assert_allclose(found @ lower, np.broadcast_to(np.eye(5), lower.shape), atol=1e-5)


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


def test_layers_with_chunks_keep_them_and_other_masks_of_builders_are_refused(host):
    """vLLM makes a class with a builder of its own, and puts a name in front of the backend's."""
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


@pytest.mark.parametrize(("cap", "chunk"), [(None, None), (0.7, 4)])
def test_the_backend_attends_on_the_hosts_mesh(host, cap, chunk):
    tpu_inference.register()
    backend = host.told["jattn"]["attention"](cap, chunk)
    given = step(9)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    sinks = jnp.linspace(-1, 1, K * G)

    @jax.jit
    def layer(given):
        meta = SimpleNamespace(
            block_tables=given["block_tables"],
            seq_lens=given["seq_lens"],
            query_start_loc=given["query_start_loc"],
            request_distribution=given["distribution"],
        )
        return backend.attention(
            *(given[name] for name in ("kv_cache", "query", "key", "value")),
            *(meta, meta, mesh),
            head_dim_original=D,
            sm_scale=0.8,
            attention_chunk_size=5,
            q_scale=None,
            k_scale=None,
            v_scale=None,
            sinks=sinks,
            update_kv_cache=True,
            use_causal_mask=True,
            attn_logits_soft_cap=None,
            decode_query_size=1,
        )

    pool, out = layer(given)
    options = {"sliding_window": 5, "scale": 0.8, "attention_chunk_size": chunk}
    want, (keys, _) = expected(given, sinks=sinks, logits_soft_cap=cap, **options)
    real = sum(QUERY_LENS)
    np.testing.assert_allclose(out[:real], want[:real], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(pool[:, :, :, 0], keys)
