"""Measure host memory as a tier of the prefix cache, by the time to a prompt's first token.

    python -m benchmarks.serving.host_cache [--lengths 512 1024] [--turns 5]

The model has random weights and a real model's layers, and the pool holds little more than one
prompt. Each turn computes a new prompt, which evicts an old one to host memory, and then requests
the old one again. Before a figure is printed, its tokens are compared with those of the first time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors import numpy as safetensors

from benchmarks.neighbours import Neighbours
from benchmarks.options import add_json, positive
from benchmarks.serving import records
from benchmarks.serving.peer import GEOMETRIES
from examples.engine.caches import group_layers
from examples.engine.engine import Engine
from examples.engine.model import Model, load_model
from examples.engine.request import Request, Sequence
from examples.engine.scheduler import Limits
from examples.engine.step import make_buckets
from examples.models.qwen3 import Qwen3Config, make

GEOMETRY, VOCABULARY = "qwen3-0.6b-8-layers", 1024  # small, because logits are not measured
BLOCK, BUDGET, NEW = 16, 256, 4


def random_model(dtype: str) -> Model:
    """Make random weights with a real model's shapes."""
    from flax import nnx

    config = {**GEOMETRIES[GEOMETRY], "vocab_size": VOCABULARY}
    read = Qwen3Config.from_hf(config)
    shapes = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: make(read, np.dtype("float32")))))
    rng = np.random.default_rng(0)
    tensors = {
        ".".join(map(str, path)): rng.normal(size=variable.get_value().shape).astype(np.float32)
        * (0.02 if variable.get_value().ndim > 1 else 1)
        for path, variable in shapes
    }
    with tempfile.TemporaryDirectory() as folder:
        safetensors.save_file(tensors, Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return load_model(folder, dtype)


def build(model: Model, length: int) -> Engine:
    """Build an engine whose pool holds one and a half prompts."""
    groups = group_layers(model.layers)
    most = length + NEW
    blocks = {group.name: -(-3 * most // (2 * BLOCK)) for group in groups}
    limits = Limits(groups, 1, BUDGET, BLOCK, most, num_blocks=blocks)
    buckets = make_buckets(limits, [1], [BUDGET, BLOCK])
    return Engine(model, limits, buckets=buckets, host_cache_bytes=8 << 30)


def first_token(sequence: Sequence) -> float:
    """Return the seconds from arrival to the first token."""
    return sequence.first_token - sequence.arrived


def measure(model: Model, length: int, turns: int) -> dict:
    """Measure prompts of one length, and return the row.

    Raises:
      SystemExit: a prompt does not come back from host memory, or gives other tokens.
    """
    engine, rng = build(model, length), np.random.default_rng(1)

    def prompt() -> tuple[int, ...]:
        return tuple(rng.integers(0, VOCABULARY, size=length).tolist())

    old = prompt()
    (expected,) = engine.generate([Request(old, NEW)])
    computed, returned = [], []
    moved = engine.host_cache.num_returned
    for turn in range(turns + 1):  # the first one warms up
        (new,) = engine.generate([Request(prompt(), NEW)])
        (again,) = engine.generate([Request(old, NEW)])
        if again.chosen != expected.chosen or again.num_reused < length - BLOCK:
            raise SystemExit(f"{length} tokens: {again.num_reused} came back, or tokens differ")
        if turn:
            computed.append(first_token(new))
            returned.append(first_token(again))
    moved = (engine.host_cache.num_returned - moved) / (turns + 1)
    return {
        "kind": "row",
        "tokens": length,
        "turns": turns,
        "computed_s": float(np.median(computed)),
        "computed_spread": [float(q) for q in np.quantile(computed, [0.25, 0.75])],
        "returned_s": float(np.median(returned)),
        "returned_spread": [float(q) for q in np.quantile(returned, [0.25, 0.75])],
        "blocks_moved": moved,
        "mib_moved": moved * sum(engine.id_bytes.values()) / 2**20,
    }


HEADER = (
    f"{'tokens':>6} {'computed ms':>11} {'quartiles':>16} {'returned ms':>11} {'quartiles':>16} "
    f"{'ratio':>5} {'MiB moved':>9} {'busy':>5}"
)


def line(row: dict) -> str:
    """Format a row of the table."""

    def milliseconds(values: list[float]) -> str:
        return " .. ".join(f"{1e3 * value:.1f}" for value in values)

    return (
        f"{row['tokens']:>6} {1e3 * row['computed_s']:>11.1f} "
        f"{milliseconds(row['computed_spread']):>16} {1e3 * row['returned_s']:>11.1f} "
        f"{milliseconds(row['returned_spread']):>16} {row['computed_s'] / row['returned_s']:>5.1f} "
        f"{row['mib_moved']:>9.1f} {row['neighbours']:>5.1f}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and write every figure to `--json` if it is given."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.host_cache", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024], help="(%(default)s)")
    parser.add_argument("--turns", type=positive, default=5, help="(%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add_json(parser)
    options = parser.parse_args(arguments)
    model, neighbours = random_model(options.dtype), Neighbours([], patience=0)
    records.append(options.json, records.of_run(GEOMETRY, dtype=options.dtype))
    print(HEADER)
    for length in options.lengths:
        row, busy = neighbours.during(lambda n=length: measure(model, n, options.turns))
        row = {**row, "neighbours": busy}
        records.append(options.json, row)
        print(line(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
