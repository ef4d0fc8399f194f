"""Serve replicas of the engine behind Ray Serve, with the same HTTP API as one engine.

    pip install -e '.[ray]'
    python -m examples.serve_ray --model DIRECTORY --replicas 1:4
    curl localhost:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 20}'

    clients -> Ray's HTTP proxy -> Front      checks and tokenizes requests, responds in OpenAI's
                                     |        format (`examples/engine/http/app.py`); has no model
                                     |  tokens in both directions; routed by prefix
                              +------+------+
                              v             v
                           Replica       Replica  ...   one engine each, in its own process

Ray starts as many replicas as the load requires, routes a request to the replica that has read a
prompt with the same prefix (`PrefixCacheAffinityRouter`), and replaces replicas whose process has
died or whose engine has stopped (`check_health`). If a replica is lost, the front sends its
requests to another one, with the tokens generated so far (`examples/engine/retries.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence

if importlib.util.find_spec("ray") is None:
    sys.exit("this server needs ray: pip install -e '.[ray]'")

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from starlette.applications import Starlette

from examples.engine.adapters import Adapter
from examples.engine.http.app import make_app_of
from examples.engine.http.chat import load_chat_template
from examples.engine.http.metrics import Family, families
from examples.engine.http.protocol import ServedModel, seeds_from
from examples.engine.model import Model
from examples.engine.request import Request
from examples.engine.retries import EngineLostError, Retrying, Token, serve_tokens
from examples.engine.serve import (
    access_of,
    build,
    check_options,
    keep_compiled,
    use_wide_vectors,
)
from examples.engine.serve import options_parser as engine_options
from examples.engine.server import EngineThread
from examples.engine.structure import load_grammars
from examples.options import checkpoint_directory, integer
from examples.text import load_tokenizer

# `ray.serve.llm.request_router` exports it too, but cannot be imported without vLLM or sglang.
ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:"
    "PrefixCacheAffinityRouter"
)
HEALTH_SECONDS = 2.0  # between two checks of a replica
METRICS_SECONDS = 5.0  # how long replicas may take to report their metrics
OBJECT_STORE = 128 << 20  # bytes, which are enough: only tokens travel
# The load is averaged over a period, and must persist for a delay before replicas start or end.
PACE = {"look_back_period_s": 30.0, "upscale_delay_s": 30.0, "downscale_delay_s": 600.0}


# Options of engine.serve that replicas do not support.
NOT_FOR_REPLICAS = {
    **dict.fromkeys(
        ("coordinator", "num_processes", "process_id", "cluster", "heartbeat"),
        "a replica is one process",
    ),
    **dict.fromkeys(
        ("role", "prefill_server", "prefill_timeout", "prefill_tokens", "transfer_memory"),
        "a replica does both prefill and decode",
    ),
    "lora_folder": "replicas load adapters at startup, with --lora",
    **dict.fromkeys(
        ("restarts", "restart_wait", "uds", "supervisor"), "Ray replaces a replica that dies"
    ),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A request on its way to a replica."""

    prompt: str  # what the router compares: the adapter's name, then a character per token
    request: Request  # without its grammar, which cannot be sent
    grammar: str | None  # the grammar's source
    chosen: tuple[int, ...]  # tokens generated so far


def pack(request: Request, chosen: tuple[int, ...]) -> Call:
    """Pack a request for a replica, which continues it after the tokens generated so far."""
    adapter = request.adapter.name if request.adapter else ""
    grammar = None if request.grammar is None else request.grammar.source
    prompt = "".join(chr(t if t < 0xD800 else t + 0x800) for t in request.prompt)  # no surrogates
    return Call(adapter + prompt, dataclasses.replace(request, grammar=None), grammar, chosen)


@dataclasses.dataclass(frozen=True)
class Description:
    """What the front knows about the replicas' engines."""

    model: Model  # without parameters
    max_len: int
    adapters: dict[str, Adapter]


class Replica:
    """A process with an engine."""

    def __init__(self, options: argparse.Namespace):
        keep_compiled(options)
        use_wide_vectors()
        engine, _, self._grammars = build(options)
        self._step_seconds = options.step_timeout
        self._thread = EngineThread(engine, options.max_requests)
        self._thread.start()

    def describe(self) -> Description:
        """Describe the model, the longest sequence and the adapters."""
        engine = self._thread.engine
        known = ("name", "vocab_size", "max_positions", "dtype", "stop_tokens")
        known = {name: getattr(engine.model, name) for name in known}
        model = Model(**known, layers={}, params=None, step=None)
        return Description(model, engine.limits.max_len, dict(engine.adapters))

    async def stream(self, call: Call) -> AsyncIterator[Token]:
        """Yield the tokens of a request after those it already has."""
        request = dataclasses.replace(
            call.request,
            prompt=_one_of_all(call.request.prompt),
            grammar=None if call.grammar is None else self._grammars.compile(call.grammar),
        )
        async with contextlib.aclosing(serve_tokens(self._thread, request, call.chosen)) as tokens:
            async for token in tokens:
                yield token

    def metrics(self) -> list[Family]:
        """Return this engine's metrics, under the replica's name."""
        name = serve.get_replica_context().replica_id.unique_id
        return families(self._thread.engine, replica=name)

    def check_health(self) -> None:
        """Raise if the engine has failed. Ray calls this, and replaces a replica that raises."""
        if error := self._thread.check(self._step_seconds):
            raise error


@functools.lru_cache(256)
def _one_of_all(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return one object for equal prompts, so that their texts share blocks (`engine/forks.py`)."""
    return prompt


class Front:
    """The HTTP server's application, over replicas instead of an engine."""

    def __init__(self, options: argparse.Namespace, replicas: serve.handle.DeploymentHandle):
        self._options, self._replicas = options, replicas

    def __serve_build_asgi_app__(self) -> Starlette:
        """Build the application, which is complete once a replica has described itself.

        Ray calls this.
        """

        @contextlib.asynccontextmanager
        async def lifespan(outer: Starlette) -> AsyncIterator[None]:
            described = await self._replicas.describe.remote()
            inner = make_app_of(self._runner(), self._served(described), access_of(self._options))
            outer.mount("/", inner)
            async with inner.router.lifespan_context(inner):
                yield

        return Starlette(lifespan=lifespan)

    def _runner(self) -> Retrying:
        stream = self._replicas.options(stream=True).stream

        async def send(request: Request, chosen: tuple[int, ...]) -> AsyncIterator[Token]:
            tokens = stream.remote(pack(request, chosen))
            try:
                async for token in tokens:
                    yield token
            except RayActorError as error:
                raise EngineLostError(f"its replica has died: {type(error).__name__}") from None
            finally:
                tokens.cancel()  # does nothing if it has ended

        async def poll() -> list[list[Family]]:
            asked = self._replicas.broadcast("metrics")
            found = await asked.results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
            return [one for one in found if not isinstance(one, Exception)]

        return Retrying(send, self._options.max_requests, poll)

    def _served(self, described: Description) -> ServedModel:
        model = described.model
        directory = checkpoint_directory(self._options.model)
        tokenizer = load_tokenizer(directory, model.vocab_size)
        return ServedModel(
            model,
            tokenizer,
            described.max_len,
            load_chat_template(directory, self._options.chat_template),
            load_grammars(directory, tokenizer, model.vocab_size, model.stop_tokens),
            described.adapters,
            seeds_from(self._options.seed),
        )


def make_application(options: argparse.Namespace) -> serve.Application:
    """Make a front and its replicas, for `serve.run`."""
    fewest, most = options.replicas
    replica = serve.deployment(
        Replica,
        name="replica",
        max_ongoing_requests=options.max_requests,
        autoscaling_config={
            "min_replicas": fewest,
            "initial_replicas": fewest,
            "max_replicas": most,
            "target_ongoing_requests": options.max_seqs,
            **PACE,
        },
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=options.drain_timeout,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={
                # By how many requests replicas may differ before the shortest queue goes first.
                "imbalanced_threshold": options.max_seqs,
                "do_eviction": True,
            },
        ),
    )
    front = serve.deployment(
        serve.ingress()(Front),
        name="front",
        max_ongoing_requests=2 * options.max_requests,  # including those it refuses
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(options, replica.bind(options))


def options_parser() -> argparse.ArgumentParser:
    """Make the parser, with every option, its default and its help."""
    parser = engine_options()
    parser.prog = "python -m examples.serve_ray"
    parser.description = "Serve a model over HTTP with replicas of the engine, behind Ray Serve."
    add = functools.partial(parser.add_argument)
    add("--replicas", metavar="N", type=interval, default=(1, 1), help="N or FEWEST:MOST (1)")
    add("--cpus", metavar="N", type=float, default=1, help="CPUs per replica (%(default)s)")
    add("--gpus", metavar="N", type=float, default=0, help="GPUs per replica (%(default)s)")
    add("--address", help="address of a Ray cluster (default: start one here)")
    return parser


def interval(text: str) -> tuple[int, int]:
    """Parse N or FEWEST:MOST, of at least 1 and in order."""
    fewest, _, most = text.partition(":")
    pair = integer(1)(fewest), integer(1)(most or fewest)
    if pair[0] > pair[1]:
        raise argparse.ArgumentTypeError(f"{text!r} must not have FEWEST above MOST")
    return pair


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the server until it is interrupted. Wrong arguments exit with status 2."""
    parser = options_parser()
    options = parser.parse_args(arguments)
    for name, reason in NOT_FOR_REPLICAS.items():
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} is for engine.serve: {reason}")
    if any(item.startswith("data=") for item in (options.mesh or "").split(",")):
        parser.error(f"--mesh is {options.mesh!r}, but replicas replace data=N")
    try:
        check_options(options)
    except ValueError as error:
        parser.error(str(error))
    here = {"object_store_memory": OBJECT_STORE, "include_dashboard": False}
    here = {} if options.address else here
    ray.init(address=options.address or "local", **here)
    serve.start(http_options={"host": options.host, "port": options.port})
    try:
        serve.run(make_application(options))
        print(f"serving on http://{options.host}:{options.port}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    from examples import serve_ray  # objects sent to other processes must not be of `__main__`

    serve_ray.main()
