"""Read prompts for other servers, and keep their cache contents until these fetch them.

    GET    /prefill         what contents mean here (`description.py`), which must be equal there
    POST   /prefill         offer: read a prompt; returns its id, size and checksum
    GET    /prefill/{id}    fetch: the bytes of every array, one after another, unconverted
    DELETE /prefill/{id}    release: it is no longer needed

The blocks return to the pool once the prompt has been read: a slow or dead receiver only holds host
memory, up to a limit and for a limited time. Ids cannot be guessed. Invalid requests get errors
like those of the API; nothing that arrives here is written to a cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import weakref
from collections.abc import AsyncIterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from examples.engine.http.access import Access, error_response, failure, parsed, read_body
from examples.engine.request import Request, cut
from examples.engine.server import EngineThread, ServerFullError
from examples.engine.transfer.contents import Contents, Taken
from examples.engine.transfer.description import description_of, digest
from examples.engine.transfer.remote import PATH

CHUNK_BYTES = 1 << 18  # sent at a time
KEPT_SECONDS = 60.0  # how long an offer waits to be fetched


@dataclasses.dataclass(eq=False)
class Offer:
    """Contents to be copied from the device, kept, or being sent."""

    num_bytes: int
    contents: Contents | None = None
    checksum: int | None = None

    def fetch(self, taken: Taken) -> None:
        """Copy the contents to the host, in a thread because this waits for the device."""
        self.contents = taken.fetched()
        self.checksum = self.contents.checksum


class Offers:
    """Contents by id, until they are released."""

    def __init__(self, most_bytes: int, seconds: float = KEPT_SECONDS):
        """Keep nothing yet.

        Args:
          most_bytes: the most bytes that offers may hold at a time.
          seconds: after which contents are dropped.
        """
        self.most_bytes, self.seconds = most_bytes, seconds
        self._kept: dict[str, Offer] = {}
        self._all: weakref.WeakSet[Offer] = weakref.WeakSet()  # while anything holds them

    @property
    def nbytes(self) -> int:
        """Bytes that offers hold, kept or not."""
        return sum(offer.num_bytes for offer in self._all)

    def reserve(self, num_bytes: int) -> Offer:
        """Reserve room for contents, for as long as anything references the returned offer.

        Raises:
          ServerFullError: there is not enough room.
        """
        if self.nbytes + num_bytes > self.most_bytes:
            raise ServerFullError
        offer = Offer(num_bytes)
        self._all.add(offer)
        return offer

    def give_back(self, offer: Offer) -> None:
        """Release an offer's room, as it will have no contents."""
        self._all.discard(offer)

    def keep(self, offer: Offer) -> str:
        """Keep copied contents for some time; return their id."""
        id = secrets.token_urlsafe(16)
        self._kept[id] = offer
        asyncio.get_running_loop().call_later(self.seconds, self.release, id)
        return id

    def get(self, id: str) -> Offer | None:
        """Return the contents kept under an id."""
        return self._kept.get(id)

    def release(self, id: str) -> bool:
        """Stop keeping an offer; return whether it was kept."""
        return self._kept.pop(id, None) is not None


class PrefillHandlers:
    """The handlers of the paths above."""

    def __init__(self, thread: EngineThread, access: Access, offers: Offers):
        """Read prompts with an engine.

        Args:
          thread: runs the engine.
          access: limits of requests.
          offers: keeps the contents of prompts that were read.
        """
        self._thread, self._access, self._offers = thread, access, offers
        self._description = description_of(thread.engine)
        self._digest = digest(self._description)

    def routes(self) -> list[Route]:
        """Return the routes of the handlers."""
        return [
            Route(PATH, self.describe, methods=["GET"]),
            Route(PATH, self.offer, methods=["POST"]),
            Route(f"{PATH}/{{id}}", self.fetch, methods=["GET"]),
            Route(f"{PATH}/{{id}}", self.release, methods=["DELETE"]),
        ]

    async def describe(self, _: HttpRequest) -> Response:
        """Describe what contents mean here."""
        return JSONResponse(self._description)

    async def offer(self, http: HttpRequest) -> Response:
        """Read a prompt, unless the client disconnects first."""
        body = await read_body(http, self._access)
        try:
            request = await asyncio.to_thread(self._parse, body)
        except ValueError as error:
            return failure(error)
        except _OtherModelError as error:
            return error_response(409, str(error), code="other_model")
        reading = asyncio.create_task(self._read(request))
        leaving = asyncio.create_task(_gone(http))
        try:
            await asyncio.wait([reading, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise HTTPException(499, "the client has gone")
            return JSONResponse(reading.result())
        except (ServerFullError, ValueError, RuntimeError) as error:
            return failure(error)
        finally:
            for task in (reading, leaving):
                task.cancel()
            await asyncio.gather(reading, leaving, return_exceptions=True)

    async def fetch(self, http: HttpRequest) -> Response:
        """Send the bytes of an offer."""
        offer = self._offers.get(http.path_params["id"])
        if offer is None:
            return error_response(404, "there is no such offer: it may have expired")

        async def chunks() -> AsyncIterator[memoryview]:
            for data in offer.contents.bytes():
                for start in range(0, len(data), CHUNK_BYTES):
                    yield data[start : start + CHUNK_BYTES]

        headers = {"content-length": str(offer.num_bytes)}
        return StreamingResponse(chunks(), headers=headers, media_type="application/octet-stream")

    async def release(self, http: HttpRequest) -> Response:
        """Release an offer."""
        return Response(status_code=204 if self._offers.release(http.path_params["id"]) else 404)

    def _parse(self, body: bytes) -> Request:
        given = parsed(body)
        if not isinstance(given, dict):
            raise ValueError("the body must be a JSON object")
        if given.get("config") != self._digest:
            raise _OtherModelError(
                "config is not this server's: the model, dtype or cache format differs "
                f"(GET {PATH} describes them)"
            )
        engine, following = self._thread.engine, given.get("next")
        prompt, most = given.get("prompt"), engine.limits.max_len - 1
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise ValueError("prompt must be a list of tokens")
        if not 1 <= len(prompt) <= most:
            raise ValueError(f"prompt has {len(prompt)} tokens, but must have 1..{most}")
        if following is None:
            return Request(tuple(prompt), 1, hands_over=True)
        if type(following) is not int or not 0 <= following < engine.model.vocab_size:
            raise ValueError(
                f"next is {cut(following)}, but must be a token in 0..{engine.model.vocab_size - 1}"
            )
        return Request(tuple(prompt), 1, follow=(following,), hands_over=True)

    async def _read(self, request: Request) -> dict[str, Any]:
        """Read a prompt, and offer its contents."""
        with self._thread.reserve(1):
            async with contextlib.aclosing(self._thread.stream(request)) as outputs:
                (output,) = [output async for output in outputs]
            sequence = output.sequence
            taken, sequence.taken = sequence.taken, None
            num_tokens = len(request.prompt)
            offer = self._offers.reserve(self._thread.engine.transfer.nbytes(num_tokens))
            try:
                await asyncio.to_thread(offer.fetch, taken)
            except Exception:
                self._offers.give_back(offer)  # the exception may hold it for a while
                raise
        size = {"num_tokens": num_tokens, "num_bytes": offer.num_bytes}
        return {"id": self._offers.keep(offer), **size, "crc32": offer.checksum}


class _OtherModelError(Exception):
    """The receiver has a different model."""


async def _gone(http: HttpRequest) -> None:
    """Wait until the client disconnects."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
