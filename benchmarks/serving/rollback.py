"""Measure ways to get a recurrent layer's state after the accepted draft tokens.

    python -m benchmarks.serving.rollback

`examples/models/recurrent.py` runs one layer's recurrence at Qwen3-Next's size (32 heads of 128 by
128) over steps of 1 + 4 tokens of several sequences, in three ways:

    once    over all tokens: no draft token may be rejected
    again   once more, over the accepted tokens: what the example engine does
    kept    token by token, keeping the state after each, of which one is picked

Before a figure is printed, the states of `again` and `kept` are compared. Calls take turns; figures
are medians in milliseconds. How many tokens a step brings is computed from the probability that a
draft token is right: with `again`, the accepted draft tokens plus one. If a step instead goes back
to the state before its chunk, the accepted tokens take room from the next step's draft tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.options import add_json
from benchmarks.serving import records
from examples.models.recurrent import Rows, ragged_rows, recur

HEADS, SIZE, DRAFTS = 32, 128, 4
CALLS = 60


def once(inputs: Sequence[jax.Array], state: jax.Array, rows: Rows, _: jax.Array) -> tuple:
    """Return outputs, and states after all tokens."""
    return recur(*inputs, state, rows)


def again(inputs: Sequence[jax.Array], state: jax.Array, rows: Rows, accepted: jax.Array) -> tuple:
    """Return outputs, and states after the accepted tokens of each sequence."""
    out, _ = recur(*inputs, state, rows)
    # Which tokens are accepted is known only after the outputs.
    accepted, out = jax.lax.optimization_barrier((accepted, out))
    return out, recur(*inputs, state, rows.first(accepted))[1]


def kept(inputs: Sequence[jax.Array], state: jax.Array, rows: Rows, accepted: jax.Array) -> tuple:
    """Do the same with a state after each token."""
    count, size = rows.num_seqs, 1 + DRAFTS
    one = ragged_rows(jnp.arange(count + 1, dtype=jnp.int32), count, 1)
    steps = jax.tree.map(lambda x: x.reshape(count, size, *x.shape[1:]).swapaxes(0, 1), inputs)

    def turn(state: jax.Array, step: Sequence[jax.Array]) -> tuple:
        out, state = recur(*step, state, one)
        return state, (out, state)

    _, (out, states) = jax.lax.scan(turn, state, steps)
    out, states, accepted = jax.lax.optimization_barrier((out, states, accepted))
    sequences = jnp.arange(count, dtype=jnp.int32)
    picked = states.at[accepted - 1, sequences].get(mode="clip")
    return out.swapaxes(0, 1).reshape(-1, *out.shape[2:]), picked


WAYS: dict[str, Callable[..., tuple]] = {"once": once, "again": again, "kept": kept}


def measure(count: int, calls: int = CALLS) -> list[dict]:
    """Measure each way with `count` sequences, and return the records.

    Raises:
      SystemExit: two ways differ in outputs or states.
    """
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    tokens = count * (1 + DRAFTS)
    query, key, value = draw(3, tokens, HEADS, SIZE)
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    log_decay, beta = -0.1 * abs(draw(tokens, HEADS)), 1 / (1 + np.exp(draw(tokens, HEADS)))
    inputs = tuple(map(jnp.asarray, (query, key, value, log_decay, beta)))
    state = jnp.asarray(draw(count, HEADS, SIZE, SIZE))
    starts = jnp.arange(count + 1, dtype=jnp.int32) * (1 + DRAFTS)
    rows = ragged_rows(starts, tokens, 1 + DRAFTS)
    accepted = jnp.asarray(1 + np.arange(count) % (1 + DRAFTS), jnp.int32)
    results, contenders = {}, {}
    for way, f in WAYS.items():
        program = jax.jit(lambda state, accepted, f=f: f(inputs, state, rows, accepted))
        call = lambda f=program: jax.block_until_ready(f(state, accepted))  # noqa: E731
        results[way] = call()
        contenders[way] = timing.Calls(call)
    for got, wanted in zip(results["kept"], results["again"], strict=True):
        if not np.allclose(got, wanted, atol=1e-3):
            raise SystemExit(f"{count} sequences: two ways differ by {abs(got - wanted).max():.2g}")
    took = timing.interleave(contenders, calls)
    return [
        {"kind": "row", "sequences": count, "way": way, "ms": t.median * 1e3, "spread": t.spread}
        for way, t in took.items()
    ]


def brought(right: float, *, in_next_step: bool) -> float:
    """Return the mean number of tokens that a step brings.

    Args:
      right: the probability that a draft token is right.
      in_next_step: whether the next step computes accepted tokens again, instead of draft tokens.
    """
    # The chance of n accepted of k drafts, from n = 0.
    chances = lambda k: [right**n * (1 - right) for n in range(k)] + [right**k]  # noqa: E731
    means = [sum(n * p for n, p in enumerate(chances(k))) for k in range(1 + DRAFTS)]
    if not in_next_step:
        return 1 + means[DRAFTS]
    # A Markov chain whose state is the room taken; iterate to its steady state.
    share = np.full(1 + DRAFTS, 1 / (1 + DRAFTS))
    moves = np.zeros((1 + DRAFTS, 1 + DRAFTS))
    for taken in range(1 + DRAFTS):
        for n, p in enumerate(chances(DRAFTS - taken)):
            # If all are right, the state after the chunk is there; else what is right runs again.
            moves[taken, 0 if n == DRAFTS - taken else taken + n + 1] += p
    for _ in range(1000):
        share = share @ moves
    return float(1 + sum(share[taken] * means[DRAFTS - taken] for taken in range(1 + DRAFTS)))


def main(arguments: list[str] | None = None) -> None:
    """Print the figures, and write them to `--json` if it is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.rollback")
    add_json(parser)
    options = parser.parse_args(arguments)
    records.append(options.json, records.of_run("qwen3-next", drafts=DRAFTS))
    for count in (1, 8):
        found = measure(count)
        records.append(options.json, *found)
        took = ", ".join(f"{row['way']} {row['ms']:.1f} ms" for row in found)
        print(f"{count} sequence{'s' * (count > 1)}: {took}")
    for right in (0.6, 0.8):
        row = {
            "again": brought(right, in_next_step=False),
            "in the next step": brought(right, in_next_step=True),
        }
        records.append(options.json, {"kind": "tokens", "right": right, **row})
        print(
            f"drafts that are right with {right}: {row['again']:.1f} tokens a step with `again`, "
            f"{row['in the next step']:.1f} if the next step computes accepted ones"
        )


if __name__ == "__main__":
    main()
