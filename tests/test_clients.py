"""OpenAI's client drives the server: all that it can ask for and this server has."""

# ruff: noqa: E402 (what is missing skips the file before it is imported)

from __future__ import annotations

import pytest

openai = pytest.importorskip("openai", reason="needs the openai client")
httpx = pytest.importorskip("httpx", reason="the server's tests need the serve extra")
pytest.importorskip("jinja2", reason="the server's tests need the serve extra")
pytest.importorskip("starlette", reason="the server's tests need the serve extra")
pytest.importorskip("uvicorn", reason="the server's tests need the serve extra")

from examples.engine.caches import group_layers
from examples.engine.chat import ChatTemplate
from examples.engine.engine import Engine
from examples.engine.scheduler import Limits
from examples.engine.step import make_buckets
from examples.text import Bytes
from tests.support.serving import openai_client, serving, wait_until_idle
from tests.support.tiny_model import tiny_model

MAX_LEN = 300
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


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = tiny_model()
    limits = Limits(group_layers(model.layers), 4, 16, 8, MAX_LEN)
    buckets = make_buckets(limits, [4], [16])
    return Engine(model, limits, tokenizer=Bytes(), buckets=buckets)


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


def test_a_conversation_goes_on_as_its_text_does(client):
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


def test_an_answer_is_as_long_as_fits(client):
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
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]},
            "tool_calls is .* must be calls of functions",
        ),
        ({"tools": [1]}, r"tools is \[1\]"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice is 'required'"),
        ({"max_tokens": 999}, "together they must be at most 300"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, "together they must be at most"),
        ({"messages": [{"role": "user", "content": "x" * 40_000}]}, "conversation has 400"),
        ({"functions": TOOLS}, "functions is .* which this server cannot do"),
        ({"mood": "good"}, "mood is not a field this server knows"),
    ],
)
def test_what_is_wrong_with_a_conversation_is_told(client, body, words):
    body = {"messages": HELLO, **body}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            client.chat.completions.create(
                model="tiny", messages=body["messages"], stream=stream, extra_body=body
            )
        assert caught.value.type == "invalid_request_error"


def test_a_model_without_a_template_has_no_conversations(engine):
    with (
        serving(engine, template=None) as address,
        openai_client(address) as client,
        pytest.raises(openai.BadRequestError, match="tiny has no chat template"),
    ):
        chat(client)


# -- models, tokens, errors -----------------------------------------------------------------------


def test_models_are_found_by_name(client):
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


def test_tokens_and_text_are_each_others(url):
    tokens = tokens_of(url, prompt="héllo")
    assert tokens == list("héllo".encode())
    answer = httpx.post(f"{url}/detokenize", json={"tokens": tokens})
    assert answer.json() == {"prompt": "héllo"}
    for path, body, words in (
        ("tokenize", {}, "prompt must be a string"),
        ("tokenize", {"prompt": [1]}, "prompt must be a string"),
        ("tokenize", {"prompt": "x", "n": 1}, "n is not a field"),
        ("detokenize", {"tokens": [256]}, "integers in 0..255"),
        ("detokenize", {"tokens": 1}, "tokens is 1, but must be a list"),
    ):
        answer = httpx.post(f"{url}/{path}", json=body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


def test_every_error_has_openais_shape(engine, url):
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
