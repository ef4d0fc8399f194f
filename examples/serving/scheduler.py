"""What runs next: requests share a token budget per step and a pool of blocks.

Each step gives every sequence that is generating its one token, then spends what is left of the
budget on prompts in order of arrival, a chunk at a time. When blocks run out, the newest sequence
gives up its own and starts over later with what it has generated so far; the oldest never has to,
so every request finishes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from examples.serving.blocks import BlockPool, BlockTable


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue.

    `follow` replaces the tokens the model is fed next by given ones (its own choices are still
    reported): that is how logits of two runs are compared once rounding makes them differ.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival: int = 0  # the step it arrives at
    stop_tokens: tuple[int, ...] = ()
    follow: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        problems = []
        if not self.prompt:
            problems.append("prompt is empty, but must hold at least one token")
        if self.max_new_tokens < 1:
            problems.append(f"max_new_tokens is {self.max_new_tokens}, but must be at least 1")
        if self.follow is not None and len(self.follow) < self.max_new_tokens:
            problems.append(f"follow has {len(self.follow)} tokens, fewer than max_new_tokens")
        if problems:
            raise ValueError("Request: " + "; ".join(problems))

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence this can become."""
        return len(self.prompt) + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class Limits:
    """The sizes a server is built for; every one of them is a shape of the compiled step."""

    max_seqs: int  # sequences in a step (B)
    token_budget: int  # tokens in a step (T)
    block_size: int  # S
    max_len: int  # tokens of the longest sequence
    windows: Mapping[str, int | None]  # by kind of layer: tokens a query sees, None for all
    num_blocks: Mapping[str, int] | None = None  # by kind of layer; None: never a shortage

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}, but must be at least 1"
            for name in ("max_seqs", "token_budget", "block_size", "max_len")
            if getattr(self, name) < 1
        ]
        if problems:
            raise ValueError("; ".join(problems))
        if self.token_budget < self.max_seqs:
            raise ValueError(
                f"token_budget is {self.token_budget}, but must be at least max_seqs "
                f"({self.max_seqs}): each generating sequence needs a token in every step"
            )
        enough = {kind: self.max_seqs * self.most_blocks(kind) for kind in self.windows}
        given = {**enough, **(self.num_blocks or {})}
        for kind, count in given.items():
            if count < (least := self.most_blocks(kind)):
                problems.append(
                    f"{count} {kind} blocks of {self.block_size} tokens are too few: one sequence "
                    f"of {self.max_len} tokens needs {least}"
                )
        if problems:
            raise ValueError("; ".join(problems))
        object.__setattr__(self, "num_blocks", given)

    @property
    def table_width(self) -> int:
        """Entries in a block table (M)."""
        return -(-self.max_len // self.block_size)

    def most_blocks(self, kind: str) -> int:
        """The most blocks one sequence holds at a time: a window, a chunk, and ragged ends."""
        window = self.windows[kind]
        if window is None:
            return self.table_width
        seen = window - 1 + self.token_budget
        return min(self.table_width, -(-seen // self.block_size) + 1)


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request on its way: its tokens so far and how many of them the caches hold."""

    request: Request
    tables: dict[str, BlockTable]
    tokens: list[int]
    chosen: list[int] = dataclasses.field(default_factory=list)  # the model's own next tokens
    num_computed: int = 0
    num_preemptions: int = 0

    @property
    def num_pending(self) -> int:
        """Tokens not computed yet: 1 while generating, the rest of the prompt before."""
        return len(self.tokens) - self.num_computed

    @property
    def is_finished(self) -> bool:
        """Whether the last token was chosen."""
        stops = self.request.stop_tokens
        enough = len(self.chosen) == self.request.max_new_tokens
        return enough or bool(self.chosen and self.chosen[-1] in stops)

    def append(self, token: int) -> None:
        """Take the token the model chose after the last one."""
        follow = self.request.follow
        self.tokens.append(token if follow is None else follow[len(self.chosen)])
        self.chosen.append(token)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The next `num_tokens` pending tokens of a sequence: one row of a step."""

    sequence: Sequence
    num_tokens: int

    @property
    def start(self) -> int:
        """Position of the chunk's first token."""
        return self.sequence.num_computed

    @property
    def stop(self) -> int:
        """Position after its last: the sequence's length in this step."""
        return self.start + self.num_tokens

    @property
    def is_last(self) -> bool:
        """Whether the logits after this chunk choose a token."""
        return self.stop == len(self.sequence.tokens)


class Scheduler:
    """Requests waiting, sequences running, and the pools they share."""

    def __init__(self, limits: Limits, seed: int = 0):
        self.limits = limits
        self.pools = {
            kind: BlockPool(count, seed + i)
            for i, (kind, count) in enumerate(limits.num_blocks.items())
        }
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []  # in order of arrival

    def submit(self, requests: Iterable[Request]) -> list[Sequence]:
        """Queue requests by arrival; the sequences they become, in the order given."""
        requests = list(requests)
        for request in requests:
            if request.max_len > self.limits.max_len:
                raise ValueError(
                    f"a request of {request.max_len} tokens was submitted to a server built for "
                    f"{self.limits.max_len}"
                )
        sequences = [
            Sequence(request, self._new_tables(), list(request.prompt)) for request in requests
        ]
        queue = sorted([*self.waiting, *sequences], key=lambda s: s.request.arrival)
        self.waiting = collections.deque(queue)
        return sequences

    def schedule(self, now: int) -> list[Chunk]:
        """Choose this step's chunks and take the blocks they write to."""
        self._admit(now)
        plan: dict[Sequence, Chunk] = {}
        by_urgency = sorted(self.running, key=lambda s: s.num_pending > 1)  # generating ones first
        for sequence in by_urgency:
            left = self.limits.token_budget - sum(c.num_tokens for c in plan.values())
            chunk = Chunk(sequence, min(sequence.num_pending, left))
            if sequence in self.running and chunk.num_tokens and self._make_room(chunk, plan):
                for table in sequence.tables.values():
                    table.grow(chunk.stop)
                plan[sequence] = chunk
        return list(plan.values())

    def commit(self, plan: Iterable[Chunk], next_tokens: np.ndarray) -> list[Sequence]:
        """Account for a step that ran; `next_tokens[i]` follows chunk i. Returns who finished."""
        for chunk, token in zip(plan, next_tokens, strict=False):
            sequence, is_last = chunk.sequence, chunk.is_last
            sequence.num_computed = chunk.stop
            if is_last:
                sequence.append(int(token))
            for table in sequence.tables.values():
                if sequence.is_finished:
                    table.release()
                else:
                    table.return_behind_window(sequence.num_computed)
        finished = [sequence for sequence in self.running if sequence.is_finished]
        self.running = [sequence for sequence in self.running if not sequence.is_finished]
        return finished

    def _new_tables(self) -> dict[str, BlockTable]:
        windows, size = self.limits.windows, self.limits.block_size
        return {kind: BlockTable(pool, size, windows[kind]) for kind, pool in self.pools.items()}

    def _admit(self, now: int) -> None:
        """Start requests that have arrived, in order, while there are a row and blocks for them."""
        while self.waiting and len(self.running) < self.limits.max_seqs:
            sequence = self.waiting[0]
            fits = all(
                min(table.num_missing(len(sequence.tokens)), self.limits.most_blocks(kind))
                <= table.pool.num_free
                for kind, table in sequence.tables.items()
            )
            if sequence.request.arrival > now or not fits:
                return
            self.running.append(self.waiting.popleft())

    def _make_room(self, chunk: Chunk, plan: dict[Sequence, Chunk]) -> bool:
        """Free blocks for a chunk at the expense of newer sequences; False if there are none."""
        tables = chunk.sequence.tables.values()
        while any(table.num_missing(chunk.stop) > table.pool.num_free for table in tables):
            newest = self.running[-1]
            if newest is chunk.sequence:
                return False
            self.running.pop()
            plan.pop(newest, None)
            for table in newest.tables.values():
                table.release()
            newest.num_computed = 0
            newest.num_preemptions += 1
            self.waiting.appendleft(newest)
        return True
