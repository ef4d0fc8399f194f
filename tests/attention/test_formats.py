"""Formats: every rounding against ml_dtypes, and transformations that keep a KVArray intact."""

from __future__ import annotations

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jattn
import jattn.blocks as jb
from jattn import formats
from tests.support import problems, processes, quantize

FP8 = [jattn.Fp8(kind) for kind in jattn.Fp8.kinds]
NARROW = [jattn.Dense("bfloat16"), jattn.Dense("float16")]
by_name = {"ids": lambda format: format.name}


def finite_values(format) -> np.ndarray:
    """Return every finite number of a format, ascending, as float64."""
    words = np.arange(2 ** (8 * format.word_dtype.itemsize), dtype=format.word_dtype)
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = words.view(format.value_dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def edges(format) -> np.ndarray:
    """Return float32 numbers at every rounding decision: values, midpoints, and neighbours."""
    values = finite_values(format)
    if len(values) > 2000:  # 16 bits: all of the smallest values, some of the others
        small = np.abs(values) < 4 * float(jnp.finfo(format.value_dtype).tiny)
        keep = np.arange(len(values)) % 37 == 0
        index = np.flatnonzero(small | keep)
        index = index[index + 1 < len(values)]
    else:
        index = np.arange(len(values) - 1)
    middles = ((values[index] + values[index + 1]) / 2).astype(np.float32)
    assert (middles.astype(np.float64) == (values[index] + values[index + 1]) / 2).all()
    points = np.concatenate([values.astype(np.float32)[index], middles])
    up, down = (np.nextafter(points, np.float32(end)) for end in (np.inf, -np.inf))
    found = np.concatenate([points, up, down])
    # XLA for CPU may flush float32 subnormals to zero; no format here has numbers that small.
    tiny = np.finfo(np.float32).tiny
    return found[(np.abs(found) >= tiny) | (found == 0)].astype(np.float32)


def encode(format, values: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(format.encode)(jnp.asarray(values)))


@pytest.mark.parametrize("format", FP8, **by_name)
def test_fp8_rounds_to_nearest_even(format):
    values = edges(format)
    inside = values[np.abs(values) <= format.largest]
    want = inside.astype(format.value_dtype).view(np.uint8)
    np.testing.assert_array_equal(encode(format, inside), want)


@pytest.mark.parametrize("format", NARROW, **by_name)
def test_16_bit_rounds_to_nearest_even(format):
    values = edges(format)
    with np.errstate(over="ignore"):
        want = values.astype(format.value_dtype).view(np.uint16)
    np.testing.assert_array_equal(encode(format, values), want)


@pytest.mark.parametrize("format", [*FP8, *NARROW], **by_name)
def test_random_numbers_round_to_nearest_even(format):
    rng = np.random.default_rng(5)
    exponents = rng.uniform(-20, 8, 20_000)
    values = (np.exp2(exponents) * rng.choice([-1, 1], 20_000)).astype(np.float32)
    want = values.astype(format.value_dtype).view(format.word_dtype)
    np.testing.assert_array_equal(encode(format, values), want)


@pytest.mark.parametrize("format", [*FP8, *NARROW, jattn.Dense("float32")], **by_name)
def test_every_code_is_read_and_written_back(format):
    if format.word_dtype == np.float32:
        words = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    else:
        words = np.arange(2 ** (8 * format.word_dtype.itemsize), dtype=format.word_dtype)
    values = np.asarray(format.decode(jnp.asarray(words)))
    assert values.dtype == format.value_dtype
    want = words.view(format.value_dtype)
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(values.astype(np.float32)), nan)
    np.testing.assert_array_equal(values[~nan].view(format.word_dtype), words[~nan])
    finite = np.isfinite(want.astype(np.float32))
    again = encode(format, want[finite])
    np.testing.assert_array_equal(again, words[finite])


@pytest.mark.parametrize("format", FP8, **by_name)
def test_fp8_saturates(format):
    largest = np.float32(format.largest)
    huge = np.array([largest * 1.01, largest * 2, 1e30, np.inf], np.float32)
    values = np.concatenate([huge, -huge])
    numbers = encode(format, values).view(format.value_dtype).astype(np.float32)
    np.testing.assert_array_equal(numbers, np.sign(values) * largest)
    # The last float32 that rounds to the largest number, and the next one, which saturates.
    step = largest - np.float32(finite_values(format)[-2])
    near = np.array([largest + step / 2 - 1, largest + step / 2 + 1], np.float32)
    numbers = encode(format, near).view(format.value_dtype).astype(np.float32)
    np.testing.assert_array_equal(numbers, largest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("format", FP8, **by_name)
def test_fp8_keeps_nan_and_takes_every_float(format, dtype):
    values = jnp.asarray([np.nan, 0.0, -0.0, 1.0, -np.inf], dtype)
    numbers = encode(format, values).view(format.value_dtype).astype(np.float32)
    assert np.isnan(numbers[0])
    np.testing.assert_array_equal(numbers[1:], [0, 0, 1, -format.largest])
    np.testing.assert_array_equal(np.signbit(numbers[1:3]), [False, True])


@pytest.mark.parametrize("format", NARROW, **by_name)
def test_16_bit_keeps_nan_and_overflows_to_infinity(format):
    values = np.array([np.nan, np.inf, -np.inf, 3.4e38], np.float32)
    numbers = encode(format, values).view(format.value_dtype).astype(np.float32)
    assert np.isnan(numbers[0])
    np.testing.assert_array_equal(numbers[1:], [np.inf, -np.inf, np.inf])


@pytest.mark.parametrize(
    ("format", "kv_layout"),
    [
        (format, ("HND", "NHD")[index % 2])
        for index, format in enumerate(f for f in problems.FORMATS.values() if f.per != "block")
    ],
)
def test_writing_into_slots(format, kv_layout):
    """Slots may come in any order; those below 0 and past the pool write nothing."""
    rng = np.random.default_rng(1)
    num_blocks, kv_heads, size, dims = 5, 3, 4, (32, 16)
    caches = jattn.init_kv_cache(
        num_blocks, kv_heads, size, dims[0], value_dim=dims[1], format=format, kv_layout=kv_layout
    )
    scale = np.array([0.5, 3.0, 0.7], np.float32)
    if format.takes_scale:
        caches = tuple(cache.replace(scale=jnp.asarray(scale)) for cache in caches)
    slots = np.array([19, -1, 7, 20, 0, -20, 4, 2**31 - 1, -(2**31)], np.int32)
    new = [rng.standard_normal((len(slots), kv_heads, dim)).astype(np.float32) for dim in dims]
    new[0][1] = np.nan  # a padded row
    written = jattn.update_kv_cache(*caches, *map(jnp.asarray, new), slots, kv_layout=kv_layout)
    for before, cache, rows in zip(caches, written, new, strict=True):
        assert isinstance(cache, jattn.KVArray)
        assert cache.format == format
        if format.takes_scale:
            rows = rows / scale[None, :, None]
        inside = (slots >= 0) & (slots < 20)
        rows = np.where(inside[:, None, None], rows, np.float32(0))
        want = quantize.encode(format, rows)
        for name, array in (
            ("data", quantize.pack(format, want.codes)),
            *(("scale", want.scale), ("zero", want.zero), ("group_scale", want.groups)),
        ):
            if array is None:
                continue
            pools = [np.asarray(getattr(x, name)) for x in (before, cache)]
            old, have = (
                (x if kv_layout == "NHD" else x.swapaxes(1, 2)).reshape(20, *array.shape[1:])
                for x in pools
            )
            old = old.copy()
            for slot, row in zip(slots, array, strict=True):
                if 0 <= slot < 20:
                    old[slot] = row
            # XLA may multiply by a reciprocal where NumPy divides.
            if old.dtype == np.float32 and name != "data":
                # A zero point is a difference of numbers of about 3.
                np.testing.assert_allclose(have, old, rtol=2e-7, atol=6e-7 * (name == "zero"))
            else:
                np.testing.assert_array_equal(have, old)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", *jattn.Fp8.kinds.values()])
def test_writing_into_plain_arrays(dtype):
    rng = np.random.default_rng(2)
    pool = jnp.zeros((3, 1, 4, 8), dtype)
    rows = rng.standard_normal((2, 1, 8)).astype(np.float32)
    key_cache, value_cache = jattn.update_kv_cache(
        pool, pool, jnp.asarray(rows), jnp.asarray(rows), jnp.array([9, 3], jnp.int32), k_scale=0.5
    )
    assert key_cache.dtype == value_cache.dtype == pool.dtype
    for cache, scale in ((key_cache, np.float32(0.5)), (value_cache, np.float32(1))):
        have = np.asarray(cache)
        np.testing.assert_array_equal(have[2, 0, 1], (rows[0, 0] / scale).astype(have.dtype))
        np.testing.assert_array_equal(have[0, 0, 3], (rows[1, 0] / scale).astype(have.dtype))
        assert np.count_nonzero(have.astype(np.float32)) == 16


def sample(format) -> jattn.KVArray:
    rng = np.random.default_rng(4)
    values = rng.standard_normal((4, 2, 3, 16)).astype(np.float32)
    scale = 0.25 if format.takes_scale else None
    return jax.jit(lambda x: jattn.KVArray.from_values(x, format, scale))(values)


@pytest.mark.parametrize("format", problems.FORMATS.values(), **by_name)
def test_a_kvarray_is_a_pytree(format, tmp_path):
    cache = sample(format)
    leaves, tree = jax.tree.flatten(cache)
    params = sum(x is not None for x in (cache.scale, cache.zero, cache.group_scale))
    assert len(leaves) == 1 + params
    assert cache.shape == (4, 2, 3, 16)
    path = tmp_path / "cache.npz"
    np.savez(path, *map(np.asarray, leaves))
    with np.load(path) as file:
        loaded = jax.tree.unflatten(tree, [jnp.asarray(file[name]) for name in file.files])
    for same in (
        loaded,
        jax.tree.map(lambda x: x, cache),
        jax.lax.scan(lambda c, _: (c, None), cache, length=2)[0],
    ):
        assert isinstance(same, jattn.KVArray)
        assert same.format == format
        assert same.dtype == format.value_dtype
        for have, want in zip(jax.tree.leaves(same), leaves, strict=True):
            assert have.dtype == want.dtype
            np.testing.assert_array_equal(np.asarray(have), np.asarray(want))
    stacked = jax.tree.map(lambda x: jnp.asarray(np.stack([x, x])), cache)
    per_layer = jax.jit(jax.vmap(lambda c: c.numbers().sum()))(stacked)
    total = float(jax.jit(lambda c: c.numbers().sum())(cache))
    np.testing.assert_allclose(np.asarray(per_layer), total, rtol=1e-5)
    struct = jax.eval_shape(lambda c: c, cache)
    assert struct.shape == cache.shape
    per_block = 4 * 4 * 2 if format.per == "block" else 0
    assert struct.nbytes == cache.nbytes == 4 * 2 * 3 * format.bytes_per_token(16) + per_block


@pytest.mark.parametrize("format", problems.FORMATS.values(), **by_name)
def test_planners_size_every_format(format):
    """Bytes per token and per page match real caches, for one format and for a pair."""
    heads, size, dim, value_dim = 3, 4, 32, 16
    for pair in (format, (format, format), (format, jattn.Int4(True)), (jattn.Dense(), format)):
        caches = jax.eval_shape(
            lambda pair=pair: jattn.init_kv_cache(
                5, heads, size, dim, value_dim=value_dim, format=pair
            )
        )
        page = jb.FullAttention(size, heads, dim, value_dim, dtype=pair).page_bytes
        assert sum(cache.nbytes for cache in caches) == 5 * page
        per_token = jb.kv_bytes_per_token(heads, dim, value_dim=value_dim, dtype=pair)
        per_block = [x.per for x in (pair if isinstance(pair, tuple) else (pair, pair))]
        assert page == size * per_token + 4 * heads * per_block.count("block")
    latent, _ = jax.eval_shape(
        lambda: jattn.init_kv_cache(5, 1, size, dim, format=format, values_in_keys=True)
    )
    assert latent.nbytes == 5 * jb.LatentAttention(size, head_dim=dim, dtype=format).page_bytes


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (jattn.Int4(), {"value_dim": 33}, "value_dim: 33 with int4, but must be a multiple of 2"),
        ((jattn.Int4(), "int3"), {}, "dtype: .*int3.* must be a cache format, a pair"),
        ((jattn.Int4(),), {}, "dtype: .* must be a cache format, a pair"),
        ((jattn.Int4(), jattn.Int4()), {"is_mla": True}, "must be a cache format or one of"),
        (np.dtype(np.int16), {}, "dtype: .*int16.* must be a cache format, a pair"),
        (jattn.Int4, {}, "dtype: .*Int4.* must be a cache format, a pair"),
        (["bfloat16", "bfloat16"], {}, "dtype: .* must be a cache format, a pair"),
    ],
)
def test_formats_that_planners_refuse(dtype, options, message):
    with pytest.raises(ValueError, match=message):
        jb.kv_bytes_per_token(2, 32, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.float32, jnp.float32])
def test_planners_take_dtypes_as_their_names(dtype):
    assert jb.kv_bytes_per_token(2, 32, dtype=dtype) == 2 * 64 * 4
    assert jb.kv_bytes_per_token(2, 32, dtype=(dtype, "int8")) == 2 * 32 * 5
    named = jb.FullAttention(16, 2, 32, dtype="float32")
    assert {jb.FullAttention(16, 2, 32, dtype=dtype)} == {named}
    pair = jb.FullAttention(16, 2, 32, dtype=(dtype, dtype))
    assert pair.dtype == ("float32", "float32")
    assert pair.page_bytes == named.page_bytes
    assert jb.LatentAttention(16, head_dim=64, dtype=dtype).dtype == "float32"


def test_a_donated_kvarray_is_reused():
    cache = sample(jattn.Fp8("e4m3"))
    where = cache.data.unsafe_buffer_pointer()
    moved = jax.jit(lambda c: c.replace(data=c.data.at[0].set(7)), donate_argnums=0)(cache)
    assert moved.data.unsafe_buffer_pointer() == where
    assert cache.data.is_deleted()


def test_from_values_scales():
    values = jnp.asarray([[[[1.0, -2.0, 104.0]]]], jnp.float32)
    cache = jattn.KVArray.from_values(values, jattn.Fp8("e4m3"), 0.5)
    np.testing.assert_array_equal(np.asarray(cache.values(), np.float32)[0, 0, 0], [2, -4, 208])
    assert cache.scale.shape == ()
    number = cache.replace(scale=0.5)
    assert number.scale.dtype == jnp.float32
    assert number == cache
    np.testing.assert_array_equal(jattn.KVArray(cache.data, 0.5, cache.format).numbers(), values)
    for wrong in (0.0, float("nan"), 1e39, np.float32(1e-45)):
        with pytest.raises(ValueError, match=r"replace: .*\n  - scale: .* finite and not 0"):
            cache.replace(scale=wrong)
    for wrong in (True, np.True_, [0.5, 0.5], (0.5,), "0.5"):
        with pytest.raises(ValueError, match=r"replace: .*\n  - scale: .* finite and not 0"):
            cache.replace(scale=wrong)
    assert cache.replace(scale=None).scale is None
    with pytest.raises(ValueError, match=r"scale: .* must be None") as error:
        jattn.KVArray.from_values(jnp.zeros((1, 1, 1, 1), jnp.int32), jattn.Dense(), 0.5)
    assert "values: int32" in str(error.value)


def test_from_values_names_wrong_arguments():
    with pytest.raises(ValueError, match=r"3 wrong argument\(s\)") as error:
        jattn.KVArray.from_values([[1.0]], "int8", kv_layout="SBHD")
    for line in ("values: list", "format: str 'int8'", "kv_layout: 'SBHD'"):
        assert line in str(error.value)

    ones = np.ones((1, 1, 4, 16))
    for scale, shown in ((0.0, "float 0.0"), (np.array([np.nan]), "float64"), ("x", "str 'x'")):
        with pytest.raises(ValueError, match=f"scale: {shown}.* but must be a number or a float"):
            jattn.KVArray.from_values(ones, jattn.Fp8(), scale)
    with pytest.raises(ValueError, match="zero_point: str 'no', but must be a bool"):
        jattn.Int8("no")
    with pytest.raises(ValueError, match="values_in_keys: str 'no', but must be a bool"):
        jattn.init_kv_cache(1, 1, 4, 16, values_in_keys="no")


def test_values_of_numpy_are_taken_in_float64():
    values = np.arange(64.0).reshape(1, 1, 4, 16)
    want = jattn.KVArray.from_values(jnp.asarray(values, jnp.float32), jattn.Int8())
    assert jattn.KVArray.from_values(values, jattn.Int8()) == want


@pytest.mark.parametrize(
    "format",
    [pytest.param(f, marks=() if f.name == "nvfp4" else pytest.mark.extended) for f in formats.ALL],
    ids=str,
)
def test_no_tokens_write_nothing(format):
    pool = jattn.KVArray.from_values(jnp.ones((1, 1, 4, 16)), format)
    new, slots = jnp.ones((0, 1, 16)), jnp.zeros(0, jnp.int32)
    write = functools.partial(jattn.update_kv_cache, implementation="xla")
    caches = jax.eval_shape(write, pool, pool, new, new, slots)
    assert caches == jax.eval_shape(lambda: (pool, pool))


def test_a_scale_that_is_an_integer_becomes_an_array():
    cache, _ = jattn.init_kv_cache(1, 1, 4, 16, format=jattn.Fp8())
    assert cache.replace(scale=2) == cache.replace(scale=jnp.float32(2))


@pytest.mark.extended
def test_a_scale_that_is_a_float_is_float32_with_64_bit_types_too():
    code = """
import jax.numpy as jnp, jattn
cache, _ = jattn.init_kv_cache(2, 1, 4, 8, format=jattn.Fp8())
cache = cache.replace(scale=3.5 / 448)
row = jnp.ones((1, 1, 8), jnp.float32)
slots, tables, lens = (jnp.asarray(x, jnp.int32) for x in ([4], [[1]], [1]))
caches = jattn.update_kv_cache(cache, cache, row, row, slots)
out = jattn.paged_attention(row, *caches, block_tables=tables, seq_lens=lens)
print(cache.scale.dtype, out.dtype, abs(float(out.max()) - 1) < 0.05)
"""
    assert processes.python(code, JAX_ENABLE_X64="1") == "float32 float32 True"


def test_init_kv_cache():
    for layout, shape in (("HND", (7, 3, 4)), ("NHD", (7, 4, 3))):
        key_cache, value_cache = jattn.init_kv_cache(
            7, 3, 4, 10, value_dim=6, format=jattn.Fp8("e5m2"), kv_layout=layout
        )
        assert key_cache.shape == (*shape, 10)
        assert value_cache.shape == (*shape, 6)
        assert key_cache.ndim == 4
        assert key_cache.dtype == jnp.float8_e5m2
        assert key_cache.data.dtype == jnp.uint8
        assert float(key_cache.scale) == 1.0
    key_cache, value_cache = jattn.init_kv_cache(7, 3, 4, 10)
    assert key_cache.format == value_cache.format == jattn.Dense("bfloat16")
    assert key_cache.scale is None
    assert key_cache.nbytes == 7 * 3 * 4 * 10 * 2


@pytest.mark.parametrize(
    "make",
    [lambda: jattn.Dense("int8"), lambda: jattn.Dense(np.float64), lambda: jattn.Fp8("e3m4")],
)
def test_unknown_kinds(make):
    with pytest.raises(ValueError, match="must be one of"):
        make()


def test_formats_are_frozen_values():
    assert jattn.Fp8("e4m3") == jattn.Fp8() != jattn.Fp8("e5m2")
    named = {jattn.Dense("float32"), jattn.Dense(np.dtype("float32")), jattn.Dense(jnp.float32)}
    assert named == {jattn.Dense("float32")} != {jattn.Dense()}
    assert type(next(iter(named)).dtype) is str
    with pytest.raises(dataclasses.FrozenInstanceError):
        jattn.Dense().dtype = "float32"


@pytest.mark.parametrize("format", [jattn.Int8(), jattn.Int4()])
def test_integers_round_ties_to_even(format):
    """The largest number makes the scale 1, so numbers ending in .5 are ties."""
    row = jnp.asarray([format.largest, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.0], jnp.float32)
    cache = jattn.KVArray.from_values(row[None, None, None], format)
    read = np.asarray(cache.numbers())[0, 0, 0]
    np.testing.assert_array_equal(read, [format.largest, 0, 2, 2, 0, -2, -2, 0])


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_a_scale_per_head_scales_heads_in_both_layouts(kv_layout):
    """K differs from S: if they were equal, a scale along the wrong axis would not show."""
    scale = jnp.asarray([1.0, 4.0, 16.0])
    values = jnp.ones((2, 3, 5, 8)) * scale[None, :, None, None]
    values = values if kv_layout == "HND" else values.swapaxes(1, 2)
    cache = jattn.KVArray.from_values(values, jattn.Fp8(), scale, kv_layout=kv_layout)
    np.testing.assert_array_equal(np.asarray(cache.values().astype(jnp.float32)), 1)
    np.testing.assert_array_equal(np.asarray(cache.numbers()), np.asarray(values))


def test_a_cache_knows_its_layout():
    """With H % S == 0, no check of shapes would notice a wrong layout."""
    caches = jattn.init_kv_cache(4, 4, 2, 16, kv_layout="NHD")
    rows = jnp.arange(3 * 4 * 16, dtype=jnp.float32).reshape(3, 4, 16) / 100
    slots = jnp.asarray([2, 3, 4], jnp.int32)
    caches = jattn.update_kv_cache(*caches, rows, rows, slots)
    given = {
        "block_tables": jnp.asarray([[1, 2]], jnp.int32),
        "seq_lens": jnp.asarray([3], jnp.int32),
    }
    query = jnp.ones((1, 4, 16), jnp.float32)
    out = jattn.paged_attention(query, *caches, **given)
    same = jattn.paged_attention(query, *caches, **given, kv_layout="NHD")
    np.testing.assert_array_equal(np.asarray(out), np.asarray(same))
    plain = [cache.values() for cache in caches]
    other = jattn.paged_attention(query, *plain, **given, kv_layout="NHD")
    np.testing.assert_allclose(np.asarray(out), np.asarray(other), rtol=1e-6)
    refused = r"kv_layout: 'HND', but must be 'NHD', as the caches say"
    with pytest.raises(ValueError, match=refused):
        jattn.paged_attention(query, *caches, **given, kv_layout="HND")
    with pytest.raises(ValueError, match=refused):
        jattn.update_kv_cache(*caches, rows, rows, slots, kv_layout="HND")
    with pytest.raises(ValueError, match=refused):
        jattn.cascade_attention(query, *caches, num_shared_blocks=0, **given, kv_layout="HND")
    mixed = caches[0], caches[1].replace(kv_layout="HND")
    with pytest.raises(ValueError, match=r"value_cache.kv_layout: 'HND', but must be 'NHD'"):
        jattn.paged_attention(query, *mixed, **given)
    with pytest.raises(ValueError, match=r"key_cache.kv_layout: 'SND', .* one of"):
        jattn.paged_attention(query, *(c.replace(kv_layout="SND") for c in caches), **given)


def test_equal_caches_are_equal():
    caches = jattn.init_kv_cache(2, 1, 4, 16, format=jattn.Int4())
    same = pickle.loads(pickle.dumps(caches[0]))
    assert caches[0] == same
    assert caches[0] != same.replace(data=same.data.at[0, 0, 0, 0].set(1))
    assert caches[0] != same.replace(scale=same.scale * jnp.nan)
    assert same.replace(scale=same.scale * jnp.nan) == same.replace(scale=same.scale * jnp.nan)
    assert caches[0] != same.replace(kv_layout="NHD")
    assert caches[0] != "cache"
    shapes, again = (jax.eval_shape(lambda x: x, caches[0]) for _ in range(2))
    assert shapes == again != caches[0]
    longer = jax.ShapeDtypeStruct((3, 1, 4, 8), jnp.uint8)
    assert shapes != shapes.replace(data=longer)
    specs = shapes.replace(data=PartitionSpec("x")), shapes.replace(data=PartitionSpec())
    assert specs[0] == specs[0] != specs[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_writing_into_plain_arrays_keeps_every_other_bit(dtype):
    """Including NaN bits, which a conversion would make canonical."""
    dtype = jnp.dtype(dtype)
    words = np.dtype(f"uint{8 * dtype.itemsize}")
    pool = np.random.default_rng(3).integers(0, 2**16, (4, 2, 8, 64)).astype(words)
    write = jax.jit(jattn.update_kv_cache)
    caches = (jnp.asarray(pool.view(dtype)),) * 2
    row = jnp.ones((1, 2, 64))
    found = np.asarray(write(*caches, row, row, jnp.asarray([8], jnp.int32))[0]).view(words)
    pool[1, :, 0] = np.ones((2, 64), dtype).view(words)
    np.testing.assert_array_equal(found, pool)
