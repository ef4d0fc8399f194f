"""Warps, blocks and clusters: what executes, and which runs next.

A warp is 32 lanes. When lanes diverge, those with the lowest program counter run until they meet
the others. A warp runs until it must wait; then another one runs, in an order that the seed
decides. If all warps wait forever, the error names what each of them waits for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.ptx import barriers, clocks
from tests.support.ptx.clocks import SEEN
from tests.support.ptx.memory import RANK_BITS, Shared
from tests.support.ptx.numbers import LANE, LANES, POISON, PtxError
from tests.support.ptx.parser import warps_of

if TYPE_CHECKING:
    from tests.support.ptx.program import Program

# What a step may return instead of the next instruction.
BLOCKED, EXIT = -1, -2
# A warp lets another one run after a number of instructions between these two.
TURN = (100, 5000)
MOST_STEPS = 20_000_000  # of a warp; more is taken for an endless loop


@dataclasses.dataclass
class Waiting:
    """Why a warp waits, and whether it may go on."""

    reason: str
    ready: Callable[[], bool]


def never() -> bool:
    """Condition of a warp that only another warp wakes up."""
    return False


class Warp:
    """32 lanes: their registers, which of them run, where the others are, what is under way.

    Attributes:
      number: its number in the block.
      rank: its number in the cluster, which decides its agents.
      R: registers and constants, a vector each; None where nothing was written.
      flying: why a register that is None may not be read.
      pc, mask: the next instruction, and the lanes that run it; None for all of them.
      others: lanes that are elsewhere, `(pc, lanes)`.
      clock, program, time: what it knows of others; its own agent, and the time of that.
    """

    def __init__(self, number: int, rank: int, block: Block, slots: list, threads: int) -> None:
        self.number, self.rank, self.block = number, rank, block
        self.threads = threads
        self.R = slots
        self.flying: dict[int, str] = {}
        self.pc = 0
        self.mask = None if threads == LANES else threads > LANE
        self.others: list[tuple[int, np.ndarray]] = []
        self.waiting: Waiting | None = None
        self.done = False
        self.steps = 0
        agents = block.cluster.agents
        self.clock = agents.clock()
        self.program = agents.of(clocks.PROGRAM, rank)
        self.time = 0
        self.tick()
        self.groups = {kind: Groups(agents.of(kind, rank)) for kind in (1, 2, 3)}
        # Results of wgmma under way, `{slot: (group, bits)}`, and the registers at its last fence.
        self.products: dict[int, tuple[int, np.ndarray]] = {}
        self.fenced_registers: list | None = None
        self.registers = block.program.registers
        self.cluster_phase: int | None = None

    def tick(self) -> None:
        """Begin a time later than any that the warp has released."""
        self.time += 1
        self.clock[SEEN][self.program] = self.time

    def learn(self, clock: np.ndarray) -> None:
        """Acquire what others have released."""
        np.maximum(self.clock, clock, out=self.clock)
        self.tick()

    def fence(self, *rows: int) -> None:
        """Make earlier accesses visible in the ways of `rows`, too."""
        for row in rows:
            np.maximum(self.clock[row], self.clock[SEEN], out=self.clock[row])
        self.tick()

    def active(self) -> np.ndarray:
        """bool [32]: the lanes that run."""
        return np.ones(LANES, bool) if self.mask is None else self.mask

    def whole(self, what: str) -> None:
        """Raise unless all lanes are here."""
        if self.mask is not None or self.others:
            raise PtxError(f"{what} in divergent code")

    def set(self, slot: int, value: np.ndarray) -> None:
        """Write a register in the lanes that run."""
        if self.flying and slot in self.flying:
            raise PtxError(f"a register is written while {self.flying[slot]}")
        if self.mask is None:
            self.R[slot] = value
        else:
            old = self.R[slot]
            if old is None:
                old = np.asarray(POISON, np.uint64).astype(value.dtype)
            self.R[slot] = np.where(self.mask, value, old)

    def unreadable(self, slot: int, name: str) -> PtxError:
        """Return the error for reading a register that is None."""
        if slot in self.flying:
            return PtxError(f"register {name} is read while {self.flying[slot]}")
        return PtxError(f"register {name} is read before it is written")

    def rename(self, source: int, target: int) -> None:
        """Copy a register whose value is under way."""
        self.products[target] = self.products[source]
        self.flying[target] = self.flying[source]
        self.R[target] = None

    def land_products(self) -> None:
        """Put results of each wgmma whose group was waited for into their registers."""
        group = self.groups[clocks.WGMMA]
        waited = self.clock[SEEN][group.agent]
        for slot, (number, value) in list(self.products.items()):
            if number <= waited:
                self.R[slot] = value
                if self.fenced_registers is not None:
                    self.fenced_registers[slot] = value
                del self.products[slot], self.flying[slot]

    def pick(self) -> None:
        """Switch to the lanes that are furthest behind, with all others at the same place."""
        groups = self.others + ([(self.pc, self.active())] if self.pc >= 0 else [])
        self.pc = min(pc for pc, _ in groups)
        mask = np.zeros(LANES, bool)
        for pc, lanes in groups:
            if pc == self.pc:
                mask |= lanes
        self.others = [(pc, lanes) for pc, lanes in groups if pc != self.pc]
        self.mask = None if mask.all() else mask

    def wait(self, reason: str, ready: Callable[[], bool] = never) -> int:
        """Let others run; the instruction is executed again once it is `ready`."""
        self.waiting = Waiting(reason, ready)
        return BLOCKED

    def resume(self) -> None:
        """End this warp's wait, for another warp: it continues after its instruction."""
        self.waiting = None
        self.pc += 1

    def run(self, turns: int) -> None:
        """Execute until the warp must wait, ends, or has run `turns` instructions."""
        steps = self.block.program.steps
        for _ in range(turns):
            self.steps += 1
            if self.others:
                self.pick()
            to = steps[self.pc](self)
            if to is None:
                self.pc += 1
            elif to >= 0:
                self.pc = to
            elif to == BLOCKED:
                return
            else:
                if not self.others:
                    self.end()
                    return
                self.pc = -1  # these lanes have ended
                self.pick()
        if self.steps > MOST_STEPS:
            raise PtxError(f"a warp does not end within {MOST_STEPS} instructions")

    def end(self) -> None:
        """End the warp: all its lanes are done."""
        for kind, group in self.groups.items():
            if group.open or group.committed:
                raise PtxError(f"the warp ends while {clocks.KINDS[kind]} are still under way")
        self.done = True


class Groups:
    """Asynchronous operations of one kind: an open group, and committed ones in order.

    Waiting for a group also tells the warp that the group's accesses are done, and calls the
    entries of the group.
    """

    def __init__(self, agent: int) -> None:
        self.agent = agent
        self.number = 1  # of the open group
        self.open: list[Callable[[], None]] = []
        self.committed: list[tuple[int, list[Callable[[], None]]]] = []

    @property
    def stamp(self) -> int:
        """The stamp of accesses of the open group."""
        return clocks.stamp(self.agent, self.number)

    def commit(self) -> None:
        """Close the open group."""
        self.committed.append((self.number, self.open))
        self.open = []
        self.number += 1

    def wait(self, warp: Warp, left: int) -> None:
        """Wait until at most `left` groups are under way."""
        while len(self.committed) > left:
            number, entries = self.committed.pop(0)
            for land in entries:
                land()
            warp.clock[SEEN][self.agent] = number


class Block:
    """A block of threads, one of a cluster."""

    def __init__(
        self, program: Program, cluster: Cluster, rank: int, index: tuple[int, ...]
    ) -> None:
        self.program, self.cluster, self.rank, self.index = program, cluster, rank, index
        x, y, z = index
        self.number = (z * cluster.grid[1] + y) * cluster.grid[0] + x
        self.memory = program.memory
        self.shared = Shared(program.shared_bytes, cluster.agents)
        self.named: dict[int, barriers.NamedBarrier] = {}
        self.free_registers = 0
        x, y, z = program.kernel.block
        threads, num_warps = x * y * z, warps_of(program.kernel)
        self.warps = []
        for number in range(num_warps):
            slots = list(program.slots)
            special = self._special(number * LANES + LANE, number)
            for name, slot in program.special.items():
                if name not in special:
                    raise PtxError(f"special register {name} is not modelled")
                slots[slot] = np.broadcast_to(np.asarray(special[name], np.uint32), LANES)
            warp_rank = rank * num_warps + number
            self.warps.append(Warp(number, warp_rank, self, slots, min(threads, LANES)))

    def _special(self, tid: np.ndarray, warp: int) -> dict[str, Any]:
        """Return the values of special registers (PTX ISA, "Special Registers")."""
        kernel, cluster = self.program.kernel, self.cluster
        x, y, _ = kernel.block
        found = {
            "%tid.x": tid % x, "%tid.y": tid // x % y, "%tid.z": tid // (x * y),
            "%laneid": LANE, "%warpid": warp, "%cluster_ctarank": self.rank,
            "%cluster_nctarank": len(cluster.ranks),
        }  # fmt: skip
        for axis, name in enumerate("xyz"):
            found[f"%ntid.{name}"] = kernel.block[axis]
            found[f"%ctaid.{name}"] = self.index[axis]
            found[f"%nctaid.{name}"] = cluster.grid[axis]
            found[f"%clusterid.{name}"] = self.index[axis] // cluster.shape[axis]
            found[f"%nclusterid.{name}"] = cluster.grid[axis] // cluster.shape[axis]
            found[f"%cluster_ctaid.{name}"] = self.index[axis] % cluster.shape[axis]
            found[f"%cluster_nctaid.{name}"] = cluster.shape[axis]
        return found

    def live_threads(self) -> int:
        """Threads that have not ended."""
        return sum(warp.threads for warp in self.warps if not warp.done)

    def at(self, address: int) -> tuple[Block, int]:
        """Return the block of a shared::cluster address, and the address within that block."""
        rank = address >> RANK_BITS
        if rank == 0:
            return self, address
        if rank > len(self.cluster.blocks):
            raise PtxError(f"shared address {address:#x} is in no block of the cluster")
        block = self.cluster.blocks[rank - 1]
        if block is not self and all(warp.done for warp in block.warps):
            raise PtxError("shared memory of a block that has ended is accessed")
        return block, address & ((1 << RANK_BITS) - 1)

    def mbarrier(self, address: int) -> barriers.Mbarrier:
        """The mbarrier at a shared::cluster address."""
        block, offset = self.at(address)
        found = block.shared.mbarriers.get(offset)
        if found is None:
            raise PtxError(f"no mbarrier is initialised at {address:#x}")
        return found


class Cluster:
    """Blocks that run together."""

    def __init__(
        self,
        program: Program,
        indices: list[tuple[int, ...]],
        grid: tuple[int, ...],
        shape: tuple[int, ...],
        rng: np.random.Generator,
    ) -> None:
        self.grid, self.shape, self.rng = grid, shape, rng
        self.ranks = range(len(indices))
        num_warps = warps_of(program.kernel) * len(indices)
        self.agents = clocks.Agents(num_warps)
        self.barrier = barriers.ClusterBarrier(self.agents, num_warps)
        self.blocks: list[Block] = []
        for rank, index in enumerate(indices):
            self.blocks.append(Block(program, self, rank, index))
        self.warps = [warp for block in self.blocks for warp in block.warps]
        self.code = program.kernel.code

    def run(self) -> int:
        """Run until all warps have ended; return how many instructions that took."""
        while running := [warp for warp in self.warps if not warp.done]:
            moved = False
            for i in self.rng.permutation(len(running)):
                warp = running[i]
                if warp.waiting is not None:
                    if not warp.waiting.ready():
                        continue
                    warp.waiting = None
                moved = True
                warp.block.memory.block = warp.block.number
                try:
                    warp.run(int(self.rng.integers(*TURN)))
                except Exception as error:
                    kind = "" if isinstance(error, PtxError) else f"{type(error).__name__}: "
                    raise PtxError(
                        f"{kind}{error}\n  block {warp.block.index}, warp {warp.number}: "
                        f"{self.code[max(warp.pc, 0)]}"
                    ) from error
            if not moved:
                raise PtxError("deadlock\n" + self.state())
        for block in self.blocks:
            for mbarrier in block.shared.mbarriers.values():
                if mbarrier.transfers:
                    raise PtxError(f"block {block.index} ends with copies under way: {mbarrier}")
        return sum(warp.steps for warp in self.warps)

    def state(self) -> str:
        """Describe the state of every barrier, and what every warp waits for."""
        lines = []
        for warp in self.warps:
            why = "has ended" if warp.done else f"waits for {warp.waiting.reason}"
            lines.append(f"  block {warp.block.index}, warp {warp.number}: {why}")
            if not warp.done:
                lines[-1] += f": {self.code[warp.pc]}"
        for block in self.blocks:
            lines += [f"  block {block.index}: {m}" for m in block.shared.mbarriers.values()]
            for name, barrier in block.named.items():
                if barrier.arrived:
                    lines.append(
                        f"  block {block.index}: barrier {name}: {barrier.arrived} of "
                        f"{barrier.expected} threads have arrived"
                    )
        return "\n".join(lines)
