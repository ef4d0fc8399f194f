"""Several engines behind one front: where requests go, and tokens as from one engine."""

from __future__ import annotations

import asyncio
import types

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the server's tests need the serve extra")

from examples.engine.groups import Group, Groups
from examples.engine.mesh import make_meshes
from examples.engine.request import Request
from examples.engine.server import ShuttingDownError
from tests.support import processes

BLOCK = 4
SYSTEM = tuple(range(40))


class Thread:
    """Stands in for an engine's thread, and yields one token at a time."""

    def __init__(self, *, prefix_caching: bool = True):
        limits = types.SimpleNamespace(
            block_size=BLOCK, num_blocks={"global": 64}, prefix_caching=prefix_caching
        )
        self.engine = types.SimpleNamespace(limits=limits)
        self.error, self.requests, self.num_ended = None, [], 0

    def check(self, _: float) -> RuntimeError | None:
        return self.error

    async def stream(self, request):
        self.requests.append(request)
        try:
            for token in range(request.max_new_tokens):
                await asyncio.sleep(0)
                yield token
        finally:
            self.num_ended += 1


def groups(count: int = 2, **options) -> Groups:
    return Groups([Thread(**options) for _ in range(count)], 99)


def test_a_prompt_goes_where_its_beginning_was_read():
    runner = groups()
    assert runner.choose(Request((*SYSTEM, 1), 5)) == (0, 41)
    runner.groups[0].num_tokens += 3
    assert runner.choose(Request((*range(100, 140), 1), 5)) == (1, 41)
    runner.groups[1].num_tokens += 9
    # 40 tokens are known, and one of them is computed again if nothing follows them.
    assert runner.choose(Request((*SYSTEM, 2, 3), 5)) == (0, 2)
    assert runner.choose(Request((*range(100, 140), 2, 3), 5)) == (1, 2)
    assert runner.choose(Request(SYSTEM, 5)) == (0, 4)


def test_a_cached_prefix_is_not_worth_any_wait():
    runner = groups()
    assert runner.choose(Request((*SYSTEM, 1), 5)) == (0, 41)
    runner.groups[0].num_tokens = 39
    assert runner.choose(Request((*SYSTEM, 1), 5)) == (0, 1)
    runner.groups[0].num_tokens = 41
    assert runner.choose(Request((*SYSTEM, 1), 5)) == (1, 41)
    assert runner.choose(Request((*SYSTEM, 1), 5)) == (1, 1)  # both have read it now


def test_without_a_prefix_cache_nothing_is_known():
    runner = groups(prefix_caching=False)
    assert runner.choose(Request((*SYSTEM, 1), 5)) == (0, 41)
    assert runner.choose(Request((*SYSTEM, 1), 5)) == (0, 41)


def test_the_oldest_prefix_is_forgotten_from_its_end():
    group = Group(3)
    group.note([b"a", b"b", b"c"])
    assert group.num_known([b"a", b"b", b"c", b"d"]) == 3
    group.note([b"x"])
    assert group.num_known([b"a", b"b", b"c"]) == 2
    assert group.num_known([b"b"]) == 1
    group.note([b"y", b"z"])
    assert group.num_known([b"x"]) == 1
    assert group.num_known([b"a"]) == 0


def test_the_work_of_groups_is_counted_down_to_zero():
    runner = groups(3)

    async def serve(request: Request, most: int = 99) -> None:
        stream = runner.stream(request)
        async for token in stream:
            assert runner.groups[0].num_tokens >= 0
            if token == most:
                break
        await stream.aclose()

    async def all_of_them() -> None:
        rng = np.random.default_rng(0)
        requests = [
            Request(tuple(rng.integers(0, 9, int(rng.integers(1, 60))).tolist()), 7)
            for _ in range(30)
        ]
        await asyncio.gather(*(serve(r, int(rng.integers(1, 12))) for r in requests))

    asyncio.run(all_of_them())
    assert [group.num_tokens for group in runner.groups] == [0, 0, 0]
    counts = [len(thread.requests) for thread in runner.threads]
    assert sum(counts) == 30
    assert min(counts) >= 5
    assert [thread.num_ended for thread in runner.threads] == counts


def test_one_failed_engine_ends_the_server():
    runner, reasons = groups(), []
    assert runner.error is None
    runner.threads[0].error = ShuttingDownError("the server is shutting down")
    runner.threads[1].error = RuntimeError("the engine has failed")
    asyncio.run(runner.watch(1.0, reasons.append))
    assert reasons == ["the engine has failed"]
    assert runner.error is runner.threads[1].error


def test_groups_of_devices_are_disjoint():
    devices = [types.SimpleNamespace(platform="cpu") for _ in range(4)]
    for text, words in (
        ("data=3,tensor=2", "it needs 6 devices, but there are 4 cpu devices"),
        ("data=0", "'data=0' must be"),
        ("data=2,pipeline=2", "'pipeline=2' must be"),
    ):
        with pytest.raises(ValueError, match=words):
            make_meshes(text, devices)


SERVED = """
import asyncio
import jax, numpy as np
from examples.engine.groups import Groups
from examples.engine.mesh import make_meshes
from examples.engine.model import load_model
from examples.engine.request import Request, Sampling
from examples.engine.server import EngineThread
from tests.support import checkpoints

models = [load_model(checkpoints.CHECKPOINTS / NAME, mesh=mesh) for mesh in make_meshes(AXES)]
engines = [checkpoints.make_engine(model) for model in models]
places = [{d for x in jax.tree.leaves(e.model.params) for d in x.devices()} for e in engines]
assert len(places) == 2 and len(places[0]) == len(places[1]) == len(jax.devices()) // 2
assert not places[0] & places[1]
rng = np.random.default_rng(3)
shared = [rng.integers(0, 256, 40).tolist() for _ in range(2)]
requests = [
    Request((*shared[i % 2], *rng.integers(0, 256, 1 + i).tolist()), 12,
            Sampling(temperature=i % 3 / 2, seed=i))
    for i in range(12)
]

async def run(runner, request):
    return [output.token async for output in runner.stream(request)]

async def serve_all():
    async with Groups([EngineThread(engine, 99) for engine in engines], 99) as runner:
        found = await asyncio.gather(*(run(runner, request) for request in requests))
        text = await runner.metrics({})
    return found, text

found, text = asyncio.run(serve_all())
for engine in engines:
    engine.check_idle()
counts = [engine.statistics.num_requests for engine in engines]
assert sum(counts) == 12 and min(counts) > 2, counts
assert f'jattn_requests_received_total{{group="1"}} {counts[1]}\\n' in text
alone = [engines[0].generate([request])[0].chosen for request in requests]
assert found == alone
print("same")
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("axes", "devices"),
    [
        ("data=2", 2),
        pytest.param("data=2,tensor=2", 4, marks=pytest.mark.extended),
        ("data=2,tensor=2,context=2", 8),
    ],
    ids=["alone", "with-tensor", "with-all-axes"],
)
def test_tokens_match_those_of_one_engine(axes, devices):
    code = f"AXES, NAME = {axes!r}, 'qwen3-tiny'\n{SERVED}"
    assert processes.python(code, JAX_NUM_CPU_DEVICES=str(devices)).endswith("same")
