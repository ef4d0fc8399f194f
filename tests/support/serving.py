"""A server for tests, on a free port of the loopback interface, in its own thread."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from examples.engine.engine import Engine
from tests.support import engines

MAX_LEN = 400
MAX_REQUESTS = 24


def small_engine(max_len: int) -> Engine:
    """Build an engine of a tiny model for four sequences of up to `max_len` bytes."""
    sizes = {"budget": 16, "block_size": 8, "max_len": max_len}
    return engines.build(sizes=sizes, check=False, keep_logits=False)


@contextlib.contextmanager
def serving(
    engine: Engine,
    *,
    template=None,
    grammars=None,
    remote=None,
    offers=None,
    lora_folder=None,
    seed=1,
    on_failure=lambda reason: None,
    **access,
):
    """Serve an engine, and yield the server's address."""
    from examples.engine.http.access import Access
    from examples.engine.http.app import make_app
    from examples.engine.http.listening import DrainingServer

    listener = socket.create_server(("127.0.0.1", 0))
    limits = Access(**{"max_requests": MAX_REQUESTS, **access})
    given = (template, grammars, remote, offers, lora_folder, seed)
    application = make_app(engine, limits, on_failure, *given)
    server = DrainingServer(application, limits, log_level="error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@functools.cache
def shared_engine() -> Engine:
    """Return the engine that all files with these fixtures share; they leave it idle."""
    return small_engine(MAX_LEN)


@pytest.fixture(scope="module")
def openai():
    """OpenAI's client library: its import takes over a second, and many workers do not need it."""
    return pytest.importorskip("openai", reason="needs the openai client")


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The shared engine; a test file imports the fixtures that it uses."""
    return shared_engine()


@pytest.fixture(scope="module")
def url(engine):
    """The address of a server of that engine."""
    with serving(engine) as address:
        yield address


@pytest.fixture
def client(url):
    """A client of that server."""
    with http_client(url) as client:
        yield client


def http_client(address: str, **options):
    """Return a client of a server over plain HTTP.

    A client that verifies certificates would first load all authorities, in a tenth of a second.
    """
    import httpx

    return httpx.Client(base_url=address, verify=False, **{"timeout": 60, **options})


def complete(client, **body):
    """Request a completion and return the response."""
    return client.post("/v1/completions", json=body)


def connect(address: str) -> socket.socket:
    """Open a raw connection to a server."""
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def read_metrics(client) -> dict[str, float]:
    """Return the samples of /metrics; each must have a help text and a type."""
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples, described = {}, set()
    for line in answer.text.splitlines():
        if line.startswith("#"):
            described.add(line.split()[2])
            continue
        name, value = line.rsplit(" ", 1)
        base = name.split("{")[0]
        ends = ("_bucket", "_sum", "_count")
        assert {base, *(base.removesuffix(end) for end in ends)} & described
        assert name not in samples
        samples[name] = float(value)
    return samples


@contextlib.contextmanager
def openai_client(address: str, **options) -> Iterator:
    """OpenAI's client of a server."""
    import openai

    given = {"base_url": f"{address}/v1", "api_key": "none", "max_retries": 0, **options}
    http = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(http_client=http, **given) as client:
        yield client


def wait_for(port: int, server: subprocess.Popen) -> None:
    """Wait until the server responds that it runs: it listens before it has compiled."""
    import httpx

    deadline = time.monotonic() + 400
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200:
                return
        assert server.poll() is None, "the server has exited"
        assert time.monotonic() < deadline
        time.sleep(0.2)


def completed(client, body: dict, begun=lambda: None) -> str:
    """Return the text of a request of one choice; call `begun` at each event of a stream."""
    if not body.get("stream"):
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]
    lines = []
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in filter(None, answer.iter_lines()):
            begun()
            lines.append(line.removeprefix("data: "))
    assert lines.pop() == "[DONE]", lines
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    return "".join(choice["text"] for choice in choices)


def wait_until_idle(engine: Engine) -> None:
    """Wait for the engine to finish, and check that it holds nothing."""
    deadline = time.monotonic() + 60
    while engine.has_work:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.check_idle()
