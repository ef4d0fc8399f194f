"""Generation by sglang-jax with jattn, in separate processes, and a reference to compare with.

`tests/integrations/test_sglang_jax*.py` use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.support import numpy_model, processes

COUNT = 12
FLAGS = {
    "attention_backend": "fa",
    "chunked_prefill_size": 64,
    "context_length": 256,
    "device": "cpu",
    "dtype": "float32",
    "max_prefill_tokens": 256,
    "max_running_requests": 8,
    "max_total_tokens": 2048,
    "mem_fraction_static": 0.5,
    "random_seed": 0,
}
# Fields of a request that are not sampling parameters.
NOT_OF_SAMPLING = (
    "bootstrap_room",
    "extra_key",
    "logprob_start_len",
    "lora_id",
    "return_hidden_states",
    "return_logprob",
    "return_routed_experts",
    "rid",
    "text",
    "token_ids_logprob",
    "top_logprobs_num",
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(processes.ROOT),
    "SGLANG_CI_SMALL_KV_SIZE": "4096",  # otherwise the draft pool takes half of the memory
    "SGLANG_JAX_CONV_STATE_DTYPE": "float32",  # the default is bfloat16, even in float32 models
    "XLA_FLAGS": "",
}
GENERATE = """
import json, os, sys
import jattn.integrations.sglang_jax

jattn.integrations.sglang_jax.install()
from sgl_jax.srt.entrypoints.engine import Engine

given = json.loads(sys.argv[1])
engine = Engine(
    model_path=given["folder"], skip_tokenizer_init=True, enable_single_process=True,
    disable_precompile=True, **given["engine"],
)
greedy = {"temperature": 0.0, "max_new_tokens": given["count"], "ignore_eos": True}
sampling = [{**greedy, **fields} for fields in given["sampling"]]
answers, drafts = [], "speculative_algorithm" in given["engine"]  # the host then has no logprobs
for turn in range(2):  # the second time, from the prefix cache
    answers += engine.generate(
        input_ids=given["prompts"], sampling_params=sampling, return_logprob=not drafts
    )
found = [
    (answer["output_ids"], [one[0] for one in answer["meta_info"].get("output_token_logprobs", ())])
    for answer in answers
]
cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
print("RESULT", json.dumps({"found": found, "cached": cached}), flush=True)
os._exit(0)
"""


def environment(devices: int) -> dict[str, str]:
    return {**ENVIRONMENT, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}


def prompts() -> list[list[int]]:
    """Prompts of several lengths; two share a prefix of more than two pages."""
    rng = np.random.default_rng(0)
    found = [rng.integers(3, 90, length).tolist() for length in (21, 5, 75, 16)]
    return [*found, found[2][:40] + found[0]]


@dataclasses.dataclass(frozen=True)
class Judged:
    """A checkpoint, and how the NumPy reference (the judge) continues the prompts."""

    config: dict
    folder: str
    weights: numpy_model.Weights
    tokens: list[list[int]]

    def logprobs(self, precision: object = np.float64, **changes: object) -> list[list[float]]:
        """Return the judge's log probabilities, with another precision or configuration."""
        config = {**self.config, **changes}
        return [
            numpy_model.logprobs(config, self.weights, prompt + tokens, COUNT, precision)
            for prompt, tokens in zip(prompts(), self.tokens, strict=True)
        ]


def judged(folder, config: dict) -> Judged:
    weights = numpy_model.make(folder, config)
    tokens = [numpy_model.greedy(config, weights, prompt, COUNT) for prompt in prompts()]
    return Judged(config, str(folder), weights, tokens)


def start(
    folder: str,
    devices: int = 1,
    texts: list[list[int]] | None = None,
    count: int = COUNT,
    sampling: list[dict[str, object]] | None = None,
    **engine: object,
) -> subprocess.Popen[str]:
    texts = texts or prompts()
    given = {"folder": folder, "prompts": texts, "count": count}
    given["sampling"] = sampling or [{}] * len(texts)
    given["engine"] = {**FLAGS, **engine}
    return subprocess.Popen(
        [sys.executable, "-c", GENERATE, json.dumps(given)],
        env={**os.environ, **environment(devices)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    folder: str,
    devices: int = 1,
    texts: list[list[int]] | None = None,
    count: int = COUNT,
    sampling: list[dict[str, object]] | None = None,
    said: str = "",
    **engine: object,
) -> list[tuple[list[int], list[float]]]:
    """Run the engine, and return tokens and their log probabilities for each prompt.

    The engine serves the prompts twice, the second time from its prefix cache. `sampling` has the
    sampling parameters of each prompt, greedy by default. `said` is a regular expression that the
    engine's log must match.
    """
    with start(folder, devices, texts, count, sampling, **engine) as process:
        try:
            out, errors = process.communicate(timeout=600)
        finally:
            process.kill()
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    assert lines, errors[-6000:]
    assert re.search(said, errors), errors[-6000:]
    found, cached = json.loads(lines[-1].removeprefix("RESULT ")).values()
    first, again = found[: len(found) // 2], found[len(found) // 2 :]
    if not engine.get("disable_radix_cache"):
        assert max(cached[len(first) :]) >= 64
    if engine.get("dtype", "float32") == "float32" and sampling is None:
        assert [row[:count] for row, _ in again] == [row[:count] for row, _ in first]
    return first


def generate(folder: str, devices: int = 1, **engine: object) -> list[list[int]]:
    return [tokens for tokens, _ in run(folder, devices, **engine)]


@contextlib.contextmanager
def server(folder: str, tmp_path, *flags: str, devices: int = 1) -> Iterator[str]:
    """Run the host's server with jattn, its scheduler in a separate process; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "jattn.integrations.sglang_jax", "--model-path", folder]
    command += ["--port", port, "--disable-precompile", "--skip-server-warmup", *flags]
    for name, value in FLAGS.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment(devices)},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = time.monotonic() + 300
            while not processes.answers(f"http://127.0.0.1:{port}/health"):
                late = process.poll() is not None or time.monotonic() > end
                assert not late, (tmp_path / "log").read_text()[-6000:]
                time.sleep(1)
            yield f"http://127.0.0.1:{port}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ask(address: str, **fields: object) -> tuple[int, dict]:
    """Send a request, greedy by default, and return the response's status and body.

    Fields are sampling parameters, except those in `NOT_OF_SAMPLING`.
    """
    return post(address, "generate", asked(**fields))


def asked(**fields: object) -> dict[str, object]:
    """Return a request for a completion, of the first prompt by default."""
    given = {} if "text" in fields else {"input_ids": fields.pop("input_ids", prompts()[0])}
    given |= {name: fields.pop(name) for name in NOT_OF_SAMPLING if name in fields}
    sampling = {"temperature": 0.0, "max_new_tokens": COUNT, "ignore_eos": True, **fields}
    return {**given, "sampling_params": sampling}


def post(address: str, path: str, body: dict[str, object]) -> tuple[int, Any]:
    """Send a request, and return the response's status and body."""
    try:
        with send(address, path, body) as answer:
            return answer.status, json.loads(answer.read() or "null")
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        with contextlib.suppress(json.JSONDecodeError):
            return error.code, json.loads(text)
        return error.code, text


def stream(address: str, **fields: object) -> list[dict]:
    """Return the events of a streamed response, each with all text so far."""
    with send(address, "generate", {**asked(**fields), "stream": True}) as answer:
        lines = [line.decode().strip().removeprefix("data: ") for line in answer]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


def send(address: str, path: str, body: dict[str, object]) -> Any:
    request = urllib.request.Request(
        f"{address}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=300)
