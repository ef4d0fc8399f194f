"""Requests that jattn refuses for tpu-inference, with a stand-in for the host.

`tests/integrations/test_vllm_requests.py` sends such requests to the real host.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from jattn.integrations import tpu_inference
from tests.support import stand_in_host

host = stand_in_host.host  # the fixture

CONSUMER = SimpleNamespace(kv_connector="TPUConnector", is_kv_producer=False)
PRODUCER = SimpleNamespace(kv_connector="TPUConnector", is_kv_producer=True)
PULLED = {"uuid": 5, "remote_block_ids": [1], "remote_host": "10.0.0.1", "remote_port": 9100}
DRAFTS = {"speculative_config": {"method": "ngram"}}
REFUSED = {  # fields of a request, its engine's settings, and the error
    "log-probabilities with speculative decoding": (
        {"logprobs": 1}, DRAFTS,
        "logprobs: 1, but must be left out with --speculative-config",
    ),
    "prompt log-probabilities with speculative decoding": (
        {"prompt_logprobs": 0}, DRAFTS,
        "prompt_logprobs: 0, but must be left out with --speculative-config",
    ),
    "prompt log-probabilities with images": (
        {"prompt_logprobs": 2}, {"is_multimodal_model": True},
        "prompt_logprobs: 2, but must be left out for a multimodal model",
    ),
    "log-probabilities of no tokens": ({"logprobs": 0}, {}, "logprobs: 0, but must be at least 1"),
    "log-probabilities of all tokens": (
        {"logprobs": -1}, {}, "logprobs: -1, but must be at least 1",
    ),
    "log-probabilities of given tokens": (
        {"logprob_token_ids": [5, 6]}, {},
        "logprob_token_ids: list [5, 6], but must be left out",
    ),
    "allowed tokens": (
        {"allowed_token_ids": [5, 6]}, {},
        "allowed_token_ids: list [5, 6], but must be left out",
    ),
    "biases": (
        {"logit_bias": {5: 0.0, 6: -1.0}}, {},
        "logit_bias: dict {5: 0.0, 6: -1.0}, but must be left out: the host would ignore it",
    ),
    "bad words": ({"bad_words": ["no"]}, {}, "bad_words: list ['no'], but must be left out"),
    "min_p": (
        {"min_p": 0.1}, {},
        "min_p: 0.1, but must be 0 (--generation-config vllm, if the request did not set it)",
    ),
    "presence penalty": ({"presence_penalty": -0.5}, {}, "presence_penalty: -0.5, but must be 0 ("),
    "frequency penalty": (
        {"frequency_penalty": 2.0}, {}, "frequency_penalty: 2.0, but must be 0 (",
    ),
    "repetition penalty": (
        {"repetition_penalty": 1.05}, {}, "repetition_penalty: 1.05, but must be 1 (",
    ),
    "a minimum length": (
        {"min_tokens": 3}, {},
        "min_tokens: 3, but must be 0, or given with ignore_eos and without stop_token_ids",
    ),
    "a minimum length with a stop token": (
        {"min_tokens": 3, "ignore_eos": True, "stop_token_ids": [7]}, {},
        "min_tokens: 3, but must be 0",
    ),
    "a seed": ({"seed": 7}, {}, "seed: 7, but must be left out: the host samples only with"),
    "a grammar with speculative decoding": (
        {"structured_outputs": "a choice"}, DRAFTS,
        "structured_outputs: given (or response_format, or a tool_choice), but must be left out",
    ),
    "a prompt prefilled elsewhere, without saying where": (
        {"extra_args": {"kv_transfer_params": {"uuid": 5}}}, {"kv_transfer_config": CONSUMER},
        "kv_transfer_params: dict {'uuid': 5}, but must be those that the prefill server",
    ),
    "a thinking budget": (
        {"thinking_token_budget": 9}, {},
        "thinking_token_budget: 9, but must be left out",
    ),
}  # fmt: skip
SERVED = {
    "nothing": ({}, DRAFTS),
    "log-probabilities": ({"logprobs": 1, "prompt_logprobs": 1}, {}),
    "prompt log-probabilities of all tokens": ({"prompt_logprobs": -1}, {}),
    "log-probabilities with images": ({"logprobs": 1}, {"is_multimodal_model": True}),
    "settings that change nothing": (
        {"logit_bias": {5: 0.0}, "bad_words": [], "stop_token_ids": [7]}, {},
    ),
    "a prompt prefilled elsewhere": (
        {"extra_args": {"kv_transfer_params": PULLED}}, {"kv_transfer_config": CONSUMER},
    ),
    "a prompt prefilled here": (
        {"extra_args": {"kv_transfer_params": {}}}, {"kv_transfer_config": CONSUMER},
    ),
    "a prompt to prefill for another server": (
        {"extra_args": {"kv_transfer_params": {"do_remote_decode": True}}},
        {"kv_transfer_config": PRODUCER},
    ),
    "parameters of another connector": (
        {"extra_args": {"kv_transfer_params": {"uuid": 5}}},
        {"kv_transfer_config": SimpleNamespace(kv_connector="Another", is_kv_producer=False)},
    ),
    "a grammar": ({"structured_outputs": "a choice"}, {}),
    "a seed for a greedy request": ({"seed": 7, "temperature": 0.0}, {}),
    "a minimum length without stop tokens": (
        {"min_tokens": 3, "ignore_eos": True, "stop_token_ids": []}, {},
    ),
}  # fmt: skip


def ask(fields: dict, settings: dict, backend: str = "JATTN") -> object:
    """Let vLLM validate a request, and return its result."""
    config = stand_in_host.config(**settings)
    config.backend = SimpleNamespace(name=backend)
    processor = sys.modules["vllm.v1.engine.input_processor"].InputProcessor(config)
    return processor._validate_params(stand_in_host.Sampling(**fields), ("generate",))


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_the_host_would_not_follow_is_refused_alone(host, name):
    fields, settings, message = REFUSED[name]
    tpu_inference.register()
    wrong = "--attention-backend jattn: 1 wrong argument"
    with pytest.raises(stand_in_host.ValidationError, match=wrong) as error:
        ask(fields, settings)
    assert message in str(error.value)
    assert ask({}, settings) == "a watermark"
    assert ask(fields, settings, "FLASH_ATTN") == "a watermark"  # another engine's


@pytest.mark.parametrize("name", SERVED)
def test_requests_close_to_refused_ones_are_served(host, name):
    tpu_inference.register()
    tpu_inference.register()
    assert ask(*SERVED[name]) == "a watermark"


def test_pooling_requests_are_left_alone(host):
    tpu_inference.register()
    processor = sys.modules["vllm.v1.engine.input_processor"].InputProcessor(None)
    assert processor._validate_params(SimpleNamespace(), ("embed",)) == "a watermark"


def bring(kinds: tuple[str, ...], settings: dict, backend: str = "JATTN", **options: bool) -> None:
    """Let vLLM process a request with inputs of these modalities."""
    config = stand_in_host.config(**settings)
    config.backend = SimpleNamespace(name=backend)
    processor = sys.modules["vllm.v1.engine.input_processor"].InputProcessor(config)
    prompt = {"multi_modal_data": dict.fromkeys(kinds)}
    processor.process_inputs("a", prompt, stand_in_host.Sampling(), ("generate",), **options)


SEEING = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}


def test_a_video_is_refused_where_a_jax_model_would_not_see_it(host, monkeypatch):
    tpu_inference.register()
    bring(("image",), SEEING)
    message = "multi_modal_data: audio and video, but must be of images, or MODEL_IMPL_TYPE=vllm"
    with pytest.raises(stand_in_host.ValidationError, match=message):
        bring(("image", "video", "audio"), SEEING)
    bring(("video",), SEEING, "FLASH_ATTN")
    bring(("video",), {"architectures": ["Qwen3VLForConditionalGeneration"]})
    bring(("video",), {**SEEING, "load_format": "runai_streamer"})
    monkeypatch.setattr(sys.modules["tpu_inference.envs"], "MODEL_IMPL_TYPE", "vllm")
    bring(("video",), SEEING)


def test_a_stream_of_inputs_is_refused(host):
    tpu_inference.register()
    bring((), {}, resumable=False)
    with pytest.raises(stand_in_host.ValidationError, match="prompt: a stream of inputs, but must"):
        bring((), {}, resumable=True)
    bring((), {}, "FLASH_ATTN", resumable=True)
