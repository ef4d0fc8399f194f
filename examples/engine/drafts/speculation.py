"""Speculative decoding: guess the next tokens, and verify them all in one step.

    drafts  = the tokens that a proposer expects next: x_1 ... x_k
    step      runs the last token and the drafts as one chunk, and chooses a token after each
    accept    drafts as long as each equals the token chosen before it, plus one more token

A step reads all weights once, whether for one token of a sequence or for 1 + k, and gives the
sequence 1 to 1 + k tokens. These do not depend on the drafts: after each draft the step chooses as
it would without drafts, with the same random numbers, since sampling depends on the request's seed
and on the token's position. Greedy or sampled, the tokens are those of a run without drafts. For
drafts that were not sampled this is rejection sampling: a token x is accepted with its probability
p(x), and if it is rejected, the token in its place has the distribution p without x.

Rejected drafts cost time, so drafts are proposed only when they pay (`Speculator`).
"""

from __future__ import annotations

import collections
import dataclasses
import re
import time
import weakref
from collections.abc import Sequence as Row
from typing import Protocol

from examples.engine.drafts import trees
from examples.engine.model import Model
from examples.engine.request import Chunk, Sequence
from examples.engine.scheduler import Scheduler
from examples.engine.step import Bucket


@dataclasses.dataclass(frozen=True)
class Speculation:
    """The kind of draft tokens, and their number."""

    num_drafts: int = 4  # the most per sequence in a step
    draft: Model | None = None  # a draft model; None: prompt lookup, or
    mtp: bool = False  # the model's own MTP layer, with which it must be loaded
    branches: int = 1  # continuations that lookup proposes at once, as a tree
    shortest: int = 3  # how many last tokens must have occurred before for lookup to propose
    backs_off: bool = True  # False: use drafts whenever there are any, even if they do not pay

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}, but must be at least 1"
            for name in ("num_drafts", "branches", "shortest")
            if getattr(self, name) < 1
        ]
        if self.branches > 1 and (self.draft is not None or self.mtp):
            problems.append(f"branches is {self.branches}, but must be 1 when a model drafts")
        if self.draft is not None and self.mtp:
            problems.append("mtp is True, but there is a draft model")
        if problems:
            raise ValueError("; ".join(problems))


def read_speculation(text: str, draft: Model | None = None) -> Speculation:
    """Parse a speculation from the command line.

    It is "lookup=4", "lookup=8x2" for trees of 8 drafts in 2 branches, "draft=4" or "mtp=2"; the
    numbers may be omitted.

    Args:
      text: the option's value.
      draft: the draft model, if one is given.

    Raises:
      ValueError: the text is invalid, or a draft model is missing or not needed.
    """
    written = re.fullmatch(r"(lookup|draft|mtp)(?:=(\d+)(?:x(\d+))?)?", text, re.ASCII)
    if written is None:
        raise ValueError(
            f"--speculate is {text!r}, but must be lookup=N, draft=N or mtp=N with N draft tokens "
            "per step, or lookup=NxB in B branches"
        )
    kind, count, branches = written.groups()
    if (kind == "draft") != (draft is not None):
        raise ValueError(
            f"--speculate is {text!r}, but must be draft=N if and only if --draft is given"
        )
    most = int(count or Speculation.num_drafts)
    return Speculation(most, draft, kind == "mtp", int(branches or 1))


@dataclasses.dataclass(frozen=True)
class Guess:
    """Drafts for one sequence."""

    tokens: tuple[int, ...] = ()
    kind: int = 0  # guesses of the same kind are assumed to be accepted equally often
    parents: tuple[int, ...] | None = None  # the token before each token; None: a chain


class Proposer(Protocol):
    """Guesses how sequences continue."""

    # Whether guesses take almost no time: then they are made before deciding whether they pay.
    # Guesses of a costly proposer are all of one kind.
    is_cheap: bool

    def propose(self, sequences: Row[Sequence], most: Row[int]) -> list[Guess]:
        """Guess up to `most` next tokens for each sequence."""
        ...


class Lookup:
    """Guesses that the last tokens continue as they did before, in the prompt or the output.

    Of the places where the last `shortest` tokens occurred, the one with the longest match decides,
    and of equal ones the latest. A match close to the end repeats: after "ababab" comes "abab".
    """

    is_cheap = True
    LONGEST = 32  # tokens compared per match
    PLACES = 16  # the latest places, which are compared

    def __init__(self, shortest: int, branches: int = 1):
        self.shortest, self.branches = shortest, branches
        self._seen: weakref.WeakKeyDictionary[Sequence, _Seen] = weakref.WeakKeyDictionary()

    def propose(self, sequences: Row[Sequence], most: Row[int]) -> list[Guess]:
        """Guess up to `most` tokens for each sequence; the kind is the matches' length."""
        return [self._guess(*of) for of in zip(sequences, most, strict=True)]

    def _guess(self, sequence: Sequence, most: int) -> Guess:
        if most < 1:
            return Guess()
        seen = self._seen.get(sequence)
        if seen is None:
            seen = self._seen[sequence] = _Seen()
        tokens, count = sequence.tokens, len(sequence.tokens)
        for end in range(max(seen.length, self.shortest), count):
            seen.places.setdefault(tuple(tokens[end - self.shortest : end]), []).append(end)
        seen.length = max(count, seen.length)
        matches = []
        for end in seen.places.get(tuple(tokens[-self.shortest :]), [])[: -self.PLACES - 1 : -1]:
            matches.append((_match(tokens, end, min(end, self.LONGEST)), end))
        if not matches:
            return Guess()
        longest, place = max(matches)
        kind = longest.bit_length()
        if self.branches == 1:
            return Guess(_continued(tokens, place, most), kind)
        candidates: dict[tuple[int, ...], None] = {}  # without those that are the same
        for _, end in sorted(matches, reverse=True):
            candidates.setdefault(_continued(tokens, end, most))
        drafts, parents = trees.grow(list(candidates)[: self.branches], most)
        return Guess(drafts, kind, parents)


@dataclasses.dataclass(eq=False)
class _Seen:
    """Where a sequence's n-grams end, without the last one."""

    places: dict[tuple[int, ...], list[int]] = dataclasses.field(default_factory=dict)
    length: int = 0  # it has the n-grams that end before this position


def _continued(tokens: Row[int], place: int, most: int) -> tuple[int, ...]:
    """Return the tokens after `place`, assuming that they repeat past the end."""
    count = len(tokens)
    drafts = list(tokens[place : place + most])
    while len(drafts) < most:
        drafts.append(drafts[place + len(drafts) - count])
    return tuple(drafts)


def _match(tokens: Row[int], end: int, most: int) -> int:
    """Return how many of the last tokens equal those before `end`."""
    count = len(tokens)
    length = 0
    while length < most and tokens[end - 1 - length] == tokens[count - 1 - length]:
        length += 1
    return length


def _any_guess(length: int) -> Guess:
    """Return a placeholder for a costly proposer's guess, before it is made."""
    return Guess((-1,) * length)


class Speculator:
    """Decides which steps use drafts, from how many were accepted and what they cost.

    A step of B sequences with drafts yields the B tokens of a step without drafts, plus the
    accepted ones. It pays if

        (B + accepted) / seconds with drafts  >  B / seconds without.

    The number of accepted tokens is estimated from earlier guesses of the same kind for the
    sequence, and at first from guesses for other sequences that choose in the same way, greedily or
    by sampling. Seconds are those of the latest steps with and without drafts. While drafts pay,
    every 64th step runs without them to measure the current time. While they do not, they are tried
    again after 4 steps, then 8 and so on, until trials take 1/500 of the time; steps with sampling
    are counted separately.

    Searching for guesses takes time as well. While searches are in vain, steps rest between them:
    one step after the first, two after the second and so on, until searches take 1/1000 of the
    time.
    """

    FIRST, WEIGHT = 1.0, 0.3  # accepted tokens expected of a new kind, and how fast that changes
    PATIENCE = 4.0  # steps before the first trial of drafts that do not pay
    REMEASURE = 64  # steps with drafts before one without
    ENOUGH = 3  # measured steps
    SEARCHES, TRIALS = 1 / 1000, 1 / 500  # shares of the time, while in vain

    def __init__(self, speculation: Speculation, proposer: Proposer, buckets: Row[Bucket]):
        self.speculation, self.proposer = speculation, proposer
        self._buckets = [bucket for bucket in buckets if bucket.num_drafts]
        self._seconds = {bucket: collections.deque[float](maxlen=9) for bucket in buckets}
        self._accepted: weakref.WeakKeyDictionary[Sequence, dict[int, float]]
        self._accepted = weakref.WeakKeyDictionary()
        self._usual: dict[tuple[bool, int], float] = {}  # by whether sampled, and kind
        self._kinds: dict[Sequence, int] = {}  # of the guesses in the running step
        self._with = self._without = 0  # steps with, or without, drafts since the last other one
        self._patience = dict.fromkeys((False, True), self.PATIENCE)  # by whether any is sampled
        self._in_vain = 0  # searches for guesses; halved when drafts are accepted
        self._rest = 0  # steps until the next search
        self._proposing = 0.0  # seconds spent on it for the running step

    def draft(self, plan: list[Chunk], scheduler: Scheduler, without: Bucket) -> list[Chunk]:
        """Add drafts to a plan if they pay; return the same object if there are none.

        Args:
          plan: a step's chunks.
          scheduler: says whether there is room for drafts.
          without: the bucket of the plan without drafts.
        """
        if self._rest:
            self._rest -= 1
            self._without += 1
            return plan
        bucket = self._bucket(plan)
        if bucket is None or without.scores:
            return plan
        start = time.perf_counter()
        drafted = self._draft(plan, scheduler, bucket, without)
        if drafted is plan and self.speculation.backs_off:
            self._in_vain += 1
            self._rest = self._rest_after(time.perf_counter() - start, without)
        return drafted

    def _rest_after(self, searched: float, without: Bucket) -> int:
        """Return how many steps to rest after a search of some seconds."""
        if not self._seconds[without]:
            return 0
        enough = searched / (self.SEARCHES * self._median(without))
        return min(int(enough), self._in_vain)

    def _draft(
        self, plan: list[Chunk], scheduler: Scheduler, bucket: Bucket, without: Bucket
    ) -> list[Chunk]:
        left, most = bucket.num_tokens - sum(chunk.num_tokens for chunk in plan), []
        for chunk in plan:
            room = min(left, bucket.max_query_len - chunk.num_tokens)
            most.append(max(0, min(room, scheduler.most_drafts(chunk))))
            left -= most[-1]
        sequences, is_cheap = [chunk.sequence for chunk in plan], self.proposer.is_cheap
        guesses = self.proposer.propose(sequences, most) if is_cheap else [*map(_any_guess, most)]
        if not any(guess.tokens for guess in guesses):
            return plan
        if self.speculation.backs_off and not self._pays(plan, guesses, bucket, without):
            return plan
        if not is_cheap:
            start = time.perf_counter()
            guesses = self.proposer.propose(sequences, most)
            self._proposing = time.perf_counter() - start
        both = zip(plan, guesses, strict=True)
        plan = [scheduler.add_drafts(chunk, guess.tokens, guess.parents) for chunk, guess in both]
        both = zip(plan, guesses, strict=True)
        self._kinds = {chunk.sequence: guess.kind for chunk, guess in both if chunk.drafts}
        return plan

    def note_step(self, plan: list[Chunk], bucket: Bucket, seconds: float) -> None:
        """Learn from a step, after its tokens are taken.

        Args:
          plan: what it ran.
          bucket: its shape; the times of steps that score prompts are not used.
          seconds: how long the device took.
        """
        if self._rest:  # the next step does not search either
            return
        if not bucket.scores:
            proposing = self._proposing if bucket.num_drafts else 0.0
            self._seconds[bucket].append(seconds + proposing)
        self._proposing = 0.0
        if hasattr(self.proposer, "note_step"):
            self.proposer.note_step(plan)

    def note_accepted(self, sequence: Sequence, count: int) -> None:
        """Learn how many drafts of a sequence were accepted."""
        if count:
            self._in_vain //= 2
        kind = self._kinds[sequence]
        mean = self._expected(sequence, kind)
        means, alike = self._accepted.setdefault(sequence, {}), (_is_drawn(sequence), kind)
        means[kind] = mean + self.WEIGHT * (count - mean)
        usual = self._usual.get(alike, self.FIRST)
        self._usual[alike] = usual + self.WEIGHT * (count - usual)

    def _expected(self, sequence: Sequence, kind: int) -> float:
        """Return how many drafts of a kind are likely to be accepted."""
        usual = self._usual.get((_is_drawn(sequence), kind), self.FIRST)
        return self._accepted.get(sequence, {}).get(kind, usual)

    def _bucket(self, plan: list[Chunk]) -> Bucket | None:
        """Return the smallest bucket that holds the plan and a draft, if there is one."""
        count, longest = 0, 0
        for chunk in plan:
            count, longest = count + chunk.num_tokens, max(longest, chunk.num_tokens)
        for bucket in self._buckets:
            fits = count < bucket.num_tokens and len(plan) <= bucket.num_seqs
            if fits and longest <= bucket.max_query_len:
                return bucket
        return None

    def _pays(
        self, plan: list[Chunk], guesses: list[Guess], bucket: Bucket, without: Bucket
    ) -> bool:
        """Whether to use drafts: if they pay, except in steps that measure the alternative."""
        brought = 0.0
        for chunk, guess in zip(plan, guesses, strict=True):
            if guess.tokens:
                expected = self._expected(chunk.sequence, guess.kind)
                brought += min(expected, len(guess.tokens))
        extra = self._cost(bucket, without) - 1
        pays = brought > extra * len(plan)
        drawn = any(_is_drawn(chunk.sequence) for chunk in plan)
        patience = self._patience[drawn]
        if pays:
            self._patience[drawn] = max(patience / 2, self.PATIENCE)
            measured = len(self._seconds[without]) >= self.ENOUGH
            tries = self._with >= (self.REMEASURE if measured else 1)
        else:
            tries = self._without >= patience
            if tries:
                longest = max(self.PATIENCE, extra / self.TRIALS)
                self._patience[drawn] = min(2 * patience, longest)
        drafts = pays != tries
        self._with, self._without = (self._with + 1, 0) if drafts else (0, self._without + 1)
        return drafts

    def _cost(self, bucket: Bucket, without: Bucket) -> float:
        """Return the ratio of a step's times with and without drafts, or a guess at first."""
        measured = min(len(self._seconds[of]) for of in (bucket, without))
        if bucket == without or measured < self.ENOUGH:
            return 1 + 0.1 * self.speculation.num_drafts
        return self._median(bucket) / self._median(without)

    def _median(self, bucket: Bucket) -> float:
        """Return the median of a step's measured seconds."""
        seconds = sorted(self._seconds[bucket])
        return seconds[len(seconds) // 2]


def _is_drawn(sequence: Sequence) -> bool:
    """Whether a sequence's tokens are sampled."""
    return sequence.request.sampling.draws
