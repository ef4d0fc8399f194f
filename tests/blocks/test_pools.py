"""States in pages and slots, and one pool for all layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
import jattn.blocks as jb

NANO = jb.mamba2_state(  # a small version of Nemotron-3-Nano: same dtypes, 1/64 of the bytes
    intermediate_size=256,
    num_groups=1,
    num_heads=8,
    head_dim=32,
    state_size=32,
    conv_kernel=4,
    dtypes=("bfloat16", "float32"),
)
CONV = jb.short_conv_state(intermediate_size=256, conv_kernel=3, dtypes=("bfloat16",))
read = jax.jit(jb.read_state)
write = jax.jit(jb.write_state, donate_argnums=0)


def random_states(layout, count, seed=0):
    """Return states of random bits, including NaNs of every kind."""
    rng = np.random.default_rng(seed)
    states = []
    for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
        dtype = jnp.dtype(dtype)
        size = count * int(np.prod(shape)) * dtype.itemsize
        bits = rng.integers(0, 256, size, dtype=np.uint8)
        states.append(bits.view(dtype).reshape(count, *shape))
    return tuple(states)


def assert_same_bits(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


def pool_of(layout, pages, *shapes, dtype="uint16", seed=3):
    """Return a pool full of garbage."""
    rng = np.random.default_rng(seed)
    parts = []
    for shape in shapes:
        nbytes = pages * int(np.prod(shape)) * np.dtype(dtype).itemsize
        words = rng.integers(0, 256, nbytes, dtype=np.uint8).view(dtype)
        parts.append(jnp.asarray(words.reshape(pages, *shape)))
    return jb.PagePool(tuple(parts), layout)


def all_bits(pool):
    return [np.asarray(x).view(np.uint8).copy() for x in jax.tree.leaves(pool)]


POOLS = {
    "K and V": (NANO, 40, ((2, 16, 64), (2, 16, 64)), "uint16"),
    "keys wider than values": (NANO, 40, ((1, 16, 96), (1, 16, 64)), "uint16"),
    "one latent": (NANO, 40, ((1, 16, 144),), "uint16"),
    "8-bit words": (NANO, 60, ((2, 16, 64), (2, 16, 64)), "uint8"),
    "32-bit words": (NANO, 40, ((2, 16, 32), (2, 16, 32)), "uint32"),
    "float32 words": (NANO, 40, ((2, 16, 32), (2, 16, 32)), "float32"),
    "small states": (CONV, 12, ((2, 16, 64), (2, 16, 64)), "uint16"),
}


@pytest.mark.parametrize("name", POOLS)
def test_states_come_back_bit_for_bit_and_nothing_else_changes(name):
    layout, pages, shapes, dtype = POOLS[name]
    pool = pool_of(layout, pages, *shapes, dtype=dtype)
    before, need = all_bits(pool), pool.pages_for()
    assert pool.page_bytes * need >= layout.nbytes > pool.page_bytes * (need - 1)
    ids = np.random.default_rng(1).permutation(pages)[: 3 * need + 1]
    # One page more than a state needs, which must stay as it is.
    ids = np.append(ids[:-1].reshape(3, need), np.full((3, 1), ids[-1]), axis=1)
    ids[1] = -1  # a padded sequence
    states = random_states(layout, 3)
    pool = write(pool, ids, states)
    found = read(pool, ids)
    found = [np.asarray(x) for x in found]  # indexing by JAX may rewrite NaNs
    assert_same_bits([x[::2] for x in found], [x[::2] for x in states])
    assert not any(np.asarray(x[1]).view(np.uint8).any() for x in found)
    untouched = np.setdiff1d(np.arange(pages), ids[:, :need])
    for old, new in zip(before, all_bits(pool), strict=True):
        np.testing.assert_array_equal(old[untouched], new[untouched])


@pytest.mark.parametrize(
    ("name", "num_states"),
    [("K and V", 1), ("keys wider than values", 3), ("float32 words", 2), ("small states", 5)],
)
def test_several_states_share_pages(name, num_states):
    layout, pages, shapes, dtype = POOLS[name]
    pool = pool_of(layout, pages, *shapes, dtype=dtype)
    need = pool.pages_for(num_states)
    if 2 * need > pages:
        pool = pool_of(layout, 2 * need, *shapes, dtype=dtype)
    assert pool.states_in(need) >= num_states
    ids = np.random.default_rng(2).permutation(pool.num_pages)[: 2 * need].reshape(2, need)
    states = random_states(layout, 2 * num_states)
    rows = np.repeat(ids, num_states, axis=0)  # all states of both groups, in one call
    index = np.tile(np.arange(num_states), 2)
    pool = write(pool, rows, states, index=index)
    assert_same_bits(read(pool, rows, index=index), states)
    # Rewriting one state changes no other; an index past the pages reads zeros, writes nothing.
    other = random_states(layout, 1, seed=9)
    pool = write(pool, ids[:1], other, index=np.asarray([num_states - 1]))
    before = all_bits(pool)
    for past in (0, 1):
        index_past = np.asarray([pool.states_in(need) + past])
        pool = write(pool, ids[:1], other, index=index_past)
        for old, new in zip(before, all_bits(pool), strict=True):
            np.testing.assert_array_equal(old, new)
        assert not any(
            np.asarray(x).view(np.uint8).any() for x in read(pool, ids[:1], index=index_past)
        )
    expected = [np.array(x) for x in states]
    for x, y in zip(expected, other, strict=True):
        x[num_states - 1] = y[0]
    assert_same_bits(read(pool, rows, index=index), expected)


def test_state_slots():
    slots = jb.init_state_slots(NANO, 6)
    states = random_states(NANO, 3)
    ids = np.asarray([4, -1, 0])
    slots = write(slots, ids, states)
    found = map(np.asarray, read(slots, np.asarray([0, 4, 6, -1, 5])))
    for x, y in zip(found, states, strict=True):
        assert_same_bits([x[:2]], [y[[2, 0]]])
        assert not np.asarray(x[2:]).view(np.uint8).any()
    memory = write.lower(jb.init_state_slots(NANO, 64), ids, states).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 64 * NANO.nbytes
    assert memory.temp_size_in_bytes < 8 * NANO.nbytes
    assert not any(np.asarray(x).view(np.uint8).any() for x in jb.zero_pages(slots, [0, 4]).tensors)


@pytest.mark.parametrize("index", [False, True])
def test_a_step_may_have_no_sequence(index):
    states = random_states(NANO, 0)
    for pool in (
        pool_of(NANO, 8, (2, 16, 64), (2, 16, 64)),
        pool_of(NANO, 8, (2, 16, 32), (2, 16, 32), dtype="uint32"),
        jb.init_state_slots(NANO, 2),
    ):
        paged, before = isinstance(pool, jb.PagePool), all_bits(pool)
        if index and not paged:
            continue
        ids = np.zeros((0, pool.pages_for()) if paged else 0, np.int32)
        keywords = {"index": np.zeros(0, np.int32)} if index else {}
        assert_same_bits(jb.read_state(pool, ids, **keywords), states)
        for old, new in zip(
            before, all_bits(jb.write_state(pool, ids, states, **keywords)), strict=True
        ):
            np.testing.assert_array_equal(old, new)


def test_zeroed_pages_have_no_stale_bytes():
    """Bytes of a float32 state, read as bfloat16 keys, give NaN until they are zeroed."""
    pool = pool_of(NANO, 8, (2, 16, 512), (2, 16, 512))
    hostile = tuple(
        np.full((1, *s), np.nan, jnp.dtype(d))
        for s, d in zip(NANO.shapes, NANO.dtypes, strict=True)
    )
    ids = np.asarray([[5, 2]])
    pool = write(pool, ids, hostile)

    def out_of(pool):
        caches = [jattn.KVArray(part, None, jattn.Dense("bfloat16")) for part in pool.parts]
        return jattn.paged_attention(
            jnp.ones((1, 2, 512), jnp.bfloat16),
            *caches,
            block_tables=jnp.asarray([[2, 5]], jnp.int32),
            seq_lens=jnp.asarray([20], jnp.int32),
        )

    assert np.isnan(np.asarray(out_of(pool), np.float32)).any()
    pool = jax.jit(jb.zero_pages, donate_argnums=0)(pool, np.asarray([2, 5, -1, 8]))
    np.testing.assert_array_equal(np.asarray(out_of(pool), np.float32), 0)
    assert all(np.asarray(part[7]).any() for part in pool.parts)  # -1 is not the last page


def test_one_pool_serves_attention_and_states_at_once():
    """With keys in some pages and a state in others, neither disturbs the other."""
    key_cache, value_cache = jattn.init_kv_cache(12, 2, 16, 512)
    rng = np.random.default_rng(0)
    new = jnp.asarray(rng.standard_normal((40, 2, 512)), jnp.bfloat16)
    query = jnp.asarray(rng.standard_normal((1, 4, 512)), jnp.bfloat16)
    tables = jb.init_block_tables([jb.BlockGroup(16, 4)], 1)
    tables, _ = jb.append_block_ids(tables, 0, [[7, 1, 10]], [3])
    (slots,) = jb.compute_slot_mapping(tables, [0], [0, 40], np.arange(40))
    caches = jattn.update_kv_cache(key_cache, value_cache, new, new, slots)
    states = random_states(NANO, 1)

    def attend(key_cache, value_cache):
        return jattn.paged_attention(
            query,
            key_cache,
            value_cache,
            block_tables=jb.gather_block_tables(tables, [0])[0],
            seq_lens=jnp.asarray([40], jnp.int32),
        )

    alone = attend(*caches)
    pool = jb.PagePool(tuple(cache.data for cache in caches), NANO)
    pool = write(pool, np.asarray([[3]]), states)
    assert_same_bits(read(pool, np.asarray([[3]])), states)
    shared = attend(*(jattn.KVArray(part, None, jattn.Dense("bfloat16")) for part in pool.parts))
    np.testing.assert_array_equal(np.asarray(alone), np.asarray(shared))


@pytest.mark.parametrize("index", [False, True])
def test_states_move_without_a_copy_of_the_pool(index):
    pool = pool_of(NANO, 512, (2, 16, 64), (2, 16, 64))
    ids = np.arange(pool.pages_for() * 2).reshape(2, -1)
    keywords = {"index": np.asarray([0, 0])} if index else {}
    size = sum(part.nbytes for part in pool.parts)
    few = 8 * 2 * NANO.nbytes
    assert few < size // 4
    states = random_states(NANO, 2)
    written = write.lower(pool, ids, states, **keywords).compile().memory_analysis()
    assert written.alias_size_in_bytes >= size
    assert written.temp_size_in_bytes < few
    assert read.lower(pool, ids, **keywords).compile().memory_analysis().temp_size_in_bytes < few
    zeroed = jax.jit(jb.zero_pages, donate_argnums=0).lower(pool, ids[0]).compile()
    assert zeroed.memory_analysis().temp_size_in_bytes < few


def test_pools_go_through_scan():
    pool = pool_of(CONV, 12, (2, 16, 64), (2, 16, 64))
    states = tuple(
        jnp.asarray(x, jnp.bfloat16)
        for x in np.random.default_rng(0).normal(size=(1, 4, *CONV.shapes[0]))
    )
    ids = jnp.asarray([[3], [0], [7], [9]], jnp.int32)

    def step(pool, x):
        page, state = x
        return jb.write_state(pool, page[None], [state[None]]), page

    pool, _ = jax.lax.scan(step, pool, (ids, states[0]))
    assert_same_bits(read(pool, ids), states)


def test_bad_pools_and_states_are_named():
    with pytest.raises(ValueError, match=r"parts\[0\]: bfloat16\[4, 8\], but must be .* of words"):
        jb.PagePool((jnp.zeros((4, 8), jnp.bfloat16),), NANO)
    with pytest.raises(ValueError, match=r"parts\[1\]: uint16\[5, 8\]"):
        jb.PagePool((jnp.zeros((4, 8), jnp.uint16), jnp.zeros((5, 8), jnp.uint16)), NANO)
    odd = jb.StateLayout(((3,),), ("bfloat16",))
    with pytest.raises(ValueError, match=r"6 bytes, but must be a multiple of .* words of 4 bytes"):
        jb.PagePool((jnp.zeros((4, 8), jnp.uint32),), odd)
    with pytest.raises(ValueError, match="a state of one byte or more"):
        jb.PagePool((jnp.zeros((4, 8), jnp.uint32),), jb.StateLayout(((0,),), ("bfloat16",)))
    pool = pool_of(NANO, 8, (2, 16, 64), (2, 16, 64))
    with pytest.raises(ValueError, match=r"ids: \[1, 1\], but must be \[B, n\] with n >= 5"):
        jb.read_state(pool, [[0]])
    with pytest.raises(ValueError, match=r"states\[1\]: bfloat16\[1, 8, 32, 32\], but must be f"):
        jb.write_state(
            pool,
            [[0, 1, 2, 3, 4]],
            [jnp.zeros((1, *shape), jnp.bfloat16) for shape in NANO.shapes],
        )
    with pytest.raises(ValueError, match=r"index: .* but must be None for StateSlots"):
        jb.read_state(jb.init_state_slots(NANO, 1), [0], index=[0])
    with pytest.raises(ValueError, match="num_slots: 0, but must be an integer of at least 1"):
        jb.init_state_slots(NANO, 0)


LAYERS, BLOCKS, HEADS, BLOCK, DIM = 4, 64, 2, 16, 64


def layer_step(key_pool, value_pool, layer, x, tables, slots, seq_lens):
    """Run one layer of a decode step on the pool of all layers."""
    new = x[:, :HEADS].astype(jnp.bfloat16)
    caches = jattn.update_kv_cache(
        key_pool, value_pool, new, new, jb.layer_slot_mapping(slots, layer, BLOCKS, BLOCK)
    )
    out = jattn.paged_attention(
        x, *caches, block_tables=jb.layer_block_tables(tables, layer, BLOCKS), seq_lens=seq_lens
    )
    return *caches, out + x


def one_pool_step(caches, x, tables, slots, seq_lens):
    """Run all layers as a scan that carries the pool."""

    def body(carry, layer):
        *caches, x = carry
        return layer_step(*caches, layer, x, tables, slots, seq_lens), None

    carry, _ = jax.lax.scan(body, (*caches, x), jnp.arange(LAYERS, dtype=jnp.int32))
    return carry[:2], carry[2]


def step_inputs():
    rng = np.random.default_rng(5)
    tables = jb.init_block_tables([jb.BlockGroup(BLOCK, 8)], 3)
    ids, counts = jb.pack_block_ids([[[9, 4, 11]], [[2]], [[7, 60]]])
    tables, _ = jb.append_block_ids(tables, np.arange(3), ids, counts)
    seq_lens = np.asarray([40, 1, 17], np.int32)
    (slots,) = jb.compute_slot_mapping(tables, [0, 1, 2], [0, 1, 2, 3], seq_lens - 1)
    x = jnp.asarray(rng.standard_normal((3, 4, DIM)), jnp.bfloat16)
    return x, jb.gather_block_tables(tables, [0, 1, 2])[0], slots, jnp.asarray(seq_lens)


def test_one_pool_of_all_layers_equals_separate_caches():
    x, tables, slots, seq_lens = step_inputs()
    caches = jattn.init_kv_cache(LAYERS * BLOCKS, HEADS, BLOCK, DIM)
    pool, together = jax.jit(one_pool_step)(caches, x, tables, slots, seq_lens)
    expected = x
    for layer in range(LAYERS):
        caches = jattn.init_kv_cache(BLOCKS, HEADS, BLOCK, DIM)
        *caches, expected = jax.jit(layer_step)(*caches, 0, expected, tables, slots, seq_lens)
        share = slice(layer * BLOCKS, (layer + 1) * BLOCKS)
        np.testing.assert_array_equal(np.asarray(pool[0].data)[share], np.asarray(caches[0].data))
    np.testing.assert_array_equal(np.asarray(together), np.asarray(expected))


def test_a_scan_over_layers_copies_no_cache():
    x, tables, slots, seq_lens = step_inputs()
    caches = jattn.init_kv_cache(LAYERS * BLOCKS * 16, HEADS, BLOCK, DIM)
    size = 2 * caches[0].nbytes
    compiled = (
        jax.jit(one_pool_step, donate_argnums=0).lower(caches, x, tables, slots, seq_lens).compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < min(size // 8, 2**20)


def test_padding_is_padding_in_every_layer():
    slots = jnp.asarray([-1, 0, 1023, 1024, -(2**31)], jnp.int32)
    assert jb.layer_slot_mapping(slots, 3, 64, 16).tolist() == [-1, 3072, 4095, -1, -1]
    tables = jnp.asarray([[-1, 0, 63, 64, 10**6]], jnp.int32)
    assert jb.layer_block_tables(tables, jnp.int32(2), 64).tolist() == [[-1, 128, 191, -1, -1]]
    with pytest.raises(ValueError, match="blocks_per_layer: 0"):
        jb.layer_block_tables(tables, 0, 0)


def test_values_compare_by_their_bits():
    def tables():
        return jb.init_block_tables([jb.BlockGroup(16, 4)], max_num_seqs=2)

    wider = jb.init_block_tables([jb.BlockGroup(16, 5)], max_num_seqs=2)
    assert tables() == tables() != wider
    assert tables() != jb.append_block_ids(tables(), [0], [[[7]]], [[1]])[0]
    slots = jb.init_state_slots(CONV, 2)
    assert slots == jb.init_state_slots(CONV, 2) != jb.init_state_slots(CONV, 3)
    assert tables() != slots
    with pytest.raises(TypeError, match="unhashable"):
        hash(tables())
