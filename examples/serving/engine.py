"""The step loop: one jitted function, two shapes, caches that are written in place.

    while requests are left:
        plan   = scheduler.schedule()                  # whose tokens, in which blocks
        batch  = pack(plan)                            # NumPy arrays padded to a bucket
        caches, logits, tokens = step(params, caches, batch)   # caches donated
        scheduler.commit(plan, tokens)

A step is *decode* (a token for each of B rows) or *mixed* (up to the token budget, in any
division). Both are compiled ahead of the first request, side by side; nothing compiles later.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from examples.models.gemma4 import Batch, Caches, Gemma4Config, init_caches
from examples.serving.scheduler import Chunk, Limits, Request, Scheduler, Sequence


@dataclasses.dataclass(frozen=True)
class Completion:
    """What became of a request."""

    request: Request
    tokens: tuple[int, ...]  # the model's choices
    logits: np.ndarray | None  # float32 [len(tokens), vocabulary], what they were chosen from
    num_preemptions: int


@dataclasses.dataclass
class Peak:
    """The most that was in use at a time."""

    rows: int = 0  # sequences running
    kv_bytes: int = 0  # held blocks, over all layers
    blocks: dict[str, int] = dataclasses.field(default_factory=dict)  # by kind of layer

    def note(self, scheduler: Scheduler, block_bytes: Mapping[str, int]) -> None:
        """Look at what is in use now."""
        used = {kind: pool.num_used for kind, pool in scheduler.pools.items()}
        self.rows = max(self.rows, len(scheduler.running))
        self.blocks = {kind: max(n, self.blocks.get(kind, 0)) for kind, n in used.items()}
        self.kv_bytes = max(self.kv_bytes, sum(n * block_bytes[kind] for kind, n in used.items()))


@dataclasses.dataclass(frozen=True)
class Report:
    """A run in figures."""

    completions: tuple[Completion, ...]  # in the order of the requests
    num_steps: int
    seconds: float
    peak: Peak
    bytes_per_token: int  # in the caches of all layers

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(c.request.prompt) + len(c.tokens) for c in self.completions)

    @property
    def dense_kv_bytes(self) -> int:
        """What caches without pages take: as many rows, each as long as the longest sequence."""
        return self.peak.rows * self.longest * self.bytes_per_token

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens read."""
        return sum(len(c.request.prompt) for c in self.completions)

    @property
    def num_new_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(c.tokens) for c in self.completions)

    @property
    def num_preemptions(self) -> int:
        """How often a sequence gave up its blocks to an older one."""
        return sum(c.num_preemptions for c in self.completions)


def model_step(graphdef: nnx.GraphDef, implementation: str | None) -> Callable:
    """The jitted step of a model.

    Returns:
      `step(params, caches, batch) -> (caches, logits [B, vocabulary], next tokens [B])`, which
      takes over the caches' memory. The model's structure is closed over: an nnx module passed
      as an argument would be taken apart and hashed again at every step.
    """

    def step(params: nnx.State, caches: Caches, batch: Batch):
        model = nnx.merge(graphdef, params)
        logits, caches = model(batch, caches, implementation=implementation)
        return caches, logits, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return jax.jit(step, donate_argnames="caches")


def pack(plan: list[Chunk], limits: Limits, max_query_len: int | None = None) -> Batch:
    """Lay a plan out as arrays of the smaller bucket that holds it, or of a given one."""
    if max_query_len is None:
        is_decode = all(chunk.num_tokens == 1 for chunk in plan)
        max_query_len = 1 if is_decode else limits.token_budget
    rows, width = limits.max_seqs, limits.table_width
    num_tokens = rows if max_query_len == 1 else limits.token_budget

    lengths = np.array([chunk.num_tokens for chunk in plan], np.int32)
    starts = np.zeros(rows + 1, np.int32)
    starts[1 : len(plan) + 1] = np.cumsum(lengths)
    starts[len(plan) + 1 :] = starts[len(plan)]  # padded rows are empty

    tokens, positions = np.zeros((2, num_tokens), np.int32)
    seq_lens = np.zeros(rows, np.int32)
    slots = {kind: np.full(num_tokens, -1, np.int32) for kind in limits.windows}
    tables = {kind: np.zeros((rows, width), np.int32) for kind in limits.windows}
    for row, chunk in enumerate(plan):
        here = slice(starts[row], starts[row + 1])
        tokens[here] = chunk.sequence.tokens[chunk.start : chunk.stop]
        positions[here] = np.arange(chunk.start, chunk.stop)
        seq_lens[row] = chunk.stop
        for kind, table in chunk.sequence.tables.items():
            slots[kind][here] = table.slots(chunk.start, chunk.stop)
            tables[kind][row, : len(table.blocks)] = table.blocks
    attention = {
        kind: jattn.AttentionMetadata(
            block_tables=tables[kind],
            seq_lens=seq_lens,
            query_start_loc=starts,
            slot_mapping=slots[kind],
            max_query_len=max_query_len,
        )
        for kind in limits.windows
    }
    return Batch(tokens, positions, np.maximum(starts[1:] - 1, 0), attention)


class Engine:
    """A model, its caches and a scheduler. Making one compiles everything it will run."""

    def __init__(
        self,
        config: Gemma4Config,
        graphdef: nnx.GraphDef,
        params: nnx.State,
        limits: Limits,
        *,
        kv_format: Any,
        implementation: str | None = None,
        check: bool = False,
        seed: int = 0,
    ):
        """Build the caches and compile the step.

        Args:
          config, graphdef, params: a loaded model.
          limits: the sizes to build for.
          kv_format: how the caches store a number: a format of jattn's, or a pair of them.
          implementation: which of jattn's implementations runs, or None.
          check: validate every step's tables and lengths on the host before running it.
          seed: of the order in which blocks are handed out.
        """
        self.limits = limits
        self.scheduler = Scheduler(limits, seed)
        self._check_values = check
        self._params = params
        start = time.perf_counter()
        with count_compilations() as counter:
            self.caches = jax.jit(
                functools.partial(
                    init_caches, config, limits.num_blocks, limits.block_size, kv_format
                )
            )()
            step = model_step(graphdef, implementation)
            lowered = {
                max_query_len: step.lower(params, self.caches, pack([], limits, max_query_len))
                for max_query_len in (1, limits.token_budget)
            }
            with concurrent.futures.ThreadPoolExecutor() as threads:
                compiled = threads.map(lambda program: program.compile(), lowered.values())
                self._steps = dict(zip(lowered, compiled, strict=True))  # by max_query_len
        self.num_compilations = counter.count
        self.compile_seconds = time.perf_counter() - start
        self.block_bytes = dict.fromkeys(limits.windows, 0)  # of one block in all layers
        for layer in config.caching_layers:
            size = sum(cache.nbytes for cache in self.caches[layer.index])
            self.block_bytes[layer.kind] += size // limits.num_blocks[layer.kind]

    @property
    def pool_bytes(self) -> int:
        """What all caches take, used or not."""
        return sum(self.block_bytes[k] * count for k, count in self.limits.num_blocks.items())

    def run_step(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Run the model on a packed step: logits [B, vocabulary] and next tokens [B]."""
        max_query_len = next(iter(batch.attention.values())).max_query_len
        run = self._steps[max_query_len]
        self.caches, logits, tokens = run(self._params, self.caches, batch)
        return logits, tokens

    def serve(
        self,
        requests: Iterable[Request],
        *,
        keep_logits: bool = False,
        on_step: Callable[[list[Chunk]], None] = lambda plan: None,
    ) -> Report:
        """Serve requests, each from the step it arrives at, until all are finished.

        Args:
          requests: what to serve.
          keep_logits: whether completions carry the logits of every choice.
          on_step: called with each plan before it runs.
        """
        scheduler, peak, num_steps = self.scheduler, Peak(), 0
        sequences = scheduler.submit(requests)
        logits_of: dict[Sequence, list[np.ndarray]] = {sequence: [] for sequence in sequences}
        start = time.perf_counter()
        while scheduler.waiting or scheduler.running:
            plan = scheduler.schedule(num_steps)
            num_steps += 1
            if not plan:  # nobody has arrived yet
                continue
            peak.note(scheduler, self.block_bytes)
            on_step(plan)
            batch = pack(plan, self.limits)
            if self._check_values:
                self._check(batch)
            logits, tokens = self.run_step(batch)
            if keep_logits:
                for chunk, row in zip(plan, np.asarray(logits), strict=False):
                    if chunk.is_last:
                        logits_of[chunk.sequence].append(row)
            scheduler.commit(plan, np.asarray(tokens))
        seconds = time.perf_counter() - start
        completions = tuple(
            Completion(
                sequence.request,
                tuple(sequence.chosen),
                np.stack(logits_of[sequence]) if keep_logits else None,
                sequence.num_preemptions,
            )
            for sequence in sequences
        )
        bytes_per_token = sum(self.block_bytes.values()) // self.limits.block_size
        return Report(completions, num_steps, seconds, peak, bytes_per_token)

    def _check(self, batch: Batch) -> None:
        for kind, metadata in batch.attention.items():
            metadata.check(
                num_blocks=self.limits.num_blocks[kind], block_size=self.limits.block_size
            )


@dataclasses.dataclass(eq=False)
class CompilationCounter:
    """How many programs XLA has compiled since it was made, in any thread."""

    seconds: list[float] = dataclasses.field(default_factory=list)  # each took

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
    """Count every XLA compilation inside a `with` block, whoever causes it."""
    counter = CompilationCounter()
    jax.monitoring.register_event_duration_secs_listener(counter)
    try:
        yield counter
    finally:
        jax.monitoring.unregister_event_duration_listener(counter)
