"""Random calls of the native kernel in a separate process.

The instruction set, the library, sanitizers and the number of cores belong to a process, not to a
call: JATTN_NATIVE_ISA, JATTN_NATIVE_LIBRARY, LD_PRELOAD and CPU affinity choose them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os

import jax.numpy as jnp
import numpy as np

import jattn
from jattn import implementations
from jattn.cpu.native import library
from tests.support import budget, problems, promises, random_calls
from tests.support.native import writing as native_writing

# Long enough to be split over threads, whatever the seed's other sizes.
LONG = problems.Problem(
    query_lens=(1, 70, 1, 5),
    seq_lens=(2300, 700, 0, 1500),
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    value_dim=64,
    options=frozenset({"return_lse"}),
)


def check(problem: problems.Problem) -> None:
    """Check that the native kernel's result is within the budget."""
    batch = problems.build(problem)
    try:
        budget.of(batch).check(*batch.run("native"))
    except AssertionError as error:
        raise AssertionError(f"{problem}\n{error}") from error


def check_nan() -> None:
    """Check that a NaN query, or a key with all bits set, gives NaN even if its keys are split."""
    batch = problems.build(LONG)
    query, words = np.array(batch.query), np.array(batch.key_cache.data)
    query[0] = np.nan
    block = int(np.asarray(batch.kwargs["block_tables"])[0, 0])
    words.view(np.uint32)[block, :, 3] = 0xFFFFFFFF
    keys = batch.key_cache.replace(data=jnp.asarray(words))
    for wrong in ({"query": query}, {"key_cache": keys}):
        out, lse = dataclasses.replace(batch, **wrong).run("native")
        assert np.isnan(out[0]).all(), wrong.keys()
        assert np.isnan(lse[0]).all(), wrong.keys()
        assert np.isfinite(lse[1]).all()


def check_broken(problem: problems.Problem) -> None:
    """Check that ids, lengths and starts out of range give NaN in their rows.

    Nothing may be read there: a sanitizer would report it.
    """
    batch = problems.build(problem)
    broken, sequences = promises.some_broken(batch)
    promises.check(broken, *broken.run("native"), sequences)
    for mistake in promises.MISTAKES:
        out, lse = promises.with_starts(batch, mistake).run("native")
        assert np.isnan(out).all(), mistake
        assert np.isnan(lse).all(), mistake
    tables, lens = (batch.kwargs[name] for name in ("block_tables", "seq_lens"))
    starts = batch.view.starts
    has_keys = np.zeros(len(batch.query), bool)
    for b, seq_len in enumerate(problem.seq_lens):
        has_keys[starts[b] : starts[b + 1]] = seq_len > 0
    for value in (-(2**31), -1, batch.key_cache.shape[0], 2**31 - 1):
        out, lse = batch.run("native", block_tables=jnp.full_like(tables, value))
        assert (np.isnan(out).all(axis=(1, 2)) == has_keys).all(), value
    for value in (tables.shape[1] * problem.block_size + 1, 2**31 - 1):
        out, lse = batch.run("native", seq_lens=jnp.full_like(lens, value))
        assert np.isnan(out[: starts[-1]]).all(), value
    for value in (-1, -(2**31)):  # no keys
        out, lse = batch.run("native", seq_lens=jnp.full_like(lens, value))
        assert (out == 0).all(), value


def main() -> None:
    """Check the seeds asked for and a few long calls, and print what ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--cores", type=int, help="run on that many cores")
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    row = implementations.BY_NAME["native"].row
    assert not row.missing(), row.missing()
    for query, format in (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "int8")):
        check(LONG.replace(query_dtype=query, format=format))
        check_broken(LONG.replace(query_dtype=query, format=format))
    check_nan()
    for seed in range(args.first, args.first + args.count):
        problem = random_calls.draw(seed, row)
        if np.sum(problem.query_lens) + problem.padded_tokens * problem.ragged:
            check(problem)
    native_writing.check_divisions(jattn.Int8(True), 200, 16)
    native_writing.check_divisions(jattn.Fp8("e4m3", "block"), 200, 16)
    loaded = library.load()
    print("written:", native_writing.digest())
    print(f"{args.count + 3} calls on {loaded.instruction_set()} of {loaded.instruction_sets()}")


if __name__ == "__main__":
    main()
