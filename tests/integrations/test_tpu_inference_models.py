"""Experts, encoders and delta nets of tpu-inference without TPUs: XLA in place of its kernels.

`test_tpu_inference.py` tests attention, and `test_vllm.py` runs the real host.
"""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.integrations import tpu_inference
from jattn.integrations.tpu_inference import encoders, experts, linear
from tests.support import stand_in_host

host = stand_in_host.host  # the fixture


# Experts.

EXPERTS, PER_TOKEN, INNER = 5, 32, 6


@pytest.mark.parametrize(
    ("first", "count", "scaled"),
    [
        (1, 3, True),
        pytest.param(0, 5, True, marks=pytest.mark.extended),
        pytest.param(2, 3, False, marks=pytest.mark.extended),
        pytest.param(0, 2, False, marks=pytest.mark.extended),
    ],
)
def test_tpu_inferences_experts_multiply_their_own_rows(host, first, count, scaled):
    """This device has all experts, or some: those in the middle, the last or the first."""
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
def test_expert_outputs_are_summed_in_float32(host, dtype):
    """Rows of other devices' experts may hold anything, and do not count."""
    tpu_inference.register()
    gmm = sys.modules["tpu_inference.layers.common.fused_moe_gmm"]
    rng = np.random.default_rng(2)
    count = 2 * PER_TOKEN
    rows = jnp.asarray(rng.normal(size=(count, 3)), dtype)
    order = rng.permutation(count)
    weights = rng.uniform(size=(2, PER_TOKEN)).astype(np.float32)
    each = np.asarray(rows, np.float64)[order].reshape(2, PER_TOKEN, 3) * weights[..., None]
    half = 0.51 * float(jnp.finfo(dtype).eps)  # the error of rounding once
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
def test_a_matrix_with_block_scales_needs_no_tpu(host, kept):
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


def dense(q, k, v, seen, scale, added=0.0):
    """Return attention [B, H, T, D] in float64, over the keys that are `seen`."""
    k, v = (np.repeat(np.asarray(x, np.float64), q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights = np.where(seen, np.exp(np.einsum("bhtd,bhud->bhtu", q, k) * scale + added), 0)
    return np.einsum("bhtu,bhud->bhtd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("name", ["numbers", "mask and segments", "causal"])
def test_tokens_of_an_encoder_see_all_of_their_item(name):
    """More tokens than a tile, and not a whole number of tiles; two query heads per KV head."""
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


def test_encoders_call_no_tpu_kernel(host):
    """Through all three functions of the host; items of 3, 0 and 2 tokens, and padding."""
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


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=["2-D", "3-D", "4-D"])
def test_values_of_an_encoder_may_have_another_size_and_arrays_fewer_axes(host, lead):
    tpu_inference.enable_cpu()
    rng = np.random.default_rng(3)
    q, k, v, added = (
        rng.normal(size=(*lead, *rest)).astype(np.float32)
        for rest in ((5, 8), (7, 8), (7, 4), (5, 7))
    )
    found = jax.jit(host.functions["attention"])(q, k, v, attn_mask=added)
    assert found.shape == (*lead, 5, 4)
    wide = [x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v, added)]
    want = dense(*wide[:3], True, 8**-0.5, wide[3])
    np.testing.assert_allclose(found, want.reshape(found.shape), rtol=1e-5, atol=1e-6)


def test_encoder_arrays_of_more_than_four_axes_are_refused_by_name(host):
    tpu_inference.enable_cpu()
    x = jnp.ones((1, 1, 1, 2, 8))
    wrong = r"query: float32\[1, 1, 1, 2, 8\], but must be an array of at most four axes"
    with pytest.raises(ValueError, match=wrong):
        host.functions["attention"](x, x, x)


def experts_layer(**changes: object) -> SimpleNamespace:
    """Return what the host reads of vLLM's `RoutedExperts`, with twelve experts."""
    plain = {"top_k": 3, "renormalize": True, "scoring_func": "sigmoid", "global_num_experts": 12}
    rule = {"use_grouped_topk": False, "num_expert_group": None, "topk_group": None}
    rule |= {"custom_routing_function": None, "apply_router_weight_on_input": False}
    return SimpleNamespace(**{**plain, **rule, "routed_scaling_factor": 1.0, **changes})


def routed(host, layer: SimpleNamespace, bias: jax.Array | None = None):
    """Return rows and logits, and the experts' input, weights and ids that the host is given."""
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
def test_experts_come_from_the_best_groups(host, biased, renormalize):
    """A group's score is that of its best expert or, with a bias, the sum of its best two."""
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
    assert plain < 5  # of 9 tokens: without groups, most would get other experts


def test_a_model_may_choose_experts_by_a_function_and_weight_their_input(host):
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


def test_the_host_chooses_the_experts_with_the_highest_scores(host):
    layer = experts_layer()
    _, logits, (_, weights, ids) = routed(host, layer)
    np.testing.assert_array_equal(ids, np.argsort(-logits)[:, :3])
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    _, _, (_, scaled, _) = routed(host, experts_layer(routed_scaling_factor=2.0))
    np.testing.assert_allclose(scaled, 2 * weights, rtol=1e-6)


@pytest.mark.parametrize("case", ["groups", "bias", "ids", "plain"])
def test_requests_are_told_their_routed_experts(host, case):
    """The host has noted the experts with the highest scores: another layer's, then this one's."""
    grouped = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
    layer = experts_layer(**(grouped if case == "groups" else {}))
    bias = jnp.asarray(np.tile([0.9, -0.2, -0.9], 4), jnp.float32) if case == "bias" else None
    given = jnp.tile(jnp.asarray([7, 2, 5]), (9, 1)) if case == "ids" else None
    tpu_inference.register()
    host.told["jattn"]["attention"]()
    moe = sys.modules["tpu_inference.layers.vllm.interface.moe"]
    rng = np.random.default_rng(7)
    rows, logits = (jnp.asarray(rng.normal(size=(9, n)), jnp.float32) for n in (4, 12))
    extra = {"e_score_correction_bias": bias, "hash_based_topk_indices": given}
    extra = {name: x for name, x in extra.items() if x is not None}
    plain = jax.lax.top_k(logits, 3)[1]

    def apply():
        return moe.moe_apply(
            layer=layer, x=rows, gating_output=logits, weights=None, moe_backend=None, mesh=None,
            extra_backend_kwargs=extra,
        )[2]  # fmt: skip

    apply()  # outside a step
    host.noted = []
    apply()
    assert host.noted == []
    host.noted = ["another layer's", plain]
    ids = apply()
    assert host.noted[0] == "another layer's"
    if case == "bias":  # the stand-in ignores the bias; the host does not
        scores = jax.nn.sigmoid(logits)
        ids = jax.lax.top_k(scores + bias[None], 3)[1]
    np.testing.assert_array_equal(host.noted[1], ids)
    assert np.array_equal(ids, plain) == (case == "plain")


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
    with pytest.raises(ValueError, match="FusedTopKBiasRouter with a bias for images"):
        runner(router("FusedTopKBiasRouter", bias_vl=1), experts_layer())
    monkeypatch.setenv("USE_MOE_EP_KERNEL", "1")
    runner(router("FusedTopKRouter"), experts_layer())
    with pytest.raises(ValueError, match="USE_MOE_EP_KERNEL: 1, but must be 0 for layers"):
        runner(router("GroupedTopKRouter"), grouped)
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    with pytest.raises(ValueError, match="SIMULATION_STRATEGY: uniform_random, but must be left"):
        runner(router("FusedTopKRouter"), experts_layer())


@pytest.mark.parametrize("setting", experts.KERNELS)
def test_kernels_for_experts_are_refused_without_a_tpu(host, setting, monkeypatch):
    tpu_inference.register()
    for value in ("", "0", "False"):
        monkeypatch.setenv(setting, value)
        host.start(experts=8)
    monkeypatch.setenv(setting, "true")
    with pytest.raises(ValueError, match=f"{setting}: true, but must be 0 on a cpu"):
        host.start(experts=8)
    host.start()


def test_delta_nets_use_the_hosts_kernels_on_a_tpu_and_xla_elsewhere(host, monkeypatch):
    tpu_inference.register()
    backend = host.told["jattn"]["linear_attention"]()
    assert backend.conv1d_gdn_kernel() is linear.convolve_and_scan
    common = sys.modules["tpu_inference.layers.common.attention_backend"]
    assert isinstance(backend, common.LinearAttentionBackend)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert type(host.told["jattn"]["linear_attention"]()) is common.GDNLinearAttentionBackend


@pytest.mark.parametrize(
    ("step", "dtype"),
    [
        ("mixed", jnp.bfloat16),
        pytest.param("decode", jnp.float32, marks=pytest.mark.extended),
    ],
)
def test_a_delta_nets_state_is_read_and_written_where_the_host_says(host, monkeypatch, step, dtype):
    """A new sequence starts from zeros, whatever its slot holds; other slots stay unchanged."""
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
    # A running sequence, a new one, and one that moves to another slot; then two rows of padding.
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
