"""The example models under continuous batching, against references that transformers computed.

Requests arrive while others run, chunks of prompts share steps with decodes, blocks and states lie
in shuffled order, and everything that was never written holds NaN.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
import jattn.blocks
from examples.engine import caches as engine_caches
from examples.engine.caches import aligned_block_size, group_layers, init_caches
from examples.engine.drafts.speculation import Speculation
from examples.engine.engine import Engine
from examples.engine.model import Batch, Model, StateCache, StateIds, load_model
from examples.engine.request import Request
from examples.engine.scheduler import Limits
from examples.engine.step import Bucket
from examples.models import gpt_oss, joined, layers, moe, nemotron_h, recurrent, rope
from examples.models.checkpoint import open_checkpoint
from examples.options import CHECKPOINTS
from tests.support.checkpoints import (
    DECODE,
    MAX_ERROR,
    MIXED,
    MODELS,
    RMS_ERROR,
    SLIDING,
    HalfRight,
    make_engine,
    one_file_entry_per_expert,
    reference,
    rewrite,
    serve,
    some,
)

HYBRIDS = ("qwen3-next-tiny", "nemotron-h-tiny")


@pytest.mark.parametrize("name", some(MODELS, quick=("qwen3-tiny", "gpt-oss-tiny")))
def test_float32_reproduces_the_reference(name):
    wanted = reference(name)
    # A mixed step's program can run decode steps too; recurrent layers have another one for those.
    buckets = (MIXED, DECODE) if name == "nemotron-h-tiny" else (MIXED,)
    engine = make_engine(load_model(CHECKPOINTS / name), buckets=buckets)
    tokens, error = serve(engine, wanted)
    np.testing.assert_array_equal(tokens, wanted["tokens"])
    assert error.max() <= MAX_ERROR


@pytest.mark.parametrize(
    "name", some((*MODELS, *SLIDING), slow=("qwen3-next-tiny", "gemma4-31b-tiny"))
)
def test_drafts_change_neither_tokens_nor_logits(name):
    """Also with windows and recurrent states, which have seen tokens that were refused."""
    wanted = reference(name)
    buckets = (MIXED, Bucket(40, 8, 5, 4))
    speculation = Speculation(4, backs_off=False)
    engine = make_engine(load_model(CHECKPOINTS / name), buckets=buckets, speculation=speculation)
    engine._speculator.proposer = HalfRight(wanted)
    tokens, error = serve(engine, wanted)
    np.testing.assert_array_equal(tokens, wanted["tokens"])
    assert error.max() <= MAX_ERROR
    done = engine.statistics
    assert 40 < done.num_accepted_tokens < done.num_drafted_tokens - 40


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_float32_as_it_is_served(name):
    """With all of XLA's optimizations, with decode steps, and with every step's values checked."""
    wanted = reference(name)
    engine = make_engine(load_model(CHECKPOINTS / name), buckets=(MIXED, DECODE), check=True)
    tokens, error = serve(engine, wanted)
    np.testing.assert_array_equal(tokens, wanted["tokens"])
    assert error.max() <= MAX_ERROR


def traced(model: Model, num_tokens: int, longest: int):
    """Return the shapes of a model's caches and of what a step of 8 sequences returns."""
    groups = group_layers(model.layers)
    numbers, form = {group.name: 9 for group in groups}, jattn.Dense(model.dtype)
    caches = jax.eval_shape(lambda: init_caches(model.layers, numbers, 16, form))
    tokens, rows = np.zeros(num_tokens, np.int32), np.zeros(8, np.int32)
    starts = np.arange(9, dtype=np.int32)
    metadata = jattn.AttentionMetadata(np.zeros((8, 9), np.int32), rows, starts, tokens, longest)
    batch = Batch(
        tokens,
        tokens,
        starts,
        rows,
        {group.name: metadata for group in groups if not group.is_state},
        {group.name: StateIds(rows, rows) for group in groups if group.is_state},
        longest,
    )
    return caches, jax.eval_shape(model.step, model.params, caches, batch)


@pytest.mark.parametrize("name", some(MODELS, quick=("gpt-oss-tiny", "qwen3-next-tiny")))
def test_bfloat16_models_promote_nothing_silently(name):
    """Only traced, in both kinds of step: logits are float32, and caches keep shapes and dtypes."""
    model = load_model(CHECKPOINTS / name, "bfloat16")
    for num_tokens, longest in ((8, 1), (40, 40)):
        caches, (logits, after) = traced(model, num_tokens, longest)
        assert (logits.shape, logits.dtype) == ((8, 256), jnp.float32)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
            lambda x: (x.shape, x.dtype), caches
        )


@pytest.mark.parametrize("name", ["qwen3-tiny", "gemma4-31b-tiny"])
def test_after_attention_the_last_layer_computes_only_rows_with_logits(name, monkeypatch):
    counts, compute = [], layers.GatedMLP.__call__
    monkeypatch.setattr(
        layers.GatedMLP, "__call__", lambda self, x: counts.append(len(x)) or compute(self, x)
    )
    model = load_model(CHECKPOINTS / name)
    num_layers = len(model.config.layers)
    traced(model, 40, 40)
    traced(model, 8, 1)
    assert counts == [40] * (num_layers - 1) + [8] + [8] * num_layers


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_caches_stay_near_the_reference(name):
    engine = make_engine(load_model(CHECKPOINTS / name), kv_format="bfloat16")
    _, error = serve(engine, reference(name), 4, forced=True)
    rms = np.sqrt(np.square(error).mean())
    assert rms <= RMS_ERROR
    assert rms > 1e-5, "nothing was rounded: the caches are not in bfloat16"


@pytest.mark.parametrize("name", some(HYBRIDS, slow=("qwen3-next-tiny",)))
def test_states_in_the_pages_of_keys_give_the_same_tokens(name):
    """Blocks and states share one free list and one set of pools, aligned as in vLLM."""
    model, wanted = load_model(CHECKPOINTS / name), reference(name)
    size = aligned_block_size(model.layers, 4, 4)
    state = max(c.layout.nbytes for c in model.layers.values() if isinstance(c, StateCache))
    attention = next(c for c in model.layers.values() if not isinstance(c, StateCache))
    token_bytes = 2 * 4 * attention.num_kv_heads * attention.head_dim
    assert (size - 4) * token_bytes < state <= size * token_bytes  # the smallest block that fits
    engine = make_engine(model, block_size=size, unified=True)
    assert not any(isinstance(pool, jattn.blocks.StateSlots) for pool in engine.caches.pools)
    tokens, error = serve(engine, wanted, 8)
    np.testing.assert_array_equal(tokens, wanted["tokens"][:, :8])
    assert error.max() <= MAX_ERROR


# -- wrong models must not pass -------------------------------------------------------------------


def wrong_sinks(monkeypatch):
    def without(self, *args, sinks=None, **options):
        return attend(self, *args, **options)

    attend = engine_caches.Caches.attend
    monkeypatch.setattr(engine_caches.Caches, "attend", without)


def wrong_window(monkeypatch):
    def wider(query, *caches, sliding_window=None, **options):
        window = sliding_window and sliding_window + 1
        return attention(query, *caches, sliding_window=window, **options)

    attention = jattn.paged_attention
    monkeypatch.setattr(jattn, "paged_attention", wider)


def forgotten_states(monkeypatch):
    """Start every chunk from a fresh recurrent state, but keep the convolution's."""

    def read(self, layer, batch):
        conv, state = read_states(self, layer, batch)
        return conv, jnp.zeros_like(state)

    read_states = engine_caches.Caches.read_states
    monkeypatch.setattr(engine_caches.Caches, "read_states", read)


def forgotten_inputs(monkeypatch):
    """Start every chunk from a fresh convolution state."""

    def conv(x, state, *others):
        return causal_conv(x, jnp.zeros_like(state), *others)

    causal_conv = recurrent.causal_conv
    monkeypatch.setattr(nemotron_h, "causal_conv", conv)


def late_positions(monkeypatch):
    def halved(self, positions):
        return angles(self, positions // 2)

    angles = rope.Rope.angles
    monkeypatch.setattr(rope.Rope, "angles", halved)


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        pytest.param("gpt-oss-tiny", wrong_sinks, marks=pytest.mark.extended),
        pytest.param("gpt-oss-tiny", wrong_window, marks=pytest.mark.extended),
        pytest.param("qwen3-next-tiny", forgotten_states, marks=pytest.mark.extended),
        pytest.param("nemotron-h-tiny", forgotten_inputs, marks=pytest.mark.extended),
        pytest.param("qwen3-tiny", late_positions, marks=pytest.mark.extended),
    ],
)
def test_wrong_models_are_caught(name, break_it, monkeypatch):
    break_it(monkeypatch)
    engine = make_engine(load_model(CHECKPOINTS / name))
    _, error = serve(engine, reference(name), 2, forced=True, rows=(6,))
    assert error.max() > 10 * MAX_ERROR
    assert np.sqrt(np.square(error).mean()) > RMS_ERROR


# -- parts, and checkpoints in other shapes -------------------------------------------------------


def test_experts_are_mixed_token_by_token():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 6)).astype(np.float32)
    weights = rng.normal(size=(5, 6, 6)).astype(np.float32)
    choices = rng.integers(0, 4, size=(9, 2)).astype(np.int32)  # no token chooses expert 4
    shares = rng.uniform(size=(9, 2)).astype(np.float32)
    wanted = np.einsum("tk,tkio,ti->to", shares, weights[choices].astype(np.float64), x)
    given = jnp.asarray(weights.swapaxes(1, 2))

    def run(rows, experts, counts):
        assert experts.shape == (18,)
        return moe.expert_dot(rows, given, counts)

    got = moe.mix_experts(jnp.asarray(x), jnp.asarray(choices), jnp.asarray(shares), 5, run)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_mxfp4_experts_are_unpacked():
    blocks = np.zeros((1, 2, 1, 16), np.uint8)
    blocks[0, 0, 0, :2] = [0x21, 0xF7]  # 0.5, 1, then 6, -6
    blocks[0, 1, 0, 15] = 0x90  # 0, -0.5
    scales = np.array([[[127], [129]]], np.uint8)  # 1 and 4
    got = gpt_oss.unpack_mxfp4([blocks, scales])
    assert got.shape == (1, 2, 32)
    assert got[0, 0, :4].tolist() == [0.5, 1, 6, -6]
    assert got[0, 1, 31] == -2
    assert np.count_nonzero(got) == 5


def test_yarn_slows_the_pairs_that_turn_slowly():
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }
    plain, _ = rope.rope_frequencies({"rope_theta": 150_000.0}, 64)
    slowed, factor = rope.rope_frequencies(yarn, 64)
    assert factor == pytest.approx(0.1 * np.log(32) + 1)
    for scales, expected in (((1.0, 1.0), 1.0), ((2.0, 1.0), (0.2 * np.log(32) + 1) / factor)):
        scaled = dict(zip(("mscale", "mscale_all_dim"), scales, strict=True))
        assert rope.rope_frequencies(yarn | scaled, 64)[1] == pytest.approx(expected)
    turns = plain * 4096 / (2 * np.pi)
    np.testing.assert_array_equal(slowed[turns > 32], plain[turns > 32])
    np.testing.assert_allclose(slowed[turns < 1], plain[turns < 1] / 32, rtol=1e-6)
    between = (turns < 32) & (turns > 1)
    assert between.sum() > 5
    assert (slowed[between] < plain[between]).all()
    assert (slowed[between] > plain[between] / 32).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 16])
def test_products_keep_their_rows_and_round_once(dtype, num_tokens):
    rng = np.random.default_rng(num_tokens)
    x, weight = (
        jnp.asarray(rng.integers(-8, 9, size=shape), dtype)
        for shape in ((num_tokens, 96), (40, 96))
    )
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T  # small integers: exact
    assert np.abs(exact).max() > 256  # too large for bfloat16: rounded, but only at the end
    y = jax.jit(layers.product)(x, weight)
    assert (y.dtype, y.shape) == (jnp.dtype(dtype), (num_tokens, 40))
    np.testing.assert_array_equal(y, jnp.asarray(exact, jnp.float32).astype(dtype))
    np.testing.assert_array_equal(jax.jit(layers.logits_from)(x, weight), exact.astype(np.float32))


@pytest.mark.parametrize("name", some((*MODELS, SLIDING[0]), slow=("qwen3-next-tiny", SLIDING[0])))
def test_a_model_computes_the_same_with_joined_products(name):
    alone, together = (load_model(CHECKPOINTS / name, "float32", join=j) for j in (False, True))
    size = [sum(x.size for x in jax.tree.leaves(m.params)) for m in (alone, together)]
    assert size[0] == size[1]
    found = []
    for model in (alone, together):
        limits = Limits(group_layers(model.layers), 2, 16, 16, 48)
        engine = Engine(model, limits, buckets=[Bucket(16, 2, 16)], keep_logits=True)
        prompts = np.random.default_rng(3).integers(model.vocab_size, size=(2, 21)).tolist()
        sequences = engine.generate([Request(tuple(prompt), 4) for prompt in prompts])
        found.append(np.stack([sequence.logits for sequence in sequences]))
    # Only the order of sums differs; the reference also rounds in other places.
    np.testing.assert_allclose(*found, atol=MAX_ERROR / 2)


def test_layers_with_the_same_input_are_one_product():
    mlp, rng = layers.GatedMLP(16, 24, jnp.float32), np.random.default_rng(0)
    mlp.gate_proj.weight[...], mlp.up_proj.weight[...] = rng.normal(size=(2, 24, 16)).astype("f4")
    graphdef, params = nnx.split(mlp)
    x, before = jnp.asarray(rng.normal(size=(3, 16)), jnp.float32), np.asarray(mlp.up_proj.weight)
    separate = layers.apply_all(x, mlp.inputs)
    merged = joined.merge(graphdef, joined.join(graphdef, params))
    np.testing.assert_array_equal(merged.up_proj.weight[...], before)
    products = jax.make_jaxpr(lambda x: layers.apply_all(x, merged.inputs))(x)
    assert str(products).count("dot_general") == 1
    for one, other in zip(separate, layers.apply_all(x, merged.inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_partial_rotation_leaves_the_rest():
    quarter = rope.Rope.from_hf({"rope_theta": 1e4, "partial_rotary_factor": 0.25}, 256)
    assert len(quarter.frequencies) == 32
    x = jnp.ones((1, 1, 256))
    turned = rope.rotate(x, quarter.angles(jnp.array([3])))
    np.testing.assert_array_equal(turned[..., 64:], x[..., 64:])
    assert not (np.asarray(turned[..., :64]) == 1).all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3-next-tiny", one_file_entry_per_expert),
        (
            "nemotron-h-tiny",
            lambda tensors: {n.replace("model.", "backbone.", 1): x for n, x in tensors.items()},
        ),
        # Published checkpoints have an MTP layer with embeddings.
        (
            "deepseek-v3-tiny",
            lambda tensors: {**tensors, "model.layers.3.enorm.weight": np.ones(3)},
        ),
    ],
)
def test_published_names_of_tensors_load_alike(name, change, tmp_path):
    ours = load_model(rewrite(name, tmp_path / "copy", change)).params
    theirs = load_model(CHECKPOINTS / name).params
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_one_file_is_read_rather_than_an_index_next_to_it(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(CHECKPOINTS / "qwen3-tiny" / name)
    index = {"weight_map": {"model.norm.weight": "model-of-another-day.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = open_checkpoint(tmp_path).files.values()
    assert {path.name for path, _ in files} == {"model.safetensors"}


def test_experts_that_do_not_fit_are_named(tmp_path):
    def change(tensors):
        tensors = one_file_entry_per_expert(tensors)
        name = next(n for n in tensors if n.endswith("experts.1.down_proj.weight"))
        return {**tensors, name: np.ones((3, 64), np.float32)}

    there = rewrite("qwen3-next-tiny", tmp_path / "copy", change)
    with pytest.raises(ValueError, match=r"experts.down_proj in parts: .*shape"):
        load_model(there)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3-tiny", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but must be 'silu'"),
        ("qwen3-tiny", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("qwen3-tiny", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ("qwen3-tiny", {"quantization_config": {"bits": 4}}, "quantization_config is"),
        ("qwen3-tiny", {"dtype": "fp16"}, "dtype is 'fp16', but must be float32 or bfloat16 or fl"),
        ("qwen3-tiny", {"torch_dtype": "float64"}, "torch_dtype is 'float64', but must be float32"),
        ("gpt-oss-tiny", {"sliding_window": None, "vocab_size": None}, "vocab_size is missing; sl"),
        ("qwen3-tiny", {"hidden_size": "64"}, "hidden_size is '64', but must be an integer of at"),
        (
            "qwen3-tiny",
            {"layer_types": 7},
            "a value is invalid for this model: TypeError: 'int' object",
        ),
        ("qwen3-tiny", {"head_dim": -1}, "is invalid for this model: TypeError: .*negative"),
        ("gemma4-e2b-tiny", {"per_layer_config": {"4": {"head_dim": 64}}}, "has other heads"),
        ("qwen3-tiny", {"eos_token_id": 1.5}, "eos_token_id is 1.5, but must be a token or"),
        ("qwen3-tiny", {"model_type": []}, r"model_type is \[\], but must be one of"),
        ("qwen3-next-tiny", {"attention_bias": True}, "attention_bias is True"),
        ("nemotron-h-tiny", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'"),
        ("nemotron-h-tiny", {"layers_block_type": ["conv"]}, r"layers_block_type has \['conv'\]"),
        ("deepseek-v3-tiny", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek-v3-tiny", {"quantization_config": {"quant_method": "fp8"}}, "quantization_conf"),
        ("nemotron-h-tiny", {"model_type": "llama"}, "model_type is 'llama', but must be one of"),
    ],
)
def test_unsupported_models_are_refused(name, changes, words, tmp_path):
    there = rewrite(name, tmp_path / "copy", lambda tensors: tensors)
    config = {**json.loads((there / "config.json").read_text()), **changes}
    (there / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        load_model(there)


def other_file(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    first, last = min(names), max(names.values())
    assert names[first] != last
    index.write_text(json.dumps({"weight_map": {**names, first: last}}))


BROKEN = {
    "cut": (lambda d: os.truncate(d / "model-1.safetensors", 5000), "not a safetensors file"),
    "pointer": (lambda d: (d / "model-0.safetensors").write_text("version 1"), "not a safetensors"),
    "other file": (other_file, r"model-1.safetensors: .* cannot be read \(File does not contain"),
    "no map": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}'),
        "index.json: weight_map must have a file name for each",
    ),
    "folder": (
        lambda d: [(d / "generation_config.json").mkdir(), (d / "config.json").unlink()],
        "config.json is missing",
    ),
    "list": (lambda d: (d / "config.json").write_text("[]"), "config.json: not a JSON object"),
    "nested": (lambda d: (d / "config.json").write_text("[" * 10**5), "json: nested too deeply"),
    "bytes": (lambda d: (d / "config.json").write_bytes(b"\xff"), "config.json: not UTF-8"),
    "stop": (
        lambda d: (d / "generation_config.json").write_text('{"eos_token_id": "x"}'),
        "eos_token_id is 'x', but must be a token or a list",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_reported(what, tmp_path):
    there = rewrite("qwen3-tiny", tmp_path / "copy", lambda tensors: tensors)
    break_it, words = BROKEN[what]
    break_it(there)
    with pytest.raises(ValueError, match=words):
        load_model(there)


def test_published_nemotron_geometry():
    """Nemotron-H-8B's: a pattern of letters, and states of 4,255,744 bytes, as vLLM counts them."""
    config = json.loads((CHECKPOINTS / "nemotron-h-tiny" / "config.json").read_text())
    del config["layers_block_type"]
    config |= {
        "hybrid_override_pattern": "M-M*-E",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
    }
    found = nemotron_h.NemotronHConfig.from_hf(config)
    assert found.kinds == (
        "linear_attention",
        "mlp",
        "linear_attention",
        "full_attention",
        "mlp",
        "moe",
    )
    kept = found.caches("bfloat16")
    assert sorted(kept) == [0, 2, 3]
    assert kept[0].layout.nbytes == 4_255_744
