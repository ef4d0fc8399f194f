"""Responses on their way through the front, from one server or several that die one after another.

    first server      event event event x
    next server       event event event event event      the first ones are compared, not sent again
    client            event event event       event event

Ids and times of responses differ between servers: the client sees the first server's.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from examples.engine.http.access import ENGINE_FAILED
from examples.engine.http.answers import send_body

OF_ONE_CONNECTION = {  # headers that are not forwarded, or that each server writes itself
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
    *(b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
}
OF_THE_FRONT = {b"date", b"server"}  # headers of responses that the front writes


class ReplyLostError(Exception):
    """The server has died before the end of a response."""


class ServerBusyError(Exception):
    """The server is full, and the request was in flight before the server started."""


@dataclasses.dataclass
class Sent:
    """How much of a choice was sent."""

    num_events: int = 0
    text: str = ""  # followed by END once the choice has a finish reason


DONE = b"data: [DONE]"
END = "\0"
DIFFERS = "the server has died, and the next one generates a different text"


class Reply:
    """What was sent to a client, by one server or several."""

    def __init__(self, send: Send):
        self._send = send
        self._begun = False  # whether the status was sent
        self._is_stream = False  # whether it is a stream of events, which an error can end
        self._head: dict[str, Any] = {}  # the first server's id and time of the response
        self._sent: dict[int | None, Sent] = {}  # by choice; None: events without one

    async def take(self, response: httpx.Response, *, is_first: bool) -> None:
        """Forward a response, from where the previous one ended.

        Args:
          response: a server's response.
          is_first: whether this is the first server that got the request.

        Raises:
          httpx.TransportError, ReplyLostError: it ends early.
          ServerBusyError: it says that the server is full.
          RuntimeError: it differs from what was sent before.
        """
        kind = response.headers.get("content-type", "")
        if kind.startswith("application/json"):
            body = b"".join([part async for part in response.aiter_raw()])
            if response.status_code == 500 and body and has_failed(json.loads(body)):
                raise ReplyLostError("its engine has failed")
            if response.status_code in (429, 503) and not is_first:
                raise ServerBusyError
            if self._begun:
                return await self._end_with(body)
            await self._begin(response)
            await self._send({"type": "http.response.body", "body": body})
        elif kind.startswith("text/event-stream"):
            await self._take_events(response)
        else:
            await self._begin(response)
            try:
                async for part in response.aiter_raw():
                    await self._send(
                        {"type": "http.response.body", "body": part, "more_body": True}
                    )
            except httpx.TransportError:
                raise RuntimeError("the server has died in the middle of a response") from None
            await send_body(self._send, "", more=False)

    async def fail(self, response: Response, scope: Scope, receive: Receive) -> None:
        """End with an error, as the whole response or as an event. Other bodies just end early."""
        if not self._begun:
            await response(scope, receive, self._send)
        elif self._is_stream:
            await self._end_with(bytes(response.body))

    async def _take_events(self, response: httpx.Response) -> None:
        self._is_stream = True
        seen: dict[int | None, Sent] = {}  # of this server
        rest = b""
        async for part in response.aiter_raw():
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                if passed := self._not_sent(event, seen):
                    await self._begin(response)
                    await send_body(self._send, f"{passed}\n\n")
                if event == DONE:  # only the connection remains to be closed
                    return await send_body(self._send, "", more=False)
        await send_body(self._send, "", more=False)

    def _not_sent(self, event: bytes, seen: dict[int | None, Sent]) -> str | None:
        """Return an event with the first server's id, or None if its equal was sent before.

        Raises:
          ReplyLostError: it says that the engine has failed.
          RuntimeError: it differs from the event that was sent.
        """
        text = event.decode()
        if event == DONE:
            for index, sent in self._sent.items():
                if seen.get(index, Sent()).num_events < sent.num_events:
                    raise RuntimeError(DIFFERS)
            return text
        data = json.loads(text.removeprefix("data: "))
        if has_failed(data):
            raise ReplyLostError("its engine has failed")
        if "error" in data:
            return text
        (choice,) = data["choices"] or [{}]
        index = choice.get("index")
        sent = self._sent.setdefault(index, Sent())
        now = seen.setdefault(index, Sent())
        now.num_events += 1
        now.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        now.text += END * bool(choice.get("finish_reason"))
        if now.num_events <= sent.num_events:
            is_last = now.num_events == sent.num_events
            if not sent.text.startswith(now.text) or (is_last and now.text != sent.text):
                raise RuntimeError(DIFFERS)
            return None
        sent.num_events, sent.text = now.num_events, now.text
        head = {name: data[name] for name in ("id", "created")}
        self._head = self._head or head
        if head == self._head:
            return text
        return f"data: {json.dumps({**data, **self._head})}"

    async def _begin(self, response: httpx.Response) -> None:
        if not self._begun:
            self._begun = True
            headers = passed_on(response.headers.raw, OF_THE_FRONT)
            status = response.status_code
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _end_with(self, error: bytes) -> None:
        await send_body(self._send, f"data: {error.decode()}\n\n")
        await send_body(self._send, "", more=False)


def passed_on(headers: list[tuple[bytes, bytes]], but: set[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the headers that are not specific to one connection, without those in `but`."""
    named = [value for name, value in headers if name.lower() == b"connection"]
    left_out = {name.strip().lower() for value in named for name in value.split(b",")}
    left_out |= OF_ONE_CONNECTION | but
    return [(name.lower(), value) for name, value in headers if name.lower() not in left_out]


def has_failed(data: Any) -> bool:
    """Whether a response says that its engine cannot go on."""
    error = data.get("error") if isinstance(data, dict) else None
    return isinstance(error, dict) and error.get("code") == ENGINE_FAILED
