"""Time products of mixtures of experts: C++, `grouped_dot` and `jax.lax.ragged_dot`, on this CPU.

    python -m benchmarks.serving.experts [--dtype DTYPE ...] [--tokens N ...] [--json FILE]

The gate and up projections of one layer at the sizes of published models multiply every token's
rows, sorted by expert, by random matrices, [out, in] for the C++ of `examples/native` and [in, out]
for the others. In each result the rows of one expert are compared with float64. Calls take turns;
figures are medians in milliseconds. `of read` is the rate of reading the matrices of experts that
have rows, as a share of the rate at which plain NumPy reads memory in the same run.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ceilings, timing
from benchmarks.cpu import tables
from benchmarks.options import add_json, positive
from benchmarks.serving import records
from examples import native
from examples.engine.serve import use_wide_vectors
from jattn.integrations.grouped import grouped_dot

DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A layer's experts; gate and up of each are one matrix [columns, outputs]."""

    experts: int
    per_token: int
    columns: int
    outputs: int


MIXTURES = {
    "GPT-OSS 20B": Mixture(32, 4, 2880, 5760),
    "Qwen3 30B-A3B": Mixture(128, 8, 2048, 1536),
}


def by_jax(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply with JAX's `ragged_dot`."""
    return jax.lax.ragged_dot(
        rows, weights, sizes, precision="highest", preferred_element_type=jnp.float32
    )


def by_native(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply in C++, with weights [E, out, in]."""
    return native.grouped_product(rows, weights, sizes, jnp.dtype("float32"))


WAYS = {"native": by_native, "grouped": grouped_dot, "ragged": by_jax}


def measure(
    name: str, mixture: Mixture, dtype: str, tokens: int, turns: int, read_rate: float
) -> dict:
    """Measure one mixture and number of tokens."""
    rng = np.random.default_rng(tokens)
    num_rows = tokens * mixture.per_token
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32), dtype)  # noqa: E731
    chosen = [rng.choice(mixture.experts, mixture.per_token, replace=False) for _ in range(tokens)]
    sizes = np.bincount(np.concatenate(chosen), minlength=mixture.experts)
    shape = (mixture.experts, mixture.columns, mixture.outputs)
    given = draw(num_rows, mixture.columns), draw(*shape), jnp.asarray(sizes, jnp.int32)
    turned = jnp.array(given[1].swapaxes(1, 2))
    ways, took = {}, {}
    for way, dot in WAYS.items():
        arrays = (given[0], turned, given[2]) if dot is by_native else given
        call = functools.partial(lambda f, x: jax.block_until_ready(f(*x)), jax.jit(dot), arrays)
        check(f"{way}, {name}, {dtype}, {tokens} tokens", call(), *given)
        ways[way] = timing.Calls(call)
    for way, each in timing.interleave(ways, turns).items():
        took |= {f"{way}_ms": each.median * 1e3, f"{way}_spread": each.spread}
    read = np.count_nonzero(sizes) * mixture.columns * mixture.outputs * given[1].dtype.itemsize
    of_read = {f"{way}_of_read": read / took[f"{way}_ms"] * 1e3 / read_rate for way in WAYS}
    row = {"mixture": name, "dtype": dtype, "tokens": tokens, **of_read, **took}
    return {"kind": "row", **row}


def check(what: str, found: jax.Array, rows: jax.Array, weights: jax.Array, sizes: jax.Array):
    """Stop if the rows of the last expert that has any are off from float64."""
    last = int(np.flatnonzero(sizes)[-1])
    some = slice(len(rows) - int(sizes[last]), len(rows))
    exact = np.float64(rows[some]) @ np.float64(weights[last])
    off = np.linalg.norm(np.float64(found[some]) - exact) / np.linalg.norm(exact)
    if not off <= 2**-18:
        raise SystemExit(f"{what}: off by {off:.2g}")


def page_table(rows: Sequence[dict]) -> str:
    """Write the table of docs/performance-serving.md."""
    head = (
        *("experts of", "dtype", "tokens", "`ragged_dot`, ms", "`grouped_dot`, ms", "of read"),
        *("C++, ms", "of read"),
    )
    lines: list[Sequence[str]] = [head]
    for row in rows:
        words = [row["mixture"], row["dtype"], str(row["tokens"]), f"{row['ragged_ms']:.3g}"]
        for way in ("grouped", "native"):
            words += [f"{row[f'{way}_ms']:.3g}", f"{row[f'{way}_of_read']:.0%}"]
        lines.append(words)
    return tables.markdown(lines)


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and write every figure to `--json` if it is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.experts")
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[1, 8, 64], help="(%(default)s)")
    add("--dtype", choices=DTYPES, nargs="+", default=DTYPES, help="(%(default)s)")
    add("--mixture", choices=MIXTURES, nargs="+", default=list(MIXTURES))
    add("--turns", type=positive, default=3, help="(%(default)s)")
    add_json(parser)
    options = parser.parse_args(arguments)
    use_wide_vectors()  # as the server does
    if reason := native.load():
        raise SystemExit(f"C++ products are not available: {reason}")
    read_rate = ceilings.read_rate()
    records.append(options.json, records.of_run("experts", read=read_rate))
    rows = []
    for name, dtype, tokens in itertools.product(options.mixture, options.dtype, options.tokens):
        rows.append(measure(name, MIXTURES[name], dtype, tokens, options.turns, read_rate))
        records.append(options.json, rows[-1])
    print(page_table(rows))


if __name__ == "__main__":
    main()
