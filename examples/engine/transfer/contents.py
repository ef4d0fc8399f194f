"""The contents of the caches for a prompt, taken from one engine and put into another.

    sender      take     blocks, by id -> rows of tokens        a jitted gather, some blocks a call
    between     rows     [tokens, K, W] of every layer that the next query sees; states
    receiver    begin    blocks of its own pools for those tokens
                put      rows -> blocks, by id                  a jitted scatter, caches donated

Engines exchange tokens, not blocks, so their block sizes, layouts, numbers of blocks and ways to
keep states may differ, and so may their meshes, because rows have all heads (`shares.py`). They
must agree on what a row means (`description.py`). Only a scale per block ties rows to one block
size.

If several processes share an engine's devices (`examples/engine/hosts.py`), all of them take and
put, one call at a time: the first one gathers what the others take, and sends them the rows that
all put.

A prompt of P tokens is transferred after P - 1. The receiver computes the last one, so it chooses
the first token itself, with its own seeds, penalties, grammars and log-probabilities.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Row
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
import jattn.blocks as jb
from examples.engine import hosts
from examples.engine.caches import Caches, Place
from examples.engine.model import Model, StateCache
from examples.engine.request import Sequence
from examples.engine.scheduler import Limits
from examples.engine.transfer.shares import Share, Shares, shares_of

if TYPE_CHECKING:
    from examples.engine.engine import Engine

CHUNK_TOKENS = 256  # that a call takes or puts, roughly; prompts are padded to multiples of it


@dataclasses.dataclass(frozen=True)
class Part:
    """An array of the transferred contents: rows of one tensor of one layer."""

    layer: int
    group: str  # the group of its block ids or state slots
    name: str
    per: str  # what has a row: "token", "block" or "state"
    row: tuple[int, ...]  # a row's shape
    dtype: str
    window: int | None  # keys that a query sees

    def span(self, num_tokens: int, block_size: int, align: int) -> tuple[int, int]:
        """Return the range of rows that the query after `num_tokens` tokens sees.

        Args:
          num_tokens: n; the query's position.
          block_size: tokens per block, for rows per block.
          align: the first token is a multiple of it.
        """
        if self.per == "state":
            return 0, 1
        first = 0 if self.window is None else max(0, num_tokens - self.window + 1)
        first -= first % align
        if self.per == "block":
            return first // block_size, -(-num_tokens // block_size)
        return first, num_tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Contents:
    """The contents of the caches for the first tokens of a prompt, on the host."""

    num_tokens: int
    arrays: tuple[np.ndarray, ...]  # of `Transfer.parts`, in their order

    @property
    def nbytes(self) -> int:
        """The size of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def checksum(self) -> int:
        """CRC-32 of all bytes, in order."""
        return functools.reduce(lambda crc, x: zlib.crc32(x, crc), self.bytes(), 0)

    def bytes(self) -> Iterator[memoryview]:
        """Yield the bytes of each array, which can be written to."""
        for array in self.arrays:
            yield memoryview(array.reshape(-1).view(np.uint8))


@dataclasses.dataclass(frozen=True, eq=False)
class Taken:
    """The result of a jitted gather from the caches, which may still be running."""

    transfer: Transfer
    num_tokens: int
    chunks: Mapping[str, list[tuple[jax.Array, ...]]]  # by group

    def fetched(self) -> Contents:
        """Copy the contents to the host, without rows that no later query sees.

        This waits for the device.
        """
        arrays: dict[Part, np.ndarray] = {}
        for name, chunks in self.chunks.items():
            parts = self.transfer.parts_of(name)
            for part, *some in zip(parts, *chunks, strict=True):
                rows = [self.transfer.whole(part, array) for array in some]
                whole = np.concatenate(rows) if len(rows) > 1 else rows[0]
                first, end = self.transfer.span(part, self.num_tokens)
                skipped = self.transfer.first_row(part, self.num_tokens)
                arrays[part] = np.ascontiguousarray(whole[first - skipped : end - skipped])
        return Contents(self.num_tokens, tuple(arrays[part] for part in self.transfer.parts))


class Transfer:
    """Takes contents from an engine's caches, and puts contents into them."""

    def __init__(self, limits: Limits, caches: Caches, shares: Shares | None = None):
        """Read the caches of an engine; nothing is compiled.

        Args:
          limits: the engine's limits.
          caches: its caches, or others with their shapes.
          shares: its devices' shares; None: there is a single device.
        """
        found = parts_of(caches, shares)
        self.parts = tuple(part for part, _ in found)
        self._share_of = dict(found)
        self._shares = shares
        self._has_others = shares is not None and shares.mesh.devices.is_multi_process
        self._programs: dict[tuple[Callable, str], Callable] = {}
        self.block_size = limits.block_size
        self._windows = {g.name: g.window for g in limits.groups}
        self._states = {g.name for g in limits.groups if g.is_state}
        # A scale per block covers the block from its first token on.
        self.align = limits.block_size if any(part.per == "block" for part in self.parts) else 1
        self._num_ids = max(1, CHUNK_TOKENS // limits.block_size)

    def parts_of(self, group: str) -> list[Part]:
        """Return the parts of a group's layers."""
        return [part for part in self.parts if part.group == group]

    def span(self, part: Part, num_tokens: int) -> tuple[int, int]:
        """Return `Part.span` with this engine's blocks."""
        return part.span(num_tokens, self.block_size, self.align)

    def first_row(self, part: Part, num_tokens: int) -> int:
        """Return the first row of the block that has a part's first token."""
        if part.per == "state":
            return 0
        block = self.span(part, num_tokens)[0]
        if part.per == "token":
            block //= self.block_size
        return block if part.per == "block" else block * self.block_size

    def shapes(self, num_tokens: int) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Return the shapes and dtypes of the arrays for some tokens' contents."""
        found = []
        for part in self.parts:
            first, end = self.span(part, num_tokens)
            found.append(((end - first, *part.row), jnp.dtype(part.dtype)))
        return found

    def nbytes(self, num_tokens: int) -> int:
        """Return the size of some tokens' contents."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes(num_tokens))

    def empty(self, num_tokens: int) -> Contents:
        """Allocate contents for some tokens, to be written."""
        arrays = tuple(np.empty(*one) for one in self.shapes(num_tokens))
        return Contents(num_tokens, arrays)

    @property
    def deals_blocks(self) -> bool:
        """Whether the tokens of a block with one scale are spread over several devices."""
        found = self._share_of.items()
        return any(share and share.context > 1 and part.per == "block" for part, share in found)

    def set_scales(self, caches: Caches) -> list[list[float]]:
        """Return the scales per head or cache, which must be equal for words to mean the same."""
        found = []
        for place in _in_order(caches):
            pair = caches.pools[place.pool]
            for cache in pair if isinstance(pair, tuple) else ():
                if cache is None or not cache.format.takes_scale or cache.scale is None:
                    continue
                scale = hosts.gathered(cache.scale)
                if self._shares is not None and scale.ndim:
                    devices = scale.reshape(self._shares.mesh.num_parts, 1, -1)
                    share = self._shares.of_rows(place.layer, devices.shape[2:])
                    scale = dataclasses.replace(share, context=1).join(devices)
                found.append(scale.reshape(-1).astype(float).tolist())
        return found

    def take(
        self, caches: Caches, sequence: Sequence, followers: hosts.Followers | None = None
    ) -> Taken:
        """Take the contents of the caches for the tokens that a sequence has computed.

        Args:
          caches: the engine's caches.
          sequence: one of the engine's sequences.
          followers: the processes that have other parts of the caches, if there are any.
        """
        chunks: dict[str, list[tuple[jax.Array, ...]]] = {}
        for name in self._windows:
            chunks[name] = []
            for ids in self._ids(sequence, name, sequence.num_computed):
                if followers:
                    followers.tell(take_there, name, ids)
                chunks[name].append(self.take_some(caches, name, ids))
        return Taken(self, sequence.num_computed, chunks)

    def put(
        self, caches: Caches, sequence: Sequence, followers: hosts.Followers | None = None
    ) -> Caches:
        """Write a sequence's contents to its blocks (from `Sequence.begin_at`), in place.

        The caches are donated. The sequence drops its contents: if it is preempted, it starts over
        with its tokens.

        Args:
          caches: the engine's caches.
          sequence: one of the engine's sequences, with contents.
          followers: the processes that have other parts of the caches, if there are any.
        """
        contents, sequence.contents = sequence.contents, None
        assert contents is not None
        n = contents.num_tokens
        given = dict(zip(self.parts, contents.arrays, strict=True))
        for name in self._windows:
            calls = list(self._ids(sequence, name, n))
            rows = [self._padded(part, given[part], n, len(calls)) for part in self.parts_of(name)]
            for i, ids in enumerate(calls):
                if followers:
                    followers.tell(put_there, name, ids)
                caches = self.put_some(caches, name, ids, [array[i] for array in rows])
        return caches

    def take_some(self, caches: Caches, group: str, ids: np.ndarray) -> tuple[jax.Array, ...]:
        """Take one call's worth of a group: rows of blocks, or a state.

        Processes that share the devices must call this together; each gets the whole result.
        """
        found = self._program(take_states if group in self._states else take_rows, group, caches)(
            caches, ids
        )
        if not self._has_others:
            return found
        jax.block_until_ready(found)  # before other collectives
        return tuple(array.addressable_data(0) for array in found)

    def put_some(
        self, caches: Caches, group: str, ids: np.ndarray, rows: Row[np.ndarray] | None = None
    ) -> Caches:
        """Write one call's worth of a group, in place. The caches are donated.

        Processes that share the devices must call this together. The first one's rows are written.

        Args:
          caches: the engine's caches.
          group: the group.
          ids: int32 [n], of blocks, or of one state's slot.
          rows: whole rows, [n * S, ...], [n, ...] or [1, ...], of each part of the group; None: the
            first process has them.
        """
        parts = self.parts_of(group)
        if self._has_others:
            rows = self._sent(parts, len(ids), rows)
        assert rows is not None
        dealt = tuple(self._dealt(part, array) for part, array in zip(parts, rows, strict=True))
        program = self._program(put_states if group in self._states else put_rows, group, caches)
        caches = program(caches, ids, dealt)
        return jax.block_until_ready(caches) if self._has_others else caches

    def _sent(self, parts: Row[Part], count: int, rows: Row[np.ndarray] | None) -> list[np.ndarray]:
        """Send the first process's rows of one call to all processes."""
        shapes = [(count * self._rows_of(part), *part.row) for part in parts]
        dtypes = [jnp.dtype(part.dtype) for part in parts]
        sizes = [math.prod(s) * dtype.itemsize for s, dtype in zip(shapes, dtypes, strict=True)]
        data = b"".join(np.ascontiguousarray(array).tobytes() for array in rows or ())
        data, found = hosts.broadcast(data, sum(sizes)), []
        for shape, dtype, size in zip(shapes, dtypes, sizes, strict=True):
            found.append(np.frombuffer(data[:size], dtype).reshape(shape))
            data = data[size:]
        return found

    def whole(self, part: Part, found: jax.Array) -> np.ndarray:
        """Return rows on the host, as a single device would have taken them."""
        share = self._share_of[part]
        return np.asarray(found) if share is None else share.join(np.asarray(found))

    def _dealt(self, part: Part, rows: np.ndarray) -> np.ndarray | jax.Array:
        share = self._share_of[part]
        if share is None:
            return rows
        assert self._shares is not None
        return self._shares.mesh.spread(share.deal(rows))

    def _program(self, f: Callable, group: str, caches: Caches) -> Callable:
        """Return one of the functions below for a group, on all devices."""
        run = functools.partial(f, group=group)
        if self._shares is None:
            return run
        if (f, group) not in self._programs:
            mesh, puts = self._shares.mesh, f in (put_rows, put_states)
            on_all = mesh.put(run, caches) if puts else mesh.take(run, caches)
            everywhere = NamedSharding(mesh.devices, P())
            self._programs[f, group] = jax.jit(
                on_all,
                donate_argnums=0 if puts else (),
                out_shardings=everywhere if self._has_others and not puts else None,
            )
        return self._programs[f, group]

    def check(self, contents: Contents, prompt: Row[int]) -> None:
        """Check that contents cover a prompt except its last token, and fit these caches.

        Raises:
          ValueError: they have the wrong number of tokens, or wrong shapes or dtypes.
        """
        found = [(array.shape, array.dtype) for array in contents.arrays]
        n = len(prompt) - 1
        if n < 1 or contents.num_tokens != n or found != self.shapes(n):
            raise ValueError(
                f"contents: {contents.num_tokens} tokens in {len(found)} arrays of "
                f"{contents.nbytes} bytes, but must be {n} tokens in arrays that fit these caches"
            )

    def _ids(self, sequence: Sequence, group: str, num_tokens: int) -> Iterator[np.ndarray]:
        """Yield the ids of what the next query sees, a call's worth at a time."""
        if group in self._states:
            yield np.array([sequence.states[group].read], np.int32)
            return
        table = sequence.tables[group]
        ids = table.blocks[table.first_seen(num_tokens) : -(-num_tokens // self.block_size)]
        for start in range(0, len(ids), self._num_ids):
            some = np.full(self._num_ids, -1, np.int32)
            chosen = ids[start : start + self._num_ids]
            some[: len(chosen)] = chosen
            yield some

    def _rows_of(self, part: Part) -> int:
        """Return how many rows of a part one id has."""
        return self.block_size if part.per == "token" else 1

    def _padded(self, part: Part, rows: np.ndarray, num_tokens: int, calls: int) -> np.ndarray:
        """Pad a part's rows to whole ids, [calls, rows of a call, ...]."""
        if part.per == "state":
            return rows[None]
        count = self._num_ids * self._rows_of(part)
        whole = np.zeros((calls * count, *part.row), rows.dtype)
        start = self.span(part, num_tokens)[0] - self.first_row(part, num_tokens)
        whole[start : start + len(rows)] = rows
        return whole.reshape(calls, count, *part.row)


# -- in the other processes ------------------------------------------------------------------------


def take_there(engine: Engine, group: str, ids: np.ndarray) -> None:
    """Run another process's part of `Transfer.take`."""
    engine.transfer.take_some(engine.caches, group, ids)


def put_there(engine: Engine, group: str, ids: np.ndarray) -> None:
    """Run another process's part of `Transfer.put`."""
    engine.caches = engine.transfer.put_some(engine.caches, group, ids)


# -- on the device ---------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="group")
def take_rows(caches: Caches, ids: jax.Array, group: str) -> tuple[jax.Array, ...]:
    """Return rows of the tokens in blocks int32 [n] (-1 pads: zeros), of a group's layers.

    Returns: an array [n * S, K, ...] for each `Part` of the group that has a row per token, and
      [n, K] for a scale per block.
    """
    found: list[jax.Array] = []
    for place in _in_order(caches, group):
        for cache in jb.take_blocks(caches.pools[place.pool], ids):
            found += [_rows(array, cache.kv_layout) for _, array in _growing(cache)]
    return tuple(found)


@functools.partial(jax.jit, static_argnames="group", donate_argnums=0)
def put_rows(caches: Caches, ids: jax.Array, rows: tuple[jax.Array, ...], group: str) -> Caches:
    """Write what `take_rows` returns into blocks int32 [n] (-1: nowhere), in place."""
    pools, coming = list(caches.pools), iter(rows)
    for place in _in_order(caches, group):
        pool = pools[place.pool]
        blocks = tuple(
            cache if cache is None else _blocks(cache, coming, len(ids)) for cache in pool
        )
        pools[place.pool] = jb.put_blocks(pool, ids, blocks)
    return caches.with_pools(pools)


@functools.partial(jax.jit, static_argnames="group")
def take_states(caches: Caches, slot: jax.Array, group: str) -> tuple[jax.Array, ...]:
    """Return the states in a slot int32 [1]: an array [1, ...] for each `Part` of the group."""
    found = (caches.states_at(place.layer, slot) for place in _in_order(caches, group))
    return tuple(array for states in found for array in states)


@functools.partial(jax.jit, static_argnames="group", donate_argnums=0)
def put_states(
    caches: Caches, slot: jax.Array, states: tuple[jax.Array, ...], group: str
) -> Caches:
    """Write what `take_states` returns into a slot int32 [1], in place."""
    coming = iter(states)
    for place in _in_order(caches, group):
        layer_states = [next(coming) for _ in place.cache.layout.shapes]
        caches = caches.with_states_at(place.layer, slot, layer_states)
    return caches


def make_transfer(limits: Limits, caches: Caches, model: Model) -> Transfer | None:
    """Make an engine's `Transfer`, or None if contents cannot be moved.

    They cannot if the tokens of a block with one scale are spread over several devices.
    """
    transfer = Transfer(limits, caches, shares_of(model))
    return None if transfer.deals_blocks else transfer


def parts_of(caches: Caches, shares: Shares | None = None) -> list[tuple[Part, Share | None]]:
    """Return the parts of every layer's cache, each with its share per device."""
    parts: list[tuple[Part, Share | None]] = []
    for place in _in_order(caches):
        where = place.layer, place.group
        if isinstance(place.cache, StateCache):
            layout = place.cache.layout
            for i, (shape, dtype) in enumerate(zip(layout.shapes, layout.dtypes, strict=True)):
                share = shares and shares.of_states(place.layer, i)
                row = share.whole.shape if share else tuple(shape)
                parts.append((Part(*where, f"state {i}", "state", row, dtype, None), share))
            continue
        for which, cache in zip(("key", "value"), caches.pools[place.pool], strict=True):
            for name, array in _growing(cache):
                per = "block" if array.ndim == 2 else "token"
                heads = array.shape[2 if cache.kv_layout == "NHD" and per == "token" else 1]
                row, window = (heads, *array.shape[3:]), place.cache.window
                share = shares and shares.of_rows(place.layer, row)
                row = share.whole.shape if share else row
                part = Part(*where, f"{which} {name}", per, row, str(array.dtype), window)
                parts.append((part, share))
    return parts


def _in_order(caches: Caches, group: str | None = None) -> list[Place]:
    places = [place for place in caches.places if group in (None, place.group)]
    return sorted(places, key=lambda place: place.layer)


def _growing(cache: jattn.KVArray | None) -> list[tuple[str, jax.Array]]:
    """Return the arrays that grow with a pool: words, and their scales and zero points."""
    if cache is None:  # the values are in the keys
        return []
    named = {"words": cache.data, **cache.quant_params._asdict()}
    return [(name, array) for name, array in named.items() if array is not None]


def _rows(array: jax.Array, kv_layout: str) -> jax.Array:
    """Reshape blocks [n, K, S, ...] or [n, S, K, ...] to tokens [n * S, K, ...]; keep [n, K]."""
    if array.ndim == 2:
        return array
    array = array if kv_layout == "NHD" else array.swapaxes(1, 2)
    return array.reshape(-1, *array.shape[2:])


def _blocks(cache: jattn.KVArray, coming: Iterator[jax.Array], count: int) -> jattn.KVArray:
    """Reshape the next rows to a cache's blocks, [n, S, K, ...]."""
    changes = {}
    for name, array in _growing(cache):
        rows = next(coming)
        if array.ndim > 2:
            rows = rows.reshape(count, -1, *rows.shape[1:])
        changes["data" if name == "words" else name] = rows
    return cache.replace(**changes, kv_layout="NHD")
