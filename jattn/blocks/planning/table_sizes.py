"""Sizes that tables and pools must respect: rows of whole strides, slots within int32."""

from __future__ import annotations

import math

from jattn.checks import checking
from jattn.integers import require_int32_slots, require_ints, round_up, with_python_ints


@with_python_ints
def aligned_row_width(num_blocks: int, block_size: int, *, tokens: int = 128) -> int:
    """Return the table entries to reserve for `num_blocks` blocks, so that a row is whole strides.

    Kernels that load a row in strides of 128 tokens need `num_blocks` rounded up to a multiple of
    `tokens / gcd(tokens, block_size)`. (vLLM 0.23 uses `tokens // block_size`, which is right for
    powers of two only.)

    Args:
      num_blocks: blocks that the longest sequence needs.
      block_size: S, tokens in a block.
      tokens: tokens in a stride.

    Returns: entries in a row, at least `num_blocks`.
    Raises: `ValueError` for sizes below 1.

    >>> aligned_row_width(257, 16), aligned_row_width(257, 48)
    (264, 264)
    """
    with checking("aligned_row_width") as problems:
        require_ints(problems, 1, num_blocks=num_blocks, block_size=block_size, tokens=tokens)
    return round_up(num_blocks, tokens // math.gcd(tokens, block_size))


@with_python_ints
def check_slot_range(num_blocks: int, block_size: int, *, num_layers: int = 1) -> None:
    """Refuse a cache whose slots, `num_layers * num_blocks * block_size`, do not fit int32.

    Args:
      num_blocks: N, blocks in a pool, per layer.
      block_size: S, tokens in a block.
      num_layers: L, layers that share one pool (`layer_block_tables`).

    Raises: `ValueError` naming the sizes and the most blocks that fit, and for sizes below 1.

    >>> check_slot_range(2**27 - 1, 16)
    >>> check_slot_range(2**27, 16)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: check_slot_range: 1 wrong argument(s)
      - num_blocks: 134217728 blocks of 16 tokens are ... but must be at most 134217727 blocks, ...
    """
    with checking("check_slot_range") as problems:
        if require_ints(
            problems, 1, num_blocks=num_blocks, block_size=block_size, num_layers=num_layers
        ):
            require_int32_slots(problems, "num_blocks", num_blocks, block_size, num_layers)
