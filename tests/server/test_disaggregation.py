"""Disaggregated prefill and decode: one server reads prompts, another decodes, either may die."""

# ruff: noqa: E402 (a missing package skips the file before the imports below)

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.support import extras

httpx = extras.serve()

from benchmarks.serving.servers import free_port
from examples.engine import serve
from examples.engine.drafts.speculation import Speculation
from examples.engine.engine import Engine
from examples.engine.request import Request
from examples.engine.transfer import remote as remote_module
from examples.engine.transfer import roles
from examples.engine.transfer.contents import Contents
from examples.engine.transfer.description import describe, digest
from examples.engine.transfer.offers import Offers
from examples.engine.transfer.remote import Connection, PrefillServer, Remote, TransferError
from examples.options import KV_FORMATS
from tests.support.engines import build, restart
from tests.support.processes import ROOT
from tests.support.published_mtp import write_deepseek
from tests.support.serving import http_client, serving, wait_for, wait_until_idle
from tests.support.tiny_model import tiny_model


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
def test_options_that_do_not_go_together(capsys, arguments, words):
    with pytest.raises(SystemExit) as end:
        serve.main([*arguments.split(), "--port", "0", "--no-compilation-cache"])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.extended
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_both_servers_load_the_mtp_layer(role, tmp_path, monkeypatch):
    """The server that reads prompts drafts nothing, but writes the MTP layer's keys and values."""
    write_deepseek(tmp_path / "model")
    found = []
    monkeypatch.setattr(serve, "Engine", lambda *given, **options: found.append((given, options)))
    arguments = ["--model", str(tmp_path / "model"), "--speculate", "mtp=2", "--role", role]
    arguments += ["--products", "xla"]  # C++ products, once loaded, would stay for other tests
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
    """An engine that reads prompts, and one that decodes, with the cache format of the test.

    Their block sizes differ, unless a scale belongs to a block.
    """
    name = getattr(request, "param", "float32")
    sizes = {"budget": 16, "max_len": 240}
    options = {"check": False, "keep_logits": False, "kv_format": KV_FORMATS[name]}
    block_sizes = (8, 8) if name == "e4m3-block" else (16, 8)
    return tuple(build(sizes={"block_size": size, **sizes}, **options) for size in block_sizes)


def noting_requests(engine: Engine, monkeypatch) -> list[Request]:
    """Return a list of the requests that an engine is given from now on."""
    found, add = [], engine.add

    def noting(request: Request, *more):
        found.append(request)
        return add(request, *more)

    monkeypatch.setattr(engine, "add", noting)
    return found


def remote_of(engine: Engine, url: str, **options) -> Remote:
    """Like `roles.remote_of`, but for prompts of 8 tokens and more."""
    description = describe(engine.model, engine.transfer, engine.caches)
    server = PrefillServer(url, engine.transfer, description, api_key="key", **options)
    server.check()
    return Remote([server], least_tokens=8)


# They begin differently, since what the prefix cache happens to hold is not read elsewhere.
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
    """Return the choices of all bodies, which are sent at once."""

    def ask(body):
        with http_client(url, timeout=300, headers={"authorization": "Bearer key"}) as c:
            answer = c.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"]

    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, bodies))


def near(expected: list) -> list:
    """Return choices that compare equal up to the rounding of log-probabilities in other steps."""
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
        # The decoder itself reads the prompt that is scored and the short one.
        assert (done.num_received_prompts, done.num_failed_prompts) == (7, 0)
        assert reader.statistics.finished["length"] == 7
        # The reader is told the token after a prompt, on which an MTP layer's last keys depend.
        prompts = {request.prompt for request in asked[decoder]}
        assert {(*request.prompt, *request.follow) for request in asked[reader]} <= prompts
        text = httpx.get(f"{url}/metrics").text
        assert "jattn_received_prompts_total 7" in text
        # What the prefix cache holds is not fetched again.
        assert choices(url, BODIES[:1]) == near(alone[:1])
        wait_until_idle(decoder)
    wait_until_idle(reader)
    # Without the reader, the decoder computes the same tokens itself.
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
        http_client(url, headers={"authorization": "Bearer key"}) as client,
    ):
        assert httpx.get(f"{url}/prefill").status_code == 401
        for body, status, words in (
            ([], 400, "must be a JSON object"),
            ({"prompt": [1]}, 409, "the model, dtype or cache format differs"),
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
        http_client(url) as client,
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
        # Meanwhile this engine has forgotten that request, and runs another.
        (other,) = choices(url, [dict(prompt="short", max_tokens=3)])
        assert other[0]["finish_reason"] == "length"
        assert decoder.statistics.num_requests == 1
        going.set()
        (again,) = choices(url, [body])
        assert again[0]["finish_reason"] == "length"
        wait_until_idle(decoder)
    wait_until_idle(reader)


@pytest.mark.extended
def test_a_receiver_that_is_killed_harms_no_one_else(engines):
    """Killed during the transfer or before it: the bytes are dropped, and others are served."""
    reader, decoder = engines
    wanted = digest(describe(decoder.model, decoder.transfer, decoder.caches))
    offers = Offers(1 << 24, seconds=1.0)
    with serving(reader, offers=offers) as url, http_client(url) as client:
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
                    # Reset the connection, as the kernel does for a process that is killed.
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


@pytest.mark.extended
def test_a_server_with_another_model_is_refused_at_startup(engines):
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


@pytest.mark.extended
@pytest.mark.parametrize("engines", ["float32", "e4m3-token", "e4m3-block"], indirect=True)
def test_an_engine_goes_on_with_what_three_calls_fetched(engines):
    """Its tokens are those of one engine, and would differ if scales were lost.

    A block's scale comes from its first tokens, so both engines read the prompt in steps of whole
    blocks. The last token, which the decoding engine computes, begins a block.
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


# -- two processes ---------------------------------------------------------------------------------


@pytest.mark.extended
def test_two_processes_one_of_which_dies(tmp_path):
    """Tokens are those of one server before, while and after the prefill server is killed."""
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

        # Every prompt is answered, although the first server dies meanwhile.
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

        # One server gives the same tokens. Decode servers refuse it: it has no --role prefill.
        alone = run("--port", str(ports[0]))
        wait_for(ports[0], alone)
        assert choices(urls[0], bodies) == found
        assert (
            choices(urls[0], [dict(prompt=p, max_tokens=12, temperature=0) for p in others]) == late
        )
        refused = run(*role, "--port", str(ports[1]))
        assert refused.wait(120) == 2
    assert "was started without --role prefill" in (tmp_path / "log").read_text()
