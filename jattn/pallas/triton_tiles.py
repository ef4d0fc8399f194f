"""Tile sizes of the Triton kernels: the rule that picks them, and the shared memory they need.

Nothing here was tuned on a GPU yet. The sizes are the largest that the compiler keeps in registers:
`python -m benchmarks.gpu_report` shows registers, spills and occupancy, and a test holds all of
them to no spills at all.
"""

from __future__ import annotations

import dataclasses

from jattn import call as calls
from jattn.pallas import machine

# Sequences with up to this many query tokens are decoded: their keys are split over programs.
MAX_DECODE_QUERIES = 8


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

    The smallest sum that holds it, 16 at least: 80 is 64 + 16, 96 is 64 + 32, 112 is 128.
    """
    whole = max(16, _power_of_two(size))
    if size <= 16:
        return 16, 0
    low = whole if whole == size else whole // 2
    rest = max(16, _power_of_two(size - low)) if size > low else 0
    return (low, rest) if low + rest < whole or size == low else (whole, 0)


def dot_dtypes(call: calls.Call) -> tuple[str, str]:
    """The dtypes of the operands of `q k^T` and `p v`; both accumulate in float32.

    As wide as query and cache need, and float16 for 8-bit caches, whose numbers it holds exactly:
    to convert e4m3 to bfloat16 takes several instructions a number, to float16 half of one.
    """

    def of(stored: str) -> str:
        if stored.startswith("fp8"):
            return "float32" if call.query_dtype == "float32" else "float16"
        return stored if stored == call.query_dtype else "float32"

    return of(call.key_format.name), of(call.value_format.name)


def decode_tiles(call: calls.Call, gpu: machine.Machine) -> Tiles:
    """Tiles of the decode kernel: as few rows as hold a sequence's, and two programs a core."""
    queries = min(call.max_query_len, MAX_DECODE_QUERIES)
    if call.max_query_len > MAX_DECODE_QUERIES:
        queries = 1  # in a mixture most sequences that decode have one token
    rows = min(64, max(16, _power_of_two(call.group * queries)))
    return Tiles(rows, 32, 4, 3, 2)


def prefill_tiles(call: calls.Call, gpu: machine.Machine) -> Tiles:
    """Tiles of the prefill kernel."""
    return Tiles(64, 32, 8, 3, 1)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
