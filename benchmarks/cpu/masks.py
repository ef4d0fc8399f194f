"""Measure what each mask and bias costs or saves, compared with the plain call, on this CPU.

    python -m benchmarks.cpu.masks [--head-dim D ...] [--workload NAME ...] [--turns N]
                                   [--variant NAME ...] [--json FILE]

Three workloads, 16 query heads over 4 KV heads, blocks of 128, bfloat16: decode of 8 sequences of
4,096 tokens, the same with 8 draft tokens each, and prefill of 2,048. Every result is compared
with attention written out in NumPy before it is timed. All variants of a workload take turns in one
process. A line has the median CPU seconds of a call, its ratio to the plain call (below 1 the
variant is faster), and two shares of the plain call's work: visible pairs of query and key, and
tiles of 256 queries by 128 keys with a visible pair, since all other tiles can be skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks import oracle, timing
from benchmarks.cpu.format_speed import medians
from benchmarks.machine import run_record
from benchmarks.options import add_json, positive
from benchmarks.serving.records import append

HEADS, KV_HEADS, BLOCK = 16, 4, 128
TILE = (256, 128)
EXTENT = 128  # of the bias table: T5's buckets end here
# A row's rounding stays below 0.5% of its rms; one key of 4,096 is 1.6% of it.
LIMIT = 0.01


@dataclasses.dataclass(frozen=True)
class Workload:
    """B equal sequences, each with Q query tokens at the end of n keys."""

    num_seqs: int
    query_len: int
    seq_len: int

    @property
    def positions(self) -> np.ndarray:
        """int [Q]: the positions of a sequence's query tokens."""
        return np.arange(self.seq_len - self.query_len, self.seq_len)


@dataclasses.dataclass(frozen=True)
class Variant:
    """Arguments of a call, and what they mean."""

    name: str
    options: dict
    seen: np.ndarray  # bool [Q, n], for every sequence
    bias: np.ndarray | None = None  # float [H, Q, n], added to the logits


WORKLOADS = {
    "decode": Workload(8, 1, 4096),
    "drafts": Workload(8, 8, 4096),
    "prefill": Workload(1, 2048, 2048),
}


VARIANTS = (
    *("tree_mask", "sliding_window", "attention_chunk_size", "selected_blocks", "visible_end"),
    *("relative_bias", "alibi_slopes", "logits_soft_cap", "sinks"),
)


def variants(kind: str) -> list[Variant]:
    """Return all variants of a workload, plain first; those that skip keys see about a quarter."""
    work, rng = WORKLOADS[kind], np.random.default_rng(1)
    query, key = work.positions[:, None], np.arange(work.seq_len)[None]
    causal, quarter = key <= query, work.seq_len // 4
    found = [Variant("plain", {}, causal)]
    if kind == "drafts":
        tree = np.zeros((8, 8), bool)  # every token has two continuations
        for token in range(8):
            tree[token] = tree[(token - 1) // 2] if token else False
            tree[token, token] = True
        seen = np.concatenate([causal[:, : work.seq_len - 8], tree], axis=1)
        return [*found, Variant("tree_mask", {"tree_mask": np.tile(tree, (8, 1))}, seen)]
    chunk = causal & (key // quarter == query // quarter)
    count = work.seq_len // BLOCK
    columns = np.sort(rng.permutation(count - 1)[: count // 4 - 1])
    columns = np.append(columns, count - 1).astype(np.int32)
    ends = np.where(query[:, 0] % quarter < 256, query[:, 0] // quarter * quarter + 256, 0)
    distance = np.clip(key - query, -EXTENT, EXTENT)
    table = rng.standard_normal((HEADS, 2 * EXTENT + 1)).astype(np.float32)
    slopes = 2.0 ** -np.arange(0.5, 8.5, 0.5, np.float32)
    image = Variant(
        "visible_end",
        {"visible_end": np.tile(ends, work.num_seqs).astype(np.int32)},
        causal | (key < ends[:, None]) & (key < work.seq_len),
    )
    sinks = rng.standard_normal(HEADS).astype(np.float32)
    return [
        *found,
        Variant("sliding_window", {"sliding_window": quarter}, causal & (query - key < quarter)),
        Variant("attention_chunk_size", {"attention_chunk_size": quarter}, chunk),
        Variant(
            "selected_blocks",
            {"selected_blocks": np.tile(columns, (work.num_seqs, 1))},
            causal & np.isin(key // BLOCK, columns),
        ),
        image,
        Variant("relative_bias", {"relative_bias": table}, causal, table[:, distance + EXTENT]),
        Variant(
            "alibi_slopes",
            {"alibi_slopes": slopes},
            causal,
            slopes[:, None, None] * (key - query)[None],
        ),
        Variant("logits_soft_cap", {"logits_soft_cap": 50.0}, causal),
        Variant("sinks", {"sinks": sinks}, causal),
    ]


class Inputs:
    """A workload's arrays, with enough copies of the keys that no call finds them cached."""

    def __init__(self, work: Workload, head_dim: int):
        rng = np.random.default_rng(0)
        self.work, width = work, work.seq_len // BLOCK
        size = work.num_seqs * work.seq_len * KV_HEADS * 2 * head_dim * 2
        copies = max(2, timing.copies_of(size))
        num_blocks = copies * work.num_seqs * width
        tables = rng.permutation(num_blocks).reshape(copies, work.num_seqs, width)
        self.tables = [jnp.asarray(table, jnp.int32) for table in tables]
        sizes = (num_blocks, KV_HEADS, BLOCK, head_dim)
        self.caches = [jnp.asarray(rng.standard_normal(sizes), jnp.bfloat16) for _ in "kv"]
        num_tokens = work.num_seqs * work.query_len
        query = rng.standard_normal((num_tokens, HEADS, head_dim))
        self.query = jnp.asarray(query, jnp.bfloat16)
        self.given = {"seq_lens": jnp.full((work.num_seqs,), work.seq_len, jnp.int32)}
        self.static = {}
        if work.query_len > 1:
            starts = jnp.arange(work.num_seqs + 1, dtype=jnp.int32) * work.query_len
            self.given["query_start_loc"] = starts
            self.static["max_query_len"] = work.query_len

    def call(self, variant: Variant) -> Callable[[int], jax.Array]:
        """Return the variant as a function of the call's number, which chooses the copy."""
        run = jax.jit(
            lambda *arrays, **given: jattn.paged_attention(*arrays, **given, **self.static)
        )
        more = {name: jnp.asarray(x) for name, x in variant.options.items()}
        given = self.given | more

        def attend(number: int) -> jax.Array:
            table = self.tables[number % len(self.tables)]
            out = run(self.query, *self.caches, block_tables=table, **given)
            return out.block_until_ready()

        return attend

    def check(self, variant: Variant, out: jax.Array) -> None:
        """Compare the result over the first copy with attention written out.

        Raises:
          oracle.WrongResultError: they differ by more than rounding.
        """
        work, head_dim = self.work, self.query.shape[-1]
        shape = (work.num_seqs, work.query_len, HEADS, head_dim)
        queries, found = (
            np.asarray(x.astype(jnp.float32)).reshape(shape) for x in (self.query, out)
        )
        cap, sinks = (variant.options.get(name) for name in ("logits_soft_cap", "sinks"))
        for b, table in enumerate(np.asarray(self.tables[0])):
            key, value = (
                np.asarray(cache[table].astype(jnp.float32)).swapaxes(1, 2) for cache in self.caches
            )
            key, value = (x.reshape(work.seq_len, KV_HEADS, head_dim) for x in (key, value))
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                logits = queries[b, :, head] @ key[:, group].T * np.float32(head_dim**-0.5)
                logits = logits if cap is None else cap * np.tanh(logits / cap)
                logits = logits if variant.bias is None else logits + variant.bias[head]
                weights = np.exp(np.where(variant.seen, logits, -np.inf))
                total = weights.sum(axis=1, keepdims=True)
                total = total if sinks is None else total + np.exp(sinks[head])
                want = weights @ value[:, group] / np.where(total > 0, total, 1)
                error = np.square(found[b, :, head] - want).mean(axis=1)
                if not (error <= LIMIT**2 * np.square(want).mean(axis=1)).all():
                    raise oracle.WrongResultError(f"{variant.name}: sequence {b}, head {head}")


def tiles_seen(seen: np.ndarray) -> int:
    """Count the tiles of `TILE` in which some query sees a key."""
    pad = [(0, -size % tile) for size, tile in zip(seen.shape, TILE, strict=True)]
    padded = np.pad(seen, pad)
    rows, columns = (size // tile for size, tile in zip(padded.shape, TILE, strict=True))
    return int(padded.reshape(rows, TILE[0], columns, TILE[1]).any(axis=(1, 3)).sum())


def measure(kind: str, head_dim: int, turns: int, only: Sequence[str] | None) -> list[dict]:
    """Measure all or some variants of a workload; the plain call's row comes first."""
    work = WORKLOADS[kind]
    inputs = Inputs(work, head_dim)
    calls, pairs, tiles = {}, {}, {}
    for variant in variants(kind):
        if only and variant.name not in ("plain", *only):
            continue
        call = inputs.call(variant)
        inputs.check(variant, call(0))
        calls[variant.name] = call
        pairs[variant.name] = int(variant.seen.sum())
        tiles[variant.name] = tiles_seen(variant.seen)
    seconds = medians(calls, turns)
    return [
        {
            "kind": "row",
            "workload": kind,
            "head_dim": head_dim,
            "variant": name,
            "cpu_ms": 1e3 * seconds[name],
            "ratio": seconds[name] / seconds["plain"],
            "pairs": pairs[name] / pairs["plain"],
            "tiles": tiles[name] / tiles["plain"],
        }
        for name in calls
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.masks", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--variant", nargs="+", choices=VARIANTS, help="only these and the plain call"
    )
    parser.add_argument("--turns", type=positive, default=11)
    add_json(parser)
    args = parser.parse_args(arguments)
    print("| workload | D | variant | CPU ms | of the plain call's | pairs | tiles |")
    print("|---|---|---|---|---|---|---|", flush=True)
    append(args.json, run_record(turns=args.turns))
    for kind in args.workload:
        for head_dim in args.head_dim:
            for row in measure(kind, head_dim, args.turns, args.variant):
                append(args.json, row)
                print(
                    f"| {kind} | {head_dim} | {row['variant']} | {row['cpu_ms']:.1f} | "
                    f"{row['ratio']:.2f} | {row['pairs']:.2f} | {row['tiles']:.2f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
