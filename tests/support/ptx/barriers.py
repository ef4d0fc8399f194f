"""Barriers that warps wait for: mbarriers, named barriers, cluster barriers.

Each joins the clocks of the warps that arrive and passes the result to those that wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.ptx import clocks
from tests.support.ptx.clocks import INITED, SEEN
from tests.support.ptx.numbers import PtxError

MOST_BYTES = 2**20 - 1  # in a tx-count


@dataclasses.dataclass
class Transfer:
    """A copy that completes on an mbarrier: its bytes, and what lands it."""

    bytes: int
    land: Callable[[int], None]


class Mbarrier:
    """An mbarrier object (PTX ISA, "mbarrier").

    A phase ends when no arrival is pending and its transaction count is 0. Copies land as late as
    they may, one after the other in random order, when a warp waits: a kernel that waits for too
    few bytes then reads what has not arrived.
    """

    def __init__(self, address: int, count: int, agents: clocks.Agents, warp: Any) -> None:
        if not 0 < count < 2**20:
            raise PtxError(f"an mbarrier is initialised with {count} arrivals")
        self.address, self.count, self.pending = address, count, count
        self.phase, self.bytes = 0, 0
        self.agents, self.agent = agents, agents.new_mbarrier()
        self.gathered = agents.clock()
        self.complete = agents.clock()
        self.transfers: list[Transfer] = []
        self.initialised = (warp.program, warp.time)

    def check_initialised(self, clock: np.ndarray, row: int = SEEN) -> None:
        """Raise unless its init is ordered before; row INITED: visible to the async proxy too."""
        agent, time = self.initialised
        if max(clock[row][agent], clock[INITED][agent]) < time:
            missing = "a fence" if row == INITED else "a barrier"
            raise PtxError(f"mbarrier {self.address:#x} is used without {missing} after its init")

    def arrive(self, count: int, clock: np.ndarray) -> None:
        """Count arrivals in this phase."""
        if count > self.pending:
            raise PtxError(
                f"mbarrier {self.address:#x}: {count} arrivals where {self.pending} are pending"
            )
        self.pending -= count
        np.maximum(self.gathered, clock, out=self.gathered)
        self.settle()

    def expect(self, count: int) -> None:
        """Expect more bytes in this phase."""
        self.bytes += count
        if abs(self.bytes) > MOST_BYTES:
            raise PtxError(f"mbarrier {self.address:#x}: a transaction count of {self.bytes}")

    def begin(self, transfer: Transfer) -> int:
        """Add a copy, and return the stamp of its writes."""
        self.transfers.append(transfer)
        return clocks.stamp(self.agent, self.phase + 1)

    def settle(self) -> None:
        """End the phase if it is complete."""
        if self.pending or self.bytes:
            return
        self.phase += 1
        self.pending = self.count
        self.complete, self.gathered = self.gathered, self.agents.clock()
        self.complete[SEEN][self.agent] = self.phase

    def passed(self, parity: int, rng: np.random.Generator) -> bool:
        """Whether the phase of a parity is complete, after landing copies until it is."""
        while self.phase & 1 == parity & 1 and self.transfers:
            transfer = self.transfers.pop(int(rng.integers(len(self.transfers))))
            transfer.land(clocks.stamp(self.agent, self.phase + 1))
            self.expect(-transfer.bytes)
            self.settle()
        return self.phase & 1 != parity & 1

    def __str__(self) -> str:
        return (
            f"mbarrier {self.address:#x}: phase {self.phase}, {self.pending} of {self.count} "
            f"arrivals pending, {self.bytes} bytes expected, {len(self.transfers)} copies under way"
        )


class NamedBarrier:
    """One of the 16 barriers of a block (PTX ISA, "bar, barrier")."""

    def __init__(self, agents: clocks.Agents) -> None:
        self.clock = agents.clock()
        self.arrived = 0  # threads
        self.expected = 0
        self.waiting: list[Any] = []

    def arrive(self, warp: Any, expected: int, waits: bool) -> bool:
        """Let a warp arrive; return whether that completes the barrier, so it need not wait."""
        if self.arrived and expected != self.expected:
            raise PtxError(f"a barrier of {self.expected} threads is used as one of {expected}")
        self.expected = expected
        self.arrived += warp.threads
        np.maximum(self.clock, warp.clock, out=self.clock)
        if waits:
            self.waiting.append(warp)
        if self.arrived < expected:
            return False
        if self.arrived > expected:
            raise PtxError(f"{self.arrived} threads arrive at a barrier of {expected}")
        for other in self.waiting:
            other.learn(self.clock)
            if other is not warp:
                other.resume()
        self.clock[:] = 0
        self.arrived = 0
        self.waiting = []
        return True


class ClusterBarrier:
    """The barrier of all warps of a cluster (PTX ISA, "barrier.cluster")."""

    def __init__(self, agents: clocks.Agents, num_warps: int) -> None:
        self.agents, self.num_warps = agents, num_warps
        self.phase, self.arrived = 0, 0
        self.gathered = agents.clock()
        self.complete: list[np.ndarray] = []

    def arrive(self, clock: np.ndarray) -> int:
        """Let a warp with this clock arrive; return the phase that it must wait for."""
        phase = self.phase
        self.arrived += 1
        np.maximum(self.gathered, clock, out=self.gathered)
        if self.arrived == self.num_warps:
            self.complete.append(self.gathered)
            self.gathered = self.agents.clock()
            self.phase, self.arrived = phase + 1, 0
        return phase
