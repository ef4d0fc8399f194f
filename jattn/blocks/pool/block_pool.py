"""Which blocks of a pool are free, how many holders each has, and which are found by their content.

A pool hands out ids of blocks of keys and values, or of state slots. All layers of a group use the
same ids, each in its own array. A block may have several holders: prompts that begin alike share
their full blocks.

    allocate -> one holder         share -> one holder more         free -> one holder less
    publish  -> found by its hash until it is allocated for something else

A block without a holder is free but keeps its content. It can be found (`find`, then `share`) until
it is the block that has been free for longest and is evicted. Free blocks without a hash are
allocated first.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import numpy as np

from jattn.checks import checking
from jattn.integers import is_int, require_int


class BlockPool:
    """The ids 0..num_blocks-1 with reference counts, hashes and eviction. Host only.

    Args:
      num_blocks: N, blocks in the pool.
      reserved: ids that are never handed out (vLLM's null block 0, say).
      seed: hand out blocks in a shuffled order, as in a server that has run for a while. None: in
        ascending order.

    Raises: `ValueError` if `num_blocks` is below 1 or a reserved id is not in the pool. Methods
      raise it for an id that is not in the pool or is reserved.

    >>> pool = BlockPool(4, reserved=[0])
    >>> first, second = pool.allocate(2)
    >>> pool.publish("full", b"hash of a prefix", first)
    >>> pool.free([first, second])
    >>> pool.num_free, pool.find("full", b"hash of a prefix") == first
    (3, True)
    >>> pool.share(first)
    >>> pool.allocate(2), pool.num_free
    ([2, 3], 0)
    """

    def __init__(self, num_blocks: int, *, reserved: Iterable[int] = (), seed: int | None = None):
        reserved = set(reserved)
        with checking("BlockPool") as problems:
            if require_int(problems, "num_blocks", num_blocks, 1):
                problems.require(
                    reserved <= set(range(num_blocks)),
                    "reserved",
                    f"{sorted(reserved)}",
                    f"within 0..{num_blocks - 1}",
                )
        order = np.arange(num_blocks)
        if seed is not None:
            order = np.random.default_rng(seed).permutation(num_blocks)
        self.num_blocks = num_blocks - len(reserved)
        self._free = collections.OrderedDict.fromkeys(
            id for id in order.tolist() if id not in reserved
        )
        self._holders = dict.fromkeys(self._free, 0)
        self._found: dict[tuple[str, bytes], int] = {}
        self._key_of: dict[int, tuple[str, bytes]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still hand out, including those found by their hash."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that have a holder."""
        return self.num_blocks - len(self._free)

    @property
    def num_published(self) -> int:
        """Blocks that can be found by their hash."""
        return len(self._found)

    def num_holders(self, id: int) -> int:
        """Return the number of holders of a block; 0 if it is free."""
        return self._holders[self._check("num_holders", id)]

    def is_free(self, id: int) -> bool:
        """Return whether a block has no holder."""
        return self._holders[self._check("is_free", id)] == 0

    def is_private(self, id: int) -> bool:
        """Return whether a block has one holder and no hash, so that its holder may write to it."""
        id = self._check("is_private", id)
        return self._holders[id] == 1 and id not in self._key_of

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, evicting those that have been free for longest.

        Raises: `ValueError` if fewer are free (`num_free`); nothing is handed out then.
        """
        with checking("BlockPool.allocate") as problems:
            if require_int(problems, "count", count, 0):
                problems.require(
                    count <= self.num_free, "count", f"{count}", f"at most num_free={self.num_free}"
                )
        ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for id in ids:
            self._holders[id] = 1
            self.unpublish(id)
        return ids

    def share(self, id: int) -> None:
        """Add a holder to a block, whether it is held or free."""
        id = self._check("share", id)
        if not self._holders[id]:
            del self._free[id]
        self._holders[id] += 1

    def free(self, ids: Iterable[int]) -> None:
        """Remove a holder of each block. Pass the end of a sequence first: it is evicted first.

        Raises: `ValueError` at the first id that is not that of a held block; those before it are
          freed.
        """
        for id in ids:
            id = self._require_held("free", id)
            self._holders[id] -= 1
            if not self._holders[id]:
                self._free[id] = None
                if id not in self._key_of:
                    self._free.move_to_end(id, last=False)

    def publish(self, group: str, digest: bytes, id: int) -> None:
        """Make a held block, which must be full, findable by its hash in a group.

        Of several blocks with the same hash the first is found, and a block keeps its first hash.

        Raises: `ValueError` if the block has no holder.
        """
        id = self._require_held("publish", id)
        if (group, digest) not in self._found and id not in self._key_of:
            self._found[group, digest] = id
            self._key_of[id] = (group, digest)

    def find(self, group: str, digest: bytes) -> int | None:
        """Return the block with a hash, held or free, or None. `share` it before `allocate`."""
        return self._found.get((group, digest))

    def unpublish(self, id: int) -> None:
        """Forget the hash of a block, if it has one, because the block will be overwritten."""
        id = self._check("unpublish", id)
        if key := self._key_of.pop(id, None):
            del self._found[key]
            if id in self._free:
                self._free.move_to_end(id, last=False)

    def clear_hashes(self) -> None:
        """Empty the prefix cache: forget every hash."""
        self._found.clear()
        self._key_of.clear()

    def _check(self, where: str, id: int) -> int:
        """Return an id as a Python integer. Raise if no block of the pool has it."""
        if not is_int(id, 0) or int(id) not in self._holders:
            raise ValueError(f"BlockPool.{where}: id: {id!r}, but must be a block of the pool")
        return int(id)

    def _require_held(self, where: str, id: int) -> int:
        id = self._check(where, id)
        if not self._holders[id]:
            raise ValueError(f"BlockPool.{where}: id: {id} is free, but must have a holder")
        return id
