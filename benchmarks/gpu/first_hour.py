"""Run the first hour on a GPU: is every kernel right, how fast is it, and what is faster?

    python -m benchmarks.gpu.first_hour --out DIR [--minutes 55] [--state DIR] [--only STEP ...]
    python -m benchmarks.gpu.first_hour --dry-run [--only STEP ...]

Steps run one after another, the most valuable first, each in a separate process with its own time
limit. Results are kept in the state folder (`build/first-hour` in the checkout), so the command can
be interrupted and repeated: finished steps are skipped, unfinished ones continue where they were,
and failures are retried once the code has changed.

After every step, everything so far is written to `--out` in three files: `results.jsonl`, `log.txt`
and `summary.txt`. That folder may be emptied between commands.

`--dry-run` needs no GPU: it goes through the same steps, which compile for a GPU that is only
described and list what they would run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Sequence

from benchmarks.gpu import session as gpu_session
from benchmarks.gpu import tune as gpu_tune
from benchmarks.gpu.peers import NAMES as PEERS

OURS = ("mosaic_gpu", "triton")
# Enough to start Python, find a GPU and compile something.
LEAST = 0.5
# How often a step that lost the device or hung continues in another process.
TRIES = 4
STATE = gpu_session.ROOT / "build" / "first-hour"


@dataclasses.dataclass(frozen=True)
class Step:
    """A command with a time limit.

    Attributes:
      name: the name in `--only` and in the files.
      minutes: the most that all its attempts may take together.
      why: what it finds out.
      given: arguments of `python -m benchmarks.gpu`.
      dry: other arguments for its dry run, which compiles less.
      module: the module that runs, by default `benchmarks.gpu`.
    """

    name: str
    minutes: float
    why: str
    given: tuple[str, ...]
    dry: tuple[str, ...] = ()
    module: str = "benchmarks.gpu"

    def command(self, state: pathlib.Path, minutes: float, dry_run: bool) -> list[str]:
        """Return the whole command line."""
        command = [sys.executable, "-m", self.module, *self.given]
        if dry_run:
            return [*command, *self.dry, "--dry-run"]
        folder = str(state)
        return [*command, "--minutes", f"{minutes:g}", "--out", folder, "--resume", folder]


def _step(
    name: str, minutes: float, why: str, part: str, filter: str, *more: str, dry: str = ""
) -> Step:
    given = ("--part", *part.split(), *(("--filter", filter) if filter else ()), *more)
    return Step(name, minutes, why, given, ("--filter", dry) if dry else ())


_SMALL = "^gpt-oss-window-64q1s8k"
STEPS = (
    _step("ceilings", 1.5, "how fast this GPU reads and multiplies", "ceilings", ""),
    _step(
        *("matrix", 7, "is every kernel right, with the same bits each time", "matrix", ""),
        *("--implementation", *OURS),
    ),
    _step(
        *("decode", 7, "kernels and calls against the read ceiling", "decode", ""),
        *("--implementation", *OURS),
        dry=_SMALL,
    ),
    _step(
        *("prefill", 7, "kernels and calls against the matrix ceiling", "prefill", ""),
        *("--implementation", *OURS),
        dry="^gpt-oss-window-q8k",
    ),
    _step(
        *("peers", 8, "other projects' kernels on the same bytes", "peers"),
        "(llama-8b-(q8k|q1s8k|32q1s4k)|next-(q8k|64q1s8k)|oss-q8k|gemma4-31b-(64q1s8k|q8k))-",
        dry=_SMALL,
    ),
    _step(
        *("blocks", 3, "is the producer late with blocks of 16", "prefill"),
        *("(llama-8b|next|oss)-q8k", "--implementation", "mosaic_gpu", "--block-size", "64"),
        dry="^gpt-oss-window-q8k",
    ),
    _step(
        *("tune", 12, "tiles that are faster than the rule's", "tune"),
        "(llama-8b-(64q1s8k|q8k)|gemma4-31b-(64q1s8k|q8k))-",
        dry=_SMALL,
    ),
    _step(
        *("xla", 6, "nothing is slower than XLA", "decode prefill", "", "--implementation", "xla"),
        dry=_SMALL,
    ),
)
NAMES = tuple(step.name for step in STEPS)


# --- One step -------------------------------------------------------------------------------------


def run_step(step: Step, state: pathlib.Path, seconds: float, dry_run: bool = False) -> int | None:
    """Run a step; return its exit status: 3 if something is left, None if it was killed.

    While it makes progress and has time, it is restarted at once with what is left: a hang or a
    lost device ends the process, and costs one result.
    """
    over = time.monotonic() + seconds
    status: int | None = None
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", gpu_session.STEP: step.name}
    with (state / f"{step.name}.log").open("ab") as log:
        for _ in range(TRIES):
            left, known = over - time.monotonic(), answers(state)
            command = step.command(state, left / 60, dry_run)
            log.write(f"\n$ {' '.join(command[1:])}\n".encode())
            log.flush()
            status = gpu_session.run(
                command,
                left + gpu_session.GRACE,
                cwd=gpu_session.ROOT,
                env=environment,
                stdout=log,
                stderr=log,
            )
            # 3 means that something is left; a signal, that the process crashed.
            again = status is None or status == gpu_session.HUNG or status < 0
            if not again or answers(state) == known or over - time.monotonic() < 60 * LEAST:
                break
    return status


def answers(state: pathlib.Path) -> int:
    """Count the results so far."""
    kinds = ("row", "none", "test")
    return sum(line.get("kind") in kinds for line in gpu_session.lines_of(str(state)))


def is_wrong(state: pathlib.Path, name: str) -> bool:
    """Whether a step found, with this code, a result of ours that is wrong or hangs."""
    tests, rows = {}, {}
    for line in gpu_session.lines_of(str(state)):
        if line.get("step") != name or not gpu_session.of_this_code(line):
            continue
        if line["kind"] == "test":
            tests[line["name"]] = line["outcome"] != "passed"
        elif line["kind"] in ("row", "none") and line["implementation"] not in PEERS:
            why = line.get("why", "")
            candidate = gpu_tune.is_candidate(line["implementation"])
            bad = why.startswith("WRONG") if candidate else gpu_session.failed(why)
            rows[line["name"], line["implementation"]] = bad
    return any(tests.values()) or any(rows.values())


def done(state: pathlib.Path) -> dict[str, int]:
    """Return `{step: exit status}` of finished steps whose failures are from this code."""
    found = {}
    for line in gpu_session.lines_of(str(state)):
        if line.get("kind") == "step":
            stands = line["status"] == 0 or gpu_session.of_this_code(line)
            if line["status"] in (0, 1) and stands:
                found[line["name"]] = line["status"]
            else:
                found.pop(line["name"], None)
    return found


# --- What is handed over --------------------------------------------------------------------------


def hand_over(state: pathlib.Path, out: pathlib.Path | None) -> None:
    """Write everything so far to three files in `out`."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    lines = list(gpu_session.lines_of(str(state)))
    (out / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (out / "summary.txt").write_text(summary(lines))
    logs = sorted(state.glob("*.log"), key=lambda file: file.stat().st_mtime)
    (out / "log.txt").write_bytes(b"".join(file.read_bytes() for file in logs)[-8_000_000:])


def summary(lines: Iterable[dict]) -> str:
    """Summarize steps, tests that did not pass, and rows, as a table."""
    from benchmarks.gpu.rows import HEADER, row_of

    steps, tests, rows, none, ceilings = [], {}, [], [], []
    for line in lines:
        match line.get("kind"):
            case "step":
                steps.append(f"{line['name']:<10} {line['seconds']:>6.0f} s  {line['said']}")
            case "test":
                tests[line["name"]] = (line["outcome"], line.get("why", ""))
            case "row":
                rows.append(row_of(line).line())
            case "none":
                none.append(f"{line['name']:<52} {line['implementation']:<14} {line['why']}")
            case "run":
                ceilings.append(
                    f"{line['device']}: read {line['read'] / 1e12:.2f} TB/s by {line['reader']}, "
                    f"matrix {line['matrix'] / 1e12:.0f} TFLOP/s"
                )
    passed = sum(outcome == "passed" for outcome, _ in tests.values())
    failed = [f"{name}: {o}: {why}" for name, (o, why) in sorted(tests.items()) if o != "passed"]
    parts = [
        *steps,
        "",
        *ceilings[-1:],
        f"tests: {passed} passed, {len(failed)} did not",
        *failed,
        "",
        HEADER,
        *sorted(rows),
        "",
        *sorted(none),
    ]
    return "\n".join(parts) + "\n"


SAID = {0: "done", 1: "done, and something is wrong", 2: "could not begin", 3: "something is left"}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.first_hour", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="gets all results so far")
    parser.add_argument("--state", type=pathlib.Path, metavar="DIR", default=STATE)
    parser.add_argument("--minutes", type=float, default=55, help="of the whole command")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--dry-run", action="store_true", help="compile and list; needs no GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    """Return 1 if something is wrong, 3 if something is left."""
    args = parse(arguments)
    state = args.state / "dry" if args.dry_run else args.state
    state.mkdir(parents=True, exist_ok=True)
    lines = gpu_session.Lines(str(state), ("steps",))
    over = time.monotonic() + 60 * args.minutes
    statuses: list[int | None] = []
    for step in (step for step in steps if step.name in args.only):
        if not args.dry_run and (known := done(state).get(step.name)) is not None:
            print(f"{step.name:<10} {SAID[known]}, in an earlier run", flush=True)
            statuses.append(known)
            continue
        minutes = min(step.minutes, (over - time.monotonic()) / 60)
        if minutes < LEAST:
            print(f"{step.name:<10} left: the time is over", flush=True)
            statuses.append(gpu_session.HUNG)
            continue
        print(f"{step.name:<10} at most {minutes:.1f} min: {step.why}", flush=True)
        began = time.monotonic()
        status = run_step(step, state, 60 * minutes, args.dry_run)
        if status == 0 and is_wrong(state, step.name):  # found by a process that crashed
            status = 1
        said = SAID.get(status, "ended: it took too long" if status is None else f"died {status}")
        seconds = time.monotonic() - began
        lines.write(kind="step", name=step.name, status=status, said=said, seconds=seconds)
        print(f"{step.name:<10} {said} after {seconds:.0f} s", flush=True)
        statuses.append(status)
        hand_over(state, args.out)
    hand_over(state, args.out)
    if any(status not in (0, 1) for status in statuses):
        return gpu_session.HUNG
    return int(1 in statuses)


if __name__ == "__main__":
    sys.exit(main())
