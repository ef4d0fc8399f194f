"""Measure what block tables cost per step, compared with Python lists and NumPy, and a shared pool.

    python benchmarks/blocks.py

A step of 256 sequences appends one block to each, gathers the table of 64 blocks per sequence,
expands it into 33 kernel blocks per block (528 = 33 x 16), and finds the slots of 8192 tokens. The
NumPy implementation keeps ids in Python lists per sequence and one array per step, as engines do.
Every result is compared before its time is printed: median of the rounds, and the spread between
their first and last quartile. `eager` calls the public functions one by one; `jitted` is one
compiled step with donated tables; `append: the check` is the part of the eager call that finds full
rows.

A wide batch is gathered as whole rows and as only the columns that its sequences need, each into
new arrays and into those of the step before.

The last part is a decode step of all layers in a scan: one pool with shifted tables against a
cache stacked along the layers. Temporaries are those of the compiled step.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

import jattn.blocks as jb
from benchmarks import timing


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of an engine.

    Attributes:
      seqs: sequences, each of which gets one block.
      blocks: blocks of a sequence after the step.
      block: tokens per block.
      kernel: tokens per kernel block.
      tokens: tokens of the slot mapping, dealt to the sequences evenly.
    """

    seqs: int = 256
    blocks: int = 64
    block: int = 528
    kernel: int = 16
    tokens: int = 8192


@dataclasses.dataclass(frozen=True)
class Data:
    """A step's arrays: rows before it, new ids, and the tokens."""

    rows: np.ndarray
    new: np.ndarray
    order: np.ndarray
    starts: np.ndarray
    positions: np.ndarray


def make(step: Step) -> Data:
    rng = np.random.default_rng(0)
    ids = rng.permutation(step.seqs * step.blocks).astype(np.int32).reshape(step.seqs, -1)
    per_seq = step.tokens // step.seqs
    ends = rng.integers(per_seq, step.blocks * step.block, step.seqs)
    positions = np.concatenate([np.arange(end - per_seq, end) for end in ends]).astype(np.int32)
    starts = np.arange(0, step.tokens + 1, per_seq, dtype=np.int32)
    order = rng.permutation(step.seqs).astype(np.int32)
    return Data(ids[:, :-1], ids[:, -1:], order, starts, positions)


class Lists:
    """The same step in Python lists and NumPy."""

    def __init__(self, step: Step, data: Data):
        self.step, self.data = step, data
        self.rows = [row.tolist() for row in data.rows]

    def append(self):
        for row, new in zip(self.rows, self.data.new.tolist(), strict=True):
            row.extend(new)

    def undo(self):
        for row in self.rows:
            row.pop()

    def gather(self):
        table = np.zeros((self.step.seqs, self.step.blocks), np.int32)
        for i, row in enumerate(self.data.order.tolist()):
            table[i, : len(self.rows[row])] = self.rows[row]
        return table

    def expand(self, table):
        n = self.step.block // self.step.kernel
        return (table[:, :, None] * n + np.arange(n, dtype=np.int32)).reshape(len(table), -1)

    def slots(self, table):
        seq = np.repeat(np.arange(self.step.seqs), np.diff(self.data.starts))
        block, positions = self.step.block, self.data.positions
        return table[seq, positions // block] * block + positions % block


def timed(function, rounds: int, before=lambda: None) -> tuple[float, float]:
    """Return the median and quartile spread of a call, in microseconds."""
    times = []
    for _ in range(rounds + 3):
        before()
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(1e6 * (time.perf_counter() - start))
    found = timing.summarize(times[3:])
    return found.median, found.high - found.low


def line(name: str, what: str, median: float, spread: float, note: str = "") -> None:
    print(f"{name:<18} {what:<10} {median:>9.1f} us  +- {spread:>8.1f}  {note}", flush=True)


def per_step(step: Step, rounds: int) -> None:
    data = make(step)
    lists = Lists(step, data)
    group = jb.BlockGroup(step.block, step.blocks, step.kernel)
    counts = np.full((1, step.seqs), step.blocks - 1, np.int32)
    every = np.arange(step.seqs, dtype=np.int32)
    filled, _ = jb.append_block_ids(
        jb.init_block_tables([group], step.seqs), every, [data.rows], counts
    )
    one = np.ones_like(counts)
    put = jax.tree.map(
        jnp.asarray, (every, (data.new,), one, data.order, data.starts, data.positions)
    )

    def whole(tables, every, new, one, order, starts, positions):
        tables, refused = jb.append_block_ids(tables, every, new, one)
        gathered = jb.gather_block_tables(tables, order)
        expanded = jb.kernel_block_tables(tables, gathered)
        slots = jb.compute_slot_mapping(tables, order, starts, positions)
        return tables, refused, gathered[0], expanded[0], slots[0]

    compiled = jax.jit(whole, donate_argnums=0)
    lists.append()
    expected = lists.gather()
    tables, refused, gathered, expanded, slots = compiled(jax.tree.map(jnp.copy, filled), *put)
    np.testing.assert_array_equal(gathered, expected)
    np.testing.assert_array_equal(expanded, lists.expand(expected))
    np.testing.assert_array_equal(slots, lists.slots(expected))
    assert not refused.any()

    print(f"{step}: {step.blocks} x {step.seqs} ids, expanded {expanded.size} ids")
    line("append", "lists", *timed(lists.append, rounds, lists.undo))
    line("gather", "lists", *timed(lists.gather, rounds))
    line("expand", "numpy", *timed(lambda: lists.expand(expected), rounds))
    line("slots", "numpy", *timed(lambda: lists.slots(expected), rounds))

    def whole_lists():
        lists.append()
        table = lists.gather()
        return lists.expand(table), lists.slots(table)

    line("whole step", "lists", *timed(whole_lists, rounds, lists.undo))

    every_, new_, one_, order_, starts_, positions_ = put
    calls = {
        "append": lambda: jb.append_block_ids(filled, every_, new_, one_),
        "gather": lambda: jb.gather_block_tables(tables, order_),
        "expand": lambda: jb.kernel_block_tables(tables, (gathered,)),
        "slots": lambda: jb.compute_slot_mapping(tables, order_, starts_, positions_),
    }
    for name, call in calls.items():
        line(name, "eager", *timed(call, rounds))
    line(
        "append: the check",
        "eager",
        *timed(lambda: jb.check_append(filled, every_, new_, one_) or 0, rounds),
    )
    single = {
        "append": (jax.jit(jb.append_block_ids), (filled, every_, new_, one_)),
        "gather": (jax.jit(jb.gather_block_tables), (tables, order_)),
        "expand": (jax.jit(jb.kernel_block_tables), (tables, (gathered,))),
        "slots": (jax.jit(jb.compute_slot_mapping), (tables, order_, starts_, positions_)),
    }
    for name, (call, arguments) in single.items():
        line(name, "jitted", *timed(lambda c=call, a=arguments: c(*a), rounds))

    fresh = []
    memory = compiled.lower(filled, *put).compile().memory_analysis()
    line(
        "whole step",
        "jitted",
        *timed(
            lambda: compiled(fresh.pop(), *put),
            rounds,
            lambda: fresh.append(jax.block_until_ready(jax.tree.map(jnp.copy, filled))),
        ),
        f"temporaries {memory.temp_size_in_bytes / 2**10:.0f} KiB, tables donated",
    )


def wide_gather(rounds: int) -> None:
    seqs, blocks, used = 4096, 2048, 256
    rng = np.random.default_rng(2)
    tables = jb.BlockTables(
        (jnp.asarray(rng.integers(1, 2**20, (seqs, blocks), np.int32)),),
        jnp.full((1, seqs), used, jnp.int32),
        (jb.BlockGroup(16, blocks),),
    )
    rows = jnp.asarray(rng.permutation(seqs).astype(np.int32))
    gather = jax.jit(jb.gather_block_tables, static_argnames="width")
    reuse = jax.jit(jb.gather_block_tables, static_argnames="width", donate_argnames="into")
    expected = np.where(np.arange(blocks) < used, np.asarray(tables.tables[0])[rows], 0)
    print(f"{seqs} sequences of {used} blocks in rows of {blocks}")
    for width, note in ((blocks, "whole rows"), (used, f"{used} columns")):
        state = [gather(tables, rows, width=width)]
        np.testing.assert_array_equal(state[0][0], expected[:, :width])

        def again(width=width, state=state):
            state.append(reuse(tables, rows, width=width, into=state.pop()))
            return state[-1]

        np.testing.assert_array_equal(again()[0], expected[:, :width])
        line("gather", "new", *timed(lambda w=width: gather(tables, rows, width=w), rounds), note)
        line("gather", "into", *timed(again, rounds), note)


@dataclasses.dataclass(frozen=True)
class Stack:
    """A decode step of a stack of attention layers: only the cache, no projections."""

    layers: int = 16
    blocks: int = 256
    heads: int = 4
    block: int = 16
    dim: int = 128
    seqs: int = 16
    length: int = 128


def layers_in_a_scan(stack: Stack, rounds: int) -> None:
    import jattn

    rng = np.random.default_rng(1)
    per_seq = stack.length // stack.block
    table = jnp.asarray(
        rng.permutation(stack.blocks)[: stack.seqs * per_seq]
        .reshape(stack.seqs, per_seq)
        .astype(np.int32)
    )
    seq_lens = jnp.full((stack.seqs,), stack.length, jnp.int32)
    slots = table[:, -1] * stack.block + stack.block - 1
    x = jnp.asarray(rng.standard_normal((stack.seqs, stack.heads, stack.dim)), jnp.bfloat16)

    def attend(caches, x, table, slots):
        caches = jattn.update_kv_cache(*caches, x, x, slots)
        return caches, jattn.paged_attention(x, *caches, block_tables=table, seq_lens=seq_lens)

    def one_pool(caches, x):
        def body(carry, layer):
            caches, x = carry
            caches, out = attend(
                caches,
                x,
                jb.layer_block_tables(table, layer, stack.blocks),
                jb.layer_slot_mapping(slots, layer, stack.blocks, stack.block),
            )
            return (caches, out), None

        layers = jnp.arange(stack.layers, dtype=jnp.int32)
        return jax.lax.scan(body, (caches, x), layers)[0]

    def stacked(caches, x):
        def body(x, cache):
            cache, out = attend(cache, x, table, slots)
            return out, cache

        out, caches = jax.lax.scan(body, x, caches)
        return caches, out

    shape = (stack.heads, stack.block, stack.dim)
    words = rng.integers(0, 2**14, (2, stack.layers * stack.blocks, *shape), dtype=np.uint16)
    results = {}
    print(f"{stack}: cache {words.nbytes / 2**20:.0f} MiB")
    for name, function, lead in (
        ("one pool", one_pool, (stack.layers * stack.blocks,)),
        ("stacked cache", stacked, (stack.layers, stack.blocks)),
    ):

        def caches(lead=lead):
            return tuple(
                jattn.KVArray(
                    jnp.asarray(part.reshape(*lead, *shape)), None, jattn.Dense("bfloat16")
                )
                for part in words
            )

        compiled = jax.jit(function, donate_argnums=0)
        memory = compiled.lower(caches(), x).compile().memory_analysis()
        results[name] = np.asarray(compiled(caches(), x)[1].astype(jnp.float32))
        np.testing.assert_array_equal(results[name], results["one pool"])
        state = [jax.block_until_ready(compiled(caches(), x))[0]]

        def again(compiled=compiled, state=state):
            kept, out = compiled(state.pop(), x)
            state.append(kept)
            return out, kept

        median, spread = timed(again, max(rounds // 4, 5))
        note = f"temporaries {memory.temp_size_in_bytes / 2**20:.1f} MiB"
        line("layers in a scan", name, median, spread, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    print(f"jax {jax.__version__} on {jax.default_backend()}")
    per_step(Step(), rounds)
    wide_gather(rounds)
    layers_in_a_scan(Stack(), rounds)


if __name__ == "__main__":
    main()
