"""Requests that share a batch of vLLM on JAX with jattn: each gets the output it would get alone.

Needs what `tests/integrations/test_vllm.py` needs:

    pytest -m hosts tests/integrations/test_vllm_batches.py
"""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from tests.support import vllm_host

pytestmark = [pytest.mark.hosts]
if not (importlib.util.find_spec("tpu_inference") and importlib.util.find_spec("vllm")):
    pytestmark.append(pytest.mark.skip(reason="needs vLLM on JAX: pip install 'jattn[vllm]'"))

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PROMPTS = [np.random.default_rng(n).integers(3, 90, 21 + 8 * n).tolist() for n in range(4)]
DRAFTS = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 2}
LONG = {"max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("qwen3"))
    given = {"settings": SMALL, "prompts": [], "count": 0}
    vllm_host.run("judge", folder=folder, model_type="qwen3", **given)
    return folder


def ask(
    folder: str,
    prompts: list[list[int]],
    requests: list[dict],
    resets: tuple[int, ...] = (),
    **engine: object,
) -> dict:
    given = {"prompts": prompts, "requests": requests, "engine": engine, "resets": resets}
    return vllm_host.run("ask together", folder=folder, **given)


CROWDED = {
    "scheduled ahead": {},
    "a step at a time": {"async_scheduling": False, "enable_prefix_caching": False},
    "with draft tokens": {"speculative_config": DRAFTS},
}


@pytest.mark.parametrize("name", CROWDED)
def test_preempted_requests_continue_as_if_they_were_not(checkpoint, name):
    engine, drafts = CROWDED[name], name == "with draft tokens"
    last = LONG if drafts else {**LONG, "prompt_logprobs": 0}
    engine = {**engine, "max_model_len": 96}
    want = ask(checkpoint, PROMPTS, [*[LONG] * 3, last], **engine)
    found = ask(checkpoint, PROMPTS, [*[LONG] * 3, last], **engine, num_gpu_blocks_override=12)
    assert want["preemptions"] == 0 < found["preemptions"]
    assert found["tokens"] == want["tokens"]
    for one, other in zip(found["prompt"], want["prompt"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert [len(x) for x in found["prompt"]] == [0, 0, 0, 0 if drafts else len(PROMPTS[3]) - 1]


@pytest.mark.parametrize("ahead", [True, False], ids=["scheduled ahead", "a step at a time"])
def test_requests_continue_when_the_prefix_cache_is_reset(checkpoint, ahead):
    """A token that is still being computed when a request restarts is computed again."""
    engine = {"async_scheduling": ahead}
    want = ask(checkpoint, PROMPTS, [LONG] * 4, **engine)
    found = ask(checkpoint, PROMPTS, [LONG] * 4, (2, 3, 12, 13, 25), **engine)
    assert want["preemptions"] == 0 < found["preemptions"]
    assert found["tokens"] == want["tokens"]


def test_a_prompt_is_prefilled_while_others_decode_several_tokens_a_step(checkpoint):
    """Three decoding requests leave one token of each step to the last prompt."""
    requests = [*[LONG] * 3, {**LONG, "prompt_logprobs": 0}]
    engine = {"async_scheduling": False, "max_num_batched_tokens": 4}
    several = {"enable_continue_decode": True, "max_decode_steps": 4}
    want = ask(checkpoint, PROMPTS, requests, **engine)
    found = ask(checkpoint, PROMPTS, requests, **engine, additional_config=several)
    assert found["tokens"] == want["tokens"]
    for one, other in zip(found["prompt"], want["prompt"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert [len(x) for x in found["prompt"]] == [0, 0, 0, len(PROMPTS[3]) - 1]


def test_each_request_gets_its_own_grammar(checkpoint):
    """With 12 requests, the ids "10" and "11" are sorted before "2"."""
    prompts = [[n + 3] for n in range(12)]
    requests = [{"choice": [f"{n + 20}"]} if n % 3 else LONG for n in range(12)]
    found = ask(checkpoint, prompts, requests, max_num_seqs=12)["tokens"]
    for n, tokens in enumerate(found):
        if n % 3:
            text = tokens[:-1] if tokens[-1] == SMALL["eos_token_id"] else tokens
            assert "".join(map(str, text)) == f"{n + 20}"  # by one token, or two
        else:
            assert len(tokens) == 40


def test_speculative_decoding_keeps_greedy_requests_greedy_among_sampled_ones(checkpoint):
    """Draft tokens come from the request's own text; some are accepted."""
    prompts = [prompt[:9] * 3 for prompt in PROMPTS]
    greedy = [LONG] * 4
    mixed = [LONG, {**LONG, "temperature": 1.0}, LONG, {**LONG, "temperature": 0.5, "top_k": 3}]
    drafts = {"speculative_config": DRAFTS}
    want = ask(checkpoint, prompts, greedy)["tokens"]
    assert ask(checkpoint, prompts, greedy, **drafts)["tokens"] == want
    found = ask(checkpoint, prompts, mixed, **drafts)["tokens"]
    assert found[0] == want[0]
    assert found[2] == want[2]
    assert found[1] != want[1]
    assert all(len(tokens) == 40 for tokens in found)
