"""Block tables as values, kernel blocks, hybrid page alignment, state pages, grouping."""

from jattn.blocks.planning.align import Ask, HybridAlignment, align_hybrid_block_size
from jattn.blocks.planning.grouping import LayerGroup, LayerGroups, group_layers, unify_page_sizes
from jattn.blocks.planning.kernel_sizes import (
    MultipleOf,
    preferred_block_size,
    preferred_common_block_size,
    select_kernel_block_size,
    supports_block_size,
)
from jattn.blocks.planning.layer_specs import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    LatentAttention,
    LayerSpec,
    Limits,
    RecurrentState,
    SlidingWindow,
)
from jattn.blocks.planning.patterns import exact_group_size, group_layers_exactly
from jattn.blocks.planning.plan_choice import CacheChoice, plan_hybrid_cache
from jattn.blocks.planning.plans import (
    CachePlan,
    HybridModel,
    PoolSizes,
    one_state_per_page,
    pages_per_state,
    states_in_pages,
    states_per_page,
    two_pools,
)
from jattn.blocks.planning.table_sizes import aligned_row_width, check_slot_range
from jattn.blocks.pool.block_pool import BlockPool
from jattn.blocks.pool.copies import copy_blocks, put_blocks, take_blocks
from jattn.blocks.pool.hashes import block_hashes, hash_blocks
from jattn.blocks.states.layouts import (
    StateLayout,
    gated_delta_net_state,
    kda_state,
    linear_attention_state,
    mamba1_state,
    mamba2_state,
    short_conv_state,
    state_dtypes,
)
from jattn.blocks.states.pools import (
    PagePool,
    StateSlots,
    init_state_slots,
    read_state,
    write_state,
    zero_pages,
)
from jattn.blocks.states.tables import select_state_blocks
from jattn.blocks.tables.append import (
    append_block_ids,
    check_append,
    gather_block_tables,
    pack_block_ids,
)
from jattn.blocks.tables.context import ContextParallel
from jattn.blocks.tables.expansion import expand_block_ids, kernel_block_tables
from jattn.blocks.tables.layer_tables import layer_block_tables, layer_slot_mapping
from jattn.blocks.tables.local import local_lengths, local_positions
from jattn.blocks.tables.slots import PAD_SLOT_ID, compute_slot_mapping
from jattn.blocks.tables.tables import (
    BlockGroup,
    BlockTables,
    clear_row,
    copy_row,
    init_block_tables,
    move_row,
    swap_rows,
    truncate_row,
)
from jattn.formats.token_bytes import kv_bytes_per_token

__all__ = [
    "PAD_SLOT_ID",
    "Ask",
    "BlockGroup",
    "BlockPool",
    "BlockTables",
    "CacheChoice",
    "CachePlan",
    "ChunkedLocal",
    "ContextParallel",
    "CrossAttention",
    "FullAttention",
    "HybridAlignment",
    "HybridModel",
    "LatentAttention",
    "LayerGroup",
    "LayerGroups",
    "LayerSpec",
    "Limits",
    "MultipleOf",
    "PagePool",
    "PoolSizes",
    "RecurrentState",
    "SlidingWindow",
    "StateLayout",
    "StateSlots",
    "align_hybrid_block_size",
    "aligned_row_width",
    "append_block_ids",
    "block_hashes",
    "check_append",
    "check_slot_range",
    "clear_row",
    "compute_slot_mapping",
    "copy_blocks",
    "copy_row",
    "exact_group_size",
    "expand_block_ids",
    "gated_delta_net_state",
    "gather_block_tables",
    "group_layers",
    "group_layers_exactly",
    "hash_blocks",
    "init_block_tables",
    "init_state_slots",
    "kda_state",
    "kernel_block_tables",
    "kv_bytes_per_token",
    "layer_block_tables",
    "layer_slot_mapping",
    "linear_attention_state",
    "local_lengths",
    "local_positions",
    "mamba1_state",
    "mamba2_state",
    "move_row",
    "one_state_per_page",
    "pack_block_ids",
    "pages_per_state",
    "plan_hybrid_cache",
    "preferred_block_size",
    "preferred_common_block_size",
    "put_blocks",
    "read_state",
    "select_kernel_block_size",
    "select_state_blocks",
    "short_conv_state",
    "state_dtypes",
    "states_in_pages",
    "states_per_page",
    "supports_block_size",
    "swap_rows",
    "take_blocks",
    "truncate_row",
    "two_pools",
    "unify_page_sizes",
    "write_state",
    "zero_pages",
]


def __dir__() -> list[str]:
    """The public names, without the modules that they come from."""
    return [*__all__]
