"""Requests that jattn refuses for sglang-jax, and how others are sampled, with a stand-in.

`tests/integrations/test_sglang_jax_batches.py` sends requests to the real host.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from jattn.integrations import sglang_jax
from tests.support import stand_in_sglang

host = stand_in_sglang.host  # the fixture


DRAFTS = {"speculative_algorithm": "EAGLE3"}
REQUESTS = {  # fields of a request, the engine's settings, and the error
    "log-probabilities with speculative decoding": (
        {"return_logprob": True}, DRAFTS,
        "return_logprob (logprobs): given, but must be left out with --speculative-algorithm",
    ),
    "output log-probabilities with speculative decoding": (
        {"return_output_logprob_only": True}, DRAFTS,
        "return_logprob (logprobs): given, but must be left out",
    ),
    "biases": (
        {"logit_bias": {"5": 1.0}}, {},
        "logit_bias: dict {'5': 1.0}, but must be left out: the host ignores it",
    ),
    "repetition penalty": (
        {"repetition_penalty": 1.1}, {},
        "repetition_penalty: 1.1, but must be 1: the host ignores it",
    ),
    "min_p": (
        {"min_p": 0.1},
        {},
        "min_p: 0.1, but must be 0: the host samples tokens that min_p excludes",
    ),
    "a seed": (
        {"sampling_seed": 7}, {},
        "sampling_seed (seed): 7, but must be left out, or --enable-deterministic-sampling given",
    ),
    "frequency penalty with speculative decoding": (
        {"frequency_penalty": 0.5}, DRAFTS,
        "frequency_penalty: 0.5, but must be 0 with --speculative-algorithm EAGLE3",
    ),
    "presence penalty with speculative decoding": (
        {"presence_penalty": -0.5}, DRAFTS, "presence_penalty: -0.5, but must be 0 with",
    ),
    "a minimum length with speculative decoding": (
        {"min_new_tokens": 3}, DRAFTS, "min_new_tokens: 3, but must be 0 with",
    ),
    "frequency penalty, scheduled ahead": (
        {"frequency_penalty": 0.5}, {},
        "frequency_penalty: 0.5, but must be 0, or --disable-overlap-schedule given",
    ),
    "presence penalty, scheduled ahead": (
        {"presence_penalty": -0.5}, {},
        "presence_penalty: -0.5, but must be 0, or --disable-overlap-schedule given",
    ),
    "a seed of 33 bits": (
        {"sampling_seed": 2**31, "top_k": 1}, {"enable_deterministic_sampling": True},
        "sampling_seed (seed): 2147483648, but must be from -2147483648 to 2147483647",
    ),
    "several samples with one seed": (
        {"n": 2}, {"enable_deterministic_sampling": True},
        "n: 2, but must be 1 with --enable-deterministic-sampling",
    ),
    "more top tokens than there are": (
        {"top_logprobs_num": 97}, {},
        "top_logprobs_num (logprobs, top_logprobs): 97, but must be from 0 to 96",
    ),
    "a token id that does not exist": (
        {"token_ids_logprob": [95, 96]}, {},
        "token_ids_logprob: [95, 96], but must be tokens from 0 to 95",
    ),
    "a sampled request with DFLASH": (
        {"temperature": 0.7}, {"speculative_algorithm": "DFLASH"},
        "temperature: 0.7, but must be 0 (or top_k 1) with --speculative-algorithm DFLASH",
    ),
    "no prompt": ({"input_ids": []}, {}, "input_ids (text, prompt): no tokens, but must be one"),
    "a token past the vocabulary": (
        {"input_ids": [3, 96]}, {},
        "input_ids (prompt): with 96, but must be tokens from 0 to 95: the host would read others",
    ),
    "a negative token": ({"input_ids": [-1, 3]}, {}, "input_ids (prompt): with -1, but must be"),
    "a start before the prompt": (
        {"logprob_start_len": -2}, {}, "logprob_start_len: -2, but must be at least 0, or -1",
    ),
    "several starts": (
        {"logprob_start_len": [0]}, {}, "logprob_start_len: [0], but must be a whole number",
    ),
    "several numbers of top tokens": (
        {"top_logprobs_num": [1]}, {},
        "top_logprobs_num (logprobs, top_logprobs): [1], but must be a whole number",
    ),
    "several request ids": ({"rid": ["a"]}, {}, "rid: ['a'], but must be a string"),
    "several keys": ({"extra_key": ["a"]}, {}, "extra_key: ['a'], but must be a string"),
    "several devices": ({"dp_rank": [0]}, {"dp_size": 2}, "dp_rank: [0], but must be a whole"),
    "an interval in words": (
        {"stream_interval": "5"}, {}, "stream_interval: '5', but must be a whole number",
    ),
    "a negative interval": (
        {"stream_interval": -5}, {}, "stream_interval: -5, but must be at least 1",
    ),
    "a large top_k": ({"top_k": 2**31}, {}, "top_k: 2147483648, but must be at most 2147"),
    "a temperature beyond floats": (
        {"temperature": 10**400}, {}, "temperature: 1000",
    ),
    "a temperature of NaN": (
        {"temperature": float("nan")}, {}, "temperature: nan, but must be at most 3.4e+38",
    ),
    "a minimum length of 33 bits": (
        {"min_new_tokens": 2**31}, {}, "min_new_tokens (min_tokens): 2147483648, but must be at m",
    ),
    "routed experts": (
        {"return_routed_experts": True}, {},
        "return_routed_experts: given, but must be left out, or --enable-return-routed-experts",
    ),
    "stop strings without a tokenizer": (
        {"stop_strs": ["x"]}, {"skip_tokenizer_init": True},
        "stop: ['x'], but must be left out with --skip-tokenizer-init",
    ),
    "a minimum length without a tokenizer": (
        {"min_new_tokens": 1}, {"skip_tokenizer_init": True},
        "min_new_tokens (min_tokens): 1, but must be 0 with --skip-tokenizer-init",
    ),
    "a bootstrap room": (
        {"bootstrap_room": 1}, {},
        "bootstrap_room: 1, but must be left out with --disaggregation-mode null",
    ),
    "an adapter by its id": (
        {"lora_id": "1"}, {"enable_lora": True},
        "lora_id: 1, but must be left out, and lora_path given",
    ),
    **{
        f"{name} with speculative decoding": (
            {name: "x"}, DRAFTS,
            f"{name}: given, but must be left out with --speculative-algorithm EAGLE3",
        )
        for name in sglang_jax.requests.GRAMMARS
    },
    "a grammar with several replicas": (
        {"regex": "x"}, {"dp_size": 2}, "regex: given, but must be left out with --dp-size over 1",
    ),
}  # fmt: skip
TAKEN = {
    "log-probabilities": ({"return_logprob": True}, {}),
    "speculative decoding": ({}, DRAFTS),
    "a sampled request with EAGLE3": ({"temperature": 0.7}, DRAFTS),
    "a greedy request with DFLASH": (
        {"top_k": 1},
        {"speculative_algorithm": "DFLASH"},
    ),
    "a bias of zero": ({"logit_bias": {"5": 0.0}}, {}),
    "a greedy request": ({"min_p": 0.1, "top_k": 1, "sampling_seed": 7}, {}),
    "a seed": ({"sampling_seed": 7}, {"enable_deterministic_sampling": True}),
    "a grammar": ({"regex": "x"}, {}),
    "penalties": (
        {"frequency_penalty": 0.5, "presence_penalty": 1.0},
        {"disable_overlap_schedule": True},
    ),
    "a minimum length": ({"min_new_tokens": 3}, {}),
    "several samples": ({"n": 2}, {}),
    "several greedy samples": ({"n": 2, "top_k": 1}, {"enable_deterministic_sampling": True}),
    "log-probabilities of all tokens": ({"top_logprobs_num": 96, "token_ids_logprob": [0, 95]}, {}),
    "an adapter": ({"lora_path": "a", "lora_id": "1"}, {"enable_lora": True}),
    "all tokens of the vocabulary": ({"input_ids": list(range(96))}, {}),
    "an image": ({"input_ids": [96], "mm_inputs": {}}, {}),
    "routed experts": ({"return_routed_experts": True}, {"enable_return_routed_experts": True}),
    "a bootstrap room": ({"bootstrap_room": 1}, {"disaggregation_mode": "prefill"}),
    "an interval": ({"stream_interval": 5}, {}),
    "prompt log-probabilities": ({"logprob_start_len": 0}, {}),
}


def ask(host, fields: dict, settings: dict) -> object:
    """Let the host accept or refuse a request, and return what it makes of it."""
    params = {"logit_bias": None, "min_p": 0.0, "repetition_penalty": 1.0, "top_k": 1 << 30}
    params |= {"temperature": 1.0, "n": 1}
    params |= {
        "ignore_eos": False,
        "stop_strs": [],
        "stop_token_ids": None,
        "stream_interval": None,
    }
    params |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "min_new_tokens": 0}
    params |= dict.fromkeys((*sglang_jax.requests.GRAMMARS, "sampling_seed"))
    params |= {name: value for name, value in fields.items() if name in params}
    request = {"return_logprob": False, "return_output_logprob_only": False}
    request |= {"return_routed_experts": False, "input_ids": [1], "rid": "a"}
    request |= dict.fromkeys(("top_logprobs_num", "token_ids_logprob", "lora_path", "lora_id"))
    request |= dict.fromkeys(("bootstrap_room", "dp_rank", "extra_key", "mm_inputs"))
    request |= dict.fromkeys(("logprob_start_len",))
    request |= {name: value for name, value in fields.items() if name in request}
    obj = SimpleNamespace(**request, sampling_params=SimpleNamespace(**params))
    manager = host.TokenizerManager(host.ServerArgs(**settings))
    assert manager._create_tokenized_object(obj, None, [1], mm_inputs=None) is obj
    return obj


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_the_host_would_not_follow_is_refused_alone(host, name):
    fields, settings, message = REQUESTS[name]
    sglang_jax.install()
    with pytest.raises(ValueError, match="1 wrong argument") as error:
        ask(host, fields, settings)
    assert message in str(error.value)
    ask(host, {"top_k": 1}, settings)


@pytest.mark.parametrize("name", TAKEN)
def test_requests_close_to_refused_ones_are_served(host, name):
    sglang_jax.install()
    ask(host, *TAKEN[name])


def test_a_greedy_request_has_logprobs_at_temperature_1(host):
    """The host divides by the temperature only if another request of the batch is sampled."""
    sglang_jax.install()
    assert ask(host, {"top_k": 1, "temperature": 5.0}, {}).sampling_params.temperature == 1
    assert ask(host, {"top_k": 2, "temperature": 5.0}, {}).sampling_params.temperature == 5


def test_a_minimum_length_holds_back_all_stop_tokens(host):
    """The unpatched host holds back only the tokenizer's stop tokens and those of the request."""
    sglang_jax.install()
    assert ask(host, {}, {}).sampling_params.stop_token_ids is None
    assert ask(host, {"min_new_tokens": 3}, {}).sampling_params.stop_token_ids == {2, 7}
    fields = {"min_new_tokens": 3, "stop_token_ids": {5}}
    assert ask(host, fields, {}).sampling_params.stop_token_ids == {2, 5, 7}
    fields |= {"ignore_eos": True}
    assert ask(host, fields, {}).sampling_params.stop_token_ids == {5}


def test_an_adapter_that_the_host_would_ignore_is_refused(host):
    sglang_jax.install()
    with pytest.raises(ValueError, match="lora_path: a, but must be left out, or --enable-lora"):
        ask(host, {"lora_path": "a"}, {})
    serving = host.Serving()
    chat = SimpleNamespace(messages=[], lora_path="a")
    assert serving._validate_request(chat).startswith("lora_path: given, but must be left out of")
    chat.lora_path = None
    assert serving._validate_request(chat) is None


def test_fields_of_openais_api_that_the_host_ignores_are_refused(host):
    sglang_jax.install()
    serving = host.Serving()
    said = serving._validate_request(SimpleNamespace(suffix="x"))
    assert said.startswith("suffix: given, but must be left out")
    said = serving._validate_request(SimpleNamespace(best_of=3, n=2))
    assert said.startswith("best_of: 3, but must be n (2), or left out")
    assert serving._validate_request(SimpleNamespace(best_of=2, n=2, suffix="")) is None
    said = serving._validate_request(SimpleNamespace(session_params={"id": "a"}))
    assert said.startswith("session_params: given, but must be left out")
    for name in ("max_tokens", "max_completion_tokens"):
        said = serving._validate_request(SimpleNamespace(**{name: 0}))
        assert said.startswith(f"{name}: 0, but must be at least 1")
        assert serving._validate_request(SimpleNamespace(**{name: 1})) is None


def test_temperatures_come_first_and_greedy_requests_stay_greedy(host):
    """At temperature 4 all four tokens are within top-p; the greedy request has a tie of two."""
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05], [0.1, 0.4, 0.4, 0.1]], np.float32))
    some = (logits, None, np.array([4, 1]), np.full(2, 0.9), None, None)
    args = (*some, np.array([[4.0], [1.0]], np.float32), None, False, None)
    assert stand_in_sglang.choose(args).tolist() == [3, 4]
    sglang_jax.install()
    choose = host.sampler.top_k_top_p_min_p_sampling_from_probs_jax_with_mask
    assert choose(args).tolist() == [4, 1]


def test_seeds_of_openai_clients_reach_the_host(host):
    sglang_jax.install()
    serving = host.Serving()
    assert serving._build_sampling_params(SimpleNamespace(seed=7)) == {"sampling_seed": 7}
    assert serving._build_sampling_params(SimpleNamespace(seed=None)) == {}


def test_hidden_states_are_refused(host):
    sglang_jax.install()
    serving = host.Serving()
    said = serving._validate_request(SimpleNamespace(return_hidden_states=True))
    assert said.startswith("return_hidden_states: true, but must be left out")
    assert serving._validate_request(SimpleNamespace(return_hidden_states=False)) is None
    assert serving._validate_request(SimpleNamespace()) is None
