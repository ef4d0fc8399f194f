"""An engine's counters and timings, for reports, benchmarks and Prometheus."""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import jax

from examples.engine import request as requests
from examples.engine.scheduler import Scheduler
from examples.engine.transfer.contents import Contents

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Histogram:
    """Counts of values by size, in Prometheus' buckets."""

    def __init__(self, bounds: Sequence[float] = SECONDS):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclasses.dataclass
class Peak:
    """The most that was in use at one time."""

    rows: int = 0  # sequences running
    cache_bytes: int = 0  # blocks and states in use, over all layers
    ids: dict[str, int] = dataclasses.field(default_factory=dict)  # by pool


@dataclasses.dataclass
class Statistics:
    """Totals since the engine was created. Only the engine writes them."""

    num_requests: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0  # of sequences that have their first token
    num_new_tokens: int = 0
    num_computed_tokens: int = 0  # run through the model, including again after a preemption
    num_reused_tokens: int = 0  # of prompts, found in the prefix cache
    num_received_prompts: int = 0  # read by another engine
    num_received_tokens: int = 0
    num_received_bytes: int = 0
    num_failed_prompts: int = 0  # prompts that no other engine could read
    num_preemptions: int = 0
    num_drafted_chunks: int = 0  # rows of steps that had draft tokens
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # of the draft tokens
    finished: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    host_seconds: float = 0.0  # of steps, before the device is called and after it has returned
    device_seconds: float = 0.0  # in between
    peak: Peak = dataclasses.field(default_factory=Peak)
    queue_seconds: Histogram = dataclasses.field(default_factory=Histogram)
    first_token_seconds: Histogram = dataclasses.field(default_factory=Histogram)
    next_token_seconds: Histogram = dataclasses.field(default_factory=Histogram)  # per request
    request_seconds: Histogram = dataclasses.field(default_factory=Histogram)

    @property
    def host_share(self) -> float:
        """The share of all steps' time in which the device was idle."""
        return self.host_seconds / ((self.host_seconds + self.device_seconds) or 1)

    @property
    def accepted_length(self) -> float:
        """Mean tokens that a sequence got from a step with draft tokens for it; at least 1."""
        return 1 + self.num_accepted_tokens / (self.num_drafted_chunks or 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences per second of steps."""
        return self.num_new_tokens / ((self.host_seconds + self.device_seconds) or 1)

    def note_step(
        self, plan: Sequence[requests.Chunk], scheduler: Scheduler, used_bytes: int
    ) -> None:
        """Record a step that has run, before finished sequences release their blocks."""
        self.num_steps += 1
        self.num_computed_tokens += sum(chunk.num_tokens for chunk in plan)
        self.num_preemptions = scheduler.num_preemptions
        peak = self.peak
        peak.rows = max(peak.rows, len(scheduler.running))
        peak.cache_bytes = max(peak.cache_bytes, used_bytes)
        for name, pool in scheduler.pools.items():
            peak.ids[name] = max(pool.num_used, peak.ids.get(name, 0))

    def note_started(self, plan: Sequence[requests.Chunk], now: float) -> None:
        """Record which sequences a step begins."""
        for sequence in (chunk.sequence for chunk in plan):
            if sequence.started is None:
                sequence.started = now
                self.queue_seconds.add(now - sequence.arrived)

    def note_times(self, start: float, launched: float, done: float, end: float) -> None:
        """Record when a step began, called the device, got its result, and ended."""
        self.host_seconds += launched - start + end - done
        self.device_seconds += done - launched

    def note_token(self, sequence: requests.Sequence, now: float) -> None:
        """Record a sequence's new token."""
        self.num_new_tokens += 1
        if sequence.first_token is None:
            sequence.first_token = now
            self.first_token_seconds.add(now - sequence.arrived)
            self.num_prompt_tokens += len(sequence.request.prompt)
            self.num_reused_tokens += sequence.num_reused

    def note_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Record the outcome of a sequence's draft tokens in a step."""
        self.num_drafted_chunks += 1
        self.num_drafted_tokens += num_drafts
        self.num_accepted_tokens += num_accepted

    def note_received(self, contents: Contents) -> None:
        """Record that another engine has read a prompt."""
        self.num_received_prompts += 1
        self.num_received_tokens += contents.num_tokens
        self.num_received_bytes += contents.nbytes

    def note_finished(self, sequence: requests.Sequence) -> None:
        """Record the end of a sequence, for whatever reason."""
        self.finished[sequence.finish_reason] += 1
        self.request_seconds.add(sequence.finished - sequence.arrived)
        num_chosen = len(sequence.chosen) - sequence.num_given
        if num_chosen > 1:
            seconds = sequence.finished - sequence.first_token
            self.next_token_seconds.add(seconds / (num_chosen - 1))


@dataclasses.dataclass(eq=False)
class CompilationCounter:
    """Counts the programs that XLA has compiled since it was created, in any thread."""

    seconds: list[float] = dataclasses.field(default_factory=list)  # that each program took

    @property
    def count(self) -> int:
        """Programs compiled so far."""
        return len(self.seconds)

    def __call__(self, event: str, duration: float, **_: object) -> None:
        """Listen to one of JAX's events."""
        if event == "/jax/core/compile/backend_compile_duration":
            self.seconds.append(duration)


@contextlib.contextmanager
def count_compilations() -> Iterator[CompilationCounter]:
    """Count every XLA compilation inside a `with` block, in any thread."""
    counter = CompilationCounter()
    jax.monitoring.register_event_duration_secs_listener(counter)
    try:
        yield counter
    finally:
        jax.monitoring.unregister_event_duration_listener(counter)
