"""Masks and position biases that transformers' models pass: what they hide, add and learn.

Needs torch and transformers, as tests/transformers/test_generation.py does.
"""

from __future__ import annotations

import importlib

import pytest

import jattn
from tests.support import transformers_models as support
from tests.support.families import FAMILIES
from tests.support.transformers_models import BRIDGE, make_model

pytestmark = support.MARKS
libraries = support.libraries  # the fixture


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
        (torch.bfloat16, -1e4),
        (torch.float32, torch.tensor(-1e4, dtype=torch.bfloat16).item()),
    ):
        mask = torch.zeros(1, 1, 7, 7, dtype=dtype).masked_fill(future, lowest)
        torch.testing.assert_close(attention(model, query, key, value, mask)[0], wanted)
        wider = torch.nn.functional.pad(mask, (0, 9), value=lowest)  # a cache with more room
        torch.testing.assert_close(attention(model, query, key, value, wider)[0], wanted)
        ends = torch.arange(7)[None, None, None] > 4
        padding = torch.zeros(1, 1, 1, 7, dtype=dtype).masked_fill(ends, lowest)
        found, shown = (attention(model, query, key, value, x)[0] for x in (padding, ~ends))
        torch.testing.assert_close(found, shown)
        mask[0, 0, 5, 2] = -3.0
        with pytest.raises(jattn.UnsupportedError, match="more than the distance"):
            attention(model, query, key, value, mask)


def test_additive_masks_for_all_heads_are_biases(libraries):
    """The mask has one head for all; this works with every kind of cache."""
    torch, transformers, _ = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    text = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(18))
    i, j = torch.arange(12)[:, None], torch.arange(12)[None]
    mask = (-0.5 * (i - j).abs()).masked_fill(j > i, -torch.inf)[None, None]
    with torch.no_grad():
        wanted, whole = model(text, attention_mask=mask).logits, model(text).logits
        assert (wanted - whole).abs().max() > 0.1
        model.set_attn_implementation("jattn")
        paged = importlib.import_module(BRIDGE).PagedCache(model.config, 16)
        for cache in (paged, transformers.DynamicCache(config=model.config)):
            found = []
            for start, end in ((0, 9), (9, 12)):
                part = mask[..., start:end, :end]
                out = model(text[:, start:end], attention_mask=part, past_key_values=cache)
                found.append(out.logits)
            torch.testing.assert_close(torch.cat(found, dim=1), wanted, atol=2e-5, rtol=2e-5)


def hiding(kind, torch):
    """Return a mask [B, 1, 12, 12] as transformers' models make them."""
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
            if kind == "chunks":  # chunks start at the first real token
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
def test_position_biases_and_their_gradients(kind, is_causal, libraries):
    torch, transformers, bridge = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    generator = torch.Generator().manual_seed(9)
    query, key, value = torch.randn(3, 2, 4, 9, 16, generator=generator)
    i, j = torch.arange(9)[:, None], torch.arange(9)[None]
    mask = (
        ((j <= i) if is_causal else torch.ones(9, 9, dtype=torch.bool)).expand(2, 1, 9, 9).clone()
    )
    # In the other case the bias of padding queries would not be a function of the distance.
    if is_causal or kind == "relative":
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
    model.set_attn_implementation("jattn")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(jattn.UnsupportedError, match="set use_reentrant=False"):
        model(text, labels=text[:, :7].clone()).loss.backward()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for implementation in ("eager", "jattn"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(text, labels=text[:, :7].clone()).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for n, wanted in gradients[0].items():
        assert wanted.abs().max() > 0
        torch.testing.assert_close(gradients[1][n], wanted, atol=1e-5, rtol=1e-4)


def test_a_large_bias_does_not_hide_differences_between_others(libraries):
    torch, transformers, bridge = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    query, key, value = torch.randn(3, 1, 4, 9, 16, generator=torch.Generator().manual_seed(9))
    i, j = torch.arange(9)[:, None], torch.arange(9)[None]
    bias = (-0.1 * (i - j).abs()).where(j <= i, torch.tensor(-8e3)).expand(1, 4, 9, 9).clone()
    attention = bridge.Attention()

    def attend():
        return attention(model, query, key, value, position_bias=bias, is_causal=False)[0]

    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, bias)
    torch.testing.assert_close(attend(), wanted.transpose(1, 2), atol=1e-5, rtol=1e-5)
    bias[..., 5, 2] += 0.05
    with pytest.raises(jattn.UnsupportedError, match="more than the distance"):
        attend()


def test_a_mask_is_read_again_when_its_version_changes(libraries, monkeypatch):
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


def test_encoders_with_biases_accept_padding_left_and_right(libraries):
    torch, transformers, bridge = libraries
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(config)
    with torch.no_grad():
        for block in model.encoder.block[:1]:  # the others reuse its biases
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
