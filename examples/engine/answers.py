"""Answers: what the choices of a request become, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from examples.engine.access import error_response
from examples.engine.engine import Output
from examples.engine.protocol import Asked
from examples.engine.server import EngineThread, Full


class Completion:
    """The shape of `/v1/completions`."""

    prefix, whole, event = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """A choice of a whole answer."""
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": None}

    def begin(self, index: int) -> dict[str, Any] | None:
        """What is sent before a choice's first text."""
        return None

    def part(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """Some more of a choice, in an event."""
        return self.choice(index, text, reason)


class Chat:
    """The shape of `/v1/chat/completions`."""

    prefix, whole, event = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """A choice of a whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "finish_reason": reason, "logprobs": None}

    def begin(self, index: int) -> dict[str, Any] | None:
        """What is sent before a choice's first text."""
        return self._event(index, {"role": "assistant", "content": ""}, None)

    def part(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """Some more of a choice, in an event."""
        return self._event(index, {"content": text} if text else {}, reason)

    def _event(self, index: int, delta: dict, reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}


class Answer:
    """A response that works while it watches for the client to go away, and then gives up."""

    def __init__(self, thread: EngineThread, asked: Asked, shape: Completion | Chat, model: str):
        """Prepare to answer.

        Args:
          thread: runs the engine.
          asked: the requests.
          shape: of the answer.
          model: whose name is in it.
        """
        self._thread, self._asked, self._shape = thread, asked, shape
        self._head = {
            "id": f"{shape.prefix}-{uuid.uuid4().hex}",
            "object": shape.event if asked.stream else shape.whole,
            "created": int(time.time()),
            "model": model,
        }
        self._num_new_tokens = 0
        self._begun = False  # the status is sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

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
        choices = [self._shape.choice(index, *end) for index, end in enumerate(ends)]
        return JSONResponse({**self._head, "choices": choices, "usage": self._usage()})

    async def _send_events(self, send: Send) -> None:
        """Send an event per token that makes text certain, and what ended each choice."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        begun: set[int] = set()
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for index, output in outputs:
                if not self._begun:  # with the first token: what fails before has its own status
                    self._begun = True
                    await send(start)
                if index not in begun:
                    begun.add(index)
                    if (first := self._shape.begin(index)) is not None:
                        await _send_body(send, self._event([first]))
                if output.text or output.finish_reason is not None:
                    part = self._shape.part(index, output.text, output.finish_reason)
                    await _send_body(send, self._event([part]))
        if self._asked.include_usage:
            await _send_body(send, self._event([], usage=self._usage()))
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

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**self._head, 'choices': choices, **more})}\n\n"


async def _send_body(send: Send, text: str, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
