"""Write the tables of docs/performance-gpu.md from committed results."""

from __future__ import annotations

import json
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.gpu import timing as gpu_timing

H100 = pathlib.Path(__file__).parents[1] / "results" / "2026-11-27-gpu-h100-jax0.11.jsonl"
OURS = ("mosaic_gpu", "triton")
PAGED = ("flashinfer-hnd", "vllm-triton", "flash-attention-4")
CONTIGUOUS = ("torch-sdpa", "jax-cudnn")
LAYERS = "one plan"
# Names in the tables' heads; docs/performance-gpu.md says what each is.
HEADINGS = {
    "flashinfer-hnd": "flashinfer",
    "vllm-triton": "vllm",
    "flash-attention-4": "flash-attn-4",
    "torch-sdpa": "sdpa",
    "jax-cudnn": "cudnn",
}


def read() -> list[dict[str, Any]]:
    """Read all lines of the record."""
    return list(map(json.loads, H100.read_text().splitlines()))


def by_workload(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return `{workload without block size: {implementation: row}}`, in the lines' order."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        if line.get("kind") == "row":
            implementation = (
                LAYERS if line["timed"] == gpu_timing.LAYERS else line["implementation"]
            )
            found.setdefault(re.sub(r"-block\d+$", "", line["name"]), {})[implementation] = line
    return found


def _table(
    lines: list[dict[str, Any]],
    bound: str,
    columns: Sequence[str],
    cell: Callable[[dict[str, Any]], str],
) -> str:
    """Write a row for every workload bound by `bound`; `cell` formats each column."""
    heads = [HEADINGS.get(column, column) for column in columns]
    table = [["layer, batch", *heads, f"of the {bound} rate"], ["---"] * (len(columns) + 2)]
    for name, found in by_workload(lines).items():
        if (mine := found.get("mosaic_gpu")) is None or mine["bound"] != bound:
            continue
        cells = [cell(found[column]) if column in found else "" for column in columns]
        table.append([name, *cells, f"{mine['share']:.0%}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def decode_table(lines: list[dict[str, Any]]) -> str:
    """Write microseconds per call, and the share of the read ceiling."""
    columns = ("mosaic_gpu", LAYERS, "triton", *PAGED, *CONTIGUOUS)
    return _table(lines, "read", columns, lambda row: f"{row['median'] * 1e6:.1f}")


def prefill_table(lines: list[dict[str, Any]]) -> str:
    """Write TFLOP/s of a call, and the share of what a large matrix product reaches."""
    columns = (*OURS, *PAGED, *CONTIGUOUS)
    return _table(lines, "matrix", columns, lambda row: f"{row['teraflops']:.0f}")


def ceilings(lines: list[dict[str, Any]]) -> str:
    """Write the rates that the GPU reached in the same run, as a sentence."""
    (run,) = (line for line in lines if line.get("kind") == "run")
    return textwrap.fill(
        f"{run['device']}, jax {run['jax']}, triton {run['triton']}, torch {run['torch']}: it "
        f"reads {run['read'] / 1e12:.2f} TB/s, and multiplies bfloat16 matrices of 8,192 at "
        f"{run['matrix'] / 1e12:.0f} TFLOP/s.",
        118,
    )
