"""Block tables against vLLM's results, and what jattn promises beyond them."""

import dataclasses
import functools
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jattn.blocks as jb
from tests.data.blocks.golden import VERSIONS, golden

append = jax.jit(jb.append_block_ids, donate_argnums=0)
gather = jax.jit(jb.gather_block_tables)
slot_mapping = jax.jit(jb.compute_slot_mapping)


def tables_of(init, version):
    """Return the tables that a golden case starts from."""
    sizes = init["block_sizes"]
    every = [True] * len(sizes)
    context = jb.ContextParallel(init["cp_size"], init["cp_rank"], init["cp_interleave"])
    groups = [
        jb.BlockGroup(size, width, kernel, context if sharded else jb.ContextParallel(), slots)
        for size, width, kernel, sharded, slots in zip(
            sizes,
            init["max_num_blocks_per_group"],
            init.get("kernel_block_sizes", sizes),
            init.get("dcp_sharded", every),
            init.get("slot_mapping_enabled", every),
            strict=True,
        )
    ]
    kernel = version == "0.23.0"
    return jb.init_block_tables(groups, init["max_num_reqs"], stores_kernel_blocks=kernel)


def padded(values, length, fill=0):
    return np.asarray([*values, *[fill] * (length - len(values))], np.int32)


def rows_of(tables):
    """Return the valid prefixes, per group and row."""
    counts = np.asarray(tables.num_blocks)
    return [
        [row[:n].tolist() for row, n in zip(np.asarray(table), count, strict=True)]
        for table, count in zip(tables.tables, counts, strict=True)
    ]


# The newest version in every run, older ones in CI.
BY_AGE = [
    pytest.param(v, marks=() if v == max(VERSIONS) else pytest.mark.extended) for v in VERSIONS
]


@pytest.mark.parametrize("version", BY_AGE)
def test_every_step_of_vllm_block_tables(version):
    for case in golden("block_tables_v2", version)["cases"]:
        init, tables = case["init"], tables_of(case["init"], version)
        seqs, tokens = init["max_num_reqs"], init["max_num_batched_tokens"]
        for step in case["steps"]:
            for row, overwrite, ids in step["appends"]:
                block_ids, counts = jb.pack_block_ids(
                    [ids], widths=[group.max_blocks for group in tables.groups]
                )
                start = np.asarray([overwrite])
                tables, refused = append(
                    tables, np.asarray([row]), block_ids, counts, overwrite=start
                )
                assert not refused.any()
            assert tables.num_blocks.tolist() == step["num_blocks"]
            assert rows_of(tables) == step["rows"]
            if "idx_mapping" not in step:
                continue
            seq_indices = padded(step["idx_mapping"], seqs, -1)
            for rows, prefixes in zip(
                gather(tables, seq_indices), step["gathered_valid_prefix"], strict=True
            ):
                prefixes = [*prefixes, *[[]] * (seqs - len(prefixes))]
                expected = np.stack([padded(x, rows.shape[1]) for x in prefixes])
                np.testing.assert_array_equal(rows, expected)
            named = step.get("slot_idx_mapping", step["idx_mapping"])
            starts = padded(step["query_start_loc"], seqs + 1, step["query_start_loc"][-1])
            slots = slot_mapping(
                tables, padded(named, seqs, -1), starts, padded(step["positions"], tokens)
            )
            expected = [padded(x, tokens, jb.PAD_SLOT_ID) for x in step["slot_mappings"]]
            np.testing.assert_array_equal(slots, np.stack(expected))


@pytest.mark.parametrize("version", BY_AGE)
def test_every_row_operation_of_vllm(version):
    for case in golden("block_tables_v1", version)["cases"]:
        init, cp = case["init"], case["cp"]
        seqs, tokens = init["max_num_reqs"], init["max_num_batched_tokens"]
        ranks = cp["dcp"] * cp["pcp"] if version == "0.23.0" else cp["dcp"]
        rank = cp["pcp_rank"] * cp["dcp"] + cp["dcp_rank"]
        rank = rank if version == "0.23.0" else cp["dcp_rank"]
        case_init = init | {
            "cp_size": ranks,
            "cp_rank": rank,
            "cp_interleave": init["cp_kv_cache_interleave_size"],
            "max_num_blocks_per_group": init["max_num_blocks"],
        }
        tables = tables_of(case_init, version)
        for group, blocks, width in zip(
            tables.groups, init["max_num_blocks"], case["widths"], strict=True
        ):
            if version == "0.32.0" or group.block_size & (group.block_size - 1) == 0:
                per_block = group.blocks_per_kv_block
                assert jb.aligned_row_width(blocks, group.block_size) * per_block == width
        for entry in case["ops"]:
            kind, *args = entry["op"]
            if kind in ("add", "append"):
                block_ids, counts = jb.pack_block_ids(
                    [args[1]], widths=[group.max_blocks for group in tables.groups]
                )
                start = np.asarray([kind == "add"])
                tables, _ = append(
                    tables, np.asarray([args[0]]), block_ids, counts, overwrite=start
                )
            elif kind == "clear":
                tables = jax.jit(jb.clear_row)(tables, args[0])
            elif kind == "swap":
                tables = jax.jit(jb.swap_rows)(tables, *args)
            elif kind == "move":
                kept = jax.tree.map(jnp.copy, tables)
                tables = jax.jit(jb.move_row)(tables, *args)
                if version == "0.23.0" and args[0] != args[1]:  # it keeps the source row
                    put_back = [
                        t.at[args[0]].set(k[args[0]])
                        for t, k in zip(tables.tables, kept.tables, strict=True)
                    ]
                    counts = tables.num_blocks.at[:, args[0]].set(kept.num_blocks[:, args[0]])
                    tables = jb.BlockTables(
                        tuple(put_back), counts, tables.groups, tables.stores_kernel_blocks
                    )
            else:
                num_seqs, step = args
                starts = padded(step["query_start_loc"], seqs + 1, step["query_start_loc"][-1])
                slots = slot_mapping(
                    tables,
                    padded(range(num_seqs), seqs, -1),
                    starts,
                    padded(step["positions"], tokens),
                )
                expected = [padded(x, tokens, -1) for x in step["slot_mappings"]]
                np.testing.assert_array_equal(slots, np.stack(expected))
            assert tables.num_blocks.tolist() == entry["num_blocks_per_row"]
        assert rows_of(tables) == case["final_rows_valid_prefix"]


GROUPS = (
    jb.BlockGroup(block_size=16, max_blocks=6),
    jb.BlockGroup(block_size=528, max_blocks=4, kernel_block_size=16),
)


def batch(*sequences, widths=(3, 3)):
    return jb.pack_block_ids(sequences, widths=widths)


@functools.cache
def filled():
    """Return tables of two groups and four rows; 0, 1 and 3 hold blocks."""
    tables = jb.init_block_tables(GROUPS, 4)
    ids, counts = batch([[5, 6, 7], [1]], [[8], [2, 3]], [[9, 10], []])
    tables, _ = jb.append_block_ids(tables, np.asarray([0, 1, 3]), ids, counts)
    return tables


def test_one_call_appends_a_batch_and_one_sequence_the_same_way():
    ids, counts = batch([[11], [12]], [[13, 14], []])
    together, refused = jb.append_block_ids(filled(), np.asarray([3, 0]), ids, counts)
    assert refused.tolist() == [False, False]
    one = filled()
    for i, row in enumerate((3, 0)):
        one, flag = jb.append_block_ids(one, row, [x[i] for x in ids], counts[:, i])
        assert flag.shape == ()
    assert rows_of(one) == rows_of(together)
    assert rows_of(together)[0] == [[5, 6, 7, 13, 14], [8], [], [9, 10, 11]]


def test_a_full_row_is_refused_and_nothing_is_lost():
    ids, counts = batch([[21, 22, 23], [24, 25, 26]], [[31], [32]], widths=(3, 3))
    fits, crowded = np.asarray([2, 0]), np.asarray([1, 0])
    tables, refused = append(jax.tree.map(jnp.copy, filled()), fits, ids, counts)
    assert refused.tolist() == [False, False]
    # Row 1 has room for three blocks in group 0 but not in group 1: neither group may change.
    tables, refused = append(jax.tree.map(jnp.copy, filled()), crowded, ids, counts)
    assert refused.tolist() == [True, False]
    assert [rows[1] for rows in rows_of(tables)] == [[8], [2, 3]]
    assert [rows[0] for rows in rows_of(tables)] == [[5, 6, 7, 31], [1, 32]]
    with pytest.raises(ValueError, match=r"sequence 1 in group 1 would end at 5, .* at most 4"):
        jb.append_block_ids(filled(), crowded, ids, counts)
    with pytest.raises(ValueError, match=r"sequence 1 in group 1 would end at 5, .* at most 4"):
        jb.check_append(filled(), crowded, ids, counts)
    # Overwriting starts at 0, where it fits.
    tables, refused = append(
        jax.tree.map(jnp.copy, filled()), crowded, ids, counts, overwrite=np.asarray([True, False])
    )
    assert not refused.any()
    assert [rows[1] for rows in rows_of(tables)] == [[21, 22, 23], [24, 25, 26]]


def test_row_capacity_where_vllm_raises():
    case = golden("block_tables_v2_new_behaviour", "0.32.0")["row_capacity_error"]
    sizes, widths = case["init"]["block_sizes"], case["init"]["max_num_blocks_per_group"]
    tables = jb.init_block_tables(
        [jb.BlockGroup(size, width) for size, width in zip(sizes, widths, strict=True)], 2
    )
    row, overwrite, ids = case["first"]
    tables, _ = jb.append_block_ids(tables, [row], *jb.pack_block_ids([ids]), overwrite=overwrite)
    row, overwrite, ids = case["second"]
    assert "request 0, group 0 exceeds row capacity (5 > 4)" in case["error"][1]
    with pytest.raises(ValueError, match=r"sequence 0 in group 0 would end at 5, .* at most 4"):
        jb.append_block_ids(tables, [row], *jb.pack_block_ids([ids]), overwrite=overwrite)


def test_repeated_and_padded_sequences_in_one_call():
    ids, counts = batch([[1], [1]], [[2], [2]], [[3], [3]], [[4], [4]])
    rows = np.asarray([2, 2, -1, 99])
    tables, refused = append(jax.tree.map(jnp.copy, filled()), rows, ids, counts)
    assert refused.tolist() == [False, True, False, False]
    assert [x[2] for x in rows_of(tables)] == [[1], [1]]
    assert [x[3] for x in rows_of(tables)] == [[9, 10], []]  # -1 is not the last row
    with pytest.raises(ValueError, match=r"sequence 2 is named again at \[1\]"):
        jb.append_block_ids(filled(), rows, ids, counts)


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_counts_beyond_the_given_ids_are_refused(bad):
    ids, _ = batch([[1], [1]])
    for stores in (False, True):
        tables = jb.init_block_tables(GROUPS, 2, stores_kernel_blocks=stores)
        tables, refused = append(tables, np.asarray([0]), ids, np.asarray([[1], [bad]]))
        assert refused.tolist() == [True]
        assert not tables.num_blocks.any()
        with pytest.raises(ValueError, match=rf"counts\[1\]: {bad} for sequence 0"):
            jb.append_block_ids(tables, np.asarray([0]), ids, np.asarray([[1], [bad]]))


def test_move_swap_and_clear():
    before = rows_of(filled())
    moved = rows_of(jax.jit(jb.move_row)(filled(), 0, 2))
    assert [rows[2] for rows in moved] == [rows[0] for rows in before]
    assert [rows[0] for rows in moved] == [[], []]
    swapped = rows_of(jb.swap_rows(filled(), 0, 2))
    assert [rows[0] for rows in swapped] == [[], []]
    assert [rows[2] for rows in swapped] == [rows[0] for rows in before]
    shifted = rows_of(jb.move_row(filled(), np.asarray([1, 3]), np.asarray([0, 1])))
    assert shifted[0] == [before[0][1], before[0][3], [], []]
    assert rows_of(jb.clear_row(filled(), np.asarray([0, 3])))[0] == [[], [8], [], []]
    for stay in (jb.move_row(filled(), 0, 0), jb.swap_rows(filled(), 1, 1)):
        assert rows_of(stay) == before


@pytest.mark.parametrize(
    ("function", "first", "second"),
    [
        (jb.swap_rows, [0, 1], [1, 2]),
        (jb.swap_rows, [0, 1], [1, 0]),
        (jb.swap_rows, [0, 0], [1, 2]),
        (jb.move_row, [0, 1], [2, 2]),
        (jb.move_row, [0, 0], [2, 3]),
        (jb.copy_row, [0, 1], [2, 2]),
    ],
)
def test_rows_named_twice_lose_and_duplicate_nothing(function, first, second):
    """On the host it is an error; under jit only the first such pair takes effect."""
    with pytest.raises(ValueError, match=r"pair \[1\]: rows \d and \d, but must be of rows not"):
        function(filled(), first, second)
    alone = function(filled(), first[:1], second[:1])
    together = jax.jit(function)(filled(), np.asarray(first), np.asarray(second))
    assert rows_of(together) == rows_of(alone)
    # A pair outside the table is ignored.
    padded_pairs = jax.jit(function)(filled(), np.asarray([-1, *first]), np.asarray([7, *second]))
    assert rows_of(padded_pairs) == rows_of(alone)


def test_moves_that_clash_lose_no_block():
    """All batches of three moves under jit: pairs that clash may keep others from moving."""
    tables = jb.init_block_tables([jb.BlockGroup(16, 1)], 4)
    tables, _ = jb.append_block_ids(
        tables, np.arange(4), [[[10], [20], [30], [40]]], [[1, 1, 0, 1]]
    )
    moves = np.indices([4] * 6, np.int32).reshape(2, 3, -1).transpose(2, 0, 1)
    moved = jax.jit(jax.vmap(lambda move: jb.move_row(tables, *move)))(moves)
    for (source, target), table, held in zip(
        moves, *map(np.asarray, (moved.tables[0], moved.num_blocks)), strict=True
    ):
        rows = np.where(held[0], table[:, 0], 0)
        # A row that no pair moves away is overwritten, as asked.
        asked = np.isin(np.arange(4), target) & ~np.isin(np.arange(4), source)
        must = set(np.asarray([10, 20, 0, 40])[~asked]) - {0}
        found = [x for x in rows if x]
        assert must <= set(found) <= {10, 20, 40}, (source, target)
        assert len(found) == len(set(found)), (source, target)
    move = jax.jit(jb.move_row)
    chain = move(tables, np.asarray([0, 1, 3, -1]), np.asarray([2, 2, 1, 3]))
    assert rows_of(chain) == [[[], [20], [10], [40]]]
    # Row 1 cannot move, so 3 cannot move onto it, nor 2 onto 3, nor 0 onto 2.
    stuck = move(tables, np.asarray([0, 1, 3, 2]), np.asarray([2, 2, 1, 3]))
    assert rows_of(stuck) == [[[10], [20], [], [40]]]


def test_a_fork_copies_rows_and_a_rollback_truncates_them():
    before = rows_of(filled())
    fork = rows_of(jax.jit(jb.copy_row)(filled(), np.asarray([0, 0]), np.asarray([2, 3])))
    assert [rows[:2] for rows in fork] == [rows[:2] for rows in before]
    assert [rows[2] for rows in fork] == [rows[3] for rows in fork] == [rows[0] for rows in before]
    assert rows_of(jb.copy_row(filled(), 1, -1)) == before
    # Rows 0 and 1 hold 3 and 1 blocks of 16 tokens, 1 and 2 of 528.
    short = rows_of(
        jax.jit(jb.truncate_row)(filled(), np.asarray([0, 1, 9]), np.asarray([17, 1, 0]))
    )
    assert [rows[:2] for rows in short] == [[[5, 6], [8]], [[1], [2]]]
    assert rows_of(jb.truncate_row(filled(), 0, 10**6)) == before
    assert rows_of(jb.truncate_row(filled(), 3, -32))[0][3] == []
    context = jb.ContextParallel(2, 1, 24)
    groups = [jb.BlockGroup(16, 8, context=context), jb.BlockGroup(16, 8, has_slots=False)]
    for stores in (False, True):
        tables = jb.init_block_tables(groups, 1, stores_kernel_blocks=stores)
        tables, _ = jb.append_block_ids(tables, 0, [list(range(8))] * 2, [8, 8])
        for tokens in (0, 1, 24, 25, 40, 48, 49, 300):
            cut = jb.truncate_row(tables, 0, tokens).num_blocks[:, 0].tolist()
            assert cut == [min(8, groups[0].blocks_for(tokens)), 8]
    # A kept block keeps all of its kernel blocks, so slots stay the same.
    for stores, held in ((False, 2), (True, 4)):
        group = jb.BlockGroup(32, 4, kernel_block_size=16)
        tables = jb.init_block_tables([group], 1, stores_kernel_blocks=stores)
        tables, _ = jb.append_block_ids(tables, 0, [[5, 9]], [2])
        tables = jb.truncate_row(tables, 0, 40)
        assert tables.num_blocks[0, 0] == held
        tables, _ = jb.append_block_ids(tables, 0, [[7]], [1])
        one = (np.asarray([0]), np.asarray([0, 2]), np.asarray([50, 64]))
        assert jb.compute_slot_mapping(tables, *one).tolist() == [[9 * 32 + 18, 7 * 32]]


def test_gathering_into_narrow_arrays_of_the_step_before():
    rows = np.asarray([3, -1, 0])
    plain = jb.gather_block_tables(filled(), rows)
    gather_into = jax.jit(jb.gather_block_tables, static_argnames="width", donate_argnames="into")
    garbage = tuple(jnp.full((3, width), 77, jnp.int32) for width in (3, 4))
    found = gather_into(filled(), rows, width=(3, None), into=garbage)
    for x, y, width in zip(found, plain, (3, 4), strict=True):
        np.testing.assert_array_equal(x, y[:, :width])
    assert all(x.is_deleted() for x in garbage)  # in place
    assert [x.shape for x in jb.gather_block_tables(filled(), rows, width=2)] == [(3, 2)] * 2
    for width in (0, 5, (2,), 1.5):
        with pytest.raises(ValueError, match=r"width: .* must be from 1 to \[6, 4\]"):
            jb.gather_block_tables(filled(), rows, width=width)
    with pytest.raises(
        ValueError, match=r"into: .* must be int32 of shapes \[\[3, 6\], \[3, 4\]\]"
    ):
        jb.gather_block_tables(filled(), rows, into=found)


def test_what_a_step_needs_is_packed():
    ids, counts = jb.pack_block_ids([], widths=[2, 3], num_seqs=4)
    assert [x.shape for x in ids] == [(4, 2), (4, 3)]
    assert counts.tolist() == [[0] * 4] * 2
    ids, counts = jb.pack_block_ids([[[5, 6], []], [(7,), np.asarray([8])]], num_seqs=3)
    assert [x.tolist() for x in ids] == [[[5, 6], [7, 0], [0, 0]], [[0], [8], [0]]]
    assert counts.tolist() == [[2, 1, 0], [0, 1, 0]]
    assert jb.pack_block_ids([[], []], widths=[], num_seqs=2)[1].shape == (0, 2)
    for bad, options, message in (
        ([], {}, "ids: no sequences and no widths"),
        ([[[1]], [[1], [2]]], {}, r"ids: \[1, 2\] groups, but must be one number of groups"),
        ([[[1]]], {"widths": [1, 1]}, r"ids: \[1, 2\] groups"),
        ([[[1]]] * 2, {"num_seqs": 1}, "num_seqs: 1, but must be an integer of at least 2"),
        ([[[1.5]]], {}, r"ids\[0\]\[0\]: \[1.5\], but must be a list of ids"),
        ([[None]], {}, r"ids\[0\]\[0\]: None, but must be a list of ids"),
        ([[[[1], [2, 3]]]], {}, r"ids\[0\]\[0\]: .* a list of ids"),
        ([[[-1]]], {}, r"ids\[0\]\[0\]: \[-1\], but must be a list of ids from 0"),
        ([[[2**31]]], {}, r"ids\[0\]\[0\]: \[2147483648\], but must"),
        ([[[1]]], {"widths": [None]}, r"widths\[0\]: None, but must be an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            jb.pack_block_ids(bad, **options)


def test_negative_ids_are_refused():
    ids, counts = [np.asarray([[4, -7]]), np.asarray([[1, 2]])], np.asarray([[2], [1]])
    tables, refused = append(jax.tree.map(jnp.copy, filled()), np.asarray([2]), ids, counts)
    assert refused.tolist() == [True]
    assert rows_of(tables) == rows_of(filled())
    with pytest.raises(
        ValueError, match=r"block_ids\[0\]: -7 for sequence 2, but must be at least 0"
    ):
        jb.append_block_ids(filled(), np.asarray([2]), ids, counts)
    _, refused = append(tables, np.asarray([2]), ids, np.asarray([[1], [1]]))  # -7 only pads
    assert refused.tolist() == [False]


def test_values_that_int32_cannot_hold_are_refused():
    far = np.asarray([2**32 + 1])
    with pytest.raises(
        ValueError, match="seq_indices: int64 values from 0 to 4294967297, but must"
    ):
        jb.gather_block_tables(filled(), far)
    with pytest.raises(ValueError, match=r"positions: int64 values .* within int32"):
        jb.compute_slot_mapping(filled(), [0], [0, 1], -far)
    with pytest.raises(ValueError, match="source: uint32 values from 0 to 4294967295"):
        jb.move_row(filled(), np.asarray([2**32 - 1], np.uint32), [0])
    with pytest.raises(ValueError, match="block_tables: int64 values"):
        jb.layer_block_tables(far, 0, 4)
    big_endian = np.asarray([1, 0], ">i4")
    for x, y in zip(
        jb.gather_block_tables(filled(), big_endian),
        jb.gather_block_tables(filled(), [1, 0]),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("pair", [(-1, 0), (0, -1), (4, 0), (0, 4)])
def test_rows_outside_the_table_are_left_alone(pair):
    before = rows_of(filled())
    assert rows_of(jb.move_row(filled(), *pair)) == before
    assert rows_of(jb.swap_rows(filled(), *pair)) == before
    assert rows_of(jb.clear_row(filled(), min(pair) if min(pair) < 0 else max(pair))) == before


def test_gather_gives_zeros_wherever_no_block_is():
    tables, _ = jb.append_block_ids(filled(), [0], *batch([[4], [4]]), overwrite=True)
    first, second = jb.gather_block_tables(tables, [0, -1, 3, 4])
    assert first.tolist() == [[4, 0, 0, 0, 0, 0], [0] * 6, [9, 10, 0, 0, 0, 0], [0] * 6]
    assert second.tolist() == [[4, 0, 0, 0], [0] * 4, [0] * 4, [0] * 4]


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_below_the_window_gather_as_null(size):
    context = jb.ContextParallel(size=size, rank=size - 1, interleave=2)
    group = jb.BlockGroup(4, 8, context=context, sliding_window_reach=9)
    tables = jb.init_block_tables([group, jb.BlockGroup(4, 8)], 1)
    tables, _ = jb.append_block_ids(tables, 0, [[1, 2, 3, 4, 5, 6, 7, 8]] * 2, [8, 8])
    unranked = dataclasses.replace(group, context=dataclasses.replace(context, rank=0))
    told = dataclasses.replace(tables, groups=(unranked, tables.groups[1]))
    for computed in range(30):
        where = {"num_computed_tokens": [computed]}
        row, full = jb.gather_block_tables(tables, [0], **where)
        by_rank, _ = jb.gather_block_tables(told, [0], **where, rank=size - 1)
        # A block is dropped when none of its tokens on this rank is at or after the first seen.
        lowest = max(computed - 9, 0)
        seen = {
            context.local_length(position) // 4
            for position in range(lowest, 200)
            if context.local_length(position + 1) > context.local_length(position)
        }
        expected = [b + 1 if b in seen else 0 for b in range(8)]
        assert row.tolist() == by_rank.tolist() == [expected]
        assert full.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 10**6), max_size=3), st.booleans()),
        max_size=8,
    )
)
def test_append_then_gather_is_a_list(steps):
    tables, lists = jb.init_block_tables(GROUPS[:1], 4), [[] for _ in range(4)]
    for row, ids, overwrite in steps:
        kept = [] if overwrite else lists[row]
        block_ids, counts = jb.pack_block_ids([[ids]], widths=[3])
        tables, refused = append(
            tables, np.asarray([row]), block_ids, counts, overwrite=np.asarray([overwrite])
        )
        assert refused.tolist() == [len(kept) + len(ids) > 6]
        if not refused[0]:
            lists[row] = kept + ids
    (rows,) = gather(tables, np.arange(4))
    np.testing.assert_array_equal(rows, np.stack([padded(x, 6) for x in lists]))


def test_donated_tables_are_not_copied():
    groups = [jb.BlockGroup(16, 4096), jb.BlockGroup(528, 1024)]
    tables = jb.init_block_tables(groups, 256)
    size = sum(table.nbytes for table in tables.tables)
    ids, counts = jb.pack_block_ids([[[1], [2]]] * 2)
    seq_indices = np.arange(2)
    calls = {
        jb.append_block_ids: (tables, seq_indices, ids, counts),
        jb.move_row: (tables, seq_indices, seq_indices + 8),
        jb.swap_rows: (tables, seq_indices, seq_indices + 8),
        jb.clear_row: (tables, seq_indices),
    }
    for function, arguments in calls.items():
        memory = jax.jit(function, donate_argnums=0).lower(*arguments).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= size, function
        assert memory.temp_size_in_bytes < size // 8, function


def test_tables_go_through_vmap_and_scan():
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), filled())
    ids, counts = batch([[1], [2]])
    both, refused = jax.vmap(
        lambda t, row: jb.append_block_ids(t, row, [x[0] for x in ids], counts[:, 0])
    )(stacked, jnp.asarray([0, 1]))
    assert refused.tolist() == [False, False]
    for i in range(2):
        alone, _ = jb.append_block_ids(filled(), i, [x[0] for x in ids], counts[:, 0])
        assert rows_of(jax.tree.map(lambda x, i=i: x[i], both)) == rows_of(alone)

    def read(tables):
        gathered = jb.gather_block_tables(tables, [1, 0])
        slots = jb.compute_slot_mapping(tables, [1, 0], [0, 2, 3], [0, 1, 16])
        return gathered, jb.kernel_block_tables(tables, gathered), slots

    apart = [jax.tree.map(lambda x, i=i: x[i], both) for i in range(2)]
    for x, *ys in zip(
        jax.tree.leaves(jax.jit(jax.vmap(read))(both)),
        *(jax.tree.leaves(read(one)) for one in apart),
        strict=True,
    ):
        np.testing.assert_array_equal(x, np.stack(ys))

    def step(tables, block):
        tables, refused = jb.append_block_ids(tables, 2, [block[None]], jnp.asarray([1]))
        return tables, refused

    empty = jb.init_block_tables(GROUPS[:1], 4)
    tables, refused = jax.jit(lambda t: jax.lax.scan(step, t, jnp.arange(8, dtype=jnp.int32)))(
        empty
    )
    assert rows_of(tables)[0][2] == [0, 1, 2, 3, 4, 5]
    assert refused.tolist() == [False] * 6 + [True] * 2


@pytest.mark.parametrize("version", VERSIONS)
def test_state_blocks_of_vllm(version):
    for case in golden("block_misc", version)["mamba_get_block_table_tensor"]:
        chosen = jb.select_state_blocks(
            case["table"],
            case["seq_lens"],
            block_size=case["block_size"],
            mode=case["mode"],
            num_speculative_blocks=case["num_speculative_blocks"],
        )
        # vLLM gives a sequence without tokens the states in its row; here it has none.
        real = np.asarray(case["seq_lens"])[:, None] > 0
        np.testing.assert_array_equal(chosen, np.where(real, case["state_indices"], -1))
    past = jb.select_state_blocks(
        [[4, 5]], [33], block_size=16, mode="align", num_speculative_blocks=1
    )
    assert past.tolist() == [[-1, -1]]
    with pytest.raises(ValueError, match=r"2 wrong"):
        jb.select_state_blocks([[4, 5]], [33, 1], block_size=16, mode="aligned")


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_padded_sequences_leave_every_state_alone(mode):
    """Gathered rows are padded with 0, which is a slot like any other."""
    tables = jb.init_block_tables([jb.BlockGroup(16, 1, has_slots=False)], 2)
    tables, _ = jb.append_block_ids(tables, [0, 1], [[[0], [1]]], [[1, 1]])
    (rows,) = jb.gather_block_tables(tables, [1, 0, -1, -1])
    ids = jb.select_state_blocks(rows, [5, 5, 0, -1], block_size=16, mode=mode)
    assert ids.tolist() == [[1], [0], [-1], [-1]]
    slots = jb.init_state_slots(jb.StateLayout(((1,),), ("float32",)), 2)
    slots = jb.write_state(slots, ids[:, 0], [np.asarray([[1], [2], [8], [9]], np.float32)])
    assert slots.tensors[0].tolist() == [[2], [1]]


def test_bad_arguments_are_all_named_at_once():
    with pytest.raises(ValueError, match="3 wrong") as error:
        jb.BlockGroup(block_size=0, max_blocks=True, sliding_window_reach=-1)
    for argument in ("block_size: 0", "max_blocks: True", "sliding_window_reach: -1"):
        assert argument in str(error.value)
    with pytest.raises(ValueError, match="kernel_block_size: 32, but must be a divisor"):
        jb.BlockGroup(block_size=48, max_blocks=1, kernel_block_size=32)
    with pytest.raises(ValueError, match="has_slots: 'no', but must be a bool"):
        jb.BlockGroup(block_size=16, max_blocks=2, has_slots="no")
    with pytest.raises(ValueError, match="rank: 4, but must be below size=4"):
        jb.ContextParallel(size=4, rank=4)
    with pytest.raises(ValueError, match=r"counts: \[1, 1\], but must be \[2, 1\]"):
        jb.append_block_ids(filled(), [0], [[[1]], [[1]]], [[1]])
    with pytest.raises(ValueError, match="3 wrong") as error:
        jb.append_block_ids(filled(), np.asarray([0.5]), [[[1]]], [[1]], overwrite=3)
    for argument in ("seq_indices: float64[1]", "block_ids: list of 1", "overwrite: int"):
        assert argument in str(error.value)
    with pytest.raises(ValueError, match=r"source and target: \[2\] and \[1\], but must be"):
        jb.move_row(filled(), [0, 1], [2])
    with pytest.raises(ValueError, match=r"b: float 1\.5, but must be an integer array"):
        jb.swap_rows(filled(), 0, 1.5)
    with pytest.raises(ValueError, match=r"query_start_loc: \[2\], but must be \[4\]"):
        jb.compute_slot_mapping(filled(), [0, 1, 2], [0, 1], [0])
    with pytest.raises(ValueError, match=r"tables\[0\]: int32\[4, 6\]"):
        jb.BlockTables(filled().tables, filled().num_blocks[:, :2], GROUPS)
    with pytest.raises(ValueError, match=r"widths: \[1\], but must be at least \[2\]"):
        jb.pack_block_ids([[[1, 2]]], widths=[1])


def test_examples_in_the_docstrings_run():
    import doctest

    for module in pkgutil.walk_packages(jb.__path__, "jattn.blocks."):
        names = vars(jb) | {"jnp": jnp, "np": np}
        found = importlib.import_module(module.name)
        result = doctest.testmod(found, extraglobs=names)
        assert result.failed == 0, module.name


def test_planning_needs_no_jax():
    """Sizes are known before tracing: the planners are integer functions."""
    import ast
    import pathlib

    root = pathlib.Path(jb.__path__[0])
    planners = [*root.glob("planning/*.py"), root / "tables/context.py", root / "states/layouts.py"]
    planners += [root / "pool/block_pool.py", root / "pool/hashes.py"]  # nor the free list
    lower = ("jattn.checks", "jattn.integers", "jattn.formats.token_bytes")
    stems = [str(path.relative_to(root).with_suffix("")) for path in planners]
    allowed = {f"jattn.blocks.{stem.replace('/', '.')}" for stem in stems}
    for path in planners:
        imports = {
            name.name if isinstance(node, ast.Import) else node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in node.names
        }
        assert {name.split(".")[0] for name in imports}.isdisjoint({"jax", "jaxlib"}), path.stem
        ours = {name for name in imports if name.startswith("jattn")}
        assert ours <= {*lower, *allowed}, path.stem
