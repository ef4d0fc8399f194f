"""The blocks and states that a sequence holds, from pools whose free blocks form a prefix cache.

A `jattn.blocks.BlockPool` allocates ids of blocks of keys and values, or of states of recurrent
layers. A full block is published under the hash of all tokens up to its end, and so is a state at a
block's border; a prompt that begins with the same tokens shares them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jattn.blocks as jb

HOLE = 0  # the entry of a block that queries no longer see; never read


@dataclasses.dataclass(eq=False)
class BlockTable:
    """One sequence's blocks in the caches of one group of attention layers.

    Entry i covers tokens [i * S, (i + 1) * S). With a window, blocks that no later query can see
    return to the pool. Their entries stay in the table and may soon name another sequence's block,
    which is harmless because attention never reads behind the window.
    """

    pool: jb.BlockPool
    group: str
    block_size: int
    window: int | None
    blocks: list[int] = dataclasses.field(default_factory=list)
    num_returned: int = 0
    num_published: int = 0
    num_on_device: int = 0  # entries that were sent to the device's table

    def num_missing(self, length: int) -> int:
        """Return how many blocks to allocate before the table covers `length` tokens."""
        return max(0, -(-length // self.block_size) - len(self.blocks))

    def first_seen(self, position: int) -> int:
        """Return the first block that the query at a position, or a later one, sees.

        It sees the keys from `position - window + 1` on.
        """
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.block_size

    def grow(self, length: int) -> None:
        """Allocate blocks to cover `length` tokens."""
        if missing := self.num_missing(length):
            self.blocks += self.pool.allocate(missing)

    def find(self, hashes: Sequence[bytes], num_blocks: int) -> list[int] | None:
        """Return the published blocks that a query after `num_blocks` full blocks sees, or None."""
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
        """Release the blocks that the query at position `num_computed` does not see."""
        num_unseen = min(self.first_seen(num_computed), len(self.blocks))
        if num_unseen > self.num_returned:
            self.pool.free(self.blocks[self.num_returned : num_unseen])
            self.num_returned = num_unseen

    def trim(self, length: int) -> bool:
        """Release blocks past `length` tokens; return whether there were any."""
        kept = -(-length // self.block_size)
        spare = self.blocks[kept:]
        self.pool.free(spare[::-1])
        del self.blocks[kept:]
        return bool(spare)

    def take_new(self) -> list[int]:
        """Return the entries that the device's table does not have yet, and count them as sent."""
        new = self.blocks[self.num_on_device :]
        self.num_on_device = len(self.blocks)
        return new

    def release(self) -> None:
        """Release all blocks, the last first: a prefix is worth more than what follows it."""
        self.pool.free(reversed(self.blocks[self.num_returned :]))
        self.blocks, self.num_returned, self.num_published, self.num_on_device = [], 0, 0, 0


@dataclasses.dataclass(eq=False)
class StateTable:
    """One sequence's recurrent states: one id for all layers of the group.

    A published state is never overwritten: the next step reads it and writes to a fresh id. A
    checkpoint therefore costs an id, but no copy.
    """

    pool: jb.BlockPool
    group: str
    read: int = -1  # -1: no token yet
    write: int = -1

    @property
    def num_missing(self) -> int:
        """How many ids to allocate before the next step."""
        return int(self.read < 0 or not self.pool.is_private(self.read))

    def prepare(self) -> None:
        """Choose the id that the next step writes."""
        self.write = self.pool.allocate(1)[0] if self.num_missing else self.read

    def commit(self) -> None:
        """Adopt the written state as current, since the step runs."""
        if self.read != self.write and self.read >= 0:
            self.pool.free([self.read])
        self.read = self.write

    def adopt(self, id: int) -> None:
        """Begin with a published state."""
        self.pool.share(id)
        self.read = self.write = id

    def publish(self, digest: bytes) -> None:
        """Keep the current state for other sequences."""
        self.pool.publish(self.group, digest, self.read)

    def release(self) -> None:
        """Release the state."""
        self.pool.free({id for id in (self.read, self.write) if id >= 0})
        self.read = self.write = -1
