"""Static sizes of the prefill kernels, the rule that picks them, and their shared memory."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jattn import call as calls
from jattn.pallas import machine
from jattn.pallas.mosaic_gpu import scratch

ROWS = scratch.PRODUCT_ROWS  # (query head, query token) pairs that a warpgroup computes
LARGEST = 256  # up to this D and V one warpgroup holds its rows' whole accumulator
# Registers of a thread in each of two consumer warpgroups and in the producer: 65536 in all, in
# steps of 8. With 232 and 40 the consumers spill a few bytes at V = 256 and above.
REGISTERS = (240, 24)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a prefill kernel cuts up its work.

    Two units of 64 rows share the keys and values they read: two warpgroups of one block of the
    grid, or, where `wide`, two blocks of a cluster. A unit's rows are `row_heads` query heads of
    one KV head times `row_tokens` neighbouring tokens.

    Attributes:
      head_dim, value_dim: D and V.
      wide: the value columns are split over two warpgroups, whose accumulators hold half each.
      block_kv: keys of a tile.
      stages: tiles of K, and of V, that are in flight or in use.
      row_heads: query heads of a unit; a power of two up to 8.
      units: 64-row units that share their keys.
      split_heads: units differ in heads, not in tokens; they then see the same keys.
      copy_tokens: keys that one copy brings; divides both the block and the tile.
      stored_bytes: of an element of the cache; 1 is fp8, of which one tile of K and one of V are
        widened at a time.
      ahead: whether the next tile's logits are computed together with a tile's product.
    """

    head_dim: int
    value_dim: int
    wide: bool
    block_kv: int
    stages: int
    row_heads: int
    units: int
    split_heads: bool
    copy_tokens: int
    stored_bytes: int = 2
    ahead: bool = False

    def __post_init__(self) -> None:
        assert ROWS % self.row_heads == 0
        assert self.row_tokens % scratch.COPIED_ROWS == 0
        assert self.block_kv % self.copy_tokens == 0
        assert self.copy_tokens % scratch.COPIED_ROWS == 0
        assert self.head_dim % 16 == 0
        assert self.value_dim % 16 == 0
        assert self.stages == 2 or not self.wide  # a tile for each warpgroup's logits
        if self.narrow:
            assert not self.wide
            assert self.block_kv % ROWS == 0
            assert math.gcd(self.head_dim, self.value_dim) % 32 == 0

    @property
    def narrow(self) -> bool:
        """Whether elements are fp8, which is widened."""
        return self.stored_bytes == 1

    @property
    def row_tokens(self) -> int:
        """Tokens of a unit; row r is token r % row_tokens of head r // row_tokens."""
        return ROWS // self.row_heads

    @property
    def tile_tokens(self) -> int:
        """Tokens of all units together."""
        return self.row_tokens * (1 if self.split_heads else self.units)

    @property
    def tile_heads(self) -> int:
        """Query heads of all units together."""
        return self.row_heads * (self.units if self.split_heads else 1)

    @property
    def copies(self) -> int:
        """Copies that fill a tile of K or V."""
        return self.block_kv // self.copy_tokens


def swizzle_of(columns: int) -> int:
    """Return the widest swizzle in bytes that rows of this many 16-bit columns allow."""
    return next(s for s in (128, 64, 32) if columns * 2 % s == 0)


def value_swizzle(tiles: Tiles) -> int:
    """Return the swizzle of V's tiles and of the probabilities; no wider than a tile of keys."""
    columns = tiles.value_dim // 2 if tiles.wide else tiles.value_dim
    keys = int(np.gcd(tiles.block_kv, 64))
    return min(swizzle_of(columns), 2 * keys)


def scratch_of(tiles: Tiles, call: calls.Call) -> dict[str, scratch.Item]:
    """List a kernel's shared memory; the head of its file says what writes and reads it."""
    dtype, stored = scratch.compute_dtype(call), call.key_format.value_dtype
    out_dtype = np.dtype(call.out_dtype)
    d, stages, block_kv = tiles.head_dim, tiles.stages, tiles.block_kv
    v = tiles.value_dim // 2 if tiles.wide else tiles.value_dim
    d_swizzle, v_swizzle = swizzle_of(d), value_swizzle(tiles)
    query = scratch.Buffer((1 if tiles.wide else 2, ROWS, d), dtype, d_swizzle)
    result = (
        scratch.Buffer((2, ROWS, v), out_dtype, swizzle_of(v)),
        scratch.Buffer((2, ROWS, v), out_dtype),
    )
    found: dict[str, scratch.Item] = {}
    if tiles.wide or d == v:
        # Warpgroups that do not end together may only write their result over their own query.
        found["query_and_result"] = scratch.Union((query, *result))
    else:
        found |= {"query": query, "result": scratch.Union(result)}
    if tiles.wide:
        cluster = "unit" if tiles.units > 1 else None
        return found | {
            "k": scratch.Buffer((2, block_kv, d), dtype, d_swizzle),
            "v": scratch.Buffer((4, block_kv, v), dtype, v_swizzle),
            "p": scratch.Buffer((2, ROWS, block_kv), dtype, v_swizzle),
            "top": scratch.Buffer((2, ROWS), np.float32),
            "total": scratch.Buffer((2, ROWS), np.float32),
            "q_ready": scratch.Barriers(arrivals=tiles.row_heads),
            "k_ready": scratch.Barriers(2, tiles.copies),
            "v_ready": scratch.Barriers(4, tiles.copies),
            "k_free": scratch.Barriers(2, 1, cluster),
            "v_free": scratch.Barriers(2, 2, cluster),
            "top_ready": scratch.Barriers(),
            "p_ready": scratch.Barriers(2),
            "p_free": scratch.Barriers(),
            "totals_ready": scratch.Barriers(arrivals=2),
        }
    found |= {
        "q_ready": scratch.Barriers(2, tiles.row_heads),
        "ready": scratch.Barriers(2 * stages, tiles.copies),
    }
    found["turn"] = scratch.Barriers(2) if tiles.ahead else scratch.Barriers(arrivals=2)
    if not tiles.narrow:
        found |= {
            "k": scratch.Buffer((stages, block_kv, d), dtype, d_swizzle),
            "v": scratch.Buffer((stages, block_kv, v), dtype, v_swizzle),
            "free": scratch.Barriers(2 * stages, 2),
            "v_clean": scratch.Barriers(),
        }
    else:
        found |= {
            "k": scratch.Buffer((stages, block_kv, d), stored, d_swizzle // 2),
            "v": scratch.Buffer((stages, block_kv, v), stored, v_swizzle // 2),
            "wide_k": scratch.Buffer((1, block_kv, d), dtype, d_swizzle),
            "wide_v": scratch.Buffer((1, block_kv, v), dtype, v_swizzle),
            "free": scratch.Barriers(2 * stages),
            "handed": scratch.Barriers(4),
        }
    if call.return_lse:
        found["lse_rows"] = scratch.Buffer((2, ROWS), np.float32)
    return found


def shared_bytes(tiles: Tiles, call: calls.Call) -> int:
    """Return the shared memory of a block of the grid."""
    return scratch.total_bytes(scratch_of(tiles, call))


def choose(call: calls.Call, *, cluster: bool | None = None) -> Tiles:
    """Choose the tiles of a call; with `cluster`, wide ones for two blocks that share copies.

    By default blocks share them wherever two units of rows read the same keys.

    128 keys by 2 or more stages where they fit, else 64: at D = V = 128 and 64 the sizes that
    public autotuning of a contiguous kernel of this shape found best on an H100, and the largest
    that fit at 192 and 256. Rows pack as many heads of a group as a power of two allows, so that a
    tile has few tokens: less of a causal tile is masked, and short sequences fill it better.
    """
    wide = call.head_dim > LARGEST or call.value_dim > LARGEST
    if cluster is None:
        cluster = _shares(call)
    units = 1 if wide and not cluster else 2
    packed = math.gcd(call.group, (4 if wide else 8) * units)  # copies of 8 heads spill where wide
    split_heads = packed >= units
    row_heads = packed // units if split_heads else packed
    sizes = ((64, 2), (32, 2)) if wide else ((128, 2), (64, 4), (64, 3), (64, 2), (32, 2))
    for block_kv, most in sizes:
        tiles = Tiles(
            head_dim=call.head_dim,
            value_dim=call.value_dim,
            wide=wide,
            block_kv=block_kv,
            stages=most,
            row_heads=row_heads,
            units=units,
            split_heads=split_heads,
            copy_tokens=math.gcd(call.block_size, block_kv),
            stored_bytes=call.key_format.word_dtype.itemsize,
            # fp8 is widened in between, and with slopes D = 128 spills 80 bytes.
            ahead=not wide
            and call.key_format.word_dtype.itemsize == 2
            and "alibi_slopes" not in call.options,
        )
        if shared_bytes(tiles, call) <= scratch.MOST_BYTES:
            return tiles
    raise AssertionError(f"no tiles for D = {call.head_dim}, V = {call.value_dim}")


def _shares(call: calls.Call) -> bool:
    """Whether two blocks would have rows that read the same keys, and can each copy half of these.

    A unit that does not share keys holds up to four heads. There are two units if a group has more
    heads, in an even number, or a sequence more tokens than a unit holds with them. A copy of 8
    rows is cut in two along its columns, which must be an even number of times 128 bytes.
    """
    heads = math.gcd(call.group, 4)
    two = (call.group % 2 == 0 and call.group > heads) or call.max_query_len > ROWS // heads
    return two and (call.block_size % 16 == 0 or call.head_dim % 128 == call.value_dim % 256 == 0)


def max_tiles(num_tokens: int, num_seqs: int, tile_tokens: int) -> int:
    """Return the most tiles of a batch: each sequence, and padding, may begin and end in one."""
    return min(num_tokens, num_tokens // tile_tokens + 2 * (num_seqs + 1))


def refusals(call: calls.Call) -> list[str]:
    """Return why these kernels cannot run a call that the decode kernel may be able to run."""
    found = []
    d, v = call.head_dim, call.value_dim
    fp8 = max(d, v) <= LARGEST  # above, where half a tile is all that fits, nothing is widened
    for name, format in (("key", call.key_format), ("value", call.value_format)):
        if format.name != call.query_dtype and not (fp8 and format.narrow):
            found.append(
                f"{name} cache format is {format.name} and the query {call.query_dtype}; prefill "
                f"(more than {machine.DECODE_TOKENS} query tokens a sequence) takes caches in the "
                f"query's own dtype and, up to D = {LARGEST}, in fp8"
            )
    if d % 16 or v % 16:
        found.append(f"head sizes D = {d}, V = {v}; prefill takes multiples of 16")
    if max(d, v) > LARGEST and v % 128:
        found.append(f"value size V = {v}; prefill above D = {LARGEST} takes multiples of 128")
    tiles = max_tiles(call.num_tokens, call.num_seqs, scratch.COPIED_ROWS)
    if tiles > machine.MOST_ROWS_OF_BLOCKS:
        found.append(
            f"{call.num_tokens} query tokens of {call.num_seqs} sequences may be {tiles} tiles; "
            f"prefill takes at most {machine.MOST_ROWS_OF_BLOCKS}"
        )
    return found
