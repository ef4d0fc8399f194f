"""CI runs a share of large samples in turn: over several commits, every case runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support import rotation


def item(number: int, *marks: str) -> SimpleNamespace:
    """Return a fake test with what `rotation` reads."""
    found = [SimpleNamespace(name=name) for name in marks]
    return SimpleNamespace(nodeid=f"tests/test_it.py::test[{number}]", iter_markers=lambda: found)


@pytest.mark.parametrize("of", [1, 2, 3])
def test_every_case_runs_once_in_turn(of):
    items = [item(n, "extended", "rotated") for n in range(300)]
    commits = range(1000, 1000 + of)
    turns = [[x for x in items if not rotation.is_left_out(f"{n}/{of}", x)] for n in commits]
    assert sorted(x.nodeid for turn in turns for x in turn) == sorted(x.nodeid for x in items)
    assert min(map(len, turns)) > 200 // of


@pytest.mark.parametrize("marks", [(), ("extended",), ("rotated",), ("rotated", "slow")])
def test_other_tests_are_in_every_run(marks):
    assert not any(rotation.is_left_out(f"{n}/2", item(7, *marks)) for n in range(2))
