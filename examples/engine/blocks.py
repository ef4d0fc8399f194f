"""Block allocation: pools with reference counts, and a prefix cache in the free blocks.

A *pool* hands out ids. The ids are blocks of keys and values, or states of recurrent layers; all
layers of a cache group use the same ids, each in its own array. An id may have several holders: a
prompt that begins like another one shares its full blocks.

A full block is *published* under the hash of all tokens up to its end,

    h_i = blake2b(h_(i-1), tokens of block i),

and so is a state at a block's border. When its last holder releases it, a published id is free but
keeps its content: a request with the same tokens takes it up again, until it is the id that has
been free for longest and is handed out for something else.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

HOLE = 0  # the entry of a block that no query sees any more; never read


def extend_hashes(
    hashes: list[bytes], tokens: Sequence[int], num_tokens: int, block_size: int
) -> None:
    """Extend a sequence's chain to all full blocks of its first `num_tokens` tokens."""
    while (len(hashes) + 1) * block_size <= num_tokens:
        start = len(hashes) * block_size
        digest = hashlib.blake2b(hashes[-1] if hashes else b"", digest_size=16)
        digest.update(np.asarray(tokens[start : start + block_size], np.int32).tobytes())
        hashes.append(digest.digest())


class Pool:
    """Ids 0..size-1 with reference counts, and what the free ones still hold."""

    def __init__(self, size: int, seed: int = 0):
        # Shuffled, so that a sequence's blocks are scattered as in a server that has run for long.
        order = np.random.default_rng(seed).permutation(size).tolist()
        self.size = size
        self._free: collections.OrderedDict[int, None] = collections.OrderedDict.fromkeys(order)
        self._holders = [0] * size
        self._published: dict[tuple[str, bytes], int] = {}
        self._name_of: dict[int, tuple[str, bytes]] = {}

    @property
    def num_free(self) -> int:
        """How many ids `take` can still give, those that hold a published prefix included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """How many ids are held."""
        return self.size - len(self._free)

    @property
    def num_published(self) -> int:
        """How many ids can be found by their content."""
        return len(self._published)

    def is_free(self, id: int) -> bool:
        """Whether an id has no holder."""
        return self._holders[id] == 0

    def take(self, count: int) -> list[int]:
        """Hand out `count` ids, forgetting what those longest free held."""
        assert count <= self.num_free, "the scheduler asks only for what there is"
        ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for id in ids:
            self._holders[id] = 1
            if name := self._name_of.pop(id, None):
                del self._published[name]
        return ids

    def share(self, id: int) -> None:
        """Become one more holder of an id."""
        if not self._holders[id]:
            del self._free[id]
        self._holders[id] += 1

    def give_back(self, ids: Iterable[int]) -> None:
        """Release ids; without a holder they are free, unpublished ones to be used first."""
        for id in ids:
            assert self._holders[id], f"{id} was given back more often than it was taken"
            self._holders[id] -= 1
            if not self._holders[id]:
                self._free[id] = None
                if id not in self._name_of:
                    self._free.move_to_end(id, last=False)

    def publish(self, group: str, digest: bytes, id: int) -> None:
        """Make a held id findable. The first of several with the same content is kept."""
        assert self._holders[id], "only what is held is known to be written"
        if (group, digest) not in self._published and id not in self._name_of:
            self._published[group, digest] = id
            self._name_of[id] = (group, digest)

    def is_private(self, id: int) -> bool:
        """Whether an id has one holder and is not published, so that it may be written."""
        return self._holders[id] == 1 and id not in self._name_of

    def find(self, group: str, digest: bytes) -> int | None:
        """The id that holds some content, or None."""
        return self._published.get((group, digest))

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._published.clear()
        self._name_of.clear()


@dataclasses.dataclass(eq=False)
class BlockTable:
    """One sequence's blocks in the caches of one group of attention layers.

    Entry i covers tokens [i * S, (i + 1) * S). With a window, blocks that no later query can see
    go back to the pool; their entries stay in the table and may soon name another sequence's
    block, which is harmless because attention never looks behind the window.
    """

    pool: Pool
    group: str
    block_size: int
    window: int | None
    blocks: list[int] = dataclasses.field(default_factory=list)
    num_returned: int = 0
    num_published: int = 0
    num_on_device: int = 0  # entries that were sent to the device's table

    def num_missing(self, length: int) -> int:
        """Blocks to take before the table covers `length` tokens."""
        return max(0, -(-length // self.block_size) - len(self.blocks))

    def first_seen(self, position: int) -> int:
        """The first block that the query at a position, or a later one, sees.

        It sees the keys from `position - window + 1` on.
        """
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.block_size

    def grow(self, length: int) -> None:
        """Cover `length` tokens."""
        if missing := self.num_missing(length):
            self.blocks += self.pool.take(missing)

    def find(self, hashes: Sequence[bytes], num_blocks: int) -> list[int] | None:
        """The published blocks that a query after `num_blocks` full blocks sees, or None."""
        found = [
            self.pool.find(self.group, digest)
            for digest in hashes[self.first_seen(num_blocks * self.block_size) : num_blocks]
        ]
        return None if None in found else found

    def adopt(self, blocks: list[int], num_blocks: int) -> None:
        """Begin with `num_blocks` full blocks, of which the last ones are `blocks`."""
        for block in blocks:
            self.pool.share(block)
        self.num_returned = num_blocks - len(blocks)
        self.num_published = num_blocks
        self.blocks = [HOLE] * self.num_returned + blocks

    def publish(self, hashes: Sequence[bytes], num_blocks: int) -> None:
        """Publish the blocks that have become full among the first `num_blocks`."""
        for i in range(max(self.num_published, self.num_returned), num_blocks):
            self.pool.publish(self.group, hashes[i], self.blocks[i])
        self.num_published = num_blocks

    def return_behind_window(self, num_computed: int) -> None:
        """Give up the blocks that the query at position `num_computed` does not see."""
        num_unseen = min(self.first_seen(num_computed), len(self.blocks))
        if num_unseen > self.num_returned:
            self.pool.give_back(self.blocks[self.num_returned : num_unseen])
            self.num_returned = num_unseen

    def take_new(self) -> list[int]:
        """The entries that the device's table does not have yet."""
        new = self.blocks[self.num_on_device :]
        self.num_on_device = len(self.blocks)
        return new

    def release(self) -> None:
        """Give up all blocks, the last first: a prefix is worth more than what follows it."""
        self.pool.give_back(reversed(self.blocks[self.num_returned :]))
        self.blocks, self.num_returned, self.num_published, self.num_on_device = [], 0, 0, 0


@dataclasses.dataclass(eq=False)
class StateTable:
    """One sequence's recurrent states: one id for all layers of the group.

    A published state is never written again: the next step reads it and writes to a fresh id.
    So a checkpoint costs an id, and no copy.
    """

    pool: Pool
    group: str
    read: int = -1  # -1: no token yet
    write: int = -1

    @property
    def num_missing(self) -> int:
        """Ids to take before the next step."""
        return int(self.read < 0 or not self.pool.is_private(self.read))

    def prepare(self) -> None:
        """Choose the id that the next step writes."""
        self.write = self.pool.take(1)[0] if self.num_missing else self.read

    def commit(self) -> None:
        """The step has run."""
        if self.read != self.write and self.read >= 0:
            self.pool.give_back([self.read])
        self.read = self.write

    def adopt(self, id: int) -> None:
        """Begin with a published state."""
        self.pool.share(id)
        self.read = self.write = id

    def publish(self, digest: bytes) -> None:
        """Keep the state as it is now for others."""
        self.pool.publish(self.group, digest, self.read)

    def release(self) -> None:
        """Give up the state."""
        self.pool.give_back({id for id in (self.read, self.write) if id >= 0})
        self.read = self.write = -1
