"""Requests to vLLM on JAX with jattn other than plain greedy ones: some served, some refused.

Needs what `tests/integrations/test_vllm.py` needs:

    pytest -m hosts tests/integrations/test_vllm_requests.py

Of the fields and settings that jattn refuses, some would crash the host; it would ignore the rest.
"""

from __future__ import annotations

import importlib.util
import json
import urllib.error
import urllib.request

import numpy as np
import pytest

from tests.support import vllm_host

pytestmark = [pytest.mark.hosts]
if not (importlib.util.find_spec("tpu_inference") and importlib.util.find_spec("vllm")):
    pytestmark.append(pytest.mark.skip(reason="needs vLLM on JAX: pip install 'jattn[vllm]'"))

PROMPTS = [list(range(3, 24)), list(range(30, 60)), [7]]
DRAFTS = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 2}
SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    **SMALL, "vocab_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A function that makes a random checkpoint with a tokenizer of numbers; returns its folder."""
    made = {}

    def make(model_type: str = "qwen3", **changes: object) -> str:
        key = json.dumps([model_type, changes], sort_keys=True)
        if key not in made:
            folder = str(tmp_path_factory.mktemp(model_type))
            small = EXPERTS if model_type == "qwen3_moe" else SMALL
            given = {"settings": {**small, **changes}, "prompts": [], "count": 0}
            vllm_host.run("judge", folder=folder, model_type=model_type, **given)
            made[key] = folder
        return made[key]

    return make


@pytest.mark.parametrize("implementation", ["flax_nnx", "vllm"])
def test_embeddings_are_the_judges(checkpoint, implementation):
    """A step has 64 tokens, so some prompts take several steps."""
    given = {"folder": checkpoint(), "prompts": [*PROMPTS, *vllm_host.prompts()]}
    want = vllm_host.run("judge embeddings", **given)["embeddings"]
    environment = {"MODEL_IMPL_TYPE": implementation}
    found = vllm_host.run("embed", environment=environment, engine={}, **given)["embeddings"]
    np.testing.assert_allclose(found, want, atol=1e-5)
    assert np.abs(np.subtract(want[0], want[1])).max() > 0.1


IGNORED = {  # fields that the host ignores, or crashes on
    "logit_bias": {"5": 2.0},
    "min_p": 0.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.5,
    "bad_words": ["5"],
    "min_tokens": 3,
    "allowed_token_ids": [5, 6],  # crashes the host
    "logprob_token_ids": [5, 6],
    "logprobs": 0,
    "seed": 7,
}


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "with draft tokens"])
def test_a_request_that_the_host_cannot_follow_gets_its_own_error(checkpoint, drafts):
    """The same engine serves requests before and after it, and all that the host can follow."""
    requests = [{}]
    requests += [{"temperature": 1.0, name: value} for name, value in IGNORED.items()]
    requests += [{"logprobs": 1}, {"prompt_logprobs": 1}, {"choice": ["5", "7"]}]
    requests += [{}]
    engine = {"speculative_config": DRAFTS} if drafts else {}
    found = vllm_host.run(
        "ask", folder=checkpoint(), prompts=PROMPTS, engine=engine, requests=requests
    )
    first, *refused = found[: 1 + len(IGNORED)]
    for name, each in zip(IGNORED, refused, strict=True):
        assert name in each["error"], name
        by_vllm = drafts and name in ("logit_bias", "min_p")  # vLLM refuses these with drafts
        assert by_vllm or f"\n  - {name}: " in each["error"], name
    *logprobs, chosen, last = found[1 + len(IGNORED) :]
    for name, each in zip(("logprobs", "prompt_logprobs"), logprobs, strict=True):
        message = f"{name}: 1, but must be left out with --speculative-config"
        assert (message in each["error"]) if drafts else each == first
    if drafts:
        assert "structured_outputs: given (or response_format" in chosen["error"]
    else:
        assert {tuple(tokens) for tokens in chosen["tokens"]} <= {(5, 2), (7, 2)}
    assert first == last
    assert all(len(tokens) == 6 for tokens in first["tokens"])


def test_prompt_log_probabilities_of_a_multimodal_model_are_refused(tmp_path):
    vllm_host.run("judge images", folder=str(tmp_path))
    engine = {"limit_mm_per_prompt": {"image": 1, "video": 0}}
    requests = [{"ignore_eos": True, **fields} for fields in ({}, {"prompt_logprobs": 1}, {})]
    given = {"prompts": PROMPTS, "engine": engine, "requests": requests}
    first, refused, last = vllm_host.run("ask", folder=str(tmp_path), **given)
    assert "prompt_logprobs: 1, but must be left out for a multimodal model" in refused["error"]
    assert first == last


def test_the_server_answers_400_and_lives_on(checkpoint):
    folder = checkpoint()

    def ask(address: str, **fields: object) -> tuple[int, dict]:
        prompt = {"prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        headers, body = {"Content-Type": "application/json"}, {"model": "tiny", **prompt, **fields}
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(body).encode(), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    flags = ("--speculative-config", json.dumps(DRAFTS))
    with vllm_host.server(folder, *flags) as address:
        for fields in ({"logprobs": 1}, {"prompt_logprobs": 1}, {"allowed_token_ids": [5]}):
            status, answer = ask(address, **fields)
            assert status == 400, answer
            assert f"\n  - {next(iter(fields))}: " in answer["error"]["message"]
            status, answer = ask(address)
            assert status == 200
            assert answer["usage"]["completion_tokens"] == 4


REFUSED = {  # a model, its implementation, settings, and the error when the engine starts
    "prompt embeddings": (
        *("qwen3", {}, "flax_nnx"),
        {"enable_prompt_embeds": True},
        "--enable-prompt-embeds: given, but must be left out",
    ),
    "logits instead of log-probabilities": (
        *("qwen3", {}, "flax_nnx"),
        {"logprobs_mode": "raw_logits"},
        "--logprobs-mode: raw_logits, but must be one of raw_logprobs, processed_logprobs",
    ),
    "log-probabilities of all tokens": (
        *("qwen3", {}, "flax_nnx"),
        {"max_logprobs": -1},
        "--max-logprobs: -1, but must be from 0 to",
    ),
    "logits processors": (
        *("qwen3", {}, "flax_nnx"),
        {"logits_processors": ["vllm.v1.sample.logits_processor:MinPLogitsProcessor"]},
        "--logits-processors: vllm.v1.sample.logits_processor:MinPLogitsProcessor, but must be",
    ),
    "heads that the host pads": (
        *("qwen3", {"head_dim": 96}, "auto"),
        {},
        "loads weights for head sizes of 64 and multiples of 128 only, not 96",
    ),
    "heads that the host pads, with biases": (
        *("qwen2", {"head_dim": 32, "tie_word_embeddings": True}, "auto"),
        {},
        "loads weights for head sizes of 64 and multiples of 128 only, not 32",
    ),
    "an untied output head": (
        *("qwen2", {}, "auto"),
        {},
        "the host's JAX model of Qwen2ForCausalLM reads only a config.json with a text_config",
    ),
    "adapters of experts": (
        *("qwen3_moe", {}, "vllm"),
        {"enable_lora": True, "max_lora_rank": 8},
        "--lora-target-modules: left out, but must be names of layers other than experts",
    ),
    "a JAX model quantized as it is loaded": (
        *("qwen3", {}, "flax_nnx"),
        {"quantization": "fp8", "dtype": "bfloat16"},
        "--quantization: fp8, but must be left out",
    ),
    "a torch model quantized as it is loaded": (
        *("qwen3", {}, "vllm"),
        {"quantization": "fp8", "dtype": "bfloat16"},
        "--quantization: fp8, but must be left out",
    ),
}
SERVED = {
    "any head size as a torch model": ("qwen3", {"head_dim": 96}, "vllm", {}),
    "heads of 64": ("qwen3", {"head_dim": 64}, "flax_nnx", {}),
    "heads that a model pads with its weights": ("llama", {"head_dim": 96}, "flax_nnx", {}),
    "a tied output head": ("qwen2", {"tie_word_embeddings": True}, "flax_nnx", {}),
    "adapters with experts": (
        *("qwen3_moe", {}, "vllm"),
        {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"]},
    ),
}


def start(checkpoint, model_type, changes, implementation, engine) -> dict:
    """Generate a few tokens; return them, or the error that the engine raised when it started."""
    return vllm_host.run(
        "generate",
        environment={"MODEL_IMPL_TYPE": implementation},
        folder=checkpoint(model_type, **changes),
        prompts=PROMPTS,
        count=3,
        engine=engine,
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_host_cannot_serve_is_refused_as_the_engine_starts(checkpoint, name):
    *given, message = REFUSED[name]
    error = start(checkpoint, *given)["error"]
    assert message in error
    assert "1 wrong argument(s)" in error


@pytest.mark.parametrize("name", SERVED)
def test_settings_close_to_refused_ones_are_served(checkpoint, name):
    found = start(checkpoint, *SERVED[name])
    assert [len(tokens) for tokens in found["tokens"]] == [3, 3, 3]
