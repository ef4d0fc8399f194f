"""Audio in transformers models whose text runs attention on jattn.

Needs torch and transformers: `pip install '.[conformance]'`, then

    pytest -m transformers tests/transformers/test_sounds.py
"""

from __future__ import annotations

import importlib

import pytest

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore"),  # torch's and transformers' warnings are not ours to fix
]
WHY = "needs torch and transformers: pip install '.[conformance]'"


@pytest.mark.parametrize("padded", [False, True])
def test_gemma4s_own_audio_attention_gets_its_mask(padded):
    """Its encoder runs its own attention with an additive mask, whatever implementation is set."""
    torch = pytest.importorskip("torch", reason=WHY)
    transformers = pytest.importorskip("transformers", reason=WHY)
    from tests.tools import transformers_census as census

    importlib.import_module("jattn.integrations.transformers").register()
    subject = census.Subject(torch, census.build(torch, transformers, "gemma4_audio"))
    _, inputs, want = census.first_that_runs(subject)
    if padded:
        whole = want
        mask = torch.ones(inputs["input_features"].shape[:2], dtype=torch.bool)
        mask[1, mask.shape[1] // 2 :] = False
        inputs["attention_mask"] = mask
        want = subject.run("eager", inputs)
        assert census.compare(torch, want, whole) > 0.01
    assert census.compare(torch, subject.run("jattn", inputs), want) == 0
