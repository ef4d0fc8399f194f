"""Host memory as a second tier of the prefix cache: the same bytes, and the same tokens."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
import jattn.testing
from benchmarks.serving.servers import free_port
from examples.engine.engine import Engine
from examples.engine.host_cache import HostCache, _Programs
from examples.engine.http import metrics
from examples.engine.request import Request
from examples.engine.statistics import count_compilations
from tests.support import processes
from tests.support.engines import (
    LAYOUTS,
    SCARCE,
    build,
    compare_with_separate_runs,
    restart,
    serve_at_random,
    some_requests,
)

BYTES = 1 << 20  # more than all blocks of these tests


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(request) -> Engine:
    return build(unified=request.param == "unified", host_cache_bytes=BYTES)


def test_a_prompt_returns_from_host_memory(engine):
    """The pool holds little more than one sequence, so the blocks of the first are soon evicted."""
    restart(engine, num_blocks=SCARCE[engine.limits.unified])
    prompt = tuple(range(100, 137))
    expected = engine.generate([Request(prompt, 9)])[0]
    for i in range(4):
        engine.generate([Request(tuple(range(i, i + 50)), 9)])
    pools = engine.scheduler.pools
    on_device = {key for pool in pools.values() for key in pool._found}
    again = engine.add(Request(prompt, 9))
    assert not {("global", digest) for digest in expected.hashes} & on_device
    with count_compilations() as compilations:
        list(engine.stream())
    assert compilations.count == 0
    assert again.num_reused == 36
    assert again.chosen == expected.chosen
    assert engine.host_cache.num_returned >= 9
    engine.check_idle()
    text = metrics.exposition(engine, {})
    assert f"jattn_host_cache_returned_total {engine.host_cache.num_returned}" in text
    assert f"jattn_host_cache_blocks {len(engine.host_cache)}" in text


@pytest.mark.extended
@pytest.mark.parametrize("size", [BYTES, 6000], ids=["ample", "small"])
def test_random_traffic_gives_the_tokens_of_separate_runs(engine, size):
    """With pools so small that sequences are preempted, and host memory that must drop blocks."""
    returned = 0
    engine.host_cache.max_bytes = size
    try:
        for seed in range(2):
            rng = np.random.default_rng(seed)
            restart(engine, num_blocks=SCARCE[engine.limits.unified])
            with count_compilations() as compilations:
                sequences = serve_at_random(engine, some_requests(rng, 24), rng)
            assert compilations.count == 0
            host = engine.host_cache
            returned += host.num_returned
            assert host.used_bytes == sum(
                sum(r.nbytes for r in rows) for rows in host._kept.values()
            )
            assert host.used_bytes <= size
            assert (host.num_dropped > 0) == (size < BYTES)
            compare_with_separate_runs(engine, sequences)
        assert returned > 10
    finally:
        engine.host_cache.max_bytes = BYTES


def blocks_by_hash(engine: Engine) -> dict:
    """Return the bytes of every published block and state on the device, by hash."""
    found = {}
    for place in engine.caches.places:
        pool = engine.scheduler.pools[
            engine.limits.pool_of(next(g for g in engine.limits.groups if g.name == place.group))
        ]
        arrays = [np.asarray(a) for a in jax.tree.leaves(engine.caches.pools[place.pool]) if a.ndim]
        for (group, digest), id in pool._found.items():
            if group == place.group:
                found[group, digest, place.layer] = [a[id].tobytes() for a in arrays]
    return found


@pytest.mark.parametrize("scales", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_the_same_bytes_return(engine, scales):
    """Words and scales of all layers, and states, return bit for bit."""
    if scales:
        if engine.limits.unified:
            pytest.skip("a page of 8-bit numbers does not hold a state")
        engine = build(kv_format=jattn.Fp8("e4m3", "token"), host_cache_bytes=BYTES)
    restart(engine, num_blocks=SCARCE[engine.limits.unified])
    prompt = tuple(range(30, 67))
    engine.generate([Request(prompt, 1)])
    before = blocks_by_hash(engine)
    for i in range(4):
        engine.generate([Request(tuple(range(i, i + 50)), 9)])
    assert not set(before) & set(blocks_by_hash(engine))
    again = engine.generate([Request(prompt, 1)])[0]
    after = blocks_by_hash(engine)
    same = set(before) & set(after)
    assert again.num_reused == 36
    assert len(same) >= 9
    assert all(before[key] == after[key] for key in same)


@pytest.mark.extended
def test_moving_blocks_copies_nothing_pool_sized(engine):
    """Checked with pools of a thousand times as many blocks."""

    def enlarged(array: jax.Array) -> jax.ShapeDtypeStruct:
        shape = (1000 * array.shape[0], *array.shape[1:]) if array.ndim else ()
        return jax.ShapeDtypeStruct(shape, array.dtype)

    caches = jax.tree.map(enlarged, engine.caches)
    for group in engine.limits.groups:
        program = _Programs.of(caches, group.name, None)
        for compiled in (program.take, program.put):
            jattn.testing.assert_nothing_pool_sized(compiled, caches)


def _a_block_off(self, sequence, num_blocks, blocks, states):
    right(self, sequence, num_blocks, blocks, states)
    for coming in self._coming.values():
        if len(coming) > 1:
            digests = list(coming.values())
            coming.update(zip(coming, digests[1:] + digests[:1], strict=True))


def _never_written(self, sequence, num_blocks, blocks, states):
    right(self, sequence, num_blocks, blocks, states)
    self._coming = {}


def _a_step_late(self, caches, moves):
    late, self._late = getattr(self, "_late", {}), moves.leaving
    return move(self, caches, dataclasses.replace(moves, leaving=late))


right, move = HostCache.bring_back, HostCache.move


@pytest.mark.parametrize(
    ("method", "wrong"),
    [("bring_back", _a_block_off), ("bring_back", _never_written), ("move", _a_step_late)],
)
def test_a_wrong_tier_is_caught(engine, monkeypatch, method, wrong):
    restart(engine, num_blocks=SCARCE[engine.limits.unified])
    prompt = tuple(range(100, 137))
    expected = engine.generate([Request(prompt, 9)])[0]
    monkeypatch.setattr(HostCache, method, wrong)
    for i in range(4):
        engine.generate([Request(tuple(range(i, i + 50)), 9)])
    again = engine.generate([Request(prompt, 9)])[0]
    assert again.num_reused == 36
    assert again.chosen != expected.chosen


@pytest.mark.parametrize("where", ["host", "device"])
def test_blocks_are_right_after_a_failed_step(engine, monkeypatch, where):
    """If it failed before it ran, moves are still pending; if on the device, none are."""
    restart(engine, num_blocks=SCARCE[engine.limits.unified])
    prompt = tuple(range(100, 137))
    expected = engine.generate([Request(prompt, 9)])[0]
    for i in range(4):
        engine.generate([Request(tuple(range(i, i + 50)), 9)])
    host, kept = engine.host_cache, len(engine.host_cache)
    failed = engine.add(Request(prompt, 9))
    name = "examples.engine.engine.pack" if where == "host" else "examples.engine.engine.Steps.run"
    monkeypatch.setattr(name, lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    (output,) = engine.recover(ZeroDivisionError())
    assert (output.sequence, output.finish_reason) == (failed, "error")
    assert bool(host._coming) == (where == "host")
    assert where == "host" or (host._leaving, host._read) == ({}, [])
    assert len(host) == kept
    again = engine.generate([Request(prompt, 9)])[0]
    assert (again.chosen, again.num_reused) == (expected.chosen, 36)


@pytest.mark.parametrize("size", [BYTES, 12_000], ids=["ample", "small"])
def test_another_process_keeps_the_same_blocks(engine, monkeypatch, size):
    """It is told the moves and nothing else, and writes the same blocks."""
    restart(engine, num_blocks=SCARCE[engine.limits.unified])
    first = engine.host_cache
    monkeypatch.setattr(first, "max_bytes", size)
    monkeypatch.setattr(_Programs, "of", lambda caches, group, mesh: first._programs[group])
    other = HostCache(engine.caches, size)
    other._decides = False
    fetch = first.fetch
    monkeypatch.setattr(first, "fetch", lambda: (fetch(), other.fetch()))

    def move_both(moves):
        same = jax.tree.map(jnp.copy, engine.caches)
        theirs = other.move(same, pickle.loads(pickle.dumps(moves)))
        engine.caches = first.move(engine.caches, moves)
        arrays = zip(jax.tree.leaves(engine.caches), jax.tree.leaves(theirs), strict=True)
        assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in arrays)

    monkeypatch.setattr(engine, "move_blocks", move_both)
    prompts = [tuple(range(100, 137)), *(tuple(range(i, i + 50)) for i in range(4))]
    for prompt in (*prompts, prompts[0], prompts[3], prompts[0]):
        engine.generate([Request(prompt, 9)])
    assert first.num_returned > 4
    assert (first.num_dropped > 4) == (size < BYTES)
    for key in first._dropped:  # not told yet
        other._drop(key)
    assert other._kept.keys() == first._kept.keys()
    assert (other.used_bytes, other.num_dropped) == (first.used_bytes, first.num_dropped)
    for key, rows in first._kept.items():
        for ours, theirs in zip(rows, other._kept[key], strict=True):
            np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))


ON_A_MESH = """
import dataclasses, sys, traceback
import jax, numpy as np
import jattn
from examples.engine import hosts
from examples.engine.caches import group_layers
from examples.engine.engine import Engine
from examples.engine.mesh import make_mesh
from examples.engine.model import load_model
from examples.engine.request import Request
from examples.engine.scheduler import Limits
from examples.engine.step import Bucket
from tests.support import checkpoints

rank = int(sys.argv[2]) if sys.argv[1:] else None
if rank is not None:
    hosts.join(sys.argv[1], 2, rank)
# Neighbours in the mesh are devices of different processes.
devices = [d for pair in zip(jax.devices()[:2], jax.devices()[2:], strict=True) for d in pair]

CASES = [
    ("qwen3-tiny", "tensor=2,context=2", jattn.Fp8("e4m3", "token")),
    ("qwen3-tiny", "tensor=2", None),
    ("qwen3-next-tiny", "tensor=2", None),
    ("deepseek-v3-tiny", "tensor=2", None),
]

def check(name, axes, kv_format):
    model = load_model(checkpoints.CHECKPOINTS / name, mesh=make_mesh(axes, devices))
    groups = group_layers(model.layers)
    limits = Limits(groups, 2, 40, 16, 96)
    few = {group.name: limits.most_blocks(group) + 2 for group in groups}
    limits = dataclasses.replace(limits, num_blocks=few)
    buckets = (Bucket(40, 2, 40), Bucket(2, 2, 1))
    engine = Engine(
        model, limits, kv_format=kv_format, buckets=buckets, host_cache_bytes=1 << 24
    )
    engine.caches = jax.tree.map(checkpoints.poison, engine.caches)
    host = engine.host_cache
    if rank == 1:
        hosts.follow(engine)
        assert len(host) == host.num_stored >= 8 and host.used_bytes, (name, axes)
        return
    prompts = np.random.default_rng(0).integers(model.vocab_size, size=(4, 70)).tolist()
    first, *_ = (engine.generate([Request(tuple(prompt), 4)])[0] for prompt in prompts)
    stored, before = host.num_stored, host.num_returned
    (again,) = engine.generate([Request(tuple(prompts[0]), 4)])
    assert (again.chosen, again.num_reused) == (first.chosen, 64), (name, axes, again.num_reused)
    assert host.num_returned - before >= 4 and stored >= 8, (name, axes)
    engine.check_idle()
    if rank == 0:
        engine.followers.tell(hosts.END)

for case in CASES if rank is None else CASES[::2]:
    try:
        check(*case)
    except Exception as failure:
        if rank is None:
            raise
        traceback.print_exc()
        hosts.exit_with(failure)
print("all came back")
"""


@pytest.mark.extended
def test_blocks_return_to_the_devices_of_a_mesh():
    assert processes.python(ON_A_MESH, JAX_NUM_CPU_DEVICES="4") == "all came back"


@pytest.mark.newer
@pytest.mark.extended
def test_blocks_return_to_the_devices_of_two_processes():
    address = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = [
            pool.submit(processes.python, ON_A_MESH, address, str(rank), JAX_NUM_CPU_DEVICES="2")
            for rank in (0, 1)
        ]
        assert all(one.result().endswith("all came back") for one in found)  # gloo prints lines too
