"""Recurrent states in memory: in pages of a KV pool, or in separate slots.

Two typed pools are the default: KV blocks in a KV cache, states in `StateSlots`, one array per
tensor. Nothing is padded and nothing is converted.

`PagePool` lets states live in the pages of a KV cache instead, so that one free list serves both.
A block id names a page: its words of K and its words of V. A state is a run of words,

    state = conv words, then recurrent words,    dealt to K's and V's words in the ratio D : V,

over the concatenated pages of a row of page ids; several states may share the pages, one after
another. Reading gathers the words and bitcasts only those: the pool itself is never
converted, and it is the array that `jattn.paged_attention` reads through a `KVArray`.

Pages hold whatever was last written. `zero_pages` on hand-over keeps the bytes of a float32 state
from being read as bfloat16 keys, where many of them are NaN.
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
from jattn.blocks.states.words import POOL_WORDS, from_words, slot_dtype, to_words, unsigned
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
      states that are not whole words.
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
        """States that fit in `num_pages` pages one after another."""
        return num_pages * self._units_per_page // self._units_per_state

    def pages_for(self, num_states: int = 1) -> int:
        """Pages that `num_states` states need one after another."""
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
      tensors: one array [num_slots, *shape] per tensor of the layout: float32 as it is, narrower
        dtypes as unsigned words of their size.
      layout: static, the tensors of a state.
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
        """States there is room for."""
        return self.tensors[0].shape[0]


Pool = TypeVar("Pool", PagePool, StateSlots)


def init_state_slots(layout: StateLayout, num_slots: int) -> StateSlots:
    """Zeroed slots for `num_slots` states.

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
    """The states of B sequences.

    Args:
      pool: where they are.
      ids: of a `PagePool`, page ids int32 [B, n]: the pages of each state, in order. Of
        `StateSlots`, slots int32 [B]. An id outside the pool (-1 pads) reads as zeros.
      index: int32 [B] or None: with several states in the n pages, which one is meant, from 0 to
        `pool.states_in(n) - 1`; any other is outside the pool. None: the pages hold one state.

    Returns: one array [B, *shape] per tensor of the layout, of its dtype.
    Raises: `ValueError` for wrong dtypes or shapes, or too few pages for a state.
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

    In place when the pool is donated; nothing the size of the pool is made. Pages and slots must
    differ between sequences, but for states of different `index` in the same pages. An id outside
    the pool (-1 pads) writes nothing. Without `index`, the rest of a state's last page is zeroed.

    Args:
      pool, ids, index: as for `read_state`.
      states: one array [B, *shape] per tensor of the layout, of its dtype.

    Returns: the pool.
    Raises: `ValueError` as `read_state`, and for states that do not fit the layout.
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
    """Zero pages (or slots) on hand-over, int32 [n] or [B, n]; ids outside the pool are ignored.

    Zeros are zero in every format, so the next owner of a page may read all of it.
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
        words = words.reshape(rows.shape[0], -1)[:, : pool._units_per_state * unit]
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
    """Rows [B, n] of the parts seen as rows of `chunk` units, and `chunk`.

    One state per row of pages is read by whole pages; one of several by the longest chunks that
    never cross a page's end wherever a state begins.
    """
    per_state, per_page = pool._units_per_state, pool._units_per_page
    if index is None:
        return inside_or_end(ids[:, : ceil_div(per_state, per_page)], pool.num_pages), per_page
    chunk = math.gcd(per_state, per_page)
    first = index[:, None] * (per_state // chunk)
    chunks = first + jnp.arange(per_state // chunk, dtype=jnp.int32)[None, :]
    column, offset = chunks // (per_page // chunk), chunks % (per_page // chunk)
    # An index past the states that the pages hold is nowhere, even if a part of it is inside.
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
