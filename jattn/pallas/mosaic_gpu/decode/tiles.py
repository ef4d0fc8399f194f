"""Tile sizes of the decode kernel: the rule that picks them and the shared memory they need."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jattn import call as calls
from jattn.integers import round_up
from jattn.pallas import machine
from jattn.pallas.mosaic_gpu import scratch

TILE = scratch.PRODUCT_ROWS  # tokens: S^T = K Q^T has a key per row
# A grid block's share is at least this much of K and V: one more split is one more partial result
# to write and to read.
MIN_BYTES = 65536
# float32 accumulators O^T of one warpgroup: 64 of a thread's 255 registers. With 128, ptxas spills
# (704 bytes at R = 32, V = 512, jax 0.12).
MAX_ACCUMULATORS = 64 * 128


@dataclasses.dataclass(frozen=True)
class Part:
    """One product O^T[place : place + rows] += V^T P^T.

    Attributes:
      chunk: which chunk of V.
      first: its first column within the chunk.
      rows: columns of V, rows of O^T; a multiple of `scratch.PRODUCT_ROWS`.
      place: the first row in the stored O^T.
    """

    chunk: int
    first: int
    rows: int
    place: int


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """Static sizes of the decode kernel.

    Attributes:
      row_block: R, rows (query token, head of the group) of one item; columns of S^T and O^T.
      consumers: warpgroups that compute, each its share of the rows, on the same keys.
      kernel_block: tokens that one TMA copy brings; divides the block size and `TILE`.
      chunk: columns of K or V in one place of the ring.
      ring: places of TILE tokens by `chunk` columns, K and V taking turns.
      blocks_per_core: grid blocks that share a multiprocessor.
      min_share: the fewest tiles that a grid block takes, unless no more are left.
      stored_bytes: of an element of the ring: 1 for fp8.
      head_dim, value_dim: D and V.
    """

    row_block: int
    consumers: int
    kernel_block: int
    chunk: int
    ring: int
    blocks_per_core: int
    min_share: int
    stored_bytes: int
    head_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        assert self.rows % (8 if self.consumers == 1 else 16) == 0  # a copy of m and l is 128 bytes
        assert self.consumers == 1 or not self.narrow
        assert TILE % self.kernel_block == 0
        assert self.kernel_block % scratch.COPIED_ROWS == 0
        assert self.rows * self.stored_rows <= MAX_ACCUMULATORS
        # Fewer places than one tile of K or V takes would never let a tile through.
        assert self.ring > self.key_chunks

    @property
    def narrow(self) -> bool:
        """Whether elements are fp8, which the consumer widens."""
        return self.stored_bytes == 1

    @property
    def rows(self) -> int:
        """Rows of one consumer."""
        return self.row_block // self.consumers

    @property
    def key_chunks(self) -> int:
        """Chunks of K's columns."""
        return self.head_dim // self.chunk

    @property
    def value_chunks(self) -> int:
        """Chunks of V's columns."""
        return self.value_dim // self.chunk

    @property
    def parts(self) -> tuple[Part, ...]:
        """The products that make O^T; their rows are stored one after another."""
        least = scratch.PRODUCT_ROWS
        whole = self.chunk // least * least
        windows = [(0, whole)]
        if whole < self.chunk:
            # The last columns, some of them a second time: `wgmma` takes no fewer rows.
            windows.append((self.chunk - least, least))
        found, place = [], 0
        for c in range(self.value_chunks):
            for first, rows in windows:
                found.append(Part(c, first, rows, place))
                place += rows
        return tuple(found)

    @property
    def stored_rows(self) -> int:
        """Rows of O^T as stored, including those that come twice."""
        return self.parts[-1].place + self.parts[-1].rows

    @property
    def row_of_value(self) -> tuple[int, ...]:
        """For each column of V, its row in the stored O^T."""
        rows = {
            part.chunk * self.chunk + part.first + i: part.place + i
            for part in self.parts
            for i in range(part.rows)
        }
        return tuple(rows[v] for v in range(self.value_dim))

    @property
    def swizzle(self) -> int:
        """Bytes, of every operand of `wgmma`."""
        return math.gcd(2 * self.chunk, 128)

    @property
    def ring_swizzle(self) -> int:
        """Bytes, of the ring: for fp8 as many columns as the stage's swizzle has, or fewer."""
        return math.gcd(self.stored_bytes * self.chunk, 64 * self.stored_bytes)

    def scratch(self, stored: Any, dtype: Any) -> dict[str, scratch.Item]:
        """List the kernel's shared memory; the head of its file says what writes and reads it.

        Args:
          stored: the cache's dtype.
          dtype: of the products' operands.
        """
        rows, chunk, ring, consumers = self.rows, self.chunk, self.ring, self.consumers
        found: dict[str, scratch.Item] = {
            "q_s": scratch.Buffer((2, consumers, rows, self.head_dim), dtype, self.swizzle),
            "ring_s": scratch.Buffer((ring, TILE, chunk), stored, self.ring_swizzle),
            "p_s": scratch.Buffer((consumers, rows, TILE), dtype, self.swizzle),
            "o_s": scratch.Buffer((consumers, 2, self.parts[0].rows, rows), np.float32),
            "ml_s": scratch.Buffer((consumers, 2, rows), np.float32),
            "q_full": scratch.Barriers(2, consumers),
            "q_empty": scratch.Barriers(2, consumers),
            "full": scratch.Barriers(ring, TILE // self.kernel_block),
            "empty": scratch.Barriers(ring, consumers),
        }
        if consumers > 1:
            found |= {"clean": scratch.Barriers(ring), "turn": scratch.Barriers(consumers)}
        if self.narrow:
            found["wide_s"] = scratch.Buffer((2, TILE, chunk), dtype, self.swizzle)
        return found

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a grid block."""
        declared = self.scratch(np.uint8 if self.narrow else np.float16, np.float16)
        return scratch.total_bytes(declared)


def chunk_of(head_dim: int, value_dim: int, stored_bytes: int) -> int | None:
    """Return the columns of K and of V in one place of the ring; None if no number suits both.

    At least 64 columns (the rows of V^T that `wgmma` takes), in whole swizzles of 32 bytes: 128 or
    64, which are whole swizzles of 128 bytes, if K and V allow, and otherwise the fewest.
    """
    step = 32 // stored_bytes if stored_bytes == 1 else 16
    common = math.gcd(head_dim, value_dim)
    fits = [c for c in range(64, common + 1) if common % c == 0 and c % step == 0]
    best = [c for c in fits if c % 64 == 0 and c <= 128]
    return max(best, default=min(fits, default=None))


def row_blocks(rows: int, stored_rows: int, stored_bytes: int) -> list[tuple[int, int]]:
    """Return choices of `(R, consumers)` for `rows` rows: one that holds them, then ever fewer.

    A consumer holds as many rows as registers do. Two read the same keys in place. There is only
    one for fp8, which each would widen for itself; for 8 rows, where the copy of the second's m and
    l would not begin at a multiple of 128 bytes; and for 32 rows of V = 256, which would spill 32
    to 80 bytes.
    """
    limit = MAX_ACCUMULATORS // stored_rows
    fits = [(size, 1) for size in (8, 16, 32) if size <= limit]
    most = fits[-1][0]
    if stored_bytes == 2 and (most == 16 or (most == 32 and stored_rows <= 192)):
        fits.append((2 * most, 2))
    enough = next((i for i, found in enumerate(fits) if found[0] >= rows), len(fits) - 1)
    return fits[enough::-1]


def pick(call: calls.Call, span: int) -> DecodeTiles:
    """Choose the tiles of a call whose decoded sequences have up to `span` query tokens.

    Of the rows that a work item may have, the best that fit into shared memory.
    """
    # In a batch with prefill most other sequences decode one token and need one item; the rare
    # sequence with a few tokens gets several.
    rows = call.group * (span if call.max_query_len <= span else 1)
    stored = call.key_format.word_dtype.itemsize
    chunk = chunk_of(call.head_dim, call.value_dim, stored)
    assert chunk is not None, "refused by the row"
    stored_rows = call.value_dim // chunk * round_up(chunk, scratch.PRODUCT_ROWS)
    for most, consumers in row_blocks(rows, stored_rows, stored):
        tiles = _tiles(call, span, most, consumers, chunk, stored_rows)
        if tiles.shared_bytes <= scratch.MOST_BYTES:
            return tiles
    raise AssertionError(f"no tiles of {call.head_dim} and {call.value_dim} columns fit")


def _tiles(
    call: calls.Call, span: int, rows: int, consumers: int, chunk: int, stored_rows: int
) -> DecodeTiles:
    """Return tiles of `rows` rows, with as many places in the ring as shared memory holds."""
    stored = call.key_format.word_dtype.itemsize
    # Two blocks on a multiprocessor hide each other's softmax, but leave a thread 128 registers.
    # With them ptxas (jax 0.12) spills R = 16 from V = 256 on, R = 32, D = 576 (by 8 bytes), and
    # where fp8 is widened V = 256 (by 16 bytes), 512 (by 8 to 88) and R = 16; and chunks of more
    # than 256 columns (by 24 to 672), which only head sizes with a prime factor above 16 have.
    most = {(8, 2): 512, (8, 1): 192, (16, 2): 128}.get((rows, stored), 0)
    blocks = 2 if max(call.head_dim, stored_rows) <= most and chunk <= 256 else 1
    kernel_block = math.gcd(call.block_size, TILE)
    if (rows, stored) == (8, 2) and call.head_dim + stored_rows <= 128:
        # A tile of so few bytes is read before two blocks have computed theirs. In the 64 registers
        # that four leave, slopes spill 8 bytes, and several tokens 8 to 16.
        blocks = 4 if span == 1 and "alibi_slopes" not in call.options else 2
    tile_bytes = TILE * (call.head_dim + call.value_dim) * stored
    # 1 KiB of each block's shared memory belongs to the system. Another place is another in flight;
    # past 32 they would only add barriers.
    budget = (scratch.MOST_BYTES + machine.KIB) // blocks - machine.KIB
    tiles = DecodeTiles(
        row_block=rows,
        consumers=consumers,
        kernel_block=kernel_block,
        chunk=chunk,
        ring=call.head_dim // chunk + 1,
        blocks_per_core=blocks,
        min_share=max(1, MIN_BYTES // tile_bytes),
        stored_bytes=stored,
        head_dim=call.head_dim,
        value_dim=call.value_dim,
    )
    place = dataclasses.replace(tiles, ring=tiles.ring + 1).shared_bytes - tiles.shared_bytes
    ring = tiles.ring + max(0, budget - tiles.shared_bytes) // place
    return dataclasses.replace(tiles, ring=min(ring, 32))
