"""Measure a call's kernels by the GPU's own clock; the host's clock shows what launching adds.

CUPTI records them. Pallas has a small reader of CUPTI, which sees the kernels inside captured
graphs; if that fails, `jax.profiler` writes a trace, which is read here. Neither needs a package
that JAX does not need.
"""

import collections
import dataclasses
import gzip
import json
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.gpu import session as gpu_session


@dataclasses.dataclass(frozen=True)
class KernelTimes:
    """The kernels of one call.

    Attributes:
      kernels: seconds of all kernels.
      launches: how many there are.
      parts: microseconds by kernel name, the longest first.
      source: where the times are from, or why there are none.
    """

    kernels: float | None
    launches: float | None
    parts: dict[str, float]
    source: str


def measure(run: Callable[..., Any], arguments: Sequence[Any], calls: int) -> KernelTimes:
    """Time the kernels of one of the `calls` that the jitted `run(*arguments)` makes."""
    reasons = []
    for name, times in (("CUPTI", _by_cupti), ("profiler", _by_profiler)):
        try:
            found = times(run, arguments)
        except Exception as error:  # a row without times is better than none
            reasons.append(f"{name}: {gpu_session.first_line(error)}")
            continue
        if found:
            return summed(found, calls, name)
        reasons.append(f"{name}: no kernels")
    return KernelTimes(None, None, {}, "; ".join(reasons))


def summed(found: Sequence[tuple[str, float]], calls: int, source: str) -> KernelTimes:
    """Return the kernel times of one call, from `(name, seconds)` of all kernels of `calls`."""
    parts: dict[str, float] = collections.Counter()
    for name, seconds in found:
        # XLA numbers its kernels; without numbers, those of different calls have the same name.
        parts[re.sub(r"[._]\d+$", "", name)[:60]] += seconds * 1e6 / calls
    longest = sorted(parts.items(), key=lambda part: -part[1])
    return KernelTimes(
        sum(seconds for _, seconds in found) / calls,
        len(found) / calls,
        {name: round(microseconds, 3) for name, microseconds in longest},
        source,
    )


def _by_cupti(run: Callable[..., Any], arguments: Sequence[Any]) -> list[tuple[str, float]]:
    from jax.experimental.mosaic.gpu import profiler

    _, found = profiler.measure(run, aggregate=False)(*arguments)
    return [(name, milliseconds / 1e3) for name, milliseconds in found or ()]


def _by_profiler(run: Callable[..., Any], arguments: Sequence[Any]) -> list[tuple[str, float]]:
    import jax

    run(*arguments).block_until_ready()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(*arguments).block_until_ready()
        (file,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        return list(kernels_of_trace(json.loads(gzip.decompress(file.read_bytes()))))


def kernels_of_trace(trace: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield `(name, seconds)` of every kernel on a GPU's streams, from a trace in Chrome's format.

    Streams are threads of the process `/device:GPU:0`; its other threads repeat their events as
    XLA's operations and modules. Copies have no `kernel_details`.
    """
    events = trace["traceEvents"]
    names = {
        (e["name"], e["pid"], e.get("tid")): e["args"]["name"]
        for e in events
        if e.get("ph") == "M" and e["name"] in ("process_name", "thread_name")
    }
    processes = {pid: name for (kind, pid, _), name in names.items() if kind == "process_name"}
    for e in events:
        if e.get("ph") != "X" or "/device:GPU:" not in processes.get(e["pid"], ""):
            continue
        on_stream = names.get(("thread_name", e["pid"], e["tid"]), "").startswith("Stream #")
        if on_stream and "kernel_details" in e.get("args", {}):
            yield e["name"], e["dur"] / 1e6
