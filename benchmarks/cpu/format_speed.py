"""Time decode and writes in each cache format, compared with bfloat16, on this CPU.

    python -m benchmarks.cpu.format_speed [--head-dim D ...] [--kv-heads K] [--turns N]
                                          [--json FILE]

Decode has 8 sequences of 4,096 tokens, 16 query heads over 4 (or K) KV heads, blocks of 128 and
bfloat16 queries, in a jitted step of 16 layers. As in a model, each layer takes the result of the
layer before; each reads another copy of the keys, with enough copies that none is in a cache. Then
`update_kv_cache` writes 2,048 tokens. Stored numbers must be within `STORED` of the input, and the
decode within the budget of `benchmarks.oracle` around float64 attention over the stored numbers;
otherwise nothing is timed.

The formats take turns in one process. Times are medians of the CPU seconds of a call, all threads
together, because other load on the machine affects them less than wall-clock time. A decode's time
is a sixteenth of its step's. "bf16 over it" is bfloat16's time over the format's: above 1 the
format is faster. Writes are in millions of tokens x KV heads x 128 numbers a second. "of read" and
"of copy" are shares of the rates at which all cores together read and copy in plain NumPy in the
same run, counting the KV bytes that a decode reads, and those that a write is given and stores.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks import ceilings, oracle, timing, workloads
from benchmarks.cpu import ours, tables
from benchmarks.machine import run_record
from benchmarks.options import add_json, positive

SEQS, TOKENS, HEADS, BLOCK, NEW = 8, 4096, 16, 128, 2048
LAYERS = 16
FORMATS = {
    "bfloat16": jattn.Dense("bfloat16"),
    "fp8_e4m3": jattn.Fp8("e4m3"),
    "fp8_e5m2": jattn.Fp8("e5m2"),
    "fp8_e4m3_token": jattn.Fp8("e4m3", "token"),
    "int8": jattn.Int8(),
    "int4_zero": jattn.Int4(zero_point=True),
    "nvfp4": jattn.Nvfp4(),
}
# The largest allowed root mean square of the change, relative to the input's: about twice what
# rounding to nearest changes in normal numbers.
STORED = {
    "bfloat16": 0.004,
    "fp8_e4m3": 0.05,
    "fp8_e5m2": 0.1,
    "fp8_e4m3_token": 0.05,
    "int8": 0.015,
    "int4_zero": 0.2,
    "nvfp4": 0.2,
}


def num_copies(name: str, head_dim: int, num_kv_heads: int) -> int:
    """Return the copies of the keys: two, or enough to miss caches, in whole steps of layers."""
    token = 2 * num_kv_heads * FORMATS[name].bytes_per_token(head_dim)
    copies = max(2, timing.copies_of(SEQS * TOKENS * int(token)))
    return copies if copies < LAYERS else -(-copies // LAYERS) * LAYERS


class Pool:
    """One format: a full pool, a compiled decode and a compiled write."""

    def __init__(self, name: str, head_dim: int, num_kv_heads: int = 4):
        rng = np.random.default_rng(0)
        self.name, self.copies = name, num_copies(name, head_dim, num_kv_heads)
        blocks = self.copies * SEQS * TOKENS // BLOCK
        self.tables = rng.permutation(blocks).reshape(self.copies, SEQS, -1).astype(np.int32)
        self.lens = {"seq_lens": jnp.full((SEQS,), TOKENS, jnp.int32)}
        self.query = jnp.asarray(rng.standard_normal((SEQS, HEADS, head_dim)), jnp.bfloat16)
        self.new = jnp.asarray(rng.standard_normal((NEW, num_kv_heads, head_dim)), jnp.bfloat16)
        self.slots = [
            jnp.arange(at, at + NEW, dtype=jnp.int32) for at in range(0, blocks * BLOCK, NEW)
        ]
        self.caches = jattn.init_kv_cache(
            blocks, num_kv_heads, BLOCK, head_dim, format=FORMATS[name]
        )
        self._write = jax.jit(jattn.update_kv_cache, donate_argnums=(0, 1))
        steps = max(1, self.copies // LAYERS)
        shape = (steps, LAYERS, *self.tables.shape[1:])
        self._layers = list(jnp.asarray(np.resize(self.tables, shape)))
        self._attend = jax.jit(jattn.paged_attention)
        self._step = ours.step_of_layers(jattn.paged_attention)
        for turn in range(len(self.slots)):
            self.write(turn)

    def write(self, turn: int) -> None:
        slots = self.slots[turn % len(self.slots)]
        self.caches = jax.block_until_ready(self._write(*self.caches, self.new, self.new, slots))

    def decode(self) -> jax.Array:
        """Decode over the first copy of the keys."""
        table = self.tables[0]
        out = self._attend(self.query, *self.caches, block_tables=table, **self.lens)
        return out.block_until_ready()

    def step(self, turn: int = 0) -> jax.Array:
        """Decode in each of `LAYERS` layers."""
        tables = self._layers[turn % len(self._layers)]
        return self._step(self.query, self.caches, tables, self.lens).block_until_ready()

    def numbers(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values [n * S, K, D] of the blocks, as their format defines them."""

        def of(cache: jattn.KVArray) -> np.ndarray:
            params = jax.tree.map(lambda x: x[blocks], cache.quant_params)._asdict()
            if cache.format.takes_scale:
                params["scale"] = cache.scale
            part = cache.replace(data=cache.data[blocks], **params)
            return np.asarray(part.numbers()).swapaxes(1, 2).reshape(-1, *cache.shape[1::2])

        return of(self.caches[0]), of(self.caches[1])

    def check(self) -> float:
        """Return the share of the budget that a decode uses, or raise `oracle.WrongResultError`."""
        _, num_kv_heads, head_dim = self.new.shape
        given = np.asarray(self.new, np.float32)
        for stored in self.numbers(np.arange(NEW // BLOCK)):
            change = np.sqrt(np.square(stored - given).mean() / np.square(given).mean())
            if not change <= STORED[self.name]:
                raise oracle.WrongResultError(
                    f"{self.name}: stored numbers are off by {change:.3g}"
                )
        w = workloads.Workload(
            name=f"format-{self.name}-head{head_dim}",
            group="format",
            query_lens=(1,) * SEQS,
            seq_lens=(TOKENS,) * SEQS,
            num_heads=HEADS,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=head_dim,
            block_size=BLOCK,
            dtype="bfloat16",
        )
        query = np.asarray(self.query, np.float32)
        expected = oracle.answer_from(w, query, lambda b: self.numbers(self.tables[0, b]))
        return oracle.check(w, expected, np.asarray(self.decode(), np.float32), self.name)


def medians(calls: dict, turns: int, clock: Callable[[], float] = time.process_time) -> dict:
    """Time each function in turn, in CPU seconds unless another clock is given.

    Each turn starts with a different function, and each call gets a different number, by which
    calls that share keys choose their copy.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(turns + 1):
        first = turn % len(names)
        for place, name in enumerate(names[first:] + names[:first]):
            begin = clock()
            calls[name](turn * len(names) + place)
            if turn:  # the first turn compiles
                seconds[name].append(clock() - begin)
    return {name: float(np.median(taken)) for name, taken in seconds.items()}


@dataclasses.dataclass(frozen=True)
class Row:
    """One format at one head size."""

    head_dim: int
    format: str
    decode_ms: float
    ratio: float  # bfloat16's decode time over this one's
    of_read: float
    write_rate: float  # millions a second of a token and KV head, in units of 128 numbers
    of_copy: float
    kv_mib: float
    budget_used: float
    num_kv_heads: int = 4  # older records always have 4

    def __str__(self) -> str:
        return (
            f"| {self.head_dim} | {self.format} | {self.decode_ms:.1f} | {self.ratio:.2f} | "
            f"{self.of_read:.0%} | {self.write_rate:.1f} | {self.of_copy:.0%} | "
            f"{self.kv_mib:.0f} MiB |"
        )


HEADER = (
    "| D | format | decode, CPU ms | bf16 over it | of read | write, M/s | of copy | KV bytes |\n"
    "|---|---|---|---|---|---|---|---|"
)


def measure(
    head_dim: int, num_kv_heads: int, names: Sequence[str], turns: int, rates: dict
) -> list[Row]:
    """Check and time formats at one head size; raise `oracle.WrongResultError` if one is wrong."""
    pools = {name: Pool(name, head_dim, num_kv_heads) for name in names}
    used = {name: pool.check() for name, pool in pools.items()}
    steps = medians({name: pool.step for name, pool in pools.items()}, turns)
    decode = {name: seconds / LAYERS for name, seconds in steps.items()}
    write = medians({name: pool.write for name, pool in pools.items()}, turns)
    rows = []
    for name, pool in pools.items():
        heads = 2 * NEW * num_kv_heads
        read = sum(cache.nbytes for cache in pool.caches) / pool.copies
        moved = heads * (2 * head_dim + pool.caches[0].format.bytes_per_token(head_dim))
        rows.append(
            Row(
                head_dim,
                name,
                1e3 * decode[name],
                decode["bfloat16"] / decode[name],
                timing.num_cores() * read / rates["read"] / decode[name],
                heads * head_dim / 128 / write[name] / 1e6,
                timing.num_cores() * moved / rates["copy"] / write[name],
                read / 2**20,
                used[name],
                num_kv_heads,
            )
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.format_speed", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--kv-heads", type=int, choices=(1, 2, 4, 8, 16), default=4)
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--turns", type=positive, default=11)
    add_json(parser)
    args = parser.parse_args(arguments)
    names = list(dict.fromkeys(["bfloat16", *args.format]))
    rates = {"read": ceilings.read_rate(), "copy": ceilings.copy_rate()}
    print(", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items()))
    print(HEADER, flush=True)
    for head_dim in args.head_dim:
        rows = measure(head_dim, args.kv_heads, names, args.turns, rates)
        for row in rows:
            print(row, flush=True)
        if args.json:
            run = run_record(turns=args.turns, **rates)
            tables.append_lines(args.json, run, map(dataclasses.asdict, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
