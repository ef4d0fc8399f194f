"""A decode of sequences that share a prefix: `jattn.cascade_attention` beside the flat call.

    python -m benchmarks.cpu.cascade [--sequences 32] [--shared 8192] [--own 256] [--head-dim 128]
                                 [--turns 9] [--out FILE]

16 query heads over 4 KV heads in bfloat16, blocks of 128 in shuffled order. The result of both is
compared with float64 attention for two of the sequences before either is timed; they are timed in
turn, and a line has the medians and the flat call's time over the cascade's.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn

HEADS, KV_HEADS, BLOCK = 16, 4, 128


class WrongResult(Exception):
    """A result that is not attention's, and so has no time."""


def exact(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """float64 [H, D] of query [H, D] and keys, values [K, tokens, D]."""
    out = []
    for head, row in enumerate(query.astype(np.float64)):
        kv = head * KV_HEADS // HEADS
        logits = keys[kv].astype(np.float64) @ row * query.shape[1] ** -0.5
        weights = np.exp(logits - logits.max())
        out.append(weights @ values[kv].astype(np.float64) / weights.sum())
    return np.stack(out)


def check(out: Any, query: np.ndarray, pools: list[np.ndarray], tables: np.ndarray, n: int) -> None:
    """Raise `WrongResult` where the first or the last sequence is off by 1 % of its size."""
    for b in (0, len(tables) - 1):
        keys, values = (
            np.concatenate([pool[block] for block in tables[b]], axis=1)[:, :n] for pool in pools
        )
        want = exact(query[b], keys, values)
        off = np.abs(np.asarray(out[b], np.float64) - want).max() / np.abs(want).max()
        if not off < 1e-2:
            raise WrongResult(f"sequence {b}: off by {off:.2g} of its size")


def measure(sequences: int, shared: int, own: int, head_dim: int, turns: int) -> dict[str, Any]:
    """Times of both calls, and their ratio. `shared` is a multiple of the block size."""
    rng = np.random.default_rng(0)
    common, each = shared // BLOCK, -(-own // BLOCK)
    blocks = rng.permutation(common + sequences * each).astype(np.int32)
    tables = np.concatenate(
        [np.tile(blocks[:common], (sequences, 1)), blocks[common:].reshape(sequences, each)], axis=1
    )
    pools = [
        rng.normal(size=(len(blocks), KV_HEADS, BLOCK, head_dim)).astype(jnp.bfloat16)
        for _ in range(2)
    ]
    caches = [
        jattn.KVArray(jnp.asarray(pool.view(np.uint16)), None, jattn.Dense("bfloat16"))
        for pool in pools
    ]
    query = rng.normal(size=(sequences, HEADS, head_dim)).astype(jnp.bfloat16)
    given = {
        "block_tables": jnp.asarray(tables),
        "seq_lens": jnp.full(sequences, shared + own, jnp.int32),
    }
    flat = jax.jit(lambda q, k, v, given: jattn.paged_attention(q, k, v, **given))
    cascade = jax.jit(
        lambda q, k, v, given: jattn.cascade_attention(q, k, v, num_shared_blocks=common, **given)
    )
    calls: dict[str, Callable[[], Any]] = {
        name: lambda call=call: call(query, *caches, given).block_until_ready()
        for name, call in (("flat", flat), ("cascade", cascade))
    }
    for call in calls.values():
        check(call(), query, pools, tables, shared + own)
    seconds = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    medians = {f"{name}_ms": 1e3 * float(np.median(taken)) for name, taken in seconds.items()}
    return {
        "sequences": sequences,
        "shared": shared,
        "own": own,
        "head_dim": head_dim,
        "jax": jax.__version__,
        "turns": turns,
        **medians,
        "ratio": medians["flat_ms"] / medians["cascade_ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Cascade beside the flat call.")
    for name, default in (("sequences", 32), ("shared", 8192), ("own", 256), ("turns", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128])
    parser.add_argument("--out", metavar="FILE", help="add JSON lines to it")
    args = parser.parse_args()
    for head_dim in args.head_dim:
        row = measure(args.sequences, args.shared, args.own, head_dim, args.turns)
        print(
            f"{row['sequences']} sequences, {row['shared']} shared and {row['own']} own tokens, "
            f"D={head_dim}: flat {row['flat_ms']:.1f} ms, cascade {row['cascade_ms']:.1f} ms, "
            f"{row['ratio']:.1f} times",
            flush=True,
        )
        if args.out:
            with open(args.out, "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
