"""An engine behind HTTP, in the shapes of OpenAI's completions API.

    POST /v1/completions   text for a prompt, whole or as server-sent events
    GET  /v1/models        the one model there is
    GET  /health           200 while the engine runs
    GET  /metrics          for Prometheus

A client that goes away aborts its request. More requests than fit are answered with 429, wrong ones
with 400 and every reason. `examples/engine/access.py` has the limits and what protects the server.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from examples.engine import metrics
from examples.engine.access import (
    Access,
    error_response,
    http_error,
    read_body,
    unexpected_error,
)
from examples.engine.engine import Engine, Output
from examples.engine.protocol import Completions, read_completions
from examples.engine.server import EngineThread, Full


def make_app(
    engine: Engine,
    access: Access,
    on_failure: Callable[[str], None] = lambda reason: None,
) -> Starlette:
    """The application around an engine that has a tokenizer.

    Args:
      engine: the engine, which the application drives from now on.
      access: limits, and who may use it.
      on_failure: called with the reason if the engine fails for good, or a step hangs.
    """
    counts: collections.Counter[tuple[str, int]] = collections.Counter()
    handlers = _Handlers(EngineThread(engine, access.max_requests), access, counts)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with handlers.thread:
            watchdog = asyncio.create_task(handlers.thread.watch(access.step_seconds, on_failure))
            yield
            watchdog.cancel()

    routes = [
        Route("/v1/completions", handlers.completions, methods=["POST"]),
        Route("/v1/models", handlers.models),
        Route("/health", handlers.health),
        Route("/metrics", handlers.metrics),
    ]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=access.middleware(counts, tuple(route.path for route in routes)),
        exception_handlers={HTTPException: http_error, Exception: unexpected_error},
    )


class _Handlers:
    def __init__(self, thread: EngineThread, access: Access, counts: collections.Counter):
        self.thread, self.access, self.counts = thread, access, counts
        self.engine = thread.engine
        self.created = int(time.time())
        self.seeds = itertools.count(1)  # of requests that name none

    async def health(self, _: HttpRequest) -> Response:
        if self.thread.error is not None:
            return JSONResponse({"status": "failed", "reason": str(self.thread.error)}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: HttpRequest) -> Response:
        text = metrics.exposition(self.engine, self.counts)
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

    async def models(self, _: HttpRequest) -> Response:
        name = self.engine.model.name
        model = {"id": name, "object": "model", "created": self.created, "owned_by": "jattn"}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, http: HttpRequest) -> Response | _Answer:
        body = await read_body(http, self.access)

        def parse() -> Completions:
            engine = self.engine
            return read_completions(
                json.loads(body),
                engine.model,
                engine.tokenizer,
                engine.limits.max_len,
                self.seeds,
            )

        try:
            asked = await asyncio.to_thread(parse)  # a large body must not delay other requests
        except ValueError as error:  # JSON's and Unicode's errors are among them
            return error_response(400, str(error))
        except RecursionError:
            return error_response(400, "the body is nested too deeply")
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.engine.model.name,
        }
        return _Answer(self.thread, asked, head)


class _Answer:
    """A response that works while it watches for the client to go away, and then gives up."""

    def __init__(self, thread: EngineThread, asked: Completions, head: dict[str, Any]):
        self._thread, self._asked, self._head = thread, asked, head
        self._num_new_tokens = 0
        self._begun = False  # the status is sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer() -> None:
            response = await self._whole_or_events(send)
            if response is not None:
                await response(scope, receive, send)

        async def client_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.create_task(answer()), asyncio.create_task(client_gone())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not tasks[0].cancelled():
            tasks[0].result()

    async def _whole_or_events(self, send: Send) -> Response | None:
        """What to answer, or None after the last event was sent."""
        try:
            with self._thread.reserve(len(self._asked.requests)):
                if self._asked.stream:
                    return await self._send_events(send)
                return await self._whole()
        except Full:
            return error_response(429, "the queue is full", {"retry-after": "1"})
        except ValueError as error:
            failure = error_response(400, str(error))
        except RuntimeError as error:
            failure = error_response(500, str(error))
        if not self._begun:
            return failure
        await _send_body(send, f"data: {bytes(failure.body).decode()}\n\n")
        await _send_body(send, "", more=False)
        return None

    async def _whole(self) -> Response:
        texts, reasons = [""] * len(self._asked.requests), [""] * len(self._asked.requests)
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                texts[index] += output.text
                reasons[index] = output.finish_reason
        ends = zip(texts, reasons, strict=True)
        choices = [_choice(index, text, reason) for index, (text, reason) in enumerate(ends)]
        return JSONResponse({**self._head, "choices": choices, "usage": self._usage()})

    async def _send_events(self, send: Send) -> None:
        """Send an event per token that makes text certain, and what ended each choice."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                if not self._begun:  # with the first token: what fails before has its own status
                    self._begun = True
                    await send(start)
                if output.text or output.finish_reason is not None:
                    choice = _choice(index, output.text, output.finish_reason)
                    await _send_body(send, _event({**self._head, "choices": [choice]}))
        if self._asked.include_usage:
            usage = {**self._head, "choices": [], "usage": self._usage()}
            await _send_body(send, _event(usage))
        await _send_body(send, "data: [DONE]\n\n", more=False)

    async def _outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """The outputs of all choices as they come, each with the number of its choice."""
        arriving: asyncio.Queue[tuple[int, Output | Exception]] = asyncio.Queue()

        async def follow(index: int) -> None:
            stream = self._thread.stream(self._asked.requests[index])
            try:
                async with contextlib.aclosing(stream) as outputs:
                    async for output in outputs:
                        arriving.put_nowait((index, output))
            except (ValueError, RuntimeError) as error:
                arriving.put_nowait((index, error))

        tasks = [asyncio.create_task(follow(i)) for i in range(len(self._asked.requests))]
        left = len(tasks)
        try:
            while left:
                index, output = await arriving.get()
                if isinstance(output, Exception):
                    raise output
                self._num_new_tokens += 1
                left -= output.finish_reason is not None
                yield index, output
        finally:  # finished, failed, or the client has gone: no request is left running
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _usage(self) -> dict[str, int]:
        requests = self._asked.requests
        per_prompt = len(requests) // self._asked.num_prompts
        read, new = sum(len(r.prompt) for r in requests[::per_prompt]), self._num_new_tokens
        return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": reason, "logprobs": None}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


async def _send_body(send: Send, text: str, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
