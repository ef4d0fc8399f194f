"""Serving under load: throughput, time to the first token, time per token.

    python -m benchmarks.serving [--peer-python PYTHON]

Requests of one size arrive as a Poisson process at several rates, given as shares of what the
engine manages when all are there at once. Every rate is run with and without the prefix cache, on
prompts of which a part is the same for all. Before a figure is printed, each run's tokens are
compared with those the same requests got one at a time.

With `--peer-python`, a Python that has torch and transformers, transformers' `generate` serves
the same prompts in a process of its own, both sides in turn: all of them as one padded batch, and
one after another. Its tokens must be ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

import jattn
from benchmarks.neighbours import Neighbours
from benchmarks.timing import num_cores
from examples.engine.caches import group_layers
from examples.engine.engine import Engine
from examples.engine.model import load_model
from examples.engine.request import Request, Sequence
from examples.engine.scheduler import Limits

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "examples" / "checkpoints" / "gemma4-31b-tiny"


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked for."""

    num_requests: int = 64
    concurrent: int = 16  # sequences in a step, and requests given to the peer at once
    shared: int = 96  # tokens that all prompts begin with
    own: tuple[int, int] = (8, 64)  # further tokens, from and to
    new: int = 48  # tokens to generate
    seed: int = 0

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """The prompts, random tokens."""
        rng = np.random.default_rng(self.seed)
        shared = rng.integers(vocab_size, size=self.shared)
        lengths = rng.integers(*self.own, size=self.num_requests, endpoint=True)
        return [
            np.concatenate([shared, rng.integers(vocab_size, size=n)]).tolist() for n in lengths
        ]

    def arrivals(self, rate: float) -> np.ndarray:
        """Seconds at which requests arrive: gaps are exponential, `rate` per second."""
        rng = np.random.default_rng(self.seed + 1)
        return np.cumsum(rng.exponential(1 / rate, size=self.num_requests))


def build(load: Load, directory: Path, token_budget: int) -> Engine:
    """The engine under test."""
    model = load_model(directory, "float32")
    longest = load.shared + load.own[1] + load.new
    limits = Limits(group_layers(model.layers), load.concurrent, token_budget, 16, longest)
    return Engine(model, limits, quiet=False)


def run(engine: Engine, prompts: Iterable[list[int]], new: int, arrivals=None) -> list[Sequence]:
    """Serve prompts, each from the second it arrives at; None: all are there at once."""
    requests = [Request(tuple(prompt), new) for prompt in prompts]
    arrivals = np.zeros(len(requests)) if arrivals is None else arrivals
    sequences: list[Sequence] = []
    start = time.perf_counter()
    while len(sequences) < len(requests) or engine.has_work:
        now = time.perf_counter() - start
        while len(sequences) < len(requests) and arrivals[len(sequences)] <= now:
            sequence = engine.add(requests[len(sequences)])
            sequence.arrived = start + arrivals[len(sequences)]  # waiting for a step counts
            sequences.append(sequence)
        if engine.has_work:
            engine.step()
        else:
            time.sleep(max(0.0, arrivals[len(sequences)] - (time.perf_counter() - start)))
    engine.check_idle()
    return sequences


def measure(engine: Engine, sequences: list[Sequence]) -> dict[str, float]:
    """The figures of a run."""
    done = engine.statistics
    first = np.array([s.first_token - s.arrived for s in sequences]) * 1e3
    each = np.array(
        [(s.finished - s.first_token) / (len(s.chosen) - 1) for s in sequences if s.chosen[1:]]
    )
    seconds = max(s.finished for s in sequences) - min(s.arrived for s in sequences)
    return {
        "requests_per_s": len(sequences) / seconds,
        "tokens_per_s": sum(len(s.chosen) for s in sequences) / seconds,
        "first_ms": float(np.median(first)),
        "first_p99_ms": float(np.percentile(first, 99)),
        "each_ms": float(np.median(each)) * 1e3,
        "each_p99_ms": float(np.percentile(each, 99)) * 1e3,
        "reused": done.num_reused_tokens / done.num_prompt_tokens,
        "host_share": done.host_share,
    }


class Peer:
    """transformers in a process of its own."""

    def __init__(self, python: str, directory: Path):
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.peer_generate"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        self.info = self.ask(load=str(directory), threads=num_cores())

    def ask(self, **command) -> dict:
        """Send a command and wait for the answer.

        Raises:
          RuntimeError: the worker has ended, most likely for want of torch or transformers.
        """
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("the peer's process ended: it needs torch and transformers")
        return json.loads(line)

    def close(self) -> None:
        """End the worker."""
        self._process.stdin.close()
        self._process.wait()


def compare(engine: Engine, peer: Peer, load: Load, prompts: list[list[int]], turns: int) -> dict:
    """Both sides in turn on the same prompts, all there at once; medians of the turns.

    Beside the clock, CPU seconds of each side: they say more where others use the cores too.
    """
    prompts = prompts[: load.concurrent]
    names = ("ours", "batch", "single")
    seconds, cpu = ({name: [] for name in names} for _ in range(2))
    for turn in range(turns + 1):  # the first turn warms both sides up
        engine.reset(prefix_caching=False)  # the peer has none
        start, used = time.perf_counter(), time.process_time()
        sequences = run(engine, prompts, load.new)
        took = {"ours": (time.perf_counter() - start, time.process_time() - used)}
        for name, batch in (("batch", load.concurrent), ("single", 1)):
            answer = peer.ask(prompts=prompts, new=load.new, batch=batch)
            took[name] = answer["seconds"], answer["cpu"]
            same = np.mean(np.array(answer["tokens"]) == [s.chosen for s in sequences])
            if name == "single" and same < 1:
                raise SystemExit(f"only {same:.1%} of the peer's tokens are ours: no figures")
        for name, (by_clock, of_cores) in took.items():
            if turn:
                seconds[name].append(by_clock)
                cpu[name].append(of_cores)
    tokens = load.concurrent * load.new
    rates = {name: tokens / float(np.median(values)) for name, values in seconds.items()}
    spent = {name: float(np.median(values)) for name, values in cpu.items()}
    return {
        "kind": "peer",
        "concurrent": load.concurrent,
        "turns": turns,
        **{f"{name}_tokens_per_s": rate for name, rate in rates.items()},
        **{f"{name}_cpu_s": value for name, value in spent.items()},
        "ratio_to_batch": rates["ours"] / rates["batch"],
        "ratio_to_single": rates["ours"] / rates["single"],
        "cpu_ratio_to_batch": spent["batch"] / spent["ours"],
        "cpu_ratio_to_single": spent["single"] / spent["ours"],
        "host_share": engine.statistics.host_share,
    }


HEADER = (
    f"{'arrivals':>9} {'prefix cache':>12} {'req/s':>7} {'tok/s':>7} {'first ms':>9} {'p99':>8} "
    f"{'each ms':>8} {'p99':>7} {'reused':>7} {'host':>6} {'busy':>5}"
)


def line(row: dict) -> str:
    """A row of the table."""
    asked = "at once" if row["share"] is None else f"{row['share']:.0%}"
    return (
        f"{asked:>9} {'yes' if row['prefix_caching'] else 'no':>12} {row['requests_per_s']:>7.1f} "
        f"{row['tokens_per_s']:>7.0f} {row['first_ms']:>9.1f} {row['first_p99_ms']:>8.1f} "
        f"{row['each_ms']:>8.2f} {row['each_p99_ms']:>7.2f} {row['reused']:>7.0%} "
        f"{row['host_share']:>6.1%} {row['neighbours']:>5.1f}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and write every figure to `--json` if it is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="(%(default)s)")
    parser.add_argument("--requests", type=int, default=Load.num_requests, help="(%(default)s)")
    parser.add_argument("--concurrent", type=int, default=Load.concurrent, help="(%(default)s)")
    parser.add_argument("--token-budget", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--rates", type=float, nargs="*", default=[0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--peer-python", help="a Python with torch and transformers")
    parser.add_argument("--turns", type=int, default=5, help="with the peer (%(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the figures, a line each")
    options = parser.parse_args(arguments)

    load = Load(num_requests=options.requests, concurrent=options.concurrent)
    engine = build(load, options.model, options.token_budget)
    prompts = load.prompts(engine.model.vocab_size)
    neighbours = Neighbours([], patience=0)
    records = [
        {
            "kind": "run",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "checkpoint": engine.model.name,
            **dataclasses.asdict(load),
            "token_budget": options.token_budget,
            "cores": num_cores(),
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jattn": jattn.__version__,
            "device": jax.devices()[0].device_kind,
        }
    ]

    engine.reset(prefix_caching=False)
    alone = [run(engine, [prompt], load.new)[0].chosen for prompt in prompts]
    print(HEADER)
    capacity = None
    for share in [None, *options.rates]:
        for caching in (False, True):
            engine.reset(prefix_caching=caching)
            arrivals = None if share is None else load.arrivals(share * capacity)
            serve = lambda times=arrivals: run(engine, prompts, load.new, times)  # noqa: E731
            sequences, busy = neighbours.during(serve)
            wrong = sum(s.chosen != tokens for s, tokens in zip(sequences, alone, strict=True))
            if wrong:
                raise SystemExit(f"{wrong} requests got other tokens than alone: no figures")
            row = {"kind": "row", "share": share, "prefix_caching": caching}
            row |= {**measure(engine, sequences), "neighbours": busy}
            capacity = capacity or row["requests_per_s"]  # without the cache
            records.append(row)
            print(line(row), flush=True)
    if options.peer_python:
        peer = Peer(options.peer_python, options.model.resolve())
        records[0]["peer"] = peer.info
        result, busy = neighbours.during(
            lambda: compare(engine, peer, load, prompts, options.turns)
        )
        peer.close()
        records.append({**result, "neighbours_and_peer": busy})
        print(
            f"\n{load.concurrent} requests at once: {result['ours_tokens_per_s']:.0f} tokens/s; "
            f"transformers' generate as one batch {result['batch_tokens_per_s']:.0f} "
            f"(ratio {result['ratio_to_batch']:.1f}), one after another "
            f"{result['single_tokens_per_s']:.0f} (ratio {result['ratio_to_single']:.1f}); "
            f"by CPU time {result['cpu_ratio_to_batch']:.1f} and "
            f"{result['cpu_ratio_to_single']:.1f}; host {result['host_share']:.1%}"
        )
    if options.json:
        options.json.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main(sys.argv[1:])
