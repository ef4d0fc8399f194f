"""Trees of draft tokens: several continuations with shared beginnings, verified in one step.

Drafts are listed with each one's parent (-1: the sequence's last token), parents first:

    the -- mat -- and          tokens    the  mat  and  rug  dog
      \\--- rug                 parents    -1    0    1    0   -1
    dog                        depth       1    2    3    2    1

A draft's position is its depth, and it sees those on its path (`tree_mask`), but its keys and
values are stored in listed order. So the first path can stay where it is. If another path is
accepted, the next step computes those of its tokens again that are not in place.
"""

from __future__ import annotations

from collections.abc import Sequence as Row

import numpy as np


def grow(candidates: Row[Row[int]], most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Build a tree of at most `most` drafts from some continuations, the best first.

    The first gets at least half of the drafts, and those that the others do not need.

    Returns: tokens, and parents.
    """
    tokens: list[int] = []
    parents: list[int] = []
    others = sum(map(len, candidates[1:]))
    for i, candidate in enumerate(candidates):
        left = most - len(tokens)
        room = max(left - others, -(-left // 2)) if i == 0 else left
        node = -1
        for token in candidate:
            known = [j for j, p in enumerate(parents) if p == node and tokens[j] == token]
            if not known and room < 1:
                break
            if not known:
                tokens.append(token)
                parents.append(node)
                room -= 1
            node = known[0] if known else len(tokens) - 1
    return tuple(tokens), tuple(parents)


def depths(parents: Row[int]) -> np.ndarray:
    """Return how far each draft is from the sequence's last token, at least 1."""
    found = np.zeros(len(parents), np.int32)
    for i, parent in enumerate(parents):
        found[i] = 1 + (found[parent] if parent >= 0 else 0)
    return found


def paths(parents: Row[int]) -> np.ndarray:
    """Return which drafts are on each one's path, itself included: bool [n, n]."""
    found = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            found[i] |= found[parent]
    return found
