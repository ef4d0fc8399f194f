"""Draft models for vLLM on JAX with jattn, judged by transformers in float64.

Needs what `tests/integrations/test_vllm.py` needs:

    pytest -m hosts tests/integrations/test_vllm_drafts.py

Draft tokens only say what to verify, so every token must be the one that the target model generates
without them. Several requests run at once while others wait, and prompts are prefilled in chunks.
One prompt begins like another, and one request reaches the end of the context.
"""

from __future__ import annotations

import importlib.util
import pathlib
import shutil

import pytest

from tests.support import vllm_checkpoints, vllm_drafts, vllm_host
from tests.support.families import COMMON, EXPERTS, FAMILIES
from tests.support.vllm_host import prompts

pytestmark = [pytest.mark.hosts]
if not (importlib.util.find_spec("tpu_inference") and importlib.util.find_spec("vllm")):
    pytestmark.append(pytest.mark.skip(reason="needs vLLM on JAX: pip install 'jattn[vllm]'"))

COUNT, CONTEXT = 24, 112  # the longest prompt has 91 tokens
IN_STEP = {"async_scheduling": False}
BY_TYPE = {family.model_type: family.settings for family in reversed(FAMILIES)}
DEEP = {"hidden_size": vllm_drafts.HIDDEN, "num_hidden_layers": 7}  # enough to read three layers
MODELS = {  # a model type and its settings
    "Llama": ("llama", {**BY_TYPE["llama"], **DEEP, "head_dim": 64}),
    "Qwen3": ("qwen3", {**BY_TYPE["qwen3"], **DEEP}),
    "tied Qwen3": ("qwen3", {**BY_TYPE["qwen3"], **DEEP, "tie_word_embeddings": True}),
    "Gemma 4": (
        "gemma4_text",
        {
            **BY_TYPE["gemma4_text"],
            "head_dim": 128,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2": ("qwen2", COMMON),
    "GLM-4-MoE": ("glm4_moe", {**COMMON, **EXPERTS, "head_dim": 32}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A function that makes a model's checkpoint once, and returns its folder and reference."""
    made = {}

    def make(name: str) -> dict:
        if name not in made:
            model_type, settings = MODELS[name]
            folder = str(tmp_path_factory.mktemp(model_type))
            given = {"settings": settings, "prompts": prompts(), "count": COUNT}
            found = vllm_host.run("judge", folder=folder, model_type=model_type, **given)
            assert found["margin"] > 1e-4  # the engine computes in float32
            made[name] = {"folder": folder, **found}
        return made[name]

    return make


def prepare(method: str, want: dict, folder: pathlib.Path) -> tuple[str, str | None]:
    """Save a draft model; return the target's folder, and the draft model's if that is separate."""
    after = vllm_drafts.followers(prompts(), want["tokens"])
    target, draft = want["folder"], folder / "draft"
    if method in ("mtp", "mimo"):
        getattr(vllm_drafts, method)(draft, target, after)
        return str(draft), None
    if method == "dflash":
        vllm_drafts.dflash(draft, target, after, [1, 3, 5])
        return target, str(draft)
    getattr(vllm_drafts, method)(draft, target, after)
    if method == "gemma4":
        shutil.copytree(target, folder / "target")
        vllm_checkpoints.publish_gemma4(folder / "target")
        target = str(folder / "target")
    return target, str(draft)


def generate(target: str, draft: str | None, method: str, implementation: str, **engine) -> dict:
    one = method == "mimo"  # drafts a single token
    speculative = {"method": method, "num_speculative_tokens": 1 if one else 3}
    if method not in ("eagle3", "dflash"):
        speculative["method"] = "mtp"
    if draft is not None:
        speculative["model"] = draft
    names = ("MODEL_IMPL_TYPE", "DRAFT_MODEL_IMPL_TYPE")
    settings = {"max_model_len": CONTEXT, "disable_log_stats": False}
    return vllm_host.run(
        "generate",
        environment=dict.fromkeys(names, implementation),
        folder=target,
        prompts=prompts(),
        count=COUNT,
        engine={**settings, "speculative_config": speculative, **engine},
    )


CASES = {
    "EAGLE3, a JAX model": ("eagle3", "Llama", "flax_nnx"),
    "EAGLE3, a torch model": ("eagle3", "Qwen3", "vllm"),
    "DFLASH, Llama": ("dflash", "Llama", "flax_nnx"),
    "DFLASH, Qwen3": ("dflash", "tied Qwen3", "flax_nnx"),
    "MTP, Gemma 4": ("gemma4", "Gemma 4", "flax_nnx"),
    "MTP, MiMo": ("mimo", "Qwen2", "vllm"),
    "MTP, GLM-4-MoE": ("mtp", "GLM-4-MoE", "vllm"),
}


@pytest.mark.parametrize("name", CASES)
def test_draft_models_change_no_token(checkpoint, tmp_path, name):
    method, model, implementation = CASES[name]
    want = checkpoint(model)
    target, draft = prepare(method, want, tmp_path)
    found = generate(target, draft, method, implementation, **IN_STEP)
    assert found.get("error") is None
    left = [CONTEXT - len(prompt) for prompt in prompts()]
    assert found["tokens"] == [x[:n] for x, n in zip(want["tokens"], left, strict=True)]
    assert found["drafted"] / 10 < found["accepted"] < found["drafted"]
    assert max(found["cached"]) >= 48  # not the last block: draft models need its states


def test_scheduling_ahead_is_refused_as_the_engine_starts(checkpoint, tmp_path):
    """The host would return wrong tokens at the end of the context."""
    target, draft = prepare("eagle3", checkpoint("Llama"), tmp_path)
    error = generate(target, draft, "eagle3", "flax_nnx")["error"]
    assert "--async-scheduling: on, but must be off (--no-async-scheduling) with method" in error
