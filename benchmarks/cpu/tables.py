"""Print committed figures as Markdown tables.

    python -m benchmarks.cpu.tables [--all | --formats | --masks] FILE...

Without an option, prints means over KV heads of `benchmarks.cpu`; with --all every row, for
docs/performance-cpu.md. `--formats` prints `benchmarks.cpu.formats` for
docs/performance-formats.md, `--masks` `benchmarks.cpu.masks` for docs/masks.md. A row of a later
file replaces the same row of an earlier one. If one file has a row twice, the calmer one counts: an
undisturbed row before a disturbed one, then the smaller spread. Means leave disturbed rows out;
`--all` marks them with a star.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import textwrap
from collections.abc import Iterable, Sequence

from benchmarks.cpu import report

RESULTS = pathlib.Path(__file__).parents[1] / "results"
# The suite with `native` on a machine with AMX, by version of JAX.
XEON_FILES = {"0.12": RESULTS / "2026-12-01-cpu-native-xeon-jax0.12.jsonl"}
# The same on a Zen 4, which has no AMX.
ZEN4_FILES = {
    "0.12": RESULTS / "2026-11-30-cpu-native-zen4-jax0.12.jsonl",
    "0.10": RESULTS / "2026-11-28-cpu-native-zen4-jax0.10.jsonl",
}
# The same on a Zen 5, which computes 512 bits at a time.
ZEN5_FILES = {
    version: RESULTS / f"2026-11-30-cpu-native-zen5-jax{version}.jsonl"
    for version in ("0.12", "0.10")
}
# The same on a Zen 3, which has no AVX-512.
ZEN3_FILES = {
    "0.12": RESULTS / "2026-11-29-cpu-native-zen3-jax0.12.jsonl",
    "0.10": RESULTS / "2026-11-28-cpu-native-zen3-jax0.10.jsonl",
}
# An eighth of the suite with `xla` on the machine with AMX.
XLA_QUICK_FILE = RESULTS / "2026-11-22-cpu-quick-xla-jax0.12.jsonl"
# The whole suite with `xla` on a Zen 4, and rows that were disturbed and measured again.
XLA_FILES = (
    RESULTS / "2026-11-20-cpu-jax0.12.jsonl",
    RESULTS / "2026-11-20-cpu-head512-bf16-jax0.12.jsonl",
)
FORMAT_FILE = RESULTS / "2026-11-22-formats-jax0.12.jsonl"
MASK_FILE = RESULTS / "2026-11-23-masks-zen4-jax0.12.jsonl"
WORKLOADS = {
    "prefill": "prefill of 2,048",
    "mixed": "chunk of 256 after 2,048, with 8 decodes",
    "decode-block128": "decode of 8 x 4,096, block 128",
    "decode-block16": "decode of 8 x 4,096, block 16",
    "window": "decode, window 1,024 of 16,384",
    "short": "one decode of 128 tokens",
}
DTYPES = ("bfloat16", "float32")
FORMATS = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int8-zero": "int8 with zero points",
    "int8": "int8",
    "e4m3-token": "fp8 e4m3, scale per token",
    "e4m3-block": "fp8 e4m3, scale per block",
    "e4m3-calibrated": "fp8 e4m3, calibrated scale",
    "e4m3": "fp8 e4m3, scale 1",
    "e5m2-token": "fp8 e5m2, scale per token",
    "e5m2-block": "fp8 e5m2, scale per block",
    "e5m2-calibrated": "fp8 e5m2, calibrated scale",
    "e5m2": "fp8 e5m2, scale 1",
    "int8-int4": "keys int8, values int4 with zero points",
    "int4-int8": "keys int4 with zero points, values int8",
    "nvfp4-calibrated": "NVFP4, calibrated scale",
    "nvfp4": "NVFP4, scale 1",
    "int4-zero": "int4 with zero points",
    "int4": "int4",
}
CALLS = {
    "decode": "decode of 8 x 4,096",
    "drafts": "8 x 8 draft tokens at 4,096",
    "prefill": "prefill of 2,048",
}


def read_rows(files: Iterable[pathlib.Path]) -> list[dict]:
    """Read rows that have a peer: of each name, the calmest in the last file that has it."""
    rows: dict[str, dict] = {}
    for file in files:
        compared = [record for record in read_lines(file) if "ratio" in record]
        # Sorting is stable: of equal rows the last one stays.
        rows |= {r["name"]: r for r in sorted(compared, key=unrest, reverse=True)}
    return list(rows.values())


def unrest(row: dict) -> tuple[bool, float]:
    """Return a key that sorts rows of one workload by how much their runs were disturbed."""
    return report.is_disturbed(row), max(row["spread"], row["peer_spread"])


def calm(rows: Iterable[dict]) -> list[dict]:
    """Return the rows that count in means."""
    return [row for row in rows if not report.is_disturbed(row)]


def left_out(rows: Sequence[dict]) -> str:
    """Write how many rows the means leave out, and which."""
    names = [row["name"] for row in rows if report.is_disturbed(row)]
    if not names:
        return f"None of these {len(rows)} rows was disturbed."
    which = [f"`{name}`" for name in names]
    count = f"{len(names)} of {len(rows)} rows"
    return wrapped(f"Disturbed, so left out of the means: {count} ({', '.join(which)}).")


def markdown(lines: Sequence[Sequence[object]]) -> str:
    """Write a table of cells; the first line is the head."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


def wrapped(text: str, indent: str = "") -> str:
    """Wrap a paragraph of a page."""
    return textwrap.fill(
        text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def mean_table(rows: list[dict], disturbed: bool = False) -> str:
    """Write means over KV heads: a line for each workload and dtype, a column for each head size.

    Disturbed rows are left out and named below the table, unless `disturbed` makes them count too.
    """
    sizes = sorted({row["head_dim"] for row in rows})
    lines = [["workload", "dtype", *(f"D={size}" for size in sizes)]]
    for group, words in WORKLOADS.items():
        for dtype in DTYPES:
            cells = []
            for size in sizes:
                these = [
                    row["ratio"]
                    for row in (rows if disturbed else calm(rows))
                    if (row["group"], row["dtype"], row["head_dim"]) == (group, dtype, size)
                ]
                cells.append(f"{report.geometric_mean(these):.2f}" if these else "–")
            lines.append((words, dtype, *cells))
    return markdown(lines) if disturbed else f"{markdown(lines)}\n\n{left_out(rows)}"


def full_table(rows: list[dict]) -> str:
    """Write every row: the ratio and, in parentheses, jattn's share of the ceiling that bounds it.

    A star marks disturbed rows.
    """
    sizes = sorted({row["head_dim"] for row in rows})
    lines = [["workload", "dtype", "KV heads", *(f"D={size}" for size in sizes)]]
    for group, words in WORKLOADS.items():
        for dtype in DTYPES:
            these = [row for row in rows if (row["group"], row["dtype"]) == (group, dtype)]
            for kv_heads in sorted({row["num_kv_heads"] for row in these}, reverse=True):
                cells = {
                    row["head_dim"]: f"{row['ratio']:.2f}{'*' * report.is_disturbed(row)} "
                    f"({row['share_of_ceiling']:.0%})"
                    for row in these
                    if row["num_kv_heads"] == kv_heads
                }
                lines.append((words, dtype, kv_heads, *(cells[size] for size in sizes)))
    return markdown(lines)


def append_lines(file: pathlib.Path, run: dict, rows: Iterable[dict]) -> None:
    """Append a run and its rows to a result file, for `read_lines`."""
    lines = [run, *({"kind": "row"} | row for row in rows)]
    with file.open("a") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def read_lines(file: pathlib.Path) -> list[dict]:
    """Read the rows of one result file."""
    records = map(json.loads, file.read_text().splitlines())
    return [record for record in records if record.get("kind", "row") == "row"]


def format_table(rows: list[dict]) -> str:
    """Write a line for each format: its bytes, and its cost on each checkpoint."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    by_name = {(row["model"], row["format"]): row for row in rows}
    heads = ["format", "bytes"]
    for model in models:
        english = by_name[model, "bfloat16"]["bits_per_byte"] is not None
        heads += [f"{model}: bits/byte", "rms"] if english else [f"{model}: rms"]
        heads.append("equal")
    lines = [heads]
    for format, words in FORMATS.items():
        sizes = [by_name[models[0], name]["bytes_per_token"] for name in (format, "bfloat16")]
        cells = [f"{sizes[0] / sizes[1]:.2f}"]
        for model in models:
            row = by_name[model, format]
            cells += [] if row["bits_per_byte"] is None else [f"{row['bits_per_byte']:.4f}"]
            cells.append(f"{row['rms_error']:.4f}")
            cells.append(f"{row['equal_tokens'] / row['num_tokens']:.1%}")
        lines.append((words, *cells))
    return markdown(lines)


def transformers_table(rows: list[dict]) -> str:
    """Write the ms of a step of `benchmarks.cpu.transformers_decode`, by dtype and room."""
    lines = [("numbers", "room in the caches", "sdpa", "jattn", "sdpa over jattn")]
    for row in rows:
        times = (f"{row[name]:.0f} ms" for name in ("sdpa_ms", "jattn_ms"))
        lines.append((row["dtype"], row["room"], *times, f"{row['ratio']:.2f}"))
    return markdown(lines)


def mask_table(rows: list[dict]) -> str:
    """Write a line for each argument of each call: its time over the plain call's, and its work."""
    sizes = sorted({row["head_dim"] for row in rows})
    lines = [["call", "argument", *(f"time, D={size}" for size in sizes), "pairs", "tiles"]]
    for kind, variant in dict.fromkeys((row["workload"], row["variant"]) for row in rows):
        these = {
            row["head_dim"]: row
            for row in rows
            if (row["workload"], row["variant"]) == (kind, variant)
        }
        if variant == "plain":
            continue
        times = [f"{these[size]['ratio']:.2f}" for size in sizes]
        work = [f"{these[sizes[0]][name]:.2f}" for name in ("pairs", "tiles")]
        lines.append((CALLS[kind], f"`{variant}`", *times, *work))
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.tables", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "files", nargs="*", type=pathlib.Path, help="results (default: the committed ones)"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--all", action="store_true", help="every row instead of means over KV heads"
    )
    kinds.add_argument("--formats", action="store_true", help="the cost of cache formats")
    kinds.add_argument("--masks", action="store_true", help="the cost of masks and biases")
    args = parser.parse_args()
    if args.formats or args.masks:
        table, file = (format_table, FORMAT_FILE) if args.formats else (mask_table, MASK_FILE)
        print(table([row for f in (args.files or [file]) for row in read_lines(f)]))
        return
    rows = read_rows(args.files or XEON_FILES.values())
    print(full_table(rows) if args.all else mean_table(rows))
    mean = report.geometric_mean(row["ratio"] for row in calm(rows))
    print(f"\ngeometric mean of {len(calm(rows))}: {mean:.2f}")


if __name__ == "__main__":
    main()
