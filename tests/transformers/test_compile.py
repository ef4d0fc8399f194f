"""transformers models on jattn under `torch.compile`, compared with eager attention without it.

Needs torch and transformers: `pip install '.[conformance]'`, then

    pytest -m transformers tests/transformers/test_compile.py
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import jattn
from tests.support.families import FAMILIES, Family

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore"),  # torch's and transformers' warnings are not ours to fix
]
WHY = "needs torch and transformers: pip install '.[conformance]'"
BRIDGE = "jattn.integrations.transformers"
GEMMA2 = next(family for family in FAMILIES if family.model_type == "gemma2")
BLOOM = Family("bloom", "adds its mask to logits itself", {"n_layer": 1, "n_head": 4})


@pytest.fixture
def libraries():
    """torch, transformers and jattn's adapter; tests are skipped if a library is missing."""
    torch = pytest.importorskip("torch", reason=WHY)
    transformers = pytest.importorskip("transformers", reason=WHY)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    package = importlib.import_module(BRIDGE)
    package.register()
    torch.compiler.reset()
    yield torch, transformers, package
    torch.compiler.reset()


def make_model(torch, transformers, family: Family, attention: str):
    config = transformers.AutoConfig.for_model(family.model_type, **family.settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval()


def texts(torch) -> dict[str, object]:
    """Return two texts, longer than the family's window, the second with padding on the left."""
    ids = torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits_and_gradients(torch, model, forward, given) -> tuple[np.ndarray, list[np.ndarray]]:
    logits = forward(**given).logits[given["attention_mask"].bool()]
    model.zero_grad()
    logits.square().sum().backward()
    gradients = [x.grad.numpy() for x in model.parameters() if x.grad is not None]
    return logits.detach().numpy(), [x.copy() for x in gradients]


def test_a_compiled_model_has_eagers_logits_and_gradients(libraries):
    torch, transformers, _ = libraries
    model, given = make_model(torch, transformers, GEMMA2, "eager"), texts(torch)
    want, gradients = logits_and_gradients(torch, model, model, given)
    model.set_attn_implementation("jattn")
    forward = torch.compile(model.forward, backend="eager")
    for call in (model, forward, forward):
        found, ours = logits_and_gradients(torch, model, call, given)
        np.testing.assert_allclose(found, want, atol=2e-5)
        for one, other in zip(ours, gradients, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4 * np.abs(other).max())


@pytest.mark.parametrize("paged", [False, True])
def test_generate_compiles_with_a_static_cache(libraries, paged):
    """On GPUs transformers does this by default; with a paged cache it does not compile."""
    torch, transformers, package = libraries
    model, given = make_model(torch, transformers, GEMMA2, "eager"), texts(torch)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**given, **options)
    model.set_attn_implementation("jattn")
    config = transformers.CompileConfig(backend="eager", mode=None, fullgraph=False)
    config._compile_all_devices = True
    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    if paged:
        cache = package.PagedCache(model.config, max_cache_len=32)
        options["past_key_values"] = cache
    else:
        options["cache_implementation"] = "static"
    found = model.generate(**given, **options, compile_config=config)
    np.testing.assert_array_equal(found.numpy(), want.numpy())
    assert bool(frames["ok"]) == (not paged)


def test_a_compiled_model_decodes_from_a_paged_cache(libraries):
    torch, transformers, package = libraries
    model, given = make_model(torch, transformers, GEMMA2, "eager"), texts(torch)
    ids, mask = given["input_ids"], given["attention_mask"]
    with torch.no_grad():
        want = model(**given).logits
        model.set_attn_implementation("jattn")
        forward = torch.compile(model.forward, backend="eager")
        cache = package.PagedCache(model.config, max_cache_len=32)
        for start, end in ((0, 17), (17, 18), (18, 19), (19, 20)):
            out = forward(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
            kept = mask[:, start:end].bool()
            np.testing.assert_allclose(
                out.logits[kept].numpy(), want[:, start:end][kept].numpy(), atol=2e-5
            )


def test_a_compiled_model_that_adds_its_mask_is_refused(libraries):
    torch, transformers, _ = libraries
    model = make_model(torch, transformers, BLOOM, "jattn")
    with torch.no_grad(), pytest.raises(jattn.UnsupportedError, match="adds its mask to logits"):
        torch.compile(model.forward, backend="eager")(**texts(torch))
