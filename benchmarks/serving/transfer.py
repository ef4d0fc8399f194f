"""Compare moving a prompt's keys and values from a prefill server with computing them here.

    python -m benchmarks.serving.transfer [--model DIRECTORY] [--tokens 128 512 960]

Starts `python -m examples.engine.serve --role prefill` in a separate process and sends it prompts
of random tokens, one at a time. Before a row is printed, the tokens that follow are compared with
those of an engine that read the prompt itself.

    here     this engine reads the prompt                            with a cold prefix cache
    there    the other server does: its answer to `offer`            reading, taking, checksum
    fetch    bytes through a socket into arrays, and their checksum
    put      arrays into blocks of this engine's caches
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

import jax
import numpy as np

from benchmarks.cpu import tables
from benchmarks.neighbours import Neighbours
from benchmarks.options import add_json, positive
from benchmarks.serving import records, servers
from examples.engine import serve
from examples.engine.engine import Engine
from examples.engine.request import Request, Sequence
from examples.engine.transfer.contents import Contents
from examples.engine.transfer.description import describe
from examples.engine.transfer.remote import Connection, PrefillServer

NEW = 8  # tokens that are compared
SECONDS = 120.0  # for one prompt


def put(engine: Engine, sequence: Sequence) -> float:
    """Return the seconds it takes only to put a sequence's contents into the caches."""
    start = time.perf_counter()
    engine.caches = engine.transfer.put(engine.caches, sequence)
    jax.block_until_ready(engine.caches)
    return time.perf_counter() - start


def measure(engine: Engine, server: PrefillServer, num_tokens: int, turns: int) -> dict:
    """Measure prompts of one length, and return the row.

    Raises:
      SystemExit: the tokens differ.
    """
    rng = np.random.default_rng(num_tokens)
    seconds: dict[str, list[float]] = {"here": [], "there": [], "fetch": [], "put": []}
    nbytes = engine.transfer.nbytes(num_tokens)
    for turn in range(turns + 1):  # the first one warms up
        prompt = tuple(rng.integers(engine.model.vocab_size, size=num_tokens + 1).tolist())
        with Connection(server) as connection:
            marks = [time.perf_counter()]
            offered = connection.offer(prompt[:-1])
            marks.append(time.perf_counter())
            contents: Contents = engine.transfer.empty(num_tokens)
            connection.fetch(offered["id"], contents)
            right = contents.checksum == offered["crc32"]
            marks.append(time.perf_counter())
            connection.release(offered["id"])
        engine.reset()
        # The same calls as `Engine.step` makes, with a clock around one of them.
        sequence = engine.add(Request(prompt, NEW), contents)
        engine.scheduler._admit()
        putting = put(engine, sequence)
        while engine.has_work:
            engine.step()
        engine.reset()
        start = time.perf_counter()
        engine.generate([Request(prompt[:-1], 1)])
        here = time.perf_counter() - start
        engine.reset()
        (alone,) = engine.generate([Request(prompt, NEW)])
        if not right or alone.chosen != sequence.chosen:
            raise SystemExit(f"{num_tokens} tokens: those that follow differ: no figures")
        if turn:
            values = here, marks[1] - marks[0], marks[2] - marks[1], putting
            for name, value in zip(seconds, values, strict=True):
                seconds[name].append(value)
    moved = np.array(seconds["fetch"]) + np.array(seconds["put"])
    return {
        "kind": "row",
        "tokens": num_tokens,
        "turns": turns,
        "bytes": nbytes,
        **{f"{name}_ms": 1e3 * float(np.median(values)) for name, values in seconds.items()},
        "moved_ms": 1e3 * float(np.median(moved)),
        "moved_spread_ms": [1e3 * float(q) for q in np.quantile(moved, [0.25, 0.75])],
        "share": float(np.median(moved / np.array(seconds["here"]))),
    }


HEADER = (
    f"{'tokens':>6} {'KiB/token':>9} {'MiB':>6} {'here ms':>8} {'there ms':>8} {'fetch ms':>8} "
    f"{'put ms':>6} {'fetch+put quartiles':>19} {'share':>6} {'GB/s':>5} {'busy':>4}"
)


def line(row: dict) -> str:
    """Format a row; `share` is the time to fetch and put, relative to reading the prompt here."""
    low, high = row["moved_spread_ms"]
    return (
        f"{row['tokens']:>6} {row['bytes'] / row['tokens'] / 1024:>9.1f} "
        f"{row['bytes'] / 2**20:>6.2f} {row['here_ms']:>8.1f} {row['there_ms']:>8.1f} "
        f"{row['fetch_ms']:>8.2f} {row['put_ms']:>6.2f} {f'{low:.2f} .. {high:.2f}':>19} "
        f"{row['share']:>6.1%} {row['bytes'] / row['moved_ms'] / 1e6:>5.2f} "
        f"{row['neighbours']:>4.1f}"
    )


def page_table(rows: Iterable[dict]) -> str:
    """Write the table of docs/disaggregation.md: a line for each length."""
    heads = ["tokens", "KiB a token", "prefill here", "prefill server's response", "fetch"]
    lines = [[*heads, "put", "fetch and put, of prefill here"]]
    for row in rows:
        times = (f"{row[f'{name}_ms']:,.0f} ms" for name in ("here", "there", "fetch", "put"))
        each = f"{row['bytes'] / row['tokens'] / 1024:.0f}"
        lines.append([str(row["tokens"]), each, *times, f"{100 * row['share']:.0f} %"])
    return tables.markdown(lines)


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and write every figure to `--json` if it is given."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.transfer", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="byte-gemma", help="(%(default)s)")
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 512, 960])
    parser.add_argument("--token-budget", type=int, default=256, help="(%(default)s)")
    parser.add_argument("--turns", type=positive, default=5, help="(%(default)s)")
    add_json(parser)
    options = parser.parse_args(arguments)
    shared = ["--model", options.model, "--token-budget", str(options.token_budget)]
    shared += ["--max-seqs", "4", "--max-len", str(max(options.tokens) + NEW + 1)]
    neighbours = Neighbours([], patience=60)  # until the other server has also compiled
    shared += ["--no-prefix-cache"]
    port = servers.free_port()
    command = [sys.executable, "-m", "examples.engine.serve", "--role", "prefill"]
    command += ["--port", str(port), *shared]
    with servers.Server(command, port, PYTHONPATH=str(servers.ROOT)) as other:
        given = serve.options_parser().parse_args(shared)
        engine, *_ = serve.build(given)
        while engine.steps.num_coming:
            time.sleep(0.1)
        description = describe(engine.model, engine.transfer, engine.caches)
        url = f"http://127.0.0.1:{port}"
        server = PrefillServer(url, engine.transfer, description, seconds=SECONDS)
        other.wait()
        server.check()
        run = records.of_run(engine.model.name, dtype=engine.model.dtype)
        records.append(options.json, run)
        print(HEADER)
        for num_tokens in options.tokens:
            row, busy = neighbours.during(
                lambda n=num_tokens: measure(engine, server, n, options.turns)
            )
            row = {**row, "neighbours": busy}
            records.append(options.json, row)
            print(line(row), flush=True)
        engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
