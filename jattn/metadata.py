"""Which tokens of a step belong to which sequence, and where their keys and values live."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jattn import checks, integers, pytrees
from jattn.call import arguments, arrays
from jattn.integers import ceil_div
from jattn.varying import gathered

Array = jax.Array | np.ndarray


@pytrees.register()
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """One step's batch: a registered pytree, which can pass through jit, scan and sharding.

    Attributes:
      block_tables: int32 [B, M]; row b names the blocks of sequence b in order. Entries past
        `ceil(seq_lens[b] / S)` may hold anything.
      seq_lens: int32 [B]; keys of each sequence, including this step's; 0 for a padded row.
      query_start_loc: int32 [B + 1]; sequence b's query tokens are `[start[b], start[b + 1])`.
      slot_mapping: int32 [T]; the slot `block * S + offset` each token is written to, -1 for none.
      max_query_len: static upper bound on a sequence's query tokens, or None.
    """

    block_tables: Array
    seq_lens: Array
    query_start_loc: Array
    slot_mapping: Array
    max_query_len: int | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    @integers.with_python_ints
    def from_lengths(
        cls,
        query_lens: Sequence[int] | Array,
        seq_lens: Sequence[int] | Array,
        block_tables: Array | Sequence[Array | Sequence[int]],
        block_size: int,
        *,
        max_query_len: int | None = None,
    ) -> AttentionMetadata:
        """Build a step's metadata from plain lengths, on the host.

        Args:
          query_lens: B integers, new tokens per sequence (may be 0).
          seq_lens: B integers, keys per sequence, including the new tokens.
          block_tables: [B, M] integers, or B lists of block ids (padded with -1 to the longest).
          block_size: S.
          max_query_len: the static bound; None leaves it unset (decode-only steps should pass 1).

        Raises:
          ValueError: lengths or ids are not integers, lengths do not fit together, a table is too
            short for its sequence, or an id in use is below 0 or has slots that exceed int32.
        """
        with checks.checking("AttentionMetadata.from_lengths") as problems:
            queries = _integers(problems, "query_lens", query_lens)
            keys = _integers(problems, "seq_lens", seq_lens)
            is_table = isinstance(block_tables, Iterable) and getattr(block_tables, "ndim", 1) > 0
            must = "[B, M] integers, or B lists of block ids"
            problems.expect(is_table, "block_tables", block_tables, must)
            rows = [
                _integers(problems, f"block_tables[{b}]", x)
                for b, x in enumerate(block_tables if is_table else ())
            ]
            problems.expect(
                integers.is_int(block_size, 1), "block_size", block_size, "an integer of at least 1"
            )
            problems.require(
                queries.shape == keys.shape and (len(rows) == len(keys) or not is_table),
                "seq_lens",
                f"{keys.shape} lengths, {len(rows)} tables",
                f"one of each for the {queries.shape} sequences of query_lens",
            )
            problems.require(
                bool((queries >= 0).all()), "query_lens", f"{queries.tolist()}", "at least 0"
            )
            total = int(queries.sum())
            problems.require(
                integers.fits_int32(0, total), "query_lens", f"{total} in all", "below 2^31"
            )
        with checks.checking("AttentionMetadata.from_lengths") as problems:
            longest = int(queries.max(initial=0))
            problems.require(
                max_query_len is None or integers.is_int(max_query_len, max(longest, 1)),
                "max_query_len",
                f"{max_query_len!r}",
                f"None or an integer of at least {max(longest, 1)}, the largest of query_lens",
            )
            most = integers.max_blocks(block_size)
            for b, row in enumerate(rows):
                problems.require(
                    keys[b] >= queries[b],
                    f"seq_lens[{b}]",
                    f"{keys[b]}",
                    f"at least query_lens[{b}] = {queries[b]}",
                )
                needed = integers.ceil_div(int(keys[b]), block_size)
                problems.require(
                    len(row) >= needed,
                    f"block_tables[{b}]",
                    f"{len(row)} blocks of {block_size}",
                    f"at least {needed} blocks for {keys[b]} keys",
                )
                used = row[:needed]
                outside = used[(used < 0) | (used >= most)]
                problems.require(
                    outside.size == 0,
                    f"block_tables[{b}]",
                    f"naming blocks {outside[:8].tolist()}",
                    f"within [0, {most}): slots of {block_size} tokens a block are int32",
                )
        width = max((len(row) for row in rows), default=0) or 1
        tables = np.full((len(rows), width), -1, np.int32)
        slots = [np.zeros(0, np.int64)]
        for b, row in enumerate(rows):
            tables[b, : len(row)] = row
            positions = np.arange(keys[b] - queries[b], keys[b])
            slots.append(row[positions // block_size] * block_size + positions % block_size)
        return cls(
            block_tables=tables,
            seq_lens=keys.astype(np.int32),
            query_start_loc=np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
            slot_mapping=np.concatenate(slots).astype(np.int32),
            max_query_len=max_query_len,
        )

    @classmethod
    @integers.with_python_ints
    def from_arrays(
        cls,
        block_tables: Array,
        seq_lens: Array,
        query_start_loc: Array,
        *,
        num_tokens: int,
        block_size: int,
        num_seqs: int | Array | None = None,
        distribution: Array | None = None,
        max_query_len: int | None = None,
    ) -> AttentionMetadata:
        """Build a step's metadata from a bucket's arrays, under `jit`: only shapes are static.

            position of token t = seq_lens[b] - (start[b + 1] - start[b]) + t - start[b]
            slot_mapping[t] = block_tables[b, position // S] * S + position % S

        Rows past the step's sequences may hold anything: they become empty, and tokens past the
        last sequence write nothing. If the number of sequences is outside [0, B], attention over
        this batch returns NaN in every row.

        Args:
          block_tables: int32 [B, M], or flat [B * M].
          seq_lens: int32 [B]; keys of each sequence, including the new tokens.
          query_start_loc: int32 [B + 1].
          num_tokens: T of the bucket.
          block_size: S.
          num_seqs: how many of the B rows are sequences: an integer, or int32 [] or [1].
          distribution: int32 [3] as for `ragged_paged_attention`, whose last number replaces
            `num_seqs`. If both are None, all B rows are sequences.
          max_query_len: the static bound, or None.

        Raises:
          ValueError: shapes or dtypes do not fit, or both `num_seqs` and `distribution` are given.

        Example:
          >>> import jax.numpy as jnp, jattn
          >>> batch = jattn.AttentionMetadata.from_arrays(
          ...     jnp.array([4, 7, 99, 99]), jnp.array([17, 99]), jnp.array([0, 2, 99]),
          ...     num_tokens=4, block_size=16, distribution=jnp.array([0, 0, 1]))
          >>> batch.slot_mapping.tolist(), batch.seq_lens.tolist(), batch.query_start_loc.tolist()
          ([79, 112, -1, -1], [17, 0], [0, 2, 2])
        """
        _check_arrays(
            *(block_tables, seq_lens, query_start_loc),
            num_tokens=num_tokens,
            block_size=block_size,
            num_seqs=num_seqs,
            distribution=distribution,
            max_query_len=max_query_len,
        )
        # Explicit axes refuse to gather rows of arrays that they split.
        lens, starts, tables = gathered(
            tuple(jnp.asarray(x, jnp.int32) for x in (seq_lens, query_start_loc, block_tables))
        )
        rows = lens.shape[0]
        tables = tables.reshape(rows, -1)
        if distribution is not None:
            num_seqs = jnp.asarray(distribution)[2]
        count = jnp.asarray(rows if num_seqs is None else num_seqs, jnp.int32).reshape(())
        known = (count >= 0) & (count <= rows)
        count = jnp.clip(count, 0, rows)
        lens = jnp.where(jnp.arange(rows) < count, lens, 0)
        starts = jnp.where(jnp.arange(rows + 1) <= count, starts, starts[count])
        starts = jnp.where(known, starts, -1)
        slots = _slots(tables, lens, starts, num_tokens, block_size)
        return cls(tables, lens, starts, slots, max_query_len)

    def pad_to(
        self,
        *,
        num_tokens: int | None = None,
        num_seqs: int | None = None,
        table_width: int | None = None,
    ) -> AttentionMetadata:
        """Pad to a bucket's shape, on the host, so that the steps of a bucket compile once.

        Padded tokens belong to no sequence and write nothing (slot -1); padded sequences are empty.

        Args:
          num_tokens, num_seqs, table_width: the bucket's T, B and M; None leaves one unchanged.

        Raises:
          ValueError: a target is not an integer, or is below the current size.
        """
        tables = np.asarray(self.block_tables)
        lens = np.asarray(self.seq_lens)
        starts = np.asarray(self.query_start_loc)
        slots = np.asarray(self.slot_mapping)
        targets = {
            "num_tokens": (num_tokens, slots.shape[0]),
            "num_seqs": (num_seqs, tables.shape[0]),
            "table_width": (table_width, tables.shape[1]),
        }
        with checks.checking("AttentionMetadata.pad_to") as problems:
            for name, (target, have) in targets.items():
                problems.require(
                    target is None or integers.is_int(target, have),
                    name,
                    f"{target!r}",
                    f"None or an integer of at least {have}",
                )
        tokens, seqs, width = (have if want is None else want for want, have in targets.values())
        more = seqs - tables.shape[0]
        padding = ((0, more), (0, width - tables.shape[1]))
        return dataclasses.replace(
            self,
            block_tables=np.pad(tables, padding, constant_values=-1),
            seq_lens=np.pad(lens, (0, more)),
            query_start_loc=np.pad(starts, (0, more), mode="edge"),
            slot_mapping=np.pad(slots, (0, tokens - slots.shape[0]), constant_values=-1),
        )

    def as_kwargs(self) -> arguments.Batch[Array]:
        """Return the keyword arguments that describe the batch to `jattn.paged_attention`."""
        return {
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "query_start_loc": self.query_start_loc,
            "max_query_len": self.max_query_len,
        }

    @integers.with_python_ints
    def check(self, *, num_blocks: int, block_size: int) -> None:
        """Check the values of the arrays, on the host.

        Args:
          num_blocks: N of the cache these tables point into.
          block_size: S.

        Raises:
          ValueError: names a size below 1, or every block id outside the pool, `query_start_loc`
            that does not start at 0, decreases or exceeds the tokens, sequences shorter than their
            queries or longer than their table row, queries longer than `max_query_len`, slots past
            the pool, and slots written twice.
        """
        tables = np.asarray(self.block_tables)
        lens = np.asarray(self.seq_lens)
        starts = np.asarray(self.query_start_loc)
        slots = np.asarray(self.slot_mapping)
        with checks.checking("AttentionMetadata.check") as problems:
            integers.require_ints(problems, 1, num_blocks=num_blocks, block_size=block_size)
        with checks.checking("AttentionMetadata") as problems:
            shapes_fit = tables.ndim == 2 and lens.shape == tables.shape[:1]
            shapes_fit &= starts.shape == (tables.shape[0] + 1,) and slots.ndim == 1
            if not problems.require(
                shapes_fit,
                "block_tables",
                f"{tables.shape}, seq_lens {lens.shape}, query_start_loc {starts.shape}, "
                f"slot_mapping {slots.shape}",
                "[B, M], [B], [B + 1] and [T]",
            ):
                return
            queries = np.diff(starts)
            problems.require(starts[0] == 0, "query_start_loc[0]", f"{starts[0]}", "0")
            problems.require(
                starts[-1] <= slots.shape[0],
                "query_start_loc[-1]",
                f"{starts[-1]}",
                f"at most the {slots.shape[0]} tokens of slot_mapping",
            )
            for b in range(tables.shape[0]):
                self._check_row(problems, b, int(queries[b]), num_blocks, block_size)
            real = slots[(slots >= 0) & (slots < num_blocks * block_size)]
            values, counts = np.unique(real, return_counts=True)
            problems.require(
                bool((counts == 1).all()),
                "slot_mapping",
                f"writing slots {values[counts > 1][:8].tolist()} more than once",
                "without duplicates",
            )
            past = slots[slots >= num_blocks * block_size]
            problems.require(
                past.size == 0,
                "slot_mapping",
                f"naming slots {past[:8].tolist()}",
                f"below {num_blocks * block_size} (use -1 for tokens that write nothing)",
            )

    def _check_row(
        self, problems: checks.Problems, b: int, queries: int, num_blocks: int, block_size: int
    ) -> None:
        row = np.asarray(self.block_tables)[b]
        keys = int(np.asarray(self.seq_lens)[b])
        if not problems.require(
            queries >= 0, f"query_start_loc[{b + 1}]", "below the entry before it", "not decreasing"
        ):
            return
        if self.max_query_len is not None:
            problems.require(
                queries <= self.max_query_len,
                "max_query_len",
                f"{self.max_query_len}",
                f"at least {queries}, the queries of sequence {b}",
            )
        problems.require(
            keys >= queries, f"seq_lens[{b}]", f"{keys}", f"at least its {queries} query tokens"
        )
        capacity = row.shape[0] * block_size
        if not problems.require(
            keys <= capacity,
            f"seq_lens[{b}]",
            f"{keys}",
            f"at most {capacity}, the capacity of its table row of {row.shape[0]} blocks",
        ):
            return
        used = row[: max(ceil_div(keys, block_size), 0)]
        outside = used[(used < 0) | (used >= num_blocks)]
        problems.require(
            outside.size == 0,
            f"block_tables[{b}]",
            f"naming blocks {outside[:8].tolist()}",
            f"within [0, {num_blocks})",
        )


def _integers(problems: checks.Problems, name: str, values: object) -> np.ndarray:
    """Return `values` as int64 [n]; note a problem and return [0] unless they are n int32 ones."""
    try:
        found = np.asarray(values)
    except ValueError:  # rows of unequal length
        found = np.empty((), object)
    if found.ndim == 1 and found.size == 0:
        return np.zeros(0, np.int64)
    if not problems.expect(
        found.ndim == 1 and found.dtype.kind in "iu", name, values, "a sequence of integers"
    ):
        return np.zeros(0, np.int64)
    if not integers.require_int32_values(problems, name, found):
        return np.zeros(0, np.int64)
    return found.astype(np.int64)


def _check_arrays(
    block_tables: object,
    seq_lens: object,
    query_start_loc: object,
    *,
    num_tokens: int,
    block_size: int,
    num_seqs: object,
    distribution: object,
    max_query_len: object,
) -> None:
    """Check the arguments of `from_arrays` by shape and dtype."""
    given = {"block_tables": block_tables, "seq_lens": seq_lens, "num_seqs": num_seqs}
    given |= {"query_start_loc": query_start_loc, "distribution": distribution}
    arrays.check_given("AttentionMetadata.from_arrays", given)
    arrays.check_numbers("AttentionMetadata.from_arrays", given)
    with checks.checking("AttentionMetadata.from_arrays") as problems:
        size = next(iter(arrays.shape_of(seq_lens)), None)
        good = arrays.check_int32(problems, "seq_lens", seq_lens, (None,), ("B",))
        problems.expect(not good or size != 0, "seq_lens", seq_lens, "[B] of at least one sequence")
        after = None if size is None else size + 1
        arrays.check_int32(problems, "query_start_loc", query_start_loc, (after,), ("B + 1",))
        shape = arrays.shape_of(block_tables)
        flat = size is not None and size > 0 and len(shape) == 1 and shape[0] % size == 0
        shaped = arrays.check_int32_values(
            problems, "block_tables", block_tables
        ) and problems.expect(
            arrays.matches(block_tables, np.int32, (size, None)) or
            (flat and arrays.matches(block_tables, np.int32, (None,))),
            "block_tables",
            block_tables,
            f"int32[B, M] or [B * M]{arrays.axis_is('B', size)}",
        )  # fmt: skip
        problems.expect(
            not shaped or min(shape) > 0, "block_tables", block_tables, "[B, M] with no empty axis"
        )
        for name, static in (("num_tokens", num_tokens), ("block_size", block_size)):
            problems.expect(integers.is_int(static, 1), name, static, "an integer of at least 1")
        if arrays.check_int32_values(problems, "num_seqs", num_seqs):
            b = arrays.axis_is("B", size)
            problems.expect(
                num_seqs is None
                or (integers.is_int(num_seqs, 0) and (size is None or num_seqs <= size))
                or arrays.matches(num_seqs, np.int32, (), (1,)),
                "num_seqs",
                num_seqs,
                f"an integer between 0 and B{b}, or int32 of shape [] or [1]",
            )
        problems.expect(
            max_query_len is None or integers.is_int(max_query_len, 1),
            "max_query_len",
            max_query_len,
            "None or an integer of at least 1",
        )
        if arrays.check_int32_values(problems, "distribution", distribution):
            problems.expect(
                distribution is None
                or (num_seqs is None and arrays.matches(distribution, np.int32, (3,))),
                "distribution",
                distribution,
                "int32[3], or None where num_seqs is given",
            )


def _slots(
    tables: jax.Array, lens: jax.Array, starts: jax.Array, num_tokens: int, block_size: int
) -> jax.Array:
    """Return int32 [T]: every token's slot, or -1 if it has no sequence or is past its table."""
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(starts, tokens, side="right").astype(jnp.int32) - 1
    row = jnp.clip(row, 0, lens.shape[0] - 1)
    position = lens[row] - starts[row + 1] + tokens
    column, width = position // block_size, tables.shape[1]
    block = tables[row, jnp.clip(column, 0, width - 1)]
    fits = (block >= 0) & (block < integers.max_blocks(block_size))
    real = (tokens < starts[-1]) & (position >= 0) & (column < width) & fits
    slot = jnp.where(fits, block, 0) * block_size + position % block_size
    return jnp.where(real, slot, -1)
