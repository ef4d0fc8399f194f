"""Tile sizes of the decode kernel: the rule that picks them and the shared memory they need."""

from __future__ import annotations

import dataclasses
import math

from jattn import call as calls
from jattn.pallas import mosaic_compat as mgpu

TILE = 64  # tokens: the rows of one `wgmma`, S^T = K Q^T having a key per row
CHUNK = 128  # columns of K or V in one place of the ring
# float32 accumulators O^T of one warpgroup: 128 of a thread's 255 registers.
MAX_ACCUMULATORS = 128 * 128


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """Static sizes of the decode kernel.

    Attributes:
      row_block: R, rows (query token, head of the group) of one item; columns of S^T and O^T.
      kernel_block: tokens that one TMA copy brings; divides the block size and `TILE`.
      ring: places of TILE tokens by CHUNK columns, K and V taking turns.
      blocks_per_core: grid blocks that share a multiprocessor.
      min_share: tiles that a grid block takes at least, while there are any.
      swizzle: bytes, of every operand of `wgmma`.
      stored_bytes: of an element of the ring: 1 for fp8.
      head_dim, value_dim: D and V.
    """

    row_block: int
    kernel_block: int
    ring: int
    blocks_per_core: int
    min_share: int
    swizzle: int
    stored_bytes: int
    head_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        assert self.row_block % 8 == 0
        assert TILE % self.kernel_block == 0
        assert self.kernel_block % 8 == 0
        assert self.row_block * len(self.value_chunks) * CHUNK <= MAX_ACCUMULATORS or (
            self.row_block * -(-self.value_dim // 64) * 64 <= MAX_ACCUMULATORS
        )
        # Fewer places than one tile of K or V takes would never let a tile through.
        assert self.ring >= max(len(self.key_chunks), 2)
        assert self.smem_bytes <= mgpu.HOPPER_SMEM

    @property
    def key_chunks(self) -> tuple[tuple[int, int], ...]:
        """`(first column, columns)` of each piece of K; the last may be narrower."""
        return chunks(self.head_dim)

    @property
    def value_chunks(self) -> tuple[tuple[int, int], ...]:
        """`(first column, columns)` of each piece of V."""
        return chunks(self.value_dim)

    @property
    def width(self) -> int:
        """Columns of a place in the ring: a whole number of `wgmma` rows for V^T."""
        return max(self.key_chunks[0][1], padded(self.value_chunks[0][1]))

    @property
    def ring_swizzle(self) -> int:
        """Bytes; 0 where the columns of fp8 leave none (its places are not read by `wgmma`)."""
        if self.stored_bytes == 2:
            return self.swizzle
        common = math.gcd(self.head_dim, self.value_dim, 128)
        return common if common >= 32 else 0

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a grid block, barriers and reductions included."""
        slot = TILE * self.width
        query = 2 * self.row_block * self.head_dim * 2
        return (
            self.ring * slot * self.stored_bytes
            + (2 * slot * 2 if self.stored_bytes == 1 else 0)
            + query
            + self.row_block * TILE * 2
            + 2 * padded(self.value_chunks[0][1]) * self.row_block * 4
            + 2 * self.row_block * 4
            + REDUCTION_BYTES
            + (2 * self.ring + 4) * 8
            + 2048  # alignment of each buffer to 1024 bytes, at worst for most
        )


REDUCTION_BYTES = 2048


def padded(columns: int) -> int:
    """Rows of V^T that `wgmma` takes for so many columns of V."""
    return -(-columns // 64) * 64


def chunks(size: int) -> tuple[tuple[int, int], ...]:
    """`(first, width)` of the pieces of CHUNK columns that cover `size`."""
    return tuple((at, min(CHUNK, size - at)) for at in range(0, size, CHUNK))


def row_block(rows: int, value_dim: int) -> int:
    """R for sequences of so many rows: what holds them, or as many as registers hold."""
    limit = MAX_ACCUMULATORS // padded(value_dim)
    return next((r for r in (8, 16, 32, 64) if r >= rows and r <= limit), min(64, limit // 8 * 8))


def pick(call: calls.Call, span: int) -> DecodeTiles:
    """The tiles of a call whose decoded sequences have up to `span` query tokens."""
    # In a batch with prefill most of the others decode one token: an item for those, several for
    # the rare sequence with a few.
    rows = call.group * (span if call.max_query_len <= span else 1)
    rows = row_block(rows, call.value_dim)
    stored = call.key_format.word_dtype.itemsize
    swizzle = 2 * math.gcd(call.head_dim, call.value_dim, 64)
    accumulators = rows * padded(call.value_dim) // 128
    # Two blocks on a multiprocessor hide each other's softmax, if registers (128 a thread) and
    # half of the shared memory do.
    blocks = 2 if accumulators <= 32 else 1
    tile_bytes = TILE * (call.head_dim + call.value_dim) * stored

    def tiles(ring: int) -> DecodeTiles:
        return DecodeTiles(
            row_block=rows,
            kernel_block=math.gcd(call.block_size, TILE),
            ring=ring,
            blocks_per_core=blocks,
            min_share=max(1, 65536 // tile_bytes),
            swizzle=swizzle,
            stored_bytes=stored,
            head_dim=call.head_dim,
            value_dim=call.value_dim,
        )

    # 1 KiB of each block's shared memory belongs to the system.
    budget = (228 // blocks - 1) * 1024
    ring = 32
    while True:
        try:
            found = tiles(ring)
        except AssertionError:
            found = None
        if found is not None and found.smem_bytes <= budget:
            return found
        ring -= 1
