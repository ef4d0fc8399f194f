"""Answers on their way through the front, by one server or by several that die one after another.

    first server      event event event x
    next server       event event event event event      as many are compared, and not sent again
    client            event event event       event event

Names and times of answers differ between servers: the client sees the first server's.
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

OF_ONE_CONNECTION = {  # headers that are not passed on, or that each server writes itself
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
    *(b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
}
OF_THE_FRONT = {b"date", b"server"}  # of answers


class ReplyLostError(Exception):
    """The server has died before the end of an answer."""


class ServerBusyError(Exception):
    """The server is full, and the request was under way before it began."""


@dataclasses.dataclass
class Sent:
    """What has been sent of a choice."""

    num_events: int = 0
    text: str = ""  # with END behind it, once there is a reason for its end


DONE = b"data: [DONE]"
END = "\0"
DIFFERS = "the server has died, and the next one writes another text"


class Reply:
    """What a client has been sent, by one server or several."""

    def __init__(self, send: Send):
        self._send = send
        self._begun = False  # the status is sent
        self._is_stream = False  # of events, which an error can end
        self._head: dict[str, Any] = {}  # the first server's name of the answer
        self._sent: dict[int | None, Sent] = {}  # by choice; None: events without one

    async def take(self, response: httpx.Response, *, is_first: bool) -> None:
        """Pass on an answer, from where the one before it ended.

        Args:
          response: of a server.
          is_first: no server was sent the request before.

        Raises:
          httpx.TransportError, ReplyLostError: it ends early.
          ServerBusyError: it says that the server is full.
          RuntimeError: it is another than before.
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
                raise RuntimeError("the server has died amid bytes") from None
            await send_body(self._send, "", more=False)

    async def fail(self, response: Response, scope: Scope, receive: Receive) -> None:
        """End with an error: as the whole answer, or as an event. Bytes just end too early."""
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
                if event == DONE:  # what ends later is the connection
                    return await send_body(self._send, "", more=False)
        await send_body(self._send, "", more=False)

    def _not_sent(self, event: bytes, seen: dict[int | None, Sent]) -> str | None:
        """An event in the name of the first server, or None if one like it was sent before.

        Raises:
          ReplyLostError: it says that the engine has failed.
          RuntimeError: it differs from the one that was sent.
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
    """The headers that are not of one connection only."""
    named = [value for name, value in headers if name.lower() == b"connection"]
    left_out = {name.strip().lower() for value in named for name in value.split(b",")}
    left_out |= OF_ONE_CONNECTION | but
    return [(name.lower(), value) for name, value in headers if name.lower() not in left_out]


def has_failed(data: Any) -> bool:
    """Whether an answer says that its engine cannot go on."""
    error = data.get("error") if isinstance(data, dict) else None
    return isinstance(error, dict) and error.get("code") == ENGINE_FAILED
