"""Compare `jattn.cascade_attention` with the plain call, decoding sequences that share a prefix.

    python -m benchmarks.cpu.cascade [--sequences 32] [--shared 8192] [--own 256] [--head-dim 128]
                                     [--turns 9] [--json FILE]

16 query heads over 4 KV heads in bfloat16, blocks of 128 in shuffled order. Both results are
checked against float64 (`benchmarks.oracle`) before either is timed. They are timed in turn; a line
has the medians and the plain ("flat") call's time over the cascade's.
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks import oracle, timing
from benchmarks.cpu import ours
from benchmarks.cpu.tables import append_lines
from benchmarks.machine import run_record
from benchmarks.options import add_json, positive
from benchmarks.workloads import Workload, to_bfloat16_words, to_float32

HEADS, KV_HEADS, BLOCK = 16, 4, 128


def measure(sequences: int, shared: int, rest: int, head_dim: int, turns: int) -> dict[str, Any]:
    """Time both calls, and return their ratio. `shared` is a multiple of the block size.

    Raises:
      oracle.WrongResultError: a result is outside its error budget; nothing was timed.
    """
    w = Workload(
        name=f"cascade-head{head_dim}",
        group="cascade",
        query_lens=(1,) * sequences,
        seq_lens=(shared + rest,) * sequences,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        value_dim=head_dim,
        block_size=BLOCK,
        dtype="bfloat16",
    )
    rng = np.random.default_rng(0)
    common, each = shared // BLOCK, -(-rest // BLOCK)
    blocks = rng.permutation(common + sequences * each).astype(np.int32)
    tables = np.concatenate(
        [np.tile(blocks[:common], (sequences, 1)), blocks[common:].reshape(sequences, each)], axis=1
    )

    def normal(*shape: int) -> np.ndarray:
        return to_bfloat16_words(rng.standard_normal(shape, dtype=np.float32))

    pools = [normal(len(blocks), KV_HEADS, BLOCK, head_dim) for _ in range(2)]
    query = normal(sequences, HEADS, head_dim)

    def tokens(b: int) -> tuple[np.ndarray, ...]:
        parts = (pool[tables[b]].swapaxes(1, 2) for pool in pools)
        return tuple(part.reshape(-1, KV_HEADS, head_dim)[: shared + rest] for part in parts)

    arrays = (ours.device_array(query), *ours.caches(*pools, w.dtype))
    given = {"block_tables": jnp.asarray(tables), "seq_lens": jnp.asarray(w.seq_lens, jnp.int32)}
    cascade = functools.partial(jattn.cascade_attention, num_shared_blocks=common)
    expected = oracle.answer_from(w, to_float32(query), tokens)
    contenders = {}
    for name, call in (("flat", jattn.paged_attention), ("cascade", cascade)):
        attend = functools.partial(jax.jit(call), *arrays, **given)
        oracle.check(w, expected, np.asarray(attend()).view(np.uint16), name)
        contenders[name] = timing.Calls(lambda f=attend: f().block_until_ready())
    timings = timing.interleave(contenders, turns)
    return {
        "sequences": sequences,
        "shared": shared,
        "own": rest,
        "head_dim": head_dim,
        **{f"{name}_ms": 1e3 * found.median for name, found in timings.items()},
        "ratio": timings["flat"].median / timings["cascade"].median,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.cascade", description=__doc__.splitlines()[0]
    )
    for name, default, words in (
        ("sequences", 32, "sequences in the batch"),
        ("shared", 8192, "tokens that all sequences share"),
        ("own", 256, "further tokens of each sequence"),
        ("turns", 9, "turns of each call"),
    ):
        parser.add_argument(
            f"--{name}", type=positive, default=default, help=f"{words} (%(default)s)"
        )
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128])
    add_json(parser)
    args = parser.parse_args(arguments)
    if args.shared % BLOCK:
        parser.error(f"--shared must be a multiple of {BLOCK}, but is {args.shared}")
    for head_dim in args.head_dim:
        row = measure(args.sequences, args.shared, args.own, head_dim, args.turns)
        print(
            f"{row['sequences']} sequences, {row['shared']} shared and {row['own']} own tokens, "
            f"D={head_dim}: flat {row['flat_ms']:.1f} ms, cascade {row['cascade_ms']:.1f} ms, "
            f"{row['ratio']:.1f} times",
            flush=True,
        )
        if args.json:
            append_lines(args.json, run_record(turns=args.turns), [row])


if __name__ == "__main__":
    main()
