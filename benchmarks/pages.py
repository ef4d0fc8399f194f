"""Write the tables and charts of README and docs from capability rows and committed results.

    python -m benchmarks.pages [--notebooks]

Tables go between `<!-- name -->` and `<!-- /name -->` in the pages, charts to docs/images.
`--notebooks` also runs the notebooks and stores their plots of computed numbers.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from collections.abc import Callable, Iterator

import numpy as np

import jattn
from benchmarks.charts import Bar, Panel, svg
from benchmarks.cpu import format_speed, prose, report, sdpa, tables, writing
from benchmarks.gpu import tables as gpu_tables
from benchmarks.serving import experts, http, products, transfer
from jattn import capability, implementations
from tests.peers import records as peers

ROOT = pathlib.Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SERVING = tables.RESULTS / "2026-11-22-serving-cpu-jax0.12.txt"
CASCADE = {
    version: tables.RESULTS / f"2026-11-23-cascade-zen4-jax{version}.jsonl"
    for version in ("0.12", "0.10")
}
HTTP = tables.RESULTS / "2026-11-22-serving-http-jax0.12.jsonl"
HTTP_ZEN4 = tables.RESULTS / "2026-11-26-serving-http-zen4-jax0.12.jsonl"
HTTP_ZEN3 = tables.RESULTS / "2026-11-24-serving-http-zen3-jax0.12.jsonl"
ARRANGEMENTS = tables.RESULTS / "2026-11-26-serving-arrangements-zen4-jax0.12.jsonl"
PRODUCTS = {
    "Xeon with AMX": tables.RESULTS / "2026-11-22-products-jax0.12.jsonl",
    "Zen 4": tables.RESULTS / "2026-11-26-products-zen4-jax0.12.jsonl",
    "Zen 3": tables.RESULTS / "2026-11-24-products-zen3-jax0.12.jsonl",
}
FORMAT_SPEED = {
    (machine, version): tables.RESULTS / f"{name}-jax{version}.jsonl"
    for machine, name in (
        ("Zen 5", "2026-11-30-format-speed-zen5"),
        ("Zen 4", "2026-11-28-format-speed-zen4"),
        ("Xeon with AMX", "2026-11-22-format-speed"),
        ("Zen 3", "2026-11-25-format-speed-zen3"),
    )
    for version in ("0.12", "0.10")
}
FORMAT_SPEED_AVX512 = tables.RESULTS / "2026-11-26-format-speed-avx512-zen4-jax0.12.jsonl"
WRITING = {
    "Zen 5": tables.RESULTS / "2026-11-30-writing-zen5-jax0.12.jsonl",
    "Zen 4": tables.RESULTS / "2026-11-29-writing-zen4-jax0.12.jsonl",
    "Zen 3": tables.RESULTS / "2026-11-25-writing-zen3-jax0.12.jsonl",
    "Xeon with AMX": tables.RESULTS / "2026-11-22-writing-jax0.12.jsonl",
}
EXPERTS = tables.RESULTS / "2026-11-26-experts-zen4-jax0.12.jsonl"
SERVING_ZEN4 = tables.RESULTS / "2026-11-26-serving-zen4-jax0.12.jsonl"
PADDING = tables.RESULTS / "2026-11-26-padding-zen4-jax0.12.jsonl"
ROLLBACK = tables.RESULTS / "2026-11-26-rollback-zen4-jax0.12.jsonl"
SPECULATION = tables.RESULTS / "2026-11-26-speculation-zen4-jax0.12.jsonl"
SCAN = tables.RESULTS / "2026-11-26-scan-zen4-jax0.12.jsonl"
ARITHMETIC = {
    "Zen 5": tables.RESULTS / "2026-11-30-arithmetic-peak-zen5-jax0.12.jsonl",
    "Zen 4": tables.RESULTS / "2026-11-28-arithmetic-peak-zen4-jax0.12.jsonl",
}
TRANSFORMERS = tables.RESULTS / "2026-11-28-transformers-decode-zen4-jax0.10.jsonl"
TRANSFER = {
    "qwen3-0.6b-8-layers": tables.RESULTS / "2026-11-22-serving-transfer-8-layers-jax0.12.jsonl",
    "byte-gemma": tables.RESULTS / "2026-11-22-serving-transfer-jax0.12.jsonl",
}
SDPA = {
    "Xeon with AMX": tables.RESULTS / "2026-11-22-sdpa-jax0.12.jsonl",
    "Zen 5": tables.RESULTS / "2026-11-30-sdpa-zen5-jax0.12.jsonl",
    "Zen 4": tables.RESULTS / "2026-11-28-sdpa-zen4-jax0.12.jsonl",
}
# The notebooks' plots in order. None: a plot of times, which is not committed.
PLOTS = {
    "paged_attention": ("memory-over-steps", None),
    "hybrid_pages": ("plan-waste", "window-memory"),
}


def short_support_table() -> str:
    """Write the table of what runs where, in lines that fit a screen."""
    lines = [
        "| implementation | runs on | head sizes D | caches | gradients |",
        "|---|---|---|---|---|",
    ]
    for row in implementations.ROWS:
        stems = ", ".join(dict.fromkeys(name.split("_")[0] for name in row.formats))
        for names, word in (
            ("float32, bfloat16, float16", "floats"),
            ("bfloat16, float16", "16-bit floats"),
        ):
            stems = stems.replace(names, word)
        caches = "all" if row.formats == capability.ALL_FORMATS else stems
        machines = "any" if row.devices == ("any",) else ", ".join(row.devices).upper()
        where = machines if row.needs == "nothing" else f"{machines}: {row.needs}"
        grads = "yes" if row.differentiable else "no"
        lines.append(f"| `{row.implementation}` | {where} | {row.head_dims} | {caches} | {grads} |")
    return "\n".join(lines)


def speed_table(machine: str) -> str:
    """Write how fast each format decodes and is written on a machine."""
    lines = tables.read_lines(FORMAT_SPEED[machine, "0.12"])
    rows = [{k: v for k, v in row.items() if k != "kind"} for row in lines]
    return "\n".join([format_speed.HEADER, *(str(format_speed.Row(**row)) for row in rows)])


def writing_table(lines: list[dict]) -> str:
    """Write how fast the native kernel and XLA write new tokens."""
    rows = ({k: v for k, v in row.items() if k != "kind"} for row in lines)
    return "\n".join([writing.HEADER, *(str(writing.Row(**row)) for row in rows)])


def products_table() -> str:
    """Write XLA's times of the server's matrix products over those of the C++ ones."""
    return products.page_table({name: tables.read_lines(file) for name, file in PRODUCTS.items()})


def zen4_rows() -> list[dict]:
    """Read the CPU suite on a Zen 4 with the newer JAX."""
    return tables.read_rows([tables.ZEN4_FILES["0.12"]])


def zen5_rows() -> list[dict]:
    """Read the CPU suite on a Zen 5 with the newer JAX."""
    return tables.read_rows([tables.ZEN5_FILES["0.12"]])


def xeon_rows() -> list[dict]:
    """Read the CPU suite on a Xeon with AMX."""
    return tables.read_rows([tables.XEON_FILES["0.12"]])


def zen3_rows() -> list[dict]:
    """Read the CPU suite on a Zen 3 with the newer JAX."""
    return tables.read_rows([tables.ZEN3_FILES["0.12"]])


def cpu_summary(files: dict[str, pathlib.Path]) -> str:
    """Summarize the CPU suite on a machine in sentences."""
    return prose.summary({version: tables.read_rows([file]) for version, file in files.items()})


def table_of(file: pathlib.Path, make: Callable[[list[dict]], str]) -> str:
    """Make the table of a result file, if that file has been committed."""
    return make(tables.read_lines(file)) if file.exists() else "Not measured yet."


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"support table": short_support_table},
    "docs/support.md": {"support table": jattn.support_table},
    "docs/performance-cpu.md": {
        "xeon mean table": lambda: tables.mean_table(xeon_rows()),
        "zen4 mean table": lambda: tables.mean_table(zen4_rows()),
        "zen4 summary": lambda: cpu_summary(tables.ZEN4_FILES),
        "zen3 summary": lambda: cpu_summary(tables.ZEN3_FILES),
        "xeon summary": lambda: cpu_summary(tables.XEON_FILES),
        "zen3 mean table": lambda: tables.mean_table(zen3_rows()),
        "zen5 mean table": lambda: tables.mean_table(zen5_rows()),
        "zen5 summary": lambda: cpu_summary(tables.ZEN5_FILES),
        "xla table": lambda: tables.mean_table(tables.read_rows(tables.XLA_FILES), True),
        "xeon table": lambda: tables.full_table(xeon_rows()),
        "zen4 table": lambda: tables.full_table(zen4_rows()),
        "zen3 table": lambda: tables.full_table(zen3_rows()),
        "zen5 table": lambda: tables.full_table(zen5_rows()),
        "sdpa table, Zen 5": lambda: table_of(SDPA["Zen 5"], sdpa.table),
        "sdpa table, Zen 4": lambda: table_of(SDPA["Zen 4"], sdpa.table),
        "sdpa table, Xeon with AMX": lambda: table_of(SDPA["Xeon with AMX"], sdpa.table),
    },
    "docs/performance-serving.md": {
        "http table": lambda: table_of(HTTP, http.table),
        "zen4 http table": lambda: table_of(HTTP_ZEN4, http.table),
        "zen3 http table": lambda: table_of(HTTP_ZEN3, http.table),
        "arrangements table": lambda: table_of(ARRANGEMENTS, http.table_of_servers),
        "products table": products_table,
        "experts table": lambda: table_of(EXPERTS, experts.page_table),
    },
    "docs/performance-formats.md": {
        "cost table": lambda: tables.format_table(tables.read_lines(tables.FORMAT_FILE)),
        "speed table, Zen 5": lambda: speed_table("Zen 5"),
        "speed table, Zen 4": lambda: speed_table("Zen 4"),
        "speed table, Xeon with AMX": lambda: speed_table("Xeon with AMX"),
        "speed table, Zen 3": lambda: speed_table("Zen 3"),
        "writing table, Zen 5": lambda: table_of(WRITING["Zen 5"], writing_table),
        "writing table, Zen 4": lambda: table_of(WRITING["Zen 4"], writing_table),
        "writing table, Zen 3": lambda: table_of(WRITING["Zen 3"], writing_table),
        "writing table, Xeon with AMX": lambda: table_of(WRITING["Xeon with AMX"], writing_table),
    },
    "docs/disaggregation.md": {
        "transfer table": lambda: table_of(TRANSFER["qwen3-0.6b-8-layers"], transfer.page_table),
    },
    "docs/transformers.md": {
        "transformers table": lambda: table_of(TRANSFORMERS, tables.transformers_table),
    },
    "docs/peer-tests.md": {
        "peers table": peers.table,
        "peers not run": peers.not_run_list,
    },
    "docs/performance-gpu.md": {
        "measured on": lambda: gpu_tables.ceilings(gpu_tables.read()),
        "decode table": lambda: gpu_tables.decode_table(gpu_tables.read()),
        "prefill table": lambda: gpu_tables.prefill_table(gpu_tables.read()),
    },
    "docs/masks.md": {"cost table": lambda: tables.mask_table(tables.read_lines(tables.MASK_FILE))},
}


def overview_chart() -> str:
    """Draw README's figure: tokens a second against transformers, memory against a dense cache."""
    return svg("jattn and others", [_serving_panel(), _memory_panel()])


def _serving_panel() -> Panel:
    """Draw tokens a second of the serving results' second model, 8 layers of Qwen3-0.6B."""
    text = SERVING.read_text().partition("random weights, bfloat16")[2].partition("python -m")[0]
    ours = re.search(r"new ones: (\d+) tokens/s", text)[1]
    bars = [Bar("jattn, examples/engine", int(ours), ours)]
    for name, speed in reversed(re.findall(r"^  (\w[\w ,]*?) +(\d+) tokens/s", text, re.M)):
        label = "transformers, " + name.replace("its ", "").replace("generate, ", "")
        bars.append(Bar(label, int(speed), speed, strong=False))
    title = "Tokens a second, 16 requests, 8 layers of Qwen3-0.6B, bfloat16, 2 cores of a Xeon"
    return Panel(title, bars)


def _memory_panel() -> Panel:
    """Draw the most a cache held in 3,000 decode steps of requests of log-normal lengths."""
    rows, longest, block = 64, 8192, 16
    rng = np.random.default_rng(0)
    ends = np.minimum(rng.lognormal(6.5, 0.9, 100_000).astype(int) + block, longest)
    age, end, coming = np.zeros(rows, int), ends[:rows].copy(), iter(ends[rows:])
    most = 0
    for _ in range(3000):
        age += 1
        for row in np.flatnonzero(age > end):
            age[row], end[row] = 1, next(coming)
        most = max(most, int((-(-age // block)).sum()) * block)
    gib = jattn.blocks.kv_bytes_per_token(num_kv_heads=4, head_dim=512) / 2**30
    held, dense = most * gib, rows * longest * gib
    bars = [
        Bar(f"jattn, blocks of {block}", held, f"{held:.2f} GiB"),
        Bar("a dense cache", dense, f"{dense:.2f} GiB", strong=False),
    ]
    return Panel(f"Memory of a layer's cache, {rows} requests of up to {longest:,} tokens", bars)


def cpu_chart() -> str:
    """Draw geometric means over KV heads of vLLM's time over jattn's, in bfloat16 on a Zen 4."""
    rows = [row for row in tables.calm(zen4_rows()) if row["dtype"] == "bfloat16"]
    panels = []
    for group, words in tables.WORKLOADS.items():
        bars = []
        for size in sorted({row["head_dim"] for row in rows}):
            these = [r["ratio"] for r in rows if (r["group"], r["head_dim"]) == (group, size)]
            mean = report.geometric_mean(these)
            bars.append(Bar(f"D = {size}", mean, f"{mean:.2f}", strong=mean >= 1))
        panels.append(Panel(words, bars, mark=1, full=3.5))
    return svg("vLLM's time over jattn's", panels)


def format_chart() -> str:
    """Draw the error of logits and the bytes of each format, on the trained model."""
    rows = {
        r["format"]: r for r in tables.read_lines(tables.FORMAT_FILE) if r["model"] == "byte-gemma"
    }
    unit = rows["bfloat16"]["bytes_per_token"]
    bars = [
        Bar(
            f"{words} ({rows[name]['bytes_per_token'] / unit:.2f})",
            rows[name]["rms_error"],
            f"{rows[name]['rms_error']:.4f}",
        )
        for name, words in tables.FORMATS.items()
    ]
    title = "Error of byte-gemma's logits (rms); in parentheses, bytes as a share of bfloat16's"
    return svg(title, [Panel(title, bars)])


def mask_chart(head_dim: int = 128) -> str:
    """Draw a call's time with an argument over its time without."""
    rows = [r for r in tables.read_lines(tables.MASK_FILE) if r["head_dim"] == head_dim]
    return svg(
        "What masks cost",
        [
            Panel(
                f"{words}, D = {head_dim}: time relative to the plain call",
                [
                    Bar(r["variant"], r["ratio"], f"{r['ratio']:.2f}")
                    for r in rows
                    if r["workload"] == kind and r["variant"] != "plain"
                ],
            )
            for kind, words in tables.CALLS.items()
        ],
    )


def cascade_chart() -> str:
    """Draw decodes that share a prefix, with and without `cascade_attention`."""
    panels = []
    for row in tables.read_lines(CASCADE["0.12"]):
        title = (
            f"{row['sequences']} decodes that share {row['shared']:,} tokens and have "
            f"{row['own']} of their own, D = {row['head_dim']}"
        )
        calls = (("cascade_attention", "cascade_ms"), ("paged_attention", "flat_ms"))
        bars = [
            Bar(name, row[key], f"{row[key]:.0f} ms", key == "cascade_ms") for name, key in calls
        ]
        panels.append(Panel(title, bars))
    return svg("Shared prefixes", panels)


CHARTS = {
    "overview": overview_chart,
    "cpu": cpu_chart,
    "formats": format_chart,
    "masks": mask_chart,
    "cascade": cascade_chart,
}


def generated() -> Iterator[tuple[pathlib.Path, str]]:
    """Yield every file that has generated parts, with the text it must have."""
    for name, parts in TABLES.items():
        text = (ROOT / name).read_text()
        for part, make in parts.items():
            begin, end = f"<!-- {part} -->\n", f"\n<!-- /{part} -->"
            head, found, rest = text.partition(begin)
            if not found or end not in rest:
                raise ValueError(f"{name} has no '{begin.strip()}' followed by '{end.strip()}'")
            text = head + begin + make() + rest[rest.index(end) :]
        yield ROOT / name, text
    for name, chart in CHARTS.items():
        yield IMAGES / f"{name}.svg", chart()


def write_plots(notebook: str, names: tuple[str | None, ...]) -> None:
    """Run a notebook and store its plots under the given names."""
    import matplotlib.pyplot as plt

    style = {"svg.fonttype": "none", "svg.hashsalt": "jattn", "font.size": 9}
    grey = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    plt.rcParams.update({**style, **dict.fromkeys(grey, "#768089"), "legend.framealpha": 0})
    plots = iter(names)

    def store() -> None:
        if name := next(plots):
            path = IMAGES / f"{name}.svg"
            plt.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
        plt.close("all")

    plt.show = store
    cells = json.loads((ROOT / f"examples/notebooks/{notebook}.ipynb").read_text())["cells"]
    namespace = {"__name__": notebook}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), namespace)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--notebooks", action="store_true", help="also the plots of notebooks")
    args = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    for path, text in generated():
        path.write_text(text)
    if args.notebooks:
        for notebook, names in PLOTS.items():
            write_plots(notebook, names)


if __name__ == "__main__":
    main()
