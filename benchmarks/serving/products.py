"""Time products with weights in C++ (`examples/native`) and XLA, for 8 layers of Qwen3-0.6B.

    python -m benchmarks.serving.products

A call computes every layer's products. Results are compared with float64. Calls take turns; figures
are medians in milliseconds, XLA's first, then the C++ ones.
"""

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.cpu import tables
from benchmarks.options import add_json
from benchmarks.serving import records
from examples import native
from examples.engine.serve import use_wide_vectors
from examples.models import layers

NUM_LAYERS = 8
# Outputs and inputs of a layer: queries, keys and values; attention's output; gate and up; down.
SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
DTYPES = ("bfloat16", "float32")
WAYS = {"xla": layers.product_by_xla, "native": native.product}


def every(product: Callable, inputs: dict, weights: Sequence, after=lambda x, _: x):
    """Multiply each weight [O, I] by the tokens [T, I] with as many columns, in order."""
    found = []
    for weight in weights:
        x = inputs[weight.shape[1]]
        found.append(product(x, weight, x.dtype))
        inputs = after(inputs, found[-1])
    return found


def in_order(inputs: dict, result: jax.Array) -> dict:
    """Return the inputs, but dependent on a result, so that products run in order as in a model."""
    return jax.lax.optimization_barrier((inputs, result))[0]


def measure(dtype: str, token_counts: Sequence[int], turns: int) -> list[dict]:
    """Measure each number of tokens in each way, and return the records."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32), dtype)  # noqa: E731
    tokens_of = {columns: draw(max(token_counts), columns) for _, columns in SHAPES}
    weights = [draw(*shape) for shape in SHAPES * NUM_LAYERS]
    doubles = {columns: np.float64(x) for columns, x in tokens_of.items()}
    exact = every(lambda x, w, _: x @ np.float64(w).T, doubles, weights)
    budget = float(jnp.finfo(dtype).eps) + 2**-18
    found, ways = [], {}
    for tokens in token_counts:
        for way, product in WAYS.items():
            program = jax.jit(functools.partial(every, product, after=in_order))
            given = {columns: jnp.array(x[:tokens]) for columns, x in tokens_of.items()}
            call = lambda f=program, x=given: jax.block_until_ready(f(x, weights))  # noqa: E731
            ways[way] = timing.Calls(call)
            pairs = zip(call(), (part[:tokens] for part in exact), strict=True)
            off = max(np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b) for a, b in pairs)
            if not off <= budget:
                raise SystemExit(f"{way}, {dtype}, {tokens} tokens: off by {off:.2g}")
        for way, took in timing.interleave(ways, turns).items():
            figures = {"ms": took.median * 1e3, "spread": took.spread}
            found.append({"kind": "row", "dtype": dtype, "tokens": tokens, "way": way, **figures})
    return found


def table(rows: list[dict]) -> str:
    """Write a line for each dtype, with a pair of medians for each number of tokens."""
    lines = {"tokens": ""}
    for row in rows:
        text = f"{'   ' if row['way'] == 'xla' else ' '}{row['ms']:5.3g}"
        lines[row["dtype"]] = lines.get(row["dtype"], "") + text
    lines["tokens"] = "".join(f"{n:>8}{'':6}" for n in dict.fromkeys(row["tokens"] for row in rows))
    return "\n".join(f"{name:8}{line}".rstrip() for name, line in lines.items())


def page_table(machines: Mapping[str, Sequence[dict]]) -> str:
    """Write the table of docs/performance-serving.md: XLA's time over C++'s, by machine, dtype."""
    lines: list[Sequence[str]] = []
    for machine, rows in machines.items():
        ms = {(row["dtype"], row["tokens"], row["way"]): row["ms"] for row in rows}
        counts = list(dict.fromkeys(row["tokens"] for row in rows))
        if not lines:
            lines = [["", *(f"{n} token{'s' * (n > 1)}" for n in counts)]]
        for dtype in DTYPES:
            ratios = (ms[dtype, n, "xla"] / ms[dtype, n, "native"] for n in counts)
            lines.append([f"{machine}, {dtype}", *(f"{ratio:.2f}" for ratio in ratios)])
    return tables.markdown(lines)


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and write every figure to `--json` if it is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.products")
    add = parser.add_argument
    counts = [1, 2, 8, 16, 64, 96, 128, 256]
    add("--tokens", type=int, nargs="+", default=counts, help="(%(default)s)")
    add("--dtype", choices=DTYPES, nargs="+", default=DTYPES, help="(%(default)s)")
    add_json(parser)
    options = parser.parse_args(arguments)
    use_wide_vectors()  # as the server does
    if reason := native.load():
        raise SystemExit(f"C++ products are not available: {reason}")
    records.append(options.json, records.of_run("qwen3-0.6b", layers=NUM_LAYERS))
    rows = []
    for dtype in options.dtype:
        found = measure(dtype, options.tokens, turns=20)
        records.append(options.json, *found)
        rows += found
    print(table(rows))


if __name__ == "__main__":
    main()
