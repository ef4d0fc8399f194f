"""Listening sockets, slow clients, and a server that finishes its requests before it ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import math
import os
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from examples.engine.http.access import Access


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that accepts connections, which wait until they are served.

    Raises:
      OSError: the address is not available; the message names it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        said = str(error.strerror).partition(" (while")[0]  # Python repeats the address
        raise OSError(f"{host}:{port}: {said}") from None


def listen_at(path: str) -> socket.socket:
    """Open a Unix socket, replacing one that a dead process has left.

    Raises:
      OSError: the path is not available.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


class TimelyProtocol(H11Protocol):
    """A connection that closes when its client is too slow, where uvicorn would wait forever.

    A client is too slow if it does not finish a request's headers in time, even if bytes keep
    coming, or does not read: its requests keep their place until it has read what was sent.
    """

    def __init__(self, *given: Any, access: Access, **more: Any):
        super().__init__(*given, **more)
        self._access = access
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start waiting for a request."""
        super().connection_made(transport)
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        """Receive part of a request."""
        super().data_received(data)
        self._time_headers()

    def connection_lost(self, error: Exception | None) -> None:
        """Stop all timers."""
        super().connection_lost(error)
        for what in list(self._timers):
            self._stop(what)

    def pause_writing(self) -> None:
        """Start waiting for the client to read."""
        super().pause_writing()
        self._start("reading", self._access.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting: the client has read enough."""
        super().resume_writing()
        self._stop("reading")

    def _time_headers(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop("headers")
        elif "headers" not in self._timers:
            self._start("headers", self._access.body_seconds, self.timeout_keep_alive_handler)

    def _start(self, what: str, seconds: float, function: Callable[[], None]) -> None:
        self._timers[what] = self.loop.call_later(seconds, function)

    def _stop(self, what: str) -> None:
        if what in self._timers:
            self._timers.pop(what).cancel()


class DrainingServer(uvicorn.Server):
    """A server that gives up requests which take too long when it ends."""

    def __init__(
        self, application: Starlette, access: Access, log_level: str, *, access_log: bool = True
    ):
        config = uvicorn.Config(
            application,
            log_level=log_level,
            access_log=access_log,
            lifespan="on",
            http=functools.partial(TimelyProtocol, access=access),
            h11_max_incomplete_event_size=32 << 10,  # bytes of headers
            timeout_graceful_shutdown=math.ceil(access.drain_seconds) + 5,
        )
        super().__init__(config)
        self._application, self._seconds = application, access.drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish requests, or give them up when their time is over; uvicorn calls this."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._seconds, self._application.state.give_up)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            # asyncio would wait for the old executor's threads, whose results are not needed.
            loop.set_default_executor(concurrent.futures.ThreadPoolExecutor())
