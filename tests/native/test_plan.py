"""How the native kernel's own plan splits typical batches over 64 threads: docs/cpu.md.

The tests compile src/schedule.cc with stand-ins for the kernels.
"""

from __future__ import annotations

import collections
import heapq
import pathlib
import platform
import random
import re
import subprocess

import pytest

from benchmarks.cpu import threads
from jattn.cpu.native import build

ROOT = pathlib.Path(__file__).parents[2]
RNG = random.Random(0)
# Name: query heads, KV heads, and (keys, query tokens) of every sequence; bfloat16, D = 128.
BATCHES = {
    "64 sequences of 8,192": (32, 8, [(8192, 1)] * 64),
    "8 sequences of 8,192": (32, 8, [(8192, 1)] * 8),
    "1 sequence of 131,072": (32, 8, [(131072, 1)]),
    "the same with 1 KV head": (8, 1, [(131072, 1)]),
    "100 sequences of 1 to 16,384": (32, 8, [(RNG.randint(1, 16384), 1) for _ in range(100)]),
    "1 of 131,072 and 63 of 512": (32, 8, [(131072, 1)] + [(512, 1)] * 63),
    "a prompt of 8,192": (32, 8, [(8192, 8192)]),
    "a prompt of 2,048": (32, 8, [(2048, 2048)]),
    "a prompt of 512": (32, 8, [(512, 512)]),
}
THREADS, ROWS = 64, 256  # rows of a work item where the matrix unit multiplies


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> pathlib.Path:
    machine = ("-DJATTN_X86",) if platform.machine().lower() in ("x86_64", "amd64") else ()
    made = tmp_path_factory.mktemp("plan") / "plan"
    source = ROOT / "tests" / "support" / "native" / "plan.cc"
    flags = ("-std=c++17", "-Wno-psabi", *machine, "-I", str(build.SOURCES), "-pthread")
    subprocess.run([*build.compiler(), *flags, str(source), "-o", str(made)], check=True)
    return made


def plan(program: pathlib.Path, heads: int, kv_heads: int, sequences, threads: int = THREADS):
    """Return splits, bytes of partial results, and the last thread's work over the mean."""
    numbers = (ROWS, heads, kv_heads, 128, 256)
    command = [str(program), *map(str, numbers), *(f"{n}:{t}" for n, t in sequences)]
    floats, *splits = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    items = collections.defaultdict(collections.deque)
    for split in splits:
        item, cost = split.split()
        items[int(item)].append(float(cost))
    return len(splits), 4 * int(floats), balance(list(items.values()), threads)


def balance(items: list[collections.deque], threads: int) -> float:
    """Simulate `Queue` in problem.h: a thread takes all splits of an item, then helps others."""
    total = sum(map(sum, items))
    queues: list[collections.deque] = [collections.deque()] * threads
    fresh, others = collections.deque(items), collections.deque(items)
    free = [(0.0, thread) for thread in range(threads)]
    while True:
        time, thread = free[0]
        if not queues[thread] and fresh:
            queues[thread] = fresh.popleft()
        while others and not others[0]:
            others.popleft()
        taken = queues[thread] or (others[0] if others else None)
        if taken is None:
            return max(free)[0] * threads / total
        heapq.heapreplace(free, (time + taken.popleft(), thread))


@pytest.mark.extended
def test_the_page_says_how_batches_are_split(program):
    page = (ROOT / "docs" / "cpu.md").read_text()
    for name, (heads, kv_heads, sequences) in BATCHES.items():
        splits, partial, balance = plan(program, heads, kv_heads, sequences)
        row = f"| {name} | {splits} | {partial / 1e6:.1f} MB | {balance:.2f} |"
        assert row in page, row
    for tokens, balanced in threads.PROMPTS:
        _, partial, found = plan(program, *BATCHES[f"a prompt of {tokens:,}"])
        assert (round(found, 2), partial) == (balanced, 0)


@pytest.mark.extended
def test_splits_of_a_sequence_do_not_depend_on_the_batch(program):
    """So its result has the same bits alone and in a batch."""
    for heads, kv_heads, sequence in ((16, 1, (1024, 1)), (32, 8, (8192, 1)), (16, 1, (4096, 256))):
        splits, partial, _ = plan(program, heads, kv_heads, [sequence])
        assert splits > kv_heads
        assert plan(program, heads, kv_heads, [sequence] * 9)[:2] == (9 * splits, 9 * partial)


@pytest.mark.extended
def test_decode_is_balanced(program):
    """Within a twentieth, or a third with one KV head; on 2 threads, within a hundredth."""
    for name, (heads, kv_heads, sequences) in BATCHES.items():
        if "prompt" not in name:
            found = plan(program, heads, kv_heads, sequences)[2]
            assert found < (1.05 if kv_heads > 1 else 1.32), name
            assert plan(program, heads, kv_heads, sequences, 2)[2] < 1.01, name


def test_the_model_is_the_committed_one():
    """The page quotes what `benchmarks.cpu.threads` printed."""
    printed = (ROOT / "benchmarks" / "results" / "2026-11-25-threads-zen3-jax0.12.txt").read_text()
    page = (ROOT / "docs" / "cpu.md").read_text()
    quoted = re.search(r"```text\nmeasured on .*?```", page, re.DOTALL)
    assert quoted is not None
    assert quoted[0].removeprefix("```text\n").removesuffix("```").strip() == printed.strip()
