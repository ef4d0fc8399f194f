"""Who holds which blocks: a pool of physical blocks, and a sequence's table into it.

A pool belongs to a *kind* of layer (sliding, global): all layers of a kind use the same block ids,
each in its own cache. Blocks are handed out in a shuffled order, so neighbours in a sequence are
strangers in memory, as they are in a server that has run for a while.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np


class BlockPool:
    """The free blocks of one kind of layer, first returned first reused."""

    def __init__(self, num_blocks: int, seed: int = 0):
        order = np.random.default_rng(seed).permutation(num_blocks)
        self.num_blocks = num_blocks
        self._free = collections.deque(order.tolist())
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """How many blocks `take` can still give."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """How many blocks somebody holds."""
        return len(self._taken)

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks."""
        assert count <= self.num_free, "the scheduler asks only for what there is"
        blocks = [self._free.popleft() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        """Accept blocks that `take` handed out."""
        assert self._taken.issuperset(blocks), "a block was returned twice"
        self._taken.difference_update(blocks)
        self._free.extend(blocks)


@dataclasses.dataclass(eq=False)
class BlockTable:
    """Where one sequence's tokens lie in the caches of one kind of layer.

    Entry i covers tokens [i * S, (i + 1) * S). With a window, entries that no later query can see
    go back to the pool; they stay in the table and may soon name another sequence's block, which
    is harmless because attention never looks behind the window.
    """

    pool: BlockPool
    block_size: int
    window: int | None
    blocks: list[int] = dataclasses.field(default_factory=list)
    num_returned: int = 0

    def num_missing(self, length: int) -> int:
        """Blocks to take before the table covers `length` tokens."""
        return max(0, -(-length // self.block_size) - len(self.blocks))

    def grow(self, length: int) -> None:
        """Cover `length` tokens."""
        self.blocks += self.pool.take(self.num_missing(length))

    def return_behind_window(self, num_computed: int) -> None:
        """Give up the blocks that the query at position `num_computed` does not see.

        It sees the keys from `num_computed - window + 1` on, and later queries see fewer.
        """
        if self.window is None:
            return
        first_seen = max(0, num_computed - self.window + 1)
        num_unseen = min(first_seen // self.block_size, len(self.blocks))
        if num_unseen > self.num_returned:
            self.pool.give_back(self.blocks[self.num_returned : num_unseen])
            self.num_returned = num_unseen

    def release(self) -> None:
        """Give up all blocks."""
        self.pool.give_back(self.blocks[self.num_returned :])
        self.blocks, self.num_returned = [], 0

    def slots(self, start: int, stop: int) -> np.ndarray:
        """Slots (block * S + offset) of tokens [start, stop), int32."""
        positions = np.arange(start, stop)
        blocks = np.asarray(self.blocks)[positions // self.block_size]
        return (blocks * self.block_size + positions % self.block_size).astype(np.int32)
