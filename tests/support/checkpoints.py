"""The example checkpoints: engines of them, their references, and copies in other shapes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

import jattn
from examples.engine.caches import group_layers
from examples.engine.drafts.speculation import Guess, Speculation
from examples.engine.engine import Engine
from examples.engine.model import Model
from examples.engine.request import Request
from examples.engine.scheduler import Limits
from examples.engine.step import Bucket
from examples.options import CHECKPOINTS

MODELS = ("qwen3-tiny", "gpt-oss-tiny", "qwen3-next-tiny", "nemotron-h-tiny", "deepseek-v3-tiny")
SLIDING = ("gemma4-e2b-tiny", "gemma4-31b-tiny")
MAX_ERROR, RMS_ERROR = 2e-4, 0.04  # of logits: in float32, and with bfloat16 caches
MIXED, DECODE = Bucket(40, 8, 40), Bucket(8, 8, 1)


def some(names: Iterable[str], quick: tuple[str, ...] = (), slow: tuple[str, ...] = ()) -> list:
    """Return names as parameters, `extended` unless in `quick` or, for the longest, in `slow`."""
    marks = dict.fromkeys(quick, ()) | dict.fromkeys(slow, pytest.mark.slow)
    return [pytest.param(n, marks=marks.get(n, pytest.mark.extended)) for n in names]


def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(CHECKPOINTS / name / "reference.npz") as file:
        return dict(file)


def make_engine(
    model: Model,
    *,
    kv_format: str = "float32",
    buckets: tuple[Bucket, ...] = (MIXED,),
    block_size: int = 16,
    unified: bool = False,
    check: bool = False,
    speculation: Speculation | None = None,
    behind: bool = False,
) -> Engine:
    """Build an engine whose caches hold NaN wherever nothing was written."""
    limits = Limits(
        groups=group_layers(model.layers, unified=unified),
        max_seqs=8,
        token_budget=40,
        block_size=block_size,
        max_len=-(-132 // block_size) * block_size,
        prefix_caching=False,
        unified=unified,
    )
    engine = Engine(
        model,
        limits,
        kv_format=jattn.Dense(kv_format),
        buckets=buckets,
        check=check,
        speculation=speculation,
        keep_logits=True,
        behind=behind,
    )
    engine.caches = jax.tree.map(poison, engine.caches)
    return engine


def poison(array: jax.Array) -> jax.Array:
    """Fill an array with NaN, in words of narrow formats too, where all ones is a NaN."""
    if not array.ndim:
        return array  # a scale
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    return jnp.full_like(array, jnp.nan if floating else jnp.iinfo(array.dtype).max)


def serve(engine: Engine, wanted, num_new: int = 32, *, forced=False, rows=range(8)):
    """Serve a reference's prompts, one new every second step; return tokens and logit errors."""
    waiting, sequences, num_mixed = list(rows), [], 0
    while waiting or engine.has_work:
        if waiting and engine.statistics.num_steps >= 2 * len(sequences):
            row = waiting.pop(0)
            prompt = wanted["prompts"][row][: wanted["prompt_lens"][row]]
            follow = tuple(wanted["tokens"][row].tolist()) if forced else None
            request = Request(tuple(prompt.tolist()), num_new, follow=follow)
            sequences.append(engine.add(request))
        pending = {s.num_pending for s in engine.scheduler.running}
        num_mixed += 1 in pending and len(pending) > 1
        engine.step()
    engine.check_idle()
    assert num_mixed >= 2 or len(rows) < 8, "no step had both decodes and chunks of prompts"
    tokens = np.array([s.chosen for s in sequences])
    logits = np.stack([np.stack(s.logits) for s in sequences]).astype(np.float64)
    error = np.abs(logits - wanted["logits"][list(rows), :num_new])
    error = np.where(np.isfinite(error), error, np.inf)
    return tokens, error


class HalfRight:
    """Guesses a reference's tokens, with about half of them changed."""

    is_cheap = True

    def __init__(self, wanted: dict[str, np.ndarray]):
        self.rng = np.random.default_rng(0)
        rows = zip(wanted["prompts"], wanted["prompt_lens"], wanted["tokens"], strict=True)
        self.coming = {tuple(prompt[:n].tolist()): tokens for prompt, n, tokens in rows}

    def propose(self, sequences, most) -> list[Guess]:
        guesses = []
        for sequence, count in zip(sequences, most, strict=True):
            start = len(sequence.chosen)
            tokens = self.coming[sequence.request.prompt][start : start + count]
            tokens = np.where(self.rng.random(len(tokens)) < 0.4, 0, tokens)
            guesses.append(Guess(tuple(tokens.tolist())))
        return guesses


def rewrite(name: str, target: Path, change) -> Path:
    """Copy a checkpoint, with its tensors renamed by `change` and in two shards."""
    target.mkdir()
    tensors = change(safetensors.load_file(CHECKPOINTS / name / "model.safetensors"))
    names = sorted(tensors)
    weight_map = {}
    for i in range(2):
        shard = {n: np.ascontiguousarray(tensors[n]) for n in names[i::2]}
        safetensors.save_file(shard, target / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-{i}.safetensors")
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (target / "config.json").write_text((CHECKPOINTS / name / "config.json").read_text())
    return target


def one_file_entry_per_expert(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Split experts into one tensor each, as in published checkpoints of Qwen3-Next."""
    found = {}
    for name, x in tensors.items():
        path = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(x):
                gate, up = np.split(both, 2)
                found |= {f"{path}.{e}.gate_proj.weight": gate, f"{path}.{e}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            found |= {f"{path}.{e}.down_proj.weight": matrix for e, matrix in enumerate(x)}
        else:
            found[name] = x
    return {**found, "mtp.layers.0.norm.weight": np.ones(3, np.float32)}
