"""Block tables as values: a function takes one and returns one, under jit, with static shapes.

A sequence has a list of block ids in each KV cache group `g`. `BlockTables` keeps the lists of up
to R sequences as the rows of one int32 table per group, `tables[g]` [R, W_g]. The first
`num_blocks[g, r]` entries of row r are valid; the others are stale and never read.

The ids are those of the manager that hands out blocks. Kernels read a view of them
(`jattn.blocks.tables.expansion`), and slots do not depend on that view
(`jattn.blocks.tables.slots`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jattn import pytrees
from jattn.blocks.arguments import Integers, as_int32, inside_or_end, noted, require_shape
from jattn.blocks.tables.context import ONE_RANK, ContextParallel
from jattn.blocks.tables.local import local_lengths
from jattn.checks import checking, describe
from jattn.integers import ceil_div, keep_python_ints, require_int, round_up, with_python_ints


@dataclasses.dataclass(frozen=True)
class BlockGroup:
    """The properties shared by all rows of one group's table. Every field is static.

    Attributes:
      block_size: S, tokens in a block of the manager.
      max_blocks: W, blocks a row has room for.
      kernel_block_size: tokens a kernel reads at a time; divides `block_size`. None: `block_size`.
      context: how tokens are dealt to context-parallel ranks.
      has_slots: False for groups whose tokens have no slots (recurrent states).
      sliding_window_reach: how many tokens before a query may still be read: the window less one,
        plus the tokens that speculative decoding may roll back. None: all of them.

    Raises: `ValueError` for a size below 1, a negative reach, a `context` that is not a
      `ContextParallel`, a `has_slots` that is not a bool, or a `kernel_block_size` that does not
      divide `block_size`.

    >>> group = BlockGroup(block_size=528, max_blocks=4, kernel_block_size=16)
    >>> group.blocks_per_kv_block, group.blocks_for(600)
    (33, 2)
    """

    block_size: int
    max_blocks: int
    kernel_block_size: int | None = None
    context: ContextParallel = ONE_RANK
    has_slots: bool = True
    sliding_window_reach: int | None = None

    def __post_init__(self) -> None:
        keep_python_ints(self)
        with checking("BlockGroup") as problems:
            sized = require_int(problems, "block_size", self.block_size, 1)
            require_int(problems, "max_blocks", self.max_blocks, 1)
            if self.sliding_window_reach is not None:
                require_int(problems, "sliding_window_reach", self.sliding_window_reach, 0)
            problems.require(
                isinstance(self.context, ContextParallel),
                "context",
                describe(self.context),
                "a ContextParallel",
            )
            problems.require(
                isinstance(self.has_slots, bool), "has_slots", f"{self.has_slots!r}", "a bool"
            )
            kernel = self.kernel_block_size
            if (
                kernel is not None
                and require_int(problems, "kernel_block_size", kernel, 1)
                and sized
            ):
                problems.require(
                    self.block_size % kernel == 0,
                    "kernel_block_size",
                    f"{kernel}",
                    f"a divisor of block_size={self.block_size}",
                )

    @property
    def blocks_per_kv_block(self) -> int:
        """Kernel blocks in a block of the manager."""
        return self.block_size // (self.kernel_block_size or self.block_size)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need on the rank that holds most of them."""
        return ceil_div(self.context.longest_local_length(num_tokens), self.block_size)


@pytrees.register(BlockGroup, ContextParallel)
@dataclasses.dataclass(frozen=True)
class BlockTables:
    """The block tables of up to R sequences in G groups, a pytree. `init_block_tables` makes one.

    Attributes:
      tables: arrays int32 [R, W_g], one per group.
      num_blocks: array int32 [G, R], the valid entries of each row.
      groups: static, one `BlockGroup` per group.
      stores_kernel_blocks: static. False: rows hold the manager's ids and `num_blocks` counts
        them. True: ids are expanded when they are appended, so both are in kernel blocks and rows
        are `blocks_per_kv_block` times as wide, as in vLLM 0.23.

    Raises: `ValueError` if shapes or dtypes do not fit the groups.

    >>> group = BlockGroup(block_size=528, max_blocks=4, kernel_block_size=16)
    >>> tables = init_block_tables([group], max_num_seqs=2, stores_kernel_blocks=True)
    >>> tables.max_num_seqs, tables.row_width(0), tables.entry_size(0)
    (2, 132, 16)
    """

    tables: tuple[jax.Array, ...]
    num_blocks: jax.Array
    groups: tuple[BlockGroup, ...] = dataclasses.field(metadata={"static": True})
    stores_kernel_blocks: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self) -> None:
        with checking("BlockTables") as problems:
            if not problems.require(
                len(self.tables) == len(self.groups),
                "tables",
                f"{len(self.tables)} tables",
                f"as many as groups, {len(self.groups)}",
            ):
                return
            shape = jnp.shape(self.num_blocks)
            problems.require(
                len(shape) == 2 and shape[0] == len(self.groups) and _is_int32(self.num_blocks),
                "num_blocks",
                describe(self.num_blocks),
                f"int32[groups={len(self.groups)}, max_num_seqs]",
            )
            for g, table in enumerate(self.tables):
                expected = (shape[-1], self.row_width(g))
                problems.require(
                    jnp.shape(table) == expected and _is_int32(table),
                    f"tables[{g}]",
                    describe(table),
                    f"int32{list(expected)}",
                )

    @property
    def max_num_seqs(self) -> int:
        """R, the rows of each table."""
        return self.num_blocks.shape[-1]

    def row_width(self, group: int) -> int:
        """Entries in a row of a group's table."""
        facts = self.groups[group]
        return facts.max_blocks * (facts.blocks_per_kv_block if self.stores_kernel_blocks else 1)

    def entry_size(self, group: int) -> int:
        """Tokens that one entry of a group's table stands for on this rank."""
        facts = self.groups[group]
        return facts.block_size // (facts.blocks_per_kv_block if self.stores_kernel_blocks else 1)


@with_python_ints
def init_block_tables(
    groups: Sequence[BlockGroup], max_num_seqs: int, *, stores_kernel_blocks: bool = False
) -> BlockTables:
    """Make empty tables for `max_num_seqs` sequences.

    Args:
      groups: one `BlockGroup` per KV cache group.
      max_num_seqs: R, rows per table.
      stores_kernel_blocks: store kernel blocks instead of the manager's, as vLLM 0.23 does.

    Returns: `BlockTables` filled with zeros.
    Raises: `ValueError` if `groups` is empty or holds anything but `BlockGroup`, or if
      `max_num_seqs` is below 1.

    >>> tables = init_block_tables([BlockGroup(block_size=16, max_blocks=4)], max_num_seqs=2)
    >>> tables.tables[0].shape
    (2, 4)
    """
    groups = tuple(groups)
    with checking("init_block_tables") as problems:
        require_int(problems, "max_num_seqs", max_num_seqs, 1)
        problems.require(
            bool(groups) and all(isinstance(group, BlockGroup) for group in groups),
            "groups",
            f"{groups!r}",
            "one or more BlockGroup",
        )
    factors = [group.blocks_per_kv_block if stores_kernel_blocks else 1 for group in groups]
    return BlockTables(
        tables=tuple(
            jnp.zeros((max_num_seqs, group.max_blocks * factor), jnp.int32)
            for group, factor in zip(groups, factors, strict=True)
        ),
        num_blocks=jnp.zeros((len(groups), max_num_seqs), jnp.int32),
        groups=groups,
        stores_kernel_blocks=stores_kernel_blocks,
    )


def move_row(tables: BlockTables, source: Integers, target: Integers) -> BlockTables:
    """Move the rows `source` to the rows `target` and clear `source`.

    Clearing matters: a row that kept the blocks it gave away would let a padded batch write into
    them (vLLM 0.23 leaves `source` as it was).

    Args:
      tables: the tables.
      source, target: int32 [] or [m]. All rows are read before any is written, so a batch of
        moves may shift rows along. Sources must differ, and so must targets. A pair with a row
        outside 0..R-1 does nothing, and a row moved onto itself stays.

    Returns: the tables.
    Raises: `ValueError` for wrong dtypes or shapes, and for concrete rows named twice. Under jit, a
      pair that repeats a source or a target does nothing, and neither does a pair whose target is
      the source of such a pair, and so on, so that no block is lost.

    >>> tables = init_block_tables([BlockGroup(block_size=16, max_blocks=4)], max_num_seqs=3)
    >>> tables, _ = append_block_ids(tables, 2, [[5, 6]], [2])
    >>> move_row(tables, 2, 0).num_blocks.tolist()
    [[2, 0, 0]]
    """
    source, target = _row_pairs("move_row", tables, source=source, target=target)
    clash = _same(source, source) | _same(target, target)
    onto = _same(target, source)
    source, target = _drop_clashes("move_row", tables, source, target, clash, onto)
    return _move(tables, source, source, target)


def copy_row(tables: BlockTables, source: Integers, target: Integers) -> BlockTables:
    """Copy the rows `source` to the rows `target`, which then share their blocks: a fork.

    Each block then has one more holder (`BlockPool.share`). Before either sequence writes to the
    last block, make a private copy of it with `copy_blocks`.

    Args:
      tables: the tables.
      source, target: int32 [] or [m]. All rows are read before any is written. Targets must differ.
        A pair with a row outside 0..R-1 does nothing.

    Returns: the tables.
    Raises: `ValueError` as `move_row`, but a source may be repeated.

    >>> tables = init_block_tables([BlockGroup(block_size=16, max_blocks=4)], max_num_seqs=3)
    >>> tables, _ = append_block_ids(tables, 2, [[5, 6]], [2])
    >>> copy_row(tables, 2, 0).tables[0].tolist()
    [[5, 6, 0, 0], [0, 0, 0, 0], [5, 6, 0, 0]]
    """
    source, target = _row_pairs("copy_row", tables, source=source, target=target)
    clash = _same(target, target)
    source, target = _drop_clashes("copy_row", tables, source, target, clash)
    return _move(tables, source, jnp.full_like(source, tables.max_num_seqs), target)


def swap_rows(tables: BlockTables, a: Integers, b: Integers) -> BlockTables:
    """Swap the rows `a` and `b`.

    Args:
      tables: the tables.
      a, b: int32 [] or [m], all different. A pair with a row outside 0..R-1 does nothing.

    Returns: the tables.
    Raises: `ValueError` as `move_row`, for rows named twice in `a` and `b` together.

    >>> tables = init_block_tables([BlockGroup(block_size=16, max_blocks=4)], max_num_seqs=3)
    >>> tables, _ = append_block_ids(tables, [0, 2], [[[7, 0], [5, 6]]], [[1, 2]])
    >>> swap_rows(tables, 0, 2).num_blocks.tolist()
    [[2, 0, 1]]
    """
    a, b = _row_pairs("swap_rows", tables, a=a, b=b)
    clash = _same(a, a) | _same(b, b) | _same(a, b) | _same(b, a)
    a, b = _drop_clashes("swap_rows", tables, a, b, clash)
    both, others = jnp.concatenate([a, b]), jnp.concatenate([b, a])
    return _move(tables, both, jnp.full_like(both, tables.max_num_seqs), others)


def truncate_row(tables: BlockTables, rows: Integers, num_tokens: Integers) -> BlockTables:
    """Keep only the blocks of the first `num_tokens` tokens of each row: a rollback.

    The caller must also free the blocks that the row no longer names (`BlockPool.free`).

    All groups with slots are cut to the same `num_tokens`. Keep cross-attention groups in tables of
    their own: their rows hold the encoder's tokens and would be cut to the decoder's length.

    Args:
      tables: the tables.
      rows: int32 [] or [m]. Rows outside 0..R-1 are ignored.
      num_tokens: int32 of the same shape, the tokens of the whole sequence that remain. A row with
        no more blocks than they need is unchanged, and so are groups without slots (recurrent
        states).

    Returns: the tables.
    Raises: `ValueError` for wrong dtypes or shapes.

    >>> tables = init_block_tables([BlockGroup(block_size=16, max_blocks=4)], max_num_seqs=2)
    >>> tables = dataclasses.replace(tables, num_blocks=jnp.asarray([[3, 4]], jnp.int32))
    >>> truncate_row(tables, [0, 1], [17, 64]).num_blocks.tolist()
    [[2, 4]]
    """
    with checking("truncate_row") as problems:
        rows = as_int32(problems, "rows", rows, ranks=(0, 1))
        num_tokens = as_int32(problems, "num_tokens", num_tokens, ranks=(0, 1))
        if not noted(problems, "rows"):
            require_shape(problems, "num_tokens", num_tokens, rows.shape, "as rows")
    return _truncate(tables, jnp.atleast_1d(rows), jnp.atleast_1d(num_tokens))


def clear_row(tables: BlockTables, rows: Integers) -> BlockTables:
    """Empty rows, as when their sequences finish. The caller frees their blocks (`BlockPool.free`).

    Args:
      tables: the tables.
      rows: int32 [] or [m]. Rows outside 0..R-1 are ignored.

    Returns: the tables.
    Raises: `ValueError` for a wrong dtype or shape.

    >>> tables = init_block_tables([BlockGroup(block_size=16, max_blocks=4)], max_num_seqs=2)
    >>> tables, _ = append_block_ids(tables, 0, [[5, 6]], [2])
    >>> clear_row(tables, [0, -1]).num_blocks.tolist()
    [[0, 0]]
    """
    with checking("clear_row") as problems:
        rows = as_int32(problems, "rows", rows, ranks=(0, 1))
    rows = inside_or_end(jnp.atleast_1d(rows), tables.max_num_seqs)
    nothing = jnp.full_like(rows, tables.max_num_seqs)
    return _move(tables, nothing, rows, nothing)


@functools.partial(jax.jit, inline=True)
def _truncate(tables: BlockTables, rows: jax.Array, num_tokens: jax.Array) -> BlockTables:
    rows, tokens = inside_or_end(rows, tables.max_num_seqs), jnp.maximum(num_tokens, 0)
    held = tables.num_blocks
    for g, group in enumerate(tables.groups):
        if group.has_slots:
            blocks = ceil_div(local_lengths(tokens, group.context, rank=0), tables.entry_size(g))
            if tables.stores_kernel_blocks:  # keep or free whole blocks of the manager
                per_block = group.blocks_per_kv_block
                blocks = round_up(blocks, per_block)
            held = held.at[g, rows].min(blocks, mode="drop")
    return dataclasses.replace(tables, num_blocks=held)


@functools.partial(jax.jit, inline=True)
def _move(
    tables: BlockTables, read: jax.Array, cleared: jax.Array, written: jax.Array
) -> BlockTables:
    """Read rows, clear rows, then write the rows that were read; row R means none."""
    end = tables.max_num_seqs
    rewritten = jnp.any(cleared[:, None] == written[None, :], axis=1)
    targets = jnp.concatenate([jnp.where(rewritten, end, cleared), written])

    def one(table: jax.Array) -> jax.Array:
        rows = table.at[read].get(mode="fill", fill_value=0)
        # One scatter whose values depend on the read: XLA can then do it in place.
        return table.at[targets].set(jnp.concatenate([jnp.zeros_like(rows), rows]), mode="drop")

    return dataclasses.replace(
        tables,
        tables=tuple(one(table) for table in tables.tables),
        num_blocks=one(tables.num_blocks.T).T,
    )


def _row_pairs(where: str, tables: BlockTables, **pair: Integers) -> tuple[jax.Array, jax.Array]:
    """Return two arguments as int32 [m] arrays of rows.

    Pairs with a row outside the table become pairs of R, which read and write nothing.
    """
    with checking(where) as problems:
        first, second = (as_int32(problems, name, x, ranks=(0, 1)) for name, x in pair.items())
        problems.require(
            bool(problems.found) or first.shape == second.shape,
            " and ".join(pair),
            f"{list(first.shape)} and {list(second.shape)}",
            "of one shape",
        )
    first, second, end = jnp.atleast_1d(first), jnp.atleast_1d(second), tables.max_num_seqs
    good = (first >= 0) & (first < end) & (second >= 0) & (second < end)
    return jnp.where(good, first, end), jnp.where(good, second, end)


def _same(first: jax.Array, second: jax.Array) -> jax.Array:
    """bool [m, m]: whether pair i names in `first` the row that pair j names in `second`."""
    return first[:, None] == second[None, :]


def _drop_clashes(
    where: str,
    tables: BlockTables,
    first: jax.Array,
    second: jax.Array,
    clash: jax.Array,
    needs: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Turn pairs that clash with an earlier one into pairs of R, or raise if rows are concrete.

    If pair i needs pair j, bool [m, m], dropping j also drops i.
    """
    end = tables.max_num_seqs
    named = (first < end) & (second < end)
    again = jnp.any(jnp.tril(clash, -1) & named[None, :], axis=1) & named
    if not isinstance(again, jax.core.Tracer):
        pairs = zip(first.tolist(), second.tolist(), strict=True)
        with checking(where) as problems:
            for i, (pair, wrong) in enumerate(zip(pairs, again.tolist(), strict=True)):
                problems.require(
                    not wrong,
                    f"pair [{i}]",
                    f"rows {pair[0]} and {pair[1]}",
                    "of rows not named yet",
                )
    elif needs is not None:
        again = _with_dependents(again, needs & named[:, None])
    return jnp.where(again, end, first), jnp.where(again, end, second)


def _with_dependents(dropped: jax.Array, needs: jax.Array) -> jax.Array:
    """Return bool [m]: the dropped pairs and all that need one of them, directly or not."""

    def more(dropped: jax.Array) -> jax.Array:
        return dropped | jnp.any(needs & dropped[None, :], axis=1)

    # Each round but the last adds a pair, so there are at most m + 1.
    return jax.lax.while_loop(lambda x: jnp.any(more(x) & ~x), more, dropped)


def _is_int32(x: object) -> bool:
    return getattr(x, "dtype", None) == jnp.int32
