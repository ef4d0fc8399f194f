"""Tensor maps as made by `cuTensorMapEncodeTiled`, with the same checks as the driver."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.support.ptx.numbers import PtxError

SWIZZLES = {0: 0, 16: 0, 32: 1, 64: 3, 128: 7}  # bytes: which of the three bits change


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory, and the box that a copy moves ("Tensors", PTX ISA).

    Attributes:
      address: the address of its first element.
      itemsize: bytes of an element.
      shape: elements along each axis, the innermost first.
      strides: bytes from one index to the next, for each axis but the innermost.
      box: elements that a copy moves along each axis.
      swizzle: bytes per row of the box's swizzle pattern in shared memory; 0 or 16: none.
    """

    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        row = self.box[0] * self.itemsize
        refused = {
            "the rank is 1 to 5": 1 <= len(self.shape) <= 5,
            "the box has the rank of the tensor": len(self.box) == len(self.shape),
            "all axes but the innermost have strides": len(self.strides) == len(self.shape) - 1,
            "the address is a multiple of 16": self.address % 16 == 0,
            "sizes are 1 to 2^32": all(1 <= n <= 2**32 for n in self.shape),
            "strides are multiples of 16": all(n % 16 == 0 for n in self.strides),
            "strides are below 2^40": all(0 < n < 2**40 for n in self.strides),
            "boxes are 1 to 256": all(1 <= n <= 256 for n in self.box),
            "the innermost box is a multiple of 16 bytes": row % 16 == 0,
            "the swizzle is 32, 64 or 128 bytes": self.swizzle in SWIZZLES,
        }
        if SWIZZLES.get(self.swizzle):
            refused["the innermost box is within the swizzle"] = row <= self.swizzle
        broken = [rule for rule, holds in refused.items() if not holds]
        if broken:
            raise PtxError(f"the driver refuses {self}: {'; '.join(broken)}")
        if SWIZZLES.get(self.swizzle) and row != self.swizzle:
            raise PtxError(f"a box narrower than its swizzle is not modelled: {self}")

    @property
    def bytes(self) -> int:
        """Bytes of a box."""
        return int(np.prod(self.box)) * self.itemsize

    def elements(self, first: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return `(offset in bytes, whether it is inside)` per element of the box at `first`."""
        offset = np.zeros(self.box[::-1], np.int64)
        inside = np.ones(self.box[::-1], bool)
        pitches = (self.itemsize, *self.strides)
        for axis, (start, count) in enumerate(zip(first, self.box, strict=True)):
            index = start + np.arange(count, dtype=np.int64)
            shape = [1] * len(self.box)
            shape[len(self.box) - 1 - axis] = count
            offset += (index * pitches[axis]).reshape(shape)
            inside &= ((index >= 0) & (index < self.shape[axis])).reshape(shape)
        return offset.reshape(-1), inside.reshape(-1)

    def shared_rows(self, address: int) -> np.ndarray:
        """Return addresses of the box's runs of 16 bytes in shared memory, in the box's order."""
        at = address + 16 * np.arange(self.bytes // 16, dtype=np.int64)
        return swizzled(at, self.swizzle).astype(np.uint32)


def swizzled(at: np.ndarray, swizzle: int) -> np.ndarray:
    """Apply a swizzle to addresses: XOR bits 4 to 6 with the bits from 7 on."""
    mask = SWIZZLES[swizzle]
    return at ^ (at >> 7 & mask) << 4 if mask else at
