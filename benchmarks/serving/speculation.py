"""Measure speculative decoding: tokens a second with and without it, on the same requests.

    python -m benchmarks.serving.speculation [--drafts 4 8 8x2] [--requests 1 8] [--texts loop]

byte-gemma continues four texts. Under greedy decoding it repeats itself sooner or later (after
"loop" at once). At temperature 1 hardly any draft token is right, which shows what searching for
drafts costs. One engine serves the same requests with and without drafts, in turn: of two engines
built alike, one may be some percent faster. Such short runs differ by several percent from turn to
turn, so the benchmark also measures the time that the engine spends on guesses and decisions
(`own`). Before a figure is printed, the tokens of all runs are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from typing import Any

import jax
import numpy as np

from benchmarks.neighbours import Neighbours
from benchmarks.options import add_json, positive
from benchmarks.serving import records
from benchmarks.serving.__main__ import ROOT
from examples import native
from examples.engine.caches import group_layers
from examples.engine.drafts.speculation import read_speculation
from examples.engine.engine import Engine
from examples.engine.model import Model, load_model
from examples.engine.request import Request, Sampling, Sequence
from examples.engine.scheduler import Limits
from examples.engine.statistics import Statistics
from examples.engine.step import make_buckets

CHECKPOINT = ROOT / "examples" / "checkpoints" / "byte-gemma"
TEXTS = {
    "repetitive": "The cat sat on the mat. The dog sat on the log. " * 6,
    "prose": "The server reads a request, and then it writes the answer to the client, because",
    "loop": "".join(f"    self.assertEqual(value, {i})\n" for i in range(1, 9)),
    "code": "def first(values):\n    for value in values:\n        if value is not None:\n",
}


@dataclasses.dataclass(frozen=True)
class Load:
    """The requests of one load."""

    text: str
    temperature: float
    requests: int
    new: int = 256

    def requested(self) -> list[Request]:
        """Return the requests, each with a different seed."""
        prompt = tuple(TEXTS[self.text].encode())
        samplings = [Sampling(self.temperature, seed=i) for i in range(self.requests)]
        return [Request(prompt, self.new, sampling) for sampling in samplings]


class Timed:
    """A speculator that adds up the seconds it spends."""

    def __init__(self, speculator: Any):
        self._speculator, self.seconds = speculator, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._speculator, name)
        return functools.partial(self._timed, found) if callable(found) else found

    def _timed(self, function: Any, *given: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*given)
        finally:
            self.seconds += time.perf_counter() - start


def build(model: Model, requests: int, drafts: str) -> Engine:
    """Build an engine for `requests` at once, with drafts (8x2: 8 in 2 branches)."""
    longest = max(map(len, TEXTS.values())) + Load.new
    limits = Limits(group_layers(model.layers), requests, 128, 16, longest, prefix_caching=False)
    speculation = read_speculation(f"lookup={drafts}")
    trees = speculation.branches > 1
    buckets = make_buckets(limits, [requests], [128], speculation.num_drafts, trees)
    return Engine(model, limits, buckets=buckets, speculation=speculation)


def serve(engine: Engine, load: Load, *, drafts: bool) -> tuple[list[Sequence], float]:
    """Serve a load. Without drafts, the engine runs the same steps as one built without them.

    Returns:
      The finished sequences, and the share of the time that speculation took.
    """
    engine.reset()
    speculator, start = engine._speculator, time.perf_counter()
    engine._speculator = timed = Timed(speculator) if drafts else None
    try:
        sequences = engine.generate(load.requested())
    finally:
        engine._speculator = speculator
    return sequences, (timed.seconds if timed else 0.0) / (time.perf_counter() - start)


def rate(sequences: list[Sequence]) -> float:
    """Return the tokens a second after the first ones."""
    seconds = max(s.finished for s in sequences) - max(s.first_token for s in sequences)
    return sum(len(s.chosen) - 1 for s in sequences) / seconds


def measure(engines: dict[str, Engine], load: Load, turns: int) -> list[dict]:
    """Serve a load with every engine in turn, and return a row for each.

    Raises:
      SystemExit: the tokens of two runs differ.
    """
    rates: dict[tuple[str, bool], list[float]] = {
        (name, drafts): [] for name in engines for drafts in (False, True)
    }
    tokens: list[list[int]] | None = None
    done: dict[str, Statistics] = {}
    shares: dict[str, list[float]] = {name: [] for name in engines}
    order = np.random.default_rng(0)  # so that no engine always comes first or after the same one
    for turn in range(turns):
        names = order.permutation([*engines])
        for name, drafts in [(name, turn % 2 == each) for name in names for each in (0, 1)]:
            sequences, share = serve(engines[name], load, drafts=drafts)
            chosen = [sequence.chosen for sequence in sequences]
            if tokens not in (None, chosen):
                raise SystemExit(f"no figures: {load}: {name} drafts give other tokens")
            tokens = chosen
            rates[name, drafts].append(rate(sequences))
            if drafts:
                done[name] = engines[name].statistics
                shares[name].append(share)
    rows = []
    for name in engines:
        statistics = done[name]
        pairs = np.array(rates[name, True]) / np.array(rates[name, False])
        rows.append(
            {
                "kind": "row",
                **dataclasses.asdict(load),
                "drafts": name,
                "turns": turns,
                "plain_tokens_per_s": float(np.median(rates[name, False])),
                "tokens_per_s": float(np.median(rates[name, True])),
                "ratio": float(np.median(pairs)),
                "ratio_spread": [float(q) for q in np.quantile(pairs, [0.25, 0.75])],
                "own": float(np.median(shares[name])),
                "accepted_length": statistics.accepted_length,
                "drafted": statistics.num_drafted_chunks / statistics.num_new_tokens,
                "steps": statistics.num_steps,
            }
        )
    return rows


HEADER = (
    f"{'text':>10} {'temperature':>11} {'requests':>8} {'drafts':>6} {'plain tok/s':>11} "
    f"{'tok/s':>6} {'ratio':>5} {'quartiles':>11} {'own':>5} {'length':>6} {'steps':>5} {'busy':>5}"
)


def line(row: dict) -> str:
    """Format a row of the table."""
    low, high = row["ratio_spread"]
    return (
        f"{row['text']:>10} {row['temperature']:>11g} {row['requests']:>8} {row['drafts']:>6} "
        f"{row['plain_tokens_per_s']:>11.0f} {row['tokens_per_s']:>6.0f} {row['ratio']:>5.2f} "
        f"{f'{low:.2f} .. {high:.2f}':>11} {row['own']:>5.1%} {row['accepted_length']:>6.2f} "
        f"{row['steps']:>5} {row['neighbours']:>5.1f}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and write every figure to `--json` if it is given."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.speculation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--drafts", nargs="*", default=["4", "8", "8x2"], help="(%(default)s)")
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8], help="(%(default)s)")
    parser.add_argument("--texts", nargs="*", choices=TEXTS, default=[*TEXTS], help="(%(default)s)")
    parser.add_argument("--turns", type=positive, default=7, help="(%(default)s)")
    add_json(parser)
    options = parser.parse_args(arguments)
    if jax.default_backend() == "cpu" and (reason := native.load()):
        print(f"XLA computes the products with weights: {reason}")
    model, neighbours = load_model(CHECKPOINT, join=True), Neighbours([], patience=0)
    records.append(options.json, records.of_run(model.name))
    print(HEADER)
    for requests in options.requests:
        engines = {drafts: build(model, requests, drafts) for drafts in options.drafts}
        for temperature in (0.0, 1.0):  # warm up
            measure(engines, Load("prose", temperature, requests), 1)
        for text in options.texts:
            for temperature in (0.0, 1.0):
                load = Load(text, temperature, requests)
                rows, busy = neighbours.during(
                    lambda load=load, engines=engines: measure(engines, load, options.turns)
                )
                for row in rows:
                    row["neighbours"] = busy
                    records.append(options.json, row)
                    print(line(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
