"""Where a server listens, and how it ends: no more connections, and what it has is finished."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import os
import socket

import uvicorn
from starlette.applications import Starlette

from examples.engine.access import Access


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
            http="h11",
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
