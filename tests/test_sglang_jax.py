"""sglang-jax with jattn in the place of its TPU kernel, judged by NumPy in float64.

Needs the host, in an environment of its own, and minutes:

    pip install -e . 'sglang-jax[cpu]==0.1.0rc0' pytest
    pytest -m hosts tests/test_sglang_jax.py
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from tests.support import numpy_qwen3, processes

pytestmark = [pytest.mark.hosts]
if not importlib.util.find_spec("sgl_jax"):
    pytestmark.append(
        pytest.mark.skip(reason="needs sglang-jax: pip install 'sglang-jax[cpu]==0.1.0rc0'")
    )

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
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(processes.ROOT),
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
sampling = {"temperature": 0.0, "max_new_tokens": given["count"], "ignore_eos": True}
answers = engine.generate(input_ids=given["prompts"], sampling_params=sampling)
print("RESULT", json.dumps([answer["output_ids"] for answer in answers]), flush=True)
os._exit(0)
"""


def prompts() -> list[list[int]]:
    """Prompts of several lengths; two of them begin alike, for more than two pages."""
    rng = np.random.default_rng(0)
    found = [rng.integers(3, 90, length).tolist() for length in (21, 5, 75, 16)]
    return [*found, found[2][:40] + found[0]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder, and the judge's tokens."""
    folder = tmp_path_factory.mktemp("qwen3")
    weights = numpy_qwen3.make(folder)
    return str(folder), [numpy_qwen3.greedy(weights, prompt, COUNT) for prompt in prompts()]


def start(folder: str, devices: int = 1, **engine: object) -> subprocess.Popen[str]:
    given = {"folder": folder, "prompts": prompts(), "count": COUNT, "engine": {**FLAGS, **engine}}
    return subprocess.Popen(
        [sys.executable, "-c", GENERATE, json.dumps(given)],
        env={
            **os.environ,
            **ENVIRONMENT,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        },
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def generate(folder: str, devices: int = 1, **engine: object) -> list[list[int]]:
    with start(folder, devices, **engine) as process:
        try:
            out, errors = process.communicate(timeout=600)
        finally:
            process.kill()
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    assert lines, errors[-6000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.mark.parametrize("page_size", [16, 1])
def test_tokens_are_the_judges(checkpoint, page_size):
    folder, want = checkpoint
    assert generate(folder, page_size=page_size) == want


def test_the_server_s_scheduler_has_a_process_of_its_own(checkpoint, tmp_path):
    folder, want = checkpoint
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "jattn.integrations.sglang_jax", "--model-path", folder]
    command += ["--port", port, "--skip-tokenizer-init", "--disable-precompile"]
    command += ["--skip-server-warmup"]
    for name, value in FLAGS.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            answers = ask(f"http://127.0.0.1:{port}", server)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    assert answers is not None, (tmp_path / "log").read_text()[-6000:]
    assert [answer["output_ids"] for answer in answers] == want


def ask(address: str, server: subprocess.Popen[bytes]) -> list[dict] | None:
    """The server's answers to all prompts, or None if it ends or does not start in time."""
    sampling = {"temperature": 0.0, "max_new_tokens": COUNT, "ignore_eos": True}
    given = {"input_ids": prompts(), "sampling_params": sampling}
    request = urllib.request.Request(
        f"{address}/generate", json.dumps(given).encode(), {"Content-Type": "application/json"}
    )
    end = time.monotonic() + 300
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError):  # not listening yet, or gone
            time.sleep(1)
    return None


def test_two_devices_share_the_heads(checkpoint):
    folder, want = checkpoint
    assert generate(folder, devices=2, page_size=16, tp_size=2) == want


def test_two_processes_share_the_heads(checkpoint):
    folder, want = checkpoint
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = {"page_size": 16, "tp_size": 2, "nnodes": 2, "dist_init_addr": address}
    with start(folder, node_rank=1, **nodes) as other:
        try:
            assert generate(folder, node_rank=0, **nodes) == want
        finally:
            other.kill()
