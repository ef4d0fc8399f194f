"""Sizes that tables and pools must keep to: whole rows for strided reads, slots within int32."""

from __future__ import annotations

import math

from jattn.checks import checking
from jattn.integers import require_int32_slots, require_ints, round_up, with_python_ints


@with_python_ints
def aligned_row_width(num_blocks: int, block_size: int, *, tokens: int = 128) -> int:
    """Table entries to reserve for `num_blocks` blocks, so that a row is whole `tokens`.

    Kernels that load a row in strides of 128 tokens need it: `num_blocks` rounded up to a multiple
    of `tokens / gcd(tokens, block_size)`. (vLLM 0.23 takes `tokens // block_size`, which is right
    for powers of two only.)

    Raises: `ValueError` for sizes below 1.
    """
    with checking("aligned_row_width") as problems:
        require_ints(problems, 1, num_blocks=num_blocks, block_size=block_size, tokens=tokens)
    return round_up(num_blocks, tokens // math.gcd(tokens, block_size))


@with_python_ints
def check_slot_range(num_blocks: int, block_size: int, *, num_layers: int = 1) -> None:
    """Refuse a cache whose slots, `num_layers * num_blocks * block_size`, do not fit int32.

    Raises: `ValueError` naming the sizes and the most blocks that fit.
    """
    with checking("check_slot_range") as problems:
        if require_ints(
            problems, 1, num_blocks=num_blocks, block_size=block_size, num_layers=num_layers
        ):
            require_int32_slots(problems, "num_blocks", num_blocks, block_size, num_layers)
