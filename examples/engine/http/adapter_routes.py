"""Load and unload LoRA adapters while the server runs, with vLLM's paths and fields.

    POST /v1/load_lora_adapter      {"lora_name": "poet", "lora_path": "poet"}
    POST /v1/unload_lora_adapter    {"lora_name": "poet"}

This needs `--lora-folder`, and only loads directories below that folder. The files are read while
the engine runs; then all its groups take the adapter between two steps. After an unload no new
request can name the adapter; running requests finish with it, and occupy its place until then.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from examples.engine.adapters import Adapter, AdapterNotLoadedError
from examples.engine.engine import Engine
from examples.engine.http.access import Access, failure, parsed, read_body
from examples.engine.http.fields import Fields
from examples.engine.request import cut
from examples.engine.server import EngineThread
from examples.models.lora import Lora, read_lora

MAX_NAME_LENGTH = 128
# vLLM's fields that this server does not support, with the values that change nothing.
UNSUPPORTED: dict[str, tuple] = {
    "load_inplace": (None, False),
    "is_3d_lora_weight": (None, False),
}


class AdapterRoutes:
    """The handlers of the paths above."""

    def __init__(self, threads: Sequence[EngineThread], access: Access, folder: str | Path):
        """Serve requests that change the adapters of some engines.

        Args:
          threads: of engines with the same model and room.
          access: limits of requests.
          folder: adapters below it may be loaded.
        """
        self._threads, self._access = tuple(threads), access
        self._folder = Path(folder).resolve()
        self._lock = asyncio.Lock()  # one change at a time: places are the same in all groups

    def routes(self) -> list[Route]:
        """Return the routes of the handlers."""
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, http: HttpRequest) -> Response:
        """Load an adapter."""
        return await self._answer(http, self._load)

    async def unload(self, http: HttpRequest) -> Response:
        """Unload an adapter."""
        return await self._answer(http, self._unload)

    async def _answer(self, http: HttpRequest, change: Callable[[Any], Awaitable[str]]) -> Response:
        body = await read_body(http, self._access)
        try:
            done = await change(await asyncio.to_thread(parsed, body))
        except (ValueError, RuntimeError) as error:
            return failure(error, "lora_name")
        return PlainTextResponse(f"Success: LoRA adapter {done} successfully.")

    async def _load(self, body: Any) -> str:
        fields = Fields(body, {"lora_name", "lora_path"}, UNSUPPORTED)
        name, path = (fields.get(key, str, "") for key in ("lora_name", "lora_path"))
        _check_name(fields, name)
        directory = self._below(path)
        if directory is None:
            fields.problems.append(
                f"lora_path is {cut(path)}, but must be a directory below that of --lora-folder"
            )
        fields.finish()
        async with self._lock:
            try:
                await self._take(name, directory)
            except ValueError as error:  # clients need not know where the server's files are
                raise ValueError(str(error).replace(str(directory), path)) from error
        return f"{name!r} added"

    async def _take(self, name: str, directory: Path) -> None:
        """Read an adapter and load it into the same place in every group, or in none.

        Raises:
          ValueError: the name is taken, no place is free in all groups, or it cannot be read.
        """
        adapters = self._threads[0].engine.adapters
        for thread in self._threads:
            thread.engine.adapters.check_name(name)
        model = adapters.model
        lora = await asyncio.to_thread(read_lora, directory, model.linears, model.unused)
        found = [await thread.call(places) for thread in self._threads]
        free = set.intersection(*(free for free, _ in found))
        if not free:
            raise adapters.no_room(name, len(set.union(*(unloaded for _, unloaded in found))))
        take = functools.partial(take_adapter, name=name, lora=lora, number=min(free))
        try:
            for thread in reversed(self._threads):  # requests find names in the first one
                await thread.call(take)
        except (Exception, asyncio.CancelledError):
            drops = [
                thread.call(functools.partial(drop_adapter, name=name)) for thread in self._threads
            ]
            await asyncio.gather(*drops, return_exceptions=True)
            raise

    async def _unload(self, body: Any) -> str:
        fields = Fields(body, {"lora_name", "lora_int_id"}, {})
        name = fields.get("lora_name", str, "")
        _check_name(fields, name)
        fields.finish()
        async with self._lock:
            if all(name not in thread.engine.adapters for thread in self._threads):
                raise AdapterNotLoadedError(
                    f"lora_name is {cut(name)}, but no such adapter is loaded"
                )
            for thread in self._threads:
                await thread.call(functools.partial(drop_adapter, name=name))
        return f"{name!r} removed"

    def _below(self, path: str) -> Path | None:
        """Return a directory below the folder, after following links, or None."""
        try:
            found = (self._folder / path).resolve()
            is_below = found != self._folder and found.is_relative_to(self._folder)
            return found if path and is_below and found.is_dir() else None
        except (OSError, ValueError, RuntimeError):  # too long, a null character, a loop
            return None


def places(engine: Engine) -> tuple[set[int], set[Adapter]]:
    """Return the free places for adapters, and the unloaded adapters that still occupy theirs."""
    return engine.adapters.free(), engine.adapters.unloaded()


def take_adapter(engine: Engine, name: str, lora: Lora, number: int) -> None:
    """Load an adapter into a free place."""
    engine.adapters.load(name, lora, number=number)


def drop_adapter(engine: Engine, name: str) -> None:
    """Prevent new requests from choosing an adapter, if the engine has it."""
    if name in engine.adapters:
        engine.adapters.unload(name)


def _check_name(fields: Fields, name: str) -> None:
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        fields.problems.append(
            f"lora_name is {cut(name)}, but must be 1 to {MAX_NAME_LENGTH} printable characters"
        )
