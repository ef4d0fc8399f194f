"""Which share of a large sample a run takes: CI takes one of two in turn, commit by commit.

    ROTATION=7/2 pytest -m extended

runs the cases marked `rotated` whose number is 7 modulo 2, and all unmarked ones. Without
`ROTATION`, and for tests that are not `extended`, all cases run.
"""

from __future__ import annotations

import zlib

import pytest

VARIABLE = "ROTATION"


def is_left_out(share: str, item: pytest.Item) -> bool:
    """Whether a run that takes `share` of the rotated tests leaves this one out."""
    if not {"rotated", "extended"} <= {mark.name for mark in item.iter_markers()}:
        return False
    number, of = map(int, share.split("/"))
    return zlib.crc32(item.nodeid.encode()) % of != number % of
