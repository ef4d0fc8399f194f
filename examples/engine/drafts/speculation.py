"""Speculative decoding: guess the next tokens, and have one step verify them all.

    drafts  = what a proposer thinks comes next: x_1 ... x_k
    step      runs the last token and the drafts as one chunk, and chooses a token after each
    accept    drafts, as long as each is the token chosen before it; then one more token is there

A step that reads all weights for one token of a sequence reads them for 1 + k tokens, too, and a
sequence gets 1 to 1 + k tokens from it. What it gets does not depend on the drafts: after each
draft the step chooses as it does without any, with the same random numbers, since a draw depends on
the request's seed and on the token's place. Greedy or drawn, the tokens are those of a run without
drafts. For drafts that were not drawn this is rejection sampling: a token x is accepted with its
probability p(x), and where it is refused the token in its place has the distribution p without x.

Drafts cost time where they are refused, so they are proposed only where they pay (`Speculator`).
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
    """The kind of guesses, and their number."""

    num_drafts: int = 4  # of a sequence in a step, at most
    draft: Model | None = None  # what guesses; None: prompt lookup, or
    mtp: bool = False  # the model's own layer, with which it was loaded
    branches: int = 1  # continuations that lookup guesses at once, as a tree
    shortest: int = 3  # tokens that must have been seen before, for a guess at what follows
    backs_off: bool = True  # False: draft wherever there is a guess, whether it pays or not

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}, but must be at least 1"
            for name in ("num_drafts", "branches", "shortest")
            if getattr(self, name) < 1
        ]
        if self.branches > 1 and (self.draft is not None or self.mtp):
            problems.append(f"branches is {self.branches}, but a model guesses one")
        if self.draft is not None and self.mtp:
            problems.append("mtp is True, but there is a draft model")
        if problems:
            raise ValueError("; ".join(problems))


def read_speculation(text: str, draft: Model | None = None) -> Speculation:
    """A speculation as it is written on a command line.

    "lookup=4", "lookup=8x2" for trees of 8 drafts in 2 branches, "draft=4", "mtp=2", or without
    numbers.

    Args:
      text: what is written.
      draft: the model that guesses, if one is given.

    Raises:
      ValueError: it is written otherwise, or there is no model, or one too many.
    """
    written = re.fullmatch(r"(lookup|draft|mtp)(?:=(\d+)(?:x(\d+))?)?", text, re.ASCII)
    if written is None:
        raise ValueError(
            f"--speculate is {text!r}, but must be lookup=N, draft=N or mtp=N with N drafts in a "
            "step, or lookup=NxB in B branches"
        )
    kind, count, branches = written.groups()
    if (kind == "draft") != (draft is not None):
        raise ValueError(f"--speculate is {text!r}: draft=N, and nothing else, needs --draft")
    most = int(count or Speculation.num_drafts)
    return Speculation(most, draft, kind == "mtp", int(branches or 1))


@dataclasses.dataclass(frozen=True)
class Guess:
    """Drafts for one sequence."""

    tokens: tuple[int, ...] = ()
    kind: int = 0  # guesses of one kind are accepted alike
    parents: tuple[int, ...] | None = None  # of each token the one before it; None: a chain


class Proposer(Protocol):
    """Guesses what follows sequences."""

    # Whether guesses take next to no time: they are made before it is decided whether they pay.
    # Those of a costly one are all of one kind.
    is_cheap: bool

    def propose(self, sequences: Row[Sequence], most: Row[int]) -> list[Guess]:
        """For each sequence up to `most` tokens that may follow all it has."""
        ...


class Lookup:
    """Guesses what came after the last tokens when they came before, in prompt or output.

    Of the places where the last `shortest` tokens occurred, the one with the longest match decides,
    the latest of equals. A match close to the end repeats itself: after "ababab" comes "abab".
    """

    is_cheap = True
    LONGEST = 32  # tokens of a match that are compared
    PLACES = 16  # that are compared, the latest

    def __init__(self, shortest: int, branches: int = 1):
        self.shortest, self.branches = shortest, branches
        self._seen: weakref.WeakKeyDictionary[Sequence, _Seen] = weakref.WeakKeyDictionary()

    def propose(self, sequences: Row[Sequence], most: Row[int]) -> list[Guess]:
        """For each sequence up to `most` tokens; a kind is a length of matches."""
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
    length: int = 0  # n-grams that end before are in it


def _continued(tokens: Row[int], place: int, most: int) -> tuple[int, ...]:
    """The tokens after `place`; past the end, they are taken to repeat."""
    count = len(tokens)
    drafts = list(tokens[place : place + most])
    while len(drafts) < most:
        drafts.append(drafts[place + len(drafts) - count])
    return tuple(drafts)


def _match(tokens: Row[int], end: int, most: int) -> int:
    """How many of the last tokens are those before `end`."""
    count = len(tokens)
    length = 0
    while length < most and tokens[end - 1 - length] == tokens[count - 1 - length]:
        length += 1
    return length


def _any_guess(length: int) -> Guess:
    """A guess of a costly proposer, before it is made."""
    return Guess((-1,) * length)


class Speculator:
    """Decides in which steps to draft, from what drafts have brought and what they cost.

    A step of B sequences with drafts brings the B tokens of a step without, and those that are
    accepted. It pays if

        (B + accepted) / seconds with drafts  >  B / seconds without.

    Accepted tokens are estimated from what guesses of the same kind brought the sequence before;
    its first ones, from what they brought others that choose alike, greedily or at random. Seconds
    are those of the last steps of both sorts. Where drafts pay, every 64th step goes without to
    measure what that takes now. Where they do not, they are tried again after 4 steps, then 8 and
    so on, until that takes 1/500 of the time; what is drawn has a patience of its own.

    Searching for guesses takes time, too. While nothing comes of it, steps rest between searches:
    one after the first, two after the second and so on, until they take 1/1000 of the time.
    """

    FIRST, WEIGHT = 1.0, 0.3  # what a new kind is expected to bring, and how fast that changes
    PATIENCE = 4.0  # steps before the first trial of drafts that do not pay
    REMEASURE = 64  # steps with drafts before one without
    ENOUGH = 3  # measured steps
    SEARCHES, TRIALS = 1 / 1000, 1 / 500  # of the time, where they are in vain

    def __init__(self, speculation: Speculation, proposer: Proposer, buckets: Row[Bucket]):
        self.speculation, self.proposer = speculation, proposer
        self._buckets = [bucket for bucket in buckets if bucket.num_drafts]
        self._seconds = {bucket: collections.deque[float](maxlen=9) for bucket in buckets}
        self._accepted: weakref.WeakKeyDictionary[Sequence, dict[int, float]]
        self._accepted = weakref.WeakKeyDictionary()
        self._usual: dict[tuple[bool, int], float] = {}  # by kind, of all that choose alike
        self._kinds: dict[Sequence, int] = {}  # of the guesses in the running step
        self._with = self._without = 0  # steps since the last of the other sort
        self._patience = dict.fromkeys((False, True), self.PATIENCE)  # by: whether any is drawn
        self._in_vain = 0  # searches for guesses; half as many when drafts are accepted
        self._rest = 0  # steps until the next search
        self._proposing = 0.0  # seconds, for the running step

    def draft(self, plan: list[Chunk], scheduler: Scheduler, without: Bucket) -> list[Chunk]:
        """The plan, with drafts if they pay; itself, if there are none.

        Args:
          plan: a step's chunks.
          scheduler: has room for drafts, or not.
          without: the bucket of the plan as it is.
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
        """Steps to rest after a search of some seconds."""
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
          bucket: its shape; a step that scores prompts does not say what others take.
          seconds: how long the device took.
        """
        if self._rest:  # nor does the next step search
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
        """How many drafts of a kind are likely to be accepted."""
        usual = self._usual.get((_is_drawn(sequence), kind), self.FIRST)
        return self._accepted.get(sequence, {}).get(kind, usual)

    def _bucket(self, plan: list[Chunk]) -> Bucket | None:
        """The smallest bucket that holds the plan and a draft, if there is one."""
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
        """Whether to draft: where it pays, but for steps that try what the other sort takes."""
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
        """A step's time with drafts over that without, or a guess while too few were measured."""
        measured = min(len(self._seconds[of]) for of in (bucket, without))
        if bucket == without or measured < self.ENOUGH:
            return 1 + 0.1 * self.speculation.num_drafts
        return self._median(bucket) / self._median(without)

    def _median(self, bucket: Bucket) -> float:
        """Seconds of a step, as far as they were measured."""
        seconds = sorted(self._seconds[bucket])
        return seconds[len(seconds) // 2]


def _is_drawn(sequence: Sequence) -> bool:
    """Whether a sequence's tokens are drawn at random."""
    return sequence.request.sampling.draws
