"""Formats that choose their scales: rounding, layout, NaN, block scales, and planted mistakes.

Every comparison is with `quantize.py`, which uses NumPy and ml_dtypes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jattn
from jattn import formats
from jattn.cpu.xla import numbers as to_numbers
from jattn.cpu.xla import nvfp4_dots as grouped
from jattn.formats import rounding
from tests.support import budget, dense, problems, quantize

SCALED = [f for f in formats.ALL if f.chooses_scales]
by_name = {"ids": lambda format: format.name}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_e2m1_rounds_to_nearest_even():
    values = np.array([*E2M1, 1e9, np.inf], np.float32)
    middles = (values[:-2] + values[1:-1]) / 2
    points = np.concatenate([values, middles[:-1]])
    points = np.concatenate([points, np.nextafter(points, 0), np.nextafter(points, np.float32(9))])
    points = points[(points == 0) | (points > 1e-30)].astype(np.float32)
    points = np.concatenate([points, -points])
    want = quantize.saturated(points, quantize.E2M1).view(np.uint8)
    have = np.asarray(rounding.to_e2m1(jnp.asarray(points)))
    np.testing.assert_array_equal(have, want)


def test_codes_and_bytes():
    codes = np.arange(16, dtype=np.uint8)
    e2m1 = np.asarray(rounding.from_e2m1(jnp.asarray(codes))).astype(np.float32)
    np.testing.assert_array_equal(e2m1, codes.view(quantize.E2M1).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(e2m1), codes >= 8)
    int4 = np.asarray(rounding.from_int4(jnp.asarray(codes)))
    np.testing.assert_array_equal(int4, codes.astype(ml_dtypes.int4).astype(np.int8))
    # As published for NVFP4: 0xAB holds 0xB, the even index, and then 0xA.
    np.testing.assert_array_equal(np.asarray(rounding.unpack(jnp.uint8([0xAB]))), [0xB, 0xA])
    np.testing.assert_array_equal(np.asarray(rounding.pack(jnp.uint8([0xB, 0xA]))), [0xAB])


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_word_as_a_number_on_cpu(dtype):
    """The XLA path's bit arithmetic is right for every code, NaN, infinities and subnormals too."""
    words = np.arange(256, dtype=np.uint8)
    for kind in jattn.Fp8.kinds:
        format = jattn.Fp8(kind)
        have = to_numbers.of_words(jnp.asarray(words), format, np.dtype(dtype))
        want = words.view(format.value_dtype).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(have).astype(np.float32), want)
        assert have.dtype == dtype
    signed = to_numbers.of_words(jnp.asarray(words.view(np.int8)), jattn.Int8(), np.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(signed).astype(np.float32), words.view(np.int8))
    # Every byte with every group scale: 256 rows of 8 bytes, which are one group.
    rows = np.repeat(words[:, None], 8, 1)
    for word in (0, 1, 9, 0x38, 0x7E, 0x7F, 0xFE):
        groups = np.full((256, 1), word, np.uint8)
        parts = to_numbers.of_bytes(
            jnp.asarray(rows), jnp.asarray(groups), jattn.Nvfp4(), np.dtype(dtype)
        )
        have = np.asarray(to_numbers.join(parts)).astype(np.float64)
        codes = np.stack([rows % 16, rows // 16], -1).reshape(256, 16)
        want = quantize.decode(jattn.Nvfp4(), quantize.Rows(codes, groups=groups))
        np.testing.assert_array_equal(have, want)
        # The code for few rows: a one-hot query or weight picks out each number.
        one = jnp.eye(16, dtype=jnp.float32).reshape(4, 4, 16)
        stored = (jnp.asarray(np.broadcast_to(x, (4, *x.shape))) for x in (rows, groups))
        have = grouped.scores(one, *stored, jnp.int32(3)).reshape(16, 256).T
        np.testing.assert_array_equal(np.asarray(have, np.float64), want)
        one = jnp.eye(256, dtype=jnp.float32).reshape(64, 4, 256)
        scales = jnp.broadcast_to(grouped.scales_of(jnp.asarray(groups)), (64, 256, 1))
        stored = jnp.asarray(np.broadcast_to(rows, (64, *rows.shape)))
        have = to_numbers.join(grouped.mix(one, stored, scales, jnp.int32(3))).reshape(256, 16)
        np.testing.assert_array_equal(np.asarray(have, np.float64), want)


def numbers_of(format, words, params) -> np.ndarray:
    """Return the numbers of quantized rows [T, K, D]."""

    def numbers(words, params):
        arrays = {name: v[None] for name, v in params._asdict().items() if v is not None}
        return jattn.KVArray(words[None], None, format).replace(**arrays).numbers()[0]

    return np.asarray(jax.jit(numbers)(words, params))


@pytest.mark.parametrize("format", [f for f in SCALED if f.per != "block"], **by_name)
def test_encoding_is_bit_exact(format):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((50, 2, 32)) * np.exp2(rng.uniform(-12, 12, (50, 2, 1)))
    x[0], x[1], x[2, 0] = 0, 2.5, -2.5
    x = x.astype(np.float32)
    words, params = jax.jit(format.quantize)(x)
    want = quantize.encode(format, x)
    if want.scale is not None:
        np.testing.assert_allclose(np.asarray(params.scale), want.scale, rtol=2e-7)
    if want.zero is not None:
        # A zero point is a difference, so its error is relative to the row's size.
        error = np.abs(np.asarray(params.zero) - want.zero)
        assert (error <= 1e-6 * np.abs(x).max(-1)).all()
    if want.groups is not None:
        np.testing.assert_array_equal(np.asarray(params.group_scale), want.groups)
    chosen = (None if v is None else np.asarray(v) for v in (params.scale, params.zero))
    want = quantize.encode(format, x, 1, *chosen)
    np.testing.assert_array_equal(np.asarray(words), quantize.pack(format, want.codes))
    numbers = numbers_of(format, words, params)
    error = np.abs(numbers - quantize.decode(format, want))
    assert (error <= 1e-6 * np.abs(x).max(-1, keepdims=True)).all()


@pytest.mark.parametrize("format", [f for f in SCALED if f.per != "block"], **by_name)
def test_nan_is_not_lost_and_infinities_saturate(format):
    """If the format has no NaN, all numbers that share a scale with one become NaN; no others."""
    x = np.ones((4, 1, 32), np.float32)
    x[1, 0, 3], x[2, 0, 5], x[3] = np.nan, np.inf, -np.inf
    have = numbers_of(format, *jax.jit(format.quantize)(x))[:, 0]
    assert np.isfinite(have[[0, 2, 3]]).all()
    np.testing.assert_allclose(have[0], 1, rtol=0.04)  # e4m3(1 / 6) is that far from 1 / 6
    assert have[2, 5] == have[2].max() > 400
    assert (have[3] < 0).all()
    assert np.isnan(have[1, 3])
    shared = {"nvfp4": 16, "fp8_e4m3_token": 1, "fp8_e5m2_token": 1}.get(format.name, 32)
    assert np.isnan(have[1]).sum() == shared


def test_a_block_scale_is_set_by_its_first_slot_and_kept():
    format = jattn.Fp8("e4m3", "block")
    caches = jattn.init_kv_cache(3, 1, 4, 8, format=format)

    def write(caches, tokens):
        rows = jnp.asarray([[[size] * 8] for _, size in tokens], jnp.float32)
        slots = jnp.asarray([slot for slot, _ in tokens], jnp.int32)
        return jattn.update_kv_cache(*caches, rows, rows, slots)

    one = np.float32(8.0 / 448.0)  # maps eight times the first token's largest number to 448
    caches = write(caches, [(4, 1.0), (5, 3.0), (-1, 1e6), (12, 1e6)])
    np.testing.assert_allclose(np.asarray(caches[0].scale)[:, 0], [1, 3 * one, 1], rtol=1e-6)
    before = np.asarray(caches[0].numbers())[1, 0, :2]
    caches = write(caches, [(6, 20.0), (7, 1e3)])  # one fits, one saturates at 8 * 3
    numbers = np.asarray(caches[0].numbers())[1, 0, :, 0]
    np.testing.assert_array_equal(before, np.asarray(caches[0].numbers())[1, 0, :2])
    np.testing.assert_allclose(numbers, [1, 3, 20, 24], rtol=2**-4)
    caches = write(caches, [(4, 100.0)])  # the block's next owner
    np.testing.assert_allclose(np.asarray(caches[0].scale)[1, 0], 100 * one, rtol=1e-6)
    caches = write(caches, [(8, 0.0), (0, np.nan), (1, 2.0)])
    np.testing.assert_allclose(np.asarray(caches[0].scale)[[2, 0], 0], [1, 2 * one], rtol=1e-6)
    assert np.isnan(np.asarray(caches[0].numbers())[0, 0, 0]).all()


def attend(key_cache, value_cache, head_dim=32, **options):
    return jattn.paged_attention(
        jnp.ones((1, 2, head_dim)),
        key_cache,
        value_cache,
        block_tables=jnp.zeros((1, 1), jnp.int32),
        seq_lens=jnp.ones((1,), jnp.int32),
        **options,
    )


@functools.cache
def cache_of(format) -> jattn.KVArray:
    return jattn.init_kv_cache(2, 2, 4, 32, format=format)[0]


def taken(stored, read):
    """Make a cache of one format that claims another."""
    return lambda: cache_of(stored).replace(format=read)


def changed(format, name, change):
    """Make a cache with one of its arrays changed."""
    return lambda: cache_of(format).replace(**{name: change(getattr(cache_of(format), name))})


FP8, INT4, INT8, NVFP4 = jattn.Fp8(), jattn.Int4(), jattn.Int8(), jattn.Nvfp4()
PER_TOKEN, PER_BLOCK = jattn.Fp8("e4m3", "token"), jattn.Fp8("e4m3", "block")
# Caches that a careless caller might build, and the argument that must be named.
PLANTED = {
    "fp8 words as NVFP4": (taken(FP8, NVFP4), "group_scale"),
    "fp8 words as int4": (taken(FP8, INT4), "scale"),
    "fp8 words as int8": (taken(FP8, INT8), "data"),
    "NVFP4 as fp8": (taken(NVFP4, FP8), "group_scale"),
    "NVFP4 as int4": (taken(NVFP4, INT4), "group_scale"),
    "int4 as NVFP4": (taken(INT4, NVFP4), "scale"),
    "int8 as int4": (taken(INT8, INT4), "data"),
    "int8 with a zero point, read without": (taken(jattn.Int8(True), INT8), "zero"),
    "int8 without a zero point, read with": (taken(INT8, jattn.Int8(True)), "zero"),
    "scales per token as per head": (taken(PER_TOKEN, FP8), "scale"),
    "scales per token as per block": (taken(PER_TOKEN, PER_BLOCK), "scale"),
    "scales of the other layout": (changed(INT8, "scale", lambda x: x.swapaxes(1, 2)), "scale"),
    "scales missing": (changed(INT8, "scale", lambda x: None), "scale"),
    "scales of 16 bits": (changed(INT8, "scale", lambda x: x.astype(jnp.bfloat16)), "scale"),
    "half the groups": (changed(NVFP4, "group_scale", lambda x: x[..., :1]), "group_scale"),
    "NVFP4 of 24": (
        lambda: jattn.KVArray(jnp.zeros((2, 2, 4, 12), jnp.uint8), None, NVFP4),
        "data",
    ),
    "no format": (taken(FP8, "nvfp4"), "format"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_refused_by_name(name):
    make, argument = PLANTED[name]
    cache, good = make(), cache_of(FP8)
    for caches, name_of in (((cache, good), "key_cache"), ((good, cache), "value_cache")):
        with pytest.raises(ValueError, match=rf"{name_of}\.{argument}: "):
            attend(*caches)
        rows = jnp.ones((1, 2, 32))
        with pytest.raises(ValueError, match=rf"{name_of}\.{argument}: "):
            jattn.update_kv_cache(*caches, rows, rows, jnp.zeros((1,), jnp.int32))


def test_a_wrong_width_is_reported_for_the_query():
    """Words of one number per byte, wrapped as two per byte, have another head size."""
    words = jnp.zeros((2, 2, 4, 32), jnp.uint8)
    twice = jattn.KVArray(
        words, None, jattn.Nvfp4(), group_scale=jnp.zeros((2, 2, 4, 4), jnp.uint8)
    )
    with pytest.raises(ValueError, match=r"query: of head size D = 32, but must be 64"):
        attend(twice, twice)


@pytest.mark.parametrize(
    ("format", "dim", "must"),
    [(jattn.Nvfp4(), 40, "multiple of 16"), (jattn.Int4(), 33, "multiple of 2")],
)
def test_head_sizes_a_format_cannot_hold(format, dim, must):
    with pytest.raises(ValueError, match=rf"head_dim: {dim}, but must be a {must}"):
        jattn.init_kv_cache(2, 1, 4, dim, format=format)
    with pytest.raises(ValueError, match=rf"value_dim: {dim}, but must be a {must}"):
        jattn.init_kv_cache(2, 1, 4, 32, value_dim=dim, format=(jattn.Dense(), format))
    with pytest.raises(ValueError, match=rf"values: .*{must}"):
        jattn.KVArray.from_values(jnp.zeros((1, 1, 1, dim)), format)
    with pytest.raises(ValueError, match=r"format: .* a pair"):
        jattn.init_kv_cache(2, 1, 4, 32, format=(format,))


@pytest.mark.parametrize(("key", "value"), [("int8", "int4_zero"), ("nvfp4", "fp8_e4m3_token")])
def test_keys_and_values_of_two_formats(each_row, key, value):
    batch = problems.build(
        problems.Problem((1, 3, 0), (17, 40, 5), format=key, value_format=value, seed=8)
    )
    allowed = budget.of(batch)
    allowed.check(*batch.run())
    swapped = batch.view.replace(keys=batch.view.values, values=batch.view.keys)
    assert allowed.violations(dense.attend(swapped)[0])


def test_calibration_grows_and_sees_valid_slots_only():
    rng = np.random.default_rng(7)
    key = rng.standard_normal((6, 2, 16)).astype(np.float32)
    key[0, 0, 0], key[1, 1, 1], key[2] = np.nan, np.inf, 1e6
    slots = jnp.asarray([0, 1, -1, 5, 6, 7], jnp.int32)
    step = jax.jit(jattn.calibrate)
    seen = step(jnp.asarray(key), jnp.asarray(key[..., :8] / 2), slots)
    valid = key[[0, 1, 3, 4, 5]]
    want = np.where(np.isfinite(valid), np.abs(valid), 0).max((0, 2))
    np.testing.assert_array_equal(np.asarray(seen.key_max), want)
    assert int(seen.num_tokens) == 5
    small = jnp.asarray(key[3:] / 100)
    more = step(small, small[..., :8], slots[3:], seen)
    assert seen == jax.tree.map(np.asarray, seen) != more
    np.testing.assert_array_equal(np.asarray(more.key_max), want)
    assert int(more.num_tokens) == 8
    k_scale, v_scale = more.scales((jattn.Fp8("e4m3"), jattn.Nvfp4()))
    np.testing.assert_allclose(np.asarray(k_scale), want / 448, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(v_scale), np.asarray(more.value_max) / 2688, rtol=1e-6)
    assert more.scales(jattn.Fp8(), per_head=False)[0].shape == ()
    nothing = jattn.calibrate(small, small, jnp.full((3,), -1, jnp.int32))
    np.testing.assert_array_equal(np.asarray(nothing.scales(jattn.Fp8())[0]), 1)
    tiny = np.zeros(small.shape, np.float32)
    tiny[:, :, 0] = 1e-37  # 1 / (1e-37 / 448) overflows
    scale, _ = jattn.calibrate(tiny, tiny, slots[3:]).scales(jattn.Fp8())
    np.testing.assert_array_equal(np.asarray(scale), 1)
    block = jattn.KVArray.from_values(jnp.asarray(tiny[None]), jattn.Fp8(scale_per="block"))
    assert not np.asarray(block.numbers()).any()
    with pytest.raises(ValueError, match="takes a scale per head"):
        seen.scales(jattn.Int8())
    with pytest.raises(ValueError, match="calibration: "):
        jattn.calibrate(small[:, :1], small[:, :1], slots[3:], seen)


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_a_block_written_token_by_token_keeps_what_it_read(kv_layout):
    """Decode writes one token per call: only a block's first slot may set its scale."""
    caches = jattn.init_kv_cache(
        2, 2, 4, 8, format=jattn.Fp8(scale_per="block"), kv_layout=kv_layout
    )
    write = jax.jit(functools.partial(jattn.update_kv_cache, kv_layout=kv_layout))
    # Each of the four is exact at a scale of 8 / 448, which the first one sets.
    sizes = jnp.asarray([1.0, 2.0, 0.5, 4.0])
    for token in range(4):
        new = jnp.full((1, 2, 8), sizes[token])
        caches = write(*caches, new, new, jnp.asarray([4 + token], jnp.int32))
        stored = caches[0].numbers()[1]
        stored = stored if kv_layout == "NHD" else stored.swapaxes(0, 1)
        want = jnp.broadcast_to(sizes[: token + 1, None, None], (token + 1, 2, 8))
        np.testing.assert_allclose(np.asarray(stored[: token + 1]), np.asarray(want), rtol=2**-4)
