"""Compare layers in a scan over stacked weights with layers one by one.

    python -m benchmarks.serving.scan

XLA computes the products of 8 layers like Qwen3-0.6B's in float32: in `jax.lax.scan` over stacked
weights, and unrolled with an array per weight. Before a figure is printed the results are compared.
Calls take turns; figures are medians in milliseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.options import add_json, positive
from benchmarks.serving import records
from benchmarks.serving.products import NUM_LAYERS, SHAPES
from examples.engine.serve import use_wide_vectors
from examples.models.layers import product_by_xla


def layer(x: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
    """Run tokens [T, 1024] through one layer's products, without what lies between them."""
    joined, out, gates, down = weights
    heads = product_by_xla(x, joined)[:, : out.shape[1]]
    gated = product_by_xla(x + product_by_xla(heads, out), gates)[:, : down.shape[1]]
    return product_by_xla(gated, down)


def scanned(x: jax.Array, stacks: Sequence[jax.Array]) -> jax.Array:
    """Run all layers over weights [layers, O, I]."""
    return jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, tuple(stacks))[0]


def unrolled(x: jax.Array, layers: Sequence[Sequence[jax.Array]]) -> jax.Array:
    """Run all layers, each with separate arrays."""
    for weights in layers:
        x = layer(x, weights)
    return x


def measure(token_counts: Sequence[int], turns: int) -> list[dict]:
    """Measure each number of tokens in each way, and return the records.

    Raises:
      SystemExit: the two results differ.
    """
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    stacks = [jnp.asarray(draw(NUM_LAYERS, *shape) * shape[1] ** -0.5) for shape in SHAPES]
    layers = [[jnp.array(stack[i]) for stack in stacks] for i in range(NUM_LAYERS)]
    found = []
    for tokens in token_counts:
        x, contenders, results = jnp.asarray(draw(tokens, SHAPES[0][1])), {}, {}
        for way, f, weights in (("scan", scanned, stacks), ("unrolled", unrolled, layers)):
            program = jax.jit(f)
            call = lambda f=program, w=weights, x=x: jax.block_until_ready(f(x, w))  # noqa: E731
            results[way] = np.asarray(call())
            contenders[way] = timing.Calls(call)
        if not np.allclose(results["scan"], results["unrolled"], rtol=1e-3, atol=1e-3):
            raise SystemExit(f"{tokens} tokens: the results of the two ways differ")
        for way, took in timing.interleave(contenders, turns).items():
            figures = {"ms": took.median * 1e3, "spread": took.spread}
            found.append({"kind": "row", "tokens": tokens, "way": way, **figures})
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print the figures, and write them to `--json` if it is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.scan")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 1], help="(%(default)s)")
    parser.add_argument("--turns", type=positive, default=20, help="(%(default)s)")
    add_json(parser)
    options = parser.parse_args(arguments)
    use_wide_vectors()  # as the server does
    run = records.of_run("qwen3-0.6b", layers=NUM_LAYERS, dtype="float32")
    records.append(options.json, run)
    for row in measure(options.tokens, options.turns):
        records.append(options.json, row)
        print(f"{row['tokens']:>4} tokens, {row['way']:>8}: {row['ms']:6.1f} ms")


if __name__ == "__main__":
    main()
