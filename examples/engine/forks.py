"""Several texts of one prompt: the prompt is read once, and its blocks are shared.

    leader    reads the prompt up to its last token, without waiting for the others
    others    wait until it is there; then they share its full blocks and its recurrent state, and
              copy the block that is partly full, since each of them writes to it next
    all       compute the prompt's last token, each on its own, and diverge

Requests share a prompt if their prompts are the same tuple object, like those of a body with `n`,
and their adapters are equal. If a request has no row or blocks when its leader is there, it begins
on its own later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Row

import jax
import numpy as np

import jattn.blocks as jb
from examples.engine.caches import Caches
from examples.engine.request import Sequence


def fork_point(sequence: Sequence) -> int:
    """Return how many tokens of its prompt a sequence shares with others: all but the last."""
    return len(sequence.request.prompt) - 1


def leader_of(sequence: Sequence, running: Iterable[Sequence]) -> Sequence | None:
    """Return the running sequence that still reads the same prompt, if any."""
    if sequence.chosen or sequence.scores_prompt or fork_point(sequence) < 1:
        return None
    same = (s for s in running if _of_one_prompt(s, sequence) and not s.scores_prompt)
    return next((s for s in same if s.num_computed <= fork_point(s)), None)


def most_to_read(sequence: Sequence, most: int, waiting: Iterable[Sequence]) -> int:
    """Return how many of `most` tokens a leader may compute: it stops where others begin."""
    left = fork_point(sequence) - sequence.num_computed
    if not 0 < left < most or sequence.scores_prompt:
        return most
    followed = any(_of_one_prompt(s, sequence) and not s.scores_prompt for s in waiting)
    return left if followed else most


def _of_one_prompt(one: Sequence, other: Sequence) -> bool:
    one, other = one.request, other.request
    return one.prompt is other.prompt and one.adapter == other.adapter


def shared_start(leader: Sequence, block_size: int) -> tuple[int, dict, dict]:
    """Return a count of full blocks, and ids of blocks and states, to begin with.

    The leader must have reached the fork point.
    """
    num_full = fork_point(leader) // block_size
    blocks = {n: t.blocks[t.num_returned : num_full] for n, t in leader.tables.items()}
    states = {name: table.read for name, table in leader.states.items()}
    return num_full, blocks, states


def take_partial_blocks(sequence: Sequence, leader: Sequence) -> dict[str, tuple[int, int]]:
    """Allocate blocks for the leader's tokens that do not fill a block.

    Returns: by group, which block to copy, and to which.
    """
    sequence.num_computed = fork_point(leader)
    copies = {}
    for name, table in sequence.tables.items():
        num_full = len(table.blocks)
        table.grow(sequence.num_computed)
        if len(table.blocks) > num_full:
            copies[name] = (leader.tables[name].blocks[num_full], table.blocks[num_full])
    return copies


def pack_copies(
    copies: Row[tuple[str, int, int]], groups: Row[str], max_seqs: int
) -> dict[str, np.ndarray]:
    """Pack copies (group, from, to) into arrays [2, max_seqs] by group."""
    packed = {name: np.full((2, max_seqs), -1, np.int32) for name in groups}
    for name in groups:
        for i, (_, source, target) in enumerate(c for c in copies if c[0] == name):
            packed[name][:, i] = source, target
    return packed


def copy_blocks(caches: Caches, copies: Mapping[str, jax.Array]) -> Caches:
    """Copy blocks in all layers of their groups; in place, if the caches are donated."""
    pools = list(caches.pools)
    for place in caches.places:
        if place.group in copies:
            pools[place.pool] = jb.copy_blocks(pools[place.pool], *copies[place.group])
    return caches.with_pools(pools)
