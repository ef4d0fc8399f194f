"""Types of command-line options, which report errors before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """Parse a number of turns, calls or the like."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, but is {text!r}")
    return number


def appendable(text: str) -> Path:
    """Parse a file to append lines to, and create it."""
    try:
        with open(text, "a"):
            return Path(text)
    except OSError as error:
        reason = f"must be a file that can be written, but is {text!r}: {error.strerror}"
        raise argparse.ArgumentTypeError(reason) from error


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, which all benchmarks with results in one file have."""
    parser.add_argument(
        "--json", type=appendable, metavar="FILE", help="a file of JSON lines to append to"
    )
