"""The server, over a loopback socket and under load, with a model of a few kilobytes."""

# ruff: noqa: E402 (a missing package skips the file before the imports below)

from __future__ import annotations

import asyncio
import json
import time
import types

import numpy as np
import pytest

from tests.support import extras

httpx = extras.serve()

from examples.engine.engine import Output
from examples.engine.http import app
from examples.engine.http.answers import Answer, Chat, Completion
from examples.engine.http.protocol import CheckedBody
from examples.engine.likelihoods import Likelihood
from examples.engine.request import Request, Sampling, Sequence
from examples.text import Bytes, Subwords, TextStream
from tests.support import serving as support
from tests.support.serving import (
    MAX_REQUESTS,
    complete,
    connect,
    http_client,
    read_metrics,
    serving,
    wait_until_idle,
)

engine, url, client = support.engine, support.url, support.client  # the fixtures


def events(response) -> list[dict]:
    """Return the server-sent events of a whole response, which must end with [DONE]."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    *data, last = [line.removeprefix("data: ") for line in lines]
    assert last == "[DONE]"
    return [json.loads(one) for one in data]


def test_a_prompt_is_continued(client, engine):
    answer = complete(client, model="tiny", prompt="hello", max_tokens=7, temperature=0)
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    (choice,) = body["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    again = complete(client, prompt=list(b"hello"), max_tokens=7, temperature=0).json()
    assert again["choices"][0]["text"] == choice["text"] != ""


def test_events_add_up_to_the_whole_response(client):
    body = dict(prompt=["one", "two"], n=2, max_tokens=20, temperature=1, seed=3)
    whole = complete(client, **body).json()
    with client.stream(
        "POST",
        "/v1/completions",
        json={**body, "stream": True, "stream_options": {"include_usage": True}},
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *parts, usage = events(response)
    assert usage["choices"] == []
    assert all("usage" in part and part["usage"] is None for part in parts)
    assert usage["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens"] == 6
    texts, reasons = [""] * 4, [None] * 4
    for part in parts:
        (choice,) = part["choices"]
        assert part["id"] == parts[0]["id"]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == ["length"] * 4
    assert len(set(texts)) == 4
    assert len(parts) > 20


def answer_with(shape, tokenizer, candidates, prompt, *, stream=False, **options) -> list[dict]:
    """Return the choices of a response, or of all its events, to given tokens.

    Args:
      shape: the response's shape, `Completion()` or `Chat()`.
      tokenizer: the tokenizer of the tokens.
      candidates: the tokens of each candidate, with log-probabilities.
      prompt: the tokens of the prompt after its first token 0, with log-probabilities.
      stream: whether the response is streamed as events.
      options: more fields of `CheckedBody`.
    """
    asked = CheckedBody(
        tuple(
            Request((0, *(found.token for found in prompt)), 9, Sampling(seed=seed), logprobs=0)
            for seed in range(len(candidates))
        ),
        *(1, 1, stream, False),
        shows_logprobs=True,
        **options,
    )

    async def outputs(request):
        found = candidates[request.sampling.seed]
        sequence = Sequence(request, prompt_likelihoods=prompt)
        text = TextStream(tokenizer)
        for i, one in enumerate(found):
            reason = "stop" if i == len(found) - 1 else None
            now, _ = text.push([one.token], end=reason is not None)
            yield Output(sequence, one.token, now, reason, likelihood=one)

    answer = Answer(types.SimpleNamespace(stream=outputs), asked, shape, "tiny", tokenizer)
    if not stream:
        return json.loads(asyncio.run(answer._whole()).body)["choices"]
    sent = []

    async def send(message) -> None:
        sent.append(message.get("body", b"").decode().removeprefix("data: "))

    asyncio.run(answer._send_events(send))
    return [choice for event in sent[1:-1] for choice in json.loads(event)["choices"]]


def test_the_best_of_several_texts_has_the_likeliest_new_tokens():
    """An echoed prompt does not count: its unlikely token would weigh less in the longer text."""
    candidates = [[Likelihood(99, -1.0)], [Likelihood(99, -1.5)] * 3]
    prompt = [Likelihood(98, -8.0)]
    (choice,) = answer_with(Completion(), Bytes(), candidates, prompt, echoes=("ab",))
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("abc", [None, -8.0, -1.0])


# As vocabularies write bytes: as characters, or as <0x..>; the last one is U+FFFD itself.
NAMES = ("a", "Ġb", "Ã", "©", "<0xC3>", "<0xA9>", "\ufffd")


DATA = (b"a", b" b", b"\xc3", b"\xa9", b"\xc3", b"\xa9", b"\xef\xbf\xbd")


SUBWORDS = Subwords(
    lambda *_: [],
    lambda tokens, _: b"".join(DATA[token] for token in tokens).decode(errors="replace"),
    lambda token: NAMES[token],
)


def test_tokens_that_split_a_character_have_bytes_and_offsets():
    assert tuple(map(SUBWORDS.token_bytes, range(len(DATA)))) == DATA
    others = ((4, -1.0), (0, -3.0))  # the first has the same text as token 2, and is likelier
    tokens = [Likelihood(2, -2.0, others), *(Likelihood(token, -0.5) for token in (5, 1, 0))]
    prompt = [Likelihood(4, -1.0), Likelihood(3, -1.0)]
    echo = {"echoes": ("aé",)}
    (choice,) = answer_with(Completion(), SUBWORDS, [tokens], prompt, **echo)
    assert choice["text"] == "aéé ba"
    found = choice["logprobs"]
    assert found["tokens"] == ["a", "\\xc3", "\\xa9", "\\xc3", "\\xa9", " b", "a"]
    assert found["text_offset"] == [0, 1, 1, 2, 2, 3, 5]
    assert found["top_logprobs"][3] == {"\\xc3": -1.0, "a": -3.0}
    parts = answer_with(Completion(), SUBWORDS, [tokens], prompt, stream=True, **echo)
    assert [at for part in parts for at in part["logprobs"]["text_offset"]] == found["text_offset"]
    (choice,) = answer_with(Chat(), SUBWORDS, [tokens], prompt)
    content = choice["logprobs"]["content"]
    assert [bytes(one["bytes"]) for one in content] == [b"\xc3", b"\xa9", b" b", b"a"]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_that_are_not_finite_are_a_server_error(stream):
    likely = Likelihood(65, float("nan"))
    with pytest.raises(RuntimeError, match="log-probabilities are not finite"):
        answer_with(Completion(), Bytes(), [[likely]], [], stream=stream)


def test_bytes_of_tokens_match_the_tokenizers_package(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers package")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    for names, decoder in (
        (alphabet, tokenizers.decoders.ByteLevel()),
        (fallback, tokenizers.decoders.ByteFallback()),
    ):
        model = tokenizers.models.BPE({name: i for i, name in enumerate(names)}, [])
        raw = tokenizers.Tokenizer(model)
        raw.decoder = decoder
        raw.save(str(tmp_path / "tokenizer.json"))
        tokenizer = Subwords.from_tokenizers(tmp_path / "tokenizer.json")
        found = b"".join(tokenizer.token_bytes(token) for token in range(256))
        assert sorted(found) == list(range(256))
        for character in "éλ日🙂":
            tokens = [found.index(byte) for byte in character.encode()]
            assert tokenizer.decode(tokens) == character
        assert tokenizer.piece(found.index(0xC3)) == "\\xc3"
        assert tokenizer.token_bytes(256) == b""  # embeddings are often padded


def test_texts_end_at_stop_strings(client):
    whole = complete(client, prompt="a", max_tokens=30, temperature=0).json()["choices"][0]["text"]
    stop = whole[9:12]
    (choice,) = complete(client, prompt="a", max_tokens=30, temperature=0, stop=stop).json()[
        "choices"
    ]
    assert choice["text"] == whole[: whole.find(stop)]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "must be a JSON object"),
        ({}, "prompt must be a string"),
        ({"prompt": []}, "prompt is an empty list"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": [[1], [2.5]]}, "a list of tokens"),
        ({"prompt": [300]}, "tokens [300], but must be in 0..255"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0, but must be at least 1"),
        ({"prompt": "x", "max_tokens": "9"}, "max_tokens is '9', but must be an integer"),
        ({"prompt": "x", "max_tokens": 400}, "together they must be at most 400"),
        ({"prompt": [0] * 500}, "prompt has 500 tokens, but must have at most 400"),
        ({"prompt": "x" * 30_000}, "30000 characters, but must have at most 25600"),
        ({"prompt": ["x"] * 200}, "prompt has 200 prompts, but must have at most 128"),
        ({"prompt": "\ud800"}, "surrogates not allowed"),
        ({"prompt": "x", "temperature": -1}, "temperature is -1, but must be at least 0"),
        ({"prompt": "x", "temperature": 10**400}, "temperature is 1000"),
        ({"prompt": "x", "temperature": 1e39}, "temperature is 1e+39"),
        ({"prompt": "x", "top_k": 2**31}, "top_k is 2147483648, but must be at least 0"),
        ({"prompt": "x", "top_p": 1e300}, "top_p is 1e+300"),
        ({"prompt": "x", "max_tokens": 10**300}, "together they must be at most 400"),
        ({"prompt": "x", "stop": ["x"] * 17}, "at most 16 of at most 256 characters"),
        ({"prompt": "x", "stop": "x" * 300}, "at most 16 of at most 256 characters"),
        ({"prompt": "x", "stop": 0}, "stop is 0, but must be a string or a list"),
        ({"prompt": "x", "stop": {}}, "stop is {}, but must be a string or a list"),
        ({"prompt": "x", "stop_token_ids": [1] * 300}, "at most 256 integers"),
        ({"prompt": "x", "stop_token_ids": [256]}, "integers in 0..255"),
        ({"prompt": "x", "stop_token_ids": False}, "stop_token_ids is False, but must be a list"),
        ({"prompt": "x", "stream_options": {"usage": 1}, "stream": True}, "stream_options: usage"),
        (
            {"prompt": "x", "stream_options": {"include_usage": 1}, "stream": True},
            "stream_options: include_usage is 1, but must be true or false",
        ),
        (
            {"prompt": "x", "stream_options": {"include_usage": True}, "stream": False},
            "stream_options is {'include_usage': True}, but needs stream",
        ),
        ({"prompt": "x", "\ud800": 1}, "is not a field this server knows"),
        ({"prompt": "x"} | {f"field{i}": 1 for i in range(999)}, "and 991 more"),
        ({"prompt": "x", "top_p": 0}, "top_p is 0"),
        ({"prompt": "x", "seed": True}, "seed is True, but must be an integer"),
        ({"prompt": "x", "n": 200}, "n is 200"),
        ({"prompt": "x", "stop": [""]}, "stop is ['']"),
        ({"prompt": "x", "stream": "yes"}, "stream is 'yes', but must be true or false"),
        ({"prompt": "x", "suffix": "y"}, "suffix is 'y', which this server does not"),
        ({"prompt": "x", "logprobs": 21}, "logprobs is 21, but must be in 0..20"),
        ({"prompt": "x", "logprobs": True}, "logprobs is True, but must be an integer"),
        ({"prompt": "x", "min_p": 2}, "min_p is 2, but must be in 0..1"),
        ({"prompt": "x", "presence_penalty": 3}, "presence_penalty is 3, but must be in -2..2"),
        ({"prompt": "x", "frequency_penalty": -3}, "frequency_penalty is -3"),
        ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty is 0, but must be above 0"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "must have token ids as names"),
        ({"prompt": "x", "logit_bias": {"1": "1"}}, "and numbers as values"),
        ({"prompt": "x", "logit_bias": {"1": 101}}, "its values must be in -100..100"),
        ({"prompt": "x", "logit_bias": {"1": 10**400}}, "its values must be in -100..100"),
        ({"prompt": [-1], "echo": True}, "prompt has tokens [-1], but must be in 0..255"),
        ({"prompt": "x", "logit_bias": {"256": 1}}, "its tokens must be in 0..255"),
        ({"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(600)), 1)}, "has 600 tokens"),
        ({"prompt": "x", "n": 3, "best_of": 2}, "best_of is 2, but must be at least n (3)"),
        ({"prompt": "x", "best_of": 200}, "and give at most 128 texts"),
        ({"prompt": "x", "max_tokens": 0, "logprobs": 1}, "max_tokens is 0"),
        ({"prompt": ["x"] * 5, "n": 5}, "asks for 25 texts, but this server generates at most 24"),
        ({"prompt": "x", "mood": "good", "n": 0}, "mood is not a field this server knows; n is 0"),
    ],
)
def test_wrong_requests_are_refused_with_every_reason(client, engine, body, words):
    for stream in (False, True):
        if isinstance(body, dict) and "stream" not in body and stream:
            body = {**body, "stream": True}
        answer = client.post("/v1/completions", content=json.dumps(body))
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert len(answer.content) < 2000
    wait_until_idle(engine)


def test_what_is_not_json_is_refused(client):
    answer = client.post("/v1/completions", content=b'{"prompt": ')
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    compressed = {"content-encoding": "gzip"}
    for answer, status in (
        (client.post("/v1/completions", content=b"\x1f\x8b", headers=compressed), 415),
        (client.get("/v1/completions"), 405),
        (client.get("/v1/nothing"), 404),
        (client.post("/v1/completions", content=b"[" * 500_000), 400),
        (client.post("/v1/completions", content=b'{"temperature": 1e400}'), 400),
        (client.post("/v1/completions", content=b"9" * 5000), 400),
        (client.post("/v1/completions", content=b" " * (5 << 20)), 413),
        (client.post("/v1/completions", content=iter([b" " * (1 << 20)] * 5)), 413),
    ):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_is_parsed_outside_the_event_loop(client, monkeypatch):
    threads, read = [], app.read_completions
    monkeypatch.setattr(
        app,
        "read_completions",
        lambda *args: threads.append(asyncio._get_running_loop()) or read(*args),
    )
    assert complete(client, prompt="x", max_tokens=1).status_code == 200
    assert threads == [None]


def test_log_probabilities_are_written_outside_the_event_loop(client, monkeypatch):
    threads, write = [], Completion.logprobs
    monkeypatch.setattr(
        Completion,
        "logprobs",
        lambda *args: threads.append(asyncio._get_running_loop()) or write(*args),
    )
    answer = complete(client, prompt="x", max_tokens=1, n=2, logprobs=1)
    assert [len(c["logprobs"]["tokens"]) for c in answer.json()["choices"]] == [1, 1]
    assert threads == [None, None]


def test_a_slow_upload_is_given_up(engine):
    with (
        serving(engine, body_seconds=0.2) as address,
        connect(address) as connection,
        connect(address) as other,
    ):
        for one in (connection, other):
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        connection.sendall(b'content-length: 99\r\n\r\n{"prompt')
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert other.recv(4096) == b""  # its headers never end
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.2 seconds" in answer


def test_a_client_that_reads_nothing_is_dropped(engine, monkeypatch):
    monkeypatch.setattr(Answer, "_event", lambda *_, **__: "x" * (8 << 20))  # more than is buffered
    body = {"prompt": "x", "n": MAX_REQUESTS, "max_tokens": 1, "stream": True}
    body = json.dumps(body).encode()
    with serving(engine, send_seconds=0.3) as address, connect(address) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        connection.sendall(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        assert connection.recv(12) == b"HTTP/1.1 200"
        wait_until_idle(engine)
        deadline = time.monotonic() + 10
        with http_client(address) as client:
            while complete(client, prompt="x").status_code == 429:
                assert time.monotonic() < deadline


def test_a_key_and_origins_are_required_where_they_are_set(engine):
    origin = "https://page.example"
    with (
        serving(engine, api_key="secret", origins=(origin,)) as address,
        http_client(address) as client,
    ):
        assert client.get("/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer other"}):
            answer = client.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
        headers = {"authorization": "Bearer secret", "origin": origin}
        answer = client.get("/v1/models", headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
        other = client.get("/v1/models", headers={**headers, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        asked = {"origin": origin, "access-control-request-method": "POST"}
        assert client.options("/v1/completions", headers=asked).status_code == 200


def test_models_and_health(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]


def test_metrics_count_what_was_done(client, engine):
    before = read_metrics(client)
    complete(client, prompt="count me", max_tokens=5)
    complete(client, prompt="count me", max_tokens=5)
    complete(client, prompt="")
    client.get("/somewhere")
    wait_until_idle(engine)
    after = read_metrics(client)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown('jattn_http_requests_total{path="/v1/completions",status="200"}') == 2
    assert grown('jattn_http_requests_total{path="/v1/completions",status="400"}') == 1
    assert grown('jattn_http_requests_total{path="other",status="404"}') == 1
    assert grown("jattn_queue_seconds_count") == 2
    assert grown("jattn_generated_tokens_total") == 10
    assert grown("jattn_prompt_tokens_total") == 16
    assert grown('jattn_requests_finished_total{reason="length"}') == 2
    assert grown("jattn_time_to_first_token_seconds_count") == 2
    assert grown('jattn_time_to_first_token_seconds_bucket{le="+Inf"}') == 2
    assert grown("jattn_time_to_first_token_seconds_sum") > 0
    assert after["jattn_requests_running"] == after['jattn_blocks_used{pool="global"}'] == 0


def test_many_clients_at_once_get_what_each_gets_alone(url, client, engine):
    rng = np.random.default_rng(0)
    shared = "the same beginning of every prompt, "
    bodies = [
        {
            "prompt": shared[: rng.integers(len(shared))] + f"{i}",
            "max_tokens": int(rng.integers(1, 30)),
            "temperature": float(rng.choice([0.0, 1.0])),
            "top_p": 0.9,
            "seed": i,
            "stream": bool(rng.integers(2)),
        }
        for i in range(MAX_REQUESTS)
    ]

    async def ask(crowd, body) -> str:
        await asyncio.sleep(0.01 * body["seed"])
        answer = await crowd.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if not body["stream"]:
            return answer.json()["choices"][0]["text"]
        return "".join(part["choices"][0]["text"] for part in events(answer))

    async def ask_all() -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as crowd:
            return await asyncio.gather(*(ask(crowd, body) for body in bodies))

    texts = asyncio.run(ask_all())
    wait_until_idle(engine)
    assert engine.statistics.peak.rows == 4
    for body, text in zip(bodies, texts, strict=True):
        alone = complete(client, **{**body, "stream": False})
        assert alone.json()["choices"][0]["text"] == text
