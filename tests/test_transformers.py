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
import dataclasses
import importlib
import os
import subprocess
import sys

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
BRIDGE = "jattn.integrations.transformers"


@pytest.fixture(scope="module")
def libraries():
    """torch, transformers and what transformers calls; tests are skipped where one is missing."""
    torch = pytest.importorskip("torch", reason=WHY)
    transformers = pytest.importorskip("transformers", reason=WHY)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    package = importlib.import_module(BRIDGE)
    package.register()
    package.register("jattn_nhd", block_size=5, kv_layout="NHD")
    bridge = importlib.import_module(f"{BRIDGE}.attention")
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

    def scale(query, key, value, sight, scale, **options):
        return query, key, value, sight, {"scale": scale * 1.02, **options}

    def swapped_blocks(query, key, value, sight, **options):
        return query, key, value.roll(16, dims=2), sight, options

    def grouping(query, key, value, sight, **options):
        return query, key.flip(1), value.flip(1), sight, options

    def window(query, key, value, sight, **options):
        mask = sight.mask
        wider = mask | mask.roll(-1, dims=3) & ~mask.roll(-1, dims=3).triu(1)
        return query, key, value, dataclasses.replace(sight, mask=wider), options

    def without(name):
        return lambda query, key, value, sight, **options: (
            *(query, key, value, sight),
            {**options, name: None},
        )

    faults = {"scale": scale, "swapped blocks": swapped_blocks}
    faults |= {"grouping": grouping} if "kv heads" in features else {}
    faults |= {"window": window} if "window" in features else {}
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

    def spy(query, key, value, sight, **options):
        calls.append(query.shape)
        features.update(name for name, x in options.items() if x is not None)
        features.update({"kv heads"} if key.shape[1] > 1 else ())
        if query.shape[2] == key.shape[2] > 1:
            seen = sight.mask[0, 0]
            features.update({"window"} if not seen[-1, 0] else ())
        return original(query, key, value, sight, **options)

    model.set_attn_implementation("jattn")
    with replaced(bridge, spy) as original:
        ours = read(torch, model, text, CHUNKS)
    assert calls, "the model does not call transformers' attention interface"
    assert rms(ours - exact) <= limit
    for name, fault in wrong_attentions(features).items():

        def wrong(*args, fault=fault, **options):
            *args, options = fault(*args, **options)
            return original(*args, **{name: x for name, x in options.items() if x is not None})

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
    query = torch.zeros(1, 4, 5, 16)
    attention = bridge.Attention()

    def refuses(reason, *args, **options):
        with pytest.raises(jattn.UnsupportedError, match=reason):
            attention(model, *(args or [query] * 3), **options)

    refuses(r"\['head_mask'\]", head_mask=torch.zeros(1))
    refuses(r"dropout 0\.1", dropout=0.1)
    refuses(r"attends in torch\.float64", *[query.double()] * 3)
    refuses(r"sinks of shape \[5, 4\]", s_aux=torch.zeros(5, 4))
    refuses("queries of shape", *[query[0]] * 3)
    refuses("asked for attention weights", output_attentions=True)
    bias = torch.arange(25.0).view(1, 1, 5, 5).square()
    refuses("more than the distance", is_causal=False, position_bias=bias)
    refuses("attends without a mask: eager attention")
    refuses("without a mask, as if causal", query[:, :, :3], query, query, is_causal=True)
    some = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    some[..., 4, 2] = False
    refuses("query 4 of batch row 0 only 4 of the 5 keys", *[query] * 3, some)
    refuses("differs between heads", *[query] * 3, torch.cat([some, ~some], dim=1))
    refuses("does not fit 5 queries and 5 keys", *[query] * 3, some[..., :4])
    causal = {"is_causal": True, "logits_to_keep": 1, "deterministic": True, "scaling": 1}
    attention(model, query, query, query, **causal)
    for argument in ({"block_size": 0}, {"implementation": "best"}, {"kv_layout": "HSD"}):
        with pytest.raises(ValueError, match=next(iter(argument))):
            importlib.import_module(BRIDGE).register("wrong", **argument)


@pytest.mark.parametrize("model_type", ["bloom", "big_bird"])
def test_models_with_attention_of_their_own_are_refused(model_type, libraries):
    torch, transformers, _ = libraries
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="jattn")
    with (
        torch.no_grad(),
        pytest.raises(jattn.UnsupportedError, match="adds its mask to logits or biases"),
    ):
        model(torch.tensor([[5, 6, 7, 8]]))


def test_a_mask_of_jattn_is_a_bool_tensor_that_is_not_added(libraries):
    torch, _, _ = libraries
    sights = importlib.import_module(f"{BRIDGE}.sights")
    plain = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    mask, logits = sights.BoolMask.of(plain), torch.zeros(1, 2, 3, 3)
    assert mask.plain() is plain
    for made in (mask[..., :2], mask & ~mask, mask.expand(2, 1, 3, 3), mask.to("cpu")):
        assert isinstance(made, sights.BoolMask)
        assert type(made.plain()) is torch.Tensor
    assert type(logits.masked_fill(mask, 1.0)) is type(mask.float()) is torch.Tensor
    mask[..., 2] = False
    assert plain._version == 1
    assert not plain[..., 2].any()

    def in_place():
        nonlocal logits
        logits += mask

    adds = (lambda: logits + mask, lambda: mask + logits, lambda: torch.add(logits, mask), in_place)
    for add in adds:
        with pytest.raises(jattn.UnsupportedError, match="adds its mask to logits or biases"):
            add()


def test_additive_masks_hide_keys_or_are_biases_or_are_refused(libraries):
    torch, transformers, bridge = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    query, key, value = torch.randn(3, 1, 4, 7, 16, generator=torch.Generator().manual_seed(5))
    attention = bridge.Attention()
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
        with pytest.raises(jattn.UnsupportedError, match="more than the distance"):
            attention(model, query, key, value, mask)


def hiding(kind, torch):
    """A mask [B, 1, 12, 12] as transformers' models make them."""
    i, j = torch.arange(12)[:, None], torch.arange(12)[None]
    seen = {
        "causal": j <= i,
        "window": (j <= i) & (j > i - 4),
        "window both ways": (i - j).abs() < 4,
        "chunks": (j <= i) & (i // 5 == j // 5),
        "prefix": (j <= i) | (j < 6),
        "picture in a window": ((j <= i) & (j > i - 6)) | ((i // 4 == 1) & (j // 4 == 1)),
        "packed": (j <= i) & ((i < 5) == (j < 5)),
        "blocks": i // 4 == j // 4,
    }[kind]
    return seen.expand(3, 1, 12, 12).clone()


@pytest.mark.parametrize("padding", ["none", "left", "right", "static"])
@pytest.mark.parametrize(
    "kind",
    [
        *("causal", "window", "window both ways", "chunks", "prefix", "picture in a window"),
        *("packed", "blocks"),
    ],
)
def test_masks_are_those_of_sdpa(kind, padding, libraries):
    torch, transformers, bridge = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    generator = torch.Generator().manual_seed(8)
    query = torch.randn(3, 4, 12, 16, generator=generator)
    key, value = torch.randn(2, 3, 2, 12, 16, generator=generator)
    mask = hiding(kind, torch)
    if padding == "left":
        for row, missing in ((mask[0, 0], 3), (mask[1, 0], 7)):
            if kind == "chunks":  # they start at the first token
                row[missing:, missing:] = row[:-missing, :-missing].clone()
            row[:, :missing] = False
    elif padding == "right":
        mask[0, ..., 9:] = False
        mask[2, ..., 5:] = False
    elif padding == "static":
        mask = torch.nn.functional.pad(mask, (0, 5))
        key, value = (
            torch.nn.functional.pad(x, (0, 0, 0, 5), value=torch.nan) for x in (key, value)
        )
    out, _ = bridge.Attention()(model, query, key, value, mask)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key.nan_to_num(), value.nan_to_num(), mask, enable_gqa=True
    )
    wanted = wanted.where(mask.any(dim=3)[..., None], 0).transpose(1, 2)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["relative", "per key"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_biases_of_positions_and_their_gradients(kind, is_causal, libraries):
    torch, transformers, bridge = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    generator = torch.Generator().manual_seed(9)
    query, key, value = torch.randn(3, 2, 4, 9, 16, generator=generator)
    i, j = torch.arange(9)[:, None], torch.arange(9)[None]
    mask = (
        ((j <= i) if is_causal else torch.ones(9, 9, dtype=torch.bool)).expand(2, 1, 9, 9).clone()
    )
    if is_causal or kind == "relative":  # or padding's own distances would be its bias's only
        mask[0, ..., :2] = False
    table = torch.randn(4, 17, generator=generator, requires_grad=True)
    gradients = []
    for ours in (True, False):
        slopes = table[:, :1, None] * j
        bias = (table[:, j - i + 8] if kind == "relative" else slopes.expand(4, 9, 9))[None]
        if ours:
            out, _ = bridge.Attention()(model, query, key, value, mask, position_bias=bias)
        else:
            added = bias.masked_fill(~mask, -torch.inf).masked_fill(~mask.any(dim=3)[..., None], 0)
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, added)
            out = out.where(mask.any(dim=3)[..., None], 0).transpose(1, 2)
        gradients.append((out, *torch.autograd.grad(out.square().sum(), table)))
    assert gradients[1][1].abs().max() > 0.1
    for ours, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


def test_a_bias_of_zeros_learns_and_second_derivatives_are_refused(libraries):
    torch, transformers, bridge = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    query, key, value = torch.randn(3, 1, 4, 9, 16, generator=torch.Generator().manual_seed(9))
    query.requires_grad_()
    i, j = torch.arange(9)[:, None], torch.arange(9)[None]
    table = torch.zeros(4, 17, requires_grad=True)
    gradients = []
    for ours in (True, False):
        bias = table[:, j - i + 8][None]
        if ours:
            out, _ = bridge.Attention()(
                model, query, key, value, None, position_bias=bias, is_causal=False
            )
        else:
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, bias)
            out = out.transpose(1, 2)
        (found,) = torch.autograd.grad(out.square().sum(), table, create_graph=True)
        gradients.append(found)
    assert gradients[1].abs().max() > 0.1
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradients[0].sum().backward()


@pytest.mark.parametrize("as_mask", [False, True])
def test_biases_learn_as_functions_of_the_distance_or_are_refused(as_mask, libraries):
    torch, transformers, bridge = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    query, key, value = torch.randn(3, 1, 4, 9, 16, generator=torch.Generator().manual_seed(9))
    i, j = torch.arange(9)[:, None], torch.arange(9)[None]
    plane = (i // 3 - j // 3 + 2) * 5 + i % 3 - j % 3 + 2

    def gradient(learned, bias, ours=True):
        if ours:
            out, _ = bridge.Attention()(
                model, query, key, value, bias if as_mask else None,
                position_bias=None if as_mask else bias, is_causal=False,
            )  # fmt: skip
        else:
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, bias)
            out = out.transpose(1, 2)
        return torch.autograd.grad(out.square().sum(), learned)[0]

    table = torch.zeros(4, 17, requires_grad=True)
    bias = table[:, j - i + 8][None]
    found, wanted = gradient(table, bias), gradient(table, table[:, j - i + 8][None], ours=False)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert wanted.abs().max() > 0.1
    whole = torch.nn.Parameter(torch.zeros(1, 4, 9, 9))
    of_plane = torch.zeros(4, 25, requires_grad=True)
    for learned, bias in ((whole, whole), (of_plane, of_plane[:, plane][None])):
        with pytest.raises(jattn.UnsupportedError, match=r"parameters \[(1, 4, 9, 9|4, 25)\] that"):
            gradient(learned, bias)
    of_the_moment = torch.zeros(1, 4, 9, 9, requires_grad=True)
    assert gradient(of_the_moment, of_the_moment).isnan().all()


def test_biases_of_models_that_train(libraries):
    torch, transformers, _ = libraries
    config = transformers.BeitConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32,
        image_size=32, patch_size=8, use_relative_position_bias=True,
    )  # fmt: skip
    model = transformers.BeitModel._from_config(config, attn_implementation="jattn")
    pixels = torch.randn(1, 3, 32, 32)
    with pytest.raises(jattn.UnsupportedError, match="adds its mask to logits or biases"):
        model(pixels)
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).train()
    model.gradient_checkpointing_enable()
    text, gradients = torch.randint(3, 96, (2, 12)), []
    for implementation in ("eager", "jattn"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(text, labels=text[:, :7].clone()).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for n, wanted in gradients[0].items():
        assert wanted.abs().max() > 0
        torch.testing.assert_close(gradients[1][n], wanted, atol=1e-5, rtol=1e-4)


def test_what_was_read_of_a_mask_goes_with_its_version(libraries, monkeypatch):
    torch, transformers, bridge = libraries
    sights = importlib.import_module(f"{BRIDGE}.sights")
    model = make_model(torch, transformers, FAMILIES[0])
    query = torch.randn(1, 4, 1, 16)
    key, value = torch.randn(2, 1, 4, 9, 16)
    mask, bias = torch.zeros(1, 1, 1, 9, dtype=torch.bool), torch.ones(1, 4, 1, 9)
    calls, read = [], sights.masks.relative_columns
    monkeypatch.setattr(sights.masks, "relative_columns", lambda *x: calls.append(1) or read(*x))
    for place in range(9):
        mask[..., place] = True
        for _layer in range(2):
            out, _ = bridge.Attention()(model, query, key, value, mask, position_bias=bias)
    assert len(calls) == 9
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(out, wanted.transpose(1, 2), atol=1e-5, rtol=1e-5)
    assert len(sights._plans[mask][1]) == 1


def test_encoders_with_biases_take_padding_on_either_side(libraries):
    torch, transformers, bridge = libraries
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(config)
    with torch.no_grad():
        for block in model.encoder.block[:1]:  # the others take its biases
            block.layer[0].SelfAttention.relative_attention_bias.weight.normal_()
    text, mask = torch.randint(3, 96, (4, 14)), torch.ones(4, 14, dtype=torch.long)
    mask[1, 9:] = mask[2, :3] = mask[3, :2] = mask[3, 11:] = 0
    found, slope = [], torch.randn(4, 14, 32) * mask[..., None]
    for implementation in ("eager", "jattn"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(text, attention_mask=mask).last_hidden_state
        (out * slope).sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        found.append({"out": out.detach() * mask[..., None], **gradients})
    for n, wanted in found[0].items():
        assert (found[1][n] - wanted).abs().max() <= 1e-4 * wanted.abs().max(), n
    with torch.no_grad():
        bias = model.encoder.block[0].layer[0].SelfAttention.compute_bias(14, 14)
        arrays = torch.randn(3, 4, 4, 14, 8)
        seen = mask.bool()[:, None, None].expand(-1, 1, 14, -1)
        out, _ = bridge.Attention()(model, *arrays, seen, position_bias=bias, is_causal=False)
    assert not out[1, 9:].any()
    assert not out[3, 11:].any()
    assert out[1, :9].any(dim=(1, 2)).all()
    assert out[3, :11].any(dim=(1, 2)).all()


@pytest.mark.parametrize("num_keys", [1, 3, 40])
def test_cross_attention_of_any_lengths(num_keys, libraries):
    torch, transformers, bridge = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    generator = torch.Generator().manual_seed(6)
    query = torch.randn(2, 4, 30, 16, generator=generator)
    key, value = torch.randn(2, 2, 4, num_keys, 16, generator=generator)
    out, _ = bridge.Attention()(model, query, key, value, is_causal=False)
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


def test_packed_texts_that_see_each_other_are_refused(libraries):
    torch, transformers, _ = libraries
    texts = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16, 17, 18]]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": text} for text in texts])
    batch.pop("labels")
    model = make_model(torch, transformers, FAMILIES[0])
    model.set_attn_implementation("jattn")
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits[0]
        alone = [model(torch.tensor([text])).logits[0] for text in texts]
        torch.testing.assert_close(logits, torch.cat(alone), atol=2e-5, rtol=2e-5)
        with pytest.raises(jattn.UnsupportedError, match=r"query 5 is of packed .* use_cache"):
            model(**batch, use_cache=True)


@pytest.mark.parametrize("changed", ["out", "query"])
def test_a_change_in_place_is_noticed_before_it_changes_gradients(changed, libraries):
    torch, transformers, bridge = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    x = torch.randn(1, 4, 16, 16, requires_grad=True)
    query = x * 1.0
    out, _ = bridge.Attention()(model, query, x, x, is_causal=False)
    if changed == "out":
        out.mul_(2.0)
    else:
        out = out * 2.0
        with torch.no_grad():
            query.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# -- keys that stay in pools ----------------------------------------------------------------------

# What a PagedCache cannot hold: layers with states and keys, and latents that the model expands.
NOT_PAGED = {
    "zamba2": "must have one that caches the keys of full or sliding attention and nothing else",
    "deepseek_v2": "caches latents",
    "deepseek_v3": "caches latents",
    "minicpm3": "caches latents",
}


def generate(torch, model, text, mask, cache, **options):
    """Tokens and logits of a greedy continuation."""
    torch.manual_seed(0)
    out = model.generate(
        text, attention_mask=mask, past_key_values=cache, do_sample=False, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits, dim=1).double()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.model_type}-{f.features}")
def test_a_paged_cache_generates_what_transformers_does(family, libraries):
    torch, transformers, _ = libraries
    model = make_model(torch, transformers, family)
    text = torch.randint(3, 96, (3, 14), generator=torch.Generator().manual_seed(10))
    mask = torch.ones_like(text)
    mask[0, :3], mask[2, :7] = 0, 0
    if model._supports_sdpa and family.model_type != "gpt_oss":  # sdpa takes no sinks
        model.set_attn_implementation("sdpa")
    tokens, logits = generate(torch, model, text, mask, None, max_new_tokens=24)
    model.set_attn_implementation("jattn")
    package = importlib.import_module(BRIDGE)
    reason = NOT_PAGED.get(family.model_type)
    with (
        pytest.raises((ValueError, jattn.UnsupportedError), match=reason)
        if reason
        else (contextlib.nullcontext())
    ):
        cache = package.PagedCache(model.config, max_cache_len=37, block_size=8)
        assert reason is None
        ours, our_logits = generate(torch, model, text, mask, cache, max_new_tokens=24)
        assert torch.equal(ours, tokens)
        assert (our_logits - logits).abs().max() <= 2e-4


def paged_llama(torch, transformers, **options):
    model = make_model(torch, transformers, FAMILIES[0])
    model.set_attn_implementation("jattn")
    return model, importlib.import_module(BRIDGE).PagedCache(model.config, 64, **options)


def test_a_decode_step_copies_no_pool(libraries):
    torch, transformers, _ = libraries
    from jattn import testing

    module = importlib.import_module(f"{BRIDGE}.cache")
    model, cache = paged_llama(torch, transformers, block_size=4)
    text = torch.randint(3, 96, (2, 9))
    with torch.no_grad():
        model(text, past_key_values=cache)
        lowered = []

        def program(structure, *static):
            def lower(leaves, *args):
                large = jattn.init_kv_cache(4096, 2, 4, 16, format=jattn.Dense("float32"))
                of_large = make(jax.tree.structure(large), *static)
                lowered.append((of_large.lower(jax.tree.leaves(large), *args).compile(), large))
                return make(structure, *static)(leaves, *args)

            return lower

        make, module._program = module._program, program
        try:
            words = [layer.caches[0].data.unsafe_buffer_pointer() for layer in cache.layers]
            model(text[:, :1], past_key_values=cache)
        finally:
            module._program = make
    assert words == [layer.caches[0].data.unsafe_buffer_pointer() for layer in cache.layers]
    assert len(lowered) == 2
    for compiled, pools in lowered:
        testing.assert_nothing_pool_sized(compiled, pools)


def test_arrays_are_on_the_device_of_the_tensors(libraries):
    """In a process of its own, with a default device that is another one."""
    program = (
        "import jax, torch, transformers\n"
        "import jattn.integrations.transformers as package\n"
        "package.register()\n"
        "from jattn.integrations.transformers import attention, batches\n"
        "first, second = jax.devices()\n"
        "jax.config.update('jax_default_device', second)\n"
        "run, made = attention._write_and_attend, []\n"
        "def spy(*args, **options):\n"
        "    out = run(*args, **options)\n"
        "    made.append([options['slots'], *options['batch'].values(), out])\n"
        "    return out\n"
        "attention._write_and_attend = spy\n"
        "x = torch.randn(1, 4, 9, 16)\n"
        "attend = attention.Attention()\n"
        "attend(torch.nn.Linear(1, 1), x, x, x, is_causal=False)\n"
        "sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=96)\n"
        "config = transformers.LlamaConfig(**sizes, intermediate_size=64)\n"
        "model = transformers.LlamaForCausalLM._from_config(config, attn_implementation='jattn')\n"
        "cache = package.PagedCache(config, 32)\n"
        "model.generate(torch.ones(1, 3, dtype=int), past_key_values=cache, max_new_tokens=3,"
        " num_beams=2)\n"
        "made.append(cache.layers[0]._leaves)\n"
        "print(all(y.devices() == {first} for made in made for y in made))\n"
        "try: attend(torch.nn.Linear(1, 1), *[x.to('meta')] * 3, is_causal=False)\n"
        "except Exception as error: print(error)\n"
    )
    flags = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=flags)
    good, refusal = done.stdout.splitlines()[-2:]
    assert good == "True", done.stderr
    assert refusal.startswith("tensors are on meta, but JAX's devices are [CpuDevice"), done.stderr


def test_a_second_decode_step_compiles_nothing(libraries):
    torch, transformers, _ = libraries
    module = importlib.import_module(f"{BRIDGE}.cache")
    model, cache = paged_llama(torch, transformers)
    text = torch.randint(3, 96, (2, 9))
    with torch.no_grad():
        for count in (9, 1):
            model(text[:, :count], past_key_values=cache)
        programs = {p for layer in cache.layers for p in layer._programs.values()}
        assert len(programs) == 2  # of the text and of a step, for both layers
        before = module._program.cache_info().misses, [p._cache_size() for p in programs]
        for _ in range(20):
            model(text[:, :1], past_key_values=cache)
        after = module._program.cache_info().misses, [p._cache_size() for p in programs]
        assert after == before


def test_a_paged_cache_is_rewound_reordered_and_reused(libraries):
    torch, transformers, _ = libraries
    model, cache = paged_llama(torch, transformers, kv_layout="NHD", block_size=5)
    text = torch.randint(3, 96, (3, 30), generator=torch.Generator().manual_seed(11))
    mask = torch.ones_like(text)
    mask[1, :4] = 0
    rows = torch.tensor([2, 1, 1])

    def read_on(cache):
        with torch.no_grad():
            model(text[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
            cache.crop(-6)
            cache.reorder_cache(rows)
            return model(
                text[:, 14:], attention_mask=torch.cat([mask[rows, :14], mask[:, 14:]], dim=1),
                past_key_values=cache,
            ).logits  # fmt: skip

    wanted = read_on(transformers.DynamicCache(config=model.config))
    torch.testing.assert_close(read_on(cache), wanted, atol=2e-5, rtol=2e-5)
    cache.reset()
    torch.testing.assert_close(read_on(cache), wanted, atol=2e-5, rtol=2e-5)
    with torch.no_grad(), pytest.raises(ValueError, match="batch of 2, but must have one of 3, as"):
        model(text[:2, :5], past_key_values=cache)
    cache.reset()
    text, mask, rows = text[:2], mask[:2], rows[:2] - 1
    wanted = read_on(transformers.DynamicCache(config=model.config))
    torch.testing.assert_close(read_on(cache), wanted, atol=2e-5, rtol=2e-5)
    one = text[:1, :12]
    beams = {"num_beams": 3, "max_new_tokens": 10}
    ones = torch.ones_like(one)
    tokens, _ = generate(torch, model, one, ones, None, **beams)
    _, cache = paged_llama(torch, transformers, block_size=4)
    assert torch.equal(generate(torch, model, one, ones, cache, **beams)[0], tokens)


def test_beams_copy_the_blocks_that_hold_tokens(libraries, monkeypatch):
    torch, transformers, _ = libraries
    module = importlib.import_module(f"{BRIDGE}.cache")
    model, cache = paged_llama(torch, transformers, block_size=4)
    text = torch.randint(3, 96, (3, 9), generator=torch.Generator().manual_seed(13))
    mask = torch.ones_like(text)
    mask[2, :2] = 0
    copied, copy = [], module._copy_blocks

    def spy(structure, leaves, source, target):
        copied.append((source >= 0).sum())
        before = [x.unsafe_buffer_pointer() for x in leaves]
        leaves = copy(structure, leaves, source, target)
        assert [x.unsafe_buffer_pointer() for x in leaves] == before
        return leaves

    monkeypatch.setattr(module, "_copy_blocks", spy)

    def read_on(cache):
        seen, steps = mask, [[0, 1, 2], [2, 0, 1], [1, 1, 0], [2, 0, 0]]
        with torch.no_grad():
            logits = [model(text, attention_mask=mask, past_key_values=cache).logits[:, -1:]]
            for rows in steps:
                cache.reorder_cache(torch.tensor(rows))
                seen = torch.nn.functional.pad(seen[rows], (0, 1), value=1)
                out = model(text[:, :1], attention_mask=seen, past_key_values=cache)
                logits.append(out.logits)
        return torch.cat(logits, dim=1)

    wanted = read_on(transformers.DynamicCache(config=model.config))
    torch.testing.assert_close(read_on(cache), wanted, atol=2e-5, rtol=2e-5)
    # In both layers; a row of 11 tokens, padding not among them, then one of 12.
    assert copied == [3, 3, 3, 3]


@pytest.mark.parametrize("model_type", ["bart", "t5", "whisper"])
def test_encoder_decoders_take_two_paged_caches(model_type, libraries):
    torch, transformers, _ = libraries
    package = importlib.import_module(BRIDGE)
    sizes = {"vocab_size": 96, "d_model": 64, "max_position_embeddings": 64}
    sizes |= {"max_source_positions": 32, "max_target_positions": 64, "num_mel_bins": 16}
    sizes |= {"num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 96}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 96}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.AutoConfig.for_model(
        model_type, **sizes, **tokens, suppress_tokens=None, begin_suppress_tokens=None
    )
    torch.manual_seed(0)
    speech = model_type == "whisper"
    kind = "SpeechSeq2Seq" if speech else "Seq2SeqLM"
    auto = getattr(transformers, f"AutoModelFor{kind}")
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn_like(weight) / weight.shape[-1] ** 0.5)
    if speech:
        inputs = {"input_features": torch.randn(2, 16, 64)}
    else:
        mask = torch.ones(2, 14, dtype=torch.long)
        mask[1, :5] = 0
        inputs = {"input_ids": torch.randint(3, 96, (2, 14)), "attention_mask": mask}
    start = torch.tensor([[1, 5, 7], [1, 8, 9]])

    def paged(count=1):
        caches = [package.PagedCache(model.config, 40, block_size=8) for _ in range(count)]
        return transformers.EncoderDecoderCache(*caches) if count == 2 else caches[0]

    def read_on(cache):
        logits = []
        with torch.no_grad():
            for tokens in (start, start[:, :1], start[:, 1:]):
                out = model(**inputs, decoder_input_ids=tokens, past_key_values=cache)
                cache = out.past_key_values
                logits.append(out.logits)
        return torch.cat(logits, dim=1)

    wanted = read_on(None)
    model.set_attn_implementation("jattn")
    torch.testing.assert_close(read_on(paged(2)), wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(jattn.UnsupportedError, match=r"EncoderDecoderCache\(PagedCache\(\.\.\.\),"):
        read_on(paged())
    if not speech:
        options = {"num_beams": 2, "max_new_tokens": 6, "do_sample": False}
        model.set_attn_implementation("eager")
        wanted = model.generate(**inputs, **options)
        model.set_attn_implementation("jattn")
        assert torch.equal(model.generate(**inputs, past_key_values=paged(2), **options), wanted)


def test_a_paged_cache_of_narrow_numbers(libraries):
    torch, transformers, _ = libraries
    text = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(12))
    logits = []
    for format in (None, jattn.Int8()):
        model, cache = paged_llama(torch, transformers, format=format)
        with torch.no_grad():
            logits.append(model(text, past_key_values=cache).logits)
    assert isinstance(cache.layers[0].caches[0].format, jattn.Int8)
    error = (logits[0] - logits[1]).square().mean().sqrt() / logits[0].square().mean().sqrt()
    assert 1e-6 < error < 0.05


def test_wrong_use_of_a_paged_cache_is_refused(libraries):
    torch, transformers, bridge = libraries
    package = importlib.import_module(BRIDGE)
    model, cache = paged_llama(torch, transformers)
    text = torch.randint(3, 96, (2, 9))
    with pytest.raises(jattn.UnsupportedError, match=r"under torch\.no_grad"):
        model(text, past_key_values=cache)
    query = torch.zeros(2, 4, 9, 16)
    keys, values = cache.update(query[:, :2], query[:, :2], 0)
    sinks = torch.zeros(4, requires_grad=True)
    with pytest.raises(jattn.UnsupportedError, match="a PagedCache has no gradients"):
        bridge.Attention()(model, query, keys, values, is_causal=True, s_aux=sinks)
    with torch.no_grad():
        for implementation in ("sdpa", "eager"):
            model.set_attn_implementation(implementation)
            with pytest.raises(
                jattn.UnsupportedError, match='must have attn_implementation="jattn"'
            ):
                model(text, past_key_values=package.PagedCache(model.config, 64))
        model.set_attn_implementation("jattn")
        small = package.PagedCache(model.config, 10)
        with pytest.raises(ValueError, match="would hold 11 tokens, but must hold at most"):
            model.generate(text, past_key_values=small, max_new_tokens=9, do_sample=False)
        mask = torch.ones_like(text)
        mask[0, :3] = 0
        cache = package.PagedCache(model.config, 64)
        model(text, attention_mask=mask, past_key_values=cache)
        with pytest.raises(jattn.UnsupportedError, match="hid from all queries when they were"):
            model(text[:, :1], attention_mask=torch.ones(2, 10), past_key_values=cache)
    with pytest.raises(ValueError, match=r"(?s)max_cache_len.*block_size.*kv_layout"):
        package.PagedCache(model.config, 0, block_size=-1, kv_layout="HDN")
    with pytest.raises(
        ValueError, match=r"(?s)format: .*int8.*jattn\.Int8.*config: a Llama.*model\.config"
    ):
        package.PagedCache(model, 64, format="int8")


# -- other types of models -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_type",
    [
        *("albert", "bart", "clip", "deberta", "distilbert", "gemma3", "llama4_text", "llava"),
        *("modernbert", "mpnet", "t5", "vit", "whisper"),
    ],
)
def test_types_of_the_census(model_type, libraries):
    from tests import transformers_census as census

    verdict = census.judge(model_type)
    assert verdict.status in (census.RIGHT, census.NOT_BUILT)
    if verdict.status == census.NOT_BUILT:
        assert "does not call transformers' attention interface" in verdict.reason
    assert (verdict.status == census.RIGHT) == (model_type not in ("deberta", "mpnet"))
    if model_type in ("bart", "t5", "whisper"):
        assert verdict.of.endswith("ForConditionalGeneration")
        assert "a cache" in verdict.also
        assert ("padding" in verdict.also) == (model_type != "whisper")


def test_the_census_finds_faults_and_refusals(libraries, monkeypatch):
    from tests import transformers_census as census

    _, _, bridge = libraries
    assert census.judge("deepseek_v32").status == census.REFUSED
    original = bridge.attend

    def attend(query, key, *args, **options):
        return original(query, key * 1.01, *args, **options)

    monkeypatch.setattr(bridge, "attend", attend)
    assert census.judge("llama").status == census.WRONG

    def crashes(after):
        calls = []

        def attend(*args, **options):
            calls.append(1)
            if len(calls) > after:
                raise TypeError("on purpose")
            return original(*args, **options)

        return attend

    for after, reason in ((0, "TypeError: on purpose"), (4, "with padding: TypeError: on purpose")):
        monkeypatch.setattr(bridge, "attend", crashes(after))
        verdict = census.judge("llama")
        assert verdict.status == census.CRASHED
        assert verdict.reason.startswith(reason)


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
    Family("deepseek_v3", "yarn with two scales, norms of latents with an epsilon of their own", {
        **EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-2,
        "routed_scaling_factor": 2.5, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 2.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
    }),
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
        {**SAVED[1].options["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0},
        {**SAVED[1].options["rope_parameters"], "mscale": 2.0, "mscale_all_dim": 1.0},
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
    found = unpack_mxfp4([blocks, scales])
    np.testing.assert_array_equal(found.swapaxes(1, 2), wanted.float().numpy())
