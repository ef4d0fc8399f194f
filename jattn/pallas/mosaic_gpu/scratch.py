"""The shared memory of a Mosaic GPU kernel, as a list that is declared once.

The rule for tile sizes counts the list's bytes (`total_bytes`), and `compat.kernel` launches the
kernel with it. Nothing here imports Mosaic, so the rule can be applied wherever a call is checked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from jattn import call as calls
from jattn import integers
from jattn.pallas import machine

SM = 90  # the compute capability that the kernels are for
MOST_BYTES = machine.block_shared(SM)
PRODUCT_ROWS = 64  # of the result of a `wgmma`, and of its left operand
# A swizzled buffer is cut into tiles of this many rows, and a copy brings a multiple of them.
COPIED_ROWS = 8
ALIGNMENT = 1024  # bytes, of every buffer
BARRIER_BYTES = 8
REDUCTION_BYTES = 2048  # set aside for reductions over a warpgroup; CompilerParams' default


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array.

    Attributes:
      shape, dtype: of the array.
      swizzle: bytes, where TMA writes it and `wgmma` reads it; None for plain rows.
    """

    shape: tuple[int, ...]
    dtype: Any
    swizzle: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes, aligned."""
        size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return integers.round_up(size, ALIGNMENT)


@dataclasses.dataclass(frozen=True)
class Union:
    """Buffers on one memory, of which one is in use at a time."""

    choices: tuple[Buffer, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the largest."""
        return max(choice.num_bytes for choice in self.choices)


@dataclasses.dataclass(frozen=True)
class Barriers:
    """An array of barriers.

    Attributes:
      count: how many.
      arrivals: how many end a phase of one.
      cluster: the axis of a cluster whose blocks all arrive; None for barriers of one block.
    """

    count: int = 1
    arrivals: int = 1
    cluster: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that they take."""
        return self.count * BARRIER_BYTES


Item: TypeAlias = Buffer | Union | Barriers
Scratch: TypeAlias = Mapping[str, Item]


def compute_dtype(call: calls.Call) -> Any:
    """Return the dtype of the products: the cache's, or float16 for an fp8 cache."""
    stored = call.key_format.value_dtype
    return stored if stored.itemsize == 2 else np.dtype(np.float16)


def total_bytes(scratch: Scratch) -> int:
    """Return the shared memory of a block, including that for reductions."""
    return sum(item.num_bytes for item in scratch.values()) + REDUCTION_BYTES
