"""What surrounds the handling of every HTTP request: API keys, CORS, errors, counters.

All errors have the format of OpenAI's API, whatever raised them:

    {"error": {"message": ..., "type": ..., "param": null, "code": null}}
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hmac
import json
import logging
import re
from collections.abc import Coroutine
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from examples.engine.adapters import AdapterNotLoadedError
from examples.engine.http.protocol import ModelNotFoundError
from examples.engine.server import EngineFailedError, ServerFullError, ShuttingDownError

TOO_DEEP = "the body is nested too deeply"
KINDS = {
    401: "authentication_error",
    429: "overloaded_error",
    500: "engine_error",
    503: "unavailable_error",
}
PROTECTED = (
    "/v1/",
    "/tokenize",
    "/detokenize",
    "/prefill",
)  # paths that need the key, if there is one
# An absolute path's folders, which clients need not know; quoted paths may have spaces. URLs of
# other hosts (the group) and fractions do not count.
FOLDERS = re.compile(
    r"(\w+://[^\s/'\"()]\S*)|(?<=')/[^'\n]*/|(?<=\")/[^\"\n]*/|(?<![\w.\]])/(?:[^\s/:'\"()]+/)+"
)
ENGINE_FAILED = "engine_failed"  # the code of errors that end the process
CLIENT_GONE = 499  # counted if a client left before the response


@dataclasses.dataclass(frozen=True)
class Access:
    """Limits of the HTTP server, and who may use it."""

    max_requests: int = 256  # completions that may wait and run at once
    max_body: int = 4 << 20  # bytes
    body_seconds: float = 30.0  # for the headers to arrive, and again for the body
    send_seconds: float = 60.0  # how long a client may pause reading
    step_seconds: float = 300.0  # after which a step counts as hanging
    drain_seconds: float = 30.0  # for requests to finish when the server is told to end
    api_key: str | None = None  # bearer token that the model's paths require
    origins: tuple[str, ...] = ()  # web origins that may send requests; "*": all

    def middleware(self, counts: collections.Counter, paths: tuple[str, ...]) -> list[Middleware]:
        """Return the layers around an application; `counts` is by path and status."""
        return [Middleware(CountResponses, counts=counts, paths=paths), *self.guards()]

    def guards(self) -> list[Middleware]:
        """Return the layers that check access and turn failures into responses."""
        layers = []
        if self.origins:
            cors = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
            layers.append(Middleware(CORSMiddleware, allow_origins=self.origins, **cors))
        if self.api_key is not None:
            layers.append(Middleware(RequireKey, key=self.api_key))
        return [*layers, Middleware(AnswerFailures)]


def error_response(
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
    *,
    param: str | None = None,
    code: str | None = None,
) -> Response:
    """Return an error in OpenAI's format; `param` is the field it concerns, `code` its name.

    Messages of server errors omit the folders of its files; the log has them.
    """
    if status >= 500:
        message = without_folders(message)
    error = {
        "message": message.encode(errors="backslashreplace").decode(),
        "type": KINDS.get(status, "invalid_request_error"),
        "param": param,
        "code": code,
    }
    return JSONResponse({"error": error}, status, headers)


def parsed(body: bytes) -> Any:
    """Parse a body's JSON.

    Raises:
      ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def failure(error: Exception, param: str = "model") -> Response:
    """Return the response to a request's `ServerFullError`, `ValueError` or `RuntimeError`.

    `param` is the field that names a model.
    """
    if isinstance(error, ServerFullError):
        return error_response(429, "the queue is full", {"retry-after": "1"})
    if isinstance(error, ModelNotFoundError | AdapterNotLoadedError):
        return error_response(404, str(error), param=param, code="model_not_found")
    if isinstance(error, ValueError):  # JSON's and Unicode's errors are among them
        return error_response(400, str(error))
    if isinstance(error, ShuttingDownError):
        return error_response(503, str(error), {"retry-after": "1"})
    return error_response(
        500, str(error), code=ENGINE_FAILED if isinstance(error, EngineFailedError) else None
    )


def without_folders(text: str) -> str:
    """Shorten absolute paths in a text to their last names: "/a/b/c.so" becomes ".../c.so"."""
    return FOLDERS.sub(lambda found: found[1] or ".../", text)


async def http_error(_: Request, error: Exception) -> Response:
    """Turn Starlette's HTTP errors (404, 405), and ours, into responses."""
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail, dict(error.headers or {}))


async def read_body(http: Request, access: Access) -> bytes:
    """Read the body of a request.

    Raises:
      HTTPException: it is compressed or too large, or takes too long.
    """
    if (encoding := http.headers.get("content-encoding", "identity")).lower() != "identity":
        raise HTTPException(415, f"content-encoding is {encoding!r}, but must be absent")
    too_large = HTTPException(413, f"the body must have at most {access.max_body} bytes")
    length = http.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > access.max_body:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(access.body_seconds):
            async for part in http.stream():
                body += part
                if len(body) > access.max_body:
                    raise too_large
    except TimeoutError:
        message = f"the body did not arrive within {access.body_seconds:g} seconds"
        raise HTTPException(408, message, {"connection": "close"}) from None
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do some work, but give up when the client disconnects."""

    async def client_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(work), asyncio.create_task(client_gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not tasks[0].cancelled():
        tasks[0].result()


class AnswerFailures:
    """Turns uncaught exceptions into responses, inside the other layers; Starlette's is outside."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        has_begun = False

        async def note_start(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, note_start)
        except ClientDisconnect:  # in the middle of the body
            pass
        except Exception as error:
            if has_begun or scope["type"] != "http":
                raise
            logging.getLogger(__name__).exception("a request has failed")
            response = error_response(500, f"internal error: {type(error).__name__}")
            await response(scope, receive, send)


class RequireKey:
    """Refuses requests to the model that lack the key."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self.expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        app = self.app
        if scope["type"] == "http" and scope["path"].startswith(PROTECTED):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                app = error_response(
                    401, "the API key is missing or wrong", {"www-authenticate": "Bearer"}
                )
        await app(scope, receive, send)


class CountResponses:
    """Counts requests by path and status; paths that the application lacks are "other"."""

    def __init__(self, app: ASGIApp, counts: collections.Counter, paths: tuple[str, ...]):
        self.app, self.counts, self.paths = app, counts, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status = CLIENT_GONE

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, note_status)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.counts[path, status] += 1
