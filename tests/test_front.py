"""Requests that outlive their server: what waits, what is computed again, and what ends."""

# ruff: noqa: E402 (what is missing skips the file before it is imported)

from __future__ import annotations

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

httpx = pytest.importorskip("httpx", reason="the server's tests need the serve extra")
pytest.importorskip("uvicorn", reason="the server's tests need the serve extra")

from benchmarks.serving.servers import free_port
from examples.engine import front as front_module
from examples.engine.access import Access
from examples.engine.front import Front, with_seed
from examples.engine.supervise import supervise

# Stands in for a server: it answers with the seed and its place, and dies when the body says so.
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


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield name


def serve_while(act, folder, *, restarts=9, wait=30.0, pause=0.01, port=None, **access):
    """The status of a supervisor in whose time `act` is a client, what that returns, and the front.

    A supervisor must be in the main thread, so that the client is in another one.
    """
    path, port = f"{folder}/server", port or free_port()
    over = threading.Event()

    def be_client():
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                until(lambda: over.is_set() or is_there(client))
                return act(client)
        finally:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                if not over.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # if it comes when all is over
        try:
            with Front(path, Access(**access), wait) as front:
                front.listen("127.0.0.1", port)
                acted = pool.submit(be_client)
                command = [sys.executable, "-Sc", SERVER, path, folder]
                status = supervise(command, restarts, pause=pause, front=front)
                over.set()
            return status, acted.result(), front
        finally:
            over.set()
            concurrent.futures.wait([acted])
            signal.signal(signal.SIGTERM, before)


def is_there(client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/health").status_code == 200
    return False


def until(happened, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def starts_in(folder) -> int:
    return len([name for name in os.listdir(folder) if name.startswith("start")])


def stream(client, begun=lambda: None, **body) -> list:
    """The events of a streamed answer."""
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
            whole = pool.submit(client.post, "/v1/completions", json={"seed": 1, "deaths": 2})
            events = stream(client, seed=2, deaths=2)
            return whole.result(), events

    status, (whole, events), _ = serve_while(act, folder)
    assert status == 0
    assert starts_in(folder) == 3
    assert whole.status_code == 200
    assert whole.json()["choices"][0]["text"] == "".join(f"1:{i} " for i in range(8))
    assert text_of(events) == "".join(f"2:{i} " for i in range(8))
    heads = {(event["id"], event["created"]) for event in events[:-1]}
    assert len(heads) == 1, "the client sees several answers"
