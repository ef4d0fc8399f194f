"""The functions that the Triton kernels consist of, point by point against jattn/spec.py.

They run on NumPy (`triton_numpy.py`), from the same source that is compiled for a GPU.
"""

from __future__ import annotations

import itertools
import types

import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import spec
from jattn.pallas import machine
from jattn.pallas.triton import launch as triton_launch
from tests.support import triton_numpy


class Fragments:
    """The functions that the kernels consist of, with plain arrays as results."""

    def __getattr__(self, name: str):
        function = getattr(triton_numpy.fragments(), name)

        def call(*arguments):
            arguments = [
                triton_numpy.tensor(x) if isinstance(x, np.ndarray | np.generic) else x
                for x in arguments
            ]
            found = function(*arguments)
            if isinstance(found, tuple):
                return tuple(map(np.asarray, found))
            return np.asarray(found)

        return call


fragments = Fragments()


POSITIONS = np.arange(-3, 12, dtype=np.int32)
WINDOWS = (None, 1, 2, 5, 2**31 - 1)
CODES = {True: 1, False: 0, "array": 2}


CHUNKS = (None, 1, 4, 2**31 - 1)


def masks(seq_len, causal, flag, window, chunk, end=None):
    """Return a fragment's masks, and which of them are given."""
    numbers = (seq_len, flag, window or 0, chunk or 0, 0 if end is None else end)
    static = types.SimpleNamespace(
        CAUSAL=CODES[causal],
        HAS_WINDOW=window is not None,
        HAS_CHUNK=chunk is not None,
        HAS_END=end is not None,
    )
    seq_len, flag, window, chunk, end = (triton_numpy.tensor(np.int32(x)) for x in numbers)
    kernels = triton_numpy.fragments()
    limits = kernels.Limits(window, chunk)
    return kernels.SequenceSight(seq_len, flag, limits, end), static


def sight(
    flag: bool, causal: bool | str, window: int | None, chunk: int | None, end: int | None
) -> spec.Sight:
    return spec.Sight(
        np.bool_(flag) if causal == "array" else flag,
        None if window is None else np.int32(window),
        None if chunk is None else np.int32(chunk),
        None if end is None else np.int32(end),
    )


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [True, False, "array"])
def test_visible_is_spec(causal, window, chunk):
    flags = (True, False) if causal == "array" else (causal,)
    for seq_len, flag, end in itertools.product((0, 1, 7, 9), flags, (None, 0, 5, 8)):
        limits = flag, causal, window, chunk, end
        want = spec.visible(POSITIONS[:, None], POSITIONS[None], seq_len, sight(*limits))
        have = fragments.visible(
            POSITIONS[:, None], POSITIONS[None], *masks(seq_len, causal, flag, window, chunk, end)
        )
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [True, False, "array"])
def test_key_range_is_spec(causal, window, chunk):
    first, count, seq_len = np.meshgrid(
        POSITIONS, np.arange(1, 5, dtype=np.int32), np.arange(9, dtype=np.int32)
    )
    last = first + count - 1
    flags = (True, False) if causal == "array" else (causal,)
    for flag, end in itertools.product(flags, (None, 0, 5, 8)):
        limits = flag, causal, window, chunk, end
        want = spec.key_range(first, last, seq_len, sight(*limits), xp=np)
        have = fragments.key_range(first, last, *masks(seq_len, causal, flag, window, chunk, end))
        for a, b in zip(have, want, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("words", [1, 2])
def test_trees_are_spec(words):
    """With random masks, tokens within their words and past them, and earlier keys."""
    rng = np.random.default_rng(words)
    index = np.arange(32 * words + 8, dtype=np.int32)
    key = np.arange(-5, len(index), dtype=np.int32)
    bits = rng.integers(0, 2**32, (len(index), words), dtype=np.uint32)
    path = spec.path_bits(bits, index, xp=np)
    want = spec.tree_path(path[:, None], index[:, None], key[None], xp=np)
    static = types.SimpleNamespace(TREE_WORDS=words)
    buffer = triton_numpy.Buffer(bits.reshape(-1))
    tree = triton_numpy.Pointer(buffer, bits.dtype, np.arange(len(index)) * words)
    real = np.ones(len(index), bool)
    have = fragments.tree_path(tree, index, real, key, static)
    for a, b in zip(have, want, strict=True):
        np.testing.assert_array_equal(a, b)
    depth = spec.tree_path(path, index, np.full(len(index), -1), xp=np)[1] - 1
    np.testing.assert_array_equal(fragments.depth_of(tree, index, real, static), depth)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16.dtype, np.float32])
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(
    "format",
    [jattn.Fp8("e4m3"), jattn.Fp8("e5m2"), jattn.Int8(), jattn.Int4(), jattn.Nvfp4()],
    ids=lambda format: format.name,
)
def test_every_code_is_its_number(format, sm, dtype):
    """All bytes as words of a cache, in each dtype that products may have."""
    stored, codes, per_word = triton_launch.stored_as(format, machine.Machine(sm, 7))
    words = np.arange(256, dtype=np.uint8)
    want = np.asarray(format.decode(jnp.asarray(words.view(format.word_dtype))), np.float32)
    words = words.view(getattr(triton_numpy.language, stored)).reshape(4, -1)
    have = fragments.numbers_of(words, codes, dtype)
    assert have.dtype == (np.float16 if format.group else dtype)  # scales are multiplied next
    have = have.astype(np.float32)
    if format.group:
        have = have * 2.0**14
    order = fragments.in_order_of_codes(np.arange(have.size).reshape(have.shape), per_word)
    np.testing.assert_array_equal(have, want[order])
    np.testing.assert_array_equal(fragments.in_order(have, per_word).ravel(), want)


@pytest.mark.parametrize("cap", [None, 0.5, 30.0])
@pytest.mark.parametrize("biases", [None, "slopes", "table"])
@pytest.mark.parametrize("positive", [True, False])
def test_factored_logits_are_spec(cap, biases, positive):
    scale = 0.3 if positive else -0.3
    slope = 0.25 if biases == "slopes" else None
    table = np.linspace(-2, 3, 7, dtype=np.float32) if biases == "table" else None
    dots = np.repeat(np.linspace(-300, 300, 4001, dtype=np.float32)[:, None], 4, axis=1)
    q_pos, k_pos = np.full((4001, 1), 40, np.int32), np.array([[0, 39, 40, 41]], np.int32)
    bias = None if table is None else table[spec.relative_index(q_pos, k_pos, 7, xp=np)]
    want = spec.transform_logits(
        dots.astype(np.float64), scale=scale, logits_soft_cap=cap, alibi_slopes=slope,
        q_pos=q_pos, k_pos=k_pos, position_bias=bias, xp=np,
    )  # fmt: skip
    each = triton_numpy.tensor(np.ones(4001, np.float32))
    at = triton_numpy.Pointer(triton_numpy.Buffer(table), np.float32, np.zeros(4001, np.int64))
    rows = types.SimpleNamespace(
        scale=each * np.float32(scale),
        lowest=40,
        far=each,
        terms=types.SimpleNamespace(
            cap=np.float32(cap or 0), slopes=each * np.float32(slope or 0), bias=at
        ),
    )
    static = types.SimpleNamespace(
        HAS_CAP=cap is not None,
        HAS_SLOPES=slope is not None,
        BIAS_COLUMNS=0 if table is None else len(table),
    )
    x, factor = fragments.factored_logits(dots, rows, q_pos, k_pos, 41, positive, static)
    assert (factor > 0).all()
    have = x * factor[:, None]
    assert have.dtype == np.float32
    # Four roundings of numbers as large as the largest partial result.
    unit = np.spacing(np.maximum(np.abs(want), (cap or 90) + 10 * (slope or 0)).astype(np.float32))
    assert (np.abs(have - want) <= 4 * unit).all()


def test_tanh_is_right_to_the_last_bits():
    x = np.concatenate([np.geomspace(1e-30, 1e30, 20001), np.linspace(0, 12, 20001)])
    x = np.concatenate([x, -x]).astype(np.float32)
    have = fragments.tanh(x).astype(np.float64)
    want = np.tanh(x.astype(np.float64))
    assert (np.abs(have - want) <= 2.5 * np.spacing(np.abs(want).astype(np.float32))).all()
    assert np.abs(have - want).max() <= spec.TANH_ERROR
    nan = fragments.tanh(np.float32("nan"))
    assert np.isnan(nan)


def test_finish_of_empty_rows_is_spec():
    m = np.array([-np.inf, 2.0], np.float32)
    l = np.array([0.0, 4.0], np.float32)
    factor, lse = fragments.finish(m, l, m, False)
    np.testing.assert_array_equal(factor, [0.0, 0.25])
    assert lse[0] == spec.empty_row_lse(None)
    np.testing.assert_allclose(lse[1], np.log(4.0) + 2.0 * np.log(2.0), rtol=1e-6)
    sink = np.array([1.5, -np.inf], np.float32)
    factor, lse = fragments.finish(m, l, sink, True)
    np.testing.assert_array_equal(factor, [0.0, 0.25])
    np.testing.assert_allclose(lse, [spec.empty_row_lse(1.5), np.log(16.0)], rtol=1e-6)
    extreme = np.array([-3.4e38, np.inf], np.float32)
    factor, lse = fragments.finish(np.full(2, -np.inf, np.float32), np.zeros_like(l), extreme, True)
    np.testing.assert_array_equal(factor, 0.0)
    np.testing.assert_array_equal(lse, extreme)
    nan = fragments.finish(m, l * np.float32("nan"), sink, False)
    assert np.isnan(nan[0]).all()
