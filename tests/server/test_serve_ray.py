"""Replicas behind Ray Serve: requests outlive a replica, and load starts and stops replicas.

Needs Ray, and a few minutes:

    pip install -e '.[ray]' pytest httpx
    pytest -m hosts tests/server/test_serve_ray.py
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from benchmarks.serving.servers import free_port
from tests.support import processes

pytestmark = [pytest.mark.hosts]
if not (importlib.util.find_spec("ray") and importlib.util.find_spec("httpx")):
    pytestmark.append(pytest.mark.skip(reason="needs Ray: pip install 'jattn[ray]'"))
else:
    import httpx

NUM_TOKENS = 150
MARK = f"jattn-{os.getpid()}"  # marks, in their environment, the processes that this file starts

# The server, with short delays; the first replica that gets prompt 7, 7, 7 loses its engine.
SERVER = """
import os, sys
from examples import serve_ray

class Replica(serve_ray.Replica):
    async def stream(self, call):
        if call.request.prompt == (7, 7, 7):
            try:
                os.mkdir(os.environ["JATTN_TEST_FOLDER"] + "/failed")
            except FileExistsError:
                pass
            else:
                self._thread.engine.step = self._thread.engine.recover = None
        async for token in super().stream(call):
            yield token

serve_ray.Replica = Replica
serve_ray.PACE.update(look_back_period_s=5.0, upscale_delay_s=2.0, downscale_delay_s=5.0)
serve_ray.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("option", "words"),
    {
        "--coordinator=localhost:1": "--coordinator is for engine.serve: a replica is one process",
        "--num-processes=2": "--num-processes is for engine.serve",
        "--process-id=0": "--process-id is for engine.serve",
        "--cluster": "--cluster is for engine.serve",
        "--heartbeat=5": "--heartbeat is for engine.serve: a replica is one process",
        "--prefill-tokens=9": "--prefill-tokens is for engine.serve",
        "--role=prefill": "--role is for engine.serve: a replica does both prefill and",
        "--prefill-server=http://localhost:1": "--prefill-server is for engine.serve",
        "--lora-folder=.": "--lora-folder is for engine.serve: replicas load adapters at startup",
        "--restarts=3": "--restarts is for engine.serve: Ray replaces a replica that dies",
        "--restart-wait=3": "--restart-wait is for engine.serve",
        "--mesh=tensor=2,data=2": "but replicas replace data=N",
        "--replicas=3:2": "'3:2' must not have FEWEST above MOST",
    }.items(),
)
def test_options_that_replicas_refuse(option, words):
    done = subprocess.run(
        [sys.executable, "-m", "examples.serve_ray", option],
        cwd=processes.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr


@pytest.fixture(scope="module")
def client(request, tmp_path_factory):
    """A client of a server with two replicas, or with the test's `--replicas`."""
    folder = tmp_path_factory.mktemp("ray")
    port = free_port()
    sizes = {"max-seqs": 4, "token-budget": 16, "max-len": 256, "cpus": 0.5}
    more = {"replicas": getattr(request, "param", "2"), "port": port}
    options = [f"--{name}={value}" for name, value in {**sizes, **more}.items()]
    command = [sys.executable, "-c", SERVER, "--model=qwen3-tiny", *options]
    environment = {
        "PYTHONPATH": str(processes.ROOT),
        "JAX_PLATFORMS": "cpu",
        "JATTN_TEST_FOLDER": str(folder),
        "JATTN_TEST_MARK": MARK,
        "XDG_CACHE_HOME": str(folder),
    }
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            cwd=processes.ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            wait_for(lambda: "serving on" in (folder / "log").read_text(), server, folder / "log")
            yield client
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        finally:
            server.kill()
    assert not replicas_running(), "the server left processes behind"


def wait_for(happened, server=None, log=None, seconds: float = 540) -> None:
    """Wait until something has happened."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert server is None or server.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log and log.read_text()[-4000:]
        time.sleep(0.2)


def replicas_running() -> list[int]:
    """Return the process ids of replicas that this file has started."""
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        try:
            name = (folder / "cmdline").read_bytes()
            if name.startswith(b"ray::ServeReplica:default:replica"):
                environment = (folder / "environ").read_bytes()
                found += (
                    [int(folder.name)] if f"JATTN_TEST_MARK={MARK}".encode() in environment else []
                )
        except OSError:
            continue  # it has ended
    return found


def metrics(client, name: str) -> dict[str, float]:
    """Return a metric by replica; the name "" stands for the server itself."""
    text = client.get("/metrics").text
    found = re.findall(rf'^jattn_{name}(?:{{replica="(\w+)"}})? (\S+)$', text, re.MULTILINE)
    return {replica: float(value) for replica, value in found}


def body(first: int, **more) -> dict:
    """Return a distinct request, which ends after `NUM_TOKENS` tokens."""
    prompt = [first, *range(1, 20)]
    return dict(prompt=prompt, max_tokens=NUM_TOKENS, ignore_eos=True, seed=first, **more)


def complete(client, body: dict, begun=lambda: None) -> str:
    """Return the text of a request; `begun` is called for every part of a stream."""
    if not body.get("stream"):
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == NUM_TOKENS
        return answer.json()["choices"][0]["text"]
    text = ""
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line and not begun()]
    assert lines.pop() == "data: [DONE]", lines[-1]
    for line in lines:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        text += choice["text"]
    assert choice["finish_reason"] == "length"
    return text


def test_the_endpoints_behave_as_with_one_engine(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["qwen3-tiny"]
    for wrong, status in (({"prompt": []}, 400), ({"prompt": [1], "model": "other"}, 404)):
        answer = client.post("/v1/completions", json=wrong)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    asked = {"prompt": [5, 6], "max_tokens": 4, "logprobs": 2, "echo": True, "temperature": 0}
    (choice,) = client.post("/v1/completions", json=asked).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == 6
    follows = {"prompt": [5, 6], "max_tokens": 9, "structured_outputs": {"regex": "a{3}b"}}
    (choice,) = client.post("/v1/completions", json=follows).json()["choices"]
    assert choice["text"] == "aaab"


def test_prompts_that_begin_alike_go_to_one_replica(client):
    """Two system prompts of 160 tokens: each is read once, whatever follows it."""
    before = metrics(client, "prefix_cache_hit_tokens_total")
    assert len(before) == 2
    for i in range(5):
        for system in (31, 37):
            asked = {"prompt": [system] * 160 + [i], "max_tokens": 1}
            assert client.post("/v1/completions", json=asked).status_code == 200
    after = metrics(client, "prefix_cache_hit_tokens_total")
    assert sum(after.values()) - sum(before.values()) == 2 * 4 * 160


def test_requests_outlive_a_replica(client):
    bodies = [body(i, stream=i % 2 == 0, temperature=i % 3 / 2) for i in range(12)]
    expected = [complete(client, {**one, "stream": False}) for one in bodies]
    assert len(set(expected)) == 12
    running = replicas_running()
    assert len(running) == 2
    busy = metrics(client, "requests_received_total")
    retried = metrics(client, "requests_retried_total")[""]
    begun = []
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(complete, client, one, lambda: begun.append(1)) for one in bodies]
        wait_for(lambda: len(begun) > 60)
        now = metrics(client, "requests_received_total")
        assert all(now[name] > busy[name] for name in busy), "a replica got no requests"
        os.kill(running[0], signal.SIGKILL)
        assert [answer.result() for answer in answers] == expected
    assert metrics(client, "requests_retried_total")[""] > retried
    wait_for(lambda: len(metrics(client, "steps_total")) == 2)  # a new one has started
    assert running[1] in replicas_running()
    assert running[0] not in replicas_running()


def test_a_replica_whose_engine_has_stopped_is_replaced(client):
    before = set(replicas_running())
    assert len(before) == 2
    asked = {**body(1), "prompt": [7, 7, 7]}
    assert len(complete(client, asked)) > 0
    wait_for(lambda: len(metrics(client, "steps_total")) == 2)
    wait_for(lambda: len(before & set(replicas_running())) == 1)
    wait_for(lambda: len(replicas_running()) == 2)


@pytest.mark.parametrize("client", ["1:2"], indirect=True)
def test_load_starts_a_replica_which_stops_after_it(client):
    """Twelve requests at a time are too many for one replica; one at a time is too few for two."""
    bodies = [body(i, stream=i % 2 == 0, temperature=i % 3 / 2) for i in range(12)]
    expected = [complete(client, {**one, "stream": False}) for one in bodies]
    assert len(replicas_running()) == 1
    (name,) = metrics(client, "steps_total")
    grown, shrunk = threading.Event(), threading.Event()

    def ask_until(event: threading.Event, index: int) -> int:
        count = 0
        while not event.is_set():
            assert complete(client, bodies[index]) == expected[index]
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask_until, grown, i) for i in range(12)]
        try:
            wait_for(lambda: has_work(client, besides=name), seconds=300)
            assert len(replicas_running()) == 2
        finally:
            grown.set()
        assert all(one.result() for one in asked)
        asked = pool.submit(ask_until, shrunk, 0)
        try:
            wait_for(lambda: len(replicas_running()) == 1, seconds=120)
        finally:
            shrunk.set()
        assert asked.result()
    wait_for(lambda: len(metrics(client, "steps_total")) == 1, seconds=60)
    assert [complete(client, one) for one in bodies] == expected


def has_work(client, besides: str) -> bool:
    """Whether a replica other than that one has been given requests."""
    received = metrics(client, "requests_received_total")
    return any(count for name, count in received.items() if name not in ("", besides))
