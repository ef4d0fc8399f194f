"""Memory: named buffers of global memory, shared memory of a block, and windows of addresses.

Shared memory records for every byte whether, when and by which agent it was written, and which
agents have read it since; see `clocks`. An access that nothing orders after a conflicting one is a
race, whatever the order in which this interpreter happened to run them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.ptx import clocks
from tests.support.ptx.clocks import FENCED, SEEN, TIME_BITS, TIMES
from tests.support.ptx.numbers import PtxError
from tests.support.ptx.parser import SHARED_BASE

GLOBAL_BASE, BUFFER_BITS = 0x7F00_0000_0000, 36
# Generic addresses of shared memory and of kernel parameters.
SHARED_WINDOW = 0x7E00_0000_0000
PARAMETER_WINDOW = 0x7D00_0000_0000
# An address in another block of the cluster, from `mapa`, has the block's rank plus 1 above these.
RANK_BITS = 24
# Whether cp.async counts as a generic write that wgmma may read only after a proxy fence, as PTX
# strictly requires. Triton's pipelines have no such fence.
CP_ASYNC_NEEDS_FENCE = False
UNTOUCHED, SEVERAL = -1, -2


@dataclasses.dataclass
class Buffer:
    """An array in global memory.

    Attributes:
      name: its name in messages.
      base: its address.
      data: its bytes.
      written: whether each byte was written; None if all were.
      dtype, shape: of the array.
      constant: whether it is an input, which no kernel may write.
      writer, reader: the block that last wrote or read each byte in this launch.
    """

    name: str
    base: int
    data: np.ndarray
    written: np.ndarray | None
    dtype: np.dtype
    shape: tuple[int, ...]
    constant: bool
    writer: np.ndarray | None = None
    reader: np.ndarray | None = None


class Memory:
    """Global memory: buffers far from each other.

    Blocks of a launch run one after the other here, but in any order on a GPU. So it is a race if
    one block writes a byte that another one reads, or writes with another value.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.block = 0

    def put(self, name: str, x: np.ndarray, written: bool = True, constant: bool = False) -> int:
        """Copy an array and return its address; unless `written`, it may not be read at first."""
        base = GLOBAL_BASE + (len(self.buffers) << BUFFER_BITS)
        data = np.ascontiguousarray(x).reshape(-1).view(np.uint8).copy()
        flags = None if written else np.zeros(data.size, bool)
        self.buffers.append(Buffer(name, base, data, flags, x.dtype, x.shape, constant))
        return base

    def buffer(self, name: str) -> Buffer:
        """Return a buffer by name."""
        (found,) = (b for b in self.buffers if b.name == name)
        return found

    def get(self, name: str) -> np.ndarray:
        """Return a buffer as an array."""
        found = self.buffer(name)
        return found.data.view(found.dtype).reshape(found.shape)

    def begin_launch(self) -> None:
        """Forget which blocks wrote and read: an earlier launch is over."""
        for buffer in self.buffers:
            buffer.writer = buffer.reader = None
            if not buffer.constant:
                buffer.writer = np.full(buffer.data.size, UNTOUCHED, np.int32)
                buffer.reader = np.full(buffer.data.size, UNTOUCHED, np.int32)

    def locate(self, low: int, high: int) -> Buffer:
        """Return the buffer that holds bytes `[low, high)`."""
        number = (low - GLOBAL_BASE) >> BUFFER_BITS
        if not 0 <= number < len(self.buffers):
            raise PtxError(f"global address {low:#x} is in no buffer")
        buffer = self.buffers[number]
        if high > buffer.base + buffer.data.size:
            raise PtxError(f"{buffer.name}: bytes up to {high - buffer.base} of {buffer.data.size}")
        return buffer

    def _where(self, at: np.ndarray, size: int) -> tuple[Buffer, np.ndarray] | None:
        """Return the buffer of all addresses and the bytes' offsets; None if buffers differ."""
        low, high = int(at.min()), int(at.max())
        if (low - GLOBAL_BASE) >> BUFFER_BITS != (high - GLOBAL_BASE) >> BUFFER_BITS:
            return None
        buffer = self.locate(low, high + size)
        if size & (size - 1) == 0 and (at & np.uint64(size - 1)).any():
            raise PtxError(f"{buffer.name}: address {low:#x} is not a multiple of {size}")
        return buffer, (at - np.uint64(buffer.base)).astype(np.int64)[:, None] + np.arange(size)

    def read(self, at: np.ndarray, size: int) -> np.ndarray:
        """Read bytes `[addresses, size]`."""
        found = self._where(at, size)
        if found is None:
            return np.concatenate([self.read(at[i : i + 1], size) for i in range(at.size)])
        buffer, where = found
        self._check_read(buffer, where)
        return buffer.data[where]

    def _check_read(self, buffer: Buffer, where: Any) -> None:
        if buffer.written is not None and not buffer.written[where].all():
            raise PtxError(f"{buffer.name} is read before it is written")
        if buffer.writer is not None:
            other = buffer.writer[where]
            if ((other != UNTOUCHED) & (other != self.block)).any():
                raise PtxError(f"race: {buffer.name} is read where another block wrote")
            reader = buffer.reader[where]
            new = (reader == UNTOUCHED) | (reader == self.block)
            buffer.reader[where] = np.where(new, self.block, SEVERAL)

    def write(self, at: np.ndarray, values: np.ndarray, atomic: bool = False) -> None:
        """Write bytes `[addresses, size]`."""
        found = self._where(at, values.shape[1])
        if found is None:
            for i in range(at.size):
                self.write(at[i : i + 1], values[i : i + 1], atomic)
            return
        buffer, where = found
        self._write(buffer, where, values, atomic)

    def _write(self, buffer: Buffer, where: Any, values: np.ndarray, atomic: bool) -> None:
        if buffer.constant:
            raise PtxError(f"{buffer.name} is an input, but is written")
        if buffer.writer is not None and not atomic:
            writer, reader = buffer.writer[where], buffer.reader[where]
            clash = (writer != UNTOUCHED) & (writer != self.block) & (buffer.data[where] != values)
            if clash.any() or ((reader != UNTOUCHED) & (reader != self.block)).any():
                raise PtxError(f"race: {buffer.name} is written where another block uses it")
            buffer.writer[where] = self.block
        buffer.data[where] = values
        if buffer.written is not None:
            buffer.written[where] = True

    def read_box(self, buffer: Buffer, where: np.ndarray) -> np.ndarray:
        """Read bytes at offsets of one buffer, as a bulk copy does."""
        self._check_read(buffer, where)
        return buffer.data[where]

    def write_box(self, buffer: Buffer, where: np.ndarray, values: np.ndarray) -> None:
        """Write bytes at offsets of one buffer, as a bulk copy does."""
        self._write(buffer, where, values, atomic=False)


class Shared:
    """Shared memory of one block of a cluster.

    Attributes:
      size: bytes.
      data: the bytes.
      state: EMPTY, READY, FLYING (a copy is under way) or MBARRIER for each byte.
      writer: stamp of the last write of each byte.
      readers: number of the set of agents that have read it since.
      mbarriers: the initialised ones, by address.
    """

    EMPTY, READY, FLYING, MBARRIER = 0, 1, 2, 3

    def __init__(self, size: int, agents: clocks.Agents) -> None:
        self.size, self.agents = size, agents
        padded = -(-size // 128) * 128
        self.data = np.full(padded, 0xA5, np.uint8)
        self.state = np.zeros(padded, np.uint8)
        self.writer = np.zeros(padded, np.int64)
        self.readers = np.zeros(padded, np.int32)
        self.sets = clocks.ReaderSets(agents)
        self.mbarriers: dict[int, Any] = {}

    def rows(self, at: np.ndarray, size: int) -> np.ndarray:
        """Return the rows of `size` bytes at these addresses, after checks."""
        if (at & np.asarray(size - 1, at.dtype)).any():
            bad = int(at[(at & np.asarray(size - 1, at.dtype)) != 0][0])
            raise PtxError(f"shared address {bad:#x} is not a multiple of {size}")
        offsets = at.astype(np.int64) - SHARED_BASE
        low, high = int(offsets.min()), int(offsets.max())
        if low < 0 or high + size > self.size:
            raise PtxError(f"shared byte {high if low >= 0 else low} of {self.size} ({size} bytes)")
        return offsets // size

    def _view(self, x: np.ndarray, size: int) -> np.ndarray:
        return x.reshape(-1, size)

    def check_written(self, clock: np.ndarray, rows: np.ndarray, size: int, proxy: bool) -> None:
        """Raise unless bytes to be read were written before and, for the async proxy, fenced."""
        state = self._view(self.state, size)[rows]
        if (state != self.READY).any():
            flying = (state == self.FLYING).any()
            raise PtxError(
                "shared memory is read while a copy into it is under way"
                if flying
                else "shared memory is read before it is written"
            )
        stamps = self._view(self.writer, size)[rows]
        bad = self._unordered(clock[SEEN], stamps)
        if bad is not None:
            raise PtxError(
                f"race: a read of shared memory is not ordered after a write by {self._name(bad)}"
            )
        if proxy:
            self._check_fence(clock, stamps, "is read by the async proxy")

    def _check_fence(self, clock: np.ndarray, stamps: np.ndarray, what: str) -> None:
        agent = stamps >> TIME_BITS
        generic = agent < self.agents.num_warps * (2 if CP_ASYNC_NEEDS_FENCE else 1)
        generic &= stamps != 0
        if generic.any():
            bad = self._unordered(clock[FENCED], stamps[generic])
            if bad is not None:
                raise PtxError(
                    f"shared memory {what} that {self._name(bad)} wrote "
                    "without a fence.proxy.async after it"
                )

    def _unordered(self, known: np.ndarray, stamps: np.ndarray) -> int | None:
        """Return a stamp that is later than what is known, or None."""
        flat = stamps.reshape(-1)
        first = int(flat[0])
        if (flat == first).all():
            return None if known[first >> TIME_BITS] >= first & TIMES else first
        late = known[flat >> TIME_BITS] < flat & TIMES
        return int(flat[late][0]) if late.any() else None

    def _name(self, stamp: int) -> str:
        return self.agents.name(stamp >> TIME_BITS)

    def note_readers(self, rows: np.ndarray, size: int, agent: int, time: int) -> None:
        """Record an agent's read."""
        view = self._view(self.readers, size)
        old = view[rows]
        first = int(old.flat[0])
        if (old == first).all():
            view[rows] = self.sets.with_reader(first, agent, time)
            return
        new = old
        for number in np.unique(old):
            new = np.where(old == number, self.sets.with_reader(int(number), agent, time), new)
        view[rows] = new

    def check_unread(self, clock: np.ndarray, rows: np.ndarray, size: int) -> None:
        """Raise if an agent may still be reading there."""
        numbers = self._view(self.readers, size)[rows]
        first = int(numbers.flat[0])
        distinct = (first,) if (numbers == first).all() else np.unique(numbers)
        for number in distinct:
            late = self.sets.rows[number] > clock[SEEN]
            if late.any():
                reader = self.agents.name(int(np.flatnonzero(late)[0]))
                raise PtxError(
                    f"race: a write to shared memory is not ordered after a read by {reader}"
                )

    def read(self, warp: Any, at: np.ndarray, size: int) -> np.ndarray:
        """Read bytes `[addresses, size]` from a warp's program."""
        rows = self.rows(at, size)
        self.check_written(warp.clock, rows, size, proxy=False)
        self.note_readers(rows, size, warp.program, warp.time)
        return self._view(self.data, size)[rows]

    def read_async(self, warp: Any, at: np.ndarray, size: int, agent: int, time: int) -> np.ndarray:
        """Read bytes `[addresses, size]` from an asynchronous operation that a warp began."""
        rows = self.rows(at, size)
        self.check_written(warp.clock, rows, size, proxy=True)
        self.note_readers(rows, size, agent, time)
        return self._view(self.data, size)[rows]

    def claim(
        self, clock: np.ndarray, at: np.ndarray, size: int, values: np.ndarray | None, proxy: bool
    ) -> np.ndarray:
        """Return the rows of a write, after checking that it races with no other access."""
        rows = self.rows(at, size)
        state = self._view(self.state, size)[rows]
        if (state > self.READY).any():
            what = "while a copy into it is under way" if (state == self.FLYING).any() else ""
            raise PtxError(f"shared memory is written {what or 'over an mbarrier'}")
        stamps = self._view(self.writer, size)[rows]
        bad = self._unordered(clock[SEEN], stamps)
        # Several warps may write the same value: compiled kernels do so.
        if bad is not None and not (
            values is not None and (self._view(self.data, size)[rows] == values).all()
        ):
            raise PtxError(
                f"race: a write to shared memory is not ordered after a write by {self._name(bad)}"
            )
        self.check_unread(clock, rows, size)
        if proxy:
            self._check_fence(clock, stamps, "is written by the async proxy")
        return rows

    def write(self, warp: Any, at: np.ndarray, values: np.ndarray) -> None:
        """Write bytes `[addresses, size]` from a warp's program."""
        size = values.shape[1]
        rows = self.claim(warp.clock, at, size, values, proxy=False)
        if rows.size > 1:
            order = np.argsort(rows, kind="stable")
            same = rows[order][1:] == rows[order][:-1]
            if same.any() and (values[order][1:][same] != values[order][:-1][same]).any():
                raise PtxError("race: lanes of a warp write different values to one place")
        self._view(self.data, size)[rows] = values
        self._view(self.state, size)[rows] = self.READY
        self._view(self.writer, size)[rows] = clocks.stamp(warp.program, warp.time)
        self._view(self.readers, size)[rows] = 0

    def begin_copy(
        self,
        clock: np.ndarray,
        at: np.ndarray,
        values: np.ndarray,
        stamp: int,
        proxy: bool,
    ) -> Callable[[int], None]:
        """Start a copy of bytes `[addresses, size]`; calling the returned function lands it."""
        size = values.shape[1]
        rows = self.claim(clock, at, size, None, proxy)
        self._view(self.state, size)[rows] = self.FLYING
        self._view(self.writer, size)[rows] = stamp
        self._view(self.readers, size)[rows] = 0

        def land(stamp: int) -> None:
            self._view(self.data, size)[rows] = values
            self._view(self.state, size)[rows] = self.READY
            self._view(self.writer, size)[rows] = stamp

        return land
