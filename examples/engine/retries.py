"""Run requests on engines elsewhere; if one dies, another engine continues.

    send(request, ())  ->  token, token, token, EngineLostError
                           |  a pause, then to another engine with the tokens so far
    send(request, (token, token, token))  ->  token, token, ..., the end

An engine that is given tokens continues after them, as it does after preempting a sequence: it
reads the prompt and the tokens, and chooses the next one. Sampling depends on the seed and on the
token's position, so a sequence has the same tokens whichever engine chose them (up to rounding, if
engines differ), and a client only sees a pause. `examples/serve_ray.py` sends requests to replicas
behind Ray Serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from examples.engine.engine import Output
from examples.engine.http import metrics
from examples.engine.likelihoods import Likelihood
from examples.engine.request import Request, Sequence
from examples.engine.server import EngineThread, Room, ShuttingDownError

RETRIES = 6  # per request: one that kills every engine that serves it must not kill them all
FIRST_PAUSE = 0.25  # seconds before the first retry, doubled with each


class EngineLostError(Exception):
    """An engine cannot go on with a request; another one may."""


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of a request, as it travels between processes."""

    token: int
    text: str
    finish_reason: str | None
    likelihood: Likelihood | None = None
    # With the first token that an engine sends, if they were requested.
    prompt_likelihoods: tuple[Likelihood, ...] = ()


Send = Callable[[Request, tuple[int, ...]], AsyncIterator[Token]]
Poll = Callable[[], Awaitable[list[list[metrics.Family]]]]


async def serve_tokens(
    thread: EngineThread, request: Request, chosen: tuple[int, ...]
) -> AsyncIterator[Token]:
    """Yield what an engine sends: a request's tokens after those in `chosen`.

    Raises:
      EngineLostError: the engine has stopped, or is about to.
      ValueError: it cannot serve the request.
      RuntimeError: the request made a step fail.
    """
    first = True
    try:
        async with contextlib.aclosing(thread.stream(request, chosen)) as outputs:
            async for output in outputs:
                known = tuple(output.sequence.prompt_likelihoods) if first else ()
                first = False
                yield Token(
                    output.token, output.text, output.finish_reason, output.likelihood, known
                )
    except RuntimeError as error:
        if thread.error is not None or isinstance(error, ShuttingDownError):
            raise EngineLostError(str(error)) from None
        raise


class Retrying(Room):
    """Runs requests on engines elsewhere (a `server.Runner`)."""

    def __init__(
        self,
        send: Send,
        max_requests: int,
        poll: Poll,
        *,
        retries: int = RETRIES,
        pause: float = FIRST_PAUSE,
    ):
        """Begin without requests.

        Args:
          send: sends a request to some engine, which continues after the given tokens; raises
            `EngineLostError` when that engine cannot go on.
          max_requests: how many may wait and run at once; further ones are refused.
          poll: asks the engines for their metrics.
          retries: how often a request is sent again.
          pause: seconds before the first retry, doubled with each.
        """
        super().__init__(max_requests)
        self.error: RuntimeError | None = None
        self.num_retries = 0
        self._send, self._poll, self._retries, self._pause = send, poll, retries, pause

    async def __aenter__(self) -> Retrying:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.give_up()

    def give_up(self) -> None:
        """End requests with an error at their next token or retry."""
        self.error = self.error or ShuttingDownError("the server is shutting down")

    async def watch(self, step_seconds: float, on_failure: Callable[[str], None]) -> None:
        """Do nothing: engines are watched where they run."""

    async def metrics(self, responses: Mapping[tuple[str, int], int]) -> str:
        """Format metrics for Prometheus, with counts of responses by path and status."""
        engines = metrics.joined(await self._poll())
        retried = metrics.Family(
            "requests_retried_total",
            "counter",
            "Times a request was sent to another engine because the previous one was lost.",
            [("", self.num_retries)],
        )
        return metrics.text_of([*engines, retried, metrics.http(responses)])

    async def stream(self, request: Request) -> AsyncIterator[Output]:
        """Yield a request's tokens as they come. Leaving the loop early aborts the request.

        Raises:
          ValueError: the engines cannot serve it.
          RuntimeError: its steps fail, or too many engines were lost with it.
        """
        sequence = Sequence(request)  # it runs elsewhere
        for tried in range(self._retries + 1):
            try:
                tokens = self._send(request, tuple(sequence.chosen))
                async with contextlib.aclosing(tokens):
                    async for one in tokens:
                        if self.error is not None:
                            raise self.error
                        sequence.chosen.append(one.token)
                        sequence.prompt_likelihoods = sequence.prompt_likelihoods or list(
                            one.prompt_likelihoods
                        )
                        yield Output(
                            sequence,
                            one.token,
                            one.text,
                            one.finish_reason,
                            likelihood=one.likelihood,
                        )
                        if one.finish_reason is not None:
                            return
                raise EngineLostError("its response ended early")
            except EngineLostError as lost:
                reason = str(lost)
            if tried < self._retries:
                self.num_retries += 1
                await asyncio.sleep(self._pause * 2**tried)
        raise RuntimeError(f"{self._retries + 1} engines were lost, the last one because: {reason}")
