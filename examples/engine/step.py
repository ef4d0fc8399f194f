"""One step on the device: a jitted function that updates tables and caches in place.

    tables  = append each sequence's new blocks                    (jattn.blocks)
    batch   = block tables and slots of the sequences in the step  (jattn.blocks)
    logits, caches = model.step(params, caches, batch)             (jattn.paged_attention)
    tokens  = sample(adjust(logits, history))

The host sends a few integers per sequence. Shapes are *buckets*: a step is
padded to the smallest one that holds it. All buckets are compiled before the first request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
import jattn.blocks as jb
from examples.engine.caches import Caches, Group
from examples.engine.drafts import trees
from examples.engine.drafts.lookahead import keep_hidden, read_ahead
from examples.engine.drafts.rollback import accepted_lengths
from examples.engine.history import Adjustments, History, adjust, note
from examples.engine.likelihoods import likelihoods
from examples.engine.model import Batch, Model, StateIds
from examples.engine.programs import Programs, first_buckets
from examples.engine.request import Chunk
from examples.engine.sampling import SamplingRows, likeliest, sample, sampling_rows
from examples.engine.scheduler import Limits
from examples.models import parallel


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The shape of a step."""

    num_tokens: int  # T
    num_seqs: int  # B
    max_query_len: int  # 1: a decode step, of one token each; otherwise T, or 1 + num_drafts
    num_drafts: int = 0  # the most draft tokens per sequence
    trees: bool = False  # draft tokens may form trees
    scores: bool = False  # it computes log-probabilities of all T tokens

    def holds(self, plan: Sequence[Chunk]) -> bool:
        """Whether a step fits."""
        num_tokens = sum(chunk.num_tokens for chunk in plan)
        longest = max((chunk.num_tokens for chunk in plan), default=0)
        if self.scores != any(chunk.sequence.scores_prompt for chunk in plan):
            return False
        drafts = max((len(chunk.drafts) for chunk in plan), default=0)
        fits = num_tokens <= self.num_tokens and len(plan) <= self.num_seqs
        return fits and longest <= self.max_query_len and drafts <= self.num_drafts


def make_buckets(
    limits: Limits,
    decode: Sequence[int] | None = None,
    mixed: Sequence[int] | None = None,
    num_drafts: int = 0,
    trees: bool = False,
) -> tuple[Bucket, ...]:
    """Return the shapes of a server's steps, smallest first.

    Every bucket costs a compilation. Steps with few tokens are bound by reading the weights, so a
    factor of 4 between their sizes wastes little. Steps with many are bound by products. If
    requests arrive one by one, most steps have one prompt and the tokens of a few sequences: these
    get sizes that are closer together, and logits of few sequences.

    Args:
      limits: what the buckets must hold: `max_seqs` decoding sequences, `token_budget` tokens.
      decode: sequences in decode steps; None: max_seqs, then halved repeatedly, quartered from 16
        down.
      mixed: tokens in other steps; None: token_budget, then halved repeatedly, quartered from 128
        tokens down, above max_seqs; sizes between 128 and 512 also at three quarters; and those of
        96, 80, 64, 48 and 32 that are smaller, with an eighth as many sequences.
      num_drafts: draft tokens per sequence. Further buckets have as many sequences as those of
        `decode`, with tokens for all their drafts if the budget allows. 0: no such buckets.
      trees: draft tokens may form trees.
    """

    def parts(largest: int, least: int, many: int) -> list[int]:
        smaller = largest // (2 if largest > many else 4)
        return [largest, *(parts(smaller, least, many) if smaller >= least else [])]

    decode = {*(decode or parts(limits.max_seqs, 1, 16)), limits.max_seqs}
    few: list[Bucket] = []
    if mixed is None:
        mixed = parts(limits.token_budget, 2 * limits.max_seqs, 128)
        mixed += [n * 3 // 4 for n in mixed if 128 < n <= 512]
        few = [Bucket(n, n // 8, n) for n in range(96, 16, -16) if n < min(mixed)]
    buckets = [Bucket(n, n, 1) for n in decode]
    if num_drafts:
        longest = 1 + num_drafts
        tokens = {n: min(n * longest, limits.token_budget) for n in decode}
        buckets += [Bucket(tokens[n], n, longest, num_drafts, trees) for n in decode]
    mixed = {*mixed, limits.token_budget}
    buckets += [Bucket(n, limits.max_seqs, n) for n in mixed if n > 1]
    return tuple(sorted([*buckets, *few]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The host's input to a step. Every field is an array or a pytree of arrays."""

    tokens: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [T]
    rows: np.ndarray  # int32 [B], of the block tables; -1 in padding
    seq_lens: np.ndarray  # int32 [B], this step's tokens included
    num_drafts: np.ndarray  # int32 [B], how many of these are draft tokens
    tree_mask: np.ndarray | None  # bool [T, max_query_len], as `jattn.paged_attention` takes it
    query_start_loc: np.ndarray  # int32 [B + 1]
    begins: np.ndarray  # bool [B]: all entries of the row are sent and replace what it held
    new_blocks: tuple[np.ndarray, ...]  # by attention group, int32 [B, table width]: to append
    new_counts: np.ndarray  # int32 [groups, B], how many of them are valid
    states: dict[str, StateIds]  # by group of recurrent layers
    sampling: SamplingRows
    adjustments: Adjustments
    wants_likelihoods: np.ndarray  # bool []: return log-probabilities of chosen tokens
    targets: np.ndarray  # int32 [T], the token after each, -1 if unknown
    adapters: np.ndarray | None  # int32 [T], each token's, 0 for none; None: no room for adapters


def pack(plan: Sequence[Chunk], bucket: Bucket, limits: Limits) -> Inputs:
    """Lay out a plan as the arrays of a bucket. New blocks count as sent."""
    num_tokens, num_seqs = bucket.num_tokens, bucket.num_seqs
    attention = [group.name for group in limits.groups if not group.is_state]

    tokens, positions = np.zeros((2, num_tokens), np.int32)
    rows, seq_lens, num_drafts = np.zeros((3, num_seqs), np.int32)
    rows[:] = -1
    starts = np.zeros(num_seqs + 1, np.int32)
    begins = np.zeros(num_seqs, bool)
    states = {
        group.name: np.full((2, num_seqs), -1, np.int32)
        for group in limits.groups
        if group.is_state
    }
    tree_mask = np.ones((num_tokens, bucket.max_query_len), bool) if bucket.trees else None
    new_ids = []
    presence, frequency, repetition = np.zeros((3, num_seqs), np.float32)
    history_rows = np.full(num_seqs, -1, np.int32)
    is_next, constrained = np.zeros((2, num_seqs), bool)
    targets = np.full(num_tokens, -1, np.int32)
    adapters = np.zeros(num_tokens, np.int32) if limits.adapters else None
    end = 0
    for i, chunk in enumerate(plan):
        sequence, begin = chunk.sequence, end
        end += chunk.num_tokens
        starts[i + 1] = end
        tokens[begin:end] = (*sequence.tokens[chunk.start : chunk.stop], *chunk.drafts)
        positions[begin:end] = range(chunk.start, chunk.end)
        if chunk.parents is not None:
            first, num_known = end - len(chunk.drafts), chunk.stop - chunk.start
            positions[first:end] = chunk.stop - 1 + trees.depths(chunk.parents)
            tree_mask[first:end, num_known : chunk.num_tokens] = trees.paths(chunk.parents)
        rows[i], seq_lens[i], num_drafts[i] = sequence.row, chunk.end, len(chunk.drafts)
        begins[i] = not any(table.num_on_device for table in sequence.tables.values())
        new_ids.append([sequence.tables[name].take_new() for name in attention])
        for name, ids in states.items():
            ids[:, i] = sequence.states[name].read, sequence.states[name].write
        if sequence.request.adapter is not None:
            adapters[begin:end] = sequence.request.adapter.number
        sampling = sequence.request.sampling
        if sequence.request.adjusts:
            constrained[i] = sequence.matcher is not None
            history_rows[i], is_next[i] = sequence.row, chunk.is_last
            presence[i], frequency[i] = sampling.presence_penalty, sampling.frequency_penalty
            repetition[i] = sampling.repetition_penalty
        following = sequence.following(chunk.start, chunk.stop)
        targets[begin : begin + len(following)] = following
    starts[len(plan) + 1 :] = end  # padded rows are empty
    # As wide as a row: a sequence may begin with a long cached prefix.
    widths = [limits.table_width] * len(attention)
    new_blocks, new_counts = jb.pack_block_ids(new_ids, widths=widths, num_seqs=num_seqs)
    return Inputs(
        tokens=tokens,
        positions=positions,
        rows=rows,
        seq_lens=seq_lens,
        num_drafts=num_drafts,
        tree_mask=tree_mask,
        query_start_loc=starts,
        begins=begins,
        new_blocks=new_blocks,
        new_counts=new_counts,
        states={name: StateIds(*ids) for name, ids in states.items()},
        sampling=sampling_rows([chunk.sequence for chunk in plan], num_seqs),
        adjustments=Adjustments(
            history_rows, presence, frequency, repetition, is_next, constrained
        ),
        wants_likelihoods=np.bool_(wants_likelihoods(plan)),
        targets=targets,
        adapters=adapters,
    )


def wants_likelihoods(plan: Sequence[Chunk]) -> bool:
    """Whether a step must return its tokens' log-probabilities."""
    return any(c.is_last and c.sequence.request.logprobs is not None for c in plan)


def make_tables(limits: Limits) -> jb.BlockTables:
    """Make empty block tables for every attention group, with a row per sequence that may run."""
    groups = [
        jb.BlockGroup(
            limits.block_size // group.context,
            limits.table_width,
            sliding_window_reach=None if group.window is None else group.window - 1,
            context=jb.ContextParallel(group.context),
        )
        for group in limits.groups
        if not group.is_state
    ]
    return jb.init_block_tables(groups, limits.max_seqs)


def make_batch(
    tables: jb.BlockTables, inputs: Inputs, bucket: Bucket, groups: Sequence[Group]
) -> tuple[jb.BlockTables, Batch]:
    """Append the new blocks to the tables, and make the step's batch."""
    tables, _ = jb.append_block_ids(
        tables, inputs.rows, inputs.new_blocks, inputs.new_counts, overwrite=inputs.begins
    )  # never refused: a row is as wide as the longest sequence
    starts = inputs.query_start_loc
    first = inputs.seq_lens - jnp.diff(starts)
    rank = parallel.rank(parallel.CONTEXT)
    block_tables = jb.gather_block_tables(tables, inputs.rows, num_computed_tokens=first, rank=rank)
    places = inputs.positions
    if bucket.trees:  # draft tokens are stored in listed order, whatever their positions
        order = jnp.arange(bucket.num_tokens, dtype=jnp.int32)
        owner = jnp.searchsorted(starts[1:], order, side="right").astype(jnp.int32)
        places = order + (first - starts[:-1]).at[owner].get(mode="clip")
    slots = jb.compute_slot_mapping(tables, inputs.rows, starts, places, rank=rank)
    attention = {
        group.name: jattn.AttentionMetadata(
            block_tables[g], inputs.seq_lens, starts, slots[g], bucket.max_query_len
        )
        for g, group in enumerate(groups)
    }
    # After the last token before the drafts, and after each draft token; the last one is repeated
    # if there are fewer.
    last = starts[1:] - 1
    after = jnp.arange(1 + bucket.num_drafts, dtype=jnp.int32)[None]
    logit_tokens = jnp.minimum((last - inputs.num_drafts)[:, None] + after, last[:, None])
    return tables, Batch(
        tokens=inputs.tokens,
        positions=inputs.positions,
        query_start_loc=starts,
        logit_tokens=jnp.maximum(logit_tokens, 0).reshape(-1),
        attention=attention,
        states=inputs.states,
        tree_mask=inputs.tree_mask,
        adapters=inputs.adapters,
        max_query_len=bucket.max_query_len,
        num_tokens=starts[-1],
        num_logits=jnp.sum(inputs.rows >= 0, dtype=jnp.int32) * (1 + bucket.num_drafts),
    )


class Steps:
    """The compiled programs of a model, one per bucket.

    The program that scores prompts holds logits of all its tokens. It is compiled last, or when it
    is first needed.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        buckets: Sequence[Bucket],
        caches: Caches,
        tables: jb.BlockTables,
        history: History,
        *,
        check: bool = False,
        keep_logits: bool = False,
        quiet: bool = True,
        behind: bool = False,
    ):
        """Compile all buckets, in parallel.

        Args:
          model, limits: what to compile for.
          buckets: the shapes of steps.
          caches, tables, history: arguments of the steps, used for their shapes.
          check: the steps also return their attention metadata, for `check`.
          keep_logits: they also return the logits.
          quiet: show no progress bar.
          behind: compile two buckets now, and the others in a thread.
        """
        self.limits = limits
        self.buckets = tuple(buckets)
        self._groups = [group for group in limits.groups if not group.is_state]
        self._returns_metadata, self._keeps_logits = check, keep_logits
        self._model = model
        largest = limits.token_budget
        self._scoring = Bucket(largest, limits.max_seqs, largest, scores=True)

        def shape(array: jax.Array) -> jax.ShapeDtypeStruct:  # the arrays will have been donated
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)

        self._state = jax.tree.map(shape, (model.params, caches, tables, history))
        self._programs = Programs(self._lower, quiet=quiet)
        first = first_buckets(self.buckets) if behind else self.buckets
        self._programs.compile(first)
        if behind:
            others = [bucket for bucket in self.buckets if bucket not in first]
            self._programs.compile_in_background([*others, self._scoring])

    @property
    def programs(self) -> Mapping[Bucket, jax.stages.Compiled]:
        """The programs compiled so far."""
        return self._programs.ready

    @property
    def num_coming(self) -> int:
        """How many programs are still to be compiled."""
        return self._programs.num_coming

    def close(self) -> None:
        """Compile nothing more."""
        self._programs.close()

    def bucket_of(self, plan: Sequence[Chunk]) -> Bucket:
        """Return the smallest compiled bucket that holds a plan, or else the smallest to come."""
        smallest = None
        for bucket in (*self.buckets, self._scoring):
            if bucket.holds(plan):
                if bucket in self.programs:
                    return bucket
                smallest = smallest or bucket
        assert smallest is not None, "the scheduler plans no more than the largest bucket holds"
        return smallest

    def run(self, bucket: Bucket, *state: Any, inputs: Inputs) -> tuple:
        """Run a step.

        Args:
          bucket: its shape.
          state: parameters, caches, tables and history; all but the first are donated.
          inputs: the host's input.

        Returns: caches, tables, history, next tokens [B, 1 + drafts], logits [B, 1 + drafts,
          vocabulary] (if kept), attention metadata (if checked), log-probabilities, and with MTP
          hidden states. The log-probabilities are of the next tokens ("next", [B * (1 + drafts)])
          and, from a bucket that scores, of `inputs.targets` ("prompt", [T]). The hidden states are
          of the tokens after which the next ones were chosen [max_seqs, 1 + most drafts, E].
        """
        return self._programs[bucket](*state, inputs)

    def _lower(self, bucket: Bucket) -> jax.stages.Lowered:
        step, mesh = self._step(self._model, bucket), self._model.mesh
        if mesh is not None:
            step = mesh.step(step, *self._state[:2])
        step = jax.jit(step, donate_argnums=(1, 2, 3))
        return step.lower(*self._state, pack([], bucket, self.limits))

    def check(self, attention: dict[str, jattn.AttentionMetadata]) -> None:
        """Validate on the host the tables, lengths and slots that a step used.

        Raises:
          ValueError: they are wrong.
        """
        for group in self.limits.groups:
            if not group.is_state:
                num_blocks = self.limits.num_blocks[self.limits.pool_of(group)]
                attention[group.name].check(
                    num_blocks=num_blocks, block_size=self.limits.block_size
                )

    def _step(self, model: Model, bucket: Bucket) -> Callable:
        choices = 1 + bucket.num_drafts

        def step(
            params: Any, caches: Caches, tables: jb.BlockTables, history: History, inputs: Inputs
        ):
            tables, batch = make_batch(tables, inputs, bucket, self._groups)
            last, likely = batch.logit_tokens, {}
            if bucket.scores:
                every = jnp.arange(bucket.num_tokens, dtype=jnp.int32)
                batch = dataclasses.replace(batch, logit_tokens=every, num_logits=batch.num_tokens)
            caches = caches.defer_states() if bucket.num_drafts else caches
            if model.mtp is None:
                logits, caches = model.step(params, caches, batch)
            else:
                logits, hidden, caches = model.mtp.step(params, caches, batch)
            if bucket.scores:
                likely["prompt"] = likelihoods(logits, inputs.targets, jnp.bool_(True))
                logits = logits[last]
            asked, sampling = inputs.adjustments, inputs.sampling.of_next(choices)
            if bucket.trees:  # the depth of a draft token says which token is chosen after it
                count = 1 + batch.positions.at[last].get(mode="clip")
                sampling = dataclasses.replace(sampling, count=count)
            asked_next = asked.of_next(choices)
            # The branches return no logits, because XLA would copy them. They take the logits'
            # columns, the layout that a product with few tokens produces (`layers.product`).
            greedy, columns = likeliest(logits), logits.T
            tokens = jax.lax.cond(
                jnp.any(asked_next.row >= 0) | jnp.any(sampling.temperature > 0),
                lambda: sample(adjust(columns.T, history, asked_next), sampling),
                lambda: greedy,
            )
            likely["next"] = likelihoods(logits, tokens, inputs.wants_likelihoods)
            tokens = tokens.reshape(-1, choices)
            history = note(history, asked, tokens[:, 0])
            used = batch.attention if self._returns_metadata else {}
            logits = logits.reshape(*tokens.shape, -1) if self._keeps_logits else None
            if bucket.num_drafts:
                caches = caches.write_deferred(batch, accepted_lengths(inputs, tokens))
            kept = None
            if model.mtp is not None:
                caches = read_ahead(model, params, caches, batch, inputs, hidden, tokens)
                most = 1 + max(bucket.num_drafts for bucket in self.buckets)
                kept = hidden[last].reshape(*tokens.shape, -1)
                kept = keep_hidden(kept, self.limits.max_seqs, most)
            return caches, tables, history, tokens, logits, used, likely, kept

        return step
