"""A proxy that keeps clients connected when the server dies; it runs in the supervisor's process.

    client --> front --> server      a Unix socket that only this user can reach
    client --> front      x          the server has died: its requests wait for the next one,
    client --> front --> server      and are sent again

A response depends only on its request, so it can be computed again. The client receives a whole
response only when it is complete. With a stream it has received events: the front compares the next
server's events with them, and forwards those after the point where the first server stopped. The
front adds a seed to a stream without one. If the events differ nevertheless, if no server comes
back in time, or if `TRIES` servers have died with the request, the client gets an error.

In a group of processes only the first has a socket: without one, the front opens no port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from examples.engine.http.access import (
    Access,
    error_response,
    failure,
    http_error,
    read_body,
    while_connected,
)
from examples.engine.http.listening import DrainingServer, listen
from examples.engine.http.replies import Reply, ReplyLostError, ServerBusyError, passed_on
from examples.engine.server import ServerFullError

TRIES = 3  # per request: one that kills every server must not use up all restarts
POLL_SECONDS = 0.1  # between two health checks of a server
BUSY_SECONDS = 1.0  # before a request in flight is sent again to a full server


class UnavailableError(Exception):
    """No server has come back in time, or none will."""


class Front:
    """Forwards requests, from a thread; leaving this context manager ends all requests."""

    def __init__(self, path: str, access: Access, wait_seconds: float):
        """Forward nothing yet.

        Args:
          path: the server's Unix socket.
          access: limits of requests, and who may send them.
          wait_seconds: how long a request waits for a server.
        """
        self.refused: str | None = None  # why the address is not available
        self._path, self._access, self._wait_seconds = path, access, wait_seconds
        self._reason = "the server is starting"  # why it is away
        self._ended = False  # whether no server will come any more
        self._told = False  # whether it was told to end
        self._settled = asyncio.Event()  # set if there is a server, or none will come
        self._num_waiting = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._search: asyncio.Task | None = None
        self._thread: threading.Thread | None = None
        application = Starlette(
            routes=[Route("/{path:path}", self)],
            lifespan=self._lifespan,
            middleware=access.guards(),
            exception_handlers={HTTPException: http_error},
        )
        application.state.give_up = self._end
        self._server = DrainingServer(application, access, log_level="info")

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        """End the remaining requests with an error, as no server will come back."""
        self.drain()
        self._ended = True
        self._call(self._end)
        if self._thread is not None:
            self._thread.join()

    def listen(self, host: str, port: int) -> None:
        """Accept requests in a thread, once the server's socket exists.

        If the address is not available, or the thread fails, `refused` says why, and this process
        is told to end.
        """

        def run() -> None:
            while not os.path.exists(self._path):
                if self._server.should_exit:
                    return
                time.sleep(POLL_SECONDS)
            try:
                with listen(host, port) as listener:
                    self._server.run(sockets=[listener])
            except OSError as error:
                self.refused = str(error)
            finally:
                if not self._told:
                    self.refused = self.refused or "the front has failed"
                    os.kill(os.getpid(), signal.SIGTERM)

        self._thread = threading.Thread(target=run, name="front")
        self._thread.start()

    def drain(self) -> None:
        """Accept no more connections, and finish the current requests."""
        self._told = True
        self._server.should_exit = True

    def lost(self, reason: str) -> None:
        """Wait for the next server, since this one has ended."""
        self._call(self._find_another, reason)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        http = HttpRequest(scope, receive)
        body = await read_body(http, self._access)
        if scope["path"].endswith("/completions") and b'"stream"' in body:
            body = await asyncio.to_thread(with_seed, body)
        target = scope["raw_path"] + (b"?" + scope["query_string"]) * bool(scope["query_string"])
        request = httpx.Request(
            scope["method"],
            "http://localhost/",
            headers=passed_on(scope["headers"], {b"content-length"}),
            content=body,
            extensions={"target": target},
        )

        async def answer() -> None:
            reply, is_probe = Reply(send), scope["path"] == "/health"
            try:
                return await self._forward(request, reply, waits=not is_probe)
            except UnavailableError as error:
                if is_probe:
                    response = JSONResponse({"status": "away", "reason": str(error)}, 503)
                else:
                    response = error_response(503, str(error), {"retry-after": "10"})
            except (ServerFullError, RuntimeError) as error:
                response = failure(error)
                if not isinstance(error, ServerFullError):  # OpenAI's client would retry twice
                    response.headers["x-should-retry"] = "false"
            await reply.fail(response, scope, receive)

        await while_connected(receive, answer())

    async def _forward(self, request: httpx.Request, reply: Reply, *, waits: bool) -> None:
        """Send a request to a server, and to the next one if it dies.

        Args:
          request: the request.
          reply: the response, as far as the client has received it.
          waits: whether to wait for a server that is away.

        Raises:
          UnavailableError: there is no server.
          ServerFullError: too many requests wait for one.
          RuntimeError: too many servers have died, or their responses differ.
        """
        tries, busy_seconds = 0, 0.0
        while True:
            if not (waits or self._settled.is_set()):
                raise UnavailableError(self._reason)
            await self._until_settled(is_new=tries == 0)
            tries += 1
            try:
                # Not through a client, which would follow redirects and keep cookies.
                response = await self._transport.handle_async_request(request)
                try:
                    return await reply.take(response, is_first=tries == 1)
                finally:
                    await response.aclose()
            except ServerBusyError:
                tries -= 1
                busy_seconds += BUSY_SECONDS
                if busy_seconds > self._wait_seconds:
                    raise UnavailableError("the server is full") from None
                await asyncio.sleep(BUSY_SECONDS)
            except (httpx.TransportError, ReplyLostError) as error:
                if isinstance(error, httpx.ConnectError):
                    if self._told:
                        raise UnavailableError("the server is shutting down") from None
                    tries -= 1  # the request did not reach it
                if self._settled.is_set() and not self._ended:
                    what = str(error) or type(error).__name__  # ReadError has no message
                    self._find_another(f"the server does not respond: {what}")
                if tries == TRIES:
                    raise RuntimeError(f"{TRIES} servers have died with the request") from None

    async def _until_settled(self, *, is_new: bool) -> None:
        """Wait for a server; a new request is refused if too many wait.

        Raises:
          UnavailableError, ServerFullError: like `_forward`.
        """
        if not self._settled.is_set():
            if is_new and self._num_waiting >= self._access.max_requests:
                raise ServerFullError
            self._num_waiting += 1
            try:
                async with asyncio.timeout(self._wait_seconds):
                    await self._settled.wait()
            except TimeoutError:
                raise UnavailableError(self._reason) from None
            finally:
                self._num_waiting -= 1
        if self._ended:
            raise UnavailableError("the server has ended")

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        # A connection per request: a kept one may close just as a request is sent.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # Without `verify=False` it would read certificates, which may not exist.
        self._transport = httpx.AsyncHTTPTransport(
            uds=self._path, limits=limits, verify=False, trust_env=False
        )
        async with httpx.AsyncClient(transport=self._transport, timeout=None) as self._client:
            self._loop = asyncio.get_running_loop()
            if self._ended:
                self._settled.set()
            self._find_another(self._reason)
            yield
            if self._search is not None:
                self._search.cancel()

    def _find_another(self, reason: str) -> None:
        self._reason = reason
        if self._ended:
            return
        self._settled.clear()
        if self._search is not None:
            self._search.cancel()
        self._search = asyncio.create_task(self._until_healthy())

    async def _until_healthy(self) -> None:
        """Wait for a server. It listens before it compiles, and responds only after that."""
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await self._client.get("http://localhost/health")).status_code == 200:
                    return self._settled.set()
            await asyncio.sleep(POLL_SECONDS)

    def _end(self) -> None:
        self._ended = True
        self._settled.set()

    def _call(self, function: Any, *arguments: Any) -> None:
        """Call a function in the thread, if it is running."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(function, *arguments)


def with_seed(body: bytes) -> bytes:
    """Add a seed to a request's body if it has none, so that it has only one possible response."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # the server reports it
        return body
    if not isinstance(fields, dict) or fields.get("seed") is not None:
        return body
    fields["seed"] = secrets.randbelow(2**32)
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="surrogatepass")
