"""Several engines behind one front: `--mesh data=2`.

    requests -> Groups  --+--> engine 0    devices 0, 1: weights, pools and a scheduler of their own
                          +--> engine 1    devices 2, 3: the same again

Each engine has a thread, and knows nothing of the others: a request stays where it begins. It goes
to the group that must compute the fewest tokens to finish it: the tokens of its other requests, and
those of the prompt that it has not read. So a prompt that begins like an earlier one goes to the
same group, unless that group has more to do than the prompt would cost another one.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import jattn.blocks as jb
from examples.engine.engine import Output
from examples.engine.http import metrics
from examples.engine.request import Request
from examples.engine.server import EngineThread, Room, ShuttingDownError


class Group:
    """What is known about an engine without asking it: what it has read, and has to do."""

    def __init__(self, num_blocks: int):
        """Begin with nothing.

        Args:
          num_blocks: how many of the latest blocks that it has read to remember.
        """
        self.num_tokens = 0  # still to compute for unfinished requests
        self._num_blocks = num_blocks
        self._read: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """Return how many of a prompt's first blocks it has read."""
        return next((i for i, h in enumerate(hashes) if h not in self._read), len(hashes))

    def note(self, hashes: Sequence[bytes]) -> None:
        """Record that it reads a prompt, whose first blocks are forgotten last."""
        for one in reversed(hashes):
            self._read[one] = None
            self._read.move_to_end(one)
        while len(self._read) > self._num_blocks:
            self._read.popitem(last=False)


class Groups(Room):
    """Runs requests on several engines (a `server.Runner`)."""

    def __init__(self, threads: Sequence[EngineThread], max_requests: int):
        """Wrap engines of the same model and limits.

        Args:
          threads: one for each engine.
          max_requests: how many requests may wait and run at once; further ones are refused.
        """
        super().__init__(max_requests)
        self.threads = tuple(threads)
        limits = threads[0].engine.limits
        self._block_size = limits.block_size
        known = max(limits.num_blocks.values()) if limits.prefix_caching else 0
        self.groups = tuple(Group(known) for _ in threads)

    @property
    def error(self) -> RuntimeError | None:
        """Why an engine cannot go on, in which case the whole server must restart."""
        errors = [thread.error for thread in self.threads if thread.error is not None]
        return min(errors, key=lambda error: isinstance(error, ShuttingDownError), default=None)

    async def __aenter__(self) -> Groups:
        for thread in self.threads:
            thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(thread.__aexit__() for thread in self.threads))

    def give_up(self) -> None:
        """Tell all requests that the server is shutting down."""
        for thread in self.threads:
            thread.give_up()

    async def watch(self, step_seconds: float, on_failure: Callable[[str], None]) -> None:
        """Wait until an engine cannot go on, and report why."""
        while not any([thread.check(step_seconds) for thread in self.threads]):
            await asyncio.sleep(min(1.0, step_seconds / 4))
        on_failure(str(self.error))

    async def metrics(self, responses: Mapping[tuple[str, int], int]) -> str:
        """Format the metrics for Prometheus, with each engine's number as the label `group`."""
        found = [metrics.families(t.engine, group=i) for i, t in enumerate(self.threads)]
        return metrics.text_of([*metrics.joined(found), metrics.http(responses)])

    async def stream(self, request: Request) -> AsyncIterator[Output]:
        """Yield a request's tokens as they come. Leaving the loop early aborts the request.

        Raises:
          ValueError: the engines cannot serve it.
          RuntimeError: its engine has stopped.
        """
        index, unread = self.choose(request)
        group, left = self.groups[index], unread + request.max_new_tokens
        group.num_tokens += left
        try:
            async with contextlib.aclosing(self.threads[index].stream(request)) as outputs:
                async for output in outputs:
                    done, unread = unread + 1, 0
                    group.num_tokens, left = group.num_tokens - done, left - done
                    yield output
        finally:
            group.num_tokens -= left

    def choose(self, request: Request) -> tuple[int, int]:
        """Choose a request's group; also return how many prompt tokens that group has to read."""
        size, prompt = self._block_size, request.prompt
        hashes = jb.hash_blocks(prompt[: len(prompt) - 1], size, parent=request.salt)
        unread = [len(prompt) - size * group.num_known(hashes) for group in self.groups]
        costs = [group.num_tokens + n for group, n in zip(self.groups, unread, strict=True)]
        index = min(range(len(costs)), key=lambda i: (costs[i], unread[i]))
        self.groups[index].note(hashes)
        return index, unread[index]
