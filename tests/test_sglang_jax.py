"""sglang-jax with jattn in the place of its TPU kernel, judged by NumPy in float64.

Needs the host, in an environment of its own, and minutes:

    pip install -e . 'sglang-jax[cpu]==0.1.0rc0' pytest
    pytest -m hosts tests/test_sglang_jax.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.support import numpy_qwen3, processes

pytestmark = [pytest.mark.hosts]
if not importlib.util.find_spec("sgl_jax"):
    pytestmark.append(
        pytest.mark.skip(reason="needs sglang-jax: pip install 'sglang-jax[cpu]==0.1.0rc0'")
    )

COUNT = 12
GENERATE = """
import json, os, sys
import jattn.integrations.sglang_jax

jattn.integrations.sglang_jax.install()
from sgl_jax.srt.entrypoints.engine import Engine

given = json.loads(sys.argv[1])
engine = Engine(
    model_path=given["folder"], device="cpu", dtype="float32", attention_backend="fa",
    skip_tokenizer_init=True, enable_single_process=True, disable_precompile=True,
    max_total_tokens=2048, max_running_requests=8, max_prefill_tokens=256,
    chunked_prefill_size=64, context_length=256, mem_fraction_static=0.5, random_seed=0,
    **given["engine"],
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
    given = {"folder": folder, "prompts": prompts(), "count": COUNT, "engine": engine}
    return subprocess.Popen(
        [sys.executable, "-c", GENERATE, json.dumps(given)],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(processes.ROOT),
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
