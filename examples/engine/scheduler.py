"""Choose what runs next: requests share a token budget per step and pools of blocks.

Each step first gives every decoding sequence its one token, then spends the rest of the budget on
prompts in order of arrival, a chunk at a time. A prompt starts after the longest prefix that the
cache still holds. When blocks run out, the newest sequence is preempted: it releases its blocks and
starts over later, keeping the tokens it has generated. The oldest sequence is never preempted, so
every request finishes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

import jattn.blocks as jb
from examples.engine.blocks import BlockTable, StateTable
from examples.engine.caches import Group
from examples.engine.forks import (
    fork_point,
    leader_of,
    most_to_read,
    shared_start,
    take_partial_blocks,
)
from examples.engine.host_cache import HostCache
from examples.engine.request import Chunk, Request, Sequence
from examples.models.lora import Room

PAGES = "pages"  # the one pool of a server whose states live in the pages of attention


@dataclasses.dataclass(frozen=True)
class Limits:
    """The sizes a server is built for; most are shapes of the compiled step."""

    groups: tuple[Group, ...]  # the model's cache groups
    max_seqs: int  # sequences in a step (B)
    token_budget: int  # tokens in a step (T)
    block_size: int  # S
    max_len: int  # length of the longest sequence
    # Ids per pool. Pools have the names of their groups, or PAGES. None: enough for every sequence.
    num_blocks: Mapping[str, int] | None = None
    prefix_caching: bool = True
    checkpoint_every: int | None = None  # tokens between two checkpointed states; None: S
    unified: bool = False  # states live in pages of the attention layers' pools
    adapters: Room | None = None  # for LoRA adapters

    def __post_init__(self) -> None:
        every = self.checkpoint_every if self.checkpoint_every is not None else self.block_size
        object.__setattr__(self, "checkpoint_every", every)
        problems = [
            f"{name} is {getattr(self, name)}, but must be at least 1"
            for name in ("max_seqs", "token_budget", "block_size", "max_len", "checkpoint_every")
            if getattr(self, name) < 1
        ]
        if problems:
            raise ValueError("; ".join(problems))
        if every % self.block_size:
            problems.append(
                f"checkpoint_every is {every}, but must be a multiple of block_size "
                f"({self.block_size})"
            )
        if self.token_budget < self.max_seqs:
            problems.append(
                f"token_budget is {self.token_budget}, but must be at least max_seqs "
                f"({self.max_seqs}): each generating sequence needs a token in every step"
            )
        least: dict[str, int] = collections.Counter()
        for group in self.groups:
            least[self.pool_of(group)] += self.most_blocks(group)
        enough = {pool: self.max_seqs * count for pool, count in least.items()}
        given = {**enough, **(self.num_blocks or {})}
        for pool, count in given.items():
            if pool not in least:
                problems.append(f"num_blocks has {pool!r}, but the pools are {sorted(least)}")
            elif count < least[pool]:
                problems.append(
                    f"{count} {pool} blocks of {self.block_size} tokens are too few: one sequence "
                    f"of {self.max_len} tokens needs {least[pool]}"
                )
        if problems:
            raise ValueError("; ".join(problems))
        object.__setattr__(self, "num_blocks", given)

    @property
    def table_width(self) -> int:
        """Entries in a block table (M)."""
        return -(-self.max_len // self.block_size)

    @property
    def keeps_states(self) -> bool:
        """Whether states are checkpointed, so that other sequences can start from them."""
        return self.prefix_caching and any(group.is_state for group in self.groups)

    def pool_of(self, group: Group) -> str:
        """Return the name of the pool from which a group takes its ids."""
        return PAGES if self.unified else group.name

    def most_blocks(self, group: Group) -> int:
        """Return the most ids that one sequence holds at a time.

        With a window: enough for the window, a chunk, and ragged ends. Of states: one to read and
        one to write.
        """
        if group.is_state:
            return 2
        if group.window is None:
            return self.table_width
        seen = group.window - 1 + self.token_budget
        return min(self.table_width, -(-seen // self.block_size) + 1)


class Scheduler:
    """Requests waiting, sequences running, and the pools they share."""

    def __init__(self, limits: Limits, seed: int = 0, host_cache: HostCache | None = None):
        self.limits, self.host_cache = limits, host_cache
        make = jb.BlockPool if host_cache is None else host_cache.pool
        self.pools = {
            name: make(count, seed=seed + i)
            for i, (name, count) in enumerate(limits.num_blocks.items())
        }
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.num_preemptions = 0
        self.copies: list[tuple[str, int, int]] = []
        self._free_rows = list(range(limits.max_seqs))[::-1]

    @property
    def num_free_rows(self) -> int:
        """How many more sequences may run at once."""
        return len(self._free_rows)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
          ValueError: it may grow longer than the server was built for.
        """
        length = sequence.request.max_len
        if length > self.limits.max_len:
            raise ValueError(
                f"prompt and max_new_tokens make {length} tokens, but this server was built for "
                f"{self.limits.max_len}"
            )
        self._give_tables(sequence)
        self.waiting.append(sequence)

    def num_cached(self, request: Request) -> int:
        """Return how many tokens of a prompt the prefix cache holds."""
        sequence = Sequence(request)
        self._give_tables(sequence)
        return self._longest_prefix(sequence)[0] * self.limits.block_size

    def _give_tables(self, sequence: Sequence) -> None:
        for group in self.limits.groups:
            pool = self.pools[self.limits.pool_of(group)]
            if group.is_state:
                sequence.states[group.name] = StateTable(pool, group.name)
            else:
                sequence.tables[group.name] = BlockTable(
                    pool, group.name, self.limits.block_size, group.window
                )

    def schedule(self) -> list[Chunk]:
        """Choose this step's chunks and allocate the blocks they write to."""
        self._admit()
        plan: dict[Sequence, Chunk] = {}
        left = self.limits.token_budget
        for sequence in sorted(self.running, key=lambda s: s.num_pending > 1):  # decodes first
            if sequence.row < 0 or not left:  # just preempted, or out of budget
                continue
            start = sequence.num_computed
            most = most_to_read(sequence, min(sequence.num_pending, left), self.waiting)
            stop = self._chunk_stop(sequence, start + most)
            while not self._has_room(sequence, stop):
                newest = self.running[-1]
                if newest is sequence:
                    break
                self.preempt(newest)
                if newest in plan:
                    left += plan.pop(newest).num_tokens
            else:
                for table in sequence.tables.values():
                    table.grow(stop)
                for table in sequence.states.values():
                    table.prepare()
                plan[sequence] = Chunk(sequence, start, stop)
                left -= stop - start
        return list(plan.values())

    def most_drafts(self, chunk: Chunk) -> int:
        """Return how many draft tokens a chunk may have.

        A chunk has no more than the request could accept and still choose a token. It has none past
        a border at which a state is checkpointed, since the state is written after the last of
        them. It has none at all if logits depend on the tokens before.
        """
        request = chunk.sequence.request
        if not chunk.is_last or request.adjusts:
            return 0
        if request.follow is not None and chunk.sequence.states:  # drafts follow chosen tokens
            return 0
        most = request.max_new_tokens - len(chunk.sequence.chosen) - 1
        to_border = -chunk.stop % self.limits.checkpoint_every
        return min(most, to_border) if self.limits.keeps_states else most

    def add_drafts(
        self, chunk: Chunk, drafts: tuple[int, ...], parents: tuple[int, ...] | None = None
    ) -> Chunk:
        """Return the chunk with draft tokens, or unchanged if that would preempt a sequence."""
        sequence = chunk.sequence
        drafted = dataclasses.replace(chunk, drafts=drafts, parents=parents)
        if not drafts or not self._has_room(sequence, drafted.end, prepared=True):
            return chunk
        for table in sequence.tables.values():
            table.grow(drafted.end)
        return drafted

    def commit(self, plan: list[Chunk]) -> None:
        """Update tables and hashes while a step runs, as far as its outcome is known."""
        for chunk in plan:
            if not chunk.drafts:
                self._advance(chunk.sequence, chunk.stop)

    def settle(self, chunk: Chunk, num_accepted: int) -> None:
        """Update tables and hashes of a chunk whose first `num_accepted` draft tokens are accepted.

        Draft tokens of a tree that were accepted out of order are computed again as pending tokens.
        The next steps overwrite the keys and values of the others. A recurrent state is the one
        after the last accepted token (`drafts/rollback.py`).
        """
        sequence = chunk.sequence
        self._advance(sequence, chunk.stop + num_accepted)
        length = len(sequence.tokens)
        if any([table.trim(length) for table in sequence.tables.values()]):
            for table in sequence.tables.values():
                table.num_on_device = 0  # all its entries are sent again

    def _advance(self, sequence: Sequence, num_computed: int) -> None:
        """Record that a sequence's tokens up to `num_computed` are in the caches."""
        size = self.limits.block_size
        sequence.num_computed = num_computed
        for table in sequence.states.values():
            table.commit()
        if self.limits.prefix_caching:
            sequence.extend_hashes(num_computed, size)
            for table in sequence.tables.values():
                table.publish(sequence.hashes, num_computed // size)
            if num_computed % self.limits.checkpoint_every == 0:
                for table in sequence.states.values():
                    table.publish(sequence.hashes[num_computed // size - 1])
        for table in sequence.tables.values():
            table.return_behind_window(num_computed)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that is finished or aborted, waiting or running."""
        if sequence.row >= 0:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def _admit(self) -> None:
        """Start requests, in order, while a row and blocks are free for them."""
        for sequence in list(self.waiting):
            if not self._free_rows:
                return
            leader = leader_of(sequence, self.running) if sequence.contents is None else None
            if leader is None:
                num_reused, blocks, states = self._longest_prefix(sequence)
            elif leader.num_computed == fork_point(leader):
                num_reused, blocks, states = shared_start(leader, self.limits.block_size)
            else:
                continue  # wait until the leader reaches the fork point
            if not self._fits(sequence, num_reused, blocks, states):
                return
            if self.host_cache is not None:
                self.host_cache.bring_back(sequence, num_reused, blocks, states)
            self.waiting.remove(sequence)
            sequence.row = self._free_rows.pop()
            for name, table in sequence.tables.items():
                table.adopt(blocks[name], num_reused)
            for name, id in states.items():
                sequence.states[name].adopt(id)
            sequence.num_computed = num_reused * self.limits.block_size
            if leader is not None:
                taken = take_partial_blocks(sequence, leader)
                self.copies += [(name, *pair) for name, pair in taken.items()]
            if not sequence.num_preemptions:
                sequence.num_reused = sequence.num_computed
            if sequence.contents is not None:
                sequence.begin_at(sequence.contents.num_tokens)
            self.running.append(sequence)

    def take_copies(self) -> list[tuple[str, int, int]]:
        """Return, and clear, the blocks to copy before the next step: (group, from, to)."""
        copies, self.copies = self.copies, []
        return copies

    def _longest_prefix(self, sequence: Sequence) -> tuple[int, dict, dict]:
        """Return how many full blocks can be skipped, and the cached ids that later tokens need.

        At least one token is left to compute, for its logits. Every group must be able to continue
        from there. Full attention needs all blocks, a window needs a window's worth, and recurrent
        layers need the state at exactly that border.
        """
        nothing = (0, {name: [] for name in sequence.tables}, {})
        if not self.limits.prefix_caching or sequence.scores_prompt or sequence.contents:
            return nothing
        size, hashes = self.limits.block_size, sequence.hashes
        sequence.extend_hashes(len(sequence.tokens) - 1, size)
        most = (len(sequence.tokens) - 1) // size
        for name, table in sequence.tables.items():
            if table.window is None:  # the first missing block ends the prefix
                found = (i for i in range(most) if table.pool.find(name, hashes[i]) is None)
                most = next(found, most)
        for count in range(most, 0, -1):
            blocks = {name: t.find(hashes, count) for name, t in sequence.tables.items()}
            states = {
                name: t.pool.find(name, hashes[count - 1]) for name, t in sequence.states.items()
            }
            if None not in blocks.values() and None not in states.values():
                return count, blocks, states
        return nothing

    def _fits(self, sequence: Sequence, num_reused: int, blocks: dict, states: dict) -> bool:
        """Whether there is room for all tokens that a sequence has so far."""
        needed: dict[str, int] = collections.Counter()
        for group in self.limits.groups:
            pool = self.pools[name := self.limits.pool_of(group)]
            if group.is_state:
                missing, reused = 1, [states[group.name]] if states else []
            else:
                missing = sequence.tables[group.name].num_missing(len(sequence.tokens)) - num_reused
                reused = blocks[group.name]
            missing += sum(pool.is_free(id) for id in reused)
            needed[name] += min(missing, self.limits.most_blocks(group))
        return all(count <= self.pools[name].num_free for name, count in needed.items())

    def _chunk_stop(self, sequence: Sequence, stop: int) -> int:
        """Return where a chunk ends: at the last border it reaches where states are checkpointed.

        If that is the very end of the tokens, an earlier border is better: a request with the same
        tokens must compute the last one itself, so it can only start from an earlier border.
        """
        start, every = sequence.num_computed, self.limits.checkpoint_every
        if not self.limits.keeps_states:
            return stop
        border = stop // every * every
        if border == len(sequence.tokens) and border - every > start:
            border -= every
        return border if border > start else stop

    def _has_room(self, sequence: Sequence, stop: int, *, prepared: bool = False) -> bool:
        """Whether enough blocks for a length, and states unless `prepared`, are free."""
        missing: dict[str, int] = collections.Counter()
        for group in self.limits.groups:
            if group.is_state:
                count = 0 if prepared else sequence.states[group.name].num_missing
            else:
                count = sequence.tables[group.name].num_missing(stop)
            missing[self.limits.pool_of(group)] += count
        return all(count <= self.pools[name].num_free for name, count in missing.items())

    def preempt(self, sequence: Sequence) -> None:
        """Release all that a running sequence holds and put it back at the front of the queue."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        for table in (*sequence.tables.values(), *sequence.states.values()):
            table.release()
        self._free_rows.append(sequence.row)
        sequence.row, sequence.has_history = -1, False
