"""Responses of a prefill server: right, wrong, late, too long, or none at all."""

# ruff: noqa: E402 (a missing package skips the file before the imports below)

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.server
import json
import os
import queue
import socket
import threading
import time
import types

import pytest

from tests.support import extras

httpx = extras.serve()

from benchmarks.serving.servers import free_port
from examples.engine.caches import init_caches
from examples.engine.request import Request
from examples.engine.server import Room, ServerFullError
from examples.engine.transfer import remote as remote_module
from examples.engine.transfer.contents import Contents, Transfer
from examples.engine.transfer.offers import Offers, PrefillHandlers
from examples.engine.transfer.remote import PrefillServer, Remote, TransferError
from examples.options import KV_FORMATS
from tests.support.engines import limits
from tests.support.tiny_model import LAYERS

PROMPT = tuple(range(40, 71))


@pytest.fixture(scope="module")
def transfer() -> Transfer:
    bounds = limits(budget=16, block_size=8)
    sizes = {group.name: 9 for group in bounds.groups}
    return Transfer(bounds, init_caches(LAYERS, sizes, 8, KV_FORMATS["float32"]))


@contextlib.contextmanager
def answering(answer):
    """Run a server that calls `answer(handler)` for every request; yield its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            answer(self)

        do_POST = do_DELETE = do_GET

        def log_message(self, *_):
            pass

        def send(self, body: bytes, status: int = 200, length: int | None = None) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def good(transfer: Transfer) -> tuple[bytes, dict]:
    """Return the bytes that a server sends for a prompt, and its offer of them."""
    contents = transfer.empty(len(PROMPT))
    for i, array in enumerate(contents.arrays):
        array[:] = i + 1
    data = b"".join(contents.bytes())
    crc = contents.checksum
    size = {"num_tokens": contents.num_tokens, "num_bytes": contents.nbytes}
    return data, {"id": "an-id", **size, "crc32": crc}


def serves(transfer: Transfer, change: str):
    """Return an `answer` that does what `PrefillHandlers` does, except for one change."""
    data, offer = good(transfer)
    changed = {
        "other tokens": {"num_tokens": 3},
        "other bytes": {"num_bytes": 10**15},
        "a path as an id": {"id": "../v1/models"},
        "no id": {"id": None},
        "other checksum": {"crc32": 5},
    }

    def answer(handler) -> None:
        if handler.command == "DELETE":
            handler.send(b"")
        elif handler.command == "POST":
            body = json.dumps({**offer, **changed.get(change, {})}).encode()
            if change == "busy":
                handler.send(b'{"error": {"message": "the queue is full"}}', 429)
            elif change == "not JSON":
                handler.send(os.urandom(300))
            elif change == "nested JSON":
                handler.send(b"[" * 100_000)
            elif change == "another status":
                handler.send(body, 500)
            elif change == "endless headers":
                handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000)
            elif change == "no HTTP":
                handler.wfile.write(os.urandom(5000))
            elif change == "nothing":
                time.sleep(0.6)
            else:
                handler.send(body)
        elif change == "fewer bytes":
            handler.send(data[:-1])
        elif change == "more bytes":
            handler.send(data + b"x")
        elif change == "a bit":
            handler.send(data[:100] + bytes([data[100] ^ 1]) + data[101:])
        elif change == "it dies":
            handler.send(data[: len(data) // 2], length=len(data))
            handler.connection.shutdown(socket.SHUT_RDWR)
        elif change == "drops":
            handler.send(b"", length=len(data))
            with contextlib.suppress(OSError):
                for i in range(1000):
                    handler.wfile.write(data[i : i + 1])
                    time.sleep(0.05)
        elif change == "gone":
            handler.send(b"", 404)
        else:
            handler.send(data)

    return answer


def test_right_answers_bring_the_contents(transfer):
    with answering(serves(transfer, "nothing else")) as url:
        found = PrefillServer(url, transfer, {}).read(PROMPT, transfer.empty)
    assert b"".join(found.bytes()) == good(transfer)[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("other tokens", "but must offer {'num_tokens': 31"),
        ("other bytes", "but must offer"),
        ("a path as an id", "but must offer"),
        ("no id", "but must offer"),
        ("other checksum", "CRC-32 is wrong"),
        ("busy", "it responds with 429: the queue is full"),
        ("not JSON", "it responds with 200: no reason"),
        ("nested JSON", "it responds with 200: no reason"),
        ("another status", "it responds with 500: no reason"),
        ("endless headers", "headers"),
        ("no HTTP", r"\s|."),  # whatever line came instead
        ("nothing", "timed out"),
        ("fewer bytes", r"it sends \d+ bytes, not \d+"),
        ("more bytes", r"it sends \d+ bytes, not \d+"),
        ("a bit", "CRC-32 is wrong"),
        ("it dies", "closed before all bytes arrived"),
        ("drops", "it took more than 0.25 seconds|timed out"),
        ("gone", "it responds with 404"),
    ],
)
def test_wrong_answers_are_failures(transfer, change, words):
    """They bring no contents, never hang, and take no more memory than a right answer."""
    with answering(serves(transfer, change)) as url:
        seconds = 0.25 if change in ("nothing", "drops") else 30
        server = PrefillServer(url, transfer, {}, seconds=seconds)
        with pytest.raises((TransferError, OSError, http.client.HTTPException), match=words):
            server.read(PROMPT, transfer.empty)
        assert server.rests == (change != "busy")


def test_a_dead_server_is_left_alone_for_a_while(transfer, monkeypatch):
    url = f"http://127.0.0.1:{free_port()}"
    remote = Remote([PrefillServer(url, transfer, {})])
    done = []
    for _ in range(2):
        event = threading.Event()
        remote.start((*PROMPT, 1), lambda found, e=event: (done.append(found), e.set()))
        assert event.wait(10)
        assert remote.servers[0].rests
    assert done == [None, None]
    monkeypatch.setattr(remote_module, "RETRY_SECONDS", 0.0)
    assert not remote.servers[0].rests


def test_prompts_waiting_for_their_turn_need_no_thread_and_can_be_aborted(transfer, monkeypatch):
    class Server(PrefillServer):
        def read(self, prompt, *_):
            asked.append(prompt)
            assert go.wait(10)

    monkeypatch.setattr(remote_module, "MOST_ON_THEIR_WAY", 1)
    remote, go, asked = Remote([Server("http://x", transfer, {})]), threading.Event(), []
    done, before = queue.SimpleQueue(), {*threading.enumerate()}  # some may be ending
    for last, is_wanted in ((1, True), (2, False), (3, True)):
        remote.start((last, 0), done.put, lambda is_wanted=is_wanted: is_wanted)
    assert len({*threading.enumerate()} - before) == 1
    go.set()
    assert [done.get(timeout=10) for _ in range(3)] == [None] * 3
    assert asked == [(1,), (3,)]


def test_prompts_that_start_together_go_to_different_servers(transfer):
    both, asked = threading.Barrier(2), []

    class Server(PrefillServer):
        count = 0

        @property
        def num_asked(self):
            found = self.count
            time.sleep(0.02)  # lets other threads run in between
            return found

        @num_asked.setter
        def num_asked(self, count):
            self.count = count

        def read(self, *_):
            asked.append(self)
            both.wait(10)

    servers = [Server(f"http://x:{port}", transfer, {}) for port in (1, 2)]
    remote = Remote(servers)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(remote._read, [PROMPT] * 2))
    assert set(asked) == set(servers)
    assert [server.count for server in servers] == [0, 0]


def test_the_memory_for_contents_that_arrive_is_limited(transfer):
    """Contents that wait for caches hold up the next ones, and too long a prompt is refused."""
    size = transfer.nbytes(len(PROMPT))
    with answering(serves(transfer, "nothing else")) as url:
        server = PrefillServer(url, transfer, {})
        first, small = (Remote([server], most_bytes=n) for n in (size, size - 1))
        assert small._read(PROMPT) is None
        held = first._read(PROMPT)
        assert isinstance(held, Contents)
        server.seconds = 0.3
        assert first._read(PROMPT) is None
        assert not server.rests, "the server is not to blame"
        server.seconds = 30
        del held
        assert first._read(PROMPT) is not None


def test_the_memory_for_offered_contents_is_limited(transfer):
    """It is reserved before contents leave the device, until the response with them has ended."""
    size = transfer.nbytes(len(PROMPT))
    offers = Offers(size, seconds=0.05)
    fetched = []

    class Taken:
        def fetched(self):
            fetched.append(offers.nbytes)
            if len(fetched) == 1:
                raise RuntimeError("no memory is left")
            return transfer.empty(len(PROMPT))

    async def stream(request):
        yield types.SimpleNamespace(sequence=types.SimpleNamespace(taken=Taken()))

    engine = types.SimpleNamespace(transfer=transfer)
    thread = types.SimpleNamespace(engine=engine, stream=stream, reserve=Room(2).reserve)
    reading = types.SimpleNamespace(_thread=thread, _offers=offers)
    request = Request(PROMPT, 1, hands_over=True)

    async def offer_and_send() -> None:
        with pytest.raises(RuntimeError, match="no memory is left") as failure:
            await PrefillHandlers._read(reading, request)
        assert failure.tb  # the traceback holds the reservation
        id = (await PrefillHandlers._read(reading, request))["id"]
        answer = await PrefillHandlers.fetch(reading, types.SimpleNamespace(path_params={"id": id}))
        await asyncio.sleep(0.1)
        assert offers.get(id) is None
        assert offers.nbytes == size  # nothing of the response is sent yet
        with pytest.raises(ServerFullError):
            await PrefillHandlers._read(reading, request)
        del answer
        assert offers.nbytes == 0
        await PrefillHandlers._read(reading, request)

    asyncio.run(offer_and_send())
    assert fetched == [size] * 3


@pytest.mark.parametrize(
    "url", ["", "localhost:1", "ftp://x", "http://", "http://x:port", "http://["]
)
def test_wrong_urls_are_refused(transfer, url):
    with pytest.raises(ValueError, match="--prefill-server is"):
        PrefillServer(url, transfer, {})


def test_contents_of_another_size_are_refused(transfer):
    contents = transfer.empty(9)
    transfer.check(contents, range(10))
    with pytest.raises(ValueError, match=r"9 tokens in 8 arrays of [0-9]+ bytes, but must be 10"):
        transfer.check(contents, range(11))
    for arrays in (contents.arrays[1:], (contents.arrays[0][1:], *contents.arrays[1:])):
        with pytest.raises(ValueError, match="that fit these caches"):
            transfer.check(Contents(9, arrays), range(10))
