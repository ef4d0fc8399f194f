"""Tile sizes of the Triton kernels, and the rule that picks them.

Nothing here was tuned on a GPU yet. Of sizes that the compiler keeps in registers, a model of what
kernels wait for picked these (`benchmarks.gpu.triton_tiles`). Tests check that they do not spill
and that they fit a block's shared memory (`benchmarks.gpu.shared_memory`), and
`benchmarks.gpu --part tune` tries others on a GPU.
"""

from __future__ import annotations

import dataclasses
import enum
import typing

from jattn import call as calls
from jattn import formats
from jattn.integers import ceil_div, power_of_two
from jattn.pallas import machine
from jattn.pallas.triton import needs

# If prefill would have work for at most one in this many multiprocessors, the decode kernel handles
# the whole call: its tiles are smaller and all masked, which should cost less than a factor of 2.
# With fewer than MANY_KEYS keys in a table there is little to split.
CORES_A_TILE = 3
MANY_KEYS = 2048


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Static sizes of one kernel.

    Attributes:
      rows: query rows of a tile; a power of two, at least 16, for the matrix units.
      keys: of a step; a power of two, at least 16.
      warps: of a program.
      stages: of the loop over keys, as Triton counts them. A block id, which is loaded too, says
        where keys and values are, and Triton counts that load's stages with theirs.
      per_core: programs that fit on a streaming multiprocessor, by registers and shared memory.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    per_core: int

    @property
    def registers(self) -> int:
        """Of a thread, at most 255, so that `per_core` programs fit a multiprocessor's 65,536."""
        return min(255, machine.REGISTERS // (32 * self.warps * self.per_core) // 8 * 8)

    def __post_init__(self) -> None:
        for name in ("rows", "keys"):
            size = getattr(self, name)
            assert size >= 16, f"{name} is {size}"
            assert size & (size - 1) == 0, f"{name} is {size}"
        assert self.warps in (4, 8), self.warps
        assert self.stages >= 1
        assert self.per_core >= 1


def parts(size: int) -> tuple[int, int]:
    """A head size as one or two powers of two, the second 0 where one suffices: 576 is 512 + 64.

    The smallest sum that holds it, with a second part of at least 32: one of 16 would leave most
    warps without a column and spills registers. 80 and 96 are 64 + 32, 112 is 128.
    """
    whole = max(16, power_of_two(size))
    if size <= 16:
        return 16, 0
    low = whole if whole == size else whole // 2
    rest = max(32, power_of_two(size - low)) if size > low else 0
    return (low, rest) if low + rest < whole or size == low else (whole, 0)


def parts_of(call: calls.Call, gpu: machine.Machine, size: int) -> tuple[int, int]:
    """The parts of a call's head size.

    Codes are unpacked at most 256 columns at a time, except at 576: with 512 the operands of a
    product take the registers of the accumulators.
    """
    found = whole_parts(call, size)
    return (256, 256) if found == (512, 0) and operands_of(call, gpu) in _CODES else found


def whole_parts(call: calls.Call, size: int) -> tuple[int, int]:
    """`parts`, but at least 32 columns for NVFP4, just as it has 32 keys: see `ProductOperands`."""
    found = parts(size)
    grouped = any(format.group for format in (call.key_format, call.value_format))
    return (32, 0) if grouped and found == (16, 0) else found


def dot_dtypes(call: calls.Call) -> tuple[str, str]:
    """The dtypes of the operands of `q k^T` and `p v`; both accumulate in float32.

    As wide as query and cache need, and float16 for 8-bit caches, whose numbers it holds exactly:
    converting e4m3 to bfloat16 takes several instructions per number, to float16 half of one.
    Weights that are multiplied by a scale per token or block may leave float16's range, but not
    bfloat16's.
    """

    def of(format: formats.Format) -> str:
        if format.narrow:
            return "float32" if call.query_dtype == "float32" else "float16"
        return format.name if format.name == call.query_dtype else "float32"

    qk, pv = of(call.key_format), of(call.value_format)
    if call.value_format.per in ("block", "token"):
        pv = "bfloat16" if call.query_dtype == "bfloat16" else "float32"
    # float32 tiles have 16 keys, too few for NVFP4's values in another dtype: `ProductOperands`.
    return qk, "float32" if call.value_format.group and qk == "float32" else pv


class Arch(enum.Enum):
    """GPUs with different tiles."""

    SM80 = "A100: 163 KiB of shared memory for a block"
    SM86 = "sm_86 and sm_89: 99 KiB"
    SM90 = "Hopper: 227 KiB, wgmma"
    SM100 = "large Blackwells: 227 KiB, tcgen05"
    SM120 = "small Blackwells: 99 KiB"


class ProductOperands(enum.Enum):
    """The operands of a call's products, as far as tiles depend on them."""

    HALF = "16-bit numbers, as stored"
    FP8 = "some 8-bit numbers, widened to float16 in registers"
    CODES = "some unpacked by integers, or with scales of their token, block or group"
    INT4 = "like CODES, some of them int4"
    NVFP4 = "like CODES, some of them NVFP4: with fewer than 32 keys Triton counts each twice"
    FLOAT32 = "float32, on plain cores"
    WIDENED = "float32, of something that is stored narrower"


def arch_of(gpu: machine.Machine) -> Arch:
    """The column of the tables that a GPU is in."""
    if gpu.block_shared < machine.block_shared(80):
        return Arch.SM120 if gpu.sm >= 100 else Arch.SM86
    if gpu.sm < 90:
        return Arch.SM80
    return Arch.SM100 if gpu.sm >= 100 else Arch.SM90


def operands_of(call: calls.Call, gpu: machine.Machine) -> ProductOperands:
    """The operands of a call's products."""
    stored = (call.key_format, call.value_format)
    if "float32" in dot_dtypes(call):
        widened = any(format.word_dtype.itemsize < 4 for format in stored)
        return ProductOperands.WIDENED if widened else ProductOperands.FLOAT32
    codes = {format.triton_codes for format in stored}
    if "e2m1" in codes:
        return ProductOperands.NVFP4
    if "int4" in codes:
        return ProductOperands.INT4
    unpacked = any(needs.codes_of(format, gpu.sm) in needs.UNPACKED for format in stored)
    if unpacked or any(format.chooses_scales for format in stored):
        return ProductOperands.CODES
    narrow = any(format.narrow for format in stored)
    return ProductOperands.FP8 if narrow else ProductOperands.HALF


class Rule(typing.NamedTuple):
    """A line of a table; the first one that fits a call applies.

    A tile has at most `tiles.rows` rows: fewer where a sequence does not fill them.
    """

    archs: tuple[Arch, ...]
    operands: tuple[ProductOperands, ...]
    widths: tuple[int, int]  # of the wider of key and value tile, padding included; both inclusive
    rows: tuple[int, int]  # of a sequence that is decoded, a power of two; both inclusive
    tiles: Tiles
    why: str

    def fits(self, arch: Arch, operands: ProductOperands, width: int, rows: int) -> bool:
        """Whether the line applies to such a call."""
        return (
            arch in self.archs
            and operands in self.operands
            and self.widths[0] <= width <= self.widths[1]
            and self.rows[0] <= rows <= self.rows[1]
        )


# fmt: off
_ALL, _SMALL = tuple(Arch), (Arch.SM86, Arch.SM120)
_80, _90, _100, _86, _120 = ((arch,) for arch in (
    Arch.SM80, Arch.SM90, Arch.SM100, Arch.SM86, Arch.SM120))
_LARGE, _MMA_SYNC = (*_80, *_90, *_100), (*_80, *_SMALL)
_HALF, _FLOAT32, _WIDENED, _INT4, _NVFP4 = ((kind,) for kind in (
    ProductOperands.HALF, ProductOperands.FLOAT32, ProductOperands.WIDENED, ProductOperands.INT4,
    ProductOperands.NVFP4))
_CODES = (ProductOperands.CODES, *_INT4, *_NVFP4)
_FP8 = (ProductOperands.FP8, *_CODES)
_NARROW = (*_HALF, *_FP8)
_TO, _ANY = 2**10, (0, 2**20)  # past every width; any number of rows
_FEW, _MORE, _32, _64 = (0, 16), (17, 2**20), (17, 32), (33, 2**20)

# Reasons that several lines share. Nothing is measured: compiling a line shows what it spills.
_REGISTERS = "the largest that ptxas keeps in registers"
_SHARED = "the largest that fits 99 KiB"
_PROGRAMS = "one program computes while another waits for keys"
_FLIGHT = "more keys in flight with the same registers"
_FIT576 = "32 keys do not fit at 576"
_CONVERT = "32 keys spill where they are converted or come in two parts"
_WIDEN = "widening words takes the registers of 32 rows"
_SCALES = "scales and zero points of keys also take registers"
_TWICE = "at least 32 keys, and what fits in registers"
_ROWS = "every key serves all rows, and 64 are where wgmma and tcgen05 begin"

DECODE = (
    #     architecture    operands  widths      rows   tiles: rows, keys, warps, stages, per_core
    Rule(_ALL,            _WIDENED, (0, 128),   _ANY,  Tiles(16, 16, 8, 3, 1), _REGISTERS),
    Rule(_ALL,            _WIDENED, (129, _TO), _ANY,  Tiles(16, 16, 8, 1, 1), "a pipeline spills"),
    Rule(_80,             _FLOAT32, (512, 512), _ANY,  Tiles(16, 32, 8, 3, 1), "16 keys spill"),
    Rule(_LARGE,          _FLOAT32, (257, _TO), _ANY,  Tiles(16, 16, 8, 3, 1), _FIT576),
    Rule(_SMALL,          _FLOAT32, (257, _TO), _ANY,  Tiles(16, 16, 8, 1, 1), _SHARED),
    Rule(_SMALL,          _FLOAT32, (256, 256), _FEW,  Tiles(16, 16, 8, 5, 1), _REGISTERS),
    Rule(_SMALL,          _FLOAT32, (65, 127),  _MORE, Tiles(16, 16, 8, 5, 1), _REGISTERS),
    Rule(_SMALL,          _FLOAT32, (0, 256),   _ANY,  Tiles(32, 16, 8, 3, 1), _SHARED),
    Rule(_80,             _FLOAT32, (0, 64),    _FEW,  Tiles(16, 16, 4, 5, 1), "32 keys spill"),
    Rule(_LARGE,          _FLOAT32, (0, 64),    _ANY,  Tiles(32, 32, 8, 5, 1), _REGISTERS),
    Rule(_LARGE,          _FLOAT32, (65, 127),  _ANY,  Tiles(32, 32, 4, 3, 1), _REGISTERS),
    Rule(_80,             _FLOAT32, (129, 255), _FEW,  Tiles(16, 16, 8, 3, 1), _REGISTERS),
    Rule(_LARGE,          _FLOAT32, (128, 256), _ANY,  Tiles(32, 32, 8, 3, 1), _REGISTERS),
    Rule(_ALL,            _NVFP4,   (257, _TO), _ANY,  Tiles(16, 32, 8, 5, 1), _TWICE),
    Rule(_ALL,            _NVFP4,   (65, 127),  _32,   Tiles(16, 32, 8, 5, 1), _TWICE),
    Rule(_ALL,            _NVFP4,   (256, 256), _MORE, Tiles(32, 32, 8, 5, 1), _TWICE),
    Rule(_ALL,            _INT4,    (513, _TO), _ANY,  Tiles(16, 16, 8, 5, 1), _REGISTERS),
    Rule(_ALL,            _INT4,    (257, 512), _ANY,  Tiles(16, 16, 4, 5, 2), _PROGRAMS),
    Rule(_ALL,            _CODES,   (257, _TO), _MORE, Tiles(16, 16, 8, 5, 1), _SCALES),
    Rule(_ALL,            _INT4,    (256, 256), _MORE, Tiles(16, 16, 8, 5, 1), _REGISTERS),
    Rule(_ALL,            _CODES,   (256, 256), _MORE, Tiles(32, 16, 8, 5, 1), _SCALES),
    Rule(_SMALL,          _NARROW,  (257, _TO), _ANY,  Tiles(32, 16, 8, 3, 1), _SHARED),
    Rule(_LARGE,          _FP8,     (257, _TO), _FEW,  Tiles(16, 16, 4, 5, 2), _PROGRAMS),
    Rule(_100,            _HALF,    (257, _TO), _FEW,  Tiles(16, 16, 4, 5, 2), _PROGRAMS),
    Rule(_LARGE,          _HALF,    (257, _TO), _FEW,  Tiles(16, 32, 8, 5, 1), _REGISTERS),
    Rule(_LARGE,          _HALF,    (512, 512), _MORE, Tiles(32, 32, 8, 5, 1), _REGISTERS),
    Rule(_LARGE,          _NARROW,  (257, _TO), _MORE, Tiles(32, 16, 8, 5, 1), _CONVERT),
    Rule(_SMALL,          _NARROW,  (129, 256), _FEW,  Tiles(16, 32, 4, 5, 1), _SHARED),
    Rule(_SMALL,          _FP8,     (256, 256), _MORE, Tiles(32, 32, 8, 3, 1), _REGISTERS),
    Rule(_SMALL,          _NARROW,  (129, 256), _MORE, Tiles(64, 32, 8, 3, 1), _SHARED),
    Rule(_SMALL,          _HALF,    (0, 64),    _FEW,  Tiles(16, 32, 8, 5, 2), _REGISTERS),
    Rule(_SMALL,          _NARROW,  (0, 128),   _FEW,  Tiles(16, 32, 4, 5, 2), _REGISTERS),
    Rule(_SMALL,          _FP8,     (65, 127),  _32,   Tiles(32, 16, 4, 7, 1), _REGISTERS),
    Rule(_SMALL,          _NARROW,  (0, 128),   _32,   Tiles(32, 32, 4, 5, 1), _REGISTERS),
    Rule(_SMALL,          _NARROW,  (0, 128),   _64,   Tiles(64, 32, 8, 5, 1), _REGISTERS),
    Rule(_LARGE,          _FP8,     (256, 256), _MORE, Tiles(32, 32, 8, 5, 1), _REGISTERS),
    Rule(_100,            _HALF,    (256, 256), _MORE, Tiles(32, 32, 8, 5, 1), _REGISTERS),
    Rule(_LARGE,          _NARROW,  (129, 256), _MORE, Tiles(64, 32, 8, 5, 1), _REGISTERS),
    Rule((*_90, *_100),   _HALF,    (129, 255), _FEW,  Tiles(16, 16, 4, 9, 2), _FLIGHT),
    Rule(_LARGE,          _FP8,     (129, 256), _FEW,  Tiles(16, 32, 4, 7, 2), _REGISTERS),
    Rule(_LARGE,          _HALF,    (129, 256), _FEW,  Tiles(16, 32, 4, 5, 2), _REGISTERS),
    Rule(_100,            _FP8,     (0, 128),   _FEW,  Tiles(16, 64, 4, 7, 2), _REGISTERS),
    Rule(_LARGE,          _FP8,     (0, 64),    _FEW,  Tiles(16, 32, 4, 7, 3), _REGISTERS),
    Rule(_LARGE,          _FP8,     (65, 128),  _FEW,  Tiles(16, 32, 4, 7, 2), _REGISTERS),
    Rule(_100,            _HALF,    (65, 127),  _FEW,  Tiles(16, 32, 4, 9, 2), _REGISTERS),
    Rule(_100,            _HALF,    (0, 128),   _FEW,  Tiles(16, 16, 4, 9, 3), _FLIGHT),
    Rule(_90,             _HALF,    (0, 127),   _FEW,  Tiles(16, 16, 4, 9, 2), _FLIGHT),
    Rule(_LARGE,          _HALF,    (0, 64),    _FEW,  Tiles(16, 32, 4, 5, 3), _REGISTERS),
    Rule(_LARGE,          _HALF,    (65, 128),  _FEW,  Tiles(16, 32, 4, 5, 2), _REGISTERS),
    Rule(_LARGE,          _CODES,   (65, 127),  _32,   Tiles(32, 16, 8, 5, 1), _REGISTERS),
    Rule(_LARGE,          _NARROW,  (65, 127),  _32,   Tiles(32, 16, 4, 7, 2), _REGISTERS),
    Rule(_100,            _HALF,    (128, 128), _32,   Tiles(32, 16, 4, 9, 2), _FLIGHT),
    Rule(_90,             _HALF,    (0, 128),   _32,   Tiles(32, 32, 4, 7, 2), _FLIGHT),
    Rule(_LARGE,          _NARROW,  (0, 128),   _32,   Tiles(32, 32, 4, 5, 2), _REGISTERS),
    Rule(_90,             _NARROW,  (0, 128),   _64,   Tiles(64, 32, 4, 5, 2), _PROGRAMS),
    Rule(_LARGE,          _NARROW,  (0, 128),   _64,   Tiles(64, 32, 8, 5, 1), _REGISTERS),
)
PREFILL = (
    Rule(_ALL,            _WIDENED, (0, 128),   _ANY,  Tiles(16, 16, 8, 3, 1), _REGISTERS),
    Rule(_ALL,            _WIDENED, (129, _TO), _ANY,  Tiles(16, 16, 8, 1, 1), "a pipeline spills"),
    Rule(_LARGE,          _FLOAT32, (257, _TO), _ANY,  Tiles(16, 16, 8, 3, 1), _REGISTERS),
    Rule(_SMALL,          _FLOAT32, (257, _TO), _ANY,  Tiles(16, 16, 8, 1, 1), _SHARED),
    Rule(_SMALL,          _FLOAT32, (65, 127),  _ANY,  Tiles(16, 32, 8, 3, 1), _REGISTERS),
    Rule(_SMALL,          _FLOAT32, (0, 256),   _ANY,  Tiles(32, 16, 8, 3, 1), _SHARED),
    Rule(_80,             _FLOAT32, (65, 127),  _ANY,  Tiles(16, 32, 8, 3, 1), _REGISTERS),
    Rule(_80,             _FLOAT32, (128, 256), _ANY,  Tiles(32, 32, 8, 3, 1), _REGISTERS),
    Rule(_LARGE,          _FLOAT32, (0, 127),   _ANY,  Tiles(32, 32, 8, 3, 1), _REGISTERS),
    Rule(_LARGE,          _FLOAT32, (128, 256), _ANY,  Tiles(16, 32, 8, 3, 1), _REGISTERS),
    Rule(_MMA_SYNC,       _NVFP4,   (257, _TO), _ANY,  Tiles(16, 32, 8, 5, 1), _REGISTERS),
    Rule(_ALL,            _NVFP4,   (257, _TO), _ANY,  Tiles(32, 32, 8, 5, 1), _TWICE),
    Rule(_MMA_SYNC,       _NVFP4,   (256, 256), _ANY,  Tiles(32, 32, 8, 5, 1), _REGISTERS),
    Rule(_MMA_SYNC,       _NVFP4,   (0, 256),   _ANY,  Tiles(64, 32, 8, 5, 1), _TWICE),
    Rule(_90,             _NVFP4,   (256, 256), _ANY,  Tiles(64, 32, 8, 5, 1), _TWICE),
    Rule(_MMA_SYNC,       _CODES,   (0, 127),   _ANY,  Tiles(64, 16, 8, 5, 1), _REGISTERS),
    Rule(_MMA_SYNC,       _INT4,    (128, 256), _ANY,  Tiles(32, 16, 8, 5, 1), _REGISTERS),
    Rule(_MMA_SYNC,       _CODES,   (256, 256), _ANY,  Tiles(64, 16, 8, 5, 1), _REGISTERS),
    Rule(_ALL,            _INT4,    (257, _TO), _ANY,  Tiles(16, 16, 8, 5, 1), _REGISTERS),
    Rule(_ALL,            _CODES,   (257, _TO), _ANY,  Tiles(32, 16, 8, 5, 1), _WIDEN),
    Rule(_90,             _CODES,   (0, 255),   _ANY,  Tiles(128, 32, 8, 5, 1), _SCALES),
    Rule(_90,             _CODES,   (256, 256), _ANY,  Tiles(64, 16, 8, 5, 1), _SCALES),
    Rule(_ALL,            _CODES,   (0, 256),   _ANY,  Tiles(64, 32, 8, 5, 1), _SCALES),
    Rule(_SMALL,          _FP8,     (257, _TO), _ANY,  Tiles(32, 16, 8, 5, 1), _SHARED),
    Rule(_SMALL,          _HALF,    (512, 512), _ANY,  Tiles(32, 16, 8, 5, 1), _SHARED),
    Rule(_SMALL,          _HALF,    (257, _TO), _ANY,  Tiles(32, 16, 8, 3, 1), _SHARED),
    Rule(_86,             _FP8,     (256, 256), _ANY,  Tiles(64, 32, 8, 5, 1), _SHARED),
    Rule(_SMALL,          _NARROW,  (256, 256), _ANY,  Tiles(64, 16, 8, 5, 1), _SHARED),
    Rule(_SMALL,          _NARROW,  (129, 255), _ANY,  Tiles(64, 32, 8, 5, 1), _SHARED),
    Rule(_SMALL,          _FP8,     (0, 127),   _ANY,  Tiles(128, 64, 8, 5, 1), _SHARED),
    Rule(_SMALL,          _NARROW,  (0, 128),   _ANY,  Tiles(128, 32, 8, 5, 1), _SHARED),
    Rule(_LARGE,          _FP8,     (257, _TO), _ANY,  Tiles(32, 32, 8, 5, 1), _WIDEN),
    Rule(_LARGE,          _HALF,    (257, _TO), _ANY,  Tiles(64, 16, 8, 5, 1), _ROWS),
    Rule(_80,             _HALF,    (129, 255), _ANY,  Tiles(128, 32, 8, 5, 1), _REGISTERS),
    Rule(_80,             _NARROW,  (129, 256), _ANY,  Tiles(64, 32, 8, 5, 1), _REGISTERS),
    Rule(_LARGE,          _NARROW,  (256, 256), _ANY,  Tiles(128, 32, 8, 5, 1), _ROWS),
    Rule(_80,             _NARROW,  (65, 127),  _ANY,  Tiles(128, 32, 8, 5, 1), _REGISTERS),
    Rule(_LARGE,          _NARROW,  (0, 255),   _ANY,  Tiles(128, 64, 8, 5, 1), _ROWS),
)
# fmt: on


def _width(call: calls.Call) -> int:
    """Columns of the wider accumulator or key tile, padding included."""
    return max(sum(parts(call.head_dim)), sum(parts(call.value_dim)))


def _pick(table: tuple[Rule, ...], call: calls.Call, gpu: machine.Machine, rows: int) -> Tiles:
    """Return the tiles of the first line that fits a call, with no more rows than the call has."""
    facts = arch_of(gpu), operands_of(call, gpu), _width(call), rows
    tiles = next(rule.tiles for rule in table if rule.fits(*facts))
    return dataclasses.replace(tiles, rows=min(rows, tiles.rows))


def decode_tiles(call: calls.Call, gpu: machine.Machine) -> Tiles:
    """Choose tiles of the decode kernel: as few rows as hold a sequence's query tokens.

    Decoding is bound by memory, so what counts is bytes in flight and how long a step takes. Stages
    and programs give a multiprocessor 30 KiB or more of keys and values in flight;
    `python -m benchmarks.gpu.triton_tiles` prints how much, and what that should reach.
    """
    queries = call.max_query_len
    if queries > decode_limit(call, gpu):
        queries = 1  # in a mixture most sequences that decode have one token
    return _pick(DECODE, call, gpu, max(16, power_of_two(call.group * queries)))


def prefill_tiles(call: calls.Call, gpu: machine.Machine) -> Tiles:
    """Choose tiles of the prefill kernel: as many rows as the accumulators leave registers for.

    Every key that is read serves all rows of a tile, so prefill's speed comes from rows first. Next
    come 5 stages: with 3, a step begins by waiting for keys prefetched just before. A tree takes
    the registers of half the rows, a large one those of half the rest, and so does a table that is
    looked up for each key.
    """
    tiles = _pick(PREFILL, call, gpu, machine.KIB)
    crowding = (call.tree_words > 0) + (call.tree_words > 2)
    crowding += call.bias_columns + call.num_selected > 0
    return dataclasses.replace(tiles, rows=max(16, tiles.rows >> crowding))


def registers(call: calls.Call, gpu: machine.Machine, tiles: Tiles) -> int:
    """Return how many registers of a thread ptxas may use, or 0 for no limit.

    In a pipeline with products in float32 it uses all that it is given, and spills, so it may
    choose. On sm_80 it then spills for some heads of fewer than 128 columns, and with these limits
    for none of them.
    """
    if tiles.stages == 1 or "float32" not in dot_dtypes(call):
        return tiles.registers
    narrow = operands_of(call, gpu) is ProductOperands.FLOAT32 and _width(call) < 128
    return {4: 184, 8: 96}[tiles.warps] if narrow and arch_of(gpu) is Arch.SM80 else 0


def masks_edges_only(call: calls.Call, gpu: machine.Machine) -> bool:
    """Whether the prefill kernel has a separate loop for keys that every row sees.

    Above 256 columns, and above 128 where words are widened, three loops spill what one keeps. With
    a window or a chunk, whose edges are most of the work, they also do above 64 where words are
    widened, and on sm_80 at 64 where they are not.
    """
    width = _width(call)
    if operands_of(call, gpu) in _CODES or call.num_selected:
        return False
    bounded = not call.options.isdisjoint(("sliding_window", "attention_chunk_size"))
    if bounded and width == 64 and arch_of(gpu) is Arch.SM80:
        return operands_of(call, gpu) is not ProductOperands.HALF
    most = 256
    if call.key_format.narrow or call.value_format.narrow:
        most = 64 if bounded else 128
    return width <= most


def decode_limit(call: calls.Call, gpu: machine.Machine) -> int:
    """Return the most query tokens of a sequence that is decoded; prefill takes those with more.

    A few hundred new tokens after a long context are too few rows for prefill, which does not split
    keys: 128 tokens of 8 heads at D = 512 keep 16 of 132 multiprocessors busy. Decode spreads their
    keys over all of them.
    """
    tiles = prefill_tiles(call, gpu)
    programs = ceil_div(call.num_tokens * call.group, tiles.rows) * call.num_kv_heads
    few = programs * CORES_A_TILE <= gpu.cores
    if few and call.table_width * call.block_size >= MANY_KEYS:
        return max(call.max_query_len, machine.DECODE_TOKENS)
    return machine.DECODE_TOKENS
