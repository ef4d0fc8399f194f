"""Requests that share a batch of sglang-jax with jattn, also with speculative decoding.

Each gets the output that it would get alone.

Needs what `tests/integrations/test_sglang_jax.py` needs:

    pytest -m hosts tests/integrations/test_sglang_jax_batches.py
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import re

import numpy as np
import pytest

from tests.support import numpy_model, sglang_drafts
from tests.support.sglang_host import COUNT, ask, judged, prompts, run, server

pytestmark = [pytest.mark.hosts]
if not importlib.util.find_spec("sgl_jax"):
    pytestmark.append(pytest.mark.skip(reason="needs sglang-jax: pip install 'jattn[sglang]'"))

SAMPLED = {"temperature": 1.0, "top_k": 20}
CHAINS = {
    "speculative_algorithm": "EAGLE3",
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_num_steps": 3,
}
BLOCKS = {
    "grammar_backend": "none",
    "speculative_algorithm": "DFLASH",
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
    "speculative_num_steps": 1,
}


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    """A model with an EAGLE3 draft model, and the settings of an engine with both."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    judge = sglang_drafts.drafted(target, draft)
    return judge, {"page_size": 16, "speculative_draft_model_path": str(draft), **CHAINS}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """The same with DFLASH, whose draft tokens see each other and keys made of hidden states."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    judge = sglang_drafts.drafted_in_blocks(target, draft)
    return judge, {"page_size": 16, "speculative_draft_model_path": str(draft), **BLOCKS}


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("kind", ["chains", "blocks"])
def test_draft_models_change_no_token(request, kind, overlaps):
    """Many draft tokens are accepted. One output ends where it should, in the middle of a step."""
    judge, engine = request.getfixturevalue(kind)
    # The second output ends at its own stop token, before its maximum length.
    stops = [{}, {"ignore_eos": False, "stop_token_ids": [judge.tokens[1][COUNT - 2]]}, {}, {}, {}]
    assert not any(2 in tokens for tokens in judge.tokens)
    want = list(judge.tokens)
    want[1] = want[1][: want[1].index(want[1][COUNT - 2]) + 1]
    found = run(
        judge.folder,
        sampling=stops,
        **engine,
        disable_overlap_schedule=not overlaps,
        decode_log_interval=1,
        log_level="info",
        said=r"accept-len (1\.[2-9]|[2-9])",
    )
    assert [tokens for tokens, _ in found] == want


def test_speculative_decoding_keeps_greedy_requests_greedy_among_sampled_ones(chains):
    judge, engine = chains
    sampling = [SAMPLED if n % 2 else {} for n in range(len(prompts()))]
    found = run(judge.folder, sampling=sampling, **engine)
    for n, (tokens, _) in enumerate(found):
        assert len(tokens) == COUNT
        assert (tokens == judge.tokens[n]) == (not sampling[n])


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return judged(tmp_path_factory.mktemp("qwen3"), numpy_model.QWEN3)


@pytest.mark.parametrize("devices", [{}, {"tp_size": 2}, {"tp_size": 2, "dp_size": 2}])
def test_greedy_requests_stay_greedy_among_sampled_ones(qwen3, devices):
    sampling = [{**SAMPLED, "top_p": 0.9} if n % 2 else {} for n in range(len(prompts()))]
    count = devices.get("tp_size", 1)
    found = run(qwen3.folder, count, sampling=sampling, page_size=16, **devices)
    for n, (tokens, _) in enumerate(found):
        assert (tokens == qwen3.tokens[n]) == (not sampling[n])


def test_top_p_is_applied_after_the_temperature(qwen3):
    """All sampled tokens are within `top_p` at that temperature, and some are not at 1."""
    prompt, temperature, top_p = prompts()[2], 3.0, 0.5
    logits = numpy_model.logits(qwen3.config, qwen3.weights, prompt)[-1]
    kept = {}
    for divisor in (1.0, temperature):
        order = np.argsort(-logits)
        weights = np.exp((logits[order] - logits.max()) / divisor)
        before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
        kept[divisor] = {int(token) for token in order[before < top_p]}
    sampling = [{"temperature": temperature, "top_p": top_p}] * 128
    texts = [prompt] * len(sampling)
    found = run(qwen3.folder, texts=texts, count=1, sampling=sampling, page_size=1)
    drawn = {tokens[0] for tokens, _ in found}
    assert drawn <= kept[temperature]
    assert drawn - kept[1.0]


def test_more_requests_than_a_chunk_has_tokens_wait_their_turn(qwen3):
    """The host compiles for at most that many requests at once."""
    texts = (prompts() * 6)[:28]
    found = run(
        qwen3.folder,
        texts=texts,
        page_size=16,
        chunked_prefill_size=16,
        max_running_requests=28,
        max_total_tokens=4096,
        said="--max-running-requests is 16",
        log_level="info",
    )
    want = (qwen3.tokens * 6)[:28]
    assert [tokens for tokens, _ in found] == want


def test_penalties_follow_the_tokens_so_far(qwen3):
    fields = {"presence_penalty": 2.0, "frequency_penalty": 1.0}
    found = run(
        qwen3.folder,
        sampling=[fields] * len(prompts()),
        page_size=16,
        disable_overlap_schedule=True,
    )
    assert [tokens for tokens, _ in found] == [
        penalized(qwen3, prompt, COUNT, fields) for prompt in prompts()
    ]


def penalized(judge, prompt: list[int], count: int, fields: dict[str, float]) -> list[int]:
    """Return a greedy output with penalties."""
    said: list[int] = []
    for _ in range(count):
        logits = numpy_model.logits(judge.config, judge.weights, prompt + said)[-1].copy()
        for token in said:
            logits[token] -= fields["frequency_penalty"]
        for token in set(said):
            logits[token] -= fields["presence_penalty"]
        said.append(int(logits.argmax()))
    return said


PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.2}


@pytest.mark.parametrize(
    ("overlaps", "fields"),
    [(True, {}), (False, {}), (False, PENALTIES)],
    ids=["ahead", "not ahead", "penalties"],
)
def test_retracted_requests_continue_as_if_they_were_not(tmp_path, overlaps, fields):
    """The pages of five outputs of 60 tokens do not fit at once.

    The host reserves room for a whole output if no token can end it, so here an EOS token may.
    """
    config = {**numpy_model.QWEN3, "eos_token_id": 94}
    judge, count = judged(tmp_path, config), 60
    if fields:
        want = [penalized(judge, prompt, count, fields) for prompt in prompts()]
    else:
        want = [numpy_model.greedy(config, judge.weights, prompt, count) for prompt in prompts()]
    assert not any(94 in tokens for tokens in want)
    found = run(
        judge.folder,
        count=count,
        sampling=[{"ignore_eos": False, **fields}] * len(want),
        page_size=16,
        max_total_tokens=288,
        schedule_conservativeness=0.05,
        said="Retract requests",
        log_level="warning",
        disable_overlap_schedule=not overlaps,
        disable_radix_cache=True,
    )
    assert [tokens for tokens, _ in found] == want


def flags(engine: dict[str, object]) -> list[str]:
    """Return an engine's settings as command-line flags of a server."""
    return [word for name, x in engine.items() for word in (f"--{name.replace('_', '-')}", str(x))]


def test_a_sampled_request_with_dflash_is_refused_without_harm_to_others(blocks, tmp_path):
    """The host supports no sampled requests with DFLASH, and crashes if a batch has one."""
    judge, engine = blocks
    with (
        server(judge.folder, tmp_path, "--skip-tokenizer-init", *flags(engine)) as address,
        concurrent.futures.ThreadPoolExecutor(4) as threads,
    ):
        fields = [{}, {"temperature": 1.0}, {}, {"temperature": 0.7, "top_k": 5}] * 3
        for given, (status, answer) in zip(
            fields, threads.map(lambda one: ask(address, **one), fields), strict=True
        ):
            if given:
                assert (status, "temperature: " in str(answer)) == (400, True), answer
            else:
                assert answer["output_ids"] == judge.tokens[0], answer


LONG, SHORT = "[ab]{9}c", "[xyz]{3}"
WRONG = {"regex": "(", "json_schema": '{"type": "nothing"}', "ebnf": "start: ["}


def test_each_request_follows_its_own_grammar(tmp_path):
    """Several requests share a grammar, others have another one or none, and some are invalid."""
    config = {**numpy_model.QWEN3, "vocab_size": 320}
    judge = judged(tmp_path, config)
    numpy_model.save_letters(judge.folder)
    fields = [{"regex": LONG}, {}, {"regex": SHORT}, {"regex": LONG}, {"regex": LONG}, {}]
    fields += [{"regex": SHORT}, {"regex": LONG}]
    with (
        server(judge.folder, tmp_path, "--page-size", "16") as address,
        concurrent.futures.ThreadPoolExecutor(len(fields)) as threads,
    ):
        for _ in range(3):
            for name, grammar in WRONG.items():
                status, answer = ask(address, **{name: grammar})
                assert (status, "nvalid grammar" in str(answer)) == (400, True), answer
            found = list(threads.map(lambda one: ask(address, ignore_eos=not one, **one), fields))
            for given, (status, answer) in zip(fields, found, strict=True):
                assert status == 200, answer
                if given:
                    assert re.fullmatch(given["regex"], answer["text"]), answer
                else:
                    assert answer["output_ids"] == judge.tokens[0], answer


def test_requests_that_the_host_would_not_follow_are_refused_alone(chains, tmp_path):
    """Each gets HTTP 400. With draft tokens, log-probabilities would crash the scheduler."""
    judge, engine = chains
    with server(judge.folder, tmp_path, "--skip-tokenizer-init", *flags(engine)) as address:
        for fields in (
            {"return_logprob": True},
            {"logit_bias": {"5": 2.0}},
            {"repetition_penalty": 1.5},
            {"min_p": 0.5, "temperature": 1.0},
            {"sampling_seed": 7, "temperature": 1.0},
            {"frequency_penalty": 1.0},
            {"presence_penalty": 1.0},
            {"min_new_tokens": 3},
            {"regex": LONG},
        ):
            status, answer = ask(address, **fields)
            assert (status, next(iter(fields)) in str(answer)) == (400, True), answer
            status, answer = ask(address)
            assert status == 200
            assert answer["output_ids"] == judge.tokens[0]
