"""A request, and the sequence it becomes."""

from __future__ import annotations

import dataclasses
import itertools
import time
from reprlib import repr as cut  # shortens long values in error messages
from typing import TYPE_CHECKING

import numpy as np

import jattn.blocks as jb
from examples.engine.adapters import Adapter
from examples.engine.blocks import BlockTable, StateTable
from examples.engine.likelihoods import MOST_ALTERNATIVES, Likelihood
from examples.engine.structure import Grammar, Matcher
from examples.text import TextStream

if TYPE_CHECKING:
    from examples.engine.transfer.contents import Contents, Taken

MAX_TEMPERATURE = 1e4  # above it all tokens are equally likely
LEAST_TEMPERATURE = 1e-5  # below it logits / temperature may overflow
MAX_REPETITION = 100.0
MAX_BIAS = 100.0  # such a token is always or never chosen
MOST_BIASES = 512  # tokens whose logits a request may change
_ids = itertools.count()


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: greedily, or sampled from softmax(logits / temperature).

    Before that, `logit_bias` is added to the logits. The logit of a token that the sequence has is
    divided by `repetition_penalty` (multiplied if negative), and that of a token generated n times
    is reduced by `presence_penalty + n * frequency_penalty`.

    Sampling keeps the tokens at least `min_p` times as likely as the likeliest, of these the
    `top_k` likeliest, and of these the fewest whose total probability reaches `top_p`. A sample
    depends on the seed and on the sequence's length, not on the rest of the batch: a preempted or
    repeated request gets the same tokens.
    """

    temperature: float = 0.0  # 0, or below `LEAST_TEMPERATURE`: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # 0: all
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # tokens, and the numbers added to their logits

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
        if not 0 <= self.min_p <= 1:
            problems.append(f"min_p is {cut(self.min_p)}, but must be in 0..1")
        if not 0 <= self.seed < 2**32:
            problems.append(f"seed is {self.seed}, but must be in 0..2**32-1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                problems.append(f"{name} is {cut(getattr(self, name))}, but must be in -2..2")
        if not 0 < self.repetition_penalty <= MAX_REPETITION:
            problems.append(
                f"repetition_penalty is {cut(self.repetition_penalty)}, but must be above 0 and at "
                f"most {MAX_REPETITION:g}"
            )
        if len(self.logit_bias) > MOST_BIASES:
            problems.append(
                f"logit_bias has {len(self.logit_bias)} tokens, but must have at most {MOST_BIASES}"
            )
        if not all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias):
            problems.append(
                f"logit_bias is {cut(self.logit_bias)}, but its values must be in "
                f"-{MAX_BIAS:g}..{MAX_BIAS:g}"
            )
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def draws(self) -> bool:
        """Whether tokens are sampled rather than chosen greedily."""
        return self.temperature >= LEAST_TEMPERATURE

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen; then the device needs a history."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return penalties != (0, 0, 1) or bool(self.logit_bias)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue.

    With `logprobs` the sequence keeps the log-probability of each token it generates, and of that
    many alternatives; `prompt_logprobs` adds those of the prompt's tokens.

    With `follow` the model is fed the given tokens instead of those it chooses, which are still
    reported. This makes the logits of two runs comparable when rounding makes their choices differ.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    follow: tuple[int, ...] | None = None
    special_tokens: bool = False  # whether the text has their names
    logprobs: int | None = None  # alternatives; 0: only the token's own; None: none are kept
    prompt_logprobs: bool = False
    grammar: Grammar | None = None  # the text follows it
    adapter: Adapter | None = None  # it changes the model
    # Once the prompt is read, its cache contents are taken for another engine.
    hands_over: bool = False

    def __post_init__(self) -> None:
        problems = []
        if not self.prompt:
            problems.append("prompt is empty, but must hold at least one token")
        if self.max_new_tokens < 1:
            problems.append(f"max_new_tokens is {cut(self.max_new_tokens)}, but must be at least 1")
        if "" in self.stop_strings:
            problems.append("stop_strings has an empty string, which would stop at once")
        if self.follow is not None and len(self.follow) < self.max_new_tokens:
            problems.append(f"follow has {len(self.follow)} tokens, fewer than max_new_tokens")
        if self.follow is not None and self.adjusts:
            problems.append("follow is given, but penalties and grammars need the chosen tokens")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_ALTERNATIVES:
            problems.append(
                f"logprobs is {cut(self.logprobs)}, but must be in 0..{MOST_ALTERNATIVES}"
            )
        if self.prompt_logprobs and self.logprobs is None:
            problems.append("prompt_logprobs needs logprobs")
        if problems:
            raise ValueError("Request: " + "; ".join(problems))

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return self.sampling.adjusts or self.grammar is not None

    @property
    def salt(self) -> bytes:
        """What its prefixes' hashes begin with: all that its keys depend on other than tokens."""
        return b"" if self.adapter is None else self.adapter.salt

    @property
    def max_len(self) -> int:
        """The length of the longest sequence this can become."""
        return len(self.prompt) + self.max_new_tokens


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request being served: its tokens so far, and how many of them the caches hold."""

    request: Request
    stream: TextStream | None = None  # turns tokens into text as they come
    id: int = dataclasses.field(default_factory=lambda: next(_ids))
    tokens: list[int] = dataclasses.field(default_factory=list)
    chosen: list[int] = dataclasses.field(default_factory=list)  # the model's own next tokens
    num_given: int = 0  # how many of `chosen` another engine chose
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)  # if they are kept
    likelihoods: list[Likelihood] = dataclasses.field(default_factory=list)  # of `chosen`
    # Of the prompt's tokens, as far as they are known; the first has none.
    prompt_likelihoods: list[Likelihood] = dataclasses.field(default_factory=list)
    text: str = ""  # what `stream` has returned
    num_computed: int = 0
    num_preemptions: int = 0
    num_reused: int = 0  # prompt tokens found in the prefix cache when it was first admitted
    # The prompt's cache contents: from another engine for these caches, or from these caches for
    # another engine.
    contents: Contents | None = None
    taken: Taken | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    # Where it is stored while it runs.
    row: int = -1  # of the block tables on the device
    tables: dict[str, BlockTable] = dataclasses.field(default_factory=dict)
    states: dict[str, StateTable] = dataclasses.field(default_factory=dict)
    hashes: list[bytes] = dataclasses.field(default_factory=list)  # of its full blocks
    matcher: Matcher | None = None  # its text's place in the request's grammar
    has_history: bool = False  # whether its row of the device's history is filled in
    # When things happened, in seconds of time.perf_counter().
    arrived: float = dataclasses.field(default_factory=time.perf_counter)
    started: float | None = None  # its first step
    first_token: float | None = None
    finished: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.matcher = self.request.grammar and self.request.grammar.matcher()

    @property
    def num_pending(self) -> int:
        """Tokens not computed yet: the rest of the prompt, or 1 while generating."""
        return len(self.tokens) - self.num_computed

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt log-probabilities are still to be computed."""
        known = len(self.prompt_likelihoods)
        return self.request.prompt_logprobs and known < len(self.request.prompt) - 1

    def following(self, start: int, stop: int) -> list[int]:
        """Return the token after each of some, as far as the sequence or `follow` has it."""
        tokens, follow = self.tokens[start + 1 : stop + 1], self.request.follow
        if follow is not None and stop == len(self.tokens):
            tokens += follow[len(self.chosen) : len(self.chosen) + 1]
        return tokens

    def extend_hashes(self, num_tokens: int, block_size: int) -> None:
        """Extend the chain of hashes to all full blocks of the first `num_tokens` tokens."""
        new = self.tokens[len(self.hashes) * block_size : num_tokens]
        parent = self.hashes[-1] if self.hashes else self.request.salt
        self.hashes += jb.hash_blocks(new, block_size, parent=parent)

    def begin_at(self, num_tokens: int) -> None:
        """Allocate blocks and states for the first tokens, whose contents are about to arrive."""
        for table in self.tables.values():
            table.adopt([], table.first_seen(num_tokens))
            table.grow(num_tokens)
            if table.window is not None:  # of a block seen only in part, only that part arrives
                first = max(0, num_tokens - table.window + 1)
                table.num_published = -(-first // table.block_size)
        for state in self.states.values():
            state.prepare()
            state.commit()
        self.num_computed = num_tokens

    def append(self, token: int) -> str:
        """Append the token that the model chose; return the text that is now certain."""
        request = self.request
        self.tokens.append(token if request.follow is None else request.follow[len(self.chosen)])
        self.chosen.append(token)
        ends = token in request.stop_tokens
        complete = self.matcher is not None and self.matcher.accept(token)
        if ends or complete:
            self.finish_reason = "stop"
        elif len(self.chosen) == request.max_new_tokens:
            self.finish_reason = "length"
        if self.stream is None:
            return ""
        text, stopped = self.stream.push(
            [] if ends else [token], end=self.finish_reason is not None
        )
        if stopped:
            self.finish_reason = "stop"
        self.text += text
        return text


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One row of a step: a sequence's next pending tokens, and draft tokens that may follow."""

    sequence: Sequence
    start: int  # position of the first
    stop: int  # after the last pending one
    drafts: tuple[int, ...] = ()  # tokens that may follow all of the sequence's
    parents: tuple[int, ...] | None = None  # the draft before each draft; None: a chain

    @property
    def end(self) -> int:
        """The sequence's length in this step, including draft tokens."""
        return self.stop + len(self.drafts)

    @property
    def num_tokens(self) -> int:
        """How many of the sequence's tokens the step computes."""
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether the logits after this chunk choose a token."""
        return self.stop == len(self.sequence.tokens)

    def next_draft(self, draft: int, token: int) -> int | None:
        """Return the draft that follows another one, or none (-1), and equals a token, if any."""
        if self.parents is None:
            following = range(draft + 1, min(draft + 2, len(self.drafts)))
            return next((i for i in following if self.drafts[i] == token), None)
        pairs = enumerate(zip(self.parents, self.drafts, strict=True))
        return next((i for i, pair in pairs if pair == (draft, token)), None)
