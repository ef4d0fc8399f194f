"""Decode and writing by cache format, beside bfloat16, on this CPU.

    python -m benchmarks.format_speed [--head-dim D ...] [--turns N]

Decode of 8 sequences of 4,096 tokens, 16 query heads over 4 KV heads, blocks of 128, bfloat16
queries, every call on the other of two copies of the keys; then `update_kv_cache` of 2,048 tokens.
The formats take turns in one process. Printed are medians of the CPU seconds of a call, all
threads together (what others do to the machine shows less in them than in the wall clock), and the
ratio bfloat16 over format: above 1 the format is faster.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jattn

SEQS, TOKENS, HEADS, KV_HEADS, BLOCK, NEW = 8, 4096, 16, 4, 128, 2048
FORMATS = {
    "bfloat16": jattn.Dense("bfloat16"),
    "fp8_e4m3": jattn.Fp8("e4m3"),
    "fp8_e5m2": jattn.Fp8("e5m2"),
    "fp8_e4m3_token": jattn.Fp8("e4m3", "token"),
    "int8": jattn.Int8(),
    "int4_zero": jattn.Int4(zero_point=True),
    "nvfp4": jattn.Nvfp4(),
}


class Side:
    """One format: a full pool, a compiled decode and a compiled write."""

    def __init__(self, format: jattn.Dense, head_dim: int):
        rng = np.random.default_rng(0)
        blocks = SEQS * TOKENS // BLOCK
        tables = rng.permutation(2 * blocks).reshape(2, SEQS, -1).astype(np.int32)
        self.tables = [jnp.asarray(table) for table in tables]
        self.lens = jnp.full((SEQS,), TOKENS, jnp.int32)
        self.query = jnp.asarray(rng.standard_normal((SEQS, HEADS, head_dim)), jnp.bfloat16)
        self.new = jnp.asarray(rng.standard_normal((NEW, KV_HEADS, head_dim)), jnp.bfloat16)
        self.caches = jattn.init_kv_cache(2 * blocks, KV_HEADS, BLOCK, head_dim, format=format)
        self.write = jax.jit(jattn.update_kv_cache, donate_argnums=(0, 1))
        self.attend = jax.jit(
            lambda q, k, v, t, s: jattn.paged_attention(q, k, v, block_tables=t, seq_lens=s)
        )
        for at in range(0, 2 * blocks * BLOCK, NEW):
            self.fill(at)

    def fill(self, at: int) -> None:
        slots = jnp.arange(at, at + NEW, dtype=jnp.int32)
        self.caches = jax.block_until_ready(self.write(*self.caches, self.new, self.new, slots))

    def decode(self, turn: int) -> None:
        table = self.tables[turn % 2]
        self.attend(self.query, *self.caches, table, self.lens).block_until_ready()


def medians(calls: dict[str, Callable[[int], None]], turns: int) -> dict[str, float]:
    """CPU seconds of a call of each, in turn."""
    seconds = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            begin = time.process_time()
            call(turn)
            if turn:  # the first one compiles
                seconds[name].append(time.process_time() - begin)
    return {name: float(np.median(taken)) for name, taken in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.format_speed", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--turns", type=int, default=11)
    args = parser.parse_args(arguments)
    names = list(dict.fromkeys(["bfloat16", *args.format]))
    print("| D | format | decode, CPU ms | bf16 over it | write, M token-heads/s | bytes of KV |")
    print("|---|---|---|---|---|---|", flush=True)
    for head_dim in args.head_dim:
        sides = {name: Side(FORMATS[name], head_dim) for name in names}
        decode = medians({name: side.decode for name, side in sides.items()}, args.turns)
        write = medians({name: lambda i, s=s: s.fill(i * NEW) for name, s in sides.items()}, 5)
        for name, side in sides.items():
            rate = 2 * NEW * KV_HEADS / write[name] / 1e6
            size = sum(cache.nbytes for cache in side.caches) / 2**21
            print(
                f"| {head_dim} | {name} | {1e3 * decode[name]:.1f} | "
                f"{decode['bfloat16'] / decode[name]:.2f} | {rate:.1f} | {size:.0f} MiB |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
