"""Measure what drafts cost a recurrent layer: ways to have the state after those accepted.

    python -m benchmarks.serving.rollback

One layer's recurrence at Qwen3-Next's size (32 heads of 128 by 128) over steps of 1 + 4 tokens of
some sequences, as `examples/models/recurrent.py` runs it:

    once    over all tokens: no draft may be refused
    again   once more, over the accepted tokens: what the example engine does
    kept    token by token, with the state after each, of which one is picked

Before a figure is printed, `again` and `kept` have the same states. Calls take turns; figures are
medians in milliseconds. What a step brings, where each draft is right with some probability, is
computed: with `again` the accepted drafts and one token more; where a step instead goes back to the
state before its chunk, what was accepted takes room of the next step's drafts.
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
    """Outputs, and states after all tokens."""
    return recur(*inputs, state, rows)


def again(inputs: Sequence[jax.Array], state: jax.Array, rows: Rows, accepted: jax.Array) -> tuple:
    """Outputs, and states after the accepted tokens of each sequence."""
    out, _ = recur(*inputs, state, rows)
    # The accepted are not known before the outputs are.
    accepted, out = jax.lax.optimization_barrier((accepted, out))
    return out, recur(*inputs, state, rows.first(accepted))[1]


def kept(inputs: Sequence[jax.Array], state: jax.Array, rows: Rows, accepted: jax.Array) -> tuple:
    """The same with a state after each token."""
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
    """A record for each way with so many sequences.

    Raises:
      SystemExit: two ways have other outputs or states.
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
    """Tokens of a step, in the mean, where each draft is right with that probability.

    Args:
      right: the probability.
      in_next_step: accepted tokens are computed again in the room of the next step's drafts.
    """
    # The chance of n accepted of k drafts, from n = 0.
    chances = lambda k: [right**n * (1 - right) for n in range(k)] + [right**k]  # noqa: E731
    means = [sum(n * p for n, p in enumerate(chances(k))) for k in range(1 + DRAFTS)]
    if not in_next_step:
        return 1 + means[DRAFTS]
    # A chain whose state is the room that is taken; its steady state by iteration.
    share = np.full(1 + DRAFTS, 1 / (1 + DRAFTS))
    moves = np.zeros((1 + DRAFTS, 1 + DRAFTS))
    for taken in range(1 + DRAFTS):
        for n, p in enumerate(chances(DRAFTS - taken)):
            # All are right: the state after the chunk is there. Else what is right runs again.
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
            f"{row['in the next step']:.1f} where the next step computes accepted ones"
        )


if __name__ == "__main__":
    main()
