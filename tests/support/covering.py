"""A deterministic covering design: few cases that hold every wanted pair of levels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    wanted: Callable[[str, Any, str, Any], bool],
    possible: Callable[[Case], bool] = lambda case: True,
) -> list[Case]:
    """Return cases, each with a level of every factor, that cover every wanted pair of levels.

    Greedy: the first pair not yet covered starts a case, whose other factors take the level that
    covers most pairs, ties going to the level used least. The same factors give the same cases.

    Args:
      factors: levels by factor name, hashable.
      wanted: called with two factors, in the order of `factors`, and a level of each; whether
        some case must have both levels.
      possible: whether levels may meet at all; called with cases that are not yet complete.
    """
    names = list(factors)
    left = {
        ((a, x), (b, y)): None
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
        if wanted(a, x, b, y) and possible({a: x, b: y})
    }
    used = {(name, level): 0 for name in names for level in factors[name]}
    cases = []
    while left:
        (a, x), (b, y) = next(iter(left))
        case = {a: x, b: y}
        for name in names:
            if name in case:
                continue

            def gain(level: Any, name: str = name, case: Case = case) -> tuple[int, int]:
                new = sum(
                    _pair(names, (name, level), (other, have)) in left
                    for other, have in case.items()
                )
                return new, -used[name, level]

            left_open = [level for level in factors[name] if possible({**case, name: level})]
            case[name] = max(left_open, key=gain)
        for item in case.items():
            used[item] += 1
        for p, q in itertools.combinations(case.items(), 2):
            left.pop(_pair(names, p, q), None)
        cases.append({name: case[name] for name in names})
    return cases


def _pair(names: list[str], p: tuple[str, Any], q: tuple[str, Any]) -> tuple:
    return (p, q) if names.index(p[0]) < names.index(q[0]) else (q, p)
