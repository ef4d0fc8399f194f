"""Which cases of a large sample a run takes: CI takes a share, after the next commit another one.

    ROTATION=7/2 pytest -m extended

runs those cases marked `rotated` whose number is 7 modulo 2, and all that are not; without it, or
where a test is not `extended`, all run.
"""

from __future__ import annotations

import zlib

import pytest

VARIABLE = "ROTATION"


def is_left_out(share: str, item: pytest.Item) -> bool:
    """Whether a run that takes `share` of the rotated tests leaves this one to another run."""
    if not {"rotated", "extended"} <= {mark.name for mark in item.iter_markers()}:
        return False
    number, of = map(int, share.split("/"))
    return zlib.crc32(item.nodeid.encode()) % of != number % of
