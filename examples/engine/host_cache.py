"""Host memory as a second tier of the prefix cache.

    device's pool    published blocks without a holder; the one free for longest is evicted
         |  the bytes of an evicted block, before the step that overwrites them
         v
    host memory      bytes by group and hash; the least recently used are dropped
         |  for a prompt with this prefix: into a block of the device's pool
         v
    device's pool    found as if it had never left

A block's bytes are its keys and values in all layers of its group, words and scales, unconverted;
likewise a checkpointed recurrent state. A few blocks move at a time, in two small programs per
group: one reads blocks, the other writes blocks into donated caches, so nothing the size of a pool
is copied. A block that goes back also stays in host memory, so evicting it again costs nothing. On
a mesh, a block consists of each device's part of it.

If several processes share the mesh, each keeps the blocks of its own devices. The first one
decides: before a step it says which blocks move and which were dropped (`Moves`), and all do the
same. Until then the others keep dropped blocks: up to as many as one step evicts.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Row
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import jattn.blocks as jb
from examples.engine.caches import Caches
from examples.engine.mesh import DeviceMesh
from examples.engine.model import Model

if TYPE_CHECKING:
    from examples.engine.request import Sequence

AT_A_TIME = 8  # blocks that one call moves
IN_HOST_MEMORY = -1  # instead of an id, for a block that is not on the device
Key = tuple[str, bytes]  # group, hash
Rows = list[np.ndarray]  # one block: its row of every array of the group


@dataclasses.dataclass(frozen=True)
class Moves:
    """The blocks to move before a step."""

    leaving: dict[str, list[tuple[bytes, int]]]  # by group: hashes and ids of blocks to read
    coming: dict[str, dict[int, bytes]]  # by group and id: hashes of blocks to write
    dropped: list[Key]  # since the last moves


class TieredPool(jb.BlockPool):
    """A pool whose evicted blocks can still be found, as `IN_HOST_MEMORY`."""

    def __init__(self, num_blocks: int, seed: int, host: HostCache):
        super().__init__(num_blocks, seed=seed)
        self._host = host

    def find(self, group: str, digest: bytes) -> int | None:
        """Return the block with a hash, `IN_HOST_MEMORY`, or None."""
        found = super().find(group, digest)
        return IN_HOST_MEMORY if found is None and (group, digest) in self._host else found

    def is_free(self, id: int) -> bool:
        """Whether a block has no holder, or has yet to be allocated."""
        return id == IN_HOST_MEMORY or super().is_free(id)

    def unpublish(self, id: int) -> None:
        """Evict a published block; called for every block that is allocated."""
        if key := self._key_of.get(id):
            self._host.evict(*key, id)
        super().unpublish(id)


class HostCache:
    """Blocks in host memory, and blocks in transit."""

    def __init__(self, caches: Caches, max_bytes: int, mesh: DeviceMesh | None = None):
        """Compile the programs that move blocks.

        Args:
          caches: the engine's caches, for their shapes.
          max_bytes: the most bytes of all blocks kept here.
          mesh: the devices that share the caches; None: one device has them.
        """
        self.max_bytes, self.used_bytes = max_bytes, 0
        self.num_stored = self.num_returned = self.num_dropped = 0
        self._kept: collections.OrderedDict[Key, Rows] = collections.OrderedDict()
        self._leaving: dict[str, list[tuple[bytes, int]]] = {}
        self._coming: dict[str, dict[int, bytes]] = {}
        self._dropped: list[Key] = []
        self._read: list[tuple[str, list[bytes], Any]] = []  # read by the device, not yet fetched
        self._programs = {group: _Programs.of(caches, group, mesh) for group in _groups(caches)}
        shared = mesh is not None and mesh.devices.is_multi_process
        self._decides = not shared or jax.process_index() == 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def pool(self, num_blocks: int, seed: int) -> TieredPool:
        """Make a pool whose evicted blocks come here."""
        return TieredPool(num_blocks, seed, self)

    def evict(self, group: str, digest: bytes, id: int) -> None:
        """Schedule a block to be saved, since it is about to be overwritten."""
        self._coming.get(group, {}).pop(id, None)  # it may not even have arrived yet
        if (group, digest) in self._kept:
            self._kept.move_to_end((group, digest))
        else:
            self._leaving.setdefault(group, []).append((digest, id))

    def bring_back(self, sequence: Sequence, num_blocks: int, blocks: dict, states: dict) -> None:
        """Allocate device blocks for the part of a sequence's prefix that is only here.

        Args:
          sequence: a sequence being admitted, with free blocks for all its tokens.
          num_blocks: how many of its full blocks are not computed again.
          blocks, states: by group, the ids of the last of them; `IN_HOST_MEMORY` is replaced. All
            can be found from now on, and must be shared before others are allocated.
        """
        tables = {name: (sequence.tables[name].pool, ids) for name, ids in blocks.items()}
        tables |= {name: (sequence.states[name].pool, [id]) for name, id in states.items()}
        if not any(IN_HOST_MEMORY in ids for _, ids in tables.values()):
            return
        for pool, ids in tables.values():  # held, so that none is evicted for another
            for id in ids:
                if id != IN_HOST_MEMORY:
                    pool.share(id)
        for name, (pool, ids) in tables.items():
            digests = sequence.hashes[num_blocks - len(ids) : num_blocks]
            for i, (id, digest) in enumerate(zip(ids, digests, strict=True)):
                if id == IN_HOST_MEMORY:
                    (ids[i],) = pool.allocate(1)
                    pool.publish(name, digest, ids[i])
                    self._promise(name, digest, ids[i])
        for pool, ids in tables.values():
            pool.free(reversed(ids))
        states.update({name: tables[name][1][0] for name in states})

    def moves(self) -> Moves | None:
        """Return, and clear, the moves before the next step; None if there are none."""
        if not (self._leaving or self._coming):
            return None
        moves = Moves(self._leaving, self._coming, self._dropped)
        self._leaving, self._coming, self._dropped = {}, {}, []
        return moves

    def move(self, caches: Caches, moves: Moves) -> Caches:
        """Read leaving blocks and write coming ones, in every process. Donates the caches."""
        for key in moves.dropped:
            self._drop(key)
        for group, blocks in moves.leaving.items():
            for some in _batches(blocks):
                ids = _padded([id for _, id in some])
                read = self._programs[group].take(caches, ids)
                self._read.append((group, [digest for digest, _ in some], read))
        for group, coming in moves.coming.items():
            program = self._programs[group]
            for some in _batches(list(coming.items())):
                ids = _padded([id for id, _ in some])
                rows = [self._kept[group, digest] for _, digest in some]
                caches = program.put(caches, ids, program.stacked(rows))
        return caches

    def fetch(self) -> None:
        """Fetch the blocks that were read, while the next step runs; drop the oldest if too many.

        Runs in every process; the first one drops blocks, and tells the others with the next moves.
        """
        for group, digests, read in self._read:
            rows = self._programs[group].rows(read)
            for i, digest in enumerate(digests):
                block = [array[i].copy() for array in rows]
                self._kept[group, digest] = block
                self.used_bytes += _nbytes(block)
                self.num_stored += 1
                while self._decides and self.used_bytes > self.max_bytes:
                    oldest = next(iter(self._kept))
                    self._drop(oldest)
                    self._dropped.append(oldest)
        self._read = []

    def forget_moves(self) -> None:
        """Cancel all blocks in transit, since the step has failed."""
        self._leaving, self._coming, self._read, self._dropped = {}, {}, [], []

    def clear(self) -> None:
        """Drop all blocks."""
        self.forget_moves()
        self._kept.clear()
        self.used_bytes = self.num_stored = self.num_returned = self.num_dropped = 0

    def _promise(self, group: str, digest: bytes, id: int) -> None:
        """Schedule a block to be in the device's pool before the next step."""
        self._kept.move_to_end((group, digest))
        self._coming.setdefault(group, {})[id] = digest
        self.num_returned += 1

    def _drop(self, key: Key) -> None:
        if (rows := self._kept.pop(key, None)) is not None:  # None: it was dropped already
            self.used_bytes -= _nbytes(rows)
            self.num_dropped += 1


def make_host_cache(model: Model, caches: Caches, max_bytes: int) -> HostCache | None:
    """Make a host cache for a model, or None for 0 bytes."""
    return HostCache(caches, max_bytes, model.mesh) if max_bytes else None


@dataclasses.dataclass(frozen=True)
class _Programs:
    """The programs that move a group's blocks: `take(caches, ids)`, `put(caches, ids, blocks)`."""

    take: jax.stages.Compiled
    put: jax.stages.Compiled
    tree: Any  # the structure of what they move
    mesh: DeviceMesh | None

    @classmethod
    def of(cls, caches: Caches, group: str, mesh: DeviceMesh | None) -> _Programs:
        pools = sorted({place.pool for place in caches.places if place.group == group})

        def take(caches: Caches, ids: jax.Array) -> list[Any]:
            return [jb.take_blocks(_arrays(caches.pools[i]), ids) for i in pools]

        def put(caches: Caches, ids: jax.Array, blocks: list[Any]) -> Caches:
            written = list(caches.pools)
            for i, new in zip(pools, blocks, strict=True):
                arrays = jb.put_blocks(_arrays(written[i]), ids, new)
                if isinstance(written[i], jb.StateSlots):
                    arrays = dataclasses.replace(written[i], tensors=arrays)
                written[i] = arrays
            return caches.with_pools(written)

        ids = _padded([])
        take_all = take if mesh is None else mesh.take(take, caches)
        put_all = put if mesh is None else mesh.put(put, caches)
        taking = jax.jit(take_all).lower(caches, ids).compile()
        blocks = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            taking.out_info,
            taking.output_shardings,
        )
        putting = jax.jit(put_all, donate_argnums=0).lower(caches, ids, blocks).compile()
        return cls(taking, putting, jax.tree.structure(blocks), mesh)

    def rows(self, taken: Any) -> Rows:
        """Fetch the result of `take` to the host; the first axis counts blocks."""
        leaves = jax.tree.leaves(taken)
        if self.mesh is None:
            return [np.asarray(leaf) for leaf in leaves]
        return [self.mesh.local_parts(leaf).swapaxes(0, 1) for leaf in leaves]

    def stacked(self, blocks: Row[Rows]) -> Any:
        """Stack some blocks as `put` takes them."""
        filled: list[Any] = []
        for rows in zip(*blocks, strict=True):  # the rows of one array, for every block
            array = np.zeros((AT_A_TIME, *rows[0].shape), rows[0].dtype)
            array[: len(rows)] = rows
            filled.append(
                array if self.mesh is None else self.mesh.spread_local(array.swapaxes(0, 1))
            )
        return jax.tree.unflatten(self.tree, filled)


def _groups(caches: Caches) -> Iterable[str]:
    return dict.fromkeys(place.group for place in caches.places)


def _arrays(pool: Any) -> Any:
    """Return the arrays that have a row for each id."""
    return pool.tensors if isinstance(pool, jb.StateSlots) else pool


def _batches(items: list) -> Iterable[list]:
    return (items[i : i + AT_A_TIME] for i in range(0, len(items), AT_A_TIME))


def _padded(ids: list[int]) -> np.ndarray:
    return np.array(ids + [-1] * (AT_A_TIME - len(ids)), np.int32)


def _nbytes(rows: Rows) -> int:
    return sum(row.nbytes for row in rows)
