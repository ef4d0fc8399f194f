"""`python -m tests.peers`: run peers' tests, print what passed, and record it if asked to."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys

from tests.peers import fetch, records, run
from tests.peers.suites import SUITES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers")
    parser.add_argument("names", nargs="*", choices=[[], *SUITES], help="suites; all if none")
    parser.add_argument("--every", type=int, help="run one test in this many")
    parser.add_argument("--cache", default="~/.cache/jattn-peers", help="where files are kept")
    parser.add_argument(
        "--record", action="store_true", help=f"write the counts to {records.FILE.name}"
    )
    given = parser.parse_args()
    bad = 0
    for name in given.names or SUITES:
        suite = SUITES[name]
        if given.every is not None:
            suite = dataclasses.replace(suite, every=given.every, at_least=1)
        try:
            folder = fetch.sources(suite, pathlib.Path(given.cache).expanduser())
        except fetch.NotFetchedError as error:
            print(f"{name}: not run: {error}", flush=True)
            continue
        report = run.run(suite, folder, timeout=4 * 3600)  # for larger samples than usual
        wrong = report.failed > 0 or report.passed < suite.at_least
        bad += wrong
        print(f"{name}: {report.passed} passed, {report.failed} failed", flush=True)
        if given.record and not wrong:
            records.write(records.record(suite, folder, report))
        for reason, count in report.skipped.items():
            print(f"  {count} skipped: {reason}")
        if wrong:
            print(report.log[-4000:])
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
