"""A request, and the sequence it becomes."""

from __future__ import annotations

import dataclasses
import itertools
import time
from reprlib import repr as cut  # of a value in an error message, however long it is

import numpy as np

from examples.engine.blocks import BlockTable, StateTable
from examples.text import TextStream

MAX_TEMPERATURE = 1e4  # above it every token is as likely as any other
_ids = itertools.count()


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: greedily, or drawn from softmax(logits / temperature).

    Of the distribution only the `top_k` likeliest tokens stay, and of those the fewest that hold
    `top_p` of the probability. A draw depends on the seed and on how many tokens the sequence has,
    not on the rest of the batch: a preempted or repeated request gets the same tokens.
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            problems.append(
                f"temperature is {cut(self.temperature)}, but must be at least 0 and at most "
                f"{MAX_TEMPERATURE:g}"
            )
        if not 0 <= self.top_k < 2**31:
            problems.append(
                f"top_k is {cut(self.top_k)}, but must be at least 0 (0: all tokens) and below "
                "2**31"
            )
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {cut(self.top_p)}, but must be above 0 and at most 1")
        if not 0 <= self.seed < 2**32:
            problems.append(f"seed is {self.seed}, but must be in 0..2**32-1")
        if problems:
            raise ValueError("; ".join(problems))


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue.

    `follow` replaces the tokens the model is fed next by given ones (its own choices are still
    reported): that is how logits of two runs are compared once rounding makes them differ.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    follow: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        problems = []
        if not self.prompt:
            problems.append("prompt is empty, but must hold at least one token")
        if self.max_new_tokens < 1:
            problems.append(f"max_new_tokens is {self.max_new_tokens}, but must be at least 1")
        if "" in self.stop_strings:
            problems.append("stop_strings has an empty string, which would stop at once")
        if self.follow is not None and len(self.follow) < self.max_new_tokens:
            problems.append(f"follow has {len(self.follow)} tokens, fewer than max_new_tokens")
        if problems:
            raise ValueError("Request: " + "; ".join(problems))

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence this can become."""
        return len(self.prompt) + self.max_new_tokens


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request being served: its tokens so far and how many of them the caches hold."""

    request: Request
    stream: TextStream | None = None  # turns tokens into text as they come
    id: int = dataclasses.field(default_factory=lambda: next(_ids))
    tokens: list[int] = dataclasses.field(default_factory=list)
    chosen: list[int] = dataclasses.field(default_factory=list)  # the model's own next tokens
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)  # if they are kept
    text: str = ""  # what `stream` has given out
    num_computed: int = 0
    num_preemptions: int = 0
    num_reused: int = 0  # prompt tokens found in the prefix cache when it was first admitted
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    # Where it is stored while it runs.
    row: int = -1  # of the block tables on the device
    tables: dict[str, BlockTable] = dataclasses.field(default_factory=dict)
    states: dict[str, StateTable] = dataclasses.field(default_factory=dict)
    hashes: list[bytes] = dataclasses.field(default_factory=list)  # of its full blocks
    # When things happened, in seconds of time.perf_counter().
    arrived: float = dataclasses.field(default_factory=time.perf_counter)
    started: float | None = None  # its first step
    first_token: float | None = None
    finished: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def num_pending(self) -> int:
        """Tokens not computed yet: 1 while generating, the rest of the prompt before."""
        return len(self.tokens) - self.num_computed

    def append(self, token: int) -> str:
        """Take the token the model chose after the last one; the text that is now certain."""
        request = self.request
        self.tokens.append(token if request.follow is None else request.follow[len(self.chosen)])
        self.chosen.append(token)
        if token in request.stop_tokens:
            self.finish_reason = "stop"
        elif len(self.chosen) == request.max_new_tokens:
            self.finish_reason = "length"
        if self.stream is None:
            return ""
        text, stopped = self.stream.push(
            [] if self.finish_reason == "stop" else [token], end=self.finish_reason is not None
        )
        if stopped:
            self.finish_reason = "stop"
        self.text += text
        return text


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The next pending tokens of a sequence, and guesses at what follows: one row of a step."""

    sequence: Sequence
    start: int  # position of the first
    stop: int  # after the last pending one
    drafts: tuple[int, ...] = ()  # tokens that may follow all that the sequence has

    @property
    def end(self) -> int:
        """The sequence's length in this step, drafts included."""
        return self.stop + len(self.drafts)

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes of the sequence."""
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether the logits after this chunk choose a token."""
        return self.stop == len(self.sequence.tokens)
