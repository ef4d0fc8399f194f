"""AttentionMetadata: built from lengths, padded to buckets, checked by value."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from tests.support.compiled import compilations

SIZE, BLOCKS = 4, 10
TABLES = [[3, 1], [5], [7, 2, 9]]
QUERIES, KEYS = [2, 0, 5], [6, 3, 9]


def good() -> jattn.AttentionMetadata:
    return jattn.AttentionMetadata.from_lengths(QUERIES, KEYS, TABLES, SIZE, max_query_len=5)


def complaint(meta: jattn.AttentionMetadata) -> str:
    with pytest.raises(ValueError, match=r"^AttentionMetadata: ") as error:
        meta.check(num_blocks=BLOCKS, block_size=SIZE)
    return str(error.value)


def changed(**arrays) -> jattn.AttentionMetadata:
    """Return good metadata with single entries changed: `name={index: value}`."""
    new = {}
    for name, entries in arrays.items():
        new[name] = np.array(getattr(good(), name))
        for index, value in entries.items():
            new[name][index] = value
    return dataclasses.replace(good(), **new)


def test_from_lengths():
    meta = good()
    np.testing.assert_array_equal(meta.query_start_loc, [0, 2, 2, 7])
    np.testing.assert_array_equal(meta.seq_lens, KEYS)
    np.testing.assert_array_equal(meta.block_tables, [[3, 1, -1], [5, -1, -1], [7, 2, 9]])
    # Positions 4, 5 of the first sequence lie in its block 1; 4 to 8 of the last in 2 and 9.
    np.testing.assert_array_equal(meta.slot_mapping, [4, 5, 8, 9, 10, 11, 36])
    for name in ("block_tables", "seq_lens", "query_start_loc", "slot_mapping"):
        assert getattr(meta, name).dtype == np.int32
    meta.check(num_blocks=BLOCKS, block_size=SIZE)
    arrays = jattn.AttentionMetadata.from_lengths(
        np.array(QUERIES), np.array(KEYS), np.array(meta.block_tables), SIZE, max_query_len=5
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, arrays, meta))


def test_from_lengths_of_nothing_new():
    meta = jattn.AttentionMetadata.from_lengths([0, 0], [3, 0], [[1], []], SIZE)
    assert meta.slot_mapping.shape == (0,)
    np.testing.assert_array_equal(meta.query_start_loc, [0, 0, 0])
    meta.check(num_blocks=BLOCKS, block_size=SIZE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1, 1], [1], [[0]], SIZE), ["seq_lens: (1,) lengths, 1 tables", "(2,) sequences"]),
        (([-1], [3], [[0]], SIZE), ["query_lens: [-1], but must be at least 0"]),
        (([1], [3], [[0]], 0), ["block_size: int 0"]),
        (([1.0], [3], [[0]], SIZE), ["query_lens: list [1.0]", "a sequence of integers"]),
        (([1], [2**31], [[0]], SIZE), ["seq_lens: values 2147483648 to", "within int32"]),
        (([1], [3], [[0.5]], SIZE), ["block_tables[0]: list [0.5]", "a sequence of integers"]),
        (
            ([1], [3], [[-1]], SIZE),
            ["block_tables[0]: naming blocks [-1]", "within [0, 536870911)"],
        ),
        (([1], [3], [[2**29 - 1]], SIZE), ["block_tables[0]: naming blocks [536870911]"]),
        (([2**30] * 2, [2**30] * 2, [[0]] * 2, SIZE), ["query_lens: 2147483648 in all, but must"]),
        (([True], [True], [[0]], SIZE), ["query_lens: list [True]", "a sequence of integers"]),
        (([4], [3], [[0]], SIZE), ["seq_lens[0]: 3, but must be at least query_lens[0] = 4"]),
        (
            ([1, 4], [5, 3], [[0], [1]], SIZE),
            ["block_tables[0]: 1 blocks of 4", "at least 2 blocks for 5 keys", "seq_lens[1]: 3"],
        ),
    ],
)
def test_from_lengths_refuses(arguments, words):
    with pytest.raises(ValueError, match=r"^AttentionMetadata.from_lengths: ") as error:
        jattn.AttentionMetadata.from_lengths(*arguments)
    for word in words:
        assert word in str(error.value)


def test_from_lengths_compares_the_bound_with_the_lengths():
    for most in (2, 0, 3.0):
        with pytest.raises(ValueError, match=r"max_query_len: .* an integer of at least 3, the"):
            jattn.AttentionMetadata.from_lengths([3], [3], [[0]], SIZE, max_query_len=most)


def from_arrays(tables, lens, starts, given, **static):
    return jattn.AttentionMetadata.from_arrays(tables, lens, starts, **static, **given)


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "rows"])
@pytest.mark.parametrize("name", ["num_seqs", "one", "distribution"])
def test_from_arrays_of_a_bucket(flat, name):
    """Rows past the sequences hold garbage, and only the device knows how many there are."""
    padded = good().pad_to(num_tokens=10, num_seqs=5)
    tables = np.array(padded.block_tables)
    tables[3:], garbage = [[10**6, -1, 2**31 - 1]], np.array([0, 0, 0, 10**6, -7], np.int32)
    lens = np.array(padded.seq_lens) + garbage
    starts = np.append(np.asarray(padded.query_start_loc)[:4], [-3, 2**31 - 1]).astype(np.int32)
    arrays = (tables.reshape(-1) if flat else tables, lens, starts)
    build = jax.jit(functools.partial(from_arrays, num_tokens=10, block_size=SIZE, max_query_len=5))

    def given(count):
        arrays = {"num_seqs": count, "one": [count], "distribution": [1, 1, count]}
        key = "distribution" if name == "distribution" else "num_seqs"
        return {key: np.array(arrays[name], np.int32)}

    with compilations(at_least=1):
        found = build(*arrays, given(3))
    assert found.max_query_len == 5
    for field in ("seq_lens", "query_start_loc", "slot_mapping"):
        np.testing.assert_array_equal(getattr(found, field), getattr(padded, field))
    np.testing.assert_array_equal(found.block_tables, tables)
    with compilations(at_most=0):
        fewer, none, many = (build(*arrays, given(count)) for count in (2, 0, 6))
    np.testing.assert_array_equal(fewer.query_start_loc, [0, 2, 2, 2, 2, 2])
    np.testing.assert_array_equal(fewer.slot_mapping, [4, 5] + [-1] * 8)
    np.testing.assert_array_equal(none.seq_lens, 0)
    # More sequences than rows: no row of the output may be finite, and nothing is written.
    np.testing.assert_array_equal(many.query_start_loc, -1)
    np.testing.assert_array_equal(many.slot_mapping, -1)


def test_from_arrays_of_one_flat_row():
    arrays = [np.array(x, np.int32) for x in ([7, 4], [5], [0, 3])]
    found = from_arrays(*arrays, {}, num_tokens=4, block_size=SIZE)
    np.testing.assert_array_equal(found.block_tables, [[7, 4]])
    first = 5 - 3
    blocks = np.array([7, 4])[np.arange(first, 5) // SIZE]
    np.testing.assert_array_equal(
        found.slot_mapping, [*blocks * SIZE + np.arange(first, 5) % SIZE, -1]
    )


def test_from_arrays_writes_only_tokens_that_have_a_place():
    """A sequence longer than its table, fewer keys than queries, ids below 0 or past int32."""
    tables = np.array([[1, 2], [1, 2], [-1, 3], [2**29 - 1, 3]], np.int32)
    found = jattn.AttentionMetadata.from_arrays(
        *(tables, np.array([9, 1, 5, 5], np.int32), np.array([0, 2, 4, 6, 8], np.int32)),
        num_tokens=9,
        block_size=SIZE,
    )
    np.testing.assert_array_equal(found.slot_mapping, [11, -1, -1, 4, -1, 12, -1, 12, -1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_tables": np.zeros(5, np.int32)}, "block_tables: int32[5], but must be int32[B"),
        ({"block_tables": np.zeros((2, 2), np.float32)}, "block_tables: float32[2, 2], but must"),
        ({"query_start_loc": np.zeros(2, np.int32)}, "query_start_loc: int32[2], but must be int3"),
        ({"num_seqs": np.zeros(2, np.int32)}, "num_seqs: int32[2], but must be an integer between"),
        ({"num_seqs": 4}, "num_seqs: int 4, but must be an integer between 0 and B"),
        ({"num_seqs": 1, "distribution": np.zeros(3, np.int32)}, "or None where num_seqs is given"),
        ({"max_query_len": 0}, "max_query_len: int 0, but must be None or an integer of at least"),
        ({"block_tables": np.zeros((2, 0), np.int32)}, "block_tables: int32[2, 0], but must be [B"),
        ({"block_tables": np.zeros(0, np.int32)}, "block_tables: int32[0], but must be [B, M] wit"),
        ({"seq_lens": np.zeros(0, np.int32)}, "seq_lens: int32[0], but must be [B] of at least o"),
        ({"num_tokens": 0}, "num_tokens: int 0, but must be an integer of at least 1"),
    ],
)
def test_from_arrays_refuses(changes, words):
    given = {
        "block_tables": np.zeros((2, 2), np.int32),
        "seq_lens": np.zeros(2, np.int32),
        "query_start_loc": np.zeros(3, np.int32),
        "num_tokens": 4,
        "block_size": SIZE,
    }
    with pytest.raises(ValueError, match=re.escape(words)):
        jattn.AttentionMetadata.from_arrays(**{**given, **changes})


def test_pad_to():
    meta = good().pad_to(num_tokens=9, num_seqs=5, table_width=4)
    assert meta.block_tables.shape == (5, 4)
    np.testing.assert_array_equal(meta.block_tables[:3, :3], good().block_tables)
    np.testing.assert_array_equal(meta.block_tables[3:], -1)
    np.testing.assert_array_equal(meta.seq_lens, [*KEYS, 0, 0])
    np.testing.assert_array_equal(meta.query_start_loc, [0, 2, 2, 7, 7, 7])
    np.testing.assert_array_equal(meta.slot_mapping[7:], -1)
    assert meta.max_query_len == 5
    meta.check(num_blocks=BLOCKS, block_size=SIZE)
    same = good().pad_to()
    assert jax.tree.all(jax.tree.map(np.array_equal, same, good()))


def test_pad_to_refuses():
    with pytest.raises(ValueError, match="pad_to: 3 wrong") as error:
        good().pad_to(num_tokens=6, num_seqs=2, table_width=1)
    for word in ("num_tokens: 6", "at least 7", "num_seqs: 2", "table_width: 1"):
        assert word in str(error.value)
    with pytest.raises(ValueError, match=r"num_tokens: 8\.5, but must be None or an integer of"):
        good().pad_to(num_tokens=8.5)


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        (changed(block_tables={(0, 1): 10}), ["block_tables[0]: naming blocks [10]", "[0, 10)"]),
        (changed(block_tables={(2, 0): -1}), ["block_tables[2]: naming blocks [-1]"]),
        (changed(query_start_loc={0: 1}), ["query_start_loc[0]: 1, but must be 0"]),
        (changed(query_start_loc={1: 3, 2: 2}), ["query_start_loc[2]: below the entry before it"]),
        (changed(query_start_loc={3: 8}), ["query_start_loc[-1]: 8", "at most the 7 tokens"]),
        (changed(seq_lens={2: 4}), ["seq_lens[2]: 4, but must be at least its 5 query tokens"]),
        (
            changed(seq_lens={1: 13}),
            ["seq_lens[1]: 13", "at most 12, the capacity of its table row of 3"],
        ),
        (changed(seq_lens={1: -2}), ["seq_lens[1]: -2"]),
        (changed(slot_mapping={0: 5}), ["slot_mapping: writing slots [5] more than once"]),
        (changed(slot_mapping={0: 0, 1: 0}), ["slot_mapping: writing slots [0] more than once"]),
        (changed(slot_mapping={6: 40}), ["slot_mapping: naming slots [40]", "below 40"]),
        (
            dataclasses.replace(good(), max_query_len=4),
            ["max_query_len: 4, but must be at least 5, the queries of sequence 2"],
        ),
        (
            dataclasses.replace(good(), seq_lens=np.zeros(2, np.int32)),
            ["seq_lens (2,)", "[B, M], [B], [B + 1] and [T]"],
        ),
    ],
)
def test_check_finds(meta, words):
    message = complaint(meta)
    for word in words:
        assert word in message


def test_check_finds_everything_at_once():
    meta = changed(
        block_tables={(0, 0): 99, (2, 2): -7},
        seq_lens={1: 40},
        slot_mapping={1: 4, 5: 400},
    )
    message = complaint(meta)
    names = set(re.findall(r"^  - ([\w\[\]]+): ", message, flags=re.M))
    assert names == {"block_tables[0]", "block_tables[2]", "seq_lens[1]", "slot_mapping"}
    assert "5 wrong" in message


def test_check_lets_garbage_past_the_lengths_pass():
    meta = changed(block_tables={(1, 1): 10**6, (1, 2): -5}).pad_to(num_tokens=9, num_seqs=4)
    meta.check(num_blocks=BLOCKS, block_size=SIZE)


def test_it_is_a_pytree_with_a_static_bound():
    meta = good()
    leaves, tree = jax.tree.flatten(meta)
    assert len(leaves) == 4
    assert jax.tree.unflatten(tree, leaves).max_query_len == 5

    @jax.jit
    def total(meta: jattn.AttentionMetadata) -> jax.Array:
        assert meta.max_query_len == 5
        return meta.seq_lens.sum()

    assert int(total(jax.tree.map(jnp.asarray, meta))) == sum(KEYS)


def test_equal_batches_are_equal():
    assert good() == good() == jax.tree.map(jnp.asarray, good())
    assert good() != changed(seq_lens={1: 4})
    assert good() != dataclasses.replace(good(), max_query_len=6)
    assert good() != good().pad_to(num_tokens=9)
    assert good() != "batch"


def test_as_kwargs_is_what_the_call_takes():
    meta = good()
    pool = jnp.zeros((BLOCKS, 1, SIZE, 8))
    why = jattn.explain(jnp.zeros((7, 2, 8)), pool, pool, **meta.as_kwargs())
    assert why.call.max_query_len == 5
    assert why.call.num_seqs == 3
