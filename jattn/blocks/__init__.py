"""Block tables as values, kernel blocks, hybrid page alignment, state pages, grouping."""

from jattn.blocks.append import (
    append_block_ids,
    check_append,
    gather_block_tables,
    pack_block_ids,
)
from jattn.blocks.context import ContextParallel
from jattn.blocks.expansion import expand_block_ids, kernel_block_tables
from jattn.blocks.integers import aligned_row_width, check_slot_range
from jattn.blocks.kernel_sizes import (
    MultipleOf,
    preferred_block_size,
    preferred_common_block_size,
    select_kernel_block_size,
    supports_block_size,
)
from jattn.blocks.slots import (
    PAD_SLOT_ID,
    compute_slot_mapping,
    local_lengths,
    local_positions,
)
from jattn.blocks.tables import (
    BlockGroup,
    BlockTables,
    clear_row,
    init_block_tables,
    move_row,
    swap_rows,
)

__all__ = [
    "PAD_SLOT_ID",
    "BlockGroup",
    "BlockTables",
    "ContextParallel",
    "MultipleOf",
    "aligned_row_width",
    "append_block_ids",
    "check_append",
    "check_slot_range",
    "clear_row",
    "compute_slot_mapping",
    "expand_block_ids",
    "gather_block_tables",
    "init_block_tables",
    "kernel_block_tables",
    "local_lengths",
    "local_positions",
    "move_row",
    "pack_block_ids",
    "preferred_block_size",
    "preferred_common_block_size",
    "select_kernel_block_size",
    "supports_block_size",
    "swap_rows",
]
