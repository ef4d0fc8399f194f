"""When an engine dies, another one continues its requests after the tokens that came."""

from __future__ import annotations

import asyncio

import pytest

from examples.engine.http.metrics import Family
from examples.engine.request import Request
from examples.engine.retries import EngineLostError, Retrying, Token
from examples.engine.server import ServerFullError, ShuttingDownError

REQUEST = Request((1, 2, 3), 6)
TOKENS = [Token(10 + i, "abcdef"[i], "length" if i == 5 else None) for i in range(6)]


class Engines:
    """Engines that continue after the given tokens; each fails after its number of new ones."""

    def __init__(self, *lasts: int, error: Exception | None = None):
        self.lasts, self.error, self.calls = list(lasts), error, []
        self.num_closed = 0

    async def __call__(self, request, chosen):
        assert request is REQUEST
        self.calls.append(chosen)
        last = self.lasts.pop(0) if self.lasts else len(TOKENS)
        try:
            for token in TOKENS[len(chosen) : len(chosen) + last]:
                await asyncio.sleep(0)
                yield token
            if last < len(TOKENS):
                raise self.error or EngineLostError("killed")
        finally:
            self.num_closed += 1


async def metrics() -> list[list[Family]]:
    """Return metrics of two engines."""
    samples = [(f'{{replica="{i}"}}', 5 + i) for i in range(2)]
    return [[Family("steps_total", "counter", "Steps run.", [sample])] for sample in samples]


async def texts(runner: Retrying, *, most: int = 99) -> str:
    """Return the request's text, checking that its tokens are those of one engine."""
    found = ""
    outputs = runner.stream(REQUEST)
    async for output in outputs:
        assert output.token == TOKENS[len(found)].token
        found += output.text
        if len(found) == most:
            break
    await outputs.aclose()
    return found


@pytest.mark.parametrize("lasts", [(), (0,), (3,), (1, 0, 4), (2, 2, 1, 0)])
def test_a_request_continues_where_it_was(lasts):
    engines = Engines(*lasts)
    runner = Retrying(engines, 4, metrics, pause=0)
    assert asyncio.run(texts(runner)) == "abcdef"
    ends = [sum(lasts[:i]) for i in range(len(lasts) + 1)]
    assert engines.calls == [tuple(range(10, 10 + end)) for end in ends]
    assert runner.num_retries == len(lasts)
    assert engines.num_closed == len(engines.calls)
    told = asyncio.run(runner.metrics({("/", 200): 3}))
    assert f"jattn_requests_retried_total {len(lasts)}\n" in told
    assert 'jattn_http_requests_total{path="/",status="200"} 3\n' in told
    assert told.count("# TYPE jattn_steps_total counter") == 1
    assert 'jattn_steps_total{replica="0"} 5\njattn_steps_total{replica="1"} 6\n' in told


def test_a_request_that_kills_engines_is_given_up():
    engines = Engines(*[1] * 5)
    runner = Retrying(engines, 4, metrics, retries=2, pause=0)
    with pytest.raises(RuntimeError, match="3 engines were lost, the last one because: killed"):
        asyncio.run(texts(runner))
    assert len(engines.calls) == 3


@pytest.mark.parametrize("error", [ValueError("too long"), RuntimeError("the request failed")])
def test_errors_of_the_request_itself_are_not_retried(error):
    engines = Engines(1, error=error)
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(texts(Retrying(engines, 4, metrics, pause=0)))
    assert len(engines.calls) == 1


def test_leaving_early_ends_the_request_where_it_runs():
    engines = Engines()
    assert asyncio.run(texts(Retrying(engines, 4, metrics), most=2)) == "ab"
    assert engines.num_closed == 1


def test_limits_and_shutdown_are_respected():
    runner = Retrying(Engines(), 2, metrics)
    with runner.reserve(2), pytest.raises(ServerFullError), runner.reserve(1):
        pass
    with runner.reserve(1):
        runner.give_up()
        with pytest.raises(ShuttingDownError):
            asyncio.run(texts(runner))


def test_pauses_grow(monkeypatch):
    slept, sleep = [], asyncio.sleep

    async def noted(seconds):
        if seconds:
            slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    assert asyncio.run(texts(Retrying(Engines(1, 1, 1), 2, metrics, pause=0.5))) == "abcdef"
    assert slept == [0.5, 1, 2]
