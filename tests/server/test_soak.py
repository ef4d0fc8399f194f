"""The server under mixed traffic for a long time: memory does not grow, texts stay the same.

    SOAK_MINUTES=30 pytest -m soak tests/server/test_soak.py

Clients stream, read slowly, leave, and ask for several texts, structured output, adapters or
nonsense. The server's pools are so small that prompts wait, are preempted, and return from host
memory.
"""

# ruff: noqa: E402 (a missing package skips the file before the imports below)

from __future__ import annotations

import collections
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

httpx = pytest.importorskip("httpx", reason="the soak test needs the serve extra")
pytest.importorskip("uvicorn", reason="the soak test needs the serve extra")

from examples.engine.caches import group_layers
from examples.engine.drafts.speculation import Speculation
from examples.engine.engine import Engine
from examples.engine.model import load_model
from examples.engine.scheduler import Limits
from examples.engine.step import make_buckets
from examples.engine.structure import load_grammars
from examples.models.lora import Room
from examples.options import CHECKPOINTS
from examples.text import Bytes
from tests.support.lora import write_adapter
from tests.support.serving import serving, wait_until_idle

MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
CLIENTS, PROMPTS, NEW = 6, 12, 16
ADAPTERS = ("a", "b")
# Only attention, and with recurrent states, which are rolled back after drafts.
NAMES = ("qwen3-tiny", "qwen3-next-tiny")
WARM = 0.3  # share of the time in which memory may still grow: allocators, the host cache
MOST_GROWTH = 24 << 20  # bytes, after that
MANY = 5  # the least requests of every kind
KEPT = 5.0  # seconds that the server keeps an idle connection


def build(folder: Path, name: str) -> tuple[Engine, object]:
    model = load_model(CHECKPOINTS / name)
    loras = {n: write_adapter(folder / n, model, seed=i) for i, n in enumerate(ADAPTERS)}
    limits = Limits(group_layers(model.layers), 4, 40, 8, 96, {"global": 30}, adapters=Room(2, 4))
    speculation = Speculation(3, shortest=1, backs_off=False)  # drafts even if they do not pay
    engine = Engine(
        model,
        limits,
        tokenizer=Bytes(),
        buckets=make_buckets(limits, [4], [40], num_drafts=speculation.num_drafts),
        loras=loras,
        host_cache_bytes=1 << 20,
        speculation=speculation,
    )
    grammars = load_grammars(CHECKPOINTS / name, Bytes(), model.vocab_size, model.stop_tokens)
    return engine, grammars


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Traffic:
    """Clients that send all kinds of requests."""

    def __init__(self, url: str, name: str):
        rng = np.random.default_rng(0)
        shared = rng.integers(0, 256, size=(3, 40)).tolist()
        self.prompts = [
            shared[i % 3] + rng.integers(0, 256, size=1 + i).tolist() for i in range(PROMPTS)
        ]
        self.url, self.counts, self.wrong = url, collections.Counter(), []
        self.models = (name, *ADAPTERS)
        self.num_closed = 0  # requests that found their connection closed
        self.expected = self.ask_all()
        self.end = False

    def body(self, which: int, **more) -> dict:
        """Return greedy request number `which`, which chooses its prompt and model."""
        model = self.models[which % 3]
        given = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True}
        return {"model": model, "prompt": self.prompts[which // 3], **given, **more}

    def ask_all(self) -> list[str]:
        """Return the texts of all requests, sent one after another."""
        with httpx.Client(base_url=self.url, timeout=300) as client:
            return [self.text(client, which) for which in range(3 * PROMPTS)]

    def text(self, client, which: int) -> str:
        answer = client.post("/v1/completions", json=self.body(which))
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def run(self, seed: int) -> None:
        """Run a client until the end."""
        rng = np.random.default_rng([1, seed])
        kinds = [self.whole, self.streamed, self.gone, self.several, self.structured, self.refused]
        with httpx.Client(base_url=self.url, timeout=300) as client:
            while not self.end:
                kind = kinds[rng.integers(len(kinds))]
                which = int(rng.integers(3 * PROMPTS))
                try:
                    if not kind(client, which, rng):
                        self.wrong.append(f"{kind.__name__} {which}")
                except httpx.RemoteProtocolError as error:
                    if "without sending a response" not in str(error):
                        self.wrong.append(f"{kind.__name__} {which}: {error!r}")
                    self.num_closed += 1
                except Exception as error:
                    self.wrong.append(f"{kind.__name__} {which}: {error!r}")
                self.counts[kind.__name__] += 1

    def whole(self, client, which, rng) -> bool:
        return self.text(client, which) == self.expected[which]

    def streamed(self, client, which, rng) -> bool:
        """Read a stream, sometimes slowly."""
        pause, size = float(rng.choice([0, 0, 0.05])), 0
        body = self.body(which, stream=True)
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                size += line.startswith("data: ")
                time.sleep(pause)
        return size > 2 and line == ""

    def gone(self, client, which, rng) -> bool:
        body = self.body(which, stream=True)
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for _ in zip(range(int(rng.integers(4))), answer.iter_lines(), strict=False):
                pass
        return answer.status_code == 200

    def several(self, client, which, rng) -> bool:
        body = self.body(which, n=3, temperature=1.0, seed=which, logprobs=2)
        return len(client.post("/v1/completions", json=body).json()["choices"]) == 3

    def structured(self, client, which, rng) -> bool:
        body = self.body(which, structured_outputs={"regex": "(yes|no){2}"})
        text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        return text in {"yesyes", "yesno", "noyes", "nono"}

    def refused(self, client, which, rng) -> bool:
        bodies = [{"max_tokens": 0}, {"model": "none"}, {"prompt": [999]}, {"n": "many"}]
        body = self.body(which) | bodies[rng.integers(len(bodies))]
        return client.post("/v1/completions", json=body).status_code in (400, 404)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_memory_does_not_grow_and_texts_stay_the_same(tmp_path, name):
    engine, grammars = build(tmp_path, name)
    with serving(engine, grammars=grammars, max_requests=256) as url:
        traffic = Traffic(url, name)
        wait_until_idle(engine)
        descriptors = len(os.listdir("/proc/self/fd"))
        clients = [threading.Thread(target=traffic.run, args=[i]) for i in range(CLIENTS)]
        begin, sizes, num_stops = time.monotonic(), [], 0
        for client in clients:
            client.start()
        while (spent := time.monotonic() - begin) < 60 * MINUTES:
            time.sleep(min(2.0, 6 * MINUTES))
            num_stops += time.monotonic() - begin - spent > KEPT
            if spent > WARM * 60 * MINUTES:
                sizes.append(resident())
        traffic.end = True
        for client in clients:
            client.join(300)
            assert not client.is_alive()
        wait_until_idle(engine)
        host, done = engine.host_cache, engine.statistics
        print(
            f"{dict(traffic.counts)}; memory {sizes[0] >> 20} to {max(sizes) >> 20} MiB; "
            f"{done.num_steps} steps, {done.num_drafted_chunks} with drafts, "
            f"{done.num_preemptions} preemptions, "
            f"{host.num_returned} blocks returned, {host.num_dropped} dropped, "
            f"{done.finished['abort']} aborted, {num_stops} stops of the process"
        )
        assert traffic.wrong == []
        # If a busy machine stops the process so long that the server closes idle connections, a
        # request may be on its way over one of them.
        assert traffic.num_closed <= CLIENTS * num_stops
        assert traffic.ask_all() == traffic.expected
        wait_until_idle(engine)
        deadline = time.monotonic() + 30  # the server closes connections in its own time
        while len(os.listdir("/proc/self/fd")) > descriptors and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert min(traffic.counts.values()) >= MANY
        assert len(traffic.counts) == 6
        assert host.num_returned > 0
        assert host.used_bytes <= host.max_bytes
        assert done.finished["abort"] > 0
        assert done.num_drafted_chunks > 0
        # Compare the medians of the two parts of the run: a leak would grow with the requests.
        half = len(sizes) // 2
        assert np.median(sizes[half:]) - np.median(sizes[:half]) < MOST_GROWTH
