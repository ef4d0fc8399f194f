"""Unmodified transformers models on jattn, over scattered pages.

Needs torch and transformers, and takes minutes: `pip install '.[conformance]'`, then

    pytest -m transformers tests/transformers/test_generation.py

or `pytest -m transformers`, which also runs test_biases.py, test_cache.py, test_census.py, ...

A family's random model reads a text in chunks with a cache and decodes the rest. The judge is the
same model in float64 with transformers' own attention. The budget is twice the error that this
attention makes in float32; deliberately wrong attention must exceed it for every family.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib

import numpy as np
import pytest

import jattn
from tests.support import transformers_models as support
from tests.support.families import FAMILIES
from tests.support.transformers_models import BRIDGE, make_model, read

pytestmark = support.MARKS
libraries = support.libraries  # the fixture
CHUNKS = (21, 6, 1, 1, 1)  # tokens of the text per call


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x).mean()))


def wrong_attentions(features: set[str]) -> dict[str, object]:
    """Return the faults that a family can show, as changes to the arguments of `attend`."""

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
    """Replace `attend` in the bridge; yield the original."""
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
    """There are at least thirty families, and they cover every feature of attention."""
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


def test_what_jattn_cannot_express_is_refused(libraries):
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
    computed = torch.zeros(1, 4, 5, 1)
    refuses(r"sinks of shape \[1, 4, 5, 1\], which are computed for each token", sinks=computed)
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


def test_a_mask_that_shows_more_keys_than_there_are_is_refused(libraries):
    """A cache with a window returns only the last keys, which a mask of all keys does not fit."""
    torch, transformers, bridge = libraries
    family = next(family for family in FAMILIES if family.model_type == "mistral")
    model = make_model(torch, transformers, family)
    model.set_attn_implementation("jattn")
    text = torch.randint(3, 96, (1, 21), generator=torch.Generator().manual_seed(17))
    mask = torch.ones(1, 1, 1, 21, dtype=torch.bool)
    mask[..., :12] = False
    x = torch.zeros(1, 4, 1, 16)
    with torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        model(text[:, :20], past_key_values=cache)
        for given in (mask, torch.zeros(1, 1, 1, 21).masked_fill(~mask, -torch.inf)):
            with pytest.raises(jattn.UnsupportedError, match="does not fit 11 keys: it shows some"):
                model(text[:, 20:], attention_mask=given, past_key_values=copy.deepcopy(cache))
        with pytest.raises(jattn.UnsupportedError, match="does not fit 20 keys: it shows some"):
            bridge.Attention()(model, x, *[x.expand(1, 4, 20, 16)] * 2, mask)


@pytest.mark.parametrize("model_type", ["bloom", "big_bird"])
def test_models_with_their_own_attention_are_refused(model_type, libraries):
    torch, transformers, _ = libraries
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="jattn")
    with (
        torch.no_grad(),
        pytest.raises(jattn.UnsupportedError, match="adds its mask to logits or biases"),
    ):
        model(torch.tensor([[5, 6, 7, 8]]))


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


@pytest.mark.parametrize("paged", [False, True])
def test_forward_mode_derivatives_are_refused(paged, libraries):
    torch, transformers, _ = libraries
    model = make_model(torch, transformers, FAMILIES[0])
    model.set_attn_implementation("jattn")
    cache = importlib.import_module(BRIDGE).PagedCache(model.config, 16) if paged else None
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(19))

    def logits(x):
        return model(inputs_embeds=x, past_key_values=cache, use_cache=paged).logits

    forward_ad = torch.autograd.forward_ad
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(jattn.UnsupportedError, match="has a tangent"):
            logits(dual)
        assert forward_ad.unpack_dual(logits(x)).tangent is None


def test_packed_texts_that_see_each_other_are_refused(libraries):
    torch, transformers, _ = libraries
    texts = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16, 17, 18]]
    collate = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True
    )
    batch = collate([{"input_ids": text} for text in texts])
    batch.pop("labels")
    model = make_model(torch, transformers, FAMILIES[0])
    model.set_attn_implementation("jattn")
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits[0]
        alone = [model(torch.tensor([text])).logits[0] for text in texts]
        torch.testing.assert_close(logits, torch.cat(alone), atol=2e-5, rtol=2e-5)
        with pytest.raises(jattn.UnsupportedError, match=r"query 5 in packed .* use_cache"):
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
