"""The committed figures of `benchmarks.cpu` as Markdown, for README and docs/performance-cpu.md.

    python -m benchmarks.tables [--all] FILE...

A row that a later file has too replaces the earlier file's: what was measured again counts.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterable

from benchmarks import report

RESULTS = pathlib.Path(__file__).parent / "results"
# The run of the whole suite, and what was measured again because others were using the machine.
FILES = (
    RESULTS / "2026-11-20-cpu-jax0.12.jsonl",
    RESULTS / "2026-11-20-cpu-head512-bf16-jax0.12.jsonl",
)
WORKLOADS = {
    "prefill": "prefill of 2,048",
    "mixed": "chunk of 256 at 2,048 with 8 decodes",
    "decode-block128": "decode of 8 x 4,096, block 128",
    "decode-block16": "the same, block 16",
    "window": "decode, window 1,024 of 16,384",
    "short": "one decode of 128 tokens",
}
DTYPES = ("bfloat16", "float32")


def read_rows(files: Iterable[pathlib.Path]) -> list[dict]:
    """The compared rows of result files, the last of each name."""
    rows = {}
    for file in files:
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "row" and "ratio" in record:
                rows[record["name"]] = record
    return list(rows.values())


def mean_table(rows: list[dict]) -> str:
    """A line for each workload and dtype, a column for each head size: means over KV heads."""
    sizes = sorted({row["head_dim"] for row in rows})
    heads = [f"D={size}" for size in sizes]
    lines = [_line("workload", "dtype", *heads), _line(*["---"] * (len(sizes) + 2))]
    for group, words in WORKLOADS.items():
        for dtype in DTYPES:
            cells = []
            for size in sizes:
                these = [
                    row["ratio"]
                    for row in rows
                    if (row["group"], row["dtype"], row["head_dim"]) == (group, dtype, size)
                ]
                cells.append(f"{report.geometric_mean(these):.2f}")
            lines.append(_line(words, dtype, *cells))
    return "\n".join(lines)


def full_table(rows: list[dict]) -> str:
    """Every row: the ratio and, in brackets, jattn's share of the ceiling that bounds it."""
    sizes = sorted({row["head_dim"] for row in rows})
    heads = [f"D={size}" for size in sizes]
    lines = [
        _line("workload", "dtype", "KV heads", *heads),
        _line(*["---"] * (len(sizes) + 3)),
    ]
    for group, words in WORKLOADS.items():
        for dtype in DTYPES:
            these = [row for row in rows if (row["group"], row["dtype"]) == (group, dtype)]
            for kv_heads in sorted({row["num_kv_heads"] for row in these}, reverse=True):
                cells = {
                    row["head_dim"]: f"{row['ratio']:.2f} ({row['share_of_ceiling']:.0%})"
                    for row in these
                    if row["num_kv_heads"] == kv_heads
                }
                lines.append(_line(words, dtype, kv_heads, *(cells[size] for size in sizes)))
    return "\n".join(lines)


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("files", nargs="*", type=pathlib.Path, default=FILES)
    parser.add_argument("--all", action="store_true", help="every row, not means over KV heads")
    args = parser.parse_args()
    rows = read_rows(args.files)
    print(full_table(rows) if args.all else mean_table(rows))
    print(f"\ngeometric mean of {len(rows)}: {report.geometric_mean(r['ratio'] for r in rows):.2f}")


if __name__ == "__main__":
    main()
