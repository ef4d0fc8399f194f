"""Which tokens of a sequence a rank keeps, on the device: the formulas of `context`."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jattn.blocks.arguments import Integers, as_int32, noted
from jattn.blocks.tables.context import ContextParallel
from jattn.checks import Problems, checking

_ANY_AXES = tuple(range(9))


def as_rank(
    problems: Problems, rank: Integers | None, contexts: Iterable[ContextParallel]
) -> jax.Array | None:
    """Return a rank as int32 [], or note a problem.

    A concrete rank must be one of every context. A context of one rank does not count: every
    device then keeps all tokens.
    """
    if rank is None:
        return None
    array = as_int32(problems, "rank", rank, ranks=(0,))
    size = min((context.size for context in contexts if context.size > 1), default=0)
    if size and not noted(problems, "rank") and not isinstance(rank, jax.core.Tracer):
        value = int(np.asarray(rank))
        problems.require(0 <= value < size, "rank", f"{value}", f"in 0..{size - 1}")
    return array


def local_positions(
    positions: Integers, context: ContextParallel, *, rank: int | jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return each token's position on this rank, and whether the rank owns the token.

    Args:
      positions: int32 [...], positions in the sequence.
      context: how tokens are dealt to ranks.
      rank: int32 [] or None: overrides `context.rank`. Ignored if `context` has one rank.

    Returns: `local`, int32, and `owned`, bool, of the shape of `positions`. `local` is the position
      on the rank that owns the token.
    Raises: `ValueError` for wrong dtypes or shapes, values that int32 cannot hold, or a concrete
      `rank` that is not in 0..size-1.

    >>> context = ContextParallel(size=2, rank=1, interleave=2)
    >>> local, owned = local_positions(jnp.arange(6), context)
    >>> local.tolist(), owned.tolist()
    ([0, 1, 0, 1, 2, 3], [False, False, True, True, False, False])
    """
    with checking("local_positions") as problems:
        positions = as_int32(problems, "positions", positions, ranks=_ANY_AXES)
        rank = as_rank(problems, rank, [context])
    if context.size == 1:
        return positions, jnp.ones_like(positions, bool)
    turn = context.interleave * context.size
    rounds, rest = positions // turn, positions % turn
    rank = jnp.int32(context.rank) if rank is None else rank
    local = rounds * context.interleave + rest % context.interleave
    return local, rest // context.interleave == rank


def local_lengths(
    seq_lens: Integers, context: ContextParallel, *, rank: int | jax.Array | None = None
) -> jax.Array:
    """Return how many of a sequence's first `seq_lens` tokens a rank keeps.

    On rank k of c, with n tokens and any interleave I, this is

        (n // (I c)) * I + clip(n mod (I c) - k I, 0, I).

    Args:
      seq_lens: int32 [...], tokens of each sequence.
      context: how tokens are dealt to ranks.
      rank: int32 [] or None: overrides `context.rank`. Ignored if `context` has one rank.

    Returns: int32, of the shape of `seq_lens`.
    Raises: `ValueError` as `local_positions`.

    >>> context = ContextParallel(size=2, interleave=4)
    >>> [local_lengths(jnp.int32(6), context, rank=k).item() for k in range(2)]
    [4, 2]
    """
    with checking("local_lengths") as problems:
        seq_lens = as_int32(problems, "seq_lens", seq_lens, ranks=_ANY_AXES)
        rank = as_rank(problems, rank, [context])
    if context.size == 1:
        return seq_lens
    turn = context.interleave * context.size
    rank = jnp.int32(context.rank) if rank is None else rank
    mine = jnp.clip(seq_lens % turn - rank * context.interleave, 0, context.interleave)
    return seq_lens // turn * context.interleave + mine
