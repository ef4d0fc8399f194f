"""Requests of all kinds to sglang-jax servers with jattn: each gets its output, or is refused.

Needs what `tests/integrations/test_sglang_jax.py` needs:

    pytest -m hosts tests/integrations/test_sglang_jax_requests.py
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import re
import time

import numpy as np
import pytest

from tests.support import numpy_model
from tests.support.sglang_host import COUNT, ask, judged, post, prompts, server, stream

pytestmark = [pytest.mark.hosts]
if not importlib.util.find_spec("sgl_jax"):
    pytestmark.append(pytest.mark.skip(reason="needs sglang-jax: pip install 'jattn[sglang]'"))

VOCABULARY = 320


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A model whose tokens are bytes."""
    judge = judged(
        tmp_path_factory.mktemp("letters"), {**numpy_model.QWEN3, "vocab_size": VOCABULARY}
    )
    numpy_model.save_letters(judge.folder)
    return judge


@pytest.fixture(scope="module")
def address(letters, tmp_path_factory):
    """The address of a server of that model, which all tests share."""
    with server(letters.folder, tmp_path_factory.mktemp("log"), "--page-size", "16") as found:
        yield found


LIKELY, PICKED = 3, [5, 6, 319]
KINDS = [  # what requests that share batches ask for
    {},
    {"return_logprob": True},
    {"return_logprob": True, "logprob_start_len": 0},
    {"return_logprob": True, "top_logprobs_num": LIKELY},
    {"return_logprob": True, "logprob_start_len": 3, "token_ids_logprob": PICKED},
    {},
    {"return_logprob": True, "max_new_tokens": 56},
    {"return_logprob": True, "max_new_tokens": 0, "logprob_start_len": 0},
]


def check_logprobs(judge, prompt: list[int], fields: dict, answer: dict) -> None:
    """Check log-probabilities, one per token of the output and, if asked for, of the prompt."""
    tokens, found = answer["output_ids"], answer["meta_info"]
    assert len(tokens) == found["completion_tokens"] == fields.get("max_new_tokens", COUNT)
    if "return_logprob" not in fields:
        assert not any("logprobs" in name for name in found)
        return
    table = numpy_model.normalized(numpy_model.logits(judge.config, judge.weights, prompt + tokens))

    def check(entries: list, wanted: list[int], first: int) -> None:
        """Check entries for tokens from position `first` on, each predicted by the one before."""
        assert [token for _, token, _ in entries] == wanted
        exact = [table[first + i - 1, token] for i, token in enumerate(wanted)]
        np.testing.assert_allclose([value for value, *_ in entries], exact, atol=1e-3)

    check(found["output_token_logprobs"], tokens, len(prompt))
    start = fields.get("logprob_start_len")
    if start is not None:
        entries = found["input_token_logprobs"]
        assert [entries[0][0], entries[0][1]] == [None, prompt[start]]
        check(entries[1:], prompt[start + 1 :], start + 1)
    if "top_logprobs_num" in fields:
        assert len(found["output_top_logprobs"]) == len(tokens)
        rows = table[len(prompt) - 1 :]
        for row, entries in zip(rows, found["output_top_logprobs"], strict=False):
            assert [token for _, token, _ in entries] == np.argsort(-row)[:LIKELY].tolist()
    if "token_ids_logprob" in fields:
        picked = [*found["input_token_ids_logprobs"][1:], *found["output_token_ids_logprobs"]]
        assert len(picked) == len(prompt) - start - 1 + len(tokens)
        for row, entries in zip(table[start:], picked, strict=False):
            assert [token for _, token, _ in entries] == PICKED
            np.testing.assert_allclose([value for value, *_ in entries], row[PICKED], atol=1e-3)


@pytest.mark.parametrize(
    ("devices", "flags"),
    [
        (1, ()),
        (1, ("--disable-overlap-schedule",)),
        (2, ("--tp-size", "2", "--dp-size", "2")),
    ],
    ids=["ahead", "not ahead", "two devices"],
)
def test_each_request_gets_its_own_logprobs(letters, request, tmp_path, devices, flags):
    """All kinds run at once, some with prompts of several chunks, and again in another order."""
    if flags:
        context = server(letters.folder, tmp_path, "--page-size", "16", *flags, devices=devices)
        found = context.__enter__()
        request.addfinalizer(lambda: context.__exit__(None, None, None))
    else:
        found = request.getfixturevalue("address")
    given = prompts()
    for turn in (0, 2):
        texts = [given[(i + turn) % len(given)] for i in range(len(KINDS))]
        with concurrent.futures.ThreadPoolExecutor(len(KINDS)) as threads:
            asked = [
                threads.submit(ask, found, input_ids=text, **fields)
                for text, fields in zip(texts, KINDS, strict=True)
            ]
        for text, fields, one in zip(texts, KINDS, asked, strict=True):
            status, answer = one.result()
            assert status == 200, answer
            check_logprobs(letters, text, fields, answer)


def test_each_chunk_of_a_stream_has_the_logprobs_so_far(letters, address):
    for fields in (KINDS[1], KINDS[3]):
        parts = stream(address, input_ids=prompts()[1], **fields)
        for part in parts:
            count = len(part["output_ids"])
            assert len(part["meta_info"]["output_token_logprobs"]) == count
        check_logprobs(letters, prompts()[1], fields, parts[-1])


def test_several_samples_each_have_logprobs(letters, address):
    """The host first requests an empty output, to put the prompt into its cache."""
    fields = KINDS[1]
    status, answers = ask(address, n=2, **fields)
    assert (status, len(answers)) == (200, 2), answers
    for answer in answers:
        check_logprobs(letters, prompts()[0], fields, answer)


def test_an_output_ends_with_a_stop_token_that_its_request_names(letters, address):
    token = letters.tokens[0][4]
    fields = {"ignore_eos": True, "stop_token_ids": [token], "no_stop_trim": True}
    answer = ask(address, **fields)[1]
    assert answer["output_ids"] == letters.tokens[0][: letters.tokens[0].index(token) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


def test_openai_clients_get_logprobs(address):
    body = {"model": "x", "prompt": prompts()[1], "max_tokens": 4, "temperature": 0}
    for count in (0, 2):
        status, answer = post(address, "v1/completions", {**body, "logprobs": count})
        assert status == 200, answer
        found = answer["choices"][0]["logprobs"]
        assert len(found["token_logprobs"]) == 4
        # The keys are texts, and bytes that are not characters share one.
        assert len(found["top_logprobs"]) == min(4, 4 * count)
        assert all(0 < len(entry) <= count for entry in found["top_logprobs"])


LATE = {  # requests that the scheduler refuses
    "a long prompt": {"input_ids": (prompts()[2] * 4)[:255], "max_new_tokens": None},
    "a start past the prompt": {"return_logprob": True, "logprob_start_len": 9999},
}


@pytest.mark.parametrize("name", LATE)
def test_requests_that_the_scheduler_refuses_do_not_crash_it(letters, address, name):
    """Unpatched, it crashes if the output has no length limit, or else waits for room for it."""
    fields = {"max_new_tokens": None, **LATE[name]}
    status, answer = ask(address, **fields)
    assert status == 400, answer
    assert ask(address)[1]["output_ids"] == letters.tokens[0]


REFUSED = {  # fields of a request, and the error
    "no prompt": ({"input_ids": []}, "input_ids"),
    "no text": ({"text": ""}, "input_ids (text, prompt): no tokens"),
    "a token id that does not exist": ({"input_ids": [5, 320]}, "input_ids (prompt): with 320"),
    "a negative token": ({"input_ids": [5, -3]}, "input_ids (prompt): with -3"),
    "a token of 33 bits": ({"input_ids": [2**32]}, "input_ids (prompt): with 4294967296"),
    "a start before the prompt": (
        {"return_logprob": True, "logprob_start_len": -2},
        "logprob_start_len: -2, but must be at least 0",
    ),
    "routed experts": ({"return_routed_experts": True}, "return_routed_experts: given"),
    "a large top_k": ({"top_k": 2**31, "temperature": 1.0}, "top_k: 2147483648"),
    "a temperature beyond floats": ({"temperature": 10**400}, "temperature: 1000"),
    "a large minimum length": ({"min_new_tokens": 2**31, "max_new_tokens": None}, "min_new_tokens"),
    "a bootstrap room": ({"bootstrap_room": 1}, "bootstrap_room: 1, but must be left out"),
    "an adapter": ({"lora_id": "x"}, "lora_id: x, but must be left out"),
    "several keys": ({"extra_key": ["x"]}, "extra_key: ['x'], but must be a string"),
    "several starts": ({"logprob_start_len": [0]}, "logprob_start_len: [0], but must be a whole"),
    "several request ids": ({"rid": ["a"]}, "rid: ['a'], but must be a string"),
    "an interval in words": ({"stream_interval": "5"}, "stream_interval: '5', but must be"),
}


def test_requests_that_would_crash_the_scheduler_are_refused(letters, address):
    for name, (fields, message) in REFUSED.items():
        status, answer = ask(address, **fields)
        assert (status, message in str(answer)) == (400, True), (name, status, answer)
    for path in ("open_session", "close_session"):
        body = {"request_id": "a", "session_id": "a"}
        status, answer = post(address, path, body)
        assert (status, f"/{path}: called" in str(answer)) == (400, True), answer
    for path in ("release_memory_occupation", "resume_memory_occupation"):
        status, answer = post(address, path, {"request_id": "a", "memory_size": 1})
        assert (status, f"/{path}: called" in str(answer)) == (400, True), answer
    assert ask(address)[1]["output_ids"] == letters.tokens[0]


def test_a_request_id_in_use_is_refused(letters, address):
    """Its first request completes; then the id is free, and no state of it is left."""
    regex = "(a😀){20}"
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = list(
            threads.map(
                lambda _: ask(address, rid="name", regex=regex, max_new_tokens=150), range(2)
            )
        )
    found += [ask(address, rid="name", regex=regex, max_new_tokens=150) for _ in range(2)]
    assert sorted(status for status, _ in found) == [200, 200, 200, 400]
    for status, answer in found:
        if status == 200:
            assert re.fullmatch(regex, answer["text"])
        else:
            assert "rid: name, but must be unused: the host" in str(answer)


def test_characters_of_several_tokens_are_sent_whole(address):
    """With streaming and without it, when the host still decodes every 50 tokens."""
    regex, fields = "(漢😀){12}", {"max_new_tokens": 150}
    count = 12 * len("漢😀".encode())
    parts = stream(address, regex=regex, **fields)
    for part in parts:
        assert re.fullmatch("(漢😀)*漢?", part["text"]), part
    whole = ask(address, regex=regex, **fields)[1]
    for answer in (parts[-1], whole):
        assert re.fullmatch(regex, answer["text"]), answer
        assert len(answer["output_ids"]) == count


def test_special_tokens_are_shown_to_requests_that_ask(address):
    """It does not matter which request comes first in a batch. Outputs end with a special token."""
    shown = [True, False] * 4
    with concurrent.futures.ThreadPoolExecutor(len(shown)) as threads:
        found = list(
            threads.map(
                lambda show: ask(
                    address,
                    regex="[xy]{9}",
                    ignore_eos=False,
                    no_stop_trim=True,
                    skip_special_tokens=not show,
                    max_new_tokens=50,
                ),
                shown,
            )
        )
    for show, (_, answer) in zip(shown, found, strict=True):
        assert re.fullmatch("[xy]{9}" + ("</s>" if show else ""), answer["text"]), answer


def test_requests_that_are_aborted_in_the_queue_are_forgotten(letters, address):
    """A pause that aborts all requests completes, and their clients get responses."""
    with concurrent.futures.ThreadPoolExecutor(40) as threads:
        asked = [threads.submit(ask, address, max_new_tokens=230) for _ in range(40)]
        time.sleep(0.7)
        assert post(address, "pause_generation", {"mode": "abort"})[0] == 200
        assert post(address, "continue_generation", {})[0] == 200
        reasons = [one.result()[1]["meta_info"]["finish_reason"] for one in asked]
    assert "Abort before prefill" in [reason.get("message") for reason in reasons]
    assert ask(address)[1]["output_ids"] == letters.tokens[0]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_requests_continue_after_a_pause(letters, address, mode):
    """The pause may come after prefill or in the middle of outputs."""
    count, texts = 40, [prompt[:40] for prompt in prompts()]
    want = [numpy_model.greedy(letters.config, letters.weights, text, count) for text in texts]
    with concurrent.futures.ThreadPoolExecutor(len(texts)) as threads:
        for turn in range(8):
            asked = [
                threads.submit(ask, address, input_ids=text, max_new_tokens=count) for text in texts
            ]
            time.sleep(0.01 + 0.01 * turn)
            assert post(address, "pause_generation", {"mode": mode})[0] == 200
            time.sleep(0.3)
            assert post(address, "continue_generation", {})[0] == 200
            assert [one.result()[1]["output_ids"] for one in asked] == want
