"""Measure the native kernel on a few cores, and model it on many.

    python -m benchmarks.cpu.threads [--threads N] [--socket GB/s]

Measured here, each in a separate process, medians (of the wakes, the least of four):

    read      bytes a second of a decode of 256 MiB of bfloat16 pools, on one core and on all
    prefill   FLOPs a second of a prompt of 2,048 tokens, 8 KV heads of D = 128, on one core
    wake      microseconds that every further thread of XLA's pool, which the caller wakes, adds to
              a decode of 512 KiB in the caches (PJRT_NPROC sets how many threads; here they take
              turns on the available cores)

The model, for P cores that share a socket of B bytes a second:

    decode(bytes)  = max(bytes / B, balance bytes / (P read)) + wake (P - 1)
    prefill(flops) = balance flops / (P prefill) + wake (P - 1)

`balance` (1 for work that divides evenly) comes from the kernel's own plan;
tests/native/test_plan.py checks it for typical batches.
"""

import argparse
import json
import os
import subprocess
import sys

from benchmarks import timing

SNIPPET = """
import json, sys, time
import numpy as np
import jax, jax.numpy as jnp
import jattn

kind, calls = sys.argv[1], int(sys.argv[2])
rng = np.random.default_rng(0)
if kind == "read":
    blocks, kv_heads, heads, tokens, lens = 512, 8, 8, 8, [8192] * 8
elif kind == "wake":
    blocks, kv_heads, heads, tokens, lens = 8, 1, 1, 1, [1024]
else:
    blocks, kv_heads, heads, tokens, lens = 16, 8, 32, 2048, [2048]
caches = jattn.init_kv_cache(blocks, kv_heads, 128, 128)
caches = [x.replace(data=jax.device_put(x.data + jnp.uint16(16256))) for x in caches]  # ones
query = jnp.ones((tokens, heads, 128), jnp.bfloat16)
width = max(lens) // 128
tables = rng.permutation(blocks)[: len(lens) * width].reshape(len(lens), width)
given = {"block_tables": jnp.asarray(tables, jnp.int32), "seq_lens": jnp.asarray(lens, jnp.int32)}
if tokens != len(lens):
    given["query_start_loc"] = jnp.asarray([0, tokens], jnp.int32)
attend = jax.jit(lambda q, k, v, a: jattn.paged_attention(q, k, v, implementation="native", **a))
out = jax.block_until_ready(attend(query, *caches, given))
assert float(jnp.abs(out - 1).max()) < 0.01
taken = []
for _ in range(calls):
    begin = time.perf_counter()
    jax.block_until_ready(attend(query, *caches, given))
    taken.append(time.perf_counter() - begin)
print(json.dumps(float(np.median(taken))))
"""


# A prompt's tokens, and the balance of its plan for 64 threads.
PROMPTS = ((512, 1.78), (2048, 1.23), (8192, 1.0))


def seconds(kind: str, calls: int, threads: int) -> float:
    """Return the median time of a call with `threads` threads, on at most as many cores."""
    cores = sorted(timing.cpus())
    done = subprocess.run(
        [sys.executable, "-c", SNIPPET, kind, str(calls)],
        env={**os.environ, "PJRT_NPROC": str(threads), "JAX_PLATFORMS": "cpu"},
        preexec_fn=lambda: os.sched_setaffinity(0, cores[:threads]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


READ_BYTES = 2 * 512 * 8 * 128 * 128 * 2
PREFILL_FLOPS = 4 * 32 * 128 * 2048 * 2049 // 2


def decode_seconds(moved: float, cores: int, read: float, socket: float, wake: float) -> float:
    """Return the seconds of a decode by the model above."""
    return max(moved / socket, moved / (cores * read)) + wake * (cores - 1)


def prefill_seconds(flops: float, cores: int, rate: float, wake: float, balance: float) -> float:
    """Return the seconds of a prefill by the model above."""
    return balance * flops / (cores * rate) + wake * (cores - 1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu.threads")
    parser.add_argument("--threads", type=int, default=64, help="cores of the model")
    parser.add_argument("--socket", type=float, default=400.0, help="GB/s of the model's socket")
    args = parser.parse_args(arguments)
    cores = timing.num_cores()
    if args.threads <= cores:
        parser.error(f"--threads must be more than the {cores} cores here, but is {args.threads}")
    one, all_cores = (READ_BYTES / seconds("read", 15, n) for n in (1, cores))
    prefill = PREFILL_FLOPS / seconds("prefill", 7, 1)
    turns = [[seconds("wake", 1000, n) for n in (1, cores, args.threads)] for _ in range(4)]
    alone, few, many = map(min, zip(*turns, strict=True))
    wake = (many - few) / (args.threads - cores)
    print(f"measured on {cores} cores")
    print(f"read: {one / 1e9:.1f} GB/s on one core, {all_cores / 1e9:.1f} on {cores}")
    print(f"prefill: {prefill / 1e12:.2f} TFLOP/s on one core")
    print(
        f"a decode of 512 KiB: {alone * 1e6:.0f} us on one thread, {few * 1e6:.0f} on {cores}, "
        f"{many * 1e6:.0f} on {args.threads}: {wake * 1e6:.2f} us for each thread to wake"
    )
    print(f"\nmodel of {args.threads} cores on a socket of {args.socket:.0f} GB/s")
    socket = args.socket * 1e9
    print(f"memory is full at {socket / one:.0f} cores")
    print(f"decode: bytes, ms on one core, on {args.threads}, times as fast, share of waking")
    for exponent in range(20, 35, 2):
        moved = 2.0**exponent
        slow = decode_seconds(moved, 1, one, socket, wake)
        fast = decode_seconds(moved, args.threads, one, socket, wake)
        waking = wake * (args.threads - 1) / fast
        print(
            f"{moved / 2**20:8,.0f} MiB {slow * 1e3:10.3f} {fast * 1e3:9.3f} "
            f"{slow / fast:6.1f} {waking:5.0%}"
        )
    print(f"prefill: tokens, ms on one core, on {args.threads}, times as fast")
    for tokens, balance in PROMPTS:
        flops = 4 * 32 * 128 * tokens * (tokens + 1) / 2
        slow = flops / prefill
        fast = prefill_seconds(flops, args.threads, prefill, wake, balance)
        print(f"{tokens:8,d}     {slow * 1e3:10.1f} {fast * 1e3:9.2f} {slow / fast:6.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
