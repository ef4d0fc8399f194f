"""Appending block ids to rows, and reading rows back.

Per group g and sequence r, with `start = 0 if overwrite else num_blocks[g, r]`:

    tables[g][r, start : start + count] = ids[:count];    num_blocks[g, r] = start + count.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.blocks.arguments import Integers, as_int32, inside_or_end, noted, require_shape
from jattn.blocks.tables.expansion import expand_block_ids
from jattn.blocks.tables.local import as_rank, local_lengths
from jattn.blocks.tables.tables import BlockTables
from jattn.checks import Problems, checking, describe
from jattn.integers import INT32_MAX, is_int, require_int


def append_block_ids(
    tables: BlockTables,
    seq_indices: Integers,
    block_ids: Sequence[Integers],
    counts: Integers,
    *,
    overwrite: bool | np.ndarray | jax.Array = False,
) -> tuple[BlockTables, jax.Array]:
    """Append block ids to the rows of one sequence or of a batch.

    Args:
      tables: the tables, in any number of groups G.
      seq_indices: int32 [] for one sequence or [n] for a batch: the rows. A row outside
        0..R-1 (-1 pads a batch) is ignored.
      block_ids: per group, the manager's ids, int32 [k_g] or [n, k_g], padded at the end with
        anything.
      counts: int32 [G] or [G, n]: how many of the ids are valid. `pack_block_ids` makes both.
      overwrite: bool, or bool [n]: start at the beginning of the row instead of at its end. A
        count of 0 then empties the row. Entries past the new end are stale and never read.

    Returns: the tables, and `refused`, bool [] or [n]: True for a sequence whose ids do not fit
      (a row would pass its capacity, an id or a count is negative, an id's kernel blocks would pass
      int32 in tables that store them, a count exceeds the ids given, or the call already named the
      sequence). Such a sequence is unchanged in every group, so
      nothing is lost: make room and append again. A call with concrete arrays raises instead;
      `check_append` raises the same error for arrays that a jitted call refused.
    Raises: `ValueError` for wrong dtypes or shapes, and for refusals outside jit, naming each
      sequence, group, end and capacity.

    >>> tables = init_block_tables([BlockGroup(block_size=16, max_blocks=4)], max_num_seqs=2)
    >>> tables, refused = append_block_ids(tables, 1, [[7, 3, 0]], [2])
    >>> gather_block_tables(tables, [1])[0].tolist()
    [[7, 3, 0, 0]]
    """
    batch, single = _append_arguments(tables, seq_indices, block_ids, counts, overwrite)
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((tables, batch))):
        _raise_if_refused(tables, batch)
    tables, refused = _append(tables, batch)
    return tables, refused[0] if single else refused


def check_append(
    tables: BlockTables,
    seq_indices: Integers,
    block_ids: Sequence[Integers],
    counts: Integers,
    *,
    overwrite: bool | np.ndarray | jax.Array = False,
) -> None:
    """Raise on the host, with the reasons, if `append_block_ids` would refuse a sequence.

    Args:
      tables: the tables before the append, concrete.
      seq_indices, block_ids, counts, overwrite: as for `append_block_ids`, concrete.

    Raises: `ValueError` for wrong dtypes or shapes, or with one line per refusal that names the
      sequence, group, end and capacity.

    >>> tables = init_block_tables([BlockGroup(block_size=16, max_blocks=2)], max_num_seqs=1)
    >>> check_append(tables, 0, [[1, 2, 3]], [3])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: append_block_ids: 1 wrong argument(s)
      - block_ids[0]: the row of sequence 0 in group 0 would end at 3, ... at most 2, its capacity
    """
    batch, _ = _append_arguments(tables, seq_indices, block_ids, counts, overwrite)
    _raise_if_refused(tables, batch)


def pack_block_ids(
    ids: Sequence[Sequence[Sequence[int]]],
    *,
    widths: Sequence[int] | None = None,
    num_seqs: int | None = None,
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Pack lists of ids into the padded arrays that `append_block_ids` takes. Host only.

    Args:
      ids: `ids[i][g]`, the ids that sequence i gets in group g. May be empty if `widths` says how
        many groups there are.
      widths: k_g, the ids per sequence and group to pad to, so that shapes do not change from
        step to step. None: the longest list of each group.
      num_seqs: n, the sequences to pad to, for the same reason; the added ones get no ids. None:
        as many as `ids`.

    Returns: `block_ids`, per group int32 [n, k_g], and `counts`, int32 [G, n].
    Raises: `ValueError` if a list is longer than its width or holds anything but ids from 0 to
      2^31 - 1, if there are more than `num_seqs` sequences, or if not all of them have the same
      number of groups.

    >>> block_ids, counts = pack_block_ids([[[5, 6]], [[]]], num_seqs=3)
    >>> block_ids[0].tolist(), counts.tolist()
    ([[5, 6], [0, 0], [0, 0]], [[2, 0, 0]])
    >>> pack_block_ids([], widths=[2], num_seqs=1)[1].tolist()
    [[0]]
    """
    with checking("pack_block_ids") as problems:
        arrays = [
            [_id_list(problems, f"ids[{i}][{g}]", x) for g, x in enumerate(per_group)]
            for i, per_group in enumerate(ids)
        ]
        num_groups = {len(per_group) for per_group in arrays}
        if widths is not None:
            widths = list(widths)
            num_groups.add(len(widths))
            for g, width in enumerate(widths):
                require_int(problems, f"widths[{g}]", width, 0)
        problems.require(
            len(num_groups) == 1,
            "ids",
            f"{sorted(num_groups)} groups" if num_groups else "no sequences and no widths",
            "one number of groups",
        )
        if num_seqs is not None:
            require_int(problems, "num_seqs", num_seqs, len(arrays))
        if not problems.found:
            groups = range(*num_groups)
            longest = [max((len(row[g]) for row in arrays), default=0) for g in groups]
            widths = longest if widths is None else widths
            fits = all(n <= width for n, width in zip(longest, widths, strict=True))
            problems.require(fits, "widths", f"{widths}", f"at least {longest}, one per group")
    assert widths is not None
    num_seqs = len(arrays) if num_seqs is None else num_seqs
    block_ids = tuple(np.zeros((num_seqs, width), np.int32) for width in widths)
    counts = np.zeros((len(widths), num_seqs), np.int32)
    for i, row in enumerate(arrays):
        for g, x in enumerate(row):
            block_ids[g][i, : len(x)] = x
            counts[g, i] = len(x)
    return block_ids, counts


def _id_list(problems: Problems, argument: str, ids: Sequence[int]) -> Sequence[int] | np.ndarray:
    """Return a list of ids; if it is not one, note a problem and return an empty list."""
    if isinstance(ids, Sequence) and not ids:
        return ids
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of several lengths
        array = np.empty((), object)
    ok = array.ndim == 1 and (array.size == 0 or array.dtype.kind in "iu")
    ok = ok and bool(array.size == 0 or (array.min() >= 0 and array.max() <= INT32_MAX))
    ok = problems.require(ok, argument, reprlib.repr(ids), "a list of ids from 0 to 2^31 - 1")
    return array if ok else []


def gather_block_tables(
    tables: BlockTables,
    seq_indices: Integers,
    *,
    num_computed_tokens: Integers | None = None,
    rank: int | jax.Array | None = None,
    width: int | Sequence[int] | None = None,
    into: Sequence[jax.Array] | None = None,
    fill: int = 0,
) -> tuple[jax.Array, ...]:
    """Return the rows of a batch, in its order, with `fill` wherever a row has no block.

    Pass `fill=-1` unless block 0 is a null block that a kernel may read: attention then gives NaN
    for a sequence that needs a block it does not have, as after an append that was refused. With 0
    it would read block 0, which may hold another sequence's tokens.

    A batch of thousands of wide rows is tens of MiB. Pass `width` to gather no more columns than
    the step's longest sequence needs, and `into` to reuse the arrays of the previous step: donate
    them, `jax.jit(gather_block_tables, static_argnames="width", donate_argnames="into")`.
    Every width compiles, and `into` must have it: round `width` up to one of a few buckets, such as
    powers of two, and keep one `into` per bucket.

    Args:
      tables: the tables.
      seq_indices: int32 [B], the row of each sequence; outside 0..R-1 (-1 pads) gives `fill`.
      num_computed_tokens: int32 [B] or None: the position of each sequence's first query. Groups
        that have a `sliding_window_reach` then give `fill` for blocks wholly before
        `num_computed_tokens - sliding_window_reach`, which the manager may have reused.
      rank: int32 [] or None: the context-parallel rank, where it is known on the device only.
      width: M, columns to gather, one for all groups or one for each. Static. None: the whole
        row. A row with more blocks is cut, and attention gives NaN for a sequence that needs them.
      into: per group int32 [B, M], arrays to overwrite. None: new arrays.
      fill: what entries without a block get, at least -1. Static. `kernel_block_tables` and
        `layer_block_tables` keep -1 negative.

    Returns: per group, int32 [B, M]: entries of a row past its blocks are `fill`.
    Raises: `ValueError` for wrong dtypes, shapes or widths, a wrong `fill`, or a concrete `rank`
      that a group's context does not have.

    >>> tables = init_block_tables([BlockGroup(block_size=16, max_blocks=4)], max_num_seqs=3)
    >>> tables, _ = append_block_ids(tables, [0, 2], [[[7, 0], [5, 6]]], [[1, 2]])
    >>> gather_block_tables(tables, [2, 0, -1], width=2)[0].tolist()
    [[5, 6], [7, 0], [0, 0]]
    >>> gather_block_tables(tables, [2, 0, -1], width=2, fill=-1)[0].tolist()
    [[5, 6], [7, -1], [-1, -1]]
    """
    every = [table.shape[1] for table in tables.tables]
    with checking("gather_block_tables") as problems:
        rows = as_int32(problems, "seq_indices", seq_indices, ranks=(1,))
        rank = as_rank(problems, rank, [group.context for group in tables.groups])
        first = num_computed_tokens
        if first is not None:
            first = as_int32(problems, "num_computed_tokens", first, ranks=(1,))
            if not noted(problems, "seq_indices"):
                require_shape(problems, "num_computed_tokens", first, rows.shape, "as seq_indices")
        widths = list(width) if isinstance(width, Sequence) else [width] * len(every)
        widths = [most if one is None else one for one, most in zip(widths, every, strict=False)]
        problems.require(
            len(widths) == len(every)
            and all(
                is_int(one, 1) and one <= most for one, most in zip(widths, every, strict=True)
            ),
            "width",
            f"{width!r}",
            f"from 1 to {every}, the widths of the rows",
        )
        if into is not None and not problems.found:
            wanted = [(len(rows), one) for one in widths]
            problems.require(
                [jnp.shape(x) for x in into] == wanted and all(x.dtype == jnp.int32 for x in into),
                "into",
                f"{[describe(x) for x in into]}",
                f"int32 of shapes {[list(shape) for shape in wanted]}",
            )
        problems.require(
            is_int(fill, -1) and fill <= INT32_MAX,
            "fill",
            f"{fill!r}",
            "a static integer from -1 to 2^31 - 1",
        )
    into = None if into is None else tuple(into)
    return _gather(tables, rows, first, rank, into, tuple(widths), int(fill))


@functools.partial(jax.jit, inline=True, static_argnames=("widths", "fill"))
def _gather(
    tables: BlockTables,
    rows: jax.Array,
    first: jax.Array | None,
    rank: jax.Array | None,
    into: tuple[jax.Array, ...] | None,
    widths: tuple[int, ...],
    fill: int,
) -> tuple[jax.Array, ...]:
    rows = inside_or_end(rows, tables.max_num_seqs)
    counts = tables.num_blocks.at[:, rows].get(mode="fill", fill_value=0)
    gathered = []
    for g, (group, table, width) in enumerate(
        zip(tables.groups, tables.tables, widths, strict=True)
    ):
        columns = jnp.arange(width, dtype=jnp.int32)[None, :]
        keep = columns < counts[g][:, None]
        if first is not None and group.sliding_window_reach is not None:
            unseen = jnp.maximum(first - group.sliding_window_reach, 0)
            gone = local_lengths(unseen, group.context, rank=rank) // tables.entry_size(g)
            keep &= columns >= gone[:, None]
        found = table[:, :width].at[rows].get(mode="fill", fill_value=0)
        found = jnp.where(keep, found, fill)
        if into is not None:  # all of it is overwritten, so a donated array is reused
            found = jax.lax.dynamic_update_slice(into[g], found, (0, 0))
        gathered.append(found)
    return tuple(gathered)


class _Batch(NamedTuple):
    """A batch to append: rows [n], ids [n, k_g] per group, counts [G, n], overwrite [n]."""

    rows: jax.Array
    ids: tuple[jax.Array, ...]
    counts: jax.Array
    overwrite: jax.Array


@functools.partial(jax.jit, inline=True)
def _append(tables: BlockTables, batch: _Batch) -> tuple[BlockTables, jax.Array]:
    """`append_block_ids` of a batch."""
    ids, counts = batch.ids, batch.counts
    given = jnp.asarray([x.shape[1] for x in ids], jnp.int32)[:, None]
    sound = (counts >= 0) & (counts <= given)
    no_block = []
    for x, count, most in zip(ids, counts, _largest_ids(tables), strict=True):
        x = _named_ids(x, count)
        no_block.append(jnp.any((x < 0) | (x > most), axis=1))
    sound &= ~jnp.stack(no_block)
    if tables.stores_kernel_blocks:
        factors = [group.blocks_per_kv_block for group in tables.groups]
        ids = tuple(expand_block_ids(x, factor) for x, factor in zip(ids, factors, strict=True))
        counts = counts * jnp.asarray(factors, jnp.int32)[:, None]
    named = inside_or_end(batch.rows, tables.max_num_seqs)
    held = tables.num_blocks.at[:, named].get(mode="fill", fill_value=0)
    starts = jnp.where(batch.overwrite[None, :], 0, held)
    ends = starts + counts
    widths = jnp.asarray([table.shape[1] for table in tables.tables], jnp.int32)[:, None]
    # An unsound count is refused, so it does not matter if the sums above overflowed.
    fits = jnp.all(sound & (ends <= widths), axis=0)
    inside = named < tables.max_num_seqs
    refused = inside & ~(fits & _first_mention(named, tables.max_num_seqs))
    target = jnp.where(refused, tables.max_num_seqs, named)
    new_tables = []
    for table, x, start, count in zip(tables.tables, ids, starts, counts, strict=True):
        offsets = jnp.arange(x.shape[1], dtype=jnp.int32)
        write = offsets[None, :] < count[:, None]
        row = jnp.where(write, target[:, None], tables.max_num_seqs)
        new_tables.append(table.at[row, start[:, None] + offsets[None, :]].set(x, mode="drop"))
    tables = dataclasses.replace(
        tables,
        tables=tuple(new_tables),
        num_blocks=tables.num_blocks.at[:, target].set(ends, mode="drop"),
    )
    return tables, refused


def _raise_if_refused(tables: BlockTables, batch: _Batch) -> None:
    """`check_append` of a batch. Check whole arrays first, and entries only if there is a fault."""
    rows, counts, overwrite = map(np.asarray, (batch.rows, batch.counts, batch.overwrite))
    named = (rows >= 0) & (rows < tables.max_num_seqs)
    held = np.asarray(tables.num_blocks)[:, np.where(named, rows, 0)]
    given = np.asarray([x.shape[1] for x in batch.ids])[:, None]
    widths = np.asarray([table.shape[1] for table in tables.tables])[:, None]
    stored = [group.blocks_per_kv_block for group in tables.groups]
    factors = np.asarray(stored if tables.stores_kernel_blocks else [1] * len(stored))[:, None]
    ends = np.where(overwrite, 0, held) + counts.astype(np.int64) * factors
    first = np.zeros(len(rows), bool)
    first[np.unique(rows, return_index=True)[1]] = True
    with checking("append_block_ids") as problems:
        for i in np.flatnonzero(named & ~first).tolist():
            what = f"sequence {rows[i]} is named again at [{i}]"
            problems.add("seq_indices", what, "named once in a call")
        for g, i in np.argwhere(named & ((counts < 0) | (counts > given))).tolist():
            what = f"{counts[g, i]} for sequence {rows[i]}"
            problems.add(f"counts[{g}]", what, f"in 0..{given[g, 0]}, the ids given")
        for g, (ids, most) in enumerate(zip(batch.ids, _largest_ids(tables), strict=True)):
            x = np.asarray(ids)
            given_ids = named[:, None] & (np.arange(x.shape[1]) < counts[g][:, None])
            for i, k in np.argwhere(given_ids & ((x < 0) | (x > most))).tolist():
                what = f"{x[i, k]} for sequence {rows[i]}"
                last = f"at most {most}, whose kernel blocks still fit int32"
                problems.add(f"block_ids[{g}]", what, "at least 0" if x[i, k] < 0 else last)
        for g, i in np.argwhere(named & (ends > widths) & (counts <= given)).tolist():
            what = f"the row of sequence {rows[i]} in group {g} would end at {ends[g, i]}"
            problems.add(f"block_ids[{g}]", what, f"at most {widths[g, 0]}, its capacity")


def _append_arguments(
    tables: BlockTables,
    seq_indices: Integers,
    block_ids: Sequence[Integers],
    counts: Integers,
    overwrite: bool | np.ndarray | jax.Array,
) -> tuple[_Batch, bool]:
    """Return the arguments as arrays of a batch, and whether they were for one sequence."""
    num_groups = len(tables.groups)
    with checking("append_block_ids") as problems:
        rows = as_int32(problems, "seq_indices", seq_indices, ranks=(0, 1))
        lead = None if problems.found else rows.shape
        many = problems.require(
            isinstance(block_ids, (tuple, list)) and len(block_ids) == num_groups,
            "block_ids",
            f"{type(block_ids).__name__} of {len(block_ids)}"
            if isinstance(block_ids, (tuple, list))
            else describe(block_ids),
            f"a tuple with the ids of each of {num_groups} group(s)",
        )
        ids = [
            as_int32(problems, f"block_ids[{g}]", x, ranks=(1, 2))
            for g, x in enumerate(block_ids if many else ())
        ]
        counts = as_int32(problems, "counts", counts, ranks=(1, 2))
        overwrite = jnp.asarray(overwrite)
        problems.require(
            overwrite.dtype == jnp.bool_ and overwrite.shape in ((), lead),
            "overwrite",
            f"{overwrite.dtype.name}{list(overwrite.shape)}",
            "a bool, or one per sequence",
        )
        if lead is not None:
            for g, x in enumerate(ids):
                problems.require(
                    x.shape[:-1] == lead or noted(problems, f"block_ids[{g}]"),
                    f"block_ids[{g}]",
                    f"{list(x.shape)}",
                    f"{[*lead, 'k']}, since seq_indices is {list(lead)}",
                )
            wanted = (num_groups, *lead)
            require_shape(problems, "counts", counts, wanted, "groups, then seq_indices")
    single = rows.ndim == 0
    if single:
        rows, counts, ids = rows[None], counts[:, None], [x[None] for x in ids]
    return _Batch(rows, tuple(ids), counts, jnp.broadcast_to(overwrite, rows.shape)), single


def _largest_ids(tables: BlockTables) -> list[int]:
    """Return the largest id that each group can store, expanded if the tables store that."""
    if not tables.stores_kernel_blocks:
        return [INT32_MAX] * len(tables.groups)
    return [(INT32_MAX + 1) // group.blocks_per_kv_block - 1 for group in tables.groups]


def _named_ids(ids: jax.Array, counts: jax.Array) -> jax.Array:
    """Return ids [n, k], with 0 for those past the counts [n]."""
    named = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :] < counts[:, None]
    return jnp.where(named, ids, 0)


def _first_mention(rows: jax.Array, end: int) -> jax.Array:
    """Return bool [n]: whether each entry is the first that names its row."""
    order = jnp.arange(rows.shape[0], dtype=jnp.int32)
    first = jnp.full((end,), rows.shape[0], jnp.int32).at[rows].min(order, mode="drop")
    return first.at[rows].get(mode="fill", fill_value=0) == order
