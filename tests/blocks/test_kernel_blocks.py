"""Kernel blocks: choosing their size, expanding tables, slots that do not depend on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jattn.blocks as jb
from tests.data.blocks.golden import VERSIONS, golden, kernel_size


def test_expansion_of_vllm_023():
    for case in golden("kernel_block_expansion", "0.23.0")["cases"]:
        expanded = np.asarray(
            jb.expand_block_ids(case["kv_block_ids"], case["blocks_per_kv_block"])
        )
        prefix = case["kernel_block_ids_prefix"]
        assert expanded[: len(prefix)].tolist() == prefix
        assert len(expanded) == case["num_kernel_blocks"]
    for case in golden("kernel_block_expansion", "0.23.0")["v1_constructor_errors"]:
        with pytest.raises(ValueError, match=f"kernel_block_size: {case['kernel_block_size']}, "):
            jb.BlockGroup(case["block_size"], 1, case["kernel_block_size"])


def test_expansion_of_vllm_032_with_strides():
    for case in golden("kernel_block_expansion", "0.32.0")["cases"]:
        expanded = jb.expand_block_ids(
            case["block_table"],
            case["blocks_per_kv_block"],
            stride=case["kernel_block_stride"] or None,
        )
        np.testing.assert_array_equal(expanded, case["kernel_block_table"])


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(1, 40), st.integers(0, 5)
)
def test_expand_then_contract(ids, n, gap):
    stride = n + gap if n > 1 else n
    expanded = np.asarray(jb.expand_block_ids(np.asarray(ids, np.int32), n, stride=stride))
    np.testing.assert_array_equal(expanded[::n] // stride, ids)
    np.testing.assert_array_equal(expanded % stride, np.tile(np.arange(n), len(ids)))


def test_bad_strides_are_named():
    with pytest.raises(ValueError, match="stride: 2, but must be an integer of at least 3"):
        jb.expand_block_ids([1], 3, stride=2)
    with pytest.raises(ValueError, match="stride: 0, but must be"):
        jb.expand_block_ids([1], 3, stride=0)
    with pytest.raises(ValueError, match="blocks_per_kv_block: 0, but must be"):
        jb.expand_block_ids([1], 0)
    tables = jb.init_block_tables([jb.BlockGroup(16, 2)], 1)
    with pytest.raises(ValueError, match="strides: 2 entries, but must be one per group, 1"):
        jb.kernel_block_tables(tables, strides=(1, 1))


def test_kernel_block_tables_are_a_view_of_the_tables():
    groups = [jb.BlockGroup(528, 3, 16), jb.BlockGroup(64, 2), jb.BlockGroup(64, 2, 32)]
    ids, counts = jb.pack_block_ids([[[4, 9], [5], [7, 6]]], widths=(2, 2, 2))
    tables = jb.init_block_tables(groups, 2)
    stored = jb.init_block_tables(groups, 2, stores_kernel_blocks=True)
    tables, _ = jb.append_block_ids(tables, [1], ids, counts)
    stored, _ = jb.append_block_ids(stored, [1], ids, counts)
    assert tables.num_blocks[:, 1].tolist() == [2, 1, 2]
    assert stored.num_blocks[:, 1].tolist() == [66, 1, 4]
    gathered = jb.gather_block_tables(tables, [1])
    view = jax.jit(jb.kernel_block_tables)(tables, gathered)
    assert [x.shape for x in view] == [(1, 99), (1, 2), (1, 4)]
    for expanded, kept, count in zip(
        view, jb.kernel_block_tables(stored), stored.num_blocks[:, 1].tolist(), strict=True
    ):
        np.testing.assert_array_equal(expanded[0, :count], kept[1, :count])
    with_stride = jb.kernel_block_tables(tables, gathered, strides=(40, None, None))[0]
    assert with_stride[0, 33:36].tolist() == [360, 361, 362]


def test_ids_whose_kernel_blocks_pass_int32_are_refused():
    groups = [jb.BlockGroup(16, 2), jb.BlockGroup(48, 2, 16)]
    tables = jb.init_block_tables(groups, 2, stores_kernel_blocks=True)
    most = 2**31 // 3 - 1
    ids, counts = jb.pack_block_ids([[[2**31 - 1], [most]], [[4], [most + 1]]])
    appended, refused = jax.jit(jb.append_block_ids)(tables, np.arange(2), ids, counts)
    assert refused.tolist() == [False, True]
    assert appended.num_blocks.tolist() == [[1, 0], [3, 0]]
    assert appended.tables[0][0, 0] == 2**31 - 1
    assert appended.tables[1][0, :3].tolist() == [3 * most, 3 * most + 1, 3 * most + 2]
    message = (
        rf"block_ids\[1\]: {most + 1} for sequence 1, but must be at most {most}, whose kernel"
    )
    with pytest.raises(ValueError, match=rf"1 wrong (?s:.)*{message}"):
        jb.append_block_ids(tables, [0, 1], ids, counts)
    # Tables of the manager's ids take them all, and past the counts nothing is read.
    _, refused = jb.append_block_ids(jb.init_block_tables(groups, 2), [0, 1], ids, counts)
    assert not refused.any()
    _, refused = jb.append_block_ids(tables, [0, 1], ids, counts * np.array([[1, 1], [1, 0]]))
    assert not refused.any()


def test_slots_do_not_depend_on_the_kernel_block():
    context = jb.ContextParallel(size=2, rank=1, interleave=32)
    ids, counts = jb.pack_block_ids([[[3, 1, 2]]])
    seen = []
    for kernel in (None, 32):
        for stores in (False, True):
            tables = jb.init_block_tables(
                [jb.BlockGroup(64, 4, kernel, context)], 1, stores_kernel_blocks=stores
            )
            tables, _ = jb.append_block_ids(tables, [0], ids, counts)
            seen.append(jb.compute_slot_mapping(tables, [0], [0, 400], np.arange(400)))
    for other in seen[1:]:
        np.testing.assert_array_equal(seen[0], other)


def cases(version):
    for case in golden("select_common_block_size", version)["cases"]:
        yield case, [[kernel_size(size) for size in sizes] for sizes in case["backends"]]


@pytest.mark.parametrize("version", VERSIONS)
def test_kernel_block_is_what_vllm_selects(version):
    for case, backends in cases(version):
        block = case["kv_block_size"]
        if "error" in case:
            with pytest.raises(ValueError, match=f"divides {block} and suits") as error:
                jb.select_kernel_block_size(block, backends)
            for i, sizes in enumerate(backends):
                assert f"backend {i} takes {sizes or 'no size at all'}" in str(error.value)
        else:
            assert jb.select_kernel_block_size(block, backends) == case["kernel_block_size"]
        for i, sizes in enumerate(backends):
            assert jb.supports_block_size(sizes, block) == case["supports_block_size"][i]
            assert jb.preferred_block_size(sizes, 16) == case["preferred_16"][i]
            assert jb.preferred_block_size(sizes, block) == case["preferred_kb"][i]
        common = case.get("preferred_common_16")
        if isinstance(common, int):
            assert jb.preferred_common_block_size(backends, 16, as_vllm=True) == common
        elif common is not None:
            with pytest.raises(ValueError, match="share no block size"):
                jb.preferred_common_block_size(backends, 16, as_vllm=True)
        if any(sizes == [] for sizes in backends):
            continue
        try:
            block = jb.preferred_common_block_size(backends, 16)
        except ValueError as error:
            assert "share no block size" in str(error)  # noqa: PT017
        else:
            assert block % jb.select_kernel_block_size(block, backends) == 0


def test_the_preferred_block_is_one_that_all_backends_can_read():
    sizes = {"a": [jb.MultipleOf(32)], "b": [16, 64]}
    assert jb.preferred_common_block_size(sizes, 16, as_vllm=True) == 32  # unreadable
    assert jb.preferred_common_block_size(sizes, 16) == 64
    plan = jb.plan_hybrid_cache(jb.HybridModel(7, 20, 1152, 2170880), sizes).plan
    assert (plan.block_size, plan.kernel_block_size) == (64, 64)


def test_sizes_may_come_from_generators():
    def sizes():
        return {"a": (size for size in [jb.MultipleOf(16)]), "b": (size for size in (64, 16))}

    assert jb.preferred_block_size((size for size in (64, 32)), 48) == 32
    assert jb.preferred_common_block_size(sizes(), 16) == 16
    model = jb.HybridModel(6, 10, 2048, 8192)
    for make in (jb.two_pools, jb.one_state_per_page, jb.states_per_page, jb.pages_per_state):
        assert make(model, sizes()).kernel_block_size == 16
    assert jb.states_in_pages(model, sizes()).kernel_block_size == 16
    aligned = jb.align_hybrid_block_size(
        bytes_per_token=2048, state_bytes=8192, kernel_sizes=sizes(), max_model_len=64
    )
    assert aligned.kernel_block_size == 16


def test_no_common_kernel_block_names_every_backend():
    with pytest.raises(ValueError, match="suits every backend") as error:
        jb.select_kernel_block_size(
            528, {"flash": [jb.MultipleOf(16)], "decode": [64, 128], "sparse": []}
        )
    text = str(error.value)
    assert "flash takes [MultipleOf(16)]: 528 suits it, but not all the others" in text
    assert "decode takes [64, 128]: none of them divides 528" in text
    assert "sparse takes no size at all" in text
    with pytest.raises(ValueError, match=r"backend 0 has 16\.0, but must be a positive integer"):
        jb.select_kernel_block_size(16, [[16.0]])
    with pytest.raises(ValueError, match="block_size: 0, but must be an integer of at least 1"):
        jb.select_kernel_block_size(0, [[16]])


@pytest.mark.parametrize("version", VERSIONS)
def test_local_lengths_of_vllm(version):
    for case in golden("block_misc", version)["dcp_local_seq_lens"]:
        size, seq_lens = case["dcp_size"], np.asarray(case["seq_lens"], np.int32)
        expected = np.asarray(case["local_seq_lens"]).reshape(len(seq_lens), size)
        for rank in range(size):
            context = jb.ContextParallel(size, rank, case["cp_interleave"])
            local = np.asarray(jb.local_lengths(seq_lens, context))
            assert local.tolist() == [context.local_length(n) for n in seq_lens.tolist()]
            np.testing.assert_array_equal(local, expected[:, rank])


def test_slots_of_all_ranks_where_the_interleave_is_wider_than_the_kernel_block():
    """vLLM 0.23.0 has collisions here and loses tokens; 0.32.0 is right."""
    for case in golden("cp_interleave_vs_kernel_block", "0.32.0")["cases"]:
        blocks, size = case["kv_block_ids"], case["block_size"]
        kernel = case["kernel_block_size"] or next(
            k for k in (16, 8, 1) if size % k == 0 and k < case["cp_interleave"]
        )
        context = jb.ContextParallel(case["cp_size"], 0, case["cp_interleave"])
        tables = jb.init_block_tables(
            [jb.BlockGroup(size, len(blocks), kernel, context)], 1, stores_kernel_blocks=True
        )
        tables, _ = jb.append_block_ids(tables, [0], *jb.pack_block_ids([[blocks]]))
        for rank in case["ranks"]:
            total = sum(length for _, _, length in rank["runs"])
            expected = np.concatenate(
                [
                    np.full(length, -1) if slot < 0 else slot + np.arange(length)
                    for _, slot, length in rank["runs"]
                ]
            )
            slots = jb.compute_slot_mapping(
                tables, [0], [0, total], np.arange(total), rank=np.int32(rank["rank"])
            )
            np.testing.assert_array_equal(slots[0], expected)


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 4), st.integers(1, 7), st.sampled_from([4, 6, 16]), st.integers(1, 90))
def test_slots_of_all_ranks_partition_the_positions(size, interleave, block, tokens):
    """For any interleave, whether it divides the block or not: each token once, no slot twice."""
    owners = np.zeros(96, np.int64)
    context = jb.ContextParallel(size, 0, interleave)
    group = jb.BlockGroup(block, 24, context=context)
    empty = jb.init_block_tables([group], 1)
    for rank in range(size):
        ids = (np.arange(24, dtype=np.int32) * 7 + rank) % 31
        tables, _ = jb.append_block_ids(empty, 0, [ids], [group.blocks_for(tokens)])
        (slots,) = np.asarray(
            jb.compute_slot_mapping(
                tables, [0], [0, tokens], np.arange(96, dtype=np.int32), rank=np.int32(rank)
            )
        )
        owners += slots >= 0
        mine = slots[slots >= 0]
        assert len(set(mine.tolist())) == len(mine) == context.local_length(tokens, rank)
        # The rank fills its blocks in order, without gaps.
        assert mine.tolist() == [int(ids[i // block]) * block + i % block for i in range(len(mine))]
    assert owners.tolist() == [1] * tokens + [0] * (96 - tokens)


def test_rank_may_be_known_on_the_device_only():
    static = []
    for rank in range(4):
        tables = jb.init_block_tables(
            [jb.BlockGroup(4, 8, context=jb.ContextParallel(4, rank, 3))], 1
        )
        tables, _ = jb.append_block_ids(tables, 0, [np.arange(8, dtype=np.int32)], [8])
        static.append(jb.compute_slot_mapping(tables, [0], [0, 40], np.arange(40)))
    ranks = jnp.arange(4, dtype=jnp.int32)
    dynamic = jax.jit(
        jax.vmap(
            lambda rank: jb.compute_slot_mapping(tables, [0], [0, 40], np.arange(40), rank=rank)
        )
    )(ranks)
    np.testing.assert_array_equal(dynamic, np.stack(static))


def test_lengths_and_ranks_that_do_not_exist_are_named():
    context = jb.ContextParallel(2, 0, 4)
    for function, argument in ((jb.local_lengths, "seq_lens"), (jb.local_positions, "positions")):
        for some in (context, jb.ContextParallel()):
            with pytest.raises(ValueError, match=rf"{argument}: float64\[1\], but must be an int"):
                function(np.asarray([2.7]), some)
            with pytest.raises(ValueError, match=rf"{argument}: int64 values .* within int32"):
                function(np.asarray([2**32 + 5]), some)
        for rank in (7, np.int64(2), jnp.int32(-1)):
            with pytest.raises(ValueError, match=rf"rank: {rank}, but must be in 0\.\.1$"):
                function([16], context, rank=rank)
        with pytest.raises(ValueError, match=r"rank: float 0\.5, but must be an integer array"):
            function([16], context, rank=0.5)
    with pytest.raises(ValueError, match=r"rank: 2, but must be an integer in 0\.\.1$"):
        context.local_length(16, 2)
    groups = [jb.BlockGroup(16, 2, context=context), jb.BlockGroup(16, 2)]
    tables = jb.init_block_tables(groups, 1)
    with pytest.raises(ValueError, match=r"rank: 5, but must be in 0\.\.1$"):
        jb.compute_slot_mapping(tables, [0], [0, 1], [0], rank=5)
    with pytest.raises(ValueError, match=r"rank: -1, but must be in 0\.\.1$"):
        jb.gather_block_tables(tables, [0], rank=-1)
    # A group that is not distributed is whole on every rank.
    assert jb.local_lengths([5], jb.ContextParallel(), rank=5).tolist() == [5]
    with pytest.raises(
        ValueError, match=r"interleave: 1073741824, but must be at most 536870911, "
    ):
        jb.ContextParallel(4, 0, 2**30)
    assert jb.local_lengths([7], jb.ContextParallel(2, 1, 2**30 - 1)).tolist() == [0]


def test_tokens_without_a_slot_are_padding():
    groups = [jb.BlockGroup(16, 4), jb.BlockGroup(2**30, 4), jb.BlockGroup(16, 4, has_slots=False)]
    tables = jb.init_block_tables(groups, 3)
    ids, counts = jb.pack_block_ids([[[5, 6], [1, 2], [5]], [[7], [3], [5]]])
    tables, _ = jb.append_block_ids(tables, np.asarray([2, 0]), ids, counts)
    # Tokens: two in row 2, none in row 1, three of padding, two in row 0, one in no row.
    mapping = jax.jit(jb.compute_slot_mapping)(
        tables,
        np.asarray([2, 1, -1, 0]),
        np.asarray([0, 2, 2, 5, 7]),
        np.asarray([31, 32, 0, 1, 2, 3, -1, 4]),
    )
    assert mapping[0].tolist() == [111, -1, -1, -1, -1, 115, -1, -1]
    # Block 1 of 2^30 tokens ends at 2^31 - 1; block 3 does not fit int32 and is not written.
    assert mapping[1].tolist() == [2**30 + 31, 2**30 + 32, -1, -1, -1, -1, -1, -1]
    assert mapping[2].tolist() == [-1] * 8


def test_starts_that_decrease_write_into_no_block_of_another_sequence():
    tables = jb.init_block_tables([jb.BlockGroup(16, 2)], 4)
    ids, counts = jb.pack_block_ids([[[10]], [[20]], [[30]]])
    tables, _ = jb.append_block_ids(tables, np.arange(3), ids, counts)
    mapping = jax.jit(jb.compute_slot_mapping)
    for rows, starts, expected in (
        ([0, 1, 2, -1], [0, 2, 1, 3, 3], [160, 161, -1]),
        ([0, 1, -1, -1], [0, 1, 2, 0, 0], [160, 321, -1]),  # padded with zeros
        ([0, 1, -1, -1], [0, 1, 2, 2, 2], [160, 321, -1]),
    ):
        step = (np.asarray(rows), np.asarray(starts), np.asarray([0, 1, 0]))
        assert mapping(tables, *step).tolist() == [expected]
        if np.all(np.diff(starts) >= 0):
            assert jb.compute_slot_mapping(tables, *step).tolist() == [expected]
        else:
            with pytest.raises(ValueError, match=r"query_start_loc: \d at \[\d\], .* at least 2, "):
                jb.compute_slot_mapping(tables, *step)


def test_steps_without_sequences_or_tokens():
    tables = jb.init_block_tables([jb.BlockGroup(16, 4)] * 2, 3)
    empty = jb.compute_slot_mapping(tables, [], [0], [0, 1])
    assert empty.tolist() == [[-1, -1], [-1, -1]]
    assert jb.compute_slot_mapping(tables, [0], [0, 0], []).shape == (2, 0)
    assert jb.gather_block_tables(tables, [])[0].shape == (0, 4)
    ids, counts = jb.pack_block_ids([[[1], [2]], [[3], []]])
    empty = (np.zeros((0,), np.int32), [x[:0] for x in ids], counts[:, :0])
    _, refused = jb.append_block_ids(tables, *empty)
    assert refused.shape == (0,)


def test_tokens_of_no_sequence_and_slots_past_int32_are_padding():
    tables = jb.init_block_tables([jb.BlockGroup(16, 2)], 1)
    tables, _ = jb.append_block_ids(tables, 0, [[2**27 - 1, 2**27]], [2])
    (slots,) = jb.compute_slot_mapping(tables, [0], [8, 32], np.arange(32)).tolist()
    assert slots == [*[-1] * 8, *range(2**31 - 8, 2**31), *[-1] * 16]


def test_slots_past_int32_are_refused_when_planning():
    jb.check_slot_range(2**31 // 16 - 1, 16)
    with pytest.raises(ValueError, match=r"2147483648 slots, but must be at most 134217727"):
        jb.check_slot_range(2**27, 16)
    with pytest.raises(ValueError, match="at most 8191"):
        jb.check_slot_range(9000, 262144)
    with pytest.raises(ValueError, match="in 32 layer"):
        jb.check_slot_range(2**23, 16, num_layers=32)


@pytest.mark.parametrize("version", VERSIONS)
def test_row_widths(version):
    for block, blocks, width in golden("block_misc", version)[
        "block_table_width_[block_size,max_blocks,width]"
    ]:
        if version == "0.32.0" or 128 % block == 0:
            assert jb.aligned_row_width(blocks, block) == width
