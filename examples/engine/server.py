"""An engine in its own thread, for asyncio.

The event loop never waits for a step, and the engine never waits for a client: requests and
aborts go to the thread through a queue, and tokens come back through `call_soon_threadsafe`.

An exception in a step fails only the requests that caused it (`Engine.recover`). If the
engine cannot go on, or a step hangs, `watch` reports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Protocol

from examples.engine.engine import Engine, Output
from examples.engine.hosts import IDLE_SECONDS
from examples.engine.http import metrics
from examples.engine.request import Request, Sequence
from examples.engine.transfer.contents import Contents
from examples.engine.transfer.remote import Remote

LAST_STEP_SECONDS = 10  # for a step that is running when the thread is told to end


class ServerFullError(Exception):
    """The most requests that the server accepts are waiting or running."""


class ShuttingDownError(RuntimeError):
    """The server ends before the request is finished."""


class EngineFailedError(RuntimeError):
    """The engine cannot go on, and its process ends."""


class Runner(Protocol):
    """Runs an application's requests: an engine's thread, or several engines.

    `async with` starts and stops it.
    """

    error: RuntimeError | None  # why it cannot go on

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *_: object) -> None: ...

    def reserve(self, count: int) -> contextlib.AbstractContextManager[None]:
        """Reserve room for some requests, as `Room.reserve` does."""
        ...

    def stream(self, request: Request) -> AsyncIterator[Output]:
        """Yield a request's tokens as they come."""
        ...

    def give_up(self) -> None:
        """Tell all requests that the server is shutting down."""
        ...

    async def watch(self, step_seconds: float, on_failure: Callable[[str], None]) -> None:
        """Wait until it cannot go on, and report why."""
        ...

    async def metrics(self, responses: Mapping[tuple[str, int], int]) -> str:
        """Format metrics for Prometheus, with counts of responses by path and status."""
        ...


class Room:
    """A limit on how many requests may wait and run at once."""

    def __init__(self, max_requests: int):
        self.max_requests = max_requests
        self.num_requests = 0  # waiting or running, or about to

    @contextlib.contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserve room for some requests, for as long as they take.

        Raises:
          ServerFullError: there is no room now.
          ValueError: there is never enough room.
        """
        if count > self.max_requests:
            raise ValueError(
                f"the request asks for {count} texts, but this server generates at most "
                f"{self.max_requests} at a time"
            )
        if self.num_requests + count > self.max_requests:
            raise ServerFullError
        self.num_requests += count
        try:
            yield
        finally:
            self.num_requests -= count


@dataclasses.dataclass(eq=False)
class _Call:
    """A function of the engine to call between two steps, and its result."""

    function: Callable[[Engine], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future

    def run(self, engine: Engine) -> None:
        """Call the function, in the engine's thread."""
        try:
            self.deliver(self.function(engine))
        except Exception as error:
            self.deliver(error)

    def deliver(self, what: Any) -> None:
        """Deliver a result or an exception, from any thread; only the first one counts."""
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self.loop.call_soon_threadsafe(self._settle, what)

    def _settle(self, what: Any) -> None:
        if self.future.done():  # cancelled
            return
        if isinstance(what, Exception):
            self.future.set_exception(what)
        else:
            self.future.set_result(what)


@dataclasses.dataclass(eq=False)
class _Ticket:
    """A request between the event loop and the engine's thread."""

    request: Request
    chosen: tuple[int, ...]
    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[Output | Exception]
    sequence: Sequence | None = None
    is_aborted: bool = False
    arrived: float = dataclasses.field(default_factory=time.perf_counter)

    def deliver(self, what: Output | Exception) -> None:
        """Deliver an output or an exception, from the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self.loop.call_soon_threadsafe(self.outputs.put_nowait, what)


class EngineThread(Room):
    """Runs an engine; `async with` starts and stops the thread."""

    def __init__(self, engine: Engine, max_requests: int, remote: Remote | None = None):
        """Wrap an engine, which only the thread may use from now on.

        Args:
          engine: the engine.
          max_requests: how many may wait and run at once; further ones are refused.
          remote: sends prompts to other servers for prefill; None: they are read here.
        """
        super().__init__(max_requests)
        self.engine, self.remote = engine, remote
        self.error: RuntimeError | None = None  # why the thread has ended
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._tickets: dict[Sequence, _Ticket] = {}
        # Requests whose prompt another server is reading, by the prompt's id: several texts of one
        # prompt wait for the same one.
        self._remote_tickets: dict[int, list[_Ticket]] = {}
        # What the event loop waits for, whether or not the thread knows about it.
        self._calls: set[_Call] = set()
        self._streams: set[_Ticket] = set()
        self._gave_up: RuntimeError | None = None  # the error that `give_up` sent to all requests
        self._step_began: float | None = None  # by time.monotonic(), while a step runs
        self._hangs = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, as `async with` does."""
        self._thread.start()

    async def __aenter__(self) -> EngineThread:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands.put(None)  # the thread ends after its step
        try:
            if not self._hangs:
                await asyncio.to_thread(self._thread.join, LAST_STEP_SECONDS)
        finally:  # also if the server is forced to end
            if self.error is None and self._thread.is_alive():
                self.error = RuntimeError("a step was still running at the end")

    def give_up(self) -> None:
        """Tell all requests and calls that the server is shutting down."""
        self._gave_up = ShuttingDownError("the server is shutting down")
        self._tell_all(self._gave_up)

    async def watch(self, step_seconds: float, on_failure: Callable[[str], None]) -> None:
        """Wait until the engine cannot go on, and report why.

        Args:
          step_seconds: after which a step counts as hanging.
          on_failure: called once, with the reason.
        """
        while self.check(step_seconds) is None:
            await asyncio.sleep(min(1.0, step_seconds / 4))
        on_failure(str(self.error))

    def check(self, step_seconds: float) -> RuntimeError | None:
        """Return why the engine cannot go on, if it cannot.

        Args:
          step_seconds: after which a step counts as hanging, and all requests and calls fail.
        """
        began = self._step_began
        hangs = began is not None and time.monotonic() - began > step_seconds
        if self.error is None and hangs:
            self._hangs = True
            self.error = EngineFailedError(f"a step has taken more than {step_seconds:g} seconds")
            self._tell_all(self.error)
        return self.error

    async def metrics(self, responses: Mapping[tuple[str, int], int]) -> str:
        """Format metrics for Prometheus, with counts of responses by path and status."""
        return metrics.exposition(self.engine, responses)

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Call a function of the engine in its thread, between two steps, and return its result.

        Raises:
          Exception: the function's own.
          RuntimeError: the engine has stopped, a step hangs, or the server is shutting down. The
            function may still be called if the engine goes on.
        """
        loop = asyncio.get_running_loop()
        call = _Call(function, loop, loop.create_future())
        self._calls.add(call)
        try:
            self._commands.put(("call", call))
            if error := self.error or self._gave_up:
                call.future.cancel()
                raise error
            return await call.future
        finally:
            self._calls.remove(call)

    async def stream(self, request: Request, chosen: tuple[int, ...] = ()) -> AsyncIterator[Output]:
        """Yield a request's tokens as they come. Leaving the loop early aborts the request.

        Args:
          request: the request.
          chosen: tokens that another engine has already generated; this one continues after them.

        Raises:
          ValueError: the engine cannot serve it.
          RuntimeError: the engine has stopped.
        """
        ticket = _Ticket(request, chosen, asyncio.get_running_loop(), asyncio.Queue())
        self._streams.add(ticket)
        self._commands.put(("add", ticket))
        try:
            while True:
                if error := self.error or self._gave_up:  # read after the put: never too early
                    raise error
                output = await ticket.outputs.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._streams.remove(ticket)
            self._commands.put(("abort", ticket))  # does nothing if it has finished

    def _tell_all(self, error: RuntimeError) -> None:
        for one in (*self._streams, *self._calls):
            one.deliver(error)

    def _run(self) -> None:
        """Run the thread: obey commands, run a step, deliver its tokens; sleep when idle."""
        end: RuntimeError = ShuttingDownError("the server is shutting down")
        try:
            while self._obey(wait=not self.engine.has_work):
                for output in self._step():
                    failure = output.error and RuntimeError(f"the request failed: {output.error}")
                    self._tickets[output.sequence].deliver(failure or output)
                    if output.finish_reason is not None:
                        del self._tickets[output.sequence]
        except Exception as error:
            logging.getLogger(__name__).exception("the engine has failed")
            end = EngineFailedError(f"the engine has failed: {error}")
        self.error = end
        for ticket in itertools.chain(self._tickets.values(), *self._remote_tickets.values()):
            ticket.deliver(end)
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get(block=False)
                if command is not None:  # None: told again to end
                    command[1].deliver(end)

    def _step(self) -> list[Output]:
        self._step_began = time.monotonic()
        try:
            return self.engine.step()
        except Exception as error:
            outputs = self.engine.recover(error)
            logging.getLogger(__name__).exception("a step has failed, and its requests with it")
            return outputs
        finally:
            self._step_began = None

    def _obey(self, *, wait: bool) -> bool:
        """Carry out the event loop's commands; return False to end."""
        while True:
            try:
                seconds = IDLE_SECONDS if self.engine.followers else None
                command = self._commands.get(block=wait, timeout=seconds)
            except queue.Empty:
                if wait:
                    self.engine.idle()
                return True
            wait = False
            if command is None:
                return False
            what, ticket, *found = command
            if what == "add":
                self._begin(ticket)
            elif what == "call":
                ticket.run(self.engine)
            elif what == "read":
                self._add_read(ticket, *found)
            elif what == "abort":
                ticket.is_aborted = True
                if ticket.sequence is not None:
                    self.engine.abort(ticket.sequence)
                    self._tickets.pop(ticket.sequence, None)

    def _begin(self, ticket: _Ticket) -> None:
        """Send a prompt to another server for prefill, or give the request to the engine."""
        try:
            if not self._read_elsewhere(ticket):
                self._add(ticket)
        except Exception as error:  # ends only this request
            ticket.deliver(error)

    def _add(self, ticket: _Ticket, contents: Contents | None = None) -> None:
        """Give a request to the engine."""
        try:
            ticket.sequence = self.engine.add(ticket.request, contents, ticket.chosen)
            ticket.sequence.arrived = ticket.arrived
            self._tickets[ticket.sequence] = ticket
        except Exception as error:
            ticket.deliver(error)

    def _read_elsewhere(self, ticket: _Ticket) -> bool:
        """Send a prompt to another server for prefill, if that is worthwhile."""
        if ticket.chosen:  # more than the prompt must be read
            return False
        prompt = ticket.request.prompt
        if tickets := self._remote_tickets.get(id(prompt)):
            tickets.append(ticket)
            return True
        if self.remote is None or not self.remote.wants(self.engine, ticket.request):
            return False
        tickets = [ticket]
        self.remote.start(
            prompt,
            lambda found: self._commands.put(("read", ticket, found)),
            lambda: not all(one.is_aborted for one in tickets),
        )
        self._remote_tickets[id(prompt)] = tickets
        return True

    def _add_read(self, first: _Ticket, contents: Contents | None) -> None:
        """Go on with a prompt that another server has read, or failed to read."""
        tickets = self._remote_tickets.pop(id(first.request.prompt))
        tickets = [ticket for ticket in tickets if not ticket.is_aborted]
        self.engine.statistics.num_failed_prompts += bool(tickets) and contents is None
        for ticket in tickets:
            self._add(ticket, contents)
            contents = None  # the others share the first one's blocks
