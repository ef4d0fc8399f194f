"""Responses: the choices of a request, sent whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from examples.engine.engine import Output
from examples.engine.http.access import failure, while_connected
from examples.engine.http.protocol import CheckedBody
from examples.engine.likelihoods import Likelihood
from examples.engine.server import Runner, ServerFullError
from examples.text import Tokenizer


@dataclasses.dataclass
class Text:
    """A choice so far, or its newest part."""

    text: str = ""
    reason: str | None = None
    # Tokens with their log-probabilities; a prompt's first token has none.
    tokens: list[tuple[int, Likelihood | None]] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)  # where tokens begin, if requested
    num_echoed: int = 0  # how many of the tokens are the prompt's

    def add(self, other: Text) -> None:
        """Append the part that follows."""
        self.text += other.text
        self.reason = other.reason
        self.tokens += other.tokens
        self.offsets += other.offsets
        self.num_echoed += other.num_echoed

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the generated tokens."""
        new = self.tokens[self.num_echoed :]
        found = [likelihood.logprob for _, likelihood in new if likelihood is not None]
        return sum(found) / max(len(found), 1)


class Completion:
    """The format of `/v1/completions`."""

    prefix, whole, event = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, text: Text, logprobs: dict | None) -> dict[str, Any]:
        """Format a choice in a whole response."""
        end = {"finish_reason": text.reason, "logprobs": logprobs}
        return {"index": index, "text": text.text, **end}

    def begin(self, index: int) -> dict[str, Any] | None:
        """Return None: no event comes before a choice's first text."""
        return None

    def part(self, index: int, text: Text, logprobs: dict | None) -> dict[str, Any]:
        """Format the next part of a choice, for an event."""
        return self.choice(index, text, logprobs)

    def logprobs(self, text: Text, tokenizer: Tokenizer) -> dict[str, Any]:
        """Format a text's log-probabilities."""

        def top(token: int, found: Likelihood) -> dict[str, float]:
            shown: dict[str, float] = {}
            pairs = (*found.alternatives, (token, found.logprob))
            for other, logprob in sorted(pairs, key=lambda pair: -pair[1]):
                shown.setdefault(tokenizer.piece(other), logprob)  # the first with this spelling
            return shown

        return {
            "tokens": [tokenizer.piece(token) for token, _ in text.tokens],
            "token_logprobs": [found and found.logprob for _, found in text.tokens],
            "top_logprobs": [found and top(token, found) for token, found in text.tokens],
            "text_offset": text.offsets,
        }


class Chat:
    """The format of `/v1/chat/completions`."""

    prefix, whole, event = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: Text, logprobs: dict | None) -> dict[str, Any]:
        """Format a choice in a whole response."""
        message = {"role": "assistant", "content": text.text, "refusal": None}
        end = {"finish_reason": text.reason, "logprobs": logprobs}
        return {"index": index, "message": message, **end}

    def begin(self, index: int) -> dict[str, Any] | None:
        """Format the event before a choice's first text."""
        return self._event(index, {"role": "assistant", "content": ""}, None, None)

    def part(self, index: int, text: Text, logprobs: dict | None) -> dict[str, Any]:
        """Format the next part of a choice, for an event."""
        delta = {"content": text.text} if text.text else {}
        return self._event(index, delta, text.reason, logprobs)

    def logprobs(self, text: Text, tokenizer: Tokenizer) -> dict[str, Any]:
        """Format a text's log-probabilities."""

        def shown(token: int, logprob: float) -> dict[str, Any]:
            data = list(tokenizer.token_bytes(token))
            return {"token": tokenizer.piece(token), "logprob": logprob, "bytes": data}

        content = [
            {
                **shown(token, found.logprob),
                "top_logprobs": [shown(*other) for other in found.alternatives],
            }
            for token, found in text.tokens
            if found is not None
        ]
        return {"content": content, "refusal": None}

    def _event(
        self, index: int, delta: dict, reason: str | None, logprobs: dict | None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}


class Offsets:
    """Where tokens begin in a text, in characters; tokens of one character begin where it does."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: bool, start: int = 0):
        self._decoder = tokenizer.decoder(special_tokens=special_tokens)
        self._length = start

    def next(self, token: int) -> int:
        """Return where the next token begins."""
        begin = self._length
        self._length += len(self._decoder.push(token))
        return begin


class Answer:
    """A response that is computed until its client disconnects, and then abandoned."""

    def __init__(
        self,
        runner: Runner,
        asked: CheckedBody,
        shape: Completion | Chat,
        model: str,
        tokenizer: Tokenizer,
    ):
        """Prepare the response.

        Args:
          runner: runs the requests.
          asked: the requests.
          shape: the response's format.
          model: the model's name.
          tokenizer: the model's tokenizer.
        """
        self._runner, self._asked, self._shape = runner, asked, shape
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{shape.prefix}-{uuid.uuid4().hex}",
            "object": shape.event if asked.stream else shape.whole,
            "created": int(time.time()),
            "model": model,
        }
        self._num_new_tokens = 0
        self._offsets: dict[int, Offsets] = {}  # of candidates that have begun
        self._begun = False  # whether the status was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def answer() -> None:
            response = await self._whole_or_events(send)
            if response is not None:
                await response(scope, receive, send)

        await while_connected(receive, answer())

    async def _whole_or_events(self, send: Send) -> Response | None:
        """Return the response, or None after the last event was sent."""
        try:
            with self._runner.reserve(len(self._asked.requests)):
                if self._asked.stream:
                    return await self._send_events(send)
                return await self._whole()
        except (ServerFullError, ValueError, RuntimeError) as error:
            failed = failure(error)
        if not self._begun:
            return failed
        await send_body(send, f"data: {bytes(failed.body).decode()}\n\n")
        await send_body(send, "", more=False)
        return None

    async def _whole(self) -> Response:
        asked, many = self._asked, self._asked.num_candidates
        texts = [Text() for _ in asked.requests]
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for index, text in outputs:
                texts[index].add(text)
        chosen: list[Text] = []
        for start in range(0, len(texts), many):
            candidates = texts[start : start + many]
            if asked.num_choices < many:
                candidates.sort(key=lambda text: -text.mean_logprob)
            chosen += candidates[: asked.num_choices]
        if asked.shows_logprobs:  # formatting so many numbers must not block the event loop
            return await asyncio.to_thread(self._response, chosen)
        return self._response(chosen)

    def _response(self, chosen: list[Text]) -> Response:
        """Format all choices, one at a time because no other thread can run meanwhile."""
        choices = ",".join(
            _json(self._shape.choice(index, text, self._logprobs(text)))
            for index, text in enumerate(chosen)
        )
        head, usage = _json(self._head)[:-1], _json(self._usage())
        body = f'{head},"choices":[{choices}],"usage":{usage}}}'
        return Response(body, media_type="application/json")

    async def _send_events(self, send: Send) -> None:
        """Send an event per token that makes text certain, and the reason why each choice ended."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        begun: set[int] = set()  # choices
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for index, text in outputs:
                if not self._begun:  # only now: failures before the first token have their status
                    self._begun = True
                    await send(start)
                if index not in begun:
                    begun.add(index)
                    if (first := self._shape.begin(index)) is not None:
                        await send_body(send, self._event([first]))
                logprobs = self._logprobs(text)
                if text.text or text.reason is not None or logprobs is not None:
                    part = self._shape.part(index, text, logprobs)
                    await send_body(send, self._event([part]))
        if self._asked.include_usage:
            await send_body(send, self._event([], usage=self._usage()))
        await send_body(send, "data: [DONE]\n\n", more=False)

    async def _outputs(self) -> AsyncIterator[tuple[int, Text]]:
        """Yield the texts of all candidates as they come, each with the candidate's number."""
        arriving: asyncio.Queue[tuple[int, Output | Exception]] = asyncio.Queue()

        async def follow(index: int) -> None:
            stream = self._runner.stream(self._asked.requests[index])
            try:
                async with contextlib.aclosing(stream) as outputs:
                    async for output in outputs:
                        arriving.put_nowait((index, output))
            except Exception as error:  # any kind, or else the client would wait forever
                arriving.put_nowait((index, error))

        tasks = [asyncio.create_task(follow(i)) for i in range(len(self._asked.requests))]
        left = len(tasks)
        try:
            while left:
                index, output = await arriving.get()
                if isinstance(output, Exception):
                    raise output
                left -= output.finish_reason is not None
                yield index, self._text_of(index, output)
        finally:  # finished, failed or disconnected: leave no request running
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _text_of(self, index: int, output: Output) -> Text:
        """Return the text that an output adds to its candidate, preceded at first by the echo."""
        asked, text = self._asked, Text()
        is_first, special = index not in self._offsets, asked.requests[index].special_tokens
        if is_first and asked.echoes is not None:
            text.text = asked.echoes[index // asked.num_candidates]
            prompt = output.sequence.request.prompt
            text.tokens = list(
                zip(prompt, (None, *output.sequence.prompt_likelihoods), strict=False)
            )
            text.num_echoed = len(text.tokens)
            echoed = Offsets(self._tokenizer, special)
            text.offsets = [echoed.next(token) for token, _ in text.tokens]
        if is_first:
            self._offsets[index] = Offsets(self._tokenizer, special, len(text.text))
        if asked.only_echo:
            text.reason = "length"
        else:
            self._num_new_tokens += 1
            new = [(output.token, output.likelihood)]
            offsets = [self._offsets[index].next(output.token)] if asked.shows_logprobs else []
            text.add(Text(output.text, output.finish_reason, new, offsets))
        return text

    def _logprobs(self, text: Text) -> dict[str, Any] | None:
        if not self._asked.shows_logprobs:
            return None
        return self._shape.logprobs(text, self._tokenizer)

    def _usage(self) -> dict[str, int]:
        prompts = self._asked.requests[:: self._asked.num_candidates]
        read, new = sum(len(request.prompt) for request in prompts), self._num_new_tokens
        return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        event = {**self._head, "choices": choices}
        if self._asked.include_usage:
            event["usage"] = usage  # null except in the last event, as in OpenAI's API
        return f"data: {_json(event, ascii=True)}\n\n"


def _json(value: Any, *, ascii: bool = False) -> str:
    """Format a response, or part of one, as JSON.

    Events are in ASCII, because some clients split lines at other characters.

    Raises:
      RuntimeError: a log-probability is not finite.
    """
    try:
        return json.dumps(value, ensure_ascii=ascii, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise RuntimeError("the model's log-probabilities are not finite") from None


async def send_body(send: Send, text: str, *, more: bool = True) -> None:
    """Send part of a body: its end, unless there is `more`."""
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
