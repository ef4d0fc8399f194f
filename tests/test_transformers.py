"""Unmodified transformers models on jattn, over scattered pages.

Needs torch and transformers, and minutes: `pip install '.[conformance]'`, then

    pytest -m transformers tests/test_transformers.py

A family's random model reads a text in chunks with a cache and decodes the rest. Judge is the same
model in float64 with transformers' own attention; the budget, twice the error that attention makes
in float32. Wrong attention must exceed it for every family.
"""

from __future__ import annotations

import contextlib
import copy
import importlib

import jax
import numpy as np
import pytest

import jattn
from tests.support.families import COMMON, EXPERTS, FAMILIES, Family

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore"),  # those of torch and transformers are not ours to mend
]
CHUNKS = (21, 6, 1, 1, 1)  # tokens of the text, as they are fed
WHY = "needs torch and transformers: pip install '.[conformance]'"


@pytest.fixture(scope="module")
def libraries():
    """torch, transformers and the bridge; the tests are skipped where one is missing."""
    torch = pytest.importorskip("torch", reason=WHY)
    transformers = pytest.importorskip("transformers", reason=WHY)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    bridge = importlib.import_module("examples.transformers_bridge")
    bridge.register()
    bridge.register("jattn_nhd", block_size=5, kv_layout="NHD")
    jax.config.update("jax_disable_most_optimizations", True)  # hundreds of small programs
    yield torch, transformers, bridge
    jax.config.update("jax_disable_most_optimizations", False)


def make_model(torch, transformers, family: Family):
    """A random model whose attention is neither flat nor one-hot: weights of unit gain."""
    config = transformers.AutoConfig.for_model(family.model_type, **family.settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    model.set_experts_implementation("eager")  # the one that can run in float64
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "sink" in name:
                weight.copy_(noise + 1)
            elif weight.ndim >= 2 and "conv" not in name and "A_log" not in name:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
            elif name.endswith("bias") and weight.abs().max() == 0:
                weight.copy_(0.1 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def read(torch, model, text, chunks) -> np.ndarray:
    """Logits after every token of `text` [B, n], fed in chunks with a cache."""
    logits, cache, done = [], None, 0
    with torch.no_grad():
        for count in chunks:
            positions = torch.arange(done, done + count)[None].expand(text.shape[0], -1)
            out = model(
                text[:, done : done + count],
                past_key_values=cache,
                use_cache=len(chunks) > 1,
                position_ids=positions,
            )
            cache, done = out.past_key_values, done + count
            logits.append(out.logits.double())
    return torch.cat(logits, dim=1).numpy()


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x).mean()))


def wrong_attentions(features: set[str]) -> dict[str, object]:
    """Faults that a family can show, as changes of what `attend` is given."""

    def scale(query, key, value, scale, **options):
        return query, key, value, {"scale": scale * 1.02, **options}

    def swapped_blocks(query, key, value, **options):
        return query, key, value.roll(16, dims=2), options

    def grouping(query, key, value, **options):
        return query, key.flip(1), value.flip(1), options

    def window(query, key, value, sliding_window=None, **options):
        wider = sliding_window and sliding_window + 1
        return query, key, value, {"sliding_window": wider, **options}

    def without(name):
        return lambda query, key, value, **options: (query, key, value, {**options, name: None})

    faults = {"scale": scale, "swapped blocks": swapped_blocks}
    faults |= {"grouping": grouping} if "kv heads" in features else {}
    faults |= {"window": window} if "sliding_window" in features else {}
    return faults | {
        f"no {name}": without(name) for name in ("sinks", "logits_soft_cap") if name in features
    }


@contextlib.contextmanager
def replaced(bridge, attend):
    """Another `attend` in the bridge."""
    original, bridge.attend = bridge.attend, attend
    try:
        yield original
    finally:
        bridge.attend = original


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.model_type}-{f.features}")
def test_family(family, libraries):
    torch, transformers, bridge = libraries
    model = make_model(torch, transformers, family)
    text = torch.randint(3, 96, (2, sum(CHUNKS)), generator=torch.Generator().manual_seed(2))
    exact = read(torch, copy.deepcopy(model).double(), text, CHUNKS)
    plain = read(torch, model, text, CHUNKS)
    limit = 2 * rms(plain - exact) + 8 * np.finfo(np.float32).eps * rms(exact)

    features, calls = set(), []

    def spy(query, key, value, **options):
        calls.append(query.shape)
        features.update(name for name, x in options.items() if x is not None)
        features.update({"kv heads"} if key.shape[1] > 1 else ())
        return original(query, key, value, **options)

    model.set_attn_implementation("jattn")
    with replaced(bridge, spy) as original:
        ours = read(torch, model, text, CHUNKS)
    assert calls, "the model does not call transformers' attention interface"
    assert rms(ours - exact) <= limit
    for name, fault in wrong_attentions(features).items():

        def wrong(query, key, value, *, fault=fault, **options):
            query, key, value, options = fault(query, key, value, **options)
            return original(query, key, value, **options)

        with replaced(bridge, wrong):
            assert rms(read(torch, model, text, CHUNKS[:1]) - exact[:, : CHUNKS[0]]) > limit, name


def test_the_list_covers_every_feature():
    """At least thirty families, and all that attention is asked for among them."""
    assert len({family.model_type for family in FAMILIES}) >= 30
    words = " ".join(family.features for family in FAMILIES)
    for feature in (
        "GQA",
        "MQA",
        "MHA",
        "window",
        "soft cap",
        "sinks",
        "scale",
        "MLA",
        "V=",
        "rope",
        "shared KV",
        "Mamba-2",
        "delta net",
        "512",
    ):
        assert feature in words


def test_another_layout_and_block_size(libraries):
    torch, transformers, _ = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    text = torch.randint(3, 96, (1, 24), generator=torch.Generator().manual_seed(3))
    wanted = read(torch, model, text, (23, 1))
    model.set_attn_implementation("jattn_nhd")
    np.testing.assert_allclose(read(torch, model, text, (23, 1)), wanted, atol=1e-4)


def test_what_jattn_has_no_word_for_is_refused(libraries):
    torch, transformers, bridge = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    model.set_attn_implementation("jattn")
    text = torch.randint(3, 96, (2, 8))
    padding = torch.ones_like(text)
    padding[0, :3] = 0
    with pytest.raises(jattn.UnsupportedError, match="as padding does"):
        model(text, attention_mask=padding)
    query = torch.zeros(1, 4, 5, 16)
    attention = bridge.Bridge()
    with pytest.raises(jattn.UnsupportedError, match="position_bias"):
        attention(model, query, query, query, position_bias=torch.zeros(1, 4, 5, 5))
    with pytest.raises(jattn.UnsupportedError, match=r"dropout 0\.1"):
        attention(model, query, query, query, dropout=0.1)
    chunked = torch.ones(5, 5, dtype=torch.bool).tril()
    chunked[3:, :3] = False
    with pytest.raises(jattn.UnsupportedError, match="neither causal nor full"):
        attention(model, query, query, query, chunked[None, None])
    full = attention(model, query, query, query, torch.ones(1, 1, 5, 5, dtype=torch.bool))[0]
    assert full.shape == (1, 5, 4, 16)
    with pytest.raises(jattn.UnsupportedError, match=r"attends in torch\.float64"):
        attention(model, *[query.double()] * 3)
    attention(model, query, query, query, logits_to_keep=1, deterministic=True)


def test_additive_masks_hide_keys_or_are_refused(libraries):
    torch, transformers, bridge = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    query, key, value = torch.randn(3, 1, 4, 7, 16, generator=torch.Generator().manual_seed(5))
    attention = bridge.Bridge()
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)[None, None]
    wanted = attention(model, query, key, value, ~future)[0]
    for dtype, lowest in (
        (torch.float32, -1e9),
        (torch.float32, -torch.inf),
        (torch.float16, torch.finfo(torch.float16).min),
        (torch.bfloat16, torch.finfo(torch.bfloat16).min),
    ):
        mask = torch.zeros(1, 1, 7, 7, dtype=dtype).masked_fill(future, lowest)
        torch.testing.assert_close(attention(model, query, key, value, mask)[0], wanted)
        wider = torch.nn.functional.pad(mask, (0, 9), value=lowest)  # of a cache with more room
        torch.testing.assert_close(attention(model, query, key, value, wider)[0], wanted)
        mask[0, 0, 5, 2] = -3.0
        with pytest.raises(jattn.UnsupportedError, match="adds numbers to logits"):
            attention(model, query, key, value, mask)


@pytest.mark.parametrize("num_keys", [1, 3, 40])
def test_cross_attention_of_any_lengths(num_keys, libraries):
    torch, transformers, bridge = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    generator = torch.Generator().manual_seed(6)
    query = torch.randn(2, 4, 30, 16, generator=generator)
    key, value = torch.randn(2, 2, 4, num_keys, 16, generator=generator)
    out, _ = bridge.Bridge()(model, query, key, value, is_causal=False)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(out, wanted.transpose(1, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_gradients_are_those_of_transformers(name, libraries):
    torch, transformers, _ = libraries
    family = next(family for family in FAMILIES if family.model_type == name)
    text = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(7))
    model, gradients = make_model(torch, transformers, family), []
    for implementation in ("eager", "jattn"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(text, labels=text).loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        gradients.append(found)
    assert gradients[0].keys() == gradients[1].keys()
    assert any("k_proj" in n and g.abs().max() > 0 for n, g in gradients[1].items())
    for n, wanted in gradients[0].items():
        assert (gradients[1][n] - wanted).abs().max() <= 1e-4 * wanted.abs().max(), n


# -- the example models on checkpoints that transformers saves ------------------------------------

SAVED = (
    Family("qwen3", "tied embeddings, windows on later layers", {
        "tie_word_embeddings": True, "head_dim": 32, "use_sliding_window": True,
        "sliding_window": 9, "max_window_layers": 1,
    }),
    Family("gpt_oss", "yarn, two of four experts", {
        "head_dim": 32, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64,
        },
    }),
    Family("qwen3_next", "two of four experts, a layer without", {
        "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "mlp_only_layers": [1], "layer_types": ["linear_attention", "full_attention"],
    }),
    Family("nemotron_h", "experts in groups, of a latent size", {
        **EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "head_dim": 32,
        "num_key_value_heads": 1, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2,
        "ssm_state_size": 8, "chunk_size": 8, "moe_latent_size": 24, "time_step_min": 1e-6,
        "moe_shared_expert_intermediate_size": 32, "routed_scaling_factor": 2.5,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    }, without=("num_hidden_layers",)),
)  # fmt: skip


@pytest.mark.parametrize("family", SAVED, ids=lambda f: f"{f.model_type}-{f.features}")
def test_example_models_read_what_transformers_saves(family, libraries, tmp_path):
    torch, transformers, _ = libraries
    from examples.engine.caches import group_layers
    from examples.engine.engine import Engine
    from examples.engine.model import load_model
    from examples.engine.request import Request
    from examples.engine.scheduler import Limits
    from examples.engine.step import Bucket

    model = make_model(torch, transformers, family)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    text = torch.randint(3, 96, (1, 40), generator=torch.Generator().manual_seed(4))
    wanted = read(torch, model, text, (40,))[0]

    loaded = load_model(tmp_path, "float32")
    limits = Limits(group_layers(loaded.layers), 2, 16, 16, 64, prefix_caching=False)
    engine = Engine(loaded, limits, buckets=(Bucket(16, 2, 16),), keep_logits=True)
    tokens = tuple(text[0].tolist())
    sequence = engine.add(Request(tokens[:30], 10, follow=(*tokens[30:], 0)))
    for _ in engine.stream():
        pass
    np.testing.assert_allclose(np.stack(sequence.logits), wanted[29:39], atol=2e-4)


def test_rotary_frequencies_are_those_of_transformers(libraries):
    _, transformers, _ = libraries
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from examples.models.rope import rope_frequencies

    for parameters in (
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        SAVED[1].options["rope_parameters"],
        {**SAVED[1].options["rope_parameters"], "truncate": True, "attention_factor": 1.5},
    ):
        config = transformers.GptOssConfig(
            **{**COMMON, "head_dim": 64, "rope_parameters": dict(parameters)}
        )
        wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
        ours, our_factor = rope_frequencies(parameters, 64)
        np.testing.assert_allclose(ours, wanted.numpy(), rtol=3e-7)
        assert our_factor == pytest.approx(factor)


def test_mxfp4_is_unpacked_as_transformers_does(libraries):
    torch, _, _ = libraries
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from examples.models.gpt_oss import unpack_mxfp4

    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = rng.integers(120, 134, (2, 6, 3), dtype=np.uint8)
    wanted = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    np.testing.assert_array_equal(unpack_mxfp4([blocks, scales]), wanted.float().numpy())
