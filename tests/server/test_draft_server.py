"""The server command with a draft model: OpenAI's client sees no difference."""

# ruff: noqa: E402 (a missing package skips the file before the imports below)

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support import extras

httpx = extras.serve()

from safetensors import numpy as safetensors

from benchmarks.serving.servers import free_port
from examples.engine.caches import group_layers
from examples.engine.engine import Engine
from examples.engine.model import load_model
from examples.engine.request import Request, Sampling
from examples.engine.scheduler import Limits
from examples.engine.step import make_buckets
from examples.options import CHECKPOINTS
from examples.text import Bytes
from tests.support import serving as support
from tests.support.serving import openai_client, wait_for

openai = support.openai  # the fixture
CHECKPOINT = CHECKPOINTS / "qwen3-tiny"
NEW, MAX_LEN = 40, 64
IDLE = 32  # neurons that only the draft model has
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3))


def write_draft(target: Path) -> Path:
    """Write a model that differs a little, and has another shape.

    It repeats each KV head for all query heads that share it, and has neurons that do nothing.
    """
    rng = np.random.default_rng(0)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    size, shared = (
        config["head_dim"],
        config["num_attention_heads"] // config["num_key_value_heads"],
    )
    tensors = safetensors.load_file(CHECKPOINT / "model.safetensors")
    for name, values in tensors.items():
        values = np.asarray(values, np.float32)
        values = values * (1 + 0.02 * rng.normal(size=values.shape).astype(np.float32))
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = values.reshape(-1, size, values.shape[1])
            values = heads.repeat(shared, axis=0).reshape(-1, values.shape[1])
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            values = np.pad(values, ((0, IDLE), (0, 0)))
        if name.endswith("down_proj.weight"):
            values = np.pad(values, ((0, 0), (0, IDLE)))
        tensors[name] = np.ascontiguousarray(values)
    config["num_key_value_heads"] *= shared
    config["intermediate_size"] += IDLE
    target.mkdir()
    safetensors.save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return target


def without_drafts(prompts: list[list[int]]) -> list[str]:
    """Return an engine's texts without drafts, for every prompt and every sampling."""
    model = load_model(CHECKPOINT)
    limits = Limits(group_layers(model.layers), 2, 32, 16, MAX_LEN)
    engine = Engine(model, limits, tokenizer=Bytes(), buckets=make_buckets(limits, [2], [32]))
    requests = [Request(tuple(p), NEW, sampling) for p in prompts for sampling in SAMPLINGS]
    return [sequence.text for sequence in engine.generate(requests)]


@pytest.mark.extended
@pytest.mark.usefixtures("openai")
@pytest.mark.parametrize("mesh", ["", pytest.param("data=2,tensor=2", marks=pytest.mark.extended)])
def test_the_command_serves_a_model_with_a_draft(tmp_path, mesh):
    prompts = [list(b"def paged(self):"), list(range(40, 60))]
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "examples.engine.serve", "--port", str(port)]
    command += ["--model", str(CHECKPOINT), "--draft", str(write_draft(tmp_path / "draft"))]
    command += ["--speculate", "draft=3", "--max-seqs", "2", "--token-budget", "32"]
    command += ["--max-len", str(MAX_LEN), "--no-compilation-cache"]
    command += ["--mesh", mesh] * bool(mesh)

    def count(name: str) -> int:
        """Sum a metric over all groups of devices."""
        return sum(map(int, re.findall(rf"jattn_{name}_tokens_total\S* (\d+)", metrics())))

    def metrics() -> str:
        return httpx.get(f"{address}/metrics", timeout=60).text

    with subprocess.Popen(command, env={**os.environ, "JAX_NUM_CPU_DEVICES": "4"}) as server:
        try:
            wait_for(port, server)
            expected = without_drafts(prompts)
            with openai_client(address, timeout=300) as client:
                deadline = time.monotonic() + 300
                while True:  # nothing is drafted until all programs are compiled
                    found = []
                    for prompt in prompts:
                        for sampling in SAMPLINGS:
                            answer = client.completions.create(
                                model="qwen3-tiny",
                                prompt=prompt,
                                max_tokens=NEW,
                                temperature=sampling.temperature,
                                top_p=sampling.top_p,
                                seed=sampling.seed,
                            )
                            found.append(answer.choices[0].text)
                    assert found == expected
                    if count("accepted") > NEW:
                        break
                    assert time.monotonic() < deadline
                events = client.completions.create(
                    model="qwen3-tiny",
                    prompt=prompts[0],
                    max_tokens=NEW,
                    temperature=0,
                    stream=True,
                )
                assert "".join(event.choices[0].text for event in events) == expected[0]
            assert count("accepted") < count("drafted")  # some drafts are wrong
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
