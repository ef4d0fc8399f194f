"""Free lists with reference counts and hashes, and copying and moving blocks' contents."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
import jattn.blocks as jb
from jattn import formats, testing

by_name = {"ids": lambda format: format.name}


def test_blocks_are_held_found_and_evicted():
    pool = jb.BlockPool(4, reserved=[2])
    a, b = pool.allocate(2)
    pool.publish("g", b"x", a)
    pool.publish("g", b"x", b)  # the first block of a hash is kept
    pool.publish("g", b"z", a)  # so is the first hash of a block
    assert pool.find("g", b"z") is None
    assert (pool.find("g", b"x"), pool.find("h", b"x")) == (a, None)
    assert (pool.is_private(a), pool.is_private(b)) == (False, True)
    pool.free([a, b])
    assert (pool.num_free, pool.num_used, pool.num_published) == (3, 0, 1)
    pool.share(a)
    pool.share(a)
    assert (pool.num_holders(a), pool.num_used, pool.is_free(a)) == (2, 1, False)
    pool.free([a, a])
    assert a not in pool.allocate(2)  # blocks without a hash go first
    assert pool.find("g", b"x") == a
    assert pool.allocate(1) == [a]
    assert pool.find("g", b"x") is None
    pool.publish("g", b"y", a)
    pool.unpublish(a)
    assert pool.is_private(a)
    pool.publish("g", b"z", a)
    pool.clear_hashes()
    assert pool.num_published == 0


def test_blocks_free_for_longest_are_evicted_first():
    pool = jb.BlockPool(3, seed=1)
    ids = pool.allocate(3)
    for i, id in enumerate(ids):
        pool.publish("g", bytes([i]), id)
    pool.free(reversed(ids))
    pool.share(ids[2])
    pool.free([ids[2]])  # used again, so ids[1] is the oldest
    assert [pool.allocate(1)[0] for _ in range(3)] == [ids[1], ids[0], ids[2]]


def test_a_free_block_that_loses_its_hash_is_allocated_first():
    pool = jb.BlockPool(4)
    ids = pool.allocate(4)
    for id in ids[:3]:
        pool.publish("g", bytes([id]), id)
    pool.free(ids)
    pool.unpublish(2)
    pool.unpublish(3)  # had no hash, so it stays second
    assert [pool.allocate(1)[0] for _ in range(4)] == [2, 3, 0, 1]
    pool.publish("g", b"x", 0)
    pool.unpublish(0)
    assert pool.is_private(0)
    assert pool.num_free == 0


def test_pools_keep_python_integers():
    pool = jb.BlockPool(2)
    pool.free(np.asarray(pool.allocate(2)))
    pool.share(np.int64(1))
    pool.publish("g", b"x", np.int32(1))
    found = [pool.find("g", b"x"), *pool.allocate(1)]
    assert found == [1, 0]
    assert {type(id) for id in found} == {int}


@pytest.mark.parametrize("wrong", [9, -1, 1.0, True, None, [1]])
@pytest.mark.parametrize(
    "method", ["num_holders", "is_free", "is_private", "share", "unpublish", "free", "publish"]
)
def test_pools_name_the_call_that_got_a_wrong_id(method, wrong):
    pool = jb.BlockPool(2)
    pool.allocate(2)
    arguments = {"free": ([wrong],), "publish": ("g", b"x", wrong)}.get(method, (wrong,))
    id = re.escape(f"{wrong!r}")
    with pytest.raises(ValueError, match=rf"BlockPool\.{method}: id: {id}, but must be a block"):
        getattr(pool, method)(*arguments)


def test_pools_refuse_what_would_lose_blocks():
    pool = jb.BlockPool(2)
    with pytest.raises(ValueError, match="count: 3, but must be at most num_free=2"):
        pool.allocate(3)
    (id,) = pool.allocate(1)
    pool.free([id])
    with pytest.raises(ValueError, match=f"free: id: {id} is free, but must have a holder"):
        pool.free([id])
    with pytest.raises(ValueError, match="publish: id: 0 is free"):
        pool.publish("g", b"x", 0)
    with pytest.raises(ValueError, match=r"reserved: \[5\], but must be within 0\.\.1"):
        jb.BlockPool(2, reserved=[5])
    with pytest.raises(ValueError, match="num_blocks: 0"):
        jb.BlockPool(0)


def test_equal_hashes_are_equal_prefixes():
    tokens = np.random.default_rng(0).integers(0, 2**31, 40)
    whole = jb.hash_blocks(tokens, 4)
    # Engines store hashes and send them to others, so they must not change between versions.
    assert jb.hash_blocks([1, 2], 2)[0].hex() == "f59df9f51bfcb52f7ae49756810ec78b"
    assert len(whole) == len(set(whole)) == 10
    assert jb.hash_blocks(tokens[:39].tolist(), 4) == whole[:9]
    assert whole[3:] == jb.hash_blocks(tokens[12:], 4, parent=whole[2])
    for wrong in ([1.9, 2.0], [[1, 2]], [True, False]):
        with pytest.raises(ValueError, match=r"tokens: .*must be a list of integers"):
            jb.hash_blocks(wrong, 1)
    other = tokens.copy()
    other[5] += 1
    changed = jb.hash_blocks(other, 4)
    assert changed[0] == whole[0]
    assert not set(changed[1:]) & set(whole)
    assert not set(jb.hash_blocks(tokens, 4, parent=b"tenant")) & set(whole)
    # One chain of hashes serves groups of several block sizes.
    assert jb.block_hashes(whole, 4, 12) == [whole[2], whole[5], whole[8]]
    groups = jb.group_layers([jb.FullAttention(16, 1, 64), jb.SlidingWindow(16, 3, 64, window=9)])
    assert {group.block_size for group in groups.groups} <= {16, 48}
    assert all(group.block_size % groups.hash_block_size == 0 for group in groups.groups)
    with pytest.raises(ValueError, match="hash_block_size: 5, but must be a divisor"):
        jb.block_hashes(whole, 5, 12)


def test_extra_bytes_keep_blocks_of_equal_tokens_apart():
    tokens = list(range(8))
    plain = jb.hash_blocks(tokens, 2)
    assert jb.hash_blocks(tokens, 2, extra=[None] * 4) == plain
    cat, dog = (jb.hash_blocks(tokens, 2, extra=[None, x, None, None]) for x in (b"cat", b"dog"))
    assert cat[0] == dog[0] == plain[0]
    assert len({*plain[1:], *cat[1:], *dog[1:]}) == 9
    # A sequence may be hashed in parts, as its blocks fill up.
    assert jb.hash_blocks(tokens[4:], 2, parent=cat[1], extra=(None, None)) == cat[2:]
    # Neither further tokens nor a salt have the hash of extra bytes, and no bytes are not None.
    word = np.int64(7).tobytes()
    (extra,) = jb.hash_blocks([1], 1, extra=[word])
    (empty,) = jb.hash_blocks([1], 1, extra=[b""])
    longer = (np.int64([1, 7]), np.int64([1, 7, 8]), np.int64([1, 0]))
    others = {jb.hash_blocks(x, len(x))[0] for x in longer}
    others |= {jb.hash_blocks([1], 1)[0], *jb.hash_blocks([7], 1, parent=np.int64(1).tobytes())}
    others |= {*jb.hash_blocks([7], 1, parent=np.int64(1).tobytes(), extra=[b""])}
    assert len(others | {extra, empty}) == 7
    assert jb.hash_blocks([1], 1, parent=None) == jb.hash_blocks([1], 1, parent=b"")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parent": "adapter"}, r"parent: str 'adapter', but must be bytes or None"),
        ({"tokens": [1], "parent": "adapter"}, r"parent: str 'adapter', but must be bytes"),
        ({"extra": [b"x"]}, r"extra: list \[b'x'\], but must be bytes or None for each of 2 full"),
        ({"extra": ["x", None]}, r"extra: list \['x', None\], but must be bytes or None"),
        ({"extra": b"xy"}, r"extra: bytes b'xy', but must be bytes or None for each of 2"),
        ({"tokens": [2**64 - 1]}, r"tokens: up to 18446744073709551615, but must be at most 2\^63"),
        ({"tokens": [[1], [2, 3]]}, r"tokens: list .*, but must be a list of integers"),
    ],
)
def test_what_cannot_be_hashed_is_named(wrong, message):
    with pytest.raises(ValueError, match=rf"(?s)^hash_blocks: 1 wrong .*{message}"):
        jb.hash_blocks(**{"tokens": [1, 2, 3, 4], "block_size": 2, **wrong})


def pair(format, num_blocks=6, block_size=4, kv_layout="HND", filled=True):
    """Return keys and values in a format, with different numbers in every token."""
    caches = jattn.init_kv_cache(num_blocks, 2, block_size, 16, format=format, kv_layout=kv_layout)
    if not filled:
        return caches
    size = num_blocks * block_size
    new = jnp.asarray(np.random.default_rng(3).standard_normal((size, 2, 16)), jnp.float32)
    slots = jnp.arange(size, dtype=jnp.int32)
    return jattn.update_kv_cache(*caches, new, 2 * new, slots)


def leaves(caches):
    return [np.asarray(x).copy() for x in jax.tree.leaves(caches)]


def tokens_of(cache, ids):
    """Return the numbers [n * S, K, D] of some blocks."""
    numbers = np.asarray(cache.numbers())[np.asarray(ids)]
    numbers = numbers if cache.kv_layout == "NHD" else numbers.swapaxes(1, 2)
    return numbers.reshape(-1, *numbers.shape[2:])


SOME = [
    jattn.Dense("bfloat16"),
    jattn.Fp8("e4m3"),
    jattn.Fp8("e4m3", "block"),
    jattn.Int4(zero_point=True),
    jattn.Nvfp4(),
]


@pytest.mark.parametrize("format", SOME, **by_name)
def test_copied_blocks_take_their_scales_along(format):
    caches = pair(format)
    before = [tokens_of(cache, range(6)) for cache in caches]
    copied = jb.copy_blocks(caches, [1, 4, 9, 3], [5, 1, 0, -1])
    for cache, old in zip(copied, before, strict=True):
        old = old.reshape(6, 4, 2, 16)
        np.testing.assert_array_equal(
            tokens_of(cache, range(6)).reshape(old.shape), old[[0, 4, 2, 3, 4, 1]]
        )
    with pytest.raises(ValueError, match=r"target: \[5\] more than once, but must be different"):
        jb.copy_blocks(caches, [1, 2], [5, 5])
    with pytest.raises(ValueError, match=r"source and target: \[1\] and \[2\]"):
        jb.copy_blocks(caches, [1], [5, 4])


def test_padding_may_name_a_block_twice():
    pool = jnp.arange(4.0)[:, None]
    taken = jb.take_blocks(pool, [0, 1])
    for same in (
        jb.copy_blocks(pool, [0, 1], [4, 4]),
        jb.copy_blocks(pool, [-1, 4], [2, 2]),
        jb.put_blocks(pool, [4, 4], taken),
    ):
        assert same[:, 0].tolist() == [0, 1, 2, 3]
    assert jb.copy_blocks(pool, [-1, 3], [2, 2])[:, 0].tolist() == [0, 1, 3, 3]
    padded = jax.jit(lambda source: jb.copy_blocks(pool, source, np.array([2, 2])))
    assert padded(np.array([0, -1]))[:, 0].tolist() == [0, 1, 0, 3]
    # Of two caches, the larger one may have the block.
    with pytest.raises(ValueError, match=r"target: \[3\] more than once, but must be different"):
        jb.copy_blocks((pool[:2], pool), [1, 2], [3, 3])
    with pytest.raises(ValueError, match=r"ids: \[3\] more than once, but must be different"):
        jb.put_blocks(pool, [3, 3], taken)


@pytest.mark.parametrize("format", SOME, **by_name)
def test_swapped_out_blocks_come_back_bit_for_bit(format):
    caches = pair(format)
    before = leaves(caches)
    host = jax.device_get(jb.take_blocks(caches, [4, 1, -1]))
    assert not np.asarray(host[0].data[2]).any()
    emptied = pair(format, filled=False)
    emptied = tuple(
        x.replace(scale=y.scale) if x.format.takes_scale else x
        for x, y in zip(emptied, caches, strict=True)
    )
    back = jb.put_blocks(emptied, [4, 1, -1], host)
    for x, y in zip(before, leaves(back), strict=True):
        rows = [4, 1] if x.ndim else ...
        np.testing.assert_array_equal(x[rows], y[rows])
    other = jb.put_blocks(emptied, [0, 2, 5], host)
    fewer = jb.put_blocks(emptied, [0, 2], host, num_tokens=8)
    for cache, *moved in zip(caches, other, fewer, strict=True):
        for one in moved:
            np.testing.assert_array_equal(tokens_of(one, [0, 2]), tokens_of(cache, [4, 1]))


@pytest.mark.parametrize(
    ("format", "size", "layout"),
    [
        (format, *shape)
        for format, shape in zip(
            [f for f in SOME if f.per != "block"],
            itertools.cycle([(3, "HND"), (8, "NHD"), (4, "NHD")]),
            strict=False,
        )
    ],
)
def test_blocks_go_to_pools_of_another_shape(format, size, layout):
    caches, ids = pair(format), [4, 1, 2]
    taken = jb.take_blocks(caches, ids)
    for num_tokens in (None, 10):
        held = 12 if num_tokens is None else num_tokens
        to = np.random.default_rng(0).permutation(5)[: -(-held // size)]
        empty = pair(format, 5, size, layout, filled=False)
        moved = jb.put_blocks(empty, to, taken, num_tokens=num_tokens)
        for cache, new in zip(caches, moved, strict=True):
            have, want = tokens_of(new, to), tokens_of(cache, ids)[:held]
            np.testing.assert_array_equal(have[:held], want)
            assert not have[held:].any()
            rest = np.setdiff1d(np.arange(5), to)
            assert not tokens_of(new, rest).any()


def test_one_program_puts_any_number_of_blocks():
    """Padding ids, as put_blocks says, instead of counting tokens."""
    caches, empty = pair(jattn.Int8()), pair(jattn.Int8(), 5, 8, filled=False)
    take, put = jax.jit(jb.take_blocks), jax.jit(jb.put_blocks)
    for ids, to in (([3, 1, 2, -1], [4, 0]), ([5, -1, -1, -1], [2, -1])):
        moved = put(empty, np.asarray(to), take(caches, np.asarray(ids)))
        named, held = [i for i in to if i >= 0], [i for i in ids if i >= 0]
        for cache, new in zip(caches, moved, strict=True):
            tokens, count = tokens_of(new, named), 4 * len(held)
            np.testing.assert_array_equal(tokens[:count], tokens_of(cache, held))
            assert not tokens_of(new, np.setdiff1d(np.arange(5), named)).any()
    assert take._cache_size() == put._cache_size() == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "float16"])
def test_plain_arrays_keep_every_bit(dtype):
    bits = np.random.default_rng(0).integers(0, 256, (5, 2, 4, 16), np.uint8)
    pool = jnp.asarray(bits.view(jnp.dtype(dtype)))
    moved = jax.jit(jb.copy_blocks)(pool, np.asarray([0]), np.asarray([3]))
    np.testing.assert_array_equal(np.asarray(moved).view(np.uint8), bits[[0, 1, 2, 0, 4]])
    swapped = jb.put_blocks(
        jnp.zeros((2, 4, 2, pool.shape[3]), dtype),
        [1],
        jb.take_blocks(pool, [4]),
        kv_layout="NHD",
        blocks_layout="HND",
    )
    have = np.asarray(swapped)[1].view(np.uint8)
    np.testing.assert_array_equal(have, bits[4].swapaxes(0, 1))


def test_plain_arrays_and_states_move_alike():
    pool = jnp.asarray(np.random.default_rng(0).standard_normal((5, 2, 4, 8)), jnp.bfloat16)
    moved = jb.copy_blocks((pool, pool[:, :1]), [0], [3])
    assert jnp.array_equal(moved[0][3], pool[0])
    assert jnp.array_equal(moved[1][3], pool[0, :1])
    layout = jb.StateLayout(((3, 8), (2, 4)), ("bfloat16", "float32"))
    slots = jb.write_state(
        jb.init_state_slots(layout, 4),
        [1],
        (jnp.ones((1, 3, 8), jnp.bfloat16), jnp.ones((1, 2, 4))),
    )
    forked = jb.copy_blocks(slots, [1], [2])
    for x in jb.read_state(forked, [2]):
        np.testing.assert_array_equal(np.asarray(x, np.float32), 1)
    back = jb.put_blocks(jb.init_state_slots(layout, 2), [0], jb.take_blocks(slots, [1]))
    assert float(jb.read_state(back, [0])[1].sum()) == 8


def test_blocks_that_do_not_fit_are_named():
    int8, per_block = jattn.Int8(), jattn.Fp8("e4m3", "block")
    taken = jb.take_blocks(pair(int8), [0, 1])
    with pytest.raises(ValueError, match=r"blocks\[0\]: Int8.*, but must be Int4"):
        jb.put_blocks(pair(jattn.Int4(), filled=False), [0, 1], taken)
    with pytest.raises(ValueError, match=r"ids: 1 ids for 8 tokens in 2 blocks of 4, .* 2, blocks"):
        jb.put_blocks(pair(int8, filled=False), [0], taken)
    message = r"num_tokens: 9, but must be at most 8, the tokens in blocks\[0\], 2 blocks of 4"
    for ids in ([0, 1, 2], [0, 1]):
        with pytest.raises(ValueError, match=message) as error:
            jb.put_blocks(pair(int8, filled=False), ids, taken, num_tokens=9)
        assert "ids" not in str(error.value)
    states = jnp.zeros((4, 8))
    message = r"1 wrong (?s:.)*num_tokens: 2 for blocks\[0\], float32\[2, 8\], but must be None"
    with pytest.raises(ValueError, match=message):
        jb.put_blocks(states, [0, 1], jb.take_blocks(states, [0, 1]), num_tokens=2)
    with pytest.raises(ValueError, match=r"blocks: 1 caches, but must be 2, as caches"):
        jb.put_blocks(pair(int8, filled=False), [0, 1], taken[:1])
    other = jattn.init_kv_cache(3, 4, 4, 16, format=int8)
    with pytest.raises(ValueError, match=r"blocks\[0\]: int8\[2, 2, 4, 16\], but must be blocks"):
        jb.put_blocks(other, [0, 1], taken)
    with pytest.raises(ValueError, match="kv_layout: 'NHWC'"):
        jb.put_blocks(pair(int8, filled=False), [0, 1], taken, kv_layout="NHWC")
    with pytest.raises(ValueError, match=r"kv_layout: 'NHD', .* that of the caches, \['HND'\]"):
        jb.put_blocks(pair(int8, filled=False), [0, 1], taken, kv_layout="NHD")
    taken, larger = jb.take_blocks(pair(per_block), [0, 1]), pair(per_block, 3, 8, filled=False)
    with pytest.raises(ValueError, match="a scale per block, but must be blocks of 8 tokens"):
        jb.put_blocks(larger, [0], taken)
    taken, (cache, _) = jb.take_blocks(pair(jattn.Fp8()), [0]), pair(jattn.Fp8(), filled=False)
    cache = cache.replace(scale=jnp.float32(2))
    with pytest.raises(ValueError, match="scales that are not the cache's"):
        jb.put_blocks((cache, cache), [0], taken)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_moving_blocks_copies_no_pool(kind):
    format = jattn.Int8() if kind == "int8" else jattn.Dense("bfloat16")
    caches = jattn.init_kv_cache(512, 2, 16, 64, format=format)
    size, ids = sum(cache.nbytes for cache in caches), jnp.arange(3, dtype=jnp.int32)
    taken = jb.take_blocks(caches, ids)

    def check(function, *arguments, donate=()):
        compiled = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
        testing.assert_nothing_pool_sized(compiled, caches, max_temporaries=size // 8)

    check(jb.copy_blocks, caches, ids, ids + 5, donate=0)
    check(jb.put_blocks, caches, ids, taken, donate=0)
    check(jb.take_blocks, caches, ids)
    assert formats.storage(taken[0])[0].shape[0] == 3
