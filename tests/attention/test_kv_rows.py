"""`KVRows`: keys and values side by side in one array, in the shapes that hosts use."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import sharding, testing
from jattn.cpu.native import library
from tests.support import budget, problems

each_row = pytest.mark.usefixtures("each_row")
struct = jax.ShapeDtypeStruct
N, S, K, H, D = 12, 16, 3, 6, 32
SHAPES = {
    "pairs": (N, S, K, 2, D),
    "flat": (N, S, 2 * K, D),
    "packed by 4, a head more": (N, S, 2, 4, D),
    "packed by 1": (N, S, 2 * K, 1, D),
}


def some_extended(cases, *names):
    """Return cases as parameters, with those of `names` marked `extended`."""
    return [
        pytest.param(*(x if isinstance(x[0], tuple) else (x,)), id=name,
                     marks=[pytest.mark.extended] if name in names else [])
        for name, x in cases.items()
    ]  # fmt: skip


def numbers(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def batch():
    tables = np.random.default_rng(3).permutation(N)[:8].reshape(2, 4)
    return jattn.AttentionMetadata.from_lengths([8, 1], [50, 17], tables, S)


def pool_of(keys, values, shape):
    """Put keys and values [N, S, K, D] into a cache of this shape, with NaN in unused places."""
    both = jnp.stack([keys, values], 3).reshape(N, S, -1)
    missing = int(np.prod(shape[2:])) - both.shape[2]
    both = jnp.pad(both, ((0, 0), (0, 0), (0, missing)), constant_values=jnp.nan)
    return jattn.KVRows.pairs(both.reshape(shape), K)


@each_row
@pytest.mark.parametrize("shape", some_extended(SHAPES, "flat", "packed by 1"))
def test_reading_and_writing_are_those_of_two_arrays(shape):
    keys, values = numbers(0, N, S, K, D), numbers(1, N, S, K, D)
    cache, given = pool_of(keys, values, shape), batch()
    key, value = numbers(4, 9, K, D), numbers(5, 9, K, D)
    slots = np.where(np.arange(9) == 3, -1, given.slot_mapping)
    keys, values = jattn.update_kv_cache(keys, values, key, value, slots, kv_layout="NHD")
    cache, nothing = jattn.update_kv_cache(cache, None, key, value, slots)
    assert nothing is None
    assert cache.data.shape == shape
    took = cache.data.reshape(N, S, -1, 2, D)[:, :, :K]
    np.testing.assert_array_equal(took[..., 0, :], keys)
    np.testing.assert_array_equal(took[..., 1, :], values)
    options = {**given.as_kwargs(), "sliding_window": 11, "return_lse": True}
    query = numbers(6, 9, H, D)
    want = jattn.paged_attention(query, keys, values, kv_layout="NHD", **options)
    found = jattn.paged_attention(query, cache, None, **options)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)


@each_row
def test_scales_are_those_of_the_call():
    """fp8 as hosts store it: numbers, and one scale each for keys and values."""
    new = [numbers(i, 5, K, D) * 3 for i in range(2)]
    scales = {"k_scale": jnp.float32(0.02), "v_scale": jnp.linspace(0.01, 0.03, K)}
    slots = jnp.arange(5, dtype=jnp.int32)
    fp8 = jnp.float8_e4m3fn
    pools = jattn.update_kv_cache(
        *(jnp.zeros((2, S, K, D), fp8),) * 2, *new, slots, kv_layout="NHD", **scales
    )
    for stored, format in ((fp8, None), (jnp.uint8, jattn.Fp8("e4m3"))):
        cache = jattn.KVRows.pairs(jnp.zeros((2, S, K, 2, D), stored), format=format)
        cache, _ = jattn.update_kv_cache(cache, None, *new, slots, **scales)
        words = jax.lax.bitcast_convert_type(cache.data, jnp.uint8)
        for index, pool in enumerate(pools):
            want = jax.lax.bitcast_convert_type(pool, jnp.uint8)
            np.testing.assert_array_equal(words[:, :, :, index], want)
        given = {"block_tables": jnp.zeros((1, 1), jnp.int32), "seq_lens": jnp.full(1, 5)}
        query = numbers(9, 1, H, D)
        out = jattn.paged_attention(query, cache, None, **given, **scales)
        want = jattn.paged_attention(query, *pools, **given, **scales, kv_layout="NHD")
        np.testing.assert_allclose(out, want, rtol=2e-5)


@each_row
def test_values_that_are_the_first_numbers_of_keys():
    """An MLA cache [N, S, W] with room after each key."""
    base = problems.Problem(
        query_lens=(9, 1), seq_lens=(40, 17), head_dim=48, value_dim=32, num_kv_heads=1,
        options=frozenset({"value_dim", "k_scale"}), kv_layout="NHD", plain=True,
    )  # fmt: skip
    given = problems.build(base)
    data = np.pad(np.asarray(given.key_cache)[:, :, 0], ((0, 0), (0, 0), (0, 16)))
    cache = jattn.KVRows(jnp.asarray(data), 1, 48, 64, 0, 32)
    options = {**given.kwargs, "value_dim": None}
    out = jattn.paged_attention(jnp.asarray(given.query), cache, None, **options)
    budget.of(given).check(np.asarray(out), None)
    new = numbers(8, 2, 1, 48)
    slots = jnp.array([5, 33], jnp.int32)
    cache, _ = jattn.update_kv_cache(cache, None, new, None, slots)
    np.testing.assert_array_equal(cache.data[0, 5, :48], new[0, 0])
    np.testing.assert_array_equal(cache.data[2, 1, :48], new[1, 0])


@pytest.mark.extended
@each_row
def test_rows_of_an_odd_number_of_bfloat16s():
    """Every other row begins in the middle of four bytes."""
    both = numbers(0, N, S, K, 33).astype(jnp.bfloat16)
    given = {
        "block_tables": jnp.arange(N, dtype=jnp.int32)[None],
        "seq_lens": jnp.array([N * S - 3], jnp.int32),
        "query_start_loc": jnp.array([0, 20], jnp.int32),
    }
    query = numbers(6, 20, H, 16).astype(jnp.bfloat16)
    cache = jattn.KVRows(both.reshape(N, S, -1), K, 16, 33, 16, 17)
    found = jattn.paged_attention(query, cache, None, **given)
    want = jattn.paged_attention(query, both[..., :16], both[..., 16:], kv_layout="NHD", **given)
    np.testing.assert_array_equal(found, want)


@each_row
def test_gradients_are_those_of_two_arrays():
    keys, values, query = numbers(0, N, S, K, D), numbers(1, N, S, K, D), numbers(6, 9, H, D)
    weights, given = numbers(7, 9, H, D), batch().as_kwargs()

    def apart(query, keys, values):
        return (
            jattn.paged_attention(query, keys, values, kv_layout="NHD", **given) * weights
        ).sum()

    def together(query, both):
        out = jattn.paged_attention(query, jattn.KVRows.pairs(both), None, **given)
        return (out * weights).sum()

    want = jax.grad(apart, (0, 1, 2))(query, keys, values)
    found = jax.grad(together, (0, 1))(query, jnp.stack([keys, values], 3))
    np.testing.assert_allclose(found[0], want[0], atol=1e-5)
    np.testing.assert_allclose(found[1], jnp.stack(want[1:], 3), atol=1e-5)


BIG = {
    "bfloat16 pairs": ((4096, 16, 4, 2, 64), jnp.bfloat16, None),
    "float32 packed by 1": ((4096, 16, 8, 1, 64), jnp.float32, None),
    "words of fp8 packed by 4": ((4096, 16, 2, 4, 64), jnp.uint8, jattn.Fp8("e4m3")),
    "words of bfloat16": ((4096, 16, 8, 64), jnp.uint16, jattn.Dense("bfloat16")),
}


@each_row
@pytest.mark.parametrize(("shape", "dtype", "format"), some_extended(BIG, "words of bfloat16"))
def test_a_step_that_writes_and_reads_copies_nothing(shape, dtype, format):
    """One program writes and reads a donated cache, in a mixed call, which has every loop."""
    if dtype == jnp.bfloat16 and jax.__version_info__ < (0, 12) and library.missing():
        pytest.skip("XLA for CPU before JAX 0.12 converts a whole pool of bfloat16 to write to it")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(data, query, key, value, slots, tables, lens, starts):
        cache = jattn.KVRows.pairs(data, 4, format=format)
        cache, _ = jattn.update_kv_cache(cache, None, key, value, slots)
        out = jattn.paged_attention(
            query, cache, None, block_tables=tables, seq_lens=lens, query_start_loc=starts
        )
        return cache.data, out

    given = (
        *(struct((20, heads, 64), jnp.bfloat16) for heads in (8, 4, 4)),
        *(struct(size, jnp.int32) for size in ((20,), (3, 8), (3,), (4,))),
    )
    pool = struct(shape, dtype)
    compiled = step.lower(pool, *given).compile()
    testing.assert_nothing_pool_sized(compiled, pool, max_temporaries=16 * 2**20)


def test_what_does_not_fit_is_refused_by_its_field():
    cache = jattn.KVRows.pairs(jnp.zeros((2, S, K, 2, D)))
    given = {"block_tables": np.zeros((1, 1), np.int32), "seq_lens": np.ones(1, np.int32)}
    query = numbers(0, 1, H, D)
    for changes, message in (
        ({"num_kv_heads": 4}, "key_cache.data: 192 numbers a token, but must be a multiple of"),
        ({"value_start": 5}, "key_cache.value_start: 5, but must be at least head_dim = 32"),
        ({"value_dim": 33}, "key_cache.value_dim: 33 numbers from 32 on, but must be within"),
        ({"value_start": 0, "value_dim": 33}, "key_cache.value_start: 0, but must be at least"),
        ({"head_dim": 0}, "key_cache.head_dim: int 0, but must be an integer of at least 1"),
        ({"format": jattn.Int8()}, "key_cache.format: Int8"),
        ({"format": "fp8"}, "key_cache.format: fp8 for float32.*, but must be None for floats"),
        ({"format": jattn.Fp8}, "key_cache.format: <class 'jattn.*Fp8'> for float32"),
        ({"data": jnp.zeros((2, S, K, 2, D), jnp.int32)}, "key_cache.format: None for int32"),
        ({"data": jnp.zeros((2, S))}, r"key_cache.data: of shape \[2, 16\]"),
    ):
        with pytest.raises(ValueError, match=message):
            jattn.paged_attention(query, cache.replace(**changes), None, **given)
    for options, message in (
        ({"kv_layout": "HND"}, "kv_layout: str 'HND', but must be None or 'NHD'"),
        ({"value_dim": 8}, "value_dim: int 8, but must be None: key_cache has V"),
    ):
        with pytest.raises(ValueError, match=message):
            jattn.paged_attention(query, cache, None, **given, **options)
    with pytest.raises(ValueError, match="value_cache: float32"):
        jattn.paged_attention(query, cache, jnp.zeros((2, S, K, D)), **given)
    with pytest.raises(ValueError, match=r"data: of shape \[2, 16, 3, 32\], but must be"):
        jattn.KVRows.pairs(jnp.zeros((2, S, K, D)))
    in_keys = cache.replace(value_start=0)
    with pytest.raises(ValueError, match=r"v_scale: float 2.0, but must be None: values are part"):
        jattn.paged_attention(query, in_keys, None, **given, v_scale=2.0)
    new = numbers(0, 1, K, D)
    with pytest.raises(ValueError, match=r"value: float32.* but must be None: keys hold values"):
        jattn.update_kv_cache(in_keys, None, new, new, np.zeros(1, np.int32))
    mesh = jax.make_mesh((1,), ("heads",))
    with pytest.raises(ValueError, match=r"kv_cache: a jattn.KVRows, but must be a jattn.KVArray"):
        sharding.cache_specs(cache, mesh=mesh, axis_name="heads")


def test_a_row_that_does_not_take_it_says_so():
    """Mosaic's kernels copy tiles of columns."""

    def refusals(width, start, value_dim=64):
        data = struct((2, S, K * width), jnp.bfloat16)
        cache = jattn.KVRows(data, K, 64, width, start, value_dim)
        why = jattn.explain(
            struct((1, H, 64), jnp.bfloat16), cache, None, block_tables=struct((1, 1), jnp.int32),
            seq_lens=struct((1,), jnp.int32), implementation="mosaic_gpu",
        )  # fmt: skip
        return [reason for reason in why.refusals["mosaic_gpu"] if "key_cache" in reason]

    assert not refusals(128, 64)
    assert not refusals(128, 0)
    for width, start in ((136, 64), (192, 72)):
        (reason,) = refusals(width, start)
        assert reason == (
            f"key_cache has row_width {width} and value_start {start}; where D is 64 and V 64, it "
            "takes multiples of 64"
        )


def test_keys_of_another_size_than_tiles_are_refused_where_values_are_in_them():
    def refusals(d, v):
        why = jattn.explain(
            struct((1, H, d), jnp.bfloat16), struct((2, 1, S, d), jnp.bfloat16), None, value_dim=v,
            block_tables=struct((1, 1), jnp.int32), seq_lens=struct((1,), jnp.int32),
            implementation="mosaic_gpu",
        )  # fmt: skip
        return [reason for reason in why.refusals["mosaic_gpu"] if "value_dim" in reason]

    assert not refusals(576, 512)
    must = "value_dim is 256 and D 288; it takes keys of a multiple of 64 numbers"
    assert refusals(288, 256) == [must]


def test_two_with_the_same_bits_are_equal():
    keys, values = numbers(0, N, S, K, D), numbers(1, N, S, K, D)
    cache = pool_of(keys, values, SHAPES["packed by 4, a head more"])  # NaN and all
    assert cache == pool_of(keys, values, SHAPES["packed by 4, a head more"])
    assert cache != pool_of(values, keys, SHAPES["packed by 4, a head more"])
    assert cache != pool_of(keys, values, SHAPES["flat"])


@pytest.mark.extended
def test_it_goes_through_export():
    cache, given = (
        pool_of(numbers(0, N, S, K, D), numbers(1, N, S, K, D), SHAPES["flat"]),
        batch(),
    )

    def attend(cache, query, given):
        return jattn.paged_attention(query, cache, None, **given.as_kwargs(), implementation="xla")

    query = numbers(6, 9, H, D)
    saved = jax.export.export(jax.jit(attend))(cache, query, given).serialize()
    loaded = jax.export.deserialize(saved)
    np.testing.assert_array_equal(loaded.call(cache, query, given), attend(cache, query, given))
