"""Which entries of a row are a sequence's states."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn.blocks.arguments import Integers, as_int32, noted, require_shape
from jattn.blocks.states.layouts import MODES
from jattn.checks import checking
from jattn.integers import require_int


def select_state_blocks(
    block_tables: Integers,
    seq_lens: Integers,
    *,
    block_size: int,
    mode: str = "none",
    num_speculative_blocks: int = 0,
) -> jax.Array:
    """Select the ids that a recurrent kernel reads and writes from the rows of a state group.

    In modes "none" and "all" these are the whole row. In mode "align" a sequence keeps a state per
    block, and the current state and the s speculative ones after it are

        block_tables[b, max((seq_lens[b] - 1) // block_size, 0) + 0 .. s].

    Args:
      block_tables: int32 [B, M], the rows of the group.
      seq_lens: int32 [B], tokens of each sequence, this step's included. 0 or less for a padded
        sequence, which has no states: gathered rows are padded with 0, another sequence's block.
      block_size: tokens between two kept states. Static.
      mode: "none", "align" or "all". Static.
      num_speculative_blocks: s, states of tokens that may be rolled back. Static.

    Returns: int32 [B, M], or [B, 1 + s] in mode "align", where columns past the row give -1. All
      ids of a padded sequence are -1, for which `read_state` reads zeros and `write_state` writes
      nothing.
    Raises: `ValueError` for wrong dtypes, shapes, sizes or mode.

    >>> select_state_blocks([[4, 7, 9], [0, 0, 0]], [40, 0], block_size=16, mode="align").tolist()
    [[9], [-1]]
    """
    with checking("select_state_blocks") as problems:
        table = as_int32(problems, "block_tables", block_tables, ranks=(2,))
        lens = as_int32(problems, "seq_lens", seq_lens, ranks=(1,))
        require_int(problems, "block_size", block_size, 1)
        require_int(problems, "num_speculative_blocks", num_speculative_blocks, 0)
        problems.require(mode in MODES, "mode", f"{mode!r}", f"one of {list(MODES)}")
        if not noted(problems, "block_tables"):
            require_shape(
                problems, "seq_lens", lens, table.shape[:1], "one per row of block_tables"
            )
    real = lens[:, None] > 0
    if mode != "align":
        return jnp.where(real, table, -1)
    first = jnp.maximum((lens - 1) // block_size, 0)
    columns = first[:, None] + jnp.arange(1 + num_speculative_blocks, dtype=jnp.int32)[None, :]
    rows = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where(real, table.at[rows, columns].get(mode="fill", fill_value=-1), -1)
