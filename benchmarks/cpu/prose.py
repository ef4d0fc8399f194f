"""Summarize the figures of one machine in sentences, for docs/performance-cpu.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.cpu import report, tables

# Groups by the name that a sentence has for them.
PARTS = {
    "prefill": ("prefill",),
    "mixtures": ("mixed",),
    "decode and windows": ("decode-block128", "decode-block16", "window"),
    "one decode of 128 tokens": ("short",),
}


def span(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Format the smallest and the largest value."""
    return f"{form(min(values))} to {form(max(values))}"


def ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f}"


def means(rows: Sequence[dict]) -> str:
    """Write the geometric means, and the rows below one or else the lowest ratio."""

    def mean(these: Sequence[dict]) -> str:
        return f"{report.geometric_mean(row['ratio'] for row in these):.2f}"

    parts = [
        f"{mean([row for row in rows if row['dtype'] == dtype])} times in {dtype}"
        for dtype in tables.DTYPES
    ]
    slower = sorted((row["ratio"], row["name"]) for row in rows if row["ratio"] < 1)
    ends = f"The lowest ratio is {ratio(min(row['ratio'] for row in rows))}"
    if slower:
        ends = f"Below 1 are {', '.join(f'`{name}` ({value:.2f})' for value, name in slower)}"
    start = f"jattn is {mean(rows)} times as fast as vLLM (geometric mean of {len(rows)} rows)"
    return f"{start}: {' and '.join(parts)}. {ends}"


def ranges(rows: Sequence[dict], dtype: str) -> str:
    """Write the smallest and the largest ratio of each kind of call."""
    texts = []
    for words, groups in PARTS.items():
        these = [row for row in rows if row["dtype"] == dtype and row["group"] in groups]
        text = f"{words} {span([row['ratio'] for row in these], ratio)}"
        peaks = [row["share_of_ceiling"] for row in these if row["bound"] == "matrix"]
        if words == "prefill" and peaks:
            text += f" (at {span(peaks, percent)} % of the matrix peak)"
        texts.append(text)
    return f"- **{dtype}**: {', '.join(texts)}."


def reads(rows: Sequence[dict]) -> str | None:
    """Compare decode with a loop that only reads its blocks in random order."""
    decodes = [row for row in rows if row["group"].startswith("decode")]
    alone = [row for row in decodes if row["num_kv_heads"] == row["num_heads"]]
    shares = [share for row in alone if (share := row.get("share_of_random_reads")) is not None]
    if not shares:
        return None
    shared = [
        percent(
            statistics.median(
                row["share_of_random_reads"]
                for row in rows
                if row["num_kv_heads"] == heads and row["share_of_random_reads"] is not None
            )
        )
        for heads in (4, 2, 1)
    ]
    loop = [row["kv_gb_per_s"] / row["share_of_random_reads"] for row in alone]
    return (
        f"- **Decode** without shared KV heads reads "
        f"{span([row['kv_gb_per_s'] for row in alone], '{:.0f}'.format)} GB/s. A loop that only "
        f"reads the same blocks in random order, measured alongside, reads "
        f"{span(loop, '{:.0f}'.format)} GB/s: decode reaches {span(shares, percent)} % of that, "
        f"and {percent(statistics.median(shares))} % in the median row. Where 16 query heads "
        f"share 4, 2 and 1 KV heads, the median over all decodes, including windowed and short "
        f"ones, is {shared[0]}, {shared[1]} and {shared[2]} %."
    )


def summary(versions: Mapping[str, Sequence[dict]]) -> str:
    """Write a sentence of means for each version of JAX, then ranges with the first one."""
    calm = {version: tables.calm(rows) for version, rows in versions.items()}
    lines = [f"With JAX {version}, {means(rows)}." for version, rows in calm.items()]
    first, rows = next(iter(calm.items()))
    bullets = [ranges(rows, dtype) for dtype in tables.DTYPES]
    bullets += filter(None, [reads(rows)])
    lines.append(f"Ratios by kind of call, with JAX {first}:")
    parts = [tables.wrapped(line) for line in lines]
    return "\n\n".join([*parts, "\n".join(tables.wrapped(bullet, "  ") for bullet in bullets)])
