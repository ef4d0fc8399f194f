"""A log of what the tests compile: a line per program, and which programs are compiled twice.

    COMPILE_LOG=log.jsonl pytest -n 2 --dist worksteal
    python -m tests.support.compile_log log.jsonl

Tests that differ only in numbers should share a program and pass the numbers as arguments. So the
report lists programs that were compiled again (the same module: a cache should have had it) and
groups of programs that are equal except for their constants. Seconds are CPU time of the process on
all cores, so other processes do not disturb them.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import json
import os
import re
import sys
import threading
import time

import jax
from jax._src import compiler

# Constants of a module, and numbers in the attributes of custom calls.
CONSTANTS = re.compile(r"dense<[^>]*>|(?<== )-?[0-9][0-9.e+-]*(?= : )")


def start(path: str) -> None:
    """Write a line to `path` for every program that this process compiles from now on."""
    original = compiler.compile_or_get_cached
    state = threading.local()

    def listen(event: str, **_) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            state.cached = True

    def compile_or_get_cached(backend, computation, *args, **kwargs):
        text = computation.operation.get_asm(enable_debug_info=False)
        state.cached = False
        began = time.process_time()
        result = original(backend, computation, *args, **kwargs)
        seconds = time.process_time() - began
        program = Program(
            test=os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0],
            name=re.search(r"module @(\S+)", text)[1],
            module=digest(text),
            shape=digest(CONSTANTS.sub("", text)),
            constants=" ".join(CONSTANTS.findall(text))[:400],
            seconds=round(seconds, 4),
            cached=state.cached,
        )
        with open(path, "a") as log:
            log.write(json.dumps(dataclasses.asdict(program)) + "\n")
        return result

    jax.monitoring.register_event_listener(listen)
    compiler.compile_or_get_cached = compile_or_get_cached


@dataclasses.dataclass(frozen=True)
class Program:
    """One compilation: equal programs share `module`, those equal but for numbers `shape`."""

    test: str
    name: str
    module: str
    shape: str
    constants: str
    seconds: float
    cached: bool


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def repeated(programs: list[Program]) -> list[Program]:
    """Return compilations of a program that was compiled before and found in no cache."""
    seen = set()
    found = []
    for program in programs:
        if program.module in seen and not program.cached:
            found.append(program)
        seen.add(program.module)
    return found


def equal_but_for_constants(programs: list[Program]) -> list[list[Program]]:
    """Return groups of programs that differ only in constants, the most expensive first."""
    groups = collections.defaultdict(dict)
    for program in programs:
        if not program.cached:
            groups[program.shape].setdefault(program.module, program)
    found = [list(group.values()) for group in groups.values() if len(group) > 1]
    return sorted(found, key=spent, reverse=True)


def spent(group: list[Program]) -> float:
    """Seconds that one program for the whole group would have saved."""
    return sum(program.seconds for program in group[1:])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("log")
    parser.add_argument("--most", type=int, default=20, help="groups to print")
    parser.add_argument(
        "--limit", type=float, default=100.0, help="fail if groups cost more %% of all seconds"
    )
    options = parser.parse_args(argv)
    with open(options.log) as log:
        programs = [Program(**json.loads(line)) for line in log]
    total = sum(program.seconds for program in programs)
    again = repeated(programs)
    groups = equal_but_for_constants(programs)
    wasted = sum(map(spent, groups))
    print(
        f"{len(programs)} programs, {total:.1f} s; from a cache: {sum(p.cached for p in programs)}"
    )
    print(f"compiled again: {len(again)}, {sum(p.seconds for p in again):.1f} s")
    names = collections.Counter()
    for program in again:
        names[program.name] += program.seconds
    for name, seconds in names.most_common(options.most):
        print(f"  {seconds:6.2f} s {name}")
    print(f"equal but for constants: {len(groups)} groups, {wasted:.1f} s")
    for group in groups[: options.most]:
        print(f"  {spent(group):6.2f} s {len(group)} times {group[0].name}")
        for program in group[:4]:
            print(f"           {program.test}: {program.constants[:100]}")
    return int(wasted > options.limit / 100 * total)


if __name__ == "__main__":
    sys.exit(main())
