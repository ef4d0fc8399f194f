"""Record a serving benchmark's run and rates, and append lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import run_record


def of_run(checkpoint: str, **more: Any) -> dict[str, Any]:
    """Return the first record: what was measured, when, and with which versions."""
    return run_record(checkpoint=checkpoint, **more)


def rates(times: Iterable[tuple[float, float, float, int]]) -> dict[str, float]:
    """Return throughput and latencies.

    Args:
      times: for every request, in seconds, when it was sent and when its first and last token
        arrived, and how many tokens arrived.
    """
    asked, first, last, tokens = map(np.array, zip(*times, strict=True))
    seconds = max(last) - min(asked)
    waits = (first - asked) * 1e3
    several = tokens > 1
    each = (last - first)[several] / (tokens[several] - 1) * 1e3
    return {
        "requests_per_s": float(len(tokens) / seconds),
        "tokens_per_s": float(tokens.sum() / seconds),
        "first_ms": float(np.median(waits)),
        "first_p99_ms": float(np.percentile(waits, 99)),
        "each_ms": float(np.median(each)),
        "each_p99_ms": float(np.percentile(each, 99)),
    }


def append(file: Path | None, *records: dict) -> None:
    """Append a line for each record, if there is a file."""
    if file:
        with file.open("a") as out:
            out.writelines(json.dumps(record) + "\n" for record in records)
