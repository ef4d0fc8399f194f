"""Vector clocks: which accesses are known to be ordered.

An *agent* is something whose accesses happen one after the other: the program of a warp, its
`cp.async` groups, its bulk groups, its groups of `wgmma`, and the copies that complete on one
mbarrier. An access is stamped with its agent and the agent's time. Synchronizing tells a warp how
far each agent has come at least; accesses stamped later than that may still be under way.

A `Clock` has three rows of times, one column for each agent:

    SEEN    accesses that come before what the warp does next (PTX ISA, "Causality Order")
    FENCED  generic accesses that a proxy fence has made visible to the async proxy ("Proxy")
    INITED  mbarriers whose initialisation a fence has made visible to it (fence.mbarrier_init)
"""

from __future__ import annotations

import numpy as np

SEEN, FENCED, INITED = 0, 1, 2
PROGRAM, CP_ASYNC, BULK, WGMMA = 0, 1, 2, 3
KINDS = ("program", "cp.async", "bulk copies", "wgmma")
MOST_MBARRIERS = 192  # per cluster; each is an agent
TIME_BITS = 40
TIMES = (1 << TIME_BITS) - 1


class Agents:
    """The numbering of a cluster's agents: four of each warp, then the mbarriers."""

    def __init__(self, num_warps: int) -> None:
        self.num_warps = num_warps
        self.count = 4 * num_warps + MOST_MBARRIERS
        self.mbarriers = 0

    def of(self, kind: int, warp: int) -> int:
        """Return an agent of a warp, which is numbered within the cluster."""
        return kind * self.num_warps + warp

    def new_mbarrier(self) -> int:
        """Return the agent of a new mbarrier."""
        self.mbarriers += 1
        assert self.mbarriers <= MOST_MBARRIERS
        return 4 * self.num_warps + self.mbarriers - 1

    def name(self, agent: int) -> str:
        """Like "wgmma of warp 3"."""
        kind, warp = divmod(agent, self.num_warps)
        if kind >= 4:
            return f"copies of mbarrier {agent - 4 * self.num_warps}"
        return f"{KINDS[kind]} of warp {warp}"

    def clock(self) -> np.ndarray:
        """Return a clock that knows of no access."""
        return np.zeros((3, self.count), np.int64)


def stamp(agent: int, time: int) -> int:
    """Pack an agent and its time into one number."""
    return agent << TIME_BITS | time


class ReaderSets:
    """Numbered sets of readers: 0 is the empty set, and adding a reader gives another number.

    Many bytes have the same readers, so a byte stores only the number of a set. Each set has the
    latest time of every agent in it.
    """

    def __init__(self, agents: Agents) -> None:
        self.rows = [np.zeros(agents.count, np.int64)]
        self.known: dict[tuple[int, int, int], int] = {}

    def with_reader(self, old: int, agent: int, time: int) -> int:
        """Return the set that `old` becomes when an agent reads."""
        key = (old, agent, time)
        if key not in self.known:
            if self.rows[old][agent] == time:
                self.known[key] = old
            else:
                row = self.rows[old].copy()
                row[agent] = time
                self.known[key] = len(self.rows)
                self.rows.append(row)
        return self.known[key]
