"""Sizes as NumPy integers, which could overflow, and ids and slots that int32 cannot hold."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import jattn
import jattn.blocks as jb

NARROW = pytest.mark.parametrize("integer", [int, np.int8, np.uint8, np.int32])


@NARROW
def test_bytes_of_narrow_integers(integer):
    size = integer(16)
    assert jb.kv_bytes_per_token(size, size) == 1024
    assert jb.kv_bytes_per_token(size, integer(3), value_dim=integer(1)) == 128
    assert jb.FullAttention(size, integer(8), integer(64)).page_bytes == 32768
    window = jb.SlidingWindow(size, integer(8), integer(64), window=integer(100))
    assert window.max_blocks(jb.Limits(integer(120), integer(100))) == 9
    assert jb.StateLayout(((size, size, size),), ("float32",)).nbytes == 16384
    state = jb.gated_delta_net_state(
        num_k_heads=size,
        num_v_heads=size,
        head_k_dim=size,
        head_v_dim=size,
        conv_kernel=integer(4),
        dtypes=("bfloat16", "float32"),
    )
    assert state.nbytes == 20992
    assert jb.exact_group_size([integer(100), integer(100)]) == 100


@NARROW
def test_tables_of_narrow_integers(integer):
    size, wide = integer(16), [[*range(20)], [9]]
    batch = jattn.AttentionMetadata.from_lengths([1, 1], [300, 5], wide, size)
    assert batch.slot_mapping.tolist() == [299, 148]
    batch.check(num_blocks=integer(20), block_size=size)
    rows = jnp.arange(40, dtype=jnp.int32).reshape(2, 20)
    on_device = jattn.AttentionMetadata.from_arrays(
        *(rows, batch.seq_lens, batch.query_start_loc), num_tokens=integer(2), block_size=size
    )
    assert on_device.slot_mapping.tolist() == [299, 324]
    group = jb.BlockGroup(size, integer(100), kernel_block_size=integer(2))
    tables = jb.init_block_tables([group], integer(2), stores_kernel_blocks=True)
    assert tables.tables[0].shape == (2, 800)
    assert jb.layer_slot_mapping([1], integer(2), integer(100), size).tolist() == [3201]


def test_sizes_past_int32_are_counted_in_full():
    many = np.int32(2**20)
    with pytest.raises(ValueError, match="4294967296 slots"):
        jb.check_slot_range(many, np.int32(2**10), num_layers=np.int32(4))
    jattn.AttentionMetadata.from_lengths([1], [1], [[0]], 16).check(
        num_blocks=np.int32(2**28), block_size=np.int32(16)
    )
    aligned = jb.align_hybrid_block_size(
        bytes_per_token=many,
        state_bytes=np.int32(2**31 - 1),
        kernel_sizes={"flash": [np.int32(16)]},
        max_model_len=np.int32(32768),
    )
    assert aligned.page_bytes == 2**31
    assert jb.aligned_row_width(np.int32(2**31 - 1), np.int32(48)) == 2**31
    with pytest.raises(ValueError, match="block_size: 0, but must be an integer of at least 1"):
        jb.aligned_row_width(7, 0)


def test_pool_sizes_have_int32_slots():
    model = jb.HybridModel(6, 23, bytes_per_token=1024, state_bytes=1085440)
    plan = jb.two_pools(model, {"flash": [jb.MultipleOf(16)]})
    with pytest.raises(ValueError, match="since slots are int32"):
        plan.pool_sizes(2**55, max_num_seqs=64, max_model_len=4096)


def test_layers_past_int32_do_not_alias_another_layer():
    assert jb.layer_block_tables([[1, 2]], 2**10, 2**22).tolist() == [[-1, -1]]
    assert jb.layer_slot_mapping([1, -1], jnp.int32(2**10), 2**20, 16).tolist() == [-1, -1]
    assert jb.layer_slot_mapping([1, 2**31 - 1], 0, 2**30, 16).tolist() == [1, 2**31 - 1]
    assert jb.layer_slot_mapping([15, 16], 2**27 - 1, 1, 16).tolist() == [2**31 - 1, -1]
    assert jb.layer_block_tables([0, 1], -1, 2).tolist() == [-1, -1]


def test_kernel_blocks_past_int32_do_not_alias_another_block():
    most = 2**29 - 1
    expanded = jb.expand_block_ids([most, most + 1, 2**30, -(2**30), 0], 4).reshape(5, 4)
    last = [4 * most + j for j in range(4)]
    assert expanded.tolist() == [last, [-1] * 4, [-1] * 4, [-1] * 4, [0, 1, 2, 3]]
    assert jb.expand_block_ids([0, 1], 2, stride=2**40).tolist() == [0, 1, -1, -1]
