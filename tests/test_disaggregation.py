"""Servers that share the work: one reads prompts, another one decodes, whatever happens between."""

# ruff: noqa: E402 (what is missing skips the file before it is imported)

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import http.server
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

httpx = pytest.importorskip("httpx", reason="the server's tests need the serve extra")
pytest.importorskip("uvicorn", reason="the server's tests need the serve extra")
pytest.importorskip("starlette", reason="the server's tests need the serve extra")

from benchmarks.serving.servers import free_port
from examples.engine import remote as remote_module
from examples.engine import roles, serve
from examples.engine.caches import init_caches
from examples.engine.contents import Contents, Transfer
from examples.engine.description import describe, digest
from examples.engine.engine import Engine
from examples.engine.offers import Offers, PrefillHandlers
from examples.engine.remote import Connection, PrefillServer, Remote, TransferError
from examples.engine.request import Request
from examples.engine.server import Room, ServerFullError
from examples.engine.speculation import Speculation
from examples.options import KV_FORMATS
from tests.support.engines import build, limits, restart
from tests.support.processes import ROOT
from tests.support.serving import serving, wait_for, wait_until_idle
from tests.support.tiny_model import LAYERS, tiny_model
from tests.test_mtp import write_deepseek

PROMPT = tuple(range(40, 71))


@pytest.fixture(scope="module")
def transfer() -> Transfer:
    bounds = limits(budget=16, block_size=8)
    sizes = {group.name: 9 for group in bounds.groups}
    return Transfer(bounds, init_caches(LAYERS, sizes, 8, KV_FORMATS["float32"]))


# -- what a server may answer ----------------------------------------------------------------------


@contextlib.contextmanager
def answering(answer):
    """A server that does as it likes: `answer(handler)` for every request; its URL."""

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
    """The bytes that a server sends for a prompt, and its offer of them."""
    contents = transfer.empty(len(PROMPT))
    for i, array in enumerate(contents.arrays):
        array[:] = i + 1
    data = b"".join(contents.bytes())
    crc = contents.checksum
    size = {"num_tokens": contents.num_tokens, "num_bytes": contents.nbytes}
    return data, {"id": "an-id", **size, "crc32": crc}


def serves(transfer: Transfer, change: str):
    """Answers as `PrefillHandlers` does, but for one change."""
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


def test_what_is_sent_as_it_must_be_arrives(transfer):
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
        ("other checksum", "CRC-32 differs"),
        ("busy", "it answers 429: the queue is full"),
        ("not JSON", "it answers 200: no reason"),
        ("nested JSON", "it answers 200: no reason"),
        ("another status", "it answers 500: no reason"),
        ("endless headers", "headers"),
        ("no HTTP", r"\s|."),  # the line that came instead
        ("nothing", "timed out"),
        ("fewer bytes", "bytes come, but must be"),
        ("more bytes", "bytes come, but must be"),
        ("a bit", "CRC-32 differs"),
        ("it dies", "ended amid the bytes"),
        ("drops", "it took more than 0.25 seconds|timed out"),
        ("gone", "it answers 404"),
    ],
)
def test_wrong_answers_are_failures(transfer, change, words):
    """Never contents, never a hang, never more memory than what must come."""
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


def test_prompts_that_wait_for_their_turn_have_no_thread_and_may_be_aborted(transfer, monkeypatch):
    class Server(PrefillServer):
        def read(self, prompt, *_):
            asked.append(prompt)
            assert go.wait(10)

    monkeypatch.setattr(remote_module, "MOST_ON_THEIR_WAY", 1)
    remote, go, asked = Remote([Server("http://x", transfer, {})]), threading.Event(), []
    done, before = queue.SimpleQueue(), threading.active_count()
    for last, is_wanted in ((1, True), (2, False), (3, True)):
        remote.start((last, 0), done.put, lambda is_wanted=is_wanted: is_wanted)
    assert threading.active_count() == before + 1
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
            time.sleep(0.02)  # other threads come between
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


def test_there_is_a_limit_to_what_arrives(transfer):
    """Contents that wait for the caches hold up the next, and a prompt too long is refused."""
    size = transfer.nbytes(len(PROMPT))
    with answering(serves(transfer, "nothing else")) as url:
        server = PrefillServer(url, transfer, {})
        first, small = (Remote([server], most_bytes=n) for n in (size, size - 1))
        assert small._read(PROMPT) is None
        held = first._read(PROMPT)
        assert isinstance(held, Contents)
        server.seconds = 0.3
        assert first._read(PROMPT) is None
        assert not server.rests, "it is no fault of the server's"
        server.seconds = 30
        del held
        assert first._read(PROMPT) is not None


def test_there_is_a_limit_to_what_is_offered(transfer):
    """From before it is fetched from the device to the end of the answer that sends it."""
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
        assert failure.tb  # which holds what was reserved
        id = (await PrefillHandlers._read(reading, request))["id"]
        answer = await PrefillHandlers.fetch(reading, types.SimpleNamespace(path_params={"id": id}))
        await asyncio.sleep(0.1)
        assert offers.get(id) is None
        assert offers.nbytes == size  # nothing of the answer is sent
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
def test_what_is_no_url_is_refused(transfer, url):
    with pytest.raises(ValueError, match="--prefill-server is"):
        PrefillServer(url, transfer, {})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--role decode", "--role decode and --prefill-server URL go together"),
        ("--prefill-server http://x", "--role decode and --prefill-server URL go together"),
        ("--role prefill --speculate lookup=4", "--speculate is 'lookup=4', but --role prefill"),
        ("--role prefill --draft qwen3-tiny --speculate draft=4", "--draft is 'qwen3-tiny', but"),
        ("--role prefill --draft qwen3-tiny --speculate mtp=2", "--draft is 'qwen3-tiny', but"),
    ],
)
def test_options_that_do_not_fit_each_other(capsys, arguments, words):
    with pytest.raises(SystemExit) as end:
        serve.main([*arguments.split(), "--port", "0", "--no-compilation-cache"])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.extended
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_both_servers_load_the_layer_that_guesses(role, tmp_path, monkeypatch):
    """The one that reads prompts drafts nothing, but writes the layer's keys and values."""
    write_deepseek(tmp_path / "model")
    found = []
    monkeypatch.setattr(serve, "Engine", lambda *given, **options: found.append((given, options)))
    arguments = ["--model", str(tmp_path / "model"), "--speculate", "mtp=2", "--role", role]
    arguments += ["--prefill-server", "http://x"] if role == "decode" else []
    options = serve.options_parser().parse_args(arguments)
    roles.check_role(options)
    serve.build(options)
    ((model, limits), given) = found[0]
    assert model.mtp is not None
    assert any(model.mtp.layer in group.layers for group in limits.groups)
    wanted = None if role == "prefill" else Speculation(2, mtp=True)
    assert given["speculation"] == wanted


# -- two servers in one process --------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(request) -> tuple[Engine, Engine]:
    """One that reads, and one that decodes, in blocks of other sizes, unless a block has a scale.

    A test may have another format than float32.
    """
    name = getattr(request, "param", "float32")
    sizes = {"budget": 16, "max_len": 240}
    options = {"check": False, "keep_logits": False, "kv_format": KV_FORMATS[name]}
    block_sizes = (8, 8) if name == "e4m3-block" else (16, 8)
    return tuple(build(sizes={"block_size": size, **sizes}, **options) for size in block_sizes)


def noting_requests(engine: Engine, monkeypatch) -> list[Request]:
    """The requests that an engine is given from now on."""
    found, add = [], engine.add

    def noting(request: Request, *more):
        found.append(request)
        return add(request, *more)

    monkeypatch.setattr(engine, "add", noting)
    return found


def remote_of(engine: Engine, url: str, **options) -> Remote:
    """As `roles.remote_of`, in a hurry."""
    description = describe(engine.model, engine.transfer, engine.caches)
    server = PrefillServer(url, engine.transfer, description, api_key="key", **options)
    server.check()
    return Remote([server], least_tokens=8)


# They begin differently: what the prefix cache holds of a prompt by chance is not read elsewhere.
TEXTS = [(f"{i}: once upon a time there was " * 5)[: 20 + 17 * i] for i in range(8)]
BODIES = [
    dict(prompt=TEXTS[0], max_tokens=9, temperature=0),
    dict(prompt=TEXTS[1:4], max_tokens=12, temperature=1, seed=5, n=3),
    dict(prompt=TEXTS[4], max_tokens=8, logprobs=3, frequency_penalty=1.0, temperature=0.7, seed=1),
    dict(prompt=TEXTS[5], max_tokens=5, echo=True, logprobs=1, temperature=0),
    dict(prompt="short", max_tokens=5, logit_bias={"65": 3.0}, temperature=0),
    dict(prompt=TEXTS[6:8], max_tokens=20, temperature=0.5, seed=3, best_of=2),
]


def choices(url: str, bodies=BODIES) -> list:
    """The choices of all bodies, asked for at once."""

    def ask(body):
        with httpx.Client(base_url=url, timeout=300, headers={"authorization": "Bearer key"}) as c:
            answer = c.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"]

    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, bodies))


def near(expected: list) -> list:
    """Choices equal to these, but for how log-probabilities are rounded in other steps."""
    text = json.dumps(expected)
    return json.loads(text, parse_float=lambda x: pytest.approx(float(x), abs=1e-4))


@pytest.mark.extended
def test_two_servers_answer_as_one(engines, monkeypatch):
    reader, decoder = engines
    asked = {engine: noting_requests(engine, monkeypatch) for engine in engines}
    with serving(decoder, api_key="key") as url:
        alone = choices(url)
    decoder.reset()
    with (
        serving(reader, offers=Offers(1 << 24), api_key="key") as elsewhere,
        serving(decoder, remote=remote_of(decoder, elsewhere), api_key="key") as url,
    ):
        assert choices(url) == near(alone)
        done = decoder.statistics
        # The prompt whose tokens are scored and the short one are read here.
        assert (done.num_received_prompts, done.num_failed_prompts) == (7, 0)
        assert reader.statistics.finished["length"] == 7
        # The other server knows what comes next, which an MTP layer's last keys depend on.
        prompts = {request.prompt for request in asked[decoder]}
        assert {(*request.prompt, *request.follow) for request in asked[reader]} <= prompts
        text = httpx.get(f"{url}/metrics").text
        assert "jattn_received_prompts_total 7" in text
        # What the cache holds is not asked for again.
        assert choices(url, BODIES[:1]) == near(alone[:1])
        wait_until_idle(decoder)
    wait_until_idle(reader)
    # The other server is gone: the same tokens, computed here.
    decoder.reset()
    remote = remote_module.Remote([PrefillServer(elsewhere, decoder.transfer, {})], least_tokens=8)
    with serving(decoder, remote=remote, api_key="key") as url:
        assert choices(url) == near(alone)
        assert decoder.statistics.num_received_prompts == 0
        assert decoder.statistics.num_failed_prompts >= 1
    wait_until_idle(decoder)


@pytest.mark.extended
def test_wrong_requests_for_prompts_are_refused(engines):
    reader, _ = engines
    config = digest(describe(reader.model, reader.transfer, reader.caches))
    with (
        serving(reader, offers=Offers(1 << 20, seconds=1.0), api_key="key") as url,
        httpx.Client(base_url=url, timeout=60, headers={"authorization": "Bearer key"}) as client,
    ):
        assert httpx.get(f"{url}/prefill").status_code == 401
        for body, status, words in (
            ([], 400, "must be a JSON object"),
            ({"prompt": [1]}, 409, "another model"),
            ({"config": config}, 400, "prompt must be a list of tokens"),
            ({"config": config, "prompt": "text"}, 400, "prompt must be a list of tokens"),
            ({"config": config, "prompt": [1, True]}, 400, "prompt must be a list of tokens"),
            ({"config": config, "prompt": []}, 400, "must have 1..239"),
            ({"config": config, "prompt": [1] * 240}, 400, "must have 1..239"),
            ({"config": config, "prompt": [1, 256]}, 400, "prompt has tokens [256]"),
            ({"config": config, "prompt": [1], "next": 256}, 400, "next is 256, but must be a tok"),
            ({"config": config, "prompt": [1], "next": True}, 400, "next is True, but must be a t"),
        ):
            answer = client.post("/prefill", json=body)
            assert (answer.status_code, words in answer.text) == (status, True), answer.text
        assert client.post("/prefill", content=b"[" * 10**5).status_code == 400
        assert client.get("/prefill/no-such-id").status_code == 404
        assert client.delete("/prefill/no-such-id").status_code == 404
        prompt = {"config": config, "prompt": [1, 2, 3]}
        offered = client.post("/prefill", json=prompt).json()
        assert len(client.get(f"/prefill/{offered['id']}").content) == offered["num_bytes"]
        assert client.delete(f"/prefill/{offered['id']}").status_code == 204
        assert client.get(f"/prefill/{offered['id']}").status_code == 404
        forgotten = client.post("/prefill", json=prompt).json()["id"]
        time.sleep(1.2)
        assert client.get(f"/prefill/{forgotten}").status_code == 404
    wait_until_idle(reader)
    with (
        serving(reader, offers=Offers(offered["num_bytes"] + 5)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        assert client.post("/prefill", json=prompt).status_code == 200
        assert client.post("/prefill", json=prompt).status_code == 429
    wait_until_idle(reader)


@pytest.mark.extended
def test_a_client_that_leaves_while_its_prompt_is_read_elsewhere(engines):
    """The request is forgotten on both servers, and the next one is served."""
    reader, decoder = engines
    decoder.reset()
    going, run = threading.Event(), reader.run
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(reader, offers=Offers(1 << 24), api_key="key") as elsewhere,
        serving(decoder, remote=remote_of(decoder, elsewhere), api_key="key") as url,
    ):
        patch.setattr(reader, "run", lambda *given: (going.wait(30), run(*given))[1])
        headers = {"authorization": "Bearer key"}
        body = dict(prompt=TEXTS[7], max_tokens=4)
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=0.7)
        # What this engine has meanwhile: nothing of it; another request runs.
        (other,) = choices(url, [dict(prompt="short", max_tokens=3)])
        assert other[0]["finish_reason"] == "length"
        assert decoder.statistics.num_requests == 1
        going.set()
        (again,) = choices(url, [body])
        assert again[0]["finish_reason"] == "length"
        wait_until_idle(decoder)
    wait_until_idle(reader)


@pytest.mark.extended
def test_a_receiver_that_is_killed_takes_nothing_with_it(engines):
    """Amid the bytes, and before it asks for them: they are dropped, and others are served."""
    reader, decoder = engines
    wanted = digest(describe(decoder.model, decoder.transfer, decoder.caches))
    offers = Offers(1 << 24, seconds=1.0)
    with serving(reader, offers=offers) as url, httpx.Client(base_url=url, timeout=60) as client:
        body = {"config": wanted, "prompt": list(range(200))}
        for killed_amid in (True, False):
            offered = client.post("/prefill", json=body).json()
            if killed_amid:
                parts = httpx.URL(url)
                with socket.create_connection((parts.host, parts.port)) as raw:
                    raw.sendall(
                        f"GET /prefill/{offered['id']} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
                    )
                    assert raw.recv(20).startswith(b"HTTP/1.1 200")
                    # As the kernel ends the connections of a process that is killed.
                    linger = struct.pack("ii", 1, 0)
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            again = client.get(f"/prefill/{offered['id']}")
            assert len(again.content) == offered["num_bytes"]
        deadline = time.monotonic() + 30
        while offers.nbytes and time.monotonic() < deadline:
            time.sleep(0.05)
        assert offers.nbytes == 0
        assert client.get("/health").status_code == 200
    wait_until_idle(reader)


# -- two processes ---------------------------------------------------------------------------------


@pytest.mark.extended
def test_two_processes_one_of_which_dies(tmp_path):
    """Tokens are those of one server before, while and after the other one is killed."""
    ports = [free_port() for _ in range(2)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    command = [sys.executable, "-m", "examples.engine.serve", "--model", "qwen3-tiny"]
    sizes = ["--max-len", "96", "--max-seqs", "4", "--token-budget", "32"]
    cache = ["--compilation-cache", str(tmp_path)]
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 250, size=(6, 70)).tolist()
    bodies = [dict(prompt=prompt, max_tokens=12, temperature=0) for prompt in prompts]

    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(tmp_path / "log", "w+"))

        def run(*arguments: str) -> subprocess.Popen:
            process = subprocess.Popen(
                [*command, *arguments, *sizes, *cache],
                env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        first = run("--role", "prefill", "--port", str(ports[0]), "--block-size", "32")
        wait_for(ports[0], first)
        role = ["--role", "decode", "--prefill-server", urls[0], "--prefill-tokens", "16"]
        second = run(*role, "--port", str(ports[1]), "--prefill-timeout", "300")
        wait_for(ports[1], second)
        found = choices(urls[1], bodies)
        text = httpx.get(f"{urls[1]}/metrics").text
        assert "jattn_received_prompts_total 6" in text
        assert "jattn_received_tokens_total 414" in text

        # Other prompts, amid which the first server dies: every one is answered.
        others = rng.integers(1, 250, size=(6, 60)).tolist()
        first.send_signal(signal.SIGSTOP)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(
                choices, urls[1], [dict(prompt=p, max_tokens=12, temperature=0) for p in others]
            )
            time.sleep(0.5)
            first.kill()
            late = asked.result()
        text = httpx.get(f"{urls[1]}/metrics").text
        assert "jattn_failed_prompts_total 0" not in text
        assert [c[0]["finish_reason"] for c in late] == ["length"] * 6
        second.send_signal(signal.SIGTERM)
        second.wait(60)

        # One server has the same tokens; it refuses to decode for another model.
        alone = run("--port", str(ports[0]))
        wait_for(ports[0], alone)
        assert choices(urls[0], bodies) == found
        assert (
            choices(urls[0], [dict(prompt=p, max_tokens=12, temperature=0) for p in others]) == late
        )
        refused = run(*role, "--port", str(ports[1]))
        assert refused.wait(120) == 2
    assert "was started without --role prefill" in (tmp_path / "log").read_text()


@pytest.mark.extended
def test_a_server_of_another_model_is_refused_at_the_start(engines):
    reader, decoder = engines
    options = serve.options_parser().parse_args(["--role", "decode", "--api-key", "key"])
    with serving(reader, offers=Offers(1 << 24), api_key="key") as elsewhere:
        options.prefill_server = [elsewhere]
        assert isinstance(roles.remote_of(options, decoder), Remote)
        decoder.adapters.model, kept = tiny_model(noise=1e-3), decoder.model
        try:
            with pytest.raises(
                ValueError, match="cannot read prompts for this server: its weights"
            ):
                roles.remote_of(options, decoder)
            decoder.adapters.model = dataclasses.replace(kept, mtp=tiny_model(mtp=True).mtp)
            with pytest.raises(ValueError, match="its MTP layer: 'False', but must be 'True', as"):
                roles.remote_of(options, decoder)
        finally:
            decoder.adapters.model = kept
    wait_until_idle(reader)


def test_contents_of_another_size_are_refused(transfer):
    contents = transfer.empty(9)
    transfer.check(contents, range(10))
    with pytest.raises(ValueError, match=r"9 tokens in 8 arrays of [0-9]+ bytes, but must be 10"):
        transfer.check(contents, range(11))
    for arrays in (contents.arrays[1:], (contents.arrays[0][1:], *contents.arrays[1:])):
        with pytest.raises(ValueError, match="as these caches are"):
            transfer.check(Contents(9, arrays), range(10))


@pytest.mark.extended
@pytest.mark.parametrize("engines", ["float32", "e4m3-token", "e4m3-block"], indirect=True)
def test_three_calls_bring_what_an_engine_goes_on_with(engines):
    """The tokens of one engine, and others if scales were lost.

    A block's scale is its first tokens': both engines read the prompt in steps of whole blocks, and
    the last token, which is computed where it is decoded, begins one.
    """
    reader, decoder = engines
    prompt = tuple(range(40, 72))
    asked = Request((*prompt, 9), 24)
    description = describe(decoder.model, decoder.transfer, decoder.caches)
    with serving(reader, offers=Offers(1 << 24)) as url:
        server = PrefillServer(url, decoder.transfer, description)
        with Connection(server) as connection:
            offered = connection.offer(prompt)
            contents = decoder.transfer.empty(len(prompt))
            connection.fetch(offered["id"], contents)
            assert contents.checksum == offered["crc32"]
            connection.release(offered["id"])
            with pytest.raises(TransferError, match="404"):
                connection.fetch(offered["id"], contents)
    wait_until_idle(reader)
    restart(decoder)
    (alone,) = decoder.generate([asked])

    def goes_on_with(contents: Contents) -> list[int]:
        restart(decoder)
        sequence = decoder.add(asked, contents)
        list(decoder.stream())
        assert decoder.statistics.num_received_prompts == 1
        return sequence.chosen

    scales = ["scale" in part.name for part in decoder.transfer.parts]
    lost = zip(contents.arrays, scales, strict=True)
    lost = tuple(array * 0 + 1 if is_scale else array for array, is_scale in lost)
    assert goes_on_with(contents) == alone.chosen
    if any(scales):
        assert goes_on_with(Contents(len(prompt), lost)) != alone.chosen
