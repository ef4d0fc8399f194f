"""Where a server listens, and how it ends: no more connections, and what it has is finished."""

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
    """A socket that accepts connections, which wait until they are served.

    Raises:
      OSError: the address cannot be had. Its text has the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        said = str(error.strerror).partition(" (while")[0]  # Python repeats the address
        raise OSError(f"{host}:{port}: {said}") from None


def listen_at(path: str) -> socket.socket:
    """A Unix socket, in place of one that a dead process has left.

    Raises:
      OSError: the path cannot be had.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


class TimelyProtocol(H11Protocol):
    """A connection that ends when its client is late, where uvicorn would wait forever.

    The headers of a request may be late, however many bytes of them come, and so may the client's
    reading: until it has read what is under way, its requests keep their place.
    """

    def __init__(self, *given: Any, access: Access, **more: Any):
        super().__init__(*given, **more)
        self._access = access
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for a request."""
        super().connection_made(transport)
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        """Take some of a request."""
        super().data_received(data)
        self._time_headers()

    def connection_lost(self, error: Exception | None) -> None:
        """Wait for nothing more."""
        super().connection_lost(error)
        for what in list(self._timers):
            self._stop(what)

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._start("reading", self._access.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Called when it has read enough."""
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
    """A server that gives up requests which outlast its end."""

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
        """Called when the server is told to end."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._seconds, self._application.state.give_up)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            # asyncio would wait for the old one's threads, whose results are no longer needed.
            loop.set_default_executor(concurrent.futures.ThreadPoolExecutor())
