"""An engine behind HTTP, with OpenAI's API.

    POST /v1/completions        text for a prompt, whole or as server-sent events
    POST /v1/chat/completions   the next message of a conversation, whole or as events
    GET  /v1/models             the model and its adapters, and /v1/models/{id}
    POST /tokenize              the tokens of a prompt or a conversation
    POST /detokenize            the text of tokens
    GET  /                      a page to try it by hand
    GET  /health                200 while the engine runs
    GET  /metrics               for Prometheus
    POST /v1/load_lora_adapter  and unload: `examples/engine/http/adapter_routes.py`
    /prefill                    prompts for other servers (`examples/engine/transfer/offers.py`)

A client that disconnects aborts its request. Requests beyond the limit get status 429; invalid ones
get 400, with every reason. `examples/engine/http/access.py` has the limits and protects the server.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from examples.engine.adapters import Adapter
from examples.engine.engine import Engine
from examples.engine.groups import Groups
from examples.engine.http.access import (
    TOO_DEEP,
    Access,
    failure,
    http_error,
    read_body,
    without_folders,
)
from examples.engine.http.adapter_routes import AdapterRoutes
from examples.engine.http.answers import Answer, Chat, Completion
from examples.engine.http.chat import ChatTemplate
from examples.engine.http.metrics import CONTENT_TYPE
from examples.engine.http.protocol import (
    ModelNotFoundError,
    ServedModel,
    read_chat,
    read_completions,
    read_detokenize,
    read_tokenize,
    seeds_from,
)
from examples.engine.server import EngineThread, Runner, ShuttingDownError
from examples.engine.structure import Grammars
from examples.engine.transfer.offers import Offers, PrefillHandlers
from examples.engine.transfer.remote import Remote


def make_app(
    engines: Engine | Sequence[Engine],
    access: Access,
    on_failure: Callable[[str], None] = lambda reason: None,
    chat_template: ChatTemplate | None = None,
    grammars: Grammars | None = None,
    remote: Remote | None = None,
    offers: Offers | None = None,
    lora_folder: str | Path | None = None,
    seed: int | None = None,
) -> Starlette:
    """Make the application for an engine with a tokenizer, or for several engines of one model.

    Args:
      engines: the engines, which the application drives from now on.
      access: limits, and who may use it.
      on_failure: called with the reason if an engine fails for good, or a step hangs.
      chat_template: how the model writes conversations; None: no conversations.
      grammars: compiles the grammars of structured output; None: no structured output.
      remote: sends prompts to other servers for prefill; None: they are read here.
      offers: keeps prompts that are read for other servers; None: none are.
      lora_folder: adapters below it may be loaded and unloaded over HTTP; None: none may.
      seed: seed of the first request that has none; None: a different one at each start.
    """
    engines = [engines] if isinstance(engines, Engine) else engines
    engine = engines[0]
    served = ServedModel(
        dataclasses.replace(engine.model, params=None),  # adapters may be replaced
        engine.tokenizer,
        engine.limits.max_len,
        chat_template,
        grammars,
        engine.adapters,
        seeds_from(seed),
    )
    threads = [EngineThread(one, access.max_requests, remote) for one in engines]
    more = PrefillHandlers(threads[0], access, offers).routes() if offers else []
    if lora_folder is not None:
        more += AdapterRoutes(threads, access, lora_folder).routes()
    runner = Groups(threads, access.max_requests) if len(threads) > 1 else threads[0]
    return make_app_of(runner, served, access, on_failure, more)


def make_app_of(
    runner: Runner,
    served: ServedModel,
    access: Access,
    on_failure: Callable[[str], None] = lambda reason: None,
    more_routes: Iterable[Route] = (),
) -> Starlette:
    """Make the application for any runner of requests.

    Args:
      runner: runs requests; the application starts and stops it.
      served: the model, tokenizer and so on for which requests are read.
      access: limits, and who may use it.
      on_failure: called with the reason if the runner cannot go on.
      more_routes: routes to add to the standard ones.
    """
    counts: collections.Counter[tuple[str, int]] = collections.Counter()
    handlers = _Handlers(runner, access, counts, served)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        told = False  # whether the watchdog has reported a failure
        try:
            async with runner:
                watchdog = asyncio.create_task(runner.watch(access.step_seconds, on_failure))
                yield
                told = watchdog.done()
                watchdog.cancel()
        finally:
            if not told and not isinstance(
                runner.error, ShuttingDownError | None
            ):  # it did not stop
                on_failure(str(runner.error))

    routes = [
        Route("/v1/completions", handlers.completions, methods=["POST"]),
        Route("/v1/chat/completions", handlers.chat, methods=["POST"]),
        Route("/v1/models", handlers.models),
        Route("/v1/models/{id:path}", handlers.model),
        Route("/tokenize", handlers.tokenize, methods=["POST"]),
        Route("/detokenize", handlers.detokenize, methods=["POST"]),
        Route("/", handlers.page),
        Route("/health", handlers.health),
        Route("/metrics", handlers.metrics),
        *more_routes,
    ]
    application = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=access.middleware(counts, tuple(route.path for route in routes)),
        exception_handlers={HTTPException: http_error},
    )
    application.state.give_up = runner.give_up  # called when draining takes too long
    return application


class _Handlers:
    def __init__(
        self, runner: Runner, access: Access, counts: collections.Counter, served: ServedModel
    ):
        self.runner, self.access, self.counts, self.served = runner, access, counts, served
        self.created = int(time.time())

    async def health(self, _: HttpRequest) -> Response:
        if self.runner.error is not None:
            reason = without_folders(str(self.runner.error))
            return JSONResponse({"status": "failed", "reason": reason}, 503)
        return JSONResponse({"status": "ok"})

    async def page(self, _: HttpRequest) -> Response:
        return FileResponse(Path(__file__).with_name("page.html"))

    async def metrics(self, _: HttpRequest) -> Response:
        text = await self.runner.metrics(self.counts)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def models(self, _: HttpRequest) -> Response:
        cards = [self._model(None), *map(self._model, self.served.adapters.values())]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, http: HttpRequest) -> Response:
        try:
            adapter = self.served.adapter(http.path_params["id"])
        except ModelNotFoundError as error:
            return failure(error)
        return JSONResponse(self._model(adapter))

    async def completions(self, http: HttpRequest) -> Response | Answer:
        return await self._answer(http, read_completions, Completion())

    async def chat(self, http: HttpRequest) -> Response | Answer:
        return await self._answer(http, read_chat, Chat())

    async def tokenize(self, http: HttpRequest) -> Response:
        try:
            tokens = await self._read(http, read_tokenize)
        except ValueError as error:
            return failure(error)
        length = self.served.max_len
        return JSONResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    async def detokenize(self, http: HttpRequest) -> Response:
        try:
            text = await self._read(http, read_detokenize)
        except ValueError as error:
            return failure(error)
        return JSONResponse({"prompt": text})

    async def _answer(
        self, http: HttpRequest, read: Callable, shape: Completion | Chat
    ) -> Response | Answer:
        try:
            asked = await self._read(http, read)
        except ValueError as error:
            return failure(error)
        name = asked.adapter.name if asked.adapter else self.served.model.name
        return Answer(self.runner, asked, shape, name, self.served.tokenizer)

    async def _read(self, http: HttpRequest, read: Callable[[Any, ServedModel], Any]) -> Any:
        """Parse and check a body, in a thread because a large one must not delay other requests.

        Raises:
          ValueError: it is invalid.
        """
        body = await read_body(http, self.access)
        try:
            return await asyncio.to_thread(lambda: read(json.loads(body), self.served))
        except RecursionError:
            raise ValueError(TOO_DEEP) from None

    def _model(self, adapter: Adapter | None) -> dict[str, Any]:
        name, length = self.served.model.name, self.served.max_len
        model_id = adapter.name if adapter else name
        return {
            "id": model_id,
            "object": "model",
            "created": self.created,
            "owned_by": "jattn",
            "root": model_id,  # not the path of its files, which clients need not know
            "parent": name if adapter else None,
            "max_model_len": length,
        }
