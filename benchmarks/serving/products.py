"""Products with weights: C++ (`examples/native`) and XLA, over 8 layers of Qwen3-0.6B.

    python -m benchmarks.serving.products

A call goes through every layer's products, each on part of the result before. Results are compared
with float64. Calls take turns; figures are medians in milliseconds, XLA's before those of C++.
"""

import argparse
import functools
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.serving import records
from examples import native
from examples.engine.serve import use_wide_vectors
from examples.models import layers

NUM_LAYERS = 8
# Outputs and inputs of a layer: queries, keys and values; attention's output; gate and up; down.
SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
DTYPES = ("bfloat16", "float32")
WAYS = {"xla": layers.product_by_xla, "native": native.product}


def chain(product: Callable, x, weights: Sequence):
    """The products one after another, each of as many columns as its weight has."""
    for weight in weights:
        x = product(x[:, : weight.shape[1]], weight, x.dtype)
    return x


def measure(dtype: str, token_counts: Sequence[int], turns: int) -> list[dict]:
    """A record for each number of tokens and each way."""
    rng = np.random.default_rng(0)
    shapes = [(max(token_counts), SHAPES[0][1]), *SHAPES * NUM_LAYERS]
    drawn = (rng.standard_normal(shape, np.float32) / shape[1] ** 0.5 for shape in shapes)
    x, *weights = (jnp.asarray(numbers, dtype) for numbers in drawn)
    exact = chain(lambda x, w, _: x @ np.float64(w).T, np.float64(x), weights)
    budget = len(weights) ** 0.5 * (float(jnp.finfo(dtype).eps) + 2**-18)  # a rounding for each
    found, ways = [], {}
    for tokens in token_counts:
        for way, product in WAYS.items():
            program = jax.jit(functools.partial(chain, product))
            call = lambda f=program, x=x[:tokens]: jax.block_until_ready(f(x, weights))  # noqa: E731
            ways[way] = types.SimpleNamespace(run=functools.partial(timing.seconds_of, call))
            want = exact[:tokens]
            off = np.linalg.norm(np.float64(call()) - want) / np.linalg.norm(want)
            if not off <= budget:
                raise SystemExit(f"{way}, {dtype}, {tokens} tokens: off by {off:.2g}")
        for way, took in timing.interleave(ways, turns).items():
            figures = {"ms": took.median * 1e3, "spread": took.spread}
            found.append({"kind": "row", "dtype": dtype, "tokens": tokens, "way": way, **figures})
    return found


def table(rows: list[dict]) -> str:
    """A line for each dtype, and pairs of medians for each number of tokens."""
    lines = {"tokens": ""}
    for row in rows:
        text = f"{'   ' if row['way'] == 'xla' else ' '}{row['ms']:5.3g}"
        lines[row["dtype"]] = lines.get(row["dtype"], "") + text
    lines["tokens"] = "".join(f"{n:>8}{'':6}" for n in dict.fromkeys(row["tokens"] for row in rows))
    return "\n".join(f"{name:8}{line}".rstrip() for name, line in lines.items())


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and write every figure to `--json` if it is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.products")
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[2, 16, 64, 96, 128, 256], help="(%(default)s)")
    add("--dtype", choices=DTYPES, nargs="+", default=DTYPES, help="(%(default)s)")
    add("--json", type=Path, help="where to write the figures, a line each")
    options = parser.parse_args(arguments)
    use_wide_vectors()  # as the server does
    if reason := native.load():
        raise SystemExit(f"no products in C++: {reason}")
    rows = [row for dtype in options.dtype for row in measure(dtype, options.tokens, turns=20)]
    print(table(rows))
    records.write(options.json, [records.of_run("qwen3-0.6b", layers=NUM_LAYERS), *rows])


if __name__ == "__main__":
    main()
