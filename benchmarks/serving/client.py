"""Put load on a server with OpenAI's API, and record when every token arrived.

Prompts are lists of tokens. The text of token 17 is " t17" (`write_words`), so that the tokens of
an output can be read from its text, whichever server made it. The client has one thread per request
and uses only the standard library, because it shares the cores with the server.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.serving import records


def write_words(directory: Path, vocab_size: int) -> None:
    """Give a checkpoint a tokenizer in which the text of token i is " t{i}"."""
    words = {f"\u2581t{i}": i for i in range(vocab_size)}
    space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "\u2581t0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "\u2581t0"}
    (directory / "tokenizer_config.json").write_text(json.dumps(kind))


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text of such words."""
    return [int(word.removeprefix("t")) for word in text.split()]


class RefusedError(Exception):
    """A server returned an error, or not what was asked for."""


@dataclass(frozen=True)
class Answer:
    """The outcome of one request. Seconds are of `time.perf_counter`."""

    tokens: tuple[int, ...]
    asked: float  # when it was due: the wait to be sent counts
    first: float  # when its first token arrived
    last: float


class Client:
    """A client of one server."""

    def __init__(self, url: str, patience: float = 600.0):
        """Store where the server is.

        Args:
          url: without a path, such as http://localhost:8000.
          patience: seconds to wait for anything the server sends.
        """
        self._address, self._patience = urlsplit(url).netloc, patience
        self._model: str | None = None

    @contextlib.contextmanager
    def send(
        self, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield the response, to be read before the context ends.

        Raises:
          RefusedError: the status is not 200.
          OSError: there is no server.
        """
        connection = http.client.HTTPConnection(self._address, timeout=self._patience)
        headers = {"content-type": "application/json", "connection": "close"}
        text = None if body is None else json.dumps(body)
        with contextlib.closing(connection):
            connection.request("GET" if body is None else "POST", path, text, headers)
            with connection.getresponse() as answer:
                if answer.status != 200:
                    raise RefusedError(
                        f"{self._address}{path}: {answer.status} {answer.read()[:500]!r}"
                    )
                yield answer

    @property
    def model(self) -> str:
        """Return the name of the server's only model."""
        if self._model is None:
            with self.send("/v1/models") as answer:
                self._model = json.load(answer)["data"][0]["id"]
        return self._model

    def metric(self, name: str) -> float:
        """Return a metric of the server, without labels.

        Raises:
          RefusedError: the server has no metric of that name.
        """
        with self.send("/metrics") as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.split()[1])
        raise RefusedError(f"{self._address}/metrics has no {name}")

    def _completion(self, prompt: Sequence[int], count: int, **more: Any) -> dict[str, Any]:
        asked = {"model": self.model, "prompt": list(prompt), "max_tokens": count}
        return {**asked, "temperature": 0, **more}

    def ask(self, prompt: Sequence[int], count: int, due: float | None = None) -> Answer:
        """Request `count` tokens after a prompt, greedily, as a stream.

        Raises:
          RefusedError: the response is an error, or has another number of tokens.
        """
        due = time.perf_counter() if due is None else due
        parts, times = [], []
        with self.send("/v1/completions", self._completion(prompt, count, stream=True)) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise RefusedError(f"{self._address}: {event['error']}")
                if event["choices"] and (text := event["choices"][0]["text"]):
                    parts.append(text)
                    times.append(time.perf_counter())
        tokens = tokens_of("".join(parts))
        if len(tokens) != count:
            raise RefusedError(
                f"{self._address}: {count} tokens were requested, but {len(tokens)} arrived"
            )
        return Answer(tuple(tokens), due, times[0], times[-1])

    def next_tokens(self, prompt: Sequence[int], most: int = 20) -> dict[int, float]:
        """Return the likeliest tokens after a prompt, with their logprobs."""
        body = self._completion(prompt, 1, logprobs=most)
        with self.send("/v1/completions", body) as answer:
            (found,) = json.load(answer)["choices"][0]["logprobs"]["top_logprobs"]
        return {tokens_of(text)[0]: value for text, value in found.items()}


def drive(
    client: Client,
    prompts: Sequence[Sequence[int]],
    new: Sequence[int],
    *,
    concurrent: int | None = None,
    arrivals: np.ndarray | None = None,
) -> list[Answer]:
    """Send prompts, and return the answers in order.

    Args:
      client: of the server.
      prompts, new: the prompts, and how many tokens to generate after each.
      concurrent: how many requests run at once, the next starting when one finishes; None: all.
      arrivals: seconds from now at which each request is sent; None: at once.
    """
    start = time.perf_counter()

    def one(index: int) -> Answer:
        due = None
        if arrivals is not None:
            due = start + float(arrivals[index])
            time.sleep(max(0.0, due - time.perf_counter()))
        return client.ask(prompts[index], new[index], due)

    with ThreadPoolExecutor(concurrent or len(prompts)) as threads:
        return list(threads.map(one, range(len(prompts))))


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the throughput and latencies of a run."""
    return records.rates((a.asked, a.first, a.last, len(a.tokens)) for a in answers)
