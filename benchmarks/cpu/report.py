"""Format a measured row as a line of a table and of JSON, and summarize all rows."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.ceilings import Ceilings
from benchmarks.neighbours import QUIET
from benchmarks.timing import DISTURBED, Timing
from benchmarks.workloads import Workload, flops, kv_bytes

HEADER = (
    f"{'workload':<36} {'with':<9} {'median ms':>10} {'spread':>6} {'KV GB/s':>8} {'GFLOP/s':>8} "
    f"{'of ceiling':>13} {'vLLM ms':>9} {'spread':>6} {'ratio':>6}  {'busy':>4}"
)


@dataclass(frozen=True)
class PeerRow:
    """The peer's part of a row: how it stored the cache, and its time or why it has none."""

    block_size: int
    isa: str
    timing: Timing | None = None
    budget_used: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Row:
    """One workload, checked and timed.

    Attributes:
      workload: what was run.
      implementation: which of jattn's implementations ran it.
      timing: jattn's time.
      budget_used: the largest share of its error budget that an element of the result uses.
      ceilings: the ceilings measured in this run.
      copies: how many copies of keys and values calls use in turn, so that they are cold.
      neighbours: cores that other processes kept busy meanwhile.
      peer: the peer's part, if there is a peer.
      random_rate: bytes per second at which blocks of this size are read in random order, measured
        right before or after; None if not measured.
    """

    workload: Workload
    implementation: str
    timing: Timing
    budget_used: float
    ceilings: Ceilings
    copies: int
    neighbours: float
    peer: PeerRow | None = None
    random_rate: float | None = None

    @property
    def ratio(self) -> float | None:
        """The peer's time over jattn's: above one, jattn is faster."""
        if self.peer is None or self.peer.timing is None:
            return None
        return self.peer.timing.median / self.timing.median

    @property
    def disturbed(self) -> bool:
        """Whether the median of either contender is more than 1.5 times its minimum."""
        peer = self.peer and self.peer.timing
        return self.timing.disturbed or bool(peer and peer.disturbed)

    @property
    def share(self) -> tuple[float, str]:
        """The least possible time over jattn's, and what bounds it."""
        seconds, bound = self.ceilings.bound(self.workload)
        return seconds / self.timing.median, bound

    @property
    def share_of_random_reads(self) -> float | None:
        """The time of only reading the blocks, over jattn's."""
        if self.random_rate is None:
            return None
        return kv_bytes(self.workload) / self.random_rate / self.timing.median

    def line(self) -> str:
        """Format the row as a line of the table."""
        w, t = self.workload, self.timing
        share, bound = self.share
        text = (
            f"{w.name:<36} {self.implementation:<9} {t.median * 1e3:>10.4g} {t.spread:>6.0%} "
            f"{kv_bytes(w) / t.median / 1e9:>8.1f} {flops(w) / t.median / 1e9:>8.1f} "
            f"{share:>6.0%} {bound:<6} "
        )
        if self.ratio is None:
            why = "" if self.peer is None else (self.peer.error or "")
            return f"{text}{'-':>9} {'-':>6} {'-':>6}  {self.neighbours:>4.1f}  {why}".rstrip()
        peer = self.peer.timing
        text += f"{peer.median * 1e3:>9.4g} {peer.spread:>6.0%} {self.ratio:>6.2f}"
        text += f"  {self.neighbours:>4.1f}"
        if self.disturbed:
            text += "  disturbed"
        if self.peer.block_size != w.block_size:
            text += f"  vLLM at block {self.peer.block_size}"
        if self.peer.budget_used > 1:
            text += f"  vLLM's error is {self.peer.budget_used:.1f} budgets"
        return text

    def as_json(self) -> dict:
        """Return everything about the row, flat, for one line of JSON."""
        w = self.workload
        share, bound = self.share
        record = {
            "kind": "row",
            **dataclasses.asdict(w),
            "implementation": self.implementation,
            **_timing_fields("", self.timing),
            "kv_bytes": kv_bytes(w),
            "flops": flops(w),
            "kv_gb_per_s": kv_bytes(w) / self.timing.median / 1e9,
            "gflop_per_s": flops(w) / self.timing.median / 1e9,
            "share_of_ceiling": share,
            "bound": bound,
            "share_of_random_reads": self.share_of_random_reads,
            "budget_used": self.budget_used,
            "copies": self.copies,
            "neighbours": self.neighbours,
        }
        if self.peer is not None:
            record |= {
                "peer_block_size": self.peer.block_size,
                "peer_isa": self.peer.isa,
                "peer_error": self.peer.error,
                "peer_budget_used": self.peer.budget_used,
            }
        if self.ratio is not None:
            record |= {**_timing_fields("peer_", self.peer.timing), "ratio": self.ratio}
        return record


def _timing_fields(prefix: str, t: Timing) -> dict:
    return {
        f"{prefix}median_ms": t.median * 1e3,
        f"{prefix}spread": t.spread,
        f"{prefix}min_ms": t.minimum * 1e3,
        f"{prefix}calls": t.calls,
    }


def is_disturbed(record: Mapping[str, Any]) -> bool:
    """Return `Row.disturbed` of a row's line of JSON."""
    return any(
        record[f"{whose}median_ms"] > DISTURBED * record[f"{whose}min_ms"]
        for whose in ("", "peer_")
        if f"{whose}median_ms" in record
    )


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean of positive numbers."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


@dataclass(frozen=True)
class Summary:
    """All rows together.

    Attributes:
      groups: the geometric mean of the ratios of each group, by name.
      random_reads: the least and the mean share of the rate of random reads that decode reaches,
        by group.
      overall: the geometric mean of all ratios; None without a peer.
      slower: (name, ratio) of the rows where the peer is faster, the worst first.
      disturbed: names of the rows where the median of either contender is more than 1.5 times its
        minimum. No other figure includes them.
      busy: names of the other compared rows during which neighbours kept a core busy.
    """

    groups: dict[str, float]
    random_reads: dict[str, tuple[float, float]]
    overall: float | None
    slower: tuple[tuple[str, float], ...]
    disturbed: tuple[str, ...]
    busy: tuple[str, ...]

    def lines(self) -> list[str]:
        text = []
        if self.random_reads:
            text += [
                "",
                "share of the rate at which blocks are read in random order, least and mean:",
            ]
            text += [f"  {g:<24} {a:.0%} {b:.0%}" for g, (a, b) in self.random_reads.items()]
        if self.disturbed:
            text += ["", f"left out of the means as disturbed: {len(self.disturbed)}"]
            text += [f"  {name}" for name in self.disturbed]
        if self.overall is None:
            return text
        text += ["", "peer's time / jattn's, geometric mean:"]
        text += [f"  {group:<24} {mean:.2f}" for group, mean in self.groups.items()]
        text += [f"  {'all rows':<24} {self.overall:.2f}"]
        text += ["", f"rows where the peer is faster: {len(self.slower)}"]
        text += [f"  {name:<36} {ratio:.2f}" for name, ratio in self.slower]
        if self.busy:
            text += ["", "measure again, because other processes were busy meanwhile:"]
            text += [f"  {name}" for name in self.busy]
        return text


def summarize(rows: Iterable[Row]) -> Summary:
    """Summarize ratios of the rows with a peer's time, and shares of random reads."""
    found = list(rows)
    rows = [row for row in found if not row.disturbed]
    compared = [row for row in rows if row.ratio is not None]
    shares: dict[str, list[float]] = {}
    for row in rows:
        if row.share_of_random_reads is not None:
            name = f"{row.workload.group} {row.workload.dtype}"
            shares.setdefault(name, []).append(row.share_of_random_reads)
    groups: dict[str, list[float]] = {}
    for row in compared:
        w = row.workload
        # Prefill in bfloat16 and in float32 are bound by different units of the machine.
        groups.setdefault(f"{w.group} {w.dtype}", []).append(row.ratio)
    slower = sorted((row.ratio, row.workload.name) for row in compared if row.ratio < 1)
    return Summary(
        {group: geometric_mean(ratios) for group, ratios in sorted(groups.items())},
        {group: (min(of), geometric_mean(of)) for group, of in sorted(shares.items())},
        geometric_mean(row.ratio for row in compared) if compared else None,
        tuple((name, ratio) for ratio, name in slower),
        tuple(row.workload.name for row in found if row.disturbed),
        tuple(row.workload.name for row in compared if row.neighbours > QUIET),
    )
