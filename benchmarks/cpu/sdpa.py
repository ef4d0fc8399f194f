"""Compare prefill with torch's `scaled_dot_product_attention` on contiguous keys.

    python -m benchmarks.cpu.sdpa --peer-python PYTHON [--filter REGEX] [--repeat N] [--json FILE]

PYTHON has torch. The workloads are the single-sequence causal prefills of `benchmarks.cpu`: jattn
reads its keys through a block table, torch from one array. Both results are checked against float64
before they are timed, in turn and on cold keys. The columns are those of `benchmarks.cpu`, with
torch's times instead of vLLM's.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from benchmarks import ceilings, oracle, workloads
from benchmarks.cpu import report, tables
from benchmarks.cpu.__main__ import measure
from benchmarks.cpu.peer_vllm import Peer
from benchmarks.machine import run_record
from benchmarks.neighbours import Neighbours
from benchmarks.options import add_json, positive
from benchmarks.serving.records import append
from benchmarks.workloads import Workload

HEADER = report.HEADER.replace("vLLM ms", "torch ms")


class Sdpa(Peer):
    """A worker process with torch. It is a `Contender` once a workload is prepared."""

    def __init__(self, python: str):
        super().__init__(python, "benchmarks.cpu.sdpa_worker")


def prefills(pattern: str = "") -> list[Workload]:
    """Return the workloads: with as many KV heads as query heads, and with a quarter as many."""
    suite = (w for w in workloads.suite() if w.group == "prefill" and w.num_kv_heads in (16, 4))
    return [w for w in suite if re.search(pattern, w.name)]


def table(rows: Sequence[dict]) -> str:
    """Write torch's time over jattn's: a line for each dtype and number of KV heads."""
    sizes = sorted({row["head_dim"] for row in rows})
    lines = [["dtype", "KV heads", *(f"D={size}" for size in sizes)]]
    found = {(row["dtype"], row["num_kv_heads"], row["head_dim"]): row for row in rows}
    for dtype, kv_heads in dict.fromkeys((dtype, kv_heads) for dtype, kv_heads, _ in found):
        cells = [f"{found[dtype, kv_heads, size]['ratio']:.2f}" for size in sizes]
        lines.append([dtype, str(kv_heads), *cells])
    return tables.markdown(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.sdpa", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--peer-python", required=True, metavar="PYTHON", help="has torch")
    parser.add_argument("--filter", default="", metavar="REGEX", help="only matching workloads")
    parser.add_argument(
        "--repeat", type=positive, default=9, metavar="N", help="turns (%(default)s)"
    )
    add_json(parser)
    args = parser.parse_args(arguments)
    chosen = prefills(args.filter)
    if not chosen:
        print(f"no workload matches {args.filter!r}", file=sys.stderr)
        return 2
    with Sdpa(args.peer_python) as peer:
        limits, details = ceilings.measure(peer.matrix_rate)
        append(args.json, run_record(peer=peer.info, ceilings=details))
        print(f"{limits}\n\n{HEADER}", flush=True)
        neighbours = Neighbours([peer.cpu_seconds], patience=0)
        rows = []
        for w in chosen:
            try:
                row = measure(w, limits=limits, peer=peer, neighbours=neighbours, turns=args.repeat)
            except oracle.WrongResultError as error:
                print(f"{w.name}: not timed: {error}", file=sys.stderr)
                return 1
            rows.append(row)
            append(args.json, row.as_json())
            print(row.line(), flush=True)
    print("\n".join(report.summarize(rows).lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
