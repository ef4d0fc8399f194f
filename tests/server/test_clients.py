"""OpenAI's client against this server: everything that both support."""

# ruff: noqa: E402 (a missing package skips the file before the imports below)

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.support import extras

httpx = extras.serve("jinja2")

from examples.engine.http.chat import ChatTemplate
from examples.engine.http.protocol import ServedModel, read_chat, read_completions, seeds_from
from examples.engine.request import Sampling
from examples.text import Subwords
from tests.support import serving as support
from tests.support.serving import MAX_LEN, openai_client, serving, wait_until_idle

TEMPLATE = ChatTemplate(
    {
        "default": "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}"
        "{{ '\\n' }}{% endfor %}"
        "{{ 'assistant: ' if add_generation_prompt }}{{ mood }}"
    }
)
HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "look_up"}}]

pytestmark = pytest.mark.usefixtures("openai")
engine, openai = support.engine, support.openai  # the fixtures


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine, template=TEMPLATE) as address:
        yield address
    wait_until_idle(engine)


@pytest.fixture(scope="module")
def client(url):
    with openai_client(url) as client:
        yield client


def complete(client, prompt="hello", **options):
    options = {"max_tokens": 12, "temperature": 0, **options}
    return client.completions.create(model="tiny", prompt=prompt, **options)


def chat(client, messages=HELLO, **options):
    options = {"max_tokens": 12, "temperature": 0, **options}
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def tokens_of(url, **body) -> list[int]:
    answer = httpx.post(f"{url}/tokenize", json=body).json()
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_LEN)
    return answer["tokens"]


# -- conversations --------------------------------------------------------------------------------


def test_a_conversation_continues_like_its_text(client):
    answer = chat(client)
    (choice,) = answer.choices
    assert (answer.object, choice.message.role) == ("chat.completion", "assistant")
    same = complete(client, "user: hello\nassistant: ")
    assert choice.message.content == same.choices[0].text != ""
    assert choice.finish_reason == "length"
    assert answer.usage == same.usage


def test_messages_stream(client):
    options = dict(n=2, temperature=1, seed=4, stream_options={"include_usage": True})
    whole = chat(client, **{**options, "stream_options": None})
    *parts, last = list(chat(client, stream=True, **options))
    assert last.usage == whole.usage
    for index in range(2):
        mine = [p.choices[0] for p in parts if p.choices[0].index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        text = "".join(choice.delta.content or "" for choice in mine)
        assert text == whole.choices[index].message.content
        assert [choice.finish_reason for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == "length"
    assert {part.object for part in parts} == {"chat.completion.chunk"}


def test_every_kind_of_message_reaches_the_template(client, url):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "9"},
    ]
    text = "look_up;developer: a\nb\nassistant: 7\ntool: 9\nassistant: "
    assert bytes(tokens_of(url, messages=messages, tools=TOOLS)).decode() == text
    answer = chat(client, messages, tools=TOOLS)
    assert answer.usage.prompt_tokens == len(text)
    without = chat(client, messages, tools=TOOLS, tool_choice="none")
    assert without.usage.prompt_tokens == len(text) - len("look_up;")
    more = {"chat_template_kwargs": {"mood": "!"}, "add_generation_prompt": False}
    assert chat(client, extra_body=more).usage.prompt_tokens == len("user: hello\n!")


def test_hints_change_nothing(client):
    hints = {"user": "a", "safety_identifier": "b", "prompt_cache_key": "c", "verbosity": "medium"}
    hints |= {"web_search_options": None, "service_tier": "auto", "store": False}
    assert chat(client, extra_body=hints).choices == chat(client).choices


def test_without_a_limit_a_text_is_as_long_as_fits(client):
    answer = chat(client, max_tokens=None)
    assert answer.usage.total_tokens == MAX_LEN
    assert chat(client, max_tokens=None, max_completion_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages has 0 messages"),
        ({"messages": [1]}, r"messages\[0\] is 1, but must be an object with a role"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is None"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "parts must have the type text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "parts must have the type text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]},
            "tool_calls is .* must be function calls",
        ),
        ({"tools": [1]}, r"tools is \[1\]"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice is 'required'"),
        ({"max_tokens": 999}, f"together they must be at most {MAX_LEN}"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, "together they must be at most"),
        ({"messages": [{"role": "user", "content": "x" * 40_000}]}, "conversation has 400"),
        ({"verbosity": "low"}, "verbosity is 'low', which this server does not"),
        ({"functions": TOOLS}, "functions is .* which this server does not support"),
        ({"mood": "good"}, "mood is not a field this server knows"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs has messages, but"),
    ],
)
def test_what_is_wrong_with_a_conversation_is_reported(client, body, words, openai):
    body = {"messages": HELLO, **body}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            client.chat.completions.create(
                model="tiny", messages=body["messages"], stream=stream, extra_body=body
            )
        assert caught.value.type == "invalid_request_error"


def test_a_model_without_a_template_has_no_conversations(engine, openai):
    with (
        serving(engine, template=None) as address,
        openai_client(address) as client,
        pytest.raises(openai.BadRequestError, match="tiny has no chat template"),
    ):
        chat(client)


# -- models, tokens, errors -----------------------------------------------------------------------


def test_models_are_found_by_name(client, openai):
    (model,) = client.models.list()
    assert model == client.models.retrieve("tiny")
    assert (model.id, model.object, model.max_model_len) == ("tiny", "model", MAX_LEN)
    calls = (
        lambda: client.models.retrieve("acme/none"),
        lambda: client.completions.create(model="none", prompt="x"),
        lambda: client.chat.completions.create(model="none", messages=HELLO),
    )
    for call in calls:
        with pytest.raises(openai.NotFoundError, match="none', but must be 'tiny'") as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_tokenize_and_detokenize_are_inverses(url):
    tokens = tokens_of(url, prompt="héllo")
    assert tokens == list("héllo".encode())
    assert tokens_of(url, prompt="héllo", messages=None, tools=None) == tokens
    answer = httpx.post(f"{url}/detokenize", json={"tokens": tokens})
    assert answer.json() == {"prompt": "héllo"}
    for path, body, words in (
        ("tokenize", {}, "prompt must be a string"),
        ("tokenize", {"prompt": [1]}, "prompt must be a string"),
        ("tokenize", {"prompt": "x", "n": 1}, "n is not a field"),
        ("tokenize", {"prompt": "x", "tools": TOOLS}, "tools belongs to messages, but there are"),
        (
            "tokenize",
            {"prompt": "x", "chat_template_kwargs": {"a": 1}},
            "chat_template_kwargs belongs",
        ),
        (
            "tokenize",
            {"prompt": "x", "add_generation_prompt": False},
            "add_generation_prompt belongs",
        ),
        ("tokenize", {"messages": HELLO, "prompt": "x"}, "prompt belongs to a prompt, but there"),
        (
            "tokenize",
            {"messages": HELLO, "add_special_tokens": True},
            "add_special_tokens belongs to",
        ),
        ("detokenize", {"tokens": [256]}, "integers in 0..255"),
        ("detokenize", {"tokens": 1}, "tokens is 1, but must be a list"),
    ):
        answer = httpx.post(f"{url}/{path}", json=body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


def test_every_error_has_openais_shape(engine, url, openai):
    def error(answer) -> dict:
        (shape,) = answer.json().values()
        assert set(shape) == {"message", "type", "param", "code"}
        return shape

    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models/tiny", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/none", 404),
        ("POST", "/tokenize", 400),
    ):
        answer = httpx.request(method, f"{url}{path}")
        assert answer.status_code == status
        assert error(answer)["type"] == "invalid_request_error"
    with serving(engine, template=TEMPLATE, api_key="secret") as address:
        for path in ("/v1/models/tiny", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = httpx.post(f"{address}{path}", json={})
            assert answer.status_code == 401
            assert error(answer)["type"] == "authentication_error"
        with (
            openai_client(address, api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        with openai_client(address, api_key="secret") as client:
            assert chat(client).choices[0].message.content


# -- sampling and log-probabilities ---------------------------------------------------------------


def test_tokens_come_with_their_log_probabilities(client):
    (whole,) = complete(client, logprobs=3, max_tokens=6).choices
    found = whole.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 6
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert len(top) == 3  # the greedy choice is among them
        assert max(top.values()) == top[token] == logprob <= 0
    lengths = [len(token) for token in found.tokens]
    assert found.text_offset == [sum(lengths[:i]) for i in range(6)]
    parts = [part.choices[0] for part in complete(client, logprobs=3, max_tokens=6, stream=True)]
    assert [part.logprobs.tokens for part in parts] == [[token] for token in found.tokens]
    assert complete(client, max_tokens=2).choices[0].logprobs is None


def test_messages_come_with_log_probabilities(client, openai):
    (choice,) = chat(client, logprobs=True, top_logprobs=2, max_tokens=5).choices
    same = complete(client, "user: hello\nassistant: ", logprobs=2, max_tokens=5).choices[0]
    content = choice.logprobs.content
    assert [one.token for one in content] == same.logprobs.tokens
    assert [one.logprob for one in content] == same.logprobs.token_logprobs
    assert all(one.top_logprobs[0].token == one.token for one in content)
    assert all(len(one.top_logprobs) == 2 and len(one.bytes) == 1 for one in content)
    streamed = list(chat(client, logprobs=True, top_logprobs=2, max_tokens=5, stream=True))
    found = [part.choices[0].logprobs for part in streamed if part.choices[0].logprobs]
    assert [one for part in found for one in part.content] == content
    with pytest.raises(openai.BadRequestError, match="top_logprobs is 2, but needs logprobs"):
        chat(client, top_logprobs=2)


@pytest.mark.extended
def test_a_prompt_is_echoed_with_its_log_probabilities(client, engine):
    prompt = "a prompt of more tokens than a step has"
    (choice,) = complete(client, prompt, echo=True, max_tokens=3, logprobs=1).choices
    plain = complete(client, prompt, max_tokens=3).choices[0].text
    assert choice.text == prompt + plain
    found = choice.logprobs
    assert found.tokens[: len(prompt)] == list(prompt)
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert len(found.token_logprobs) == len(prompt) + 3
    for at in (1, 7, 20, len(prompt) - 1):  # as when the token is chosen after the same prefix
        one = {"max_tokens": 1, "logprobs": 20, "logit_bias": {str(ord(prompt[at])): 100}}
        (next,) = complete(client, prompt[:at], **one).choices
        assert next.text == prompt[at]
        expected = pytest.approx(next.logprobs.token_logprobs[0], abs=1e-4)
        assert found.token_logprobs[at] == expected
    only = complete(client, prompt, echo=True, max_tokens=0, logprobs=1)
    assert (only.choices[0].text, only.usage.completion_tokens) == (prompt, 0)
    assert only.choices[0].logprobs.token_logprobs[1:] == found.token_logprobs[1 : len(prompt)]
    texts = [part.choices[0].text for part in complete(client, prompt, echo=True, stream=True)]
    assert texts[0].startswith(prompt)


def test_a_prompt_of_several_texts_is_computed_once(client, engine):
    wait_until_idle(engine)
    before = engine.statistics.num_computed_tokens
    prompt = "a prompt that was never read before, of some length"
    answer = complete(client, prompt, n=4, temperature=1, seed=3)
    assert answer.usage.prompt_tokens == len(prompt)
    wait_until_idle(engine)
    assert engine.statistics.num_computed_tokens - before == len(prompt) - 1 + 4 * 12
    alone = [complete(client, prompt, temperature=1, seed=3 + i).choices[0].text for i in range(4)]
    assert [choice.text for choice in answer.choices] == alone


def test_a_seed_gives_each_prompt_the_texts_it_has_alone(client):
    options = {"temperature": 1, "seed": 5, "n": 2}
    both = complete(client, ["first", "second"], **options).choices
    alone = [complete(client, prompt, **options).choices for prompt in ("first", "second")]
    assert [c.text for c in both] == [choice.text for one in alone for choice in one]
    assert len({c.text for c in both}) == 4


def test_requests_without_a_seed_differ_after_each_start(engine):
    """Unless the server is given a seed to start from."""

    def seeds(*given) -> list[int]:
        served = ServedModel(engine.model, engine.tokenizer, MAX_LEN, *given)
        (first, second) = read_completions({"prompt": ["x", "y"]}, served).requests
        return [first.sampling.seed, second.sampling.seed]

    assert seeds() != seeds()
    first, second = seeds()
    assert second == (first + 1) % 2**32
    assert seeds(None, None, {}, seeds_from(2**32 - 1)) == [2**32 - 1, 0]
    texts = []
    for _ in range(2):
        with serving(engine, seed=7) as address, openai_client(address) as client:
            texts.append(complete(client, temperature=1).choices[0].text)
        wait_until_idle(engine)
    assert texts[0] == texts[1]


def test_best_of_returns_the_likeliest_texts(client, openai):
    options = dict(temperature=1, seed=7, logprobs=0, max_tokens=8)
    every = complete(client, n=6, **options).choices
    likely = [sum(c.logprobs.token_logprobs) / 8 for c in every]
    order = sorted(range(6), key=lambda i: -likely[i])
    best = complete(client, n=2, best_of=6, **options)
    assert [c.text for c in best.choices] == [every[i].text for i in order[:2]]
    assert [c.index for c in best.choices] == [0, 1]
    without = complete(client, best_of=6, **{**options, "logprobs": None})
    assert without.choices[0].text == every[order[0]].text
    assert without.choices[0].logprobs is None
    assert without.usage.completion_tokens == 48
    with pytest.raises(openai.BadRequestError, match="in a stream, which cannot take back"):
        complete(client, best_of=2, stream=True)


def test_every_option_reaches_the_sampling(engine):
    given = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 8,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    }
    served = ServedModel(engine.model, engine.tokenizer, MAX_LEN, TEMPLATE)
    body = {**given, "logit_bias": {"7": -1}}
    for read, what in ((read_completions, {"prompt": "x"}), (read_chat, {"messages": HELLO})):
        (request,) = read({**body, **what}, served).requests
        assert request.sampling == Sampling(**given, logit_bias=((7, -1.0),))


class _Marked(Subwords):
    """A byte tokenizer in which "<" to "?" are the special tokens "<60>" to "<63>"."""

    def __init__(self):
        def decode(tokens, special: bool) -> str:
            shown = (t for t in tokens if special or not 60 <= t < 64)
            data = (f"<{t}>".encode() if 60 <= t < 64 else bytes([t]) for t in shown)
            return b"".join(data).decode(errors="replace")

        def encode(text: str, special: bool) -> list[int]:
            found = re.split(r"<(6[0-3])>", text)
            return [
                t for i, one in enumerate(found) for t in ([int(one)] if i % 2 else one.encode())
            ]

        super().__init__(encode, decode, chr)


def test_special_tokens_can_be_stop_strings_and_are_shown_if_asked_for(engine, monkeypatch, openai):
    """They stop a text even where it leaves them out and no stop string could match."""
    monkeypatch.setattr(engine, "tokenizer", _Marked())
    ord_a, mark = ord("a"), 61
    options = {"logit_bias": {str(ord_a): 100, str(mark): 98}, "presence_penalty": 2}
    options |= {"frequency_penalty": 1, "max_tokens": 4}
    shown = {"extra_body": {"skip_special_tokens": False}}
    with serving(engine, template=TEMPLATE) as url, openai_client(url) as client:
        (hidden,) = complete(client, **options).choices
        (whole,) = complete(client, logprobs=1, **options, **shown).choices
        assert hidden.text == "a" * len(hidden.text) != ""
        assert whole.text.replace("<61>", "") == hidden.text != whole.text
        assert whole.logprobs.text_offset[-1] + len(whole.logprobs.tokens[-1]) == len(whole.text)
        before = whole.text.partition("<61>")[0]
        for more in ({}, shown):
            (ended,) = complete(client, stop=["<61>"], **options, **more).choices
            assert (ended.text, ended.finish_reason) == (before, "stop")
        (ended,) = complete(client, stop=[before + "<61>"], **options, **shown).choices
        assert (ended.text, ended.finish_reason) == ("", "stop")
        with pytest.raises(
            openai.BadRequestError, match="stop is '<61>a', but must be a single special token"
        ):
            complete(client, stop=["<61>a"], **options)
        echoed = complete(client, "x<62>", echo=True, max_tokens=1, **shown).choices[0].text
        assert echoed.startswith("x<62>")
        answer = httpx.post(f"{url}/detokenize", json={"tokens": [97, 62]})
        assert answer.json() == {"prompt": "a<62>"}
    wait_until_idle(engine)


def test_biases_and_penalties_are_applied(client):
    a, b = ord("a"), ord("b")
    only = complete(client, logit_bias={str(a): 100}).choices[0].text
    assert only == "a" * 12
    even = complete(client, logit_bias={str(a): 100, str(b): 100}, frequency_penalty=2)
    assert set(even.choices[0].text) == {"a", "b"}
    drawn = complete(client, temperature=5, seed=1, n=5, extra_body={"min_p": 1.0})
    assert {c.text for c in drawn.choices} == {complete(client).choices[0].text}
    biased = {"max_tokens": 24, "logit_bias": {str(a): 100, str(b): 90, str(ord("c")): 80}}
    for top_k, kept in ((0, "abc"), (2, "ab"), (1, "a")):
        more = {"top_k": top_k}
        drawn = complete(client, temperature=6, seed=1, n=5, extra_body=more, **biased)
        assert {*"".join(choice.text for choice in drawn.choices)} == {*kept}
    same = [complete(client, temperature=1, seed=9).choices[0].text for _ in range(2)]
    assert same[0] == same[1] != complete(client, temperature=1, seed=10).choices[0].text
    talk = chat(client, logit_bias={str(a): 100}, presence_penalty=0.5)
    assert talk.choices[0].message.content == "a" * 12


def test_repetitions_are_penalised_as_numpy_says(client):
    """Four biases far above all logits decide, each divided by the penalty once its token came."""
    letters, bias = "abcd", np.array([100, 70, 40, 16])
    given = {str(ord(c)): int(b) for c, b in zip(letters, bias, strict=True)}
    for prompt in ("0", "a0"):
        for penalty in (0.5, 1.0, 2.0, 4.0):
            seen, expected = np.array([c in prompt for c in letters]), ""
            for _ in range(12):
                best = int(np.argmax(np.where(seen, bias / penalty, bias)))
                seen[best], expected = True, expected + letters[best]
            more = {"repetition_penalty": penalty}
            answer = complete(client, prompt, logit_bias=given, extra_body=more)
            assert answer.choices[0].text == expected
