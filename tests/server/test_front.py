"""Requests that outlive their server: what waits, what is computed again, what fails."""

# ruff: noqa: E402 (a missing package skips the file before the imports below)

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time

import pytest

from tests.support import extras
from tests.support.serving import http_client

httpx = extras.serve()

from benchmarks.serving.servers import free_port
from examples.engine import supervise as supervise_module
from examples.engine.http import front as front_module
from examples.engine.http.access import Access
from examples.engine.http.front import Front, with_seed
from examples.engine.http.replies import DIFFERS, Reply
from examples.engine.supervise import supervise

# Stands in for a server: each text is the seed and an index, and it dies when the body says so.
SERVER = """
import http.server, json, os, pathlib, random, signal, socketserver, sys, threading, time

path, folder = map(pathlib.Path, sys.argv[1:])
starts = len(list(folder.glob("start*"))) + 1
(folder / f"start{starts}").touch()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, data, **headers):
        body = json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"content-type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def event(self, data):
        event = f"data: {data if isinstance(data, str) else json.dumps(data)}\\n\\n".encode()
        # In two parts: an event may arrive in any.
        for part in (event[:9], event[9:]):
            self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(part), part))
            self.wfile.flush()

    def do_GET(self):
        if self.path == "/health":
            return self.answer(200, {"status": "ok"})
        names = {"connection": "x-secret", "x_secret": "1", "keep_alive": "1", "x_kept": "1"}
        self.answer(200, {"path": self.path, "headers": list(self.headers.items())}, **names)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        dies = starts <= asked.get("deaths", 0)
        (folder / f"asked{time.time_ns()}").write_text(str(starts))
        if asked.get("full") and starts == 2 and len(list(folder.glob("asked*"))) == 2:
            return self.answer(429, {"error": {"message": "the queue is full"}})
        seed = asked.get("seed", f"{random.random()}")
        texts = [f"{seed}:{i} " for i in range(asked.get("count", 8))]
        if asked.get("changes"):
            texts[2] = f"start {starts} "
        failed = {"error": {"message": "the engine has failed", "code": "engine_failed"}}
        if not asked.get("stream"):
            if dies and asked.get("fails"):
                self.answer(500, failed)
            if dies:
                time.sleep(asked.get("sleeps", 0))
                os.kill(os.getpid(), signal.SIGKILL)
            return self.answer(200, {"choices": [{"text": "".join(texts)}]})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        head = {"id": f"cmpl-{starts}", "created": starts}
        for i, text in enumerate(texts):
            if dies and i == asked.get("after", 4):
                if asked.get("fails"):
                    self.event(failed)
                self.wfile.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            while i == asked.get("waits") and not (folder / "go").exists():
                if not self.connected():
                    return (folder / "gone").touch()
                time.sleep(0.02)
            self.event({**head, "choices": [{"index": i % 2, "text": text}]})
        self.event({**head, "choices": [], "usage": {}})
        self.event("[DONE]")
        self.wfile.write(b"0\\r\\n\\r\\n")

    def connected(self):
        import select
        return not select.select([self.connection], [], [], 0)[0]


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    request_queue_size = 64


path.unlink(missing_ok=True)
server = Server(str(path), Handler)
end = lambda *_: threading.Thread(target=server.shutdown).start()
signal.signal(signal.SIGTERM, end)
server.serve_forever(0.05)
path.unlink()
server.server_close()  # which waits for the threads
"""


CHATTERS = {"origin": "http://page", "connection": "close, x-named", "x-named": "1", "te": "gzip"}


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield name


def serve_while(act, folder, *, restarts=9, wait=30.0, pause=0.01, tell=True, **access):
    """Run a supervisor while `act`, a client, runs; return its exit status and what `act` returns.

    A supervisor must be in the main thread, so the client runs in another one.
    """
    path, port = f"{folder}/server", free_port()
    over = threading.Event()

    def be_client():
        try:
            with http_client(f"http://127.0.0.1:{port}", timeout=30) as client:
                until(lambda: over.is_set() or is_there(client))
                return act(client)
        finally:
            if tell and not over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # if one arrives late
        try:
            with Front(path, Access(**access), wait) as front:
                front.listen("127.0.0.1", port)
                acted = pool.submit(be_client)
                command = [sys.executable, "-Sc", SERVER, path, folder]
                status = supervise(command, restarts, pause=pause, front=front)
                over.set()
            return status, acted.result()
        finally:
            over.set()
            concurrent.futures.wait([acted])
            signal.signal(signal.SIGTERM, before)


def is_there(client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/health").status_code == 200
    return False


def accepts(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def until(happened, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def starts_in(folder) -> int:
    return len([name for name in os.listdir(folder) if name.startswith("start")])


def stream(client, begun=lambda: None, **body) -> list:
    """Return the events of a streamed response."""
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = []
        for line in filter(None, answer.iter_lines()):
            begun()
            lines.append(line.removeprefix("data: "))
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(events: list) -> str:
    assert events[-1] == "[DONE]", events[-1]
    assert events[-2]["choices"] == []
    return "".join(event["choices"][0]["text"] for event in events[:-2])


def test_requests_outlive_two_servers(folder):
    def act(client):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            body = {"seed": 1, "deaths": 2, "sleeps": 60}  # long enough for the stream to begin
            whole = pool.submit(client.post, "/v1/completions", json=body)
            events = stream(client, seed=2, deaths=2)
            return whole.result(), events

    status, (whole, events) = serve_while(act, folder)
    assert status == 0
    assert starts_in(folder) == 3
    assert whole.status_code == 200
    assert whole.json()["choices"][0]["text"] == "".join(f"1:{i} " for i in range(8))
    assert text_of(events) == "".join(f"2:{i} " for i in range(8))
    heads = {(event["id"], event["created"]) for event in events[:-1]}
    assert len(heads) == 1, "the client sees several responses"


@pytest.mark.extended
def test_a_stream_without_a_seed_is_given_one(folder):
    status, events = serve_while(lambda client: stream(client, deaths=1), folder)
    text = text_of(events)
    seed = text.partition(":")[0]
    assert text == "".join(f"{seed}:{i} " for i in range(8))
    assert (status, starts_in(folder)) == (0, 2)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"seed": 0}', b"[" * 100_000, b"\xff"], ids=lambda body: body[:9]
)
def test_bodies_that_get_no_seed(body):
    assert with_seed(body) == body


def test_a_seed_changes_nothing_else():
    body = '{"prompt": "\\ud800\u00e9\\n", "seed": null, "top_p": 0.1, "n": 2}'
    given = json.loads(with_seed(body.encode()))
    assert 0 <= given.pop("seed") < 2**32
    assert given == {"prompt": "\ud800\u00e9\n", "top_p": 0.1, "n": 2}


@pytest.mark.extended
def test_what_cannot_be_continued_ends_with_an_error(folder, monkeypatch):
    """A text that differs, and requests that kill every server. The request after them succeeds."""
    monkeypatch.setattr(supervise_module, "LONGEST_PAUSE", 0.01)

    def act(client):
        differs = stream(client, changes=True, deaths=1)
        kills = stream(client, deaths=99)
        whole = client.post("/v1/completions", json={"deaths": 99})
        return differs, kills, whole, client.post("/v1/completions", json={"seed": 3})

    status, (differs, kills, whole, after) = serve_while(act, folder)
    assert status == 0
    assert starts_in(folder) == 1 + 1 + 3 + 3
    assert [event["choices"][0]["text"][-2:] for event in differs[:-1]] == ["0 ", "1 ", "1 ", "3 "]
    assert differs[-1]["error"] == {
        "message": "the server has died, and the next one generates a different text",
        "type": "engine_error",
        "param": None,
        "code": None,
    }
    assert len(kills) == 5
    assert kills[-1]["error"]["message"] == "3 servers have died with the request"
    assert whole.status_code == 500
    assert whole.json() == kills[-1]
    assert whole.headers["x-should-retry"] == "false"
    assert after.status_code == 200


@pytest.mark.extended
def test_requests_wait_when_an_engine_reports_that_it_failed(folder):
    def act(client):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            body = {"deaths": 1, "fails": True, "seed": 4}
            whole = pool.submit(client.post, "/v1/completions", json=body)
            until(lambda: starts_in(folder) == 2)
            return whole.result(), stream(client, **{**body, "deaths": 2})

    status, (whole, events) = serve_while(act, folder)
    assert (status, starts_in(folder)) == (0, 3)
    assert whole.status_code == 200
    assert text_of(events) == whole.json()["choices"][0]["text"]


@pytest.mark.extended
def test_a_request_that_was_running_waits_for_room(folder, monkeypatch):
    monkeypatch.setattr(front_module, "BUSY_SECONDS", 0.05)
    body = {"deaths": 1, "full": True, "seed": 5}
    status, events = serve_while(lambda client: stream(client, **body), folder)
    assert (status, starts_in(folder)) == (0, 2)
    assert len([name for name in os.listdir(folder) if name.startswith("asked")]) == 3
    assert text_of(events) == "".join(f"5:{i} " for i in range(8))


def test_a_server_that_stays_away(folder):
    """Requests wait, but not too many and not too long. Then the supervisor is told to stop."""

    reason = "the server ended with signal 9: restart 1 of 9 in 60 s"

    def act(client):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            dies = pool.submit(stream, client, deaths=1)
            # The front may see the stream end before the supervisor sees the server end.
            until(lambda: client.get("/health").json().get("reason") == reason)
            health = client.get("/health")
            answers = [client.post("/v1/completions", json={})]
            began = time.monotonic()
            events = dies.result()
            answers += [client.post("/v1/completions", json={}), client.get("/v1/models")]
            return health, answers, events, time.monotonic() - began

    status, (health, (full, *late), events, seconds) = serve_while(
        act, folder, wait=0.8, pause=60, max_requests=1
    )
    assert (status, starts_in(folder)) == (0, 1)
    assert health.status_code == 503
    assert health.json() == {"status": "away", "reason": reason}
    assert full.status_code == 429
    for answer in late:
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "10"
        assert answer.json()["error"]["message"] == reason
        assert answer.json()["error"]["type"] == "unavailable_error"
    assert events[-1] == late[0].json()
    assert len(events) == 5
    assert 1.6 <= seconds < 9


@pytest.mark.extended
def test_when_all_restarts_are_used_up(folder):
    status, events = serve_while(lambda client: stream(client, deaths=99), folder, restarts=1)
    assert (status, starts_in(folder)) == (137, 2)
    assert events[-1]["error"]["message"] == "the server has ended"
    assert events[-1]["error"]["type"] == "unavailable_error"


def test_events_come_one_by_one_and_a_client_that_leaves_ends_the_work(folder):
    def act(client):
        seen = []

        def leave():
            seen.append(1)
            if len(seen) == 3:  # the server holds back the fourth until the file `go` exists
                raise InterruptedError

        with pytest.raises(InterruptedError):
            stream(client, leave, waits=3)
        until(lambda: os.path.exists(f"{folder}/gone"))

    assert serve_while(act, folder)[0] == 0


def test_a_supervisor_that_is_told_to_end_finishes_its_requests(folder):
    def act(client):
        def told():
            if not os.path.exists(f"{folder}/go"):
                os.kill(os.getpid(), signal.SIGTERM)
                until(lambda: not accepts(client.base_url.port))
                open(f"{folder}/go", "w").close()

        return stream(client, told, waits=3, seed=6)

    status, events = serve_while(act, folder, tell=False)
    assert (status, starts_in(folder)) == (0, 1)
    assert text_of(events) == "".join(f"6:{i} " for i in range(8))


def test_what_is_passed_on(folder):
    def act(client):
        asked = client.get("/a%2Fb?c=d&e=%20", headers={**CHATTERS, "authorization": "Bearer key"})
        wrong = client.post("/v1/completions", json={"deaths": 9}, headers=CHATTERS)
        client.headers["authorization"] = "Bearer key"
        return asked, wrong, client.post("/v1/completions", content=b"x" * 101)

    limits = {"api_key": "key", "origins": ("http://page",), "max_body": 100}
    status, (asked, wrong, large) = serve_while(act, folder, **limits)
    assert (status, starts_in(folder)) == (0, 1)
    assert asked.json()["path"] == "/a%2Fb?c=d&e=%20"
    sent = {name.lower(): value for name, value in asked.json()["headers"]}
    assert sent["host"].startswith("127.0.0.1:")
    assert (sent["authorization"], sent["origin"]) == ("Bearer key", "http://page")
    assert not {"connection", "x-named", "te"} & set(sent)
    assert asked.headers["x-kept"] == "1"
    assert not {"x-secret", "keep-alive"} & set(asked.headers)
    assert len(asked.headers.get_list("date")) == len(asked.headers.get_list("server")) == 1
    assert (wrong.status_code, large.status_code) == (401, 413)
    assert wrong.headers["access-control-allow-origin"] == "http://page"
    assert not [name for name in os.listdir(folder) if name.startswith("asked")]


def test_an_address_in_use_is_reported(folder):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        path = f"{folder}/server"
        with Front(path, Access(), 1.0) as front:
            front.listen("127.0.0.1", port)
            supervise([sys.executable, "-Sc", SERVER, path, folder], 9, front=front)
    assert front.refused == f"127.0.0.1:{port}: Address already in use"
    assert starts_in(folder) == 1


def test_the_front_reads_no_certificates(folder, monkeypatch):
    """A missing certificate file, with which TLS would fail, and a proxy setting change nothing."""
    monkeypatch.setenv("SSL_CERT_FILE", f"{folder}/nowhere")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")

    path, port = f"{folder}/server", free_port()
    with Front(path, Access(), 30.0) as front:
        front.listen("127.0.0.1", port)

        def end():
            until(lambda: accepts(port))
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=end).start()
        command = [sys.executable, "-Sc", SERVER, path, folder]
        assert supervise(command, 0, front=front) == 0
    assert front.refused is None


class Stream(httpx.AsyncByteStream):
    """A server's events, `(text, finish reason)` or "[DONE]", after which it may die."""

    def __init__(self, *events, dies=False):
        self.events, self.dies = events, dies

    async def __aiter__(self):
        for event in self.events:
            if event != "[DONE]":
                choice = {"index": 0, "text": event[0], "finish_reason": event[1]}
                event = json.dumps({"id": "a", "created": 1, "choices": [choice]})
            yield f"data: {event}\n\n".encode()
        if self.dies:
            raise httpx.ReadError("the server has died")


def replied(*streams) -> tuple[str, list[str]]:
    """Return what a client gets from one server after another, and the front's errors."""
    sent, errors = [], []

    async def send(message):
        sent.append(message)

    async def take():
        reply = Reply(send)
        for stream in streams:
            response = httpx.Response(
                200, headers={"content-type": "text/event-stream"}, stream=stream
            )
            try:
                await reply.take(response, is_first=stream is streams[0])
            except (httpx.TransportError, RuntimeError) as error:
                errors.append(f"{type(error).__name__}: {error}")

    asyncio.run(take())
    return b"".join(message.get("body", b"") for message in sent).decode(), errors


A, B, C = ("a", None), ("b", None), ("c", None)
END_A, END_B = ("a", "stop"), ("b", "stop")


@pytest.mark.parametrize(
    ("first", "then"),
    [((A, B, C), (A, END_B, "[DONE]")), ((A, END_B), (A, B)), ((A, B), (END_A, B))],
    ids=["sooner", "later", "where another goes on"],
)
def test_a_text_that_ends_elsewhere_is_another_text(first, then):
    text, errors = replied(Stream(*first, dies=True), Stream(*then))
    assert errors == ["ReadError: the server has died", f"RuntimeError: {DIFFERS}"]
    assert text.count("data:") == len(first)


def test_a_complete_response_needs_no_other_server():
    """Even if the server dies before it closes the connection."""
    text, errors = replied(Stream(A, END_B, "[DONE]", dies=True))
    assert not errors
    assert text.endswith("data: [DONE]\n\n")
    assert len(with_seed(b'{"prompt":[1,2,3],"stream":true}')) < 60  # no spaces are added
