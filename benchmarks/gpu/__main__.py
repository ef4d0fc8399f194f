"""Test jattn's GPU kernels on this GPU, then time them against ceilings and peers.

    python -m benchmarks.gpu [--part matrix ceilings decode prefill peers] [--filter REGEX]
                             [--implementation NAME ...] [--peers NAME ...] [--block-size S]
                             [--layers] [--out DIR] [--minutes N] [--resume DIR]
    python -m benchmarks.gpu --dry-run [--sm 90]

First the test matrix of every implementation that can run here, with the ids it has on a CPU. Then,
for every workload of `benchmarks.gpu.workloads`: random data in shuffled blocks, sampled rows
checked against float64, and only then the time of a call. That is the median of several loops over
copies of the tables that share no block, so that keys come from memory and not from L2. Ceilings
are measured first, in the same run. Peers (`benchmarks.gpu.peers`) get the same data, check and
loops; one that does not run says why. A failure does not end the run, except a lost device; a hang
is recorded and ends it. `--resume DIR` continues from the files in DIR.

`--dry-run` needs no GPU: it lists what would run, with the time that the described GPU's data-sheet
bandwidth allows, which peers would run and why the others would not, and compiles every workload
for that GPU.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.gpu import data as gpu_data
from benchmarks.gpu import kernels as gpu_kernels
from benchmarks.gpu import matrix as gpu_matrix
from benchmarks.gpu import peers as gpu_peers
from benchmarks.gpu import session as gpu_session
from benchmarks.gpu import timing as gpu_timing
from benchmarks.gpu import tune as gpu_tune
from benchmarks.gpu import workloads as gpu_workloads
from benchmarks.gpu.data import Data
from benchmarks.gpu.rows import HEADER, Ceilings, Row, make_row, measure_ceilings
from benchmarks.gpu.session import Lines
from benchmarks.workloads import Workload, flops
from jattn.pallas import machine

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")
PARTS = ("matrix", "ceilings", "decode", "prefill", "peers")
TUNE = "tune"  # only on request: dozens of kernels for each workload
PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "torch", "vllm", "flashinfer-python")


# --- On the device --------------------------------------------------------------------------------


def attend(w: Workload, data: Data, implementation: str | None, table: Any) -> Any:
    """Run one call of jattn."""
    import jattn

    return jattn.paged_attention(
        **gpu_data.arguments(w, data, table), implementation=implementation
    )


def measure(
    w: Workload,
    implementation: str,
    data: Data,
    limits: Ceilings,
    want: np.ndarray,
    layers: bool = False,
) -> Row | str:
    """Return a checked and timed row, or why there is none.

    Args:
      w, implementation, data, limits: what runs, with which kernels, on which data, and ceilings.
      want: the result of `gpu_data.expected_rows`.
      layers: whether calls share lengths, like a model's layers; see `split`.
    """
    import jattn

    try:
        with gpu_tune.chosen(implementation, w, machine.here()) as name:
            out = attend(w, data, name, data.tables[0])
            have = np.asarray(out[np.asarray(gpu_data.sampled_tokens(w))])
            del out
            if found := gpu_data.wrong_rows(w, want, have):
                return f"WRONG: {'; '.join(found)}"
            seconds, timed, kernels = time_calls(w, data, name, repeats(w, data, limits), layers)
    except jattn.UnsupportedError as error:
        return str(error)
    except Exception as error:  # no memory, a kernel that does not compile: others continue
        return f"FAILED: {gpu_session.first_line(error)}"
    return make_row(w, implementation, seconds, limits, timed, kernels)


def time_calls(
    w: Workload, data: Data, implementation: str, repeats: int, layers: bool = False
) -> tuple[list[float], str, gpu_kernels.KernelTimes | None]:
    """Return several timings of a call in seconds, how it was timed, and its kernels' times."""
    if implementation == "xla":  # a chain of 32 calls would take minutes to compile
        seconds = gpu_timing.time_loop(
            lambda data, table: attend(w, data, implementation, table),
            data,
            data.tables,
            repeats=repeats,
        )
        return seconds, gpu_timing.LOOP, None

    chain, given = chain_of(w, implementation), split(data, layers)
    seconds = gpu_timing.time_chain(chain, *given, repeats=repeats)
    timed = gpu_timing.LAYERS if layers else gpu_timing.GRAPH
    return seconds, timed, gpu_kernels.measure(chain, given, len(data.tables))


def chain_of(w: Workload, implementation: str) -> Any:
    """Jit a call on each copy, one after another, for `chain(*split(data))`."""
    import jax

    def step(query: Any, data: Data, copy: dict[str, Any]) -> Any:
        data = data._replace(query=query, **copy)
        return attend(w, data, implementation, data.tables)

    return jax.jit(gpu_timing.chain_of(step))


def split(data: Data, layers: bool = False) -> tuple[Any, Data, list[dict[str, Any]]]:
    """Split data into the query, the pools, and what differs between calls.

    Each call gets a separate table, because slicing one out would launch another kernel. Each call
    also gets separate lengths; otherwise XLA would share between calls whatever depends only on
    lengths. With `layers` it does: all calls have the same lengths, as a step's layers do.
    """
    per_call = {} if layers else {"seq_lens": data.seq_lens, "starts": data.starts}
    rest = data._replace(query=None, tables=None, **dict.fromkeys(per_call))
    return data.query, rest, [{"tables": table, **per_call} for table in data.tables]


def repeats(w: Workload, data: Data, limits: Ceilings) -> int:
    """Return how often a loop goes over the copies of `data`."""
    least, _ = gpu_workloads.floor(w, limits.read, limits.matrix)
    return gpu_timing.repeats_for(least, len(data.tables))


# --- The command ----------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--part", nargs="+", choices=(*PARTS, TUNE), default=PARTS, help="default: all but tune"
    )
    parser.add_argument("--filter", default="", metavar="REGEX", help="only matching workloads")
    parser.add_argument("--implementation", nargs="+", choices=IMPLEMENTATIONS, default=None)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--layers", action="store_true", help="all calls have the same lengths and share one plan"
    )
    parser.add_argument("--peers", nargs="*", choices=gpu_peers.NAMES, default=gpu_peers.NAMES)
    parser.add_argument("--peer-python", metavar="PYTHON", help="with torch; default: this one")
    parser.add_argument("--vllm-kernels", metavar="DIR", help="the files of vLLM's kernel")
    parser.add_argument("--out", metavar="DIR", help="write JSON lines there as they are measured")
    parser.add_argument("--minutes", type=float, default=9, help="start nothing after that")
    parser.add_argument("--resume", metavar="DIR", help="skip what files in DIR answer")
    parser.add_argument("--dry-run", action="store_true", help="list and compile; needs no GPU")
    parser.add_argument("--sm", type=int, default=90, help="what to compile for in a dry run")
    return parser.parse_args(arguments)


def dry_run(
    chosen: Sequence[Workload],
    implementations: Sequence[str],
    sm: int,
    found: gpu_peers.Found,
    names: Sequence[str],
    tune: bool,
) -> int:
    """List the workloads with their peers and compile each; return 1 if one does not compile."""
    import jattn
    from benchmarks.gpu import targets as gpu_targets

    rate = gpu_targets.GPUS[sm].bandwidth * 1e9
    gpu = gpu_targets.GPUS[sm].machine
    failed = False
    for w in chosen:
        least = gpu_workloads.moved_bytes(w) / rate * 1e6
        print(
            f"{w.name:<52} {flops(w) / 1e9:>8.1f} GFLOP {gpu_workloads.moved_bytes(w) / 1e6:>8.1f} "
            f"MB, at least {least:.1f} us by the data sheet's bandwidth"
        )
        for peer, why in gpu_peers.listed(found, w, names):
            print(f"  peer {peer.name}: {why or 'would run'}")
        data = gpu_data.described(w)
        for name in (*implementations, *(gpu_tune.names(w, gpu) if tune else ())):
            try:
                lines = compiled(w, name, data, gpu)
            except jattn.UnsupportedError as error:
                lines = [str(error)]
            except Exception as error:
                failed |= not gpu_tune.is_candidate(name)
                lines = [f"does not compile: {str(error)[:200]}"]
            for line in lines:
                print(f"  {name}: {line}", flush=True)
    return int(failed)


def compiled(w: Workload, name: str, data: Data, gpu: machine.Machine) -> list[str]:
    """Compile for a described GPU, and return what one implementation's kernels use."""
    from benchmarks.gpu import report as gpu_report

    with gpu_tune.chosen(name, w, gpu) as implementation:

        def call(*arrays: Any) -> Any:
            given = Data(*arrays)
            return attend(w, given, implementation, given.tables)

        # Mosaic GPU's kernels exist only once XLA has compiled the module.
        kernels = gpu_report.report(call, *data, sm=gpu.sm, xla=implementation != "triton")
    return [
        f"{k.name} {k.registers} registers, {k.spill_bytes} bytes spilled, {k.shared} shared, "
        f"{k.blocks_per_core} a core"
        for k in kernels
    ]


def report(w: Workload, found: Iterable[tuple[str, Row | str]], lines: Lines) -> bool:
    """Print and write results as they come; return whether one of ours was wrong."""
    wrong = False
    for name, row in found:
        if isinstance(row, Row):
            lines.write(kind="row", **asdict(row))
            print(row.line(), flush=True)
        else:
            # Tiles that do not fit a GPU are a result; a wrong result is wrong with any tiles.
            wrong |= row.startswith("WRONG" if gpu_tune.is_candidate(name) else ("WRONG", "FAILED"))
            lines.write(kind="none", name=w.name, implementation=name, why=row)
            print(f"{w.name:<52} {name:<14} {row.splitlines()[-1]}", flush=True)
    return wrong


def ours(
    w: Workload,
    names: Sequence[str],
    data: Data,
    limits: Ceilings,
    want: np.ndarray,
    layers: bool,
) -> Iterable[tuple[str, Row | str]]:
    """Yield the results of each implementation of jattn on `w`."""
    for name in names:
        yield name, measure(w, name, data, limits, want, layers)


def theirs(
    w: Workload,
    listed: Iterable[tuple[gpu_peers.Peer, str | None]],
    data: Data,
    limits: Ceilings,
    want: np.ndarray,
    worker: gpu_peers.Worker,
) -> Iterable[tuple[str, Row | str]]:
    """Yield the results of each peer on `w`, or why it does not run."""
    for peer, why in listed:
        found = why or gpu_peers.measure(peer, w, data, want, worker, repeats(w, data, limits))
        if isinstance(found, str):
            yield peer.name, found
        else:
            seconds, timed = found
            yield peer.name, make_row(w, peer.name, seconds, limits, timed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if something is wrong, 2 if there is nothing to do, 3 if something is left."""
    began = time.monotonic()
    args = parse(arguments)
    groups = {"decode", "prefill"} & set(args.part) or {"decode", "prefill"}
    chosen = [
        w
        for w in gpu_workloads.suite(args.block_size)
        if re.search(args.filter, w.name) and w.group in groups
    ]
    if not chosen:
        print(f"no workload is named like {args.filter!r}", file=sys.stderr)
        return 2
    found = gpu_peers.find(args.peer_python, args.vllm_kernels)
    if args.dry_run:
        if "matrix" in args.part:
            print("the matrix:", *gpu_matrix.command(args.implementation or IMPLEMENTATIONS)[1:])
        if set(args.part) <= {"matrix", "ceilings"}:
            return 0
        wanted = args.implementation or ("triton",)
        return dry_run(chosen, wanted, args.sm, found, args.peers, TUNE in args.part)
    share_the_memory()
    import jax

    import jattn
    from benchmarks.gpu import targets as gpu_targets

    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"this is {device.platform}, not a GPU; --dry-run needs none", file=sys.stderr)
        return 2
    implementations = args.implementation or IMPLEMENTATIONS
    status = 0
    if "matrix" in args.part:
        left = 60 * args.minutes - (time.monotonic() - began)
        status = gpu_matrix.run(implementations, left, args.out, args.resume)
        if set(args.part) == {"matrix"}:
            return status
    lines = Lines(args.out, args.part)
    session = gpu_session.Session(60 * args.minutes - (time.monotonic() - began), lines)
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "jattn": jattn.__version__,
        **versions(PACKAGES),
    }
    print("  ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    with session.watched("ceilings", "xla"):
        limits = measure_ceilings(machine.here())
    lines.write(kind="run", **facts, **asdict(limits))
    print(
        f"read {limits.read / 1e12:.2f} TB/s by {limits.reader}, "
        f"matrix {limits.matrix / 1e12:.0f} TFLOP/s"
    )
    if set(args.part) <= {"matrix", "ceilings"}:
        return int(bool(status))
    print(HEADER, flush=True)
    sm = int(10 * float(device.compute_capability))
    l2 = getattr(gpu_targets.GPUS.get(sm), "l2", 64 << 20)
    gpu = machine.here()
    done = measure_all(chosen, args, implementations, found, limits, session, l2, gpu)
    return done or int(bool(status))


def share_the_memory() -> None:
    """Limit JAX's memory before it starts, because the matrix and the peers use the GPU too.

    JAX never returns memory to the GPU, so it takes at most half, and the peers' worker at most
    `gpu_peers.SHARE`.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")


def measure_all(
    chosen: Sequence[Workload],
    args: argparse.Namespace,
    implementations: Sequence[str],
    found: gpu_peers.Found,
    limits: Ceilings,
    session: gpu_session.Session,
    l2_bytes: int,
    gpu: machine.Machine,
) -> int:
    """Measure every workload with ours and the peers, in the time given; return the status."""
    known = gpu_session.answered(args.resume)
    python = args.peer_python or sys.executable
    wrong, lines = False, session.lines
    with gpu_peers.Worker(python, vllm_kernels=args.vllm_kernels) as worker:
        for index, w in enumerate(chosen):
            if session.left <= 0:
                return give_up(f"{args.minutes:g} min are over", chosen[index:], lines)
            mine, peers = [], []
            if {"decode", "prefill"} & set(args.part):
                mine = [name for name in implementations if (w.name, name) not in known]
            if TUNE in args.part:
                mine += [n for n in gpu_tune.names(w, gpu) if (w.name, n) not in known]
            if "peers" in args.part:
                listed = gpu_peers.listed(found, w, args.peers)
                peers = [(peer, why) for peer, why in listed if (w.name, peer.name) not in known]
            names = [*mine, *(peer.name for peer, _ in peers)]
            if not names:
                continue
            data = None  # free the previous workload's: both may not fit
            try:
                with session.watched(w.name, names[0]):
                    data = gpu_data.make_data(w, l2_bytes)
                    want = gpu_data.expected_rows(w, data, np.asarray(data.tables[0]))
            except Exception as error:
                if not gpu_session.device_answers():
                    return give_up("the GPU does not answer", chosen[index:], lines)
                why = f"FAILED: {gpu_session.first_line(error)}"
                wrong |= report(w, [(name, why) for name in names], lines)
                continue
            worker.patience = min(gpu_peers.PATIENCE, max(session.left, gpu_session.GRACE))
            rows = ours(w, mine, data, limits, want, args.layers)
            others = theirs(w, peers, data, limits, want, worker)
            tuned = gpu_tune.Tuned(w, args.resume)
            try:
                rows = tuned.seen(session.each(w.name, mine, rows, gpu_session.device_answers))
                wrong |= report(w, rows, lines)
                rows = session.each(w.name, names[len(mine) :], others, gpu_session.device_answers)
                report(w, rows, lines)
            except gpu_session.LostDeviceError:
                return give_up("the GPU does not answer", chosen[index:], lines)
            except gpu_session.OverTimeError:
                return give_up(f"{args.minutes:g} min are over", chosen[index:], lines)
            finally:
                if TUNE in args.part:
                    print("\n".join(tuned.best(gpu_tune.names(w, gpu)[0])), flush=True)
    return int(wrong)


def give_up(why: str, left: Sequence[Workload], lines: Lines) -> int:
    """Report what is left for another run."""
    names = [w.name for w in left]
    lines.write(kind="left", names=names, why=why)
    print(f"{why}; run again with --resume. Not measured: {', '.join(names)}", flush=True)
    return 3


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of the packages installed here."""
    have = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            have[name] = importlib.metadata.version(name)
    return have


if __name__ == "__main__":
    sys.exit(main())
