"""`python -m tests.peers`: run peers' tests and print what passed."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

from tests.peers import run
from tests.peers.suites import SUITES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers")
    parser.add_argument("names", nargs="*", choices=[[], *SUITES], help="suites; all if none")
    parser.add_argument("--jax", default=os.environ.get("JATTN_PEERS_JAX"), help="a checkout of it")
    parser.add_argument("--cache", default="~/.cache/jattn-peers", help="where wheels are kept")
    given = parser.parse_args()
    bad = 0
    for name in given.names or SUITES:
        suite = SUITES[name]
        try:
            folder = run.sources(suite, given.jax, pathlib.Path(given.cache).expanduser())
        except run.NotFetchedError as error:
            print(f"{name}: not run: {error}", flush=True)
            continue
        report = run.run(suite, folder)
        wrong = report.failed > 0 or report.passed < suite.at_least
        bad += wrong
        print(f"{name}: {report.passed} passed, {report.failed} failed", flush=True)
        for reason, count in report.skipped.items():
            print(f"  {count} skipped: {reason}")
        if wrong:
            print(report.log[-4000:])
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
