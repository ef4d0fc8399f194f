"""How decode's work is divided: equal runs of tiles, planned on the device from the lengths.

    cut every sequence's visible keys into tiles of `tile` tokens
    a sequence has an item for every KV head and every block of its rows, each of all its tiles
    number all tiles: by sequence, within it by item, and within that from the oldest key on
    block c of the grid takes tiles [c * share, (c + 1) * share)

So one long sequence is spread over the whole GPU and many short ones are assigned whole, whatever
the table's width or the batch's padding. The part of an item that one grid block takes is a
*split*; its partial result goes to place `item + c`, which no other split has, because going from
one split to the next moves on by one item or by one grid block. The merge reads an item's splits
there.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp

from jattn import call as calls
from jattn import spec
from jattn.integers import ceil_div


class Fact(enum.IntEnum):
    """Columns of `Plan.facts`."""

    START = 0  # the number of the sequence's first tile
    TILES = 1  # tiles of each of its items
    ROW_BLOCKS = 2  # blocks of rows that hold queries
    NEXT = 3  # the next sequence with tiles
    BASE = 4  # the first tile's first position
    FIRST_KEY = 5  # no query of the sequence sees a key before this position
    LAST_KEY = 6  # or after this one
    FIRST_QUERY = 7  # the position of the first query token
    SEQ_LEN = 8
    IS_CAUSAL = 9  # 0 or 1
    TOKEN = 10  # the first query token, counted over the batch
    QUERIES = 11  # tokens that get results here: all it has, if it breaks a promise


NUM_FACTS = 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a call: one array, because XLA makes it in one kernel, or a kernel's ref to it.

    Attributes:
      numbers: int32; `NUM_FACTS` of each sequence, the sequence of each grid block's first tile,
        tiles per grid block, tiles in all, query tokens in all.
      num_seqs, grid: sequences, grid blocks.
    """

    numbers: Any
    num_seqs: int
    grid: int

    def __getitem__(self, at: tuple[Any, Fact]) -> Any:
        """A fact of a sequence."""
        seq, fact = at
        return self.numbers[seq * NUM_FACTS + int(fact)]

    def first_seq(self, block: Any) -> Any:
        """The sequence of a grid block's first tile."""
        return self.numbers[self.num_seqs * NUM_FACTS + block]

    @property
    def share(self) -> Any:
        """Tiles per grid block."""
        return self.numbers[self.num_seqs * NUM_FACTS + self.grid]

    @property
    def total(self) -> Any:
        """Tiles in all."""
        return self.numbers[self.num_seqs * NUM_FACTS + self.grid + 1]

    @property
    def queries(self) -> Any:
        """Query tokens of all sequences: what follows them in the batch is padding."""
        return self.numbers[self.num_seqs * NUM_FACTS + self.grid + 2]


def make(
    call: calls.Call,
    operands: calls.Operands,
    counts: jax.Array,
    *,
    tile: int,
    kernel_block: int,
    row_block: int,
    grid: int,
    min_share: int,
) -> Plan:
    """Divide the tiles of sequences with `counts` [B] query tokens each; 0 for none.

    Args:
      tile, kernel_block: tokens; a tile starts at a multiple of `kernel_block`.
      row_block: rows (query token, head of the group) that one item holds.
      grid: grid blocks to divide them among.
      min_share: the fewest tiles that a grid block takes, unless no more are left.
    """
    starts, seq_lens = operands.query_start_loc, jnp.minimum(operands.seq_lens, call.capacity)
    first_query = spec.first_query_position(operands.seq_lens, counts)
    sight = operands.sight(call)
    start, end = spec.key_range(first_query, first_query + counts - 1, seq_lens, sight)
    base = start // kernel_block * kernel_block
    tiles = jnp.where((counts > 0) & (end > start), ceil_div(end - base, tile), 0)
    row_blocks = ceil_div(counts * call.group, row_block)
    work = tiles * row_blocks * call.num_kv_heads
    ends = jnp.cumsum(work, dtype=jnp.int32)
    total = ends[-1]
    share = jnp.maximum(ceil_div(total, grid), min_share)

    def sequence_at(tiles_before: jax.Array) -> jax.Array:
        # Unrolled: one fusion on a GPU, where a loop would be a launch per step.
        found = jnp.searchsorted(ends, tiles_before, side="right", method="scan_unrolled")
        return jnp.minimum(found.astype(jnp.int32), call.num_seqs - 1)

    causal = jnp.broadcast_to(jnp.asarray(sight.is_causal), tiles.shape).astype(jnp.int32)
    columns = {
        Fact.START: ends - work,
        Fact.TILES: tiles,
        Fact.ROW_BLOCKS: row_blocks,
        Fact.NEXT: sequence_at(ends),
        Fact.BASE: base,
        Fact.FIRST_KEY: start,
        Fact.LAST_KEY: jnp.maximum(end - 1, 0),
        Fact.FIRST_QUERY: first_query,
        Fact.SEQ_LEN: seq_lens,
        Fact.IS_CAUSAL: causal,
        Fact.TOKEN: starts[:-1],
        Fact.QUERIES: jnp.where(operands.seq_lens < 0, starts[1:] - starts[:-1], counts),
    }
    empty = jnp.zeros_like(tiles)
    facts = jnp.stack([columns[fact] for fact in Fact] + [empty] * (NUM_FACTS - len(Fact)), axis=1)
    firsts = sequence_at(jnp.arange(grid, dtype=jnp.int32) * share)
    parts = facts.reshape(-1), firsts, share[None], total[None], starts[-1:]
    numbers = jnp.concatenate(parts)
    return Plan(numbers, call.num_seqs, grid)
