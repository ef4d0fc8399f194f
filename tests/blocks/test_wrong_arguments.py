"""Wrong arguments raise a `ValueError` that names the argument, its value and what it must be."""

import re

import pytest

import jattn.blocks as jb

KERNELS = {"flash": [jb.MultipleOf(16)]}
MODEL = jb.HybridModel(6, 23, bytes_per_token=1024, state_bytes=20480)
PLAN = jb.two_pools(MODEL, KERNELS)
TABLES = jb.init_block_tables([jb.BlockGroup(block_size=16, max_blocks=4)], max_num_seqs=2)
SIZE = "a positive integer or MultipleOf(n)"


def align(kernel_sizes, **more):
    return jb.align_hybrid_block_size(
        bytes_per_token=4096,
        state_bytes=8192,
        kernel_sizes=kernel_sizes,
        max_model_len=64,
        **more,
    )


WRONG = {
    "ragged ids": (
        lambda: jb.append_block_ids(TABLES, [0, 1], [[[1, 2], [3]]], [[2, 1]]),
        "block_ids[0]: list [[1, 2], [3]], but must be an integer array",
    ),
    "ragged rows": (
        lambda: jb.append_block_ids(TABLES, [[0], [1, 2]], [[[1]]], [[1]]),
        "seq_indices: list [[0], [1, 2]], but must be an integer array",
    ),
    "no ids": (
        lambda: jb.append_block_ids(TABLES, [0], None, [[1]]),
        "block_ids: NoneType None, but must be a tuple with the ids of each of 1 group(s)",
    ),
    "kernel sizes of align": (
        lambda: align({"a": [0]}),
        f"kernel_sizes: a has 0, but must be {SIZE}",
    ),
    "kernel sizes of a choice": (
        lambda: jb.plan_hybrid_cache(MODEL, {"a": [0]}),
        f"kernel_sizes: a has 0, but must be {SIZE}",
    ),
    "kernel sizes of two pools": (
        lambda: jb.two_pools(MODEL, [[16], None]),
        "kernel_sizes: backend 1 has None, but must be a list of positive integers",
    ),
    "kernel sizes of vLLM's plan": (
        lambda: jb.one_state_per_page(MODEL, None),
        "kernel_sizes: NoneType None, but must be the sizes that each backend takes",
    ),
    "no block for two pools": (
        lambda: jb.two_pools(MODEL, {"a": [16], "b": [24]}),
        "kernel_sizes: the backends share no block size",
    ),
    "block of two pools": (
        lambda: jb.two_pools(MODEL, KERNELS, block_size=0),
        "block_size: 0, but must be an integer of at least 1",
    ),
    "supported sizes": (
        lambda: jb.supports_block_size([0], 16),
        f"supports_block_size: 1 wrong argument(s)\n  - sizes: 0, but must be {SIZE}",
    ),
    "supported sizes of None": (
        lambda: jb.supports_block_size(None, 16),
        "sizes: None, but must be a list of positive integers and MultipleOf(n)",
    ),
    "supported block": (
        lambda: jb.supports_block_size([16], 0),
        "block_size: 0, but must be an integer of at least 1",
    ),
    "preferred sizes": (
        lambda: jb.preferred_block_size(None, 16),
        "sizes: None, but must be a list of positive integers and MultipleOf(n)",
    ),
    "preferred default": (
        lambda: jb.preferred_block_size([16], 0),
        "default: 0, but must be an integer of at least 1",
    ),
    "cost of no lengths": (
        lambda: PLAN.cost([]),
        "CachePlan 'two pools'.cost: 1 wrong argument(s)\n  - lengths: empty, but must be one",
    ),
    "cost of a length": (
        lambda: PLAN.cost([8, 0]),
        "lengths[1]: 0, but must be an integer of at least 1",
    ),
    "cost of a state block": (
        lambda: PLAN.cost([8], state_block_size=0),
        "state_block_size: 0, but must be an integer of at least 1",
    ),
    "no pages": (
        lambda: jb.states_in_pages(MODEL, KERNELS, max_pages=0),
        "max_pages: 0, but must be an integer of at least 1",
    ),
    "no state": (lambda: jb.StateLayout((), ()), "shapes: empty, but must be one shape or more"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case):
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
