"""Context parallelism: which rank keeps which token, and where.

The tokens of a sequence are dealt to `c` ranks in turns of `I` (the interleave). With
`round, offset = divmod(position, I * c)`, the token at `position` belongs to rank
`offset // I` and lies there at

    local = round * I + offset % I,

so a rank's tokens are numbered 0, 1, 2, ... without gaps, and of the first `n` tokens rank `k` has

    local_length(n) = (n // (I c)) * I + clip(n mod (I c) - k I, 0, I).

This holds for every interleave, whether or not it divides the block: block tables then index
`local`, as if the rank's tokens were the whole sequence. vLLM reaches the same slots through
virtual blocks of `block * c` tokens wherever `I` divides the block, the only case it accepts.
"""

from __future__ import annotations

import dataclasses

from jattn.checks import checking
from jattn.integers import INT32_MAX, is_int, keep_python_ints, require_int


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """How a group's tokens are dealt to ranks. All fields are static integers.

    Attributes:
      size: number of ranks, `c`.
      rank: this rank, `k`. If the rank is only known on the device (inside `shard_map`), leave 0
        here and pass `rank=` to the functions that need it.
      interleave: tokens a rank takes in one turn, `I`.

    Raises: `ValueError` if `size` or `interleave` is below 1, int32 cannot hold their product, or
      `rank` is not in 0..size-1.

    >>> context = ContextParallel(size=2, interleave=4)
    >>> [context.local_length(6, rank) for rank in range(2)], context.longest_local_length(6)
    ([4, 2], 4)
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        keep_python_ints(self)
        with checking("ContextParallel") as problems:
            sized = require_int(problems, "size", self.size, 1)
            if require_int(problems, "interleave", self.interleave, 1) and sized:
                problems.require(
                    self.size * self.interleave <= INT32_MAX,
                    "interleave",
                    f"{self.interleave}",
                    f"at most {INT32_MAX // self.size}, since size * interleave must fit int32",
                )
            if require_int(problems, "rank", self.rank, 0) and sized:
                problems.require(
                    self.rank < self.size, "rank", f"{self.rank}", f"below size={self.size}"
                )

    def local_length(self, num_tokens: int, rank: int | None = None) -> int:
        """Return how many of the first `num_tokens` tokens `rank` keeps (None: this rank).

        Raises: `ValueError` if `rank` is not in 0..size-1, unless there is one rank only.
        """
        rank = self.rank if rank is None else rank
        if self.size > 1 and not (is_int(rank, 0) and rank < self.size):
            with checking("local_length") as problems:
                problems.add("rank", f"{rank!r}", f"an integer in 0..{self.size - 1}")
        rounds, rest = divmod(num_tokens, self.interleave * self.size)
        mine = min(max(rest - rank * self.interleave, 0), self.interleave)
        return rounds * self.interleave + mine

    def longest_local_length(self, num_tokens: int) -> int:
        """Return the local length of the rank that keeps most: every rank needs room for it."""
        return self.local_length(num_tokens, rank=0)


ONE_RANK = ContextParallel()
