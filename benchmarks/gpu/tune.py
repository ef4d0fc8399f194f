"""Try other tiles for the Triton kernels than the rule's: `benchmarks.gpu --part tune`.

A workload's **tuned kernel** is the one that does most of its work, decode or prefill. Its
candidates are the tiles around those of `jattn.pallas.triton.tiles`, the nearest first: half and
twice the rows and keys, 4 and 8 warps, one buffer of keys more and fewer, one program more and
fewer on a multiprocessor. To the benchmark each is another implementation, `triton[128x64 8w 3s
1c]`, checked before it is timed. Put the winners into the rule, if the tests that allow it no
spills pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from unittest import mock

from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu import data as gpu_data
from benchmarks.gpu import session as gpu_session
from benchmarks.gpu import shared_memory
from benchmarks.gpu.rows import Row, row_of
from benchmarks.workloads import Workload
from jattn import call as calls
from jattn.pallas import machine
from jattn.pallas.triton import tiles as triton_tiles
from jattn.pallas.triton.tiles import Tiles

# Stages that make a difference: Triton also counts the load of block ids, and with 3, 5 and 7
# requests keys and values one, two and three steps ahead.
STAGES = (3, 5, 7, 9)
# How many 32-bit numbers of the accumulator a thread may keep, of its 255 registers.
ACCUMULATOR = 160
SHOWN = 5
PATTERN = re.compile(r"triton\[(\d+)x(\d+) (\d)w (\d+)s (\d+)c\]")


def name_of(tiles: Tiles) -> str:
    """Return a name like `triton[128x64 8w 3s 1c]`: rows, keys, warps, stages, fitting programs."""
    sizes = f"{tiles.rows}x{tiles.keys} {tiles.warps}w {tiles.stages}s {tiles.per_core}c"
    return f"triton[{sizes}]"


def is_candidate(name: str) -> bool:
    """Whether an implementation's name includes tiles."""
    return PATTERN.fullmatch(name) is not None


def candidates(call: calls.Call, kernel: str, gpu: machine.Machine) -> list[Tiles]:
    """Return the rule's tiles and those around them that could fit, the nearest first."""
    rule = getattr(triton_tiles, f"{kernel}_tiles")(call, gpu)

    def around(size: int, most: int) -> list[int]:
        return [n for n in (size, size // 2, 2 * size) if 16 <= n <= most]

    def near(size: int, of: Sequence[int]) -> list[int]:
        at = min(range(len(of)), key=lambda i: abs(of[i] - size))
        return [size, *(n for n in of[max(at - 1, 0) : at + 2] if n != size)]

    # Decode launches as many programs as fit on the multiprocessors; prefill's follow the batch.
    programs = near(rule.per_core, (1, 2, 3, 4)) if kernel == "decode" else [rule.per_core]
    found = [
        Tiles(*sizes)
        for sizes in itertools.product(
            *(around(rule.rows, 128), around(rule.keys, 128), near(rule.warps, (4, 8))),
            *(near(rule.stages, STAGES), programs),
        )
    ]
    width = sum(triton_tiles.parts(call.value_dim))
    fits = [
        tiles
        for tiles in found
        if tiles.rows * width <= ACCUMULATOR * 32 * tiles.warps
        and tiles.per_core * shared_memory.shared_bytes(call, tiles) <= gpu.block_shared
    ]
    sizes = dataclasses.astuple(rule)

    def changes(tiles: Tiles) -> int:
        return sum(a != b for a, b in zip(dataclasses.astuple(tiles), sizes, strict=True))

    return [rule, *sorted((tiles for tiles in fits if tiles != rule), key=changes)]


def call_of(w: Workload) -> calls.Call:
    """Return a workload's call as dispatch sees it."""
    data = gpu_data.described(w)
    return gpu_cases.described(gpu_data.arguments(w, data, data.tables))


def tuned_kernel(call: calls.Call, gpu: machine.Machine) -> str:
    """Return the kernel that does most of a call's work: prefill, if it is launched."""
    return "decode" if call.max_query_len <= triton_tiles.decode_limit(call, gpu) else "prefill"


def names(w: Workload, gpu: machine.Machine) -> list[str]:
    """Return the names of a workload's candidates, the rule's own first."""
    call = call_of(w)
    return [name_of(tiles) for tiles in candidates(call, tuned_kernel(call, gpu), gpu)]


@contextlib.contextmanager
def chosen(name: str, w: Workload, gpu: machine.Machine | None) -> Iterator[str]:
    """Give calls of a workload the tiles in `name`; no other calls may be made meanwhile.

    Yields:
      The implementation's name without tiles; a name that has none changes nothing.
    """
    found = PATTERN.fullmatch(name)
    if found is None:
        yield name
        return
    assert gpu is not None, "tiles are for a GPU"
    import jax

    call = call_of(w)
    kernel, limit = tuned_kernel(call, gpu), triton_tiles.decode_limit(call, gpu)
    tiles = Tiles(*map(int, found.groups()))
    with (
        mock.patch.object(triton_tiles, f"{kernel}_tiles", return_value=tiles),
        mock.patch.object(triton_tiles, "decode_limit", return_value=limit),
    ):
        jax.clear_caches()  # JAX's cache does not know that tiles have changed
        yield "triton"
    jax.clear_caches()


class Tuned:
    """The rows of one workload from earlier runs and this one.

    Args:
      w: the workload.
      folder: the folder with the lines of earlier runs.
    """

    def __init__(self, w: Workload, folder: str | None):
        self._rows = [
            row_of(line)
            for line in gpu_session.lines_of(folder)
            if line.get("kind") == "row" and line["name"] == w.name
        ]

    def seen(self, found: Iterable[tuple[str, Row | str]]) -> Iterator[tuple[str, Row | str]]:
        """Keep the results and pass them on."""
        for name, row in found:
            if isinstance(row, Row):
                self._rows.append(row)
            yield name, row

    def best(self, rule: str) -> list[str]:
        """Return lines for the rule's tiles and the fastest, with their speed over the rule's."""
        rows = [row for row in self._rows if is_candidate(row.implementation)]
        of_rule = [row for row in rows if row.implementation == rule]
        rows = sorted((row for row in rows if row not in of_rule), key=lambda row: row.median)
        shown = [*of_rule, *rows[:SHOWN]]
        ratios = [f"{of_rule[0].median / row.median:>6.2f}x" if of_rule else "" for row in shown]
        return [f"  {row.line()} {ratio}" for row, ratio in zip(shown, ratios, strict=True)]
