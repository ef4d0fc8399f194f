"""The example models against references that transformers computed, under continuous batching.

Requests arrive while others run, prompts are read in chunks beside decodes, blocks and states lie
in shuffled order, and everything that nobody has written holds NaN.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

import jattn
import jattn.blocks
from examples.engine import caches as engine_caches
from examples.engine.caches import aligned_block_size, group_layers
from examples.engine.engine import Engine
from examples.engine.model import Model, StateCache, load_model
from examples.engine.request import Request
from examples.engine.scheduler import Limits
from examples.engine.step import Bucket
from examples.models import gpt_oss, layers, moe, nemotron_h, recurrent
from examples.models.checkpoint import open_checkpoint

CHECKPOINTS = Path(__file__).resolve().parents[1] / "examples" / "checkpoints"
MODELS = ("qwen3-tiny", "gpt-oss-tiny", "qwen3-next-tiny", "nemotron-h-tiny")
HYBRIDS = ("qwen3-next-tiny", "nemotron-h-tiny")
MAX_ERROR, RMS_ERROR = 2e-4, 0.04  # of logits: in float32, and with bfloat16 caches
MIXED, DECODE = Bucket(40, 8, 40), Bucket(8, 8, 1)


def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(CHECKPOINTS / name / "reference.npz") as file:
        return dict(file)


def make_engine(
    model: Model, *, kv_format="float32", buckets=(MIXED, DECODE), block_size=16, unified=False
) -> Engine:
    """An engine whose caches hold NaN wherever nobody has written."""
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
        check=DECODE in buckets,
        keep_logits=True,
    )
    engine.caches = jax.tree.map(poison, engine.caches)
    return engine


def poison(array: jax.Array) -> jax.Array:
    """The same array full of NaN, in words of narrow formats too: all ones is a NaN."""
    if not array.ndim:
        return array  # a scale
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    return jnp.full_like(array, jnp.nan if floating else jnp.iinfo(array.dtype).max)


def serve(engine: Engine, wanted, num_new: int = 32, *, forced=False, rows=range(8)):
    """Tokens and logits of a reference's prompts, one arriving every second step."""
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
    assert num_mixed >= 2 or len(rows) < 8, "decodes and chunks of prompts never met"
    tokens = np.array([s.chosen for s in sequences])
    logits = np.stack([np.stack(s.logits) for s in sequences]).astype(np.float64)
    error = np.abs(logits - wanted["logits"][list(rows), :num_new])
    error = np.where(np.isfinite(error), error, np.inf)
    return tokens, error


@pytest.mark.parametrize("name", MODELS)
def test_float32_reproduces_the_reference(name):
    wanted = reference(name)
    engine = make_engine(load_model(CHECKPOINTS / name))
    tokens, error = serve(engine, wanted)
    np.testing.assert_array_equal(tokens, wanted["tokens"])
    assert error.max() <= MAX_ERROR


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_caches_stay_near_the_reference(name):
    engine = make_engine(
        load_model(CHECKPOINTS / name), kv_format="bfloat16", buckets=(MIXED,)
    )
    _, error = serve(engine, reference(name), 4, forced=True)
    rms = np.sqrt(np.square(error).mean())
    assert rms <= RMS_ERROR
    assert rms > 1e-5, "nothing was rounded: the caches are not in bfloat16"


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_in_the_pages_of_keys_give_the_same_tokens(name):
    """One free list and one set of pools for blocks and states alike, aligned as vLLM does."""
    model, wanted = load_model(CHECKPOINTS / name), reference(name)
    size = aligned_block_size(model.layers, 4, 4)
    state = max(c.layout.nbytes for c in model.layers.values() if isinstance(c, StateCache))
    attention = next(c for c in model.layers.values() if not isinstance(c, StateCache))
    token_bytes = 2 * 4 * attention.num_kv_heads * attention.head_dim
    assert (size - 4) * token_bytes < state <= size * token_bytes  # the least block that fits
    engine = make_engine(model, buckets=(MIXED,), block_size=size, unified=True)
    assert not any(isinstance(pool, jattn.blocks.StateSlots) for pool in engine.caches.pools)
    tokens, error = serve(engine, wanted, 8)
    np.testing.assert_array_equal(tokens, wanted["tokens"][:, :8])
    assert error.max() <= MAX_ERROR


# -- wrong models must not pass -------------------------------------------------------------------


def wrong_sinks(monkeypatch):
    def without(self, *args, sinks=None, **options):
        return attend(self, *args, **options)

    attend = engine_caches.Caches.attend
    monkeypatch.setattr(engine_caches.Caches, "attend", without)


def wrong_window(monkeypatch):
    def wider(query, *caches, sliding_window=None, **options):
        window = sliding_window and sliding_window + 1
        return attention(query, *caches, sliding_window=window, **options)

    attention = jattn.paged_attention
    monkeypatch.setattr(jattn, "paged_attention", wider)


def forgotten_states(monkeypatch):
    """Every chunk begins with a fresh recurrent state; the convolution's is kept."""

    def read(self, layer, batch):
        conv, state = read_states(self, layer, batch)
        return conv, jnp.zeros_like(state)

    read_states = engine_caches.Caches.read_states
    monkeypatch.setattr(engine_caches.Caches, "read_states", read)


def forgotten_inputs(monkeypatch):
    """Every chunk begins with a fresh convolution."""

    def conv(x, state, *others):
        return causal_conv(x, jnp.zeros_like(state), *others)

    causal_conv = recurrent.causal_conv
    monkeypatch.setattr(nemotron_h, "causal_conv", conv)


def late_positions(monkeypatch):
    def angles(frequencies, positions, *others):
        return rope_angles(frequencies, positions // 2, *others)

    rope_angles = layers.rope_angles
    monkeypatch.setattr("examples.models.decoder.rope_angles", angles)


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("gpt-oss-tiny", wrong_sinks),
        ("gpt-oss-tiny", wrong_window),
        ("qwen3-next-tiny", forgotten_states),
        ("nemotron-h-tiny", forgotten_inputs),
        ("qwen3-tiny", late_positions),
    ],
)
def test_wrong_models_are_told_from_right_ones(name, break_it, monkeypatch):
    break_it(monkeypatch)
    engine = make_engine(load_model(CHECKPOINTS / name), buckets=(MIXED,))
    _, error = serve(engine, reference(name), 2, forced=True, rows=(6,))
    assert error.max() > 10 * MAX_ERROR
    assert np.sqrt(np.square(error).mean()) > RMS_ERROR
