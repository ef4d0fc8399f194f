"""The compiled programs of an engine's steps: a few before it starts, the others in the background.

Compiling takes most of a server's start. Two step shapes hold any plan, except for prompts that are
scored, so a server can start with these (`first_buckets`). Each step runs in the smallest shape
compiled so far. With several processes the first one chooses, and a process that does not have that
program yet compiles it then.
"""

from __future__ import annotations

import concurrent.futures
import sys
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import jax
from tqdm import tqdm


class Shape(Protocol):
    """The part of a bucket that this module reads."""

    num_tokens: int
    num_seqs: int
    max_query_len: int
    num_drafts: int
    scores: bool


Bucket = TypeVar("Bucket", bound=Shape)


def first_buckets(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Return the buckets to start with: the largest decode bucket, and the largest of all."""
    plain = [b for b in buckets if not b.num_drafts and not b.scores]
    decode = [b for b in plain if b.max_query_len == 1]
    return tuple({max(b, key=lambda one: one.num_tokens) for b in (decode, plain) if b})


class Programs(Generic[Bucket]):
    """Programs by bucket."""

    def __init__(self, lower: Callable[[Bucket], jax.stages.Lowered], *, quiet: bool = True):
        """Begin without programs.

        Args:
          lower: traces a bucket's step, to be compiled.
          quiet: report no progress.
        """
        self._lower, self._quiet = lower, quiet
        self.ready: dict[Bucket, jax.stages.Compiled] = {}
        self._coming: dict[Bucket, concurrent.futures.Future] = {}
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    def compile(self, buckets: Sequence[Bucket]) -> None:
        """Compile some buckets in parallel, and wait for them."""
        lowered = [self._lower(bucket) for bucket in buckets]
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            compiled = threads.map(lambda program: program.compile(), lowered)
            programs = tqdm(
                compiled, "compiling", len(lowered), unit="program", disable=self._quiet
            )
            self.ready.update(zip(buckets, programs, strict=True))

    def compile_in_background(self, buckets: Sequence[Bucket]) -> None:
        """Compile some buckets one after another in a thread."""
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="compile")
        count, start = len(buckets), time.perf_counter()
        for number, bucket in enumerate(buckets, 1):
            self._coming[bucket] = self._thread.submit(self._one, bucket, number, count, start)
        self._thread.shutdown(wait=False)  # takes effect when all are done

    @property
    def num_coming(self) -> int:
        """How many programs are being compiled, or waiting for it."""
        return sum(not future.done() for future in self._coming.values())

    def __getitem__(self, bucket: Bucket) -> jax.stages.Compiled:
        """Return a bucket's program; compile it now unless it is compiled or being compiled."""
        if bucket not in self.ready:
            future = self._coming.pop(bucket, None)
            if future is None or future.cancel():
                self.ready[bucket] = self._lower(bucket).compile()
            else:
                future.result()
        return self.ready[bucket]

    def close(self) -> None:
        """Compile nothing more after the current program."""
        for future in self._coming.values():
            future.cancel()

    def _one(self, bucket: Bucket, number: int, count: int, start: float) -> None:
        self.ready[bucket] = self._lower(bucket).compile()
        if not self._quiet:
            seconds = time.perf_counter() - start
            print(f"compiled {number} of {count} more programs in {seconds:.0f} s", file=sys.stderr)
