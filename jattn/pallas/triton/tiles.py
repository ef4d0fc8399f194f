"""Tile sizes of the Triton kernels: the rule that picks them, and the shared memory they need.

Nothing here was tuned on a GPU yet. The sizes are some that the compiler keeps in registers, picked
by a model of what they wait for (`benchmarks.gpu.triton_tiles`); tests hold them to no spills, and
`benchmarks.gpu --part tune` tries others where there is a GPU.
"""

from __future__ import annotations

import dataclasses

from jattn import call as calls
from jattn import formats
from jattn.pallas import machine

# Sequences with up to this many query tokens are decoded: their keys are split over programs.
MAX_DECODE_QUERIES = 8
# Where prefill would have work for at most one in so many cores, the decode kernel answers the
# whole call: its tiles are smaller and all masked, which should cost less than a factor of 2. With
# fewer keys than these in a table there is little to deal out.
CORES_A_TILE = 3
MANY_KEYS = 2048


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Static sizes of one kernel.

    Attributes:
      rows: query rows of a tile; a power of two, at least 16, for the matrix units.
      keys: of a step; a power of two, at least 16.
      warps: of a program.
      stages: of the loop over keys, as Triton counts them. Keys and values are loaded from where a
        block id says, which is loaded too, and Triton counts that load's stages with theirs.
      per_core: programs that fit on a streaming multiprocessor, by registers and shared memory.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    per_core: int

    @property
    def registers(self) -> int:
        """Of a thread, so that `per_core` programs have room in a core's 65,536; 255 at most."""
        return min(255, 65536 // (32 * self.warps * self.per_core) // 8 * 8)

    def __post_init__(self) -> None:
        for name in ("rows", "keys"):
            size = getattr(self, name)
            assert size >= 16, f"{name} is {size}"
            assert size & (size - 1) == 0, f"{name} is {size}"
        assert self.warps in (4, 8), self.warps
        assert self.stages >= 1
        assert self.per_core >= 1


def parts(size: int) -> tuple[int, int]:
    """A head size as one or two powers of two, the second 0 where there is one: 576 is 512 + 64.

    The smallest sum that holds it, with a second part of at least 32: one of 16 would leave most
    warps without a column and spills registers. 80 and 96 are 64 + 32, 112 is 128.
    """
    whole = max(16, power_of_two(size))
    if size <= 16:
        return 16, 0
    low = whole if whole == size else whole // 2
    rest = max(32, power_of_two(size - low)) if size > low else 0
    return (low, rest) if low + rest < whole or size == low else (whole, 0)


def dot_dtypes(call: calls.Call) -> tuple[str, str]:
    """The dtypes of the operands of `q k^T` and `p v`; both accumulate in float32.

    As wide as query and cache need, and float16 for 8-bit caches, whose numbers it holds exactly:
    to convert e4m3 to bfloat16 takes several instructions a number, to float16 half of one.
    """

    def of(format: formats.Format) -> str:
        if format.narrow:
            return "float32" if call.query_dtype == "float32" else "float16"
        return format.name if format.name == call.query_dtype else "float32"

    return of(call.key_format), of(call.value_format)


def _width(call: calls.Call) -> int:
    """Columns of the wider accumulator or key tile, padding included."""
    return max(sum(parts(call.head_dim)), sum(parts(call.value_dim)))


def _wide_dots(call: calls.Call) -> bool:
    """Whether a product is taken in float32: on plain cores, with operands twice as large."""
    return "float32" in dot_dtypes(call)


def _widened(call: calls.Call) -> bool:
    """Whether a product in float32 has an operand that is stored narrower."""
    sides = (call.key_format, call.value_format)
    return _wide_dots(call) and any(side.value_dtype.itemsize < 4 for side in sides)


def _widened_tiles(width: int) -> Tiles:
    """Of both kernels then: ptxas keeps only these in registers, above 128 without a pipeline."""
    return Tiles(16, 16, 8, 3 if width <= 128 else 1, 1)


def _narrow(call: calls.Call) -> bool:
    """Whether words of 8 bits are widened on the way, in registers."""
    return call.key_format.narrow or call.value_format.narrow


def masks_edges_only(call: calls.Call) -> bool:
    """Whether the prefill kernel has a loop of its own for keys that every row sees.

    Above 256, and above 128 where words are widened, three loops spill what one keeps. With a
    window, whose edges are most of it, above 64.
    """
    most = 256
    if _narrow(call):
        most = 64 if "sliding_window" in call.options else 128
    return _width(call) <= most


def decode_limit(call: calls.Call, gpu: machine.Machine) -> int:
    """The most query tokens of a sequence that is decoded; those with more are for prefill.

    A few hundred new tokens behind a long context are too few rows for prefill, which does not
    split keys: 128 tokens of 8 heads at D = 512 keep 16 of 132 cores busy. Decode deals their keys
    out to all of them.
    """
    tiles = prefill_tiles(call, gpu)
    programs = -(-call.num_tokens * call.group // tiles.rows) * call.num_kv_heads
    few = programs * CORES_A_TILE <= gpu.cores
    if few and call.table_width * call.block_size >= MANY_KEYS:
        return max(call.max_query_len, MAX_DECODE_QUERIES)
    return MAX_DECODE_QUERIES


def decode_tiles(call: calls.Call, gpu: machine.Machine) -> Tiles:
    """Tiles of the decode kernel: as few rows as hold a sequence's query tokens.

    Decoding is bound by memory, so what counts is bytes in flight and how long a step takes. A core
    has 30 KiB and more of keys and values on the way, by stages and programs; `python -m
    benchmarks.gpu.triton_tiles` says how much, and what that should reach.
    """
    width = _width(call)
    queries = call.max_query_len
    if queries > decode_limit(call, gpu):
        queries = 1  # in a mixture most sequences that decode have one token
    rows = max(16, power_of_two(call.group * queries))
    small = gpu.block_shared < 160 * machine.KIB
    narrow = _narrow(call)
    if _widened(call):
        return _widened_tiles(width)
    if _wide_dots(call):
        if width > 256:
            # On sm_80 ptxas spills the smaller tile at 512, and the larger one does not fit at 576.
            keys = 32 if width == 512 and not small and gpu.sm < 90 else 16
            return Tiles(16, keys, 8, 1 if small else 3, 1)
        if small:
            if (width == 256 and rows <= 16) or (64 < width < 128 and rows > 16):
                return Tiles(16, 16, 8, 5, 1)
            return Tiles(min(rows, 32), 16, 8, 3, 1)
        if width <= 64:
            return Tiles(min(rows, 32), 32, 4 if rows <= 16 and gpu.sm < 90 else 8, 5, 1)
        keys = 16 if 128 < width < 256 and gpu.sm < 90 and rows <= 16 else 32
        return Tiles(min(rows, 32), keys, 4 if width < 128 else 8, 3, 1)
    if width > 256:
        if small:
            return Tiles(min(rows, 32), 16, 8, 3, 1)
        if rows <= 16 and (narrow or gpu.sm >= 100):
            # What takes long beside its load, in two programs, one of which computes while the
            # other's keys come.
            return Tiles(16, 16, 4, 5, 2)
        # 32 rows and keys that are converted, or come in two parts, spill with 32 keys.
        roomy = rows <= 16 or (width == 512 and not narrow)
        return Tiles(min(rows, 32), 32 if roomy else 16, 8, 5, 1)
    if small:
        return _small_decode_tiles(width, rows, narrow)
    # What follows is what ptxas keeps in registers, found by compiling.
    hopper, large = gpu.sm == 90, gpu.sm >= 100
    if width > 128:
        if rows > 16:
            return Tiles(min(rows, 32 if width == 256 and (narrow or large) else 64), 32, 8, 5, 1)
        if gpu.sm >= 90 and width < 256 and not narrow:
            return Tiles(16, 16, 4, 9, 2)
        return Tiles(16, 32, 4, 7 if narrow else 5, 2)
    if rows <= 16:
        if narrow:
            return Tiles(16, 64 if large else 32, 4, 7, 3 if width <= 64 and not large else 2)
        if large:
            return Tiles(16, 32, 4, 9, 2) if 64 < width < 128 else Tiles(16, 16, 4, 9, 3)
        if hopper and width < 128:
            return Tiles(16, 16, 4, 9, 2)
        return Tiles(16, 32, 4, 5, 3 if width <= 64 else 2)
    if rows <= 32:
        if 64 < width < 128:
            return Tiles(32, 16, 4, 7, 2)
        if large and width == 128 and not narrow:
            return Tiles(32, 16, 4, 9, 2)
        return Tiles(32, 32, 4, 7 if hopper and not narrow else 5, 2)
    return Tiles(64, 32, 4, 5, 2) if hopper else Tiles(64, 32, 8, 5, 1)


def _small_decode_tiles(width: int, rows: int, narrow: bool) -> Tiles:
    """The same up to D = 256 where a block has 99 KiB of shared memory."""
    if width > 128:
        if rows <= 16:
            return Tiles(16, 32, 4, 5, 1)
        return Tiles(min(rows, 32 if width == 256 and narrow else 64), 32, 8, 3, 1)
    if rows <= 16:
        return Tiles(16, 32, 8 if width <= 64 and not narrow else 4, 5, 2)
    if rows <= 32 and narrow and 64 < width < 128:
        return Tiles(32, 16, 4, 7, 1)
    return Tiles(64, 32, 8, 5, 1) if rows >= 64 else Tiles(32, 32, 4, 5, 1)


def prefill_tiles(call: calls.Call, gpu: machine.Machine) -> Tiles:
    """Tiles of the prefill kernel: as many rows as the accumulators leave registers for.

    Every key that is read serves all rows of a tile, so rows are what prefill's speed comes from;
    64 of them (a group of four warps each) is where Hopper's and Blackwell's matrix units begin.
    Next come 5 stages: with 3, a step begins with a wait for keys that were asked for just before.
    """
    width = _width(call)
    small = gpu.block_shared < 160 * machine.KIB
    narrow = _narrow(call)
    if _widened(call):
        return _widened_tiles(width)
    if _wide_dots(call):
        if width > 256:
            return Tiles(16, 16, 8, 1 if small else 3, 1)
        if small:
            return Tiles(16, 32, 8, 3, 1) if 64 < width < 128 else Tiles(32, 16, 8, 3, 1)
        return Tiles(32 if (width < 128) == (gpu.sm >= 90) else 16, 32, 8, 3, 1)
    if small:
        return _small_prefill_tiles(width, narrow, gpu.sm)
    if width > 256:
        # What widens words needs the registers of the other 32 rows.
        return Tiles(32, 32, 8, 5, 1) if narrow else Tiles(64, 16, 8, 5, 1)
    if width > 128 and gpu.sm < 90:
        return Tiles(128 if width < 256 and not narrow else 64, 32, 8, 5, 1)
    if width == 256:
        return Tiles(128, 32, 8, 5, 1)
    keys = 32 if 64 < width < 128 and gpu.sm < 90 else 64
    return Tiles(128, keys, 8, 5, 1)


def _small_prefill_tiles(width: int, narrow: bool, sm: int) -> Tiles:
    """The same where a block has 99 KiB of shared memory."""
    if width > 256:
        return Tiles(32, 16, 8, 5 if narrow or width == 512 else 3, 1)
    if width > 128:
        return Tiles(64, 32 if width < 256 or (narrow and sm < 100) else 16, 8, 5, 1)
    return Tiles(128, 64 if narrow and width < 128 else 32, 8, 5, 1)


def shared_bytes(call: calls.Call, tiles: Tiles) -> int:
    """Bytes of shared memory that a decode or prefill kernel needs at most, with `mma.sync`.

    That is every GPU but Hopper and the larger Blackwells, whose matrix units read shared memory
    and want more of it there; they have more than twice as much. Tests hold the compiler to this.
    """
    qk, pv = ({"float32": 4}.get(name, 2) for name in dot_dtypes(call))
    # What is multiplied in float32 is widened on the way; 8-bit words are, in registers.
    key = 4 if qk == 4 else call.key_format.value_dtype.itemsize
    value = 4 if pv == 4 else call.value_format.value_dtype.itemsize
    query = tiles.rows * sum(parts(call.head_dim)) * qk
    pieces = [tiles.keys * part * key for part in parts(call.head_dim)]
    pieces += [tiles.keys * part * value for part in parts(call.value_dim)]
    pieces.append(4 * tiles.keys)  # block ids
    # Without a pipeline one piece follows another; with it, a loop has all of a step, once for
    # every stage that is not the load of a block id.
    copies = max(1, (tiles.stages - 1) // 2)
    held = max(pieces) if tiles.stages == 1 else copies * sum(pieces)
    weights = tiles.rows * tiles.keys * pv
    reduced = 4 * tiles.rows * tiles.warps
    return query + held + weights + reduced + 256


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
