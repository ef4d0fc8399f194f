"""Counts from a run of each suite: one line of JSON per suite, and the tables of the page.

`python -m tests.peers --record` replaces the line of each suite that passes.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import subprocess
import textwrap

from tests.peers.run import Report
from tests.peers.suites import NOT_RUN, SUITES, Checkout, Suite

FILE = pathlib.Path(__file__).with_name("records.jsonl")


@dataclasses.dataclass(frozen=True)
class Record:
    """The outcome of a suite.

    Attributes:
      suite: its name.
      files: the files that ran.
      version: of the source: a distribution's version, or a checkout's commit and its date.
      every: 1 if all that applies ran, n for a sample of one test in n.
      passed, failed, skipped: numbers of tests.
      jax, torch: versions; torch is None if the suite does not import it.
      date: of the run.
    """

    suite: str
    files: tuple[str, ...]
    version: str
    every: int
    passed: int
    failed: int
    skipped: int
    jax: str
    torch: str | None
    date: str


def record(suite: Suite, folder: pathlib.Path, report: Report) -> Record:
    """Return the record of a suite that has just run."""
    return Record(
        suite=suite.name,
        files=suite.files,
        version=_version(suite, folder),
        every=suite.every,
        passed=report.passed,
        failed=report.failed,
        skipped=sum(report.skipped.values()),
        jax=importlib.metadata.version("jax"),
        torch=importlib.metadata.version("torch") if "torch" in suite.needs else None,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def _version(suite: Suite, folder: pathlib.Path) -> str:
    if not isinstance(suite.source, Checkout):
        return suite.source.version
    command = ["git", "log", "-1", "--format=%h of %cs"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "a folder without git"


def read(file: pathlib.Path = FILE) -> dict[str, Record]:
    """Read the records by suite, in the order of the suites."""
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    found = {line["suite"]: Record(**{**line, "files": tuple(line["files"])}) for line in lines}
    return {name: found[name] for name in SUITES if name in found}


def write(new: Record, file: pathlib.Path = FILE) -> None:
    """Replace the record of a suite."""
    found = {**read(file), new.suite: new}
    lines = (json.dumps(dataclasses.asdict(found[name])) for name in SUITES if name in found)
    file.write_text("".join(line + "\n" for line in lines))


def _row(suite: Suite, found: Record) -> str:
    with_ = f"JAX {found.jax}"
    if found.torch:
        with_ += f", torch {found.torch.partition('+')[0]}"
    cells = (
        f"`{suite.name}`",
        f"{suite.source.title} {found.version}",
        f"{found.passed} of {found.passed + found.failed}"
        if found.failed
        else f"all {found.passed}",
        f"1 in {found.every}" if found.every > 1 else "",
        f"{found.skipped or ''}",
        f"{with_}, {found.date}",
    )
    return f"| {' | '.join(cells)} |"


def _line(suite: Suite, found: Record) -> str:
    files = f"`{pathlib.Path(found.files[0]).name}`"
    if len(found.files) > 1:
        files += f" and {len(found.files) - 1} more"
    left_out = f". Does not apply: {suite.leaves_out}" if suite.leaves_out else ""
    return _wrapped(f"- `{suite.name}`: {files}{left_out}")


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def table() -> str:
    """Return the records as the table in docs/peer-tests.md, and the list of files below it."""
    found = [(SUITES[name], each) for name, each in read().items()]
    return "\n".join(
        [
            "| suite | of | passed | sample | skipped | with |",
            "|---|---|---|---|---|---|",
            *(_row(*each) for each in found),
            "",
            *(_line(*each) for each in found),
        ]
    )


def not_run_list() -> str:
    """Return the list, on the same page, of files that are not run."""
    return "\n".join(_wrapped(f"- `{file}`: {why}") for file, why in NOT_RUN.items())
