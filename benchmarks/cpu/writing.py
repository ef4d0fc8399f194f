"""Time writes into a cache by the native kernel and by XLA, on this CPU.

    python -m benchmarks.cpu.writing [--head-dim D ...] [--turns N] [--json FILE]

The calls are `update_kv_cache` of bfloat16 rows with 4 KV heads, blocks of 128 and donated caches,
and never write the slots of the call before: 2,048 tokens (prefill), and 8 tokens in separate
blocks (a decode step of 8 sequences). Unless both write the same bits, nothing is timed.

Formats and implementations take turns in one process, on the cores it may use (`taskset -c 0` for
one); times are medians. Rates are in millions of tokens x KV heads x 128 numbers a second, of keys
and values. "of copy" is the native kernel's share of the rate at which these cores copy in plain
NumPy in the same run, counting the bytes that are read and stored.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks import ceilings, oracle, timing
from benchmarks.cpu import format_speed, tables
from benchmarks.machine import run_record
from benchmarks.options import add_json, positive

KV_HEADS, BLOCK, NEW, STEP = 4, 128, 2048, 8
FORMATS = {
    "float32": jattn.Dense("float32"),
    **format_speed.FORMATS,
    "fp8_e4m3_block": jattn.Fp8("e4m3", "block"),
}
IMPLEMENTATIONS = ("native", "xla")


@dataclasses.dataclass(frozen=True)
class Row:
    """One format at one head size: microseconds per call, and rates."""

    cores: int
    head_dim: int
    format: str
    native_rate: float
    xla_rate: float
    of_copy: float
    native_step_us: float
    xla_step_us: float

    def __str__(self) -> str:
        return (
            f"| {self.cores} | {self.head_dim} | {self.format} | {self.native_rate:.1f} | "
            f"{self.xla_rate:.1f} | {self.native_rate / self.xla_rate:.1f} | {self.of_copy:.0%} | "
            f"{self.native_step_us:.0f} | {self.xla_step_us:.0f} |"
        )


HEADER = (
    "| cores | D | format | native, M/s | xla, M/s | native over xla | of copy | "
    "8 tokens: native, us | xla, us |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


class Writer:
    """A pool of one format, with a compiled `update_kv_cache` of one implementation."""

    def __init__(self, name: str, implementation: str, head_dim: int, tokens: int):
        rng = np.random.default_rng(0)
        blocks = 16 * NEW // BLOCK
        self.new = jnp.asarray(rng.standard_normal((tokens, KV_HEADS, head_dim)), jnp.bfloat16)
        runs = np.arange(blocks * BLOCK).reshape(16, NEW)
        apart = rng.permutation(blocks)[: 16 * STEP].reshape(16, STEP) * BLOCK
        slots = runs if tokens == NEW else apart
        self.slots = [jnp.asarray(x, jnp.int32) for x in slots]
        self.caches = jattn.init_kv_cache(blocks, KV_HEADS, BLOCK, head_dim, format=FORMATS[name])

        def step(keys, values, new, slots):
            return jattn.update_kv_cache(
                keys, values, new, new, slots, implementation=implementation
            )

        self._step = jax.jit(step, donate_argnums=(0, 1))

    def write(self, turn: int) -> None:
        slots = self.slots[turn % len(self.slots)]
        self.caches = jax.block_until_ready(self._step(*self.caches, self.new, slots))


def medians(writers: dict, turns: int) -> dict:
    """Time each writer's calls in turn, in seconds."""
    calls = {name: writer.write for name, writer in writers.items()}
    return format_speed.medians(calls, turns, time.perf_counter)


def measure(head_dim: int, names: Sequence[str], turns: int, copy: float) -> list[Row]:
    """Check and time formats at one head size; raise `oracle.WrongResultError` if bits differ."""
    keys = [(name, each) for name in names for each in IMPLEMENTATIONS]
    calls = {key: Writer(*key, head_dim, NEW) for key in keys}
    steps = {key: Writer(*key, head_dim, STEP) for key in keys}
    for pair in (calls, steps):
        for name in names:
            for each in IMPLEMENTATIONS:
                pair[name, each].write(0)
            if pair[name, "native"].caches != pair[name, "xla"].caches:
                raise oracle.WrongResultError(f"{name}: native and xla wrote different bits")
    full, few = medians(calls, turns), medians(steps, 20 * turns)
    rows = []
    for name in names:
        heads = 2 * NEW * KV_HEADS
        moved = heads * (2 * head_dim + FORMATS[name].bytes_per_token(head_dim))
        rates = (heads * head_dim / 128 / full[name, each] / 1e6 for each in IMPLEMENTATIONS)
        rows.append(
            Row(
                timing.num_cores(),
                head_dim,
                name,
                *rates,
                moved / full[name, "native"] / copy,
                *(1e6 * few[name, each] for each in IMPLEMENTATIONS),
            )
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.writing", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--turns", type=positive, default=15)
    add_json(parser)
    args = parser.parse_args(arguments)
    copy = ceilings.copy_rate()
    print(f"copy {copy / 1e9:.1f} GB/s, all cores together")
    print(HEADER, flush=True)
    for head_dim in args.head_dim:
        rows = measure(head_dim, args.format, args.turns, copy)
        for row in rows:
            print(row, flush=True)
        if args.json:
            run = run_record(turns=args.turns, copy=copy)
            tables.append_lines(args.json, run, map(dataclasses.asdict, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
