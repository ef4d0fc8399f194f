"""The compiled programs of an engine's steps: some before it starts, the others behind.

Compiling takes a server most of its start. Two shapes of steps hold whatever is planned, but for
prompts that are scored, so it can begin with those (`first_buckets`); a step runs in the smallest
shape that is there by then. Of several processes the first one chooses, and another that has no
such program yet compiles it then.
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
    """The part of a bucket that is read here."""

    num_tokens: int
    num_seqs: int
    max_query_len: int
    num_drafts: int
    scores: bool


Bucket = TypeVar("Bucket", bound=Shape)


def first_buckets(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """The fewest buckets to begin with: the largest that decodes, and the largest of all."""
    plain = [b for b in buckets if not b.num_drafts and not b.scores]
    decode = [b for b in plain if b.max_query_len == 1]
    return tuple({max(b, key=lambda one: one.num_tokens) for b in (decode, plain) if b})


class Programs(Generic[Bucket]):
    """Programs by bucket."""

    def __init__(self, lower: Callable[[Bucket], jax.stages.Lowered], *, quiet: bool = True):
        """Begin with none.

        Args:
          lower: traces a bucket's step, to be compiled.
          quiet: say nothing of the progress.
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
        self._thread.shutdown(wait=False)  # when it has done them all

    @property
    def num_coming(self) -> int:
        """How many are being compiled or waiting for it."""
        return sum(not future.done() for future in self._coming.values())

    def __getitem__(self, bucket: Bucket) -> jax.stages.Compiled:
        """A bucket's program, which is compiled now if it is neither there nor being compiled."""
        if bucket not in self.ready:
            future = self._coming.pop(bucket, None)
            if future is None or future.cancel():
                self.ready[bucket] = self._lower(bucket).compile()
            else:
                future.result()
        return self.ready[bucket]

    def close(self) -> None:
        """Compile nothing more, after what is being compiled."""
        for future in self._coming.values():
            future.cancel()

    def _one(self, bucket: Bucket, number: int, count: int, start: float) -> None:
        self.ready[bucket] = self._lower(bucket).compile()
        if not self._quiet:
            seconds = time.perf_counter() - start
            print(f"compiled {number} of {count} more programs in {seconds:.0f} s", file=sys.stderr)
