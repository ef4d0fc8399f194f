"""Measure serving under load: throughput, time to the first token, time per token.

    python -m benchmarks.serving [--peer-python PYTHON]

Requests of one size arrive as a Poisson process at several rates, given as shares of the rate that
the engine manages when all requests are there at once. Every rate is run with and without the
prefix cache, on prompts that share a prefix. Before a figure is printed, each run's tokens are
compared with those of the same requests served one at a time.

With `--peer-python`, a Python that has torch and transformers, transformers serves the same prompts
in a separate process, in turn with the engine: one after another, as one padded batch, and by its
continuous batching if no layer has a window. In float32 its tokens must equal the engine's.

    python -m benchmarks.serving --peer-python PYTHON --geometry qwen3-0.6b-8-layers

makes a temporary checkpoint of random weights with a real model's layers and only compares with
transformers, on prompts and outputs of different lengths that share nothing.

    python -m benchmarks.serving --list

lists the other benchmarks of serving: over HTTP, with speculative decoding, with a mesh...
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

from benchmarks.neighbours import Neighbours
from benchmarks.options import add_json, positive
from benchmarks.serving import peer as serving_peer
from benchmarks.serving import records
from examples import native
from examples.engine.caches import group_layers
from examples.engine.engine import Engine
from examples.engine.model import load_model
from examples.engine.request import Request, Sequence
from examples.engine.scheduler import Limits

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "examples" / "checkpoints" / "gemma4-31b-tiny"


@dataclasses.dataclass(frozen=True)
class Load:
    """The requests of a run."""

    num_requests: int = 64
    concurrent: int = 16  # sequences in a step, and concurrent requests to the peer
    shared: int = 96  # tokens that all prompts begin with
    own: tuple[int, int] = (8, 64)  # further tokens, from and to
    new: int | tuple[int, int] = 48  # tokens to generate, or from and to
    seed: int = 0

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return the prompts, random tokens."""
        rng = np.random.default_rng(self.seed)
        shared = rng.integers(vocab_size, size=self.shared)
        lengths = rng.integers(*self.own, size=self.num_requests, endpoint=True)
        return [
            np.concatenate([shared, rng.integers(vocab_size, size=n)]).tolist() for n in lengths
        ]

    @property
    def outputs(self) -> list[int]:
        """Return how many tokens each request asks for."""
        least, most = (self.new, self.new) if isinstance(self.new, int) else self.new
        rng = np.random.default_rng(self.seed + 2)
        return rng.integers(least, most, size=self.num_requests, endpoint=True).tolist()

    def arrivals(self, rate: float) -> np.ndarray:
        """Return the seconds at which requests arrive, with exponential gaps, `rate` per second."""
        rng = np.random.default_rng(self.seed + 1)
        return np.cumsum(rng.exponential(1 / rate, size=self.num_requests))


def build(load: Load, directory: Path, token_budget: int, dtype: str = "float32") -> Engine:
    """Build the engine under test, with the server's matrix products."""
    if jax.default_backend() == "cpu" and (reason := native.load()):
        print(f"XLA computes the products with weights: {reason}")
    model = load_model(directory, dtype, join=True)
    longest = load.shared + load.own[1] + max(load.outputs)
    limits = Limits(group_layers(model.layers), load.concurrent, token_budget, 16, longest)
    return Engine(model, limits, quiet=False)


def run(
    engine: Engine, prompts: Iterable[list[int]], new: int | Iterable[int], arrivals=None
) -> list[Sequence]:
    """Serve prompts, each from the second it arrives at; None: all are there at once.

    `new` is how many tokens to generate, for all prompts or for each.
    """
    new = itertools.repeat(new) if isinstance(new, int) else new
    requests = [Request(tuple(prompt), count) for prompt, count in zip(prompts, new, strict=False)]
    arrivals = np.zeros(len(requests)) if arrivals is None else arrivals
    sequences: list[Sequence] = []
    start = time.perf_counter()
    while len(sequences) < len(requests) or engine.has_work:
        now = time.perf_counter() - start
        while len(sequences) < len(requests) and arrivals[len(sequences)] <= now:
            sequence = engine.add(requests[len(sequences)])
            sequence.arrived = start + arrivals[len(sequences)]  # the wait for a step counts
            sequences.append(sequence)
        if engine.has_work:
            engine.step()
        else:
            time.sleep(max(0.0, arrivals[len(sequences)] - (time.perf_counter() - start)))
    engine.check_idle()
    return sequences


def measure(engine: Engine, sequences: list[Sequence]) -> dict[str, float]:
    """Return the figures of a run."""
    done = engine.statistics
    times = [(s.arrived, s.first_token, s.finished, len(s.chosen)) for s in sequences]
    return {
        **records.rates(times),
        "reused": done.num_reused_tokens / done.num_prompt_tokens,
        "host_share": done.host_share,
    }


HEADER = (
    f"{'arrivals':>9} {'prefix cache':>12} {'req/s':>7} {'tok/s':>7} {'first ms':>9} {'p99':>8} "
    f"{'each ms':>8} {'p99':>7} {'reused':>7} {'host':>6} {'busy':>5}"
)


def line(row: dict) -> str:
    """Format a row of the table."""
    asked = "at once" if row["share"] is None else f"{row['share']:.0%}"
    return (
        f"{asked:>9} {'yes' if row['prefix_caching'] else 'no':>12} {row['requests_per_s']:>7.1f} "
        f"{row['tokens_per_s']:>7.0f} {row['first_ms']:>9.1f} {row['first_p99_ms']:>8.1f} "
        f"{row['each_ms']:>8.2f} {row['each_p99_ms']:>7.2f} {row['reused']:>7.0%} "
        f"{row['host_share']:>6.1%} {row['neighbours']:>5.1f}"
    )


def compare(engine: Engine, peer: serving_peer.Peer, load: Load, turns: int) -> dict:
    """Compare both contenders on as many requests as run at once."""
    prompts = load.prompts(engine.model.vocab_size)[: load.concurrent]
    new = load.outputs[: load.concurrent]

    def serve() -> list[list[int]]:
        engine.reset(prefix_caching=False)  # the peer has no prefix cache
        return [sequence.chosen for sequence in run(engine, prompts, new)]

    is_paged = all(cache.window is None for cache in engine.model.layers.values())
    ways = [way for way in serving_peer.WAYS if is_paged or way != "continuous"]
    exact = engine.model.dtype == "float32"
    result = serving_peer.compare(serve, peer, prompts, new, ways, turns, exact=exact)
    print("\n" + serving_peer.summary(result, engine.statistics.host_share))
    return {**result, "host_share": engine.statistics.host_share}


def serve_rates(
    engine: Engine, load: Load, rates: Iterable[float], neighbours: Neighbours
) -> list[dict]:
    """Write the table: all requests at once, then rates that are shares of that throughput."""
    prompts = load.prompts(engine.model.vocab_size)
    engine.reset(prefix_caching=False)
    alone = [
        run(engine, [prompt], new)[0].chosen
        for prompt, new in zip(prompts, load.outputs, strict=True)
    ]
    print(HEADER)
    capacity, records = None, []
    for share in [None, *rates]:
        for caching in (False, True):
            engine.reset(prefix_caching=caching)
            arrivals = None if share is None else load.arrivals(share * capacity)
            serve = lambda times=arrivals: run(engine, prompts, load.outputs, times)  # noqa: E731
            sequences, busy = neighbours.during(serve)
            wrong = sum(s.chosen != tokens for s, tokens in zip(sequences, alone, strict=True))
            if wrong:
                raise SystemExit(
                    f"no figures: {wrong} requests got other tokens than when served alone"
                )
            row = {"kind": "row", "share": share, "prefix_caching": caching}
            row |= {**measure(engine, sequences), "neighbours": busy}
            capacity = capacity or row["requests_per_s"]  # without the cache
            records.append(row)
            print(line(row), flush=True)
    return records


def commands() -> dict[str, str]:
    """Return every benchmark of serving: its command, and the first line of its docstring."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        if command := re.search(r"^ +(python -m benchmarks\.serving[\w.]*)", text, re.M):
            found[command[1]] = text.splitlines()[0]
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and write every figure to `--json` if it is given."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="a checkpoint directory")
    parser.add_argument(
        "--geometry",
        choices=serving_peer.GEOMETRIES,
        help="compare on random weights of this shape instead",
    )
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="(%(default)s)"
    )
    parser.add_argument("--requests", type=int, default=Load.num_requests, help="(%(default)s)")
    parser.add_argument("--concurrent", type=int, default=Load.concurrent, help="(%(default)s)")
    parser.add_argument("--token-budget", type=int, default=128, help="(%(default)s)")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="*",
        default=[0.25, 0.5, 0.75, 1.0],
        help="shares of the capacity (%(default)s)",
    )
    parser.add_argument("--peer-python", help="a Python with torch and transformers")
    parser.add_argument("--turns", type=positive, default=5, help="with the peer (%(default)s)")
    add_json(parser)
    parser.add_argument("--list", action="store_true", help="list the benchmarks of serving")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{command}\n    {words}" for command, words in commands().items()))
        return
    if options.geometry and not options.peer_python:
        parser.error("--geometry needs --peer-python, because transformers makes the checkpoint")

    peer = serving_peer.Peer(options.peer_python) if options.peer_python else None
    load = Load(num_requests=options.requests, concurrent=options.concurrent)
    if options.geometry:
        load = Load(options.concurrent, options.concurrent, shared=0, own=(16, 96), new=(16, 48))
    neighbours = Neighbours([], patience=0)
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made) if options.geometry else options.model.resolve()
        if options.geometry:
            peer.make(options.geometry, directory)
        engine = build(load, directory, options.token_budget, options.dtype)
        versions = peer.load(directory, options.dtype) if peer else None
    run = records.of_run(
        options.geometry or engine.model.name,
        dtype=options.dtype,
        **dataclasses.asdict(load),
        token_budget=options.token_budget,
        device=jax.devices()[0].device_kind,
    )
    records.append(options.json, {**run, "peer": versions} if peer else run)
    if not options.geometry:
        records.append(options.json, *serve_rates(engine, load, options.rates, neighbours))
    if peer:
        result, busy = neighbours.during(lambda: compare(engine, peer, load, options.turns))
        peer.close()
        records.append(options.json, {**result, "neighbours_and_peer": busy})


if __name__ == "__main__":
    main(sys.argv[1:])
