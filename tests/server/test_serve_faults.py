"""The server when something goes wrong: clients leave, steps fail or hang, it is told to end."""

# ruff: noqa: E402 (a missing package skips the file before the imports below)

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import sys
import threading
import time
import types

import pytest

from tests.support import extras

httpx = extras.serve()

from examples.engine import engine as engine_module
from examples.engine import serve, server, starting
from examples.engine.http import app
from examples.engine.http.access import Access, without_folders
from examples.engine.request import Request
from examples.engine.server import EngineThread
from examples.engine.transfer.description import description_of, digest
from examples.engine.transfer.offers import Offers
from examples.engine.transfer.remote import PrefillServer, Remote
from tests.support import serving as support
from tests.support.serving import (
    MAX_LEN,
    MAX_REQUESTS,
    complete,
    connect,
    http_client,
    read_metrics,
    serving,
    wait_until_idle,
)

engine, url, client = support.engine, support.url, support.client  # the fixtures


def long_request(**more) -> dict:
    return {"prompt": "x", "max_tokens": MAX_LEN - 1, **more}


def test_requests_are_aborted_when_their_client_leaves(client, engine):
    finished = engine.statistics.finished.copy()
    with client.stream("POST", "/v1/completions", json=long_request(stream=True)) as response:
        assert next(response.iter_lines()).startswith("data: ")
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=long_request(n=4), timeout=0.03)
    wait_until_idle(engine)
    assert engine.statistics.finished["abort"] - finished["abort"] == 5
    assert engine.statistics.finished["length"] == finished["length"]
    assert complete(client, prompt="still there", max_tokens=2).status_code == 200


def test_a_full_queue_is_reported(url, client, engine, monkeypatch):
    go, step = threading.Event(), engine.step

    def step_when_told():
        # A command left by the test before causes a step without work, which must not wait here.
        assert not engine.has_work or go.wait(60)
        return step()

    monkeypatch.setattr(engine, "step", step_when_told)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        body = {"prompt": "x", "max_tokens": 2, "n": MAX_REQUESTS}
        first = threads.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        deadline = time.monotonic() + 60
        while not engine.has_work:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for stream in (False, True):
            refused = complete(client, prompt="me too", stream=stream)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "overloaded_error"
        go.set()
        assert first.result().status_code == 200
    wait_until_idle(engine)
    assert complete(client, prompt="now", max_tokens=2).status_code == 200


def some_text(client) -> str:
    answer = complete(client, prompt="some text", max_tokens=12, temperature=0)
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize("where", ["pack", "device", "text"])
def test_an_exception_fails_its_request_and_no_other(where, client, engine, monkeypatch):
    """The bad prompt fails when inputs are packed, on the device, or when its text is decoded."""
    wanted, bad = some_text(client), list(b"bad")
    failed = engine.statistics.finished["error"]

    def has_bad(sequences) -> bool:
        return any(s.tokens[: len(bad)] == bad for s in sequences)

    def fail_if(condition: bool) -> None:
        if condition:
            raise OverflowError("too bad")

    if where == "pack":
        pack = engine_module.pack

        def broken(plan, *args):
            fail_if(has_bad(chunk.sequence for chunk in plan))
            return pack(plan, *args)

        monkeypatch.setattr(engine_module, "pack", broken)
    elif where == "device":
        run = engine.run

        def broken(*args):
            results = run(*args)  # the caches are donated
            fail_if(has_bad(engine.scheduler.running))
            return results

        monkeypatch.setattr(engine, "run", broken)
    else:
        append = engine_module.Sequence.append

        def broken(sequence, token):
            fail_if(has_bad([sequence]))
            return append(sequence, token)

        monkeypatch.setattr(engine_module.Sequence, "append", broken)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        others = [] if where == "device" else [threads.submit(some_text, client) for _ in range(3)]
        answer = complete(client, prompt="bad", max_tokens=2)
        assert answer.status_code == 500
        assert "too bad" in answer.json()["error"]["message"]
        assert [other.result() for other in others] == [wanted] * len(others)
    assert engine.statistics.finished["error"] == failed + 1
    assert client.get("/health").status_code == 200
    assert some_text(client) == wanted
    wait_until_idle(engine)


def test_a_prompt_that_cannot_be_handed_over_fails_alone(engine, monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(engine.transfer, "take", fail)
    asked = {"config": digest(description_of(engine)), "prompt": [1, 2, 3]}
    with (
        serving(engine, offers=Offers(1 << 20)) as address,
        http_client(address) as client,
        concurrent.futures.ThreadPoolExecutor() as threads,
    ):
        wanted = some_text(client)
        other = threads.submit(some_text, client)
        for _ in range(2):
            answer = client.post("/prefill", json=asked)
            assert answer.status_code == 500
            assert "no memory is left" in answer.json()["error"]["message"]
        assert other.result() == some_text(client) == wanted
    wait_until_idle(engine)


def test_a_request_that_cannot_begin_fails_alone(engine, monkeypatch, caplog):
    """Whether the request itself is wrong, or the code that handles it before the engine."""
    remote = Remote([PrefillServer("http://127.0.0.1:1", engine.transfer, {})])
    with (
        serving(engine, remote=remote, origins=("*",)) as address,
        http_client(address, headers={"origin": "https://a.b"}) as client,
    ):
        for wrong in (2**63, -1):  # tokens are hashed as int64
            answer = complete(client, prompt=[wrong] + [1] * 70)
            assert answer.status_code == 400
            assert f"prompt has tokens [{wrong}], but must be in 0..255" in answer.text
        monkeypatch.setattr(remote, "wants", lambda *_: 1 / 0)
        answer = complete(client, prompt="x")
        assert answer.json()["error"]["message"] == "internal error: ZeroDivisionError"
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "a request has failed" in caplog.text
        monkeypatch.undo()
        assert complete(client, prompt="x", max_tokens=2).status_code == 200
        with connect(address) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
            connection.sendall(b"content-length: 9\r\n\r\n{")  # and leaves
        name = 'jattn_http_requests_total{path="/v1/completions",status="%d"}'
        deadline = time.monotonic() + 60
        while name % 499 not in (found := read_metrics(client)):
            assert time.monotonic() < deadline
        assert [found[name % status] for status in (200, 400, 499, 500)] == [1, 2, 1, 1]


def end_all(engine, threads=frozenset()):
    """Wait for threads, then abort all requests of an engine and check that it holds nothing."""
    for thread in threads:
        thread.join(60)
    for sequence in [*engine.scheduler.waiting, *engine.scheduler.running]:
        engine.abort(sequence)
    engine.check_idle()


def test_an_engine_that_fails_says_so(engine, monkeypatch, caplog):
    def fail():
        raise RuntimeError("the device is gone: '/srv/secret/libdevice.so'")

    reasons = []
    with (
        serving(engine, on_failure=reasons.append, step_seconds=0.2) as address,
        http_client(address) as client,
    ):
        monkeypatch.setattr(engine, "step", fail)
        for _ in range(2):
            answer = complete(client, prompt="x")
            assert answer.status_code == 500
            message = answer.json()["error"]["message"]
            assert message == "the engine has failed: the device is gone: '.../libdevice.so'"
        answer = client.get("/health")
        assert (answer.status_code, answer.json()["reason"]) == (503, message)
        time.sleep(0.1)
    monkeypatch.undo()
    end_all(engine)
    assert "the engine has failed" in caplog.text
    assert reasons == ["the engine has failed: the device is gone: '/srv/secret/libdevice.so'"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/a/b-1/c.d: no such file", ".../c.d: no such file"),
        ("cannot read '/home/me/x y'", "cannot read '.../x y'"),
        ("see (/tmp/a/b) and /tmp/c/", "see (.../b) and .../"),
        ("open:/srv/secret/lib.so", "open:.../lib.so"),
        ("file:///srv/secret/x", "file://.../x"),
        ("'/home/me/My Models/x.so'", "'.../x.so'"),
        ("GET /prefill describes them", "GET /prefill describes them"),
        ("http://host:80/a/b, 1/2/3, a/b/c", "http://host:80/a/b, 1/2/3, a/b/c"),
    ],
)
def test_clients_see_no_folders_of_the_server(text, shown):
    assert without_folders(text) == shown


def test_a_step_that_hangs_is_noticed(engine, monkeypatch):
    go, reasons, before = threading.Event(), [], set(threading.enumerate())
    monkeypatch.setattr(engine, "step", lambda: go.wait(60) and [])
    with (
        serving(engine, on_failure=reasons.append, step_seconds=0.2) as address,
        http_client(address) as client,
    ):
        answer = complete(client, prompt="x")
        assert answer.status_code == 500
        assert "a step has taken more than 0.2 seconds" in answer.json()["error"]["message"]
        go.set()
    assert reasons == ["a step has taken more than 0.2 seconds"]
    monkeypatch.undo()
    end_all(engine, set(threading.enumerate()) - before)


def test_a_last_step_that_hangs_is_noticed(engine, monkeypatch):
    """The server is told to end, but its thread keeps running."""
    go, reasons, before = threading.Event(), [], set(threading.enumerate())
    monkeypatch.setattr(server, "LAST_STEP_SECONDS", 0.2)
    monkeypatch.setattr(engine, "step", lambda: go.wait(60) and [])
    with concurrent.futures.ThreadPoolExecutor() as threads:
        with serving(engine, on_failure=reasons.append, drain_seconds=0.2) as address:
            answer = threads.submit(
                httpx.post, f"{address}/v1/completions", json={"prompt": "x"}, timeout=60
            )
            while not engine.has_work:
                time.sleep(0.01)
        go.set()
        assert answer.result(60).status_code == 503
    assert reasons == ["a step was still running at the end"]
    monkeypatch.undo()
    end_all(engine, set(threading.enumerate()) - before)


def test_a_step_that_runs_when_the_end_is_forced_is_noticed():
    """The wait for the thread is cancelled, as after a second interrupt."""
    began, go, reasons = threading.Event(), threading.Event(), []

    def step() -> list:
        began.set()
        go.wait(60)
        return []

    thread = EngineThread(types.SimpleNamespace(step=step, has_work=True, followers=None), 1)
    application = app.make_app_of(thread, types.SimpleNamespace(), Access(), reasons.append)

    async def run() -> None:
        async def serve_and_end() -> None:
            async with application.router.lifespan_context(application):
                assert await asyncio.to_thread(began.wait, 60)

        task = asyncio.create_task(serve_and_end())
        while not began.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # it waits for the thread
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()

    asyncio.run(run())
    assert reasons == ["a step was still running at the end"]
    thread._thread.join(60)


@pytest.mark.extended
def test_a_busy_thread_does_not_delay_the_end(engine, monkeypatch):
    """A request is parsed in a thread, which takes longer than the server waits for it."""
    began, go = threading.Event(), threading.Event()
    monkeypatch.setattr(app, "read_completions", lambda *_: began.set() or go.wait(120))
    with concurrent.futures.ThreadPoolExecutor() as threads:
        try:
            with serving(engine, drain_seconds=0.2) as address:  # waits 60 s for its end
                url = f"{address}/v1/completions"
                threads.submit(httpx.post, url, json={"prompt": "x"}, timeout=60)
                assert began.wait(60)
        finally:
            go.set()


@pytest.mark.parametrize("what", ["hangs", "gives-up"])
def test_calls_and_requests_fail_when_a_step_does_not_end(what):
    """Those that came after it began, and those that come after it was reported."""
    began, go = threading.Event(), threading.Event()

    def step() -> list:
        began.set()
        go.wait(60)
        return []

    thread = EngineThread(types.SimpleNamespace(step=step, has_work=True, followers=None), 1)

    async def run() -> None:
        async with thread:
            assert await asyncio.to_thread(began.wait, 60)

            async def request() -> None:
                await anext(thread.stream(Request((1,), 1)))

            asked = [
                asyncio.create_task(one) for one in (thread.call(lambda engine: "done"), request())
            ]
            await asyncio.sleep(0)
            words = "the server is shutting down"
            if what == "gives-up":
                thread.give_up()
            else:
                assert thread.check(0.0) is not None
                words = "a step has taken more than 0 seconds"
            try:
                for one in (*asked, thread.call(lambda engine: "done"), request()):
                    with pytest.raises(RuntimeError, match=words):
                        await asyncio.wait_for(one, 5)
            finally:
                go.set()

    asyncio.run(run())
    thread._thread.join(60)


def test_requests_queued_behind_the_shutdown_fail():
    thread = EngineThread(types.SimpleNamespace(has_work=False, followers=None), 1)

    async def run() -> None:
        thread._commands.put(None)
        thread._commands.put(None)
        request = asyncio.ensure_future(anext(thread.stream(Request((1,), 1))))
        await asyncio.sleep(0)  # now it is queued
        thread.start()
        with pytest.raises(RuntimeError, match="the server is shutting down"):
            await asyncio.wait_for(request, 5)

    asyncio.run(run())


def test_a_server_that_was_told_to_end_before_it_listens_ends(engine):
    told = threading.Event()
    told.set()
    listener = serve.listen("127.0.0.1", 0)
    with listener, concurrent.futures.ThreadPoolExecutor() as threads:
        ended = threads.submit(serve.run, engine, Access(), listener, told=told)
        assert ended.result(60) is None


def test_a_failure_of_the_engine_ends_the_server(engine, monkeypatch):
    def fail():
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine, "step", fail)
    listener = serve.listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listener, concurrent.futures.ThreadPoolExecutor() as threads:
        reason = threads.submit(serve.run, engine, Access(step_seconds=0.2), listener)
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=60)
        assert answer.status_code == 500
        assert reason.result(60) == "the engine has failed: the device is gone"
    monkeypatch.undo()
    end_all(engine)


@pytest.mark.parametrize("seconds", [30.0, 0.3], ids=["in-time", "too-late"])
def test_requests_are_finished_before_the_end(engine, monkeypatch, seconds):
    """The server is told to end while two requests run: they finish in time, or fail."""
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.02) or step())
    body = {"prompt": "x", "max_tokens": 60, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor() as threads:
        with serving(engine, drain_seconds=seconds) as address:
            url = f"{address}/v1/completions"
            both = [
                threads.submit(httpx.post, url, json={**body, "stream": stream}, timeout=60)
                for stream in (False, True)
            ]
            deadline = time.monotonic() + 60
            while len(engine.scheduler.running) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        whole, streamed = (one.result(60) for one in both)
    if seconds > 1:
        assert whole.json()["usage"]["completion_tokens"] == 60
        assert streamed.text.endswith("data: [DONE]\n\n")
    else:
        assert whole.status_code == 503
        assert whole.json()["error"]["message"] == "the server is shutting down"
        assert "the server is shutting down" in streamed.text.splitlines()[-2]
    monkeypatch.undo()
    wait_until_idle(engine)


def test_a_busy_port_is_reported_before_anything_is_compiled(monkeypatch, capsys):
    monkeypatch.setattr(serve, "build", lambda options: pytest.fail("the model was built"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        with pytest.raises(SystemExit) as exit:
            serve.main(["--port", port])
    assert exit.value.code == 2
    assert f"127.0.0.1:{port}: Address already in use\n" in capsys.readouterr().err


def test_bundled_models_are_served_by_name_and_a_failure_exits(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(serve, "load_model", lambda path, *_, **__: asked.append(path) or 1 / 0)
    for arguments in ([], ["--model", "byte-gemma"], ["--model", "qwen3-tiny"]):
        with pytest.raises(ZeroDivisionError):
            serve.main(["--port", "0", *arguments])
    assert [path.name for path in asked] == ["byte-gemma", "byte-gemma", "qwen3-tiny"]
    assert all(path.is_dir() for path in asked)

    monkeypatch.setattr(serve, "build", lambda options: (None, None, None))
    monkeypatch.setattr(serve, "run", lambda engine, access, *_, **__: f"{access.api_key} failed")
    monkeypatch.setattr(serve, "end_process", sys.exit)
    monkeypatch.setenv("JATTN_API_KEY", "another")
    for key, given in (("it", ["--api-key", "it"]), ("another", [])):
        with pytest.raises(SystemExit) as exit:
            serve.main(["--port", "0", *given])
        assert exit.value.code == 1
        assert f"{key} failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [MemoryError("Unable to allocate 745. GiB"), RuntimeError("RESOURCE_EXHAUSTED: Out of\nmany")],
)
def test_a_lack_of_memory_at_startup_is_reported(error, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(serve, "build", fail)
    monkeypatch.setattr(starting, "end_process", sys.exit)
    with pytest.raises(SystemExit) as exit:
        serve.main(["--port", "0"])
    assert exit.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: not enough memory: {str(error).splitlines()[0]}" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/no/such/place"], "/no/such/place: no such directory"),
        (["--unified"], "--unified is for models with recurrent layers"),
        (["--blocks", "3"], "blocks of 16 tokens are too few"),
        (["--kv-format", "int3"], "invalid choice: 'int3'"),
        (["--port", "99999"], "--port: '99999' is not an integer from 0 to 65535"),
        (["--max-seqs", "0"], "'0' is not an integer of at least 1"),
        (["--coordinator", "x:1"], "--coordinator is for several processes: add --num-processes N"),
        (["--coordinator", "x", "--num-processes", "2"], "is 'x', but must be HOST:PORT"),
        (["--process-id", "0"], "--process-id is for several processes: add --num-processes N"),
        (["--host-cache", "1", "--no-prefix-cache"], "leave out --no-prefix-cache"),
        (["--host-cache", "1e305"], "'1e305' is not a number of GiB of at least 0"),
        (["--host", ""], "--host is empty, but must be an address"),
        (["--api-key", ""], "--api-key or JATTN_API_KEY is empty, or has a line break"),
        (["--api-key", "key\n"], "--api-key or JATTN_API_KEY is empty, or has a line break"),
        (["--heartbeat", "9"], "--heartbeat is for several processes: add --num-processes N"),
        (["--restart-wait", "9"], "--restart-wait is for a server that restarts: add --restarts N"),
        (["--restart-wait", "9", "--restarts", "0"], "--restart-wait is for a server that"),
        (
            ["--compilation-cache", "x", "--no-compilation-cache"],
            "cannot be combined with --no-compilation-cache",
        ),
        (["--max-len", "9999999"], "--max-len is 9999999, but must be at most "),
        (["--max-lora-rank", "8"], "--max-lora-rank is for adapters: add --lora NAME=DIR or"),
    ],
)
def test_wrong_options_are_reported(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit:
        serve.main(["--port", "0", *arguments])
    assert exit.value.code == 2
    assert words in capsys.readouterr().err
