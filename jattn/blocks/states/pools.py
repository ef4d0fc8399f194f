"""Recurrent states in memory: in pages of a KV pool, or in separate slots.

Two typed pools are the default: KV blocks in a KV cache, states in `StateSlots`, one array per
tensor. Nothing is padded and nothing is converted.

`PagePool` lets states live in the pages of a KV cache instead, so that one free list serves both.
A block id names a page: its words of K and its words of V. A state is a run of words,

    state = conv words, then recurrent words,    split between K's and V's words as D : V,

over the concatenated pages of a row of page ids; several states may share these pages, one after
another. Reading gathers the words and bitcasts only those: the pool itself is never
converted, and it is the array that `jattn.paged_attention` reads through a `KVArray`.

Pages hold whatever was last written. Call `zero_pages` when a page changes its use: many bytes of a
float32 state would be NaN if they were read as bfloat16 keys.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jattn import pytrees
from jattn.blocks.arguments import Integers, as_int32, inside_or_end, noted, require_shape
from jattn.blocks.states.layouts import StateLayout
from jattn.blocks.states.words import (
    POOL_WORDS,
    flatten_rows,
    from_words,
    slot_dtype,
    to_words,
    unsigned,
)
from jattn.checks import checking, describe
from jattn.formats.rounding import bitcast
from jattn.integers import INT32_MAX, ceil_div, require_int


@pytrees.register(StateLayout)
@dataclasses.dataclass(frozen=True)
class PagePool:
    """The words of a KV cache, whose pages serve attention blocks or recurrent states. A pytree.

    Attributes:
      parts: arrays [N, ...] of one word dtype: `(key_cache.data, value_cache.data)`, or one array
        for MLA. Give them back to a `KVArray` to attend.
      layout: static, the tensors of a state.

    Raises: `ValueError` for parts of different N or dtype, dtypes that do not move as words, and
      states that are empty or not whole words.

    >>> words = tuple(jnp.zeros((8, 1, 16, 64), jnp.uint16) for _ in range(2))  # of keys, values
    >>> pool = PagePool(words, StateLayout(((2, 32, 32),), ("float32",)))
    >>> pool.page_bytes, pool.layout.nbytes, pool.pages_for(1), pool.states_in(5)
    (4096, 8192, 2, 2)
    """

    parts: tuple[jax.Array, ...]
    layout: StateLayout = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        with checking("PagePool") as problems:
            if not problems.require(bool(self.parts), "parts", "none", "one array or more"):
                return
            first = self.parts[0]
            for i, part in enumerate(self.parts):
                problems.require(
                    part.dtype.name in POOL_WORDS and part.ndim >= 2,
                    f"parts[{i}]",
                    describe(part),
                    f"[N, ...] of words, one of {list(POOL_WORDS)} (a KVArray's data)",
                )
                problems.require(
                    part.dtype == first.dtype and part.shape[:1] == first.shape[:1],
                    f"parts[{i}]",
                    describe(part),
                    f"of the dtype and the blocks of parts[0], {describe(first)}",
                )
            problems.require(
                self.layout.nbytes > 0, "layout", f"{self.layout}", "a state of one byte or more"
            )
            word = first.dtype.itemsize
            for i, nbytes in enumerate(self.layout.tensor_bytes):
                problems.require(
                    nbytes % word == 0,
                    f"layout.shapes[{i}]",
                    f"{nbytes} bytes",
                    f"a multiple of the pool's words of {word} bytes",
                )

    @property
    def num_pages(self) -> int:
        """N, pages in the pool."""
        return self.parts[0].shape[0]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: of one block's K and V."""
        return sum(self._part_words) * self.parts[0].dtype.itemsize

    def states_in(self, num_pages: int) -> int:
        """Return how many states fit in `num_pages` pages, one after another."""
        return num_pages * self._units_per_page // self._units_per_state

    def pages_for(self, num_states: int = 1) -> int:
        """Return how many pages `num_states` states need, one after another."""
        return ceil_div(num_states * self._units_per_state, self._units_per_page)

    # A unit is the smallest share of a page with whole words of every part in their ratio.
    @property
    def _part_words(self) -> tuple[int, ...]:
        return tuple(math.prod(part.shape[1:]) for part in self.parts)

    @property
    def _units_per_page(self) -> int:
        return math.gcd(*self._part_words)

    @property
    def _unit_words(self) -> tuple[int, ...]:
        return tuple(words // self._units_per_page for words in self._part_words)

    @property
    def _units_per_state(self) -> int:
        words = self.layout.nbytes // self.parts[0].dtype.itemsize
        return ceil_div(words, sum(self._unit_words))


@pytrees.register(StateLayout)
@dataclasses.dataclass(frozen=True)
class StateSlots:
    """States in slots that are separate from the KV pool. A pytree.

    Attributes:
      tensors: one array [num_slots, *shape] per tensor of the layout. Dtypes below 32 bits are
        stored as unsigned words of their size, others unchanged.
      layout: static, the tensors of a state.

    Raises: `ValueError` if the tensors do not fit the layout.

    >>> slots = init_state_slots(StateLayout(((3, 8),), ("bfloat16",)), num_slots=5)
    >>> slots.num_slots, slots.tensors[0].dtype.name
    (5, 'uint16')
    """

    tensors: tuple[jax.Array, ...]
    layout: StateLayout = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))
        with checking("StateSlots") as problems:
            problems.require(
                len(self.tensors) == len(self.layout.shapes),
                "tensors",
                f"{len(self.tensors)} arrays",
                f"one per tensor of the layout, {len(self.layout.shapes)}",
            )
            for i, (tensor, shape, dtype) in enumerate(
                zip(self.tensors, self.layout.shapes, self.layout.dtypes, strict=False)
            ):
                expected = (self.tensors[0].shape[0], *shape)
                problems.require(
                    tensor.shape == expected and tensor.dtype == slot_dtype(dtype),
                    f"tensors[{i}]",
                    describe(tensor),
                    f"{slot_dtype(dtype).name}{list(expected)}",
                )

    @property
    def num_slots(self) -> int:
        """The number of slots."""
        return self.tensors[0].shape[0]


Pool = TypeVar("Pool", PagePool, StateSlots)


def init_state_slots(layout: StateLayout, num_slots: int) -> StateSlots:
    """Make zeroed slots for `num_slots` states.

    Args:
      layout: the tensors of a state.
      num_slots: states to make room for.

    Returns: `StateSlots`.
    Raises: `ValueError` if `num_slots` is below 1.

    >>> layout = StateLayout(((3, 8), (2, 4, 4)), ("bfloat16", "float32"))
    >>> [tensor.shape for tensor in init_state_slots(layout, 5).tensors]
    [(5, 3, 8), (5, 2, 4, 4)]
    """
    with checking("init_state_slots") as problems:
        require_int(problems, "num_slots", num_slots, 1)
    tensors = tuple(
        jnp.zeros((num_slots, *shape), slot_dtype(dtype))
        for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    )
    return StateSlots(tensors, layout)


def read_state(
    pool: PagePool | StateSlots, ids: Integers, *, index: Integers | None = None
) -> tuple[jax.Array, ...]:
    """Read the states of B sequences.

    Args:
      pool: a `PagePool` or `StateSlots`.
      ids: for a `PagePool`, page ids int32 [B, n]: the pages of each state, in order. For
        `StateSlots`, slots int32 [B]. An id outside the pool (-1 pads) reads as zeros.
      index: int32 [B] or None: if the n pages hold several states, which of them to read, from 0 to
        `pool.states_in(n) - 1`; any other is outside the pool. None: the pages hold one state.

    Returns: one array [B, *shape] per tensor of the layout, of its dtype.
    Raises: `ValueError` for wrong dtypes or shapes, too few pages for a state, an `index` with
      `StateSlots`, or a pool too large for `index` to address in int32.

    >>> slots = init_state_slots(StateLayout(((2,), (3,)), ("bfloat16", "float32")), num_slots=4)
    >>> slots = write_state(slots, [2], [jnp.ones((1, 2), jnp.bfloat16), jnp.ones((1, 3))])
    >>> conv, state = read_state(slots, [2, -1])
    >>> conv.dtype.name, state.tolist()
    ('bfloat16', [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    """
    ids, index = _check_ids("read_state", pool, ids, index)
    return _read(pool, ids, index)


def write_state(
    pool: PagePool | StateSlots,
    ids: Integers,
    states: Sequence[np.ndarray | jax.Array],
    *,
    index: Integers | None = None,
) -> PagePool | StateSlots:
    """Write the states of B sequences where `read_state` finds them.

    Writes in place when the pool is donated, and allocates nothing the size of the pool. Pages and
    slots must differ between sequences, except that states of different `index` may share pages. An
    id outside the pool (-1 pads) writes nothing. Without `index`, the rest of a state's last page
    is zeroed.

    Args:
      pool, ids, index: as for `read_state`.
      states: one array [B, *shape] per tensor of the layout, of its dtype.

    Returns: the pool.
    Raises: `ValueError` as `read_state`, and for states that do not fit the layout.

    >>> layout = StateLayout(((2, 8),), ("float32",))
    >>> pool = PagePool((jnp.zeros((4, 32), jnp.uint32),), layout)  # two states fit in a page
    >>> pool = write_state(pool, [[3], [3]], [jnp.ones((2, 2, 8))], index=[0, 1])
    >>> read_state(pool, [[3]], index=[1])[0].shape
    (1, 2, 8)
    """
    ids, index = _check_ids("write_state", pool, ids, index)
    layout = pool.layout
    with checking("write_state") as problems:
        problems.require(
            len(states) == len(layout.shapes),
            "states",
            f"{len(states)} arrays",
            f"one per tensor of the layout, {len(layout.shapes)}",
        )
        for i, (x, shape, dtype) in enumerate(
            zip(states, layout.shapes, layout.dtypes, strict=False)
        ):
            problems.require(
                jnp.shape(x) == (ids.shape[0], *shape) and jnp.asarray(x).dtype.name == dtype,
                f"states[{i}]",
                describe(x),
                f"{dtype}{[ids.shape[0], *shape]}",
            )
    return _write(pool, ids, tuple(map(jnp.asarray, states)), index)


def zero_pages(pool: Pool, ids: Integers) -> Pool:
    """Zero pages or slots before they change their use.

    Zero bytes read as 0 in every format, so the next owner of a page may read all of it.

    Args:
      pool: a `PagePool` or `StateSlots`.
      ids: int32 [n] or [B, n], pages or slots. Ids outside the pool (-1 pads) are ignored.

    Returns: the pool.
    Raises: `ValueError` for a wrong dtype or shape of `ids`.

    >>> pool = PagePool((jnp.ones((4, 32), jnp.uint32),), StateLayout(((4,),), ("float32",)))
    >>> zero_pages(pool, [1, 3, -1]).parts[0][:, 0].tolist()
    [1, 0, 1, 0]
    """
    with checking("zero_pages") as problems:
        ids = as_int32(problems, "ids", ids, ranks=(1, 2))
    return _zero(pool, ids.reshape(-1))


@functools.partial(jax.jit, inline=True)
def _zero(pool: Pool, ids: jax.Array) -> Pool:
    def one(array: jax.Array) -> jax.Array:
        rows = inside_or_end(ids, array.shape[0])
        return array.at[rows].set(jnp.zeros((), array.dtype), mode="drop")

    return jax.tree.map(one, pool)


@functools.partial(jax.jit, inline=True)
def _read(
    pool: PagePool | StateSlots, ids: jax.Array, index: jax.Array | None
) -> tuple[jax.Array, ...]:
    if isinstance(pool, StateSlots):
        rows = inside_or_end(ids, pool.num_slots)
        return tuple(
            bitcast(x.at[rows].get(mode="fill", fill_value=0), jnp.dtype(dtype))
            for x, dtype in zip(pool.tensors, pool.layout.dtypes, strict=True)
        )
    rows, chunk = _chunk_rows(pool, ids, index)
    found = []
    for part, unit in zip(pool.parts, pool._unit_words, strict=True):
        words = part.reshape(-1, chunk * unit).at[rows].get(mode="fill", fill_value=0)
        words = flatten_rows(words)[:, : pool._units_per_state * unit]
        found.append(bitcast(words, unsigned(part.dtype.itemsize)))
    return from_words(jnp.concatenate(found, axis=1), pool.layout)


@functools.partial(jax.jit, inline=True)
def _write(
    pool: PagePool | StateSlots,
    ids: jax.Array,
    states: tuple[jax.Array, ...],
    index: jax.Array | None,
) -> PagePool | StateSlots:
    if isinstance(pool, StateSlots):
        rows = inside_or_end(ids, pool.num_slots)
        tensors = (
            x.at[rows].set(bitcast(new, x.dtype), mode="drop")
            for x, new in zip(pool.tensors, states, strict=True)
        )
        return dataclasses.replace(pool, tensors=tuple(tensors))
    rows, chunk = _chunk_rows(pool, ids, index)
    words = to_words(states, pool.parts[0].dtype.itemsize)
    parts, start = [], 0
    for part, unit in zip(pool.parts, pool._unit_words, strict=True):
        mine = words[:, start : start + pool._units_per_state * unit]
        start += pool._units_per_state * unit
        missing = rows.shape[1] * chunk * unit - mine.shape[1]
        mine = jnp.pad(mine, ((0, 0), (0, missing)))
        mine = bitcast(mine, part.dtype).reshape(*rows.shape, chunk * unit)
        flat = part.reshape(-1, chunk * unit).at[rows].set(mine, mode="drop")
        parts.append(flat.reshape(part.shape))
    return dataclasses.replace(pool, parts=tuple(parts))


def _chunk_rows(pool: PagePool, ids: jax.Array, index: jax.Array | None) -> tuple[jax.Array, int]:
    """Return rows [B, n] of the parts viewed as rows of `chunk` units, and `chunk`.

    If pages hold one state, it is read by whole pages. If they hold several, a state is read by the
    longest chunks that never cross the end of a page, wherever the state begins.
    """
    per_state, per_page = pool._units_per_state, pool._units_per_page
    if index is None:
        return inside_or_end(ids[:, : ceil_div(per_state, per_page)], pool.num_pages), per_page
    chunk = math.gcd(per_state, per_page)
    first = index[:, None] * (per_state // chunk)
    chunks = first + jnp.arange(per_state // chunk, dtype=jnp.int32)[None, :]
    column, offset = chunks // (per_page // chunk), chunks % (per_page // chunk)
    # An index past the last whole state is outside, even if part of that state would be inside.
    column = inside_or_end(column, ids.shape[1])
    batch = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    pages = ids.at[batch, column].get(mode="fill", fill_value=-1)
    held = (index >= 0) & (index < pool.states_in(ids.shape[1]))
    inside = (pages >= 0) & (pages < pool.num_pages) & held[:, None]
    rows_per_page = per_page // chunk
    return jnp.where(inside, pages * rows_per_page + offset, pool.num_pages * rows_per_page), chunk


def _check_ids(
    where: str, pool: PagePool | StateSlots, ids: Integers, index: Integers | None
) -> tuple[jax.Array, jax.Array | None]:
    paged = isinstance(pool, PagePool)
    with checking(where) as problems:
        ids = as_int32(problems, "ids", ids, ranks=(2 if paged else 1,))
        if index is not None:
            index = as_int32(problems, "index", index, ranks=(1,))
            problems.require(paged, "index", describe(index), "None for StateSlots")
        if isinstance(pool, PagePool) and not noted(problems, "ids"):
            need = pool.pages_for(1)
            problems.require(
                ids.shape[1] >= need, "ids", f"{list(ids.shape)}", f"[B, n] with n >= {need}"
            )
            if index is not None:
                require_shape(problems, "index", index, ids.shape[:1], "one per row of ids")
            rows = pool.num_pages * pool._units_per_page
            rows //= math.gcd(pool._units_per_state, pool._units_per_page)
            problems.require(
                index is None or rows <= INT32_MAX, "pool", f"{rows} chunks", "fewer than 2^31"
            )
    return ids, index
