"""The serving loop: schedule, pack, run, update tables while the device works, emit tokens.

    engine = Engine(load_model(directory), limits, tokenizer=...)
    sequence = engine.add(Request(prompt, max_new_tokens=100))
    while engine.has_work:
        for output in engine.step():
            print(output.sequence.id, output.token, output.text)

A step is one call of one jitted function. The host sends integers and receives the chosen tokens.
An engine belongs to one thread, which `examples/engine/server.py` starts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

import jattn
from examples.engine.adapters import Adapter, AdapterNotLoadedError, Adapters
from examples.engine.arrays import Updates, id_bytes, initializer, nbytes
from examples.engine.drafts.draft_model import check_speculation, make_speculator
from examples.engine.drafts.speculation import Speculation
from examples.engine.forks import pack_copies
from examples.engine.history import Beginning, pack_beginning
from examples.engine.host_cache import Moves, make_host_cache
from examples.engine.hosts import followers_of, on_all_hosts
from examples.engine.likelihoods import Likelihood, Likelihoods
from examples.engine.model import Model
from examples.engine.recovery import Progress, at_fault
from examples.engine.request import Chunk, Request, Sequence
from examples.engine.scheduler import Limits, Scheduler
from examples.engine.statistics import Statistics, count_compilations
from examples.engine.step import Bucket, Inputs, Steps, make_buckets, pack
from examples.engine.transfer.contents import Contents, make_transfer
from examples.models.lora import Lora
from examples.text import TextStream, Tokenizer


@dataclasses.dataclass(frozen=True)
class Output:
    """A token of one sequence."""

    sequence: Sequence
    token: int
    text: str  # the text it completed: "" inside a character or a possible stop string
    finish_reason: str | None  # "stop" or "length" at the last token, "error" if the request failed
    error: Exception | None = None  # why the request failed
    likelihood: Likelihood | None = None  # the token's log-probabilities, if requested


class Engine:
    """A model, its caches and a scheduler. Creating one compiles everything it will run."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        *,
        kv_format: Any = None,
        tokenizer: Tokenizer | None = None,
        buckets: Iterable[Bucket] | None = None,
        implementation: str | None = None,
        speculation: Speculation | None = None,
        loras: Mapping[str, str | Lora] | None = None,
        host_cache_bytes: int = 0,
        check: bool = False,
        keep_logits: bool = False,
        quiet: bool = True,
        behind: bool = False,
        seed: int = 0,
    ):
        """Build the caches and compile the steps.

        Args:
          model: a loaded model.
          limits: the sizes to build for.
          kv_format: the caches' storage format: a jattn format, or a pair for keys and values;
            None: the model's dtype.
          tokenizer: turns tokens into text; None: outputs have no text, and stop strings are
            refused.
          buckets: shapes of steps; None: `make_buckets`, with the speculation's draft tokens.
          implementation: which implementation of `jattn.paged_attention` to run, or None.
          speculation: how to do speculative decoding; None: not at all. The tokens are the same.
          loras: adapters by name, as `Adapters.load` takes them; `limits.adapters` is their room.
          host_cache_bytes: host memory in each process for prefix cache blocks that the pools
            evict.
          check: validate the tables, lengths and slots of every step on the host.
          keep_logits: keep the logits of every choice in the sequences.
          quiet: show no progress bar while compiling.
          behind: compile two step shapes now and the others in a thread; until it is done, steps
            are padded more than they need. `close` ends it early.
          seed: seed of the order in which blocks are allocated.
        """
        if speculation:
            check_speculation(speculation, model, limits)
        self.adapters = Adapters(model, limits.adapters, loras, self.used_adapters)
        model = self.model
        self.limits, self.tokenizer = limits, tokenizer
        self._seed = seed
        self.statistics = Statistics()
        self._check, self._keep_logits = check, keep_logits
        self._progress: Progress | None = None  # of the current step
        self.followers = followers_of(model.mesh)  # other processes, which run what this one runs
        self.hidden: jax.Array | None = None  # states from the last step, for `drafts/mtp.py`
        if not buckets:
            trees = speculation is not None and speculation.branches > 1
            num_drafts = speculation.num_drafts if speculation else 0
            buckets = make_buckets(limits, num_drafts=num_drafts, trees=trees)
        start = time.perf_counter()
        with count_compilations() as counter:
            kv_format = kv_format or jattn.Dense(model.dtype)
            self._make_caches = jax.jit(initializer(model, limits, kv_format, implementation))
            self.caches, self.tables, self.history = self._make_caches()
            self._updates = Updates.of(model, self.caches, self.history)
            self.transfer = make_transfer(limits, self.caches, model)
            self.steps = Steps(
                model,
                limits,
                tuple(buckets),
                self.caches,
                self.tables,
                self.history,
                check=check,
                keep_logits=keep_logits,
                quiet=quiet,
                behind=behind,
            )
            self.host_cache = make_host_cache(model, self.caches, host_cache_bytes)
            self.scheduler = Scheduler(limits, seed, self.host_cache)
            self.speculation = speculation
            self._speculator = speculation and make_speculator(
                speculation,
                model,
                limits,
                self.steps.buckets,
                implementation=implementation,
                engine=self,
            )
        self.num_compilations = counter.count
        self.compile_seconds = time.perf_counter() - start
        self.id_bytes = id_bytes(self.caches, limits)

    @property
    def model(self) -> Model:
        """The model, with the loaded adapters."""
        return self.adapters.model

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def cache_bytes(self) -> int:
        """The size of all caches, used or not."""
        return nbytes(self.caches)

    @property
    def used_bytes(self) -> int:
        """The size of the blocks and states in use, in all layers."""
        pools = self.scheduler.pools
        return sum(size * pools[name].num_used for name, size in self.id_bytes.items())

    def used_adapters(self) -> set[Adapter | None]:
        """Return the adapters of waiting and running sequences."""
        sequences = (*self.scheduler.waiting, *self.scheduler.running)
        return {sequence.request.adapter for sequence in sequences}

    def reset(self, **changes: Any) -> None:
        """Start over with an empty prefix cache and statistics at zero.

        Args:
          changes: new limits that change no array's or program's shape: `prefix_caching`,
            `checkpoint_every`, or fewer blocks.
        """
        assert not self.has_work, "sequences are running"
        limits = dataclasses.replace(self.limits, **changes)
        assert all(n <= self.limits.num_blocks[pool] for pool, n in limits.num_blocks.items())
        self.scheduler = Scheduler(limits, self._seed, self.host_cache)
        self.statistics = Statistics()
        if self.host_cache is not None:
            self.clear_host_cache()

    def add(
        self, request: Request, contents: Contents | None = None, chosen: Iterable[int] = ()
    ) -> Sequence:
        """Queue a request.

        Args:
          request: the request.
          contents: the prompt's cache contents from another engine, without the last token.
          chosen: tokens that another engine has chosen for it. This engine continues after them, as
            if it had preempted the sequence there.

        Raises:
          ValueError: the request may become longer than the engine was built for, has tokens that
            the model does not have or stop strings without a tokenizer, or ends within `chosen`; or
            the contents do not fit.
        """
        chosen = tuple(chosen)
        outside = [t for t in (*request.prompt, *chosen) if not 0 <= t < self.model.vocab_size]
        if outside:
            raise ValueError(
                f"prompt has tokens {outside[:8]}, but must be in 0..{self.model.vocab_size - 1}"
            )
        if any(not 0 <= t < self.model.vocab_size for t, _ in request.sampling.logit_bias):
            raise ValueError(
                f"logit_bias has {request.sampling.logit_bias}, but its tokens must be in "
                f"0..{self.model.vocab_size - 1}"
            )
        if (adapter := request.adapter) not in (None, *self.adapters.values()):
            raise AdapterNotLoadedError(f"adapter {adapter.name!r} is not loaded")
        if request.stop_strings and self.tokenizer is None:
            raise ValueError("stop_strings need a tokenizer, but the engine has none")
        stream = self.tokenizer and TextStream(
            self.tokenizer, request.stop_strings, special_tokens=request.special_tokens
        )
        if (contents is not None or request.hands_over) and self.transfer is None:
            raise ValueError("this engine cannot transfer prompts (`contents.make_transfer`)")
        if contents is not None:
            self.transfer.check(contents, request.prompt)
        sequence = Sequence(request, stream, contents=contents, num_given=len(chosen))
        for number, token in enumerate(chosen, 1):
            sequence.append(token)
            if sequence.finish_reason is not None:
                raise ValueError(
                    f"chosen has {len(chosen)} tokens, but the request ends at {number}"
                )
        self.scheduler.add(sequence)
        self.statistics.num_requests += 1
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Stop a sequence and release its blocks; do nothing if it has finished."""
        if sequence.finish_reason is None:
            self._finish(sequence, "abort")

    def step(self) -> list[Output]:
        """Run one step; return the tokens it chose.

        Each sequence that has read its whole prompt gets one token, plus one for every accepted
        draft token.

        If a step raises, the engine can go on after `recover`.
        """
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        if not plan:
            assert not self.has_work, "the oldest sequence can always go on"
            return []
        self._progress = progress = Progress(plan)
        self.statistics.note_started(plan, start)
        bucket = self.steps.bucket_of(plan)
        if self._speculator and not self.steps.num_coming:
            progress.launched = True  # draft models run on devices
            drafted = self._speculator.draft(plan, self.scheduler, bucket)
            progress.launched = False
            if drafted is not plan:
                progress.plan = plan = drafted
                bucket = self.steps.bucket_of(plan)
        inputs = pack(plan, bucket, self.limits)
        allowed = [self._allowed(chunk) for chunk in plan]
        launched, progress.launched = time.perf_counter(), True
        self._copy_blocks()
        self._begin_histories(plan)
        self._constrain_rows(plan, allowed)
        tokens, logits, used, likely = self.run(bucket, inputs)
        self.scheduler.commit(plan)  # while the device works
        tokens = np.asarray(tokens).tolist()
        done = time.perf_counter()
        if self._check:
            self.steps.check(used)
        self.statistics.note_step(plan, self.scheduler, self.used_bytes)
        if bucket.scores:
            self._take_scores(plan, likely["prompt"].fetched())
        self._take(
            progress,
            tokens,
            np.asarray(logits) if self._keep_logits else None,
            likely["next"].fetched() if inputs.wants_likelihoods else None,
        )
        self.statistics.note_times(start, launched, done, time.perf_counter())
        if self._speculator:
            self._speculator.note_step(plan, bucket, done - launched)
        progress.done = True
        if progress.failed:
            raise next(iter(progress.failed.values()))
        self._progress = None
        return progress.outputs

    def recover(self, error: Exception) -> list[Output]:
        """Fail the requests that made `step` raise; all others keep their tokens and go on.

        `recovery.py` finds the requests to fail. If a device failed, the caches may hold anything,
        so they are created again and the prefix cache is lost.

        Returns: the outputs of the step so far, and one for every failed request.
        Raises: `error`, if no step had begun, or if devices failed and other processes share the
          mesh: this process cannot know whether they have failed too.
        """
        progress, self._progress = self._progress, None
        if progress is None or (progress.on_devices and self.followers):
            raise error
        failed = at_fault(progress, error, self._can_pack)
        outputs = progress.outputs
        for sequence in self.scheduler.running[::-1]:
            if sequence in failed:
                self._finish(sequence, "error")
                outputs.append(Output(sequence, -1, "", "error", failed[sequence]))
            elif not progress.done:
                self.scheduler.preempt(sequence)
        if not progress.done:
            self.scheduler.take_copies()  # drop them: their target blocks were just released
        if progress.on_devices:
            self._forget_caches()
        return outputs

    def _forget_caches(self) -> None:
        """Create the caches again; no sequence runs."""
        for pool in self.scheduler.pools.values():
            pool.clear_hashes()
        if self.host_cache is not None:
            self.host_cache.forget_moves()
        del self.caches, self.tables, self.history  # free them before making new ones
        self.caches, self.tables, self.history = self._make_caches()

    def _can_pack(self, chunk: Chunk) -> bool:
        try:
            self._allowed(chunk)
            pack([chunk], self.steps.bucket_of([chunk]), self.limits)
        except Exception:
            return False
        return True

    @on_all_hosts
    def run(
        self, bucket: Bucket, inputs: Inputs
    ) -> tuple[
        jax.Array,
        jax.Array,
        dict[str, jattn.AttentionMetadata],
        dict[str, Likelihoods],
    ]:
        """Run the device's part of a step.

        Returns: next tokens [B, 1 + drafts], logits [B, 1 + drafts, vocabulary] or None, metadata
          and log-probabilities. In each row, the first entry follows the sequence's own tokens and
          the others follow its draft tokens.
        """
        self.caches, self.tables, self.history, *results, self.hidden = self.steps.run(
            bucket, self.model.params, self.caches, self.tables, self.history, inputs=inputs
        )
        if self.host_cache is not None:
            self.host_cache.fetch()  # while the device works
        return tuple(results)

    def _allowed(self, chunk: Chunk) -> np.ndarray | None:
        """Return the tokens that a sequence's grammar allows next, if this chunk chooses one."""
        matcher = chunk.sequence.matcher
        return matcher.allowed() if matcher is not None and chunk.is_last else None

    def _constrain_rows(self, plan: list[Chunk], allowed: list[np.ndarray | None]) -> None:
        """Tell the device which tokens the grammars allow."""
        found = [(c.sequence.row, a) for c, a in zip(plan, allowed, strict=True) if a is not None]
        if found:
            rows = np.full(self.limits.max_seqs, self.limits.max_seqs, np.int32)
            words = np.zeros((len(rows), found[0][1].size), np.int32)
            for i, one in enumerate(found):
                rows[i], words[i] = one
            self.constrain(rows, words)

    @on_all_hosts
    def constrain(self, rows: np.ndarray, words: np.ndarray) -> None:
        """Set on the device which tokens may come next."""
        self.history = self._updates.constrain(self.history, rows, words)

    def _copy_blocks(self) -> None:
        """Fill blocks from host memory, from another engine and from texts with the same prompt."""
        if self.host_cache is not None and (moves := self.host_cache.moves()):
            self.move_blocks(moves)
        for sequence in self.scheduler.running:
            if sequence.contents is not None:
                self.statistics.note_received(sequence.contents)
                self.caches = self.transfer.put(self.caches, sequence, self.followers)
        if copies := self.scheduler.take_copies():
            groups = [group.name for group in self.limits.groups if not group.is_state]
            packed = pack_copies(copies, groups, self.limits.max_seqs)
            self.copy(packed)

    @on_all_hosts
    def move_blocks(self, moves: Moves) -> None:
        """Move blocks between the caches and host memory."""
        assert self.host_cache is not None
        self.caches = self.host_cache.move(self.caches, moves)

    @on_all_hosts
    def clear_host_cache(self) -> None:
        """Clear the prefix cache in host memory."""
        assert self.host_cache is not None
        self.host_cache.clear()

    @on_all_hosts
    def copy(self, packed: dict[str, np.ndarray]) -> None:
        """Copy blocks on the device."""
        self.caches = self._updates.copy(self.caches, packed)

    def _begin_histories(self, plan: list[Chunk]) -> None:
        """Fill in the device's history for sequences that begin to choose tokens."""
        for sequence in (chunk.sequence for chunk in plan if chunk.is_last):
            if sequence.request.adjusts and not sequence.has_history:
                given = pack_beginning(sequence, self.limits.max_len, self.model.vocab_size)
                self.begin(given)
                sequence.has_history = True

    def close(self) -> None:
        """Stop the compiling thread once its current compilation is done."""
        self.steps.close()

    @on_all_hosts
    def begin(self, given: Beginning) -> None:
        """Fill in a row of the device's history."""
        self.history = self._updates.begin(self.history, given)

    @on_all_hosts
    def idle(self) -> None:
        """Exchange a sign of life with the other processes; call it regularly while idle.

        Raises:
          Exception: one of them has ended.
        """

    def generate(self, requests: Iterable[Request]) -> list[Sequence]:
        """Serve requests until all are finished; return their sequences in the same order."""
        sequences = [self.add(request) for request in requests]
        for _ in self.stream():
            pass
        return sequences

    def stream(self) -> Iterator[Output]:
        """Yield tokens of all queued sequences as they come, until none is left."""
        while self.has_work:
            yield from self.step()

    def check_idle(self) -> None:
        """Assert that every block, state and row was returned: nothing leaks."""
        assert not self.has_work
        for pool in self.scheduler.pools.values():
            assert pool.num_used == 0, f"{pool.num_used} ids were not returned"
        assert self.scheduler.num_free_rows == self.limits.max_seqs

    def _take_scores(self, plan: list[Chunk], likely: Likelihoods) -> None:
        """Give sequences their prompt log-probabilities."""
        begin = 0
        for chunk in plan:
            sequence, known = chunk.sequence, chunk.sequence.prompt_likelihoods
            prompt = sequence.request.prompt
            for at in range(chunk.start, chunk.stop):
                if sequence.scores_prompt and at == len(known):  # known already if preempted before
                    index = begin + at - chunk.start
                    known.append(likely.of(index, prompt[at + 1], sequence.request.logprobs))
            begin += chunk.num_tokens

    def _take(
        self,
        progress: Progress,
        tokens: list[list[int]],
        logits: np.ndarray | None,
        likely: Likelihoods | None,
    ) -> None:
        """Give each sequence the tokens chosen for it."""
        now = time.perf_counter()
        for i, chunk in enumerate(progress.plan):
            if not chunk.is_last:
                continue
            sequence = chunk.sequence
            try:
                path = self._append(progress, i, tokens[i], logits, likely, now)
            except Exception as error:  # its text or grammar failed on the host
                progress.failed[sequence] = error
                continue
            progress.finishing = sequence
            if chunk.drafts:
                in_place = next((n for n, at in enumerate(path) if n != at), len(path))
                self.scheduler.settle(chunk, in_place)
                self._speculator.note_accepted(sequence, len(path))
                self.statistics.note_drafts(len(chunk.drafts), len(path))
            if sequence.finish_reason is not None:
                self._finish(sequence, sequence.finish_reason)
            progress.finishing = None

    def _append(
        self,
        progress: Progress,
        index: int,
        tokens: list[int],
        logits: np.ndarray | None,
        likely: Likelihoods | None,
        now: float,
    ) -> list[int]:
        """Append the tokens chosen after a chunk; return its correct draft tokens, in order."""
        chunk, path, draft = progress.plan[index], [], -1
        sequence = chunk.sequence
        while draft is not None:
            j = 1 + draft
            token = tokens[j]
            text = sequence.append(token)
            if logits is not None:
                sequence.logits.append(logits[index, j])
            likelihood = None
            if (count := sequence.request.logprobs) is not None:
                likelihood = likely.of(index * len(tokens) + j, token, count)
                sequence.likelihoods.append(likelihood)
            self.statistics.note_token(sequence, now)
            progress.outputs.append(
                Output(sequence, token, text, sequence.finish_reason, likelihood=likelihood)
            )
            # A token chosen after a draft token is valid only if the draft token was correct.
            going = sequence.finish_reason is None
            draft = chunk.next_draft(draft, sequence.tokens[-1]) if going else None
            path += [] if draft is None else [draft]
        return path

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        sequence.finished = time.perf_counter()
        if sequence.request.hands_over and reason == "length":
            sequence.taken = self.transfer.take(self.caches, sequence, self.followers)
        self.scheduler.remove(sequence)
        self.statistics.note_finished(sequence)
