"""A smaller draft model that guesses the tokens that a larger model will choose.

    propose   feed it the tokens of each sequence that it has not seen, then let it continue:
              tokens -> x_1;  x_1 -> x_2;  ...;  x_(k-1) -> x_k          one call of one program

It shares the tokenizer but has its own caches: every row of the engine's block tables owns blocks
for the longest sequence, so there is nothing to allocate, share or release. Keys and values of
rejected drafts are overwritten. On a mesh it is divided like the larger model, over the same
devices.

It samples with the random numbers that the larger model will use at the same positions: where the
two distributions agree, so do the tokens. A draft is accepted with a probability of at least
(1 - d) / (1 + d), where d is the total variation distance of the two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Sequence as Row
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from examples.engine.caches import Caches, group_layers, init_caches
from examples.engine.drafts.mtp import MtpGuesser, run_there
from examples.engine.drafts.speculation import Guess, Lookup, Proposer, Speculation, Speculator
from examples.engine.model import Batch, Model, StateCache
from examples.engine.request import Sequence
from examples.engine.sampling import SamplingRows, sample, sampling_rows
from examples.engine.scheduler import Limits
from examples.engine.step import Bucket
from examples.models.parallel import CONTEXT

if TYPE_CHECKING:
    from examples.engine.engine import Engine

READ, GUESS = "read", "guess"  # programs: for known tokens, and for drafts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Feed:
    """The input of a draft model's call: some tokens of every sequence, one after another."""

    tokens: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [T]
    rows: np.ndarray  # int32 [B], of the engine; -1 in padding
    seq_lens: np.ndarray  # int32 [B], including these tokens
    query_start_loc: np.ndarray  # int32 [B + 1]
    sampling: SamplingRows


@dataclasses.dataclass(eq=False)
class _Seen:
    """The contents of a row of the caches: a sequence's first tokens, and drafts after them."""

    sequence: Sequence
    length: int
    drafts: tuple[int, ...] = ()

    def num_right(self) -> int:
        """Return how many of them are the sequence's tokens."""
        tokens, length = self.sequence.tokens, self.length
        for draft, token in zip(self.drafts, tokens[length:], strict=False):
            if draft != token:
                break
            length += 1
        return min(length, len(tokens) - 1)  # the last is always fed, to guess what follows it


class DraftModel:
    """Guesses with a model, its caches and its programs. Creating one compiles them."""

    is_cheap = False

    def __init__(
        self,
        model: Model,
        target: Model,
        limits: Limits,
        num_drafts: int,
        *,
        implementation: str | None = None,
        engine: Engine | None = None,
    ):
        """Build the caches and compile the programs.

        Args:
          model: the draft model.
          target: the model that verifies.
          limits: the engine's limits.
          num_drafts: tokens to guess per sequence.
          implementation: as for an `Engine`.
          engine: the engine, whose other processes also run the programs; None: there are none.
        """
        self.model, self.limits, self.num_drafts = model, limits, num_drafts
        self._engine = engine
        groups = group_layers(model.layers)
        self._groups = [group.name for group in groups]
        num_blocks = limits.max_seqs * limits.table_width

        def make() -> tuple[Caches]:
            return (
                init_caches(
                    model.layers,
                    dict.fromkeys(self._groups, num_blocks),
                    limits.block_size,
                    jattn.Dense(model.dtype),
                    implementation=implementation,
                ),
            )

        self._make_caches = jax.jit(make if model.mesh is None else model.mesh.init(make))
        self._start_over()
        self._programs = {
            READ: self._compile(limits.token_budget, 0),
            GUESS: self._compile(self._guess_tokens, num_drafts),
        }

    def propose(self, sequences: Row[Sequence], most: Row[int]) -> list[Guess]:
        """Guess up to `most` tokens for each sequence."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.caches)):  # a call has failed
            self._start_over()
        asked = [s for s, count in zip(sequences, most, strict=True) if count > 0]
        drafts: dict[Sequence, tuple[int, ...]] = {}
        if asked:
            starts = {s: self._catch_up(s) for s in asked}
            self._read_all(starts)
            feed = self._feed(self._guess_tokens, [(s, starts[s], len(s.tokens)) for s in asked])
            tokens = self._run_all(GUESS, feed)
            drafts = dict(zip(asked, map(tuple, np.asarray(tokens).tolist()), strict=False))
            for s in asked:
                self._rows[s.row] = _Seen(s, len(s.tokens), drafts[s][:-1])  # the last is not fed
        return [Guess(drafts.get(s, ())[:n]) for s, n in zip(sequences, most, strict=True)]

    def run(self, name: str, feed: Feed) -> jax.Array:
        """Run a program, and return drafts int32 [B, num_drafts].

        All processes that share the devices call this.
        """
        self.caches, drafts = self._programs[name](self.model.params, self.caches, feed)
        return drafts

    def _run_all(self, name: str, feed: Feed) -> jax.Array:
        if self._engine is not None and self._engine.followers:
            self._engine.followers.tell(run_there, name, feed)
        return self.run(name, feed)

    def _start_over(self) -> None:
        """Make empty caches, and forget what they held."""
        self.caches: Caches = self._make_caches()[0]
        self._rows: list[_Seen | None] = [None] * self.limits.max_seqs

    @property
    def _guess_tokens(self) -> int:
        return self.limits.max_seqs * (1 + self.num_drafts)

    def _catch_up(self, sequence: Sequence) -> int:
        """Return how many of a sequence's first tokens need not be fed."""
        seen = self._rows[sequence.row]
        return seen.num_right() if seen is not None and seen.sequence is sequence else 0

    def _read_all(self, starts: dict[Sequence, int]) -> None:
        """Feed all but the last 1 + num_drafts tokens, in as many calls as needed."""
        while True:
            chunks, left = [], self.limits.token_budget
            for sequence, start in starts.items():
                count = min(len(sequence.tokens) - start - 1 - self.num_drafts, left)
                if count > 0:
                    chunks.append((sequence, start, start + count))
                    starts[sequence] += count
                    left -= count
            if not chunks:
                return
            feed = self._feed(self.limits.token_budget, chunks)
            jax.block_until_ready(self._run_all(READ, feed))  # before other collectives

    def _feed(self, num_tokens: int, chunks: Row[tuple[Sequence, int, int]]) -> Feed:
        """Pack token ranges of some sequences into arrays."""
        count = self.limits.max_seqs
        tokens, positions = np.zeros((2, num_tokens), np.int32)
        rows, seq_lens = np.full(count, -1, np.int32), np.zeros(count, np.int32)
        starts = np.zeros(count + 1, np.int32)
        end = 0
        for i, (sequence, start, stop) in enumerate(chunks):
            begin, end = end, end + stop - start
            tokens[begin:end] = sequence.tokens[start:stop]
            positions[begin:end] = range(start, stop)
            rows[i], seq_lens[i], starts[i + 1] = sequence.row, stop, end
        starts[len(chunks) + 1 :] = end
        sampling = sampling_rows([sequence for sequence, _, _ in chunks], count)
        return Feed(tokens, positions, rows, seq_lens, starts, sampling)

    def _compile(self, num_tokens: int, num_drafts: int) -> Callable:
        longest = 1 + num_drafts if num_drafts else num_tokens
        program = functools.partial(self._run, num_drafts=num_drafts, longest=longest)
        given, mesh = (self.model.params, self.caches), self.model.mesh
        if mesh is not None:
            program = mesh.feed(program, *given)
        lowered = jax.jit(program, donate_argnums=1).lower(*given, self._feed(num_tokens, []))
        return lowered.compile()

    def _run(
        self, params: Any, caches: Caches, feed: Feed, *, num_drafts: int, longest: int
    ) -> tuple[Caches, jax.Array]:
        """Return the written caches, and drafts [B, num_drafts]."""
        size, width = self.limits.block_size, self.limits.table_width
        first = jnp.maximum(feed.rows, 0) * width  # block of each row
        blocks = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None]

        def step(caches: Caches, tokens, positions, seq_lens, starts, longest):
            order = jnp.arange(tokens.shape[0], dtype=jnp.int32)
            owner = jnp.searchsorted(starts[1:], order, side="right").astype(jnp.int32)
            slots = first.at[owner].get(mode="fill", fill_value=0) * size + positions
            slots = jnp.where(order < starts[-1], slots, -1)
            metadata = jattn.AttentionMetadata(blocks, seq_lens, starts, slots, longest)
            batch = Batch(
                tokens=tokens,
                positions=positions,
                query_start_loc=starts,
                logit_tokens=jnp.maximum(starts[1:] - 1, 0),
                attention=dict.fromkeys(self._groups, metadata),
                states={},
                max_query_len=longest,
                num_tokens=starts[-1],
                num_logits=jnp.sum(feed.rows >= 0, dtype=jnp.int32),
            )
            return self.model.step(params, caches, batch)

        given = (feed.tokens, feed.positions, feed.seq_lens, feed.query_start_loc)
        logits, caches = step(caches, *given, longest)
        if not num_drafts:
            return caches, jnp.zeros((feed.rows.shape[0], 0), jnp.int32)
        draft = sample(logits, feed.sampling)
        starts = jnp.minimum(jnp.arange(feed.rows.shape[0] + 1), jnp.sum(feed.rows >= 0))
        starts = starts.astype(jnp.int32)

        def go_on(carry, i):
            caches, tokens = carry
            seq_lens = jnp.where(feed.rows >= 0, feed.seq_lens + i, 0)
            positions = jnp.maximum(seq_lens - 1, 0)
            logits, caches = step(caches, tokens, positions, seq_lens, starts, 1)
            rows = dataclasses.replace(feed.sampling, count=feed.sampling.count + i)
            chosen = sample(logits, rows)
            return (caches, chosen), chosen

        turns = jnp.arange(1, num_drafts, dtype=jnp.int32)
        (caches, _), others = jax.lax.scan(go_on, (caches, draft), turns)
        return caches, jnp.concatenate([draft[None], others]).T


def check_speculation(speculation: Speculation, target: Model, limits: Limits) -> None:
    """Refuse what `make_speculator` could not do, before anything is compiled.

    Raises:
      ValueError: the target cannot verify trees or has no MTP layer, or the draft model does not
        fit it.
    """
    has_states = any(isinstance(cache, StateCache) for cache in target.layers.values())
    context = 1 if target.mesh is None else target.mesh.sizes[CONTEXT]
    if speculation.branches > 1 and (has_states or context > 1):
        raise ValueError(
            f"branches is {speculation.branches}, but must be 1 for {target.name}: trees need a "
            "model without recurrent layers, on a mesh without context"
        )
    if speculation.mtp and target.mtp is None:
        raise ValueError(
            f"{target.name} speculates with MTP: it must be loaded with its MTP layer, "
            "load_model(..., mtp=True)"
        )
    if (model := speculation.draft) is None:
        return
    problems = []
    if model.vocab_size != target.vocab_size:
        problems.append(
            f"its vocabulary has {model.vocab_size} tokens, but must have {target.vocab_size}, as "
            f"{target.name}'s has"
        )
    if any(isinstance(cache, StateCache) for cache in model.layers.values()):
        problems.append("it has recurrent layers, but must have none")
    if model.max_positions < limits.max_len:
        problems.append(
            f"it was made for {model.max_positions} tokens, but must support {limits.max_len}"
        )
    if model.mesh != target.mesh:
        problems.append(f"it is on other devices than {target.name}: load both with one mesh")
    elif context > 1:
        problems.append(f"its mesh has context={context}, but must have context=1")
    if problems:
        raise ValueError(f"draft model {model.name}: {'; '.join(problems)}")


def make_speculator(
    speculation: Speculation,
    target: Model,
    limits: Limits,
    buckets: Row[Bucket],
    *,
    implementation: str | None = None,
    engine: Engine | None = None,
) -> Speculator:
    """Make a speculator, with a proposer that `check_speculation` has accepted.

    Other arguments are as for `DraftModel`.

    Args:
      engine: the engine, whose caches, tables and hidden states an MTP layer reads, and whose other
        processes also guess.
    """
    proposer: Proposer = Lookup(speculation.shortest, speculation.branches)
    if speculation.draft is not None:
        proposer = DraftModel(
            speculation.draft,
            target,
            limits,
            speculation.num_drafts,
            implementation=implementation,
            engine=engine,
        )
    elif speculation.mtp:
        sizes = [bucket.num_seqs for bucket in buckets if bucket.num_drafts]
        proposer = MtpGuesser(target, limits, speculation.num_drafts, sizes, engine)
    return Speculator(speculation, proposer, buckets)
