"""Numbers in the native kernel: decoding and multiplying every word, scales, logits and NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from benchmarks import oracle, workloads
from benchmarks.cpu import ours
from jattn.cpu.native import launch
from tests.support import problems, quantize
from tests.support.native import library as native_library

pytestmark = native_library.needed

native = native_library.native  # the fixture
MOST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("name", problems.FORMATS)
@pytest.mark.parametrize("dim", [16, 64, 80, 272])
def test_every_word_is_decoded(native, name, dim):
    """All words of one byte, and many of two and four, as float32 and internally as bfloat16."""
    format = problems.FORMATS[name]
    rng = np.random.default_rng(2)
    width = dim // format.values_per_word
    words = rng.integers(0, 256, (40, width * format.word_dtype.itemsize), np.uint8)
    words.reshape(-1)[:256] = np.arange(256)
    words = words.view(format.word_dtype)
    groups = None
    if format.group:
        groups = rng.integers(0, 256, (40, dim // 16), np.uint8)
        groups[groups % 128 == 127] = 1  # another test covers NaN
    if name == "float32":
        words[~np.isfinite(words)] = 1
    with np.errstate(invalid="ignore"):  # signaling NaN among the words
        want = quantize.decode(format, quantize.Rows(*unpacked(format, words, groups)))
    out = np.zeros((40, dim), np.float32)
    group_words = None if groups is None else groups.ctypes.data
    for row in range(40):
        native.jattn_native_decode(
            *(launch.format_code(format), words.ctypes.data, group_words, dim, words.strides[0]),
            *(row, out[row].ctypes.data),
        )
    np.testing.assert_array_equal(out, want)


SIZES = [(96, 272, 8), (272, 192, 8), (128, 80, 4), (64, 96, 2), (512, 576, 1)]


@pytest.mark.parametrize(
    ("name", "dim", "value_dim", "heads", "in_keys"),
    [
        *(
            (name, *sizes, False)
            for name in ("float16", "e4m3", "e5m2", "int8", "int4", "nvfp4")
            for sizes in SIZES
        ),
        *(("nvfp4", *sizes, True) for sizes in ((80, 64, 4), (192, 128, 4))),
    ],
)
def test_every_word_is_multiplied_as_what_it_is(name, dim, value_dim, heads, in_keys):
    """Head h attends only to the h-th last key: out is its value, and lse is its product."""
    formats = {
        "float16": jattn.Dense("float16"),
        "int8": jattn.Int8(),
        "int4": jattn.Int4(),
        "nvfp4": jattn.Nvfp4(),
    }
    format = formats.get(name) or jattn.Fp8(name)
    floats = {"float16": np.float16, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}.get(name)
    rng, num_blocks = np.random.default_rng(3), 4

    def pool(dim: int) -> tuple[jattn.KVArray, np.ndarray]:
        shape = (num_blocks, 1, 16, dim // format.values_per_word)
        size = np.dtype(format.word_dtype).itemsize
        words = rng.integers(0, 256, (*shape[:3], shape[3] * size), np.uint8)
        words.reshape(-1)[:256] = np.arange(256)
        if floats is not None:
            numbers = words.view(floats)
            numbers[~np.isfinite(numbers.astype(np.float32))] = 0
        groups = None
        if format.group:
            groups = rng.integers(0, 256, (num_blocks, 1, 16, dim // 16), np.uint8)
            groups[groups % 128 == 127] = 1
        ones = np.ones(shape[:3], np.float32) if format.per == "token" else None
        rows = None if groups is None else groups.reshape(-1, dim // 16)
        codes = words.view(format.word_dtype).reshape(-1, shape[3])
        numbers = quantize.decode(format, quantize.Rows(*unpacked(format, codes, rows)))
        scale = None if ones is None else jnp.asarray(ones)
        words = jnp.asarray(words.view(format.word_dtype))
        group_scale = None if groups is None else jnp.asarray(groups)
        return jattn.KVArray(words, scale, format, group_scale=group_scale), numbers

    key_cache, keys = pool(dim)
    value_cache, values = (None, keys[:, :value_dim]) if in_keys else pool(value_dim)
    bias = np.full((heads, 2 * 64 + 1), -1e30, np.float32)
    bias[np.arange(heads), 64 - np.arange(heads)] = 0
    query = rng.normal(size=(8, heads, dim)).astype(jnp.bfloat16)
    table = rng.permutation(num_blocks)
    scale = 2.0 ** -np.ceil(np.log2(np.abs(keys).max()))
    for query_lens, seq_lens in (([1] * 8, [64, 57, 48, 33, 32, 31, 17, 8]), ([8], [63])):
        batch = jattn.AttentionMetadata.from_lengths(
            query_lens,
            seq_lens,
            block_tables=[table[: -(-n // 16)] for n in seq_lens],
            block_size=16,
        )
        out, lse = jattn.paged_attention(
            jnp.asarray(query),
            *(key_cache, value_cache),
            **batch.as_kwargs(),
            value_dim=value_dim if in_keys else None,
            scale=scale,
            relative_bias=jnp.asarray(bias),
            return_lse=True,
            out_dtype=jnp.float16 if name == "float16" else None,
            implementation="native",
        )
        last = np.concatenate(
            [n - q + np.arange(q) for q, n in zip(query_lens, seq_lens, strict=True)]
        )
        at = last[:, None] - np.arange(heads)
        at = table[at // 16] * 16 + at % 16
        np.testing.assert_array_equal(np.asarray(out).astype(np.float32), values[at])
        products = scale * np.float64(query) * keys[at]
        slack = 16 * np.finfo(np.float32).eps * (1 + np.abs(products).sum(-1))
        assert (np.abs(np.asarray(lse) - products.sum(-1)) <= slack).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_large_queries_times_small_scales_of_groups(sign):
    """Sums over a group are far too large until the key's scale reduces them."""
    keys, _ = jattn.init_kv_cache(1, 1, 16, 64, format=jattn.Nvfp4())
    words = np.full((1, 1, 16, 32), 0x77, np.uint8)  # 6 and 6
    words[..., ::2] = 0x77 if sign > 0 else 0xFF  # or -6
    least = jnp.full(keys.group_scale.shape, 1, jnp.uint8)  # 2^-9
    keys = keys.replace(data=jnp.asarray(words), group_scale=least)
    _, lse = jattn.paged_attention(
        jnp.full((1, 1, 64), 1e38, jnp.bfloat16),
        *(keys, keys),
        block_tables=jnp.zeros((1, 1), jnp.int32),
        seq_lens=jnp.ones((1,), jnp.int32),
        scale=1e-37,
        return_lse=True,
        implementation="native",
    )
    sizes = 1e-37 * np.float64(jnp.bfloat16(1e38)) * 64 * 6 / 512
    expected = sizes if sign > 0 else 0
    assert np.abs(lse - expected).max() <= 8 * np.finfo(np.float32).eps * (1 + sizes)


@pytest.mark.parametrize("tokens", [2, 5, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales_that_are_tiny_or_invalid(dtype, tokens):
    """Rows before the first of 3 keys see none, whatever the scale is."""
    signs = jnp.asarray([1, 1, -1], dtype)[:, None] * jnp.ones((1, 64), dtype)
    keys = jnp.zeros((1, 1, 16, 64), dtype).at[0, 0, :3].set(1.5e18 * signs)

    @jax.jit
    def run(scale):
        return jattn.paged_attention(
            jnp.full((tokens, 1, 64), 2e18, dtype),
            *(keys, jnp.ones_like(keys)),
            block_tables=jnp.zeros((1, 1), jnp.int32),
            seq_lens=jnp.asarray([3], jnp.int32),
            query_start_loc=jnp.asarray([0, tokens], jnp.int32),
            scale=scale,
            return_lse=True,
            implementation="native",
        )

    product = float(jnp.asarray(2e18, dtype)) * float(jnp.asarray(1.5e18, dtype)) * 64
    for scale in (2e-38, 0.0, np.nan, np.inf):
        out, lse = (np.asarray(x).astype(np.float64)[:, 0] for x in run(jnp.float32(scale)))
        unseen = max(tokens - 3, 0)
        np.testing.assert_array_equal(out[:unseen], 0)
        np.testing.assert_array_equal(lse[:unseen], -np.inf)
        if not np.isfinite(scale):
            assert np.isnan(lse[unseen:]).all()
            continue
        logit = float(np.float32(scale)) * product
        expected = np.logaddexp.accumulate([logit, logit, -logit])[-min(tokens, 3) :]
        eps = np.finfo(np.float32).eps  # weights of pairs of bfloat16 are right to 2e-7
        np.testing.assert_allclose(lse[unseen:], expected, rtol=8 * eps, atol=2 * eps)
        np.testing.assert_allclose(out[unseen:], 1, rtol=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_shows_where_keys_are_split_over_threads(dtype):
    """NaN in a query, in the scale, or in one of thousands of keys, wherever in a vector."""
    rng, length, size, dim = np.random.default_rng(8), 9000, 16, 64
    blocks = -(-length // size)
    query = rng.normal(size=(1, 4, dim)).astype(dtype)
    keys, values = rng.normal(size=(2, blocks, 1, size, dim)).astype(dtype)

    @jax.jit
    def attend(query, keys, scale):
        return jattn.paged_attention(
            *(query, keys, jnp.asarray(values)),
            block_tables=jnp.arange(blocks, dtype=jnp.int32)[None],
            seq_lens=jnp.asarray([length], jnp.int32),
            scale=scale,
            return_lse=True,
            implementation="native",
        )

    def found(query=query, keys=keys, scale=0.125) -> np.ndarray:
        out, lse = attend(query, keys, np.float32(scale))
        return np.concatenate([np.asarray(out, np.float32), np.asarray(lse)[..., None]], axis=-1)

    assert np.isfinite(found()).all()
    assert np.isnan(found(query=np.full_like(query, np.nan))).all()
    assert np.isnan(found(scale=np.nan)).all()
    for key in (0, 15, 4496, 8999):
        wrong = keys.copy()
        wrong[key // size, 0, key % size] = np.nan
        assert np.isnan(found(keys=wrong)).all(), key
    ones = keys.view(np.uint32 if dtype == "float32" else np.uint16).copy()
    ones[3] = np.iinfo(ones.dtype).max  # a NaN with all bits set
    assert np.isnan(found(keys=ones.view(keys.dtype))).all()


def test_a_zero_point_of_nan_stays_in_its_sequence():
    """The next sequence has fewer keys than a vector has lanes; the others hold old numbers."""
    keys, values = jattn.init_kv_cache(2, 1, 16, 32, format=jattn.Int8(zero_point=True))
    values = values.replace(zero=values.zero.at[0].set(jnp.nan))
    out = jattn.paged_attention(
        *(jnp.ones((2, 2, 32)), keys, values),
        block_tables=jnp.asarray([[0], [1]], jnp.int32),
        seq_lens=jnp.asarray([16, 3], jnp.int32),
        implementation="native",
    )
    assert np.isnan(out[0]).all()
    np.testing.assert_array_equal(out[1], 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("query_len", [1, 20])
def test_logits_all_far_below_zero_give_the_mean(dtype, query_len):
    """A bias so large that it hides all differences leaves the mean of the visible values."""
    rng, heads, length = np.random.default_rng(4), 4, 60
    keys, values = (jnp.asarray(rng.normal(size=(4, 1, 16, 64)), dtype) for _ in range(2))
    query = jnp.asarray(rng.normal(size=(query_len, heads, 64)), dtype)
    batch = jattn.AttentionMetadata.from_lengths(
        [query_len], [length], block_tables=[range(4)], block_size=16
    )
    count = np.arange(length - query_len, length) + 1
    sums = np.cumsum(np.asarray(values, np.float64).reshape(64, 64), axis=0)
    means = (sums[count - 1] / count[:, None])[:, None]
    for bias in (-1e9, -3e10, -7e10, -1e20, -1e30):
        out, lse = jattn.paged_attention(
            *(query, keys, values),
            **batch.as_kwargs(),
            relative_bias=jnp.full((heads, 3), bias),
            return_lse=True,
            implementation="native",
        )
        slack = float(jnp.finfo(dtype).eps)
        expected = np.broadcast_to(means, out.shape)
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=4 * slack)
        np.testing.assert_allclose(lse, np.full_like(lse, bias), rtol=1e-6)


@pytest.mark.parametrize("query_len", [1, 40])
@pytest.mark.parametrize(
    ("name", "size", "keys"),
    [
        *(("sinks", size, keys) for size in (-MOST, 2.5e38) for keys in (0, 70)),
        *(("relative_bias", size, 70) for size in (-MOST, -2.5e38, 2.5e38)),
    ],
)
def test_logits_as_large_as_the_largest_float(name, size, keys, query_len):
    """As exponents of 2 they would be infinite; many masks hide keys with `finfo.min`."""
    rng = np.random.default_rng(5)
    query = rng.normal(size=(query_len, 4, 64)).astype(np.float32)
    pools = rng.normal(size=(2, 5, 2, 16, 64)).astype(np.float32)
    batch = jattn.AttentionMetadata.from_lengths(
        [query_len if keys else 0], [keys], block_tables=[range(5)], block_size=16
    )
    given = {name: np.full((4,) if name == "sinks" else (4, 9), size, np.float32)}
    if not keys:  # a decode without keys
        batch = {"block_tables": np.zeros((query_len, 1), np.int32)}
        batch |= {"seq_lens": np.zeros(query_len, np.int32)}
    else:
        batch = batch.as_kwargs()
    out, lse = jattn.paged_attention(
        *map(jnp.asarray, (query, *pools)),
        **jax.tree.map(jnp.asarray, batch | given),
        return_lse=True,
        implementation="native",
    )
    want, want_lse = jattn.paged_attention(
        *map(jnp.asarray, (query, *pools)),
        **jax.tree.map(jnp.asarray, batch | given),
        return_lse=True,
        implementation="reference",
    )
    np.testing.assert_allclose(out, want, atol=1e-5)
    # Beyond 2.3e38 a logit counts as the largest float.
    want_lse = np.where(np.abs(want_lse) > 2.3e38, np.copysign(MOST, want_lse), want_lse)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


def unpacked(format, words, groups):
    """Unpack words into the codes that `quantize.decode` takes, with scales of one."""
    codes = words
    if format.values_per_word == 2:
        codes = np.stack([words % 16, words // 16], axis=-1).reshape(len(words), -1)
        if groups is None:
            codes = (codes.astype(np.int8) ^ 8) - 8
    shape = format.quant_param_shapes((1, 1, len(words), words.shape[1]), "HND")
    ones = None if shape.scale is None else np.ones(len(words), np.float32)
    zero = None if shape.zero is None else np.zeros(len(words), np.float32)
    return codes, ones, zero, groups


@pytest.mark.extended
@pytest.mark.parametrize("value_dim", [None, 64])
def test_a_scale_that_codes_would_make_infinite(value_dim):
    """e4m3 numbers are multiplied as 2^-8 times their value, and the scale compensates."""
    keys = np.where(np.arange(16) % 2, 2.0**-9, 0)[:, None, None] * np.ones((1, 1, 64))
    cache, _ = jattn.init_kv_cache(1, 1, 16, 64, format=jattn.Fp8("e4m3"))
    slots = jnp.arange(16, dtype=jnp.int32)
    cache, _ = jattn.update_kv_cache(cache, None, jnp.asarray(keys, jnp.float32), None, slots)
    given = {
        "block_tables": jnp.zeros((1, 1), jnp.int32),
        "seq_lens": jnp.asarray([16], jnp.int32),
        "scale": 2e36,
        "value_dim": value_dim,
    }
    pools = (cache, cache if value_dim is None else None)
    query = jnp.full((1, 1, 64), 1e-35, jnp.float32)
    found, want = (
        jattn.paged_attention(query, *pools, **given, implementation=name)
        for name in ("native", "reference")
    )
    np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.extended
def test_sums_over_many_keys_keep_their_digits():
    """16 rows over 4,096 float32 keys in one split: each kv tile is summed, then added."""
    w = workloads.workload("decode-block128", 128, 1, "float32")
    found = ours.Attention(w, 1, "native").result()
    assert oracle.check(w, oracle.answer(w), found, "native") <= 1
