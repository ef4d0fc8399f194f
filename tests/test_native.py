"""The native CPU kernel: its meaning point by point, its library, and what a compiled call holds.

What its row claims is run by the matrix and by every test that runs all rows.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import itertools
import os
import pathlib
import platform
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
import jattn.sharding
from benchmarks import oracle, workloads
from benchmarks.cpu import ours
from jattn import backends, spec, testing
from jattn.cpu.native import build, launch, library
from tests.support import (
    budget,
    native_batches,
    native_sanitize,
    native_writing,
    problems,
    quantize,
)

REASONS = backends.BACKENDS["native"].row.missing()
pytestmark = pytest.mark.skipif(bool(REASONS), reason="; ".join(REASONS))
NONE = -(2**63)  # a window or chunk that is not given
BASE = problems.Problem(
    query_lens=(0, 1, 1, 16, 1, 20, 9),
    seq_lens=(0, 1, 15, 16, 17, 130, 23),
    options=frozenset({"return_lse"}),
    seed=7,
)


@pytest.fixture(scope="module")
def native() -> ctypes.CDLL:
    found = library.load().library
    found.jattn_native_visible.argtypes = [
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_int64, ctypes.c_void_p),
    ]
    found.jattn_native_tree.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    ]
    found.jattn_native_logits.argtypes = [
        *(ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p),
    ]
    found.jattn_native_decode.argtypes = [
        *(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_int64, ctypes.c_void_p),
    ]
    return found


def test_visible_is_what_the_spec_says(native):
    seq_len, positions = 9, range(-3, 12)
    query, key = np.meshgrid(positions, positions, indexing="ij")
    sizes = (None, 1, 2, 5, 30, 2**31 - 1)
    for causal, window, chunk, end in itertools.product((False, True), sizes, sizes, (None, 0, 6)):
        if end is not None and not causal:
            continue
        sight = spec.Sight(causal, window, chunk, end)
        want = spec.visible(query, key, np.int64(seq_len), sight)
        for i, q in enumerate(positions):
            found = np.zeros(2, np.int64)
            limits = (NONE if x is None else x for x in (window, chunk))
            native.jattn_native_visible(q, seq_len, causal, *limits, end or 0, found.ctypes.data)
            have = (key[i] >= found[0]) & (key[i] < found[1])
            np.testing.assert_array_equal(have, want[i], err_msg=f"{sight} at {q}")


def test_trees_are_what_the_spec_says(native):
    rng = np.random.default_rng(0)
    for words, query in itertools.product((1, 2), (0, 1, 30, 31, 32, 40, 63, 64, 70)):
        mask = rng.integers(0, 2**32, words, np.uint32)
        keys = np.arange(-3, query + 5)
        rows = spec.path_bits(mask, np.asarray(query), xp=np)
        seen, distance = spec.tree_path(rows, np.asarray(query), keys, xp=np)
        for key, want_seen, want in zip(keys, seen, distance, strict=True):
            found = np.zeros(1, np.int64)
            have = native.jattn_native_tree(mask.ctypes.data, words, query, key, found.ctypes.data)
            assert (bool(have), int(found[0])) == (bool(want_seen), int(want)), (query, key)


@pytest.mark.parametrize("cap", [None, 1e-3, 6.0, 50.0])
@pytest.mark.parametrize("biased", [False, True])
def test_logits_are_what_the_spec_says(native, cap, biased):
    rng = np.random.default_rng(1)
    dots = np.float32(rng.standard_normal(400) * np.exp2(rng.integers(-20, 12, 400)))
    dots[:3] = 0, 1e30, -1e30
    table = rng.standard_normal(2 * 20 + 1).astype(np.float32) if biased else None
    q, k, scale, slope = 150, 100, np.float32(0.3), np.float32(0.05)
    out = np.zeros_like(dots)
    limit = None if cap is None else np.array([cap], np.float32)
    pointers = [None if x is None else x.ctypes.data for x in (limit, table)]
    columns = 0 if table is None else len(table)
    native.jattn_native_logits(
        *(dots.ctypes.data, scale, pointers[0], slope, pointers[1], columns),
        *(q, k, len(dots), out.ctypes.data),
    )
    keys = k + np.arange(len(dots))
    bias = None if table is None else table[spec.relative_index(q, keys, len(table), xp=np)]
    want = spec.transform_logits(
        dots.astype(np.float64),
        scale=np.float64(scale),
        logits_soft_cap=None if limit is None else np.float64(limit[0]),
        alibi_slopes=np.float64(slope),
        q_pos=np.int64(q),
        k_pos=keys,
        position_bias=bias,
        xp=np,
    )
    np.testing.assert_allclose(out, want, rtol=6e-7, atol=4e-7 * (1 if cap is None else cap) + 4e-7)


@pytest.mark.parametrize("name", problems.FORMATS)
@pytest.mark.parametrize("dim", [16, 64, 80, 272])
def test_every_word_is_decoded(native, name, dim):
    """All words of one byte, many of two and four; as float32 and, inside, as bfloat16."""
    format = problems.FORMATS[name]
    rng = np.random.default_rng(2)
    width = dim // format.values_per_word
    words = rng.integers(0, 256, (40, width * format.word_dtype.itemsize), np.uint8)
    words.reshape(-1)[:256] = np.arange(256)
    words = words.view(format.word_dtype)
    groups = None
    if format.group:
        groups = rng.integers(0, 256, (40, dim // 16), np.uint8)
        groups[groups % 128 == 127] = 1  # NaN has a test of its own
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


@pytest.mark.parametrize(
    ("dim", "value_dim", "heads"),
    [(96, 272, 8), (272, 192, 8), (128, 80, 4), (64, 96, 2), (512, 576, 1)],
)
@pytest.mark.parametrize("name", ["float16", "e4m3", "e5m2", "int8", "int4", "nvfp4"])
def test_every_word_is_multiplied_as_what_it_is(name, dim, value_dim, heads):
    """Head h attends to the h-th last key alone: its value comes out, and its product as lse."""
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

    (key_cache, keys), (value_cache, values) = pool(dim), pool(value_dim)
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
    """Sums over a group are far too large before the key's scale makes them smaller."""
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
def test_scales_that_are_tiny_or_mean_nothing(dtype, tokens):
    """The first rows come before the first of 3 keys: they see none, whatever the scale is."""
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
        np.testing.assert_allclose(lse[unseen:], expected, rtol=8 * np.finfo(np.float32).eps)
        np.testing.assert_allclose(out[unseen:], 1, rtol=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_shows_where_keys_are_split_over_threads(dtype):
    """Of a query, of the scale, and of one key of thousands, wherever in a vector it lies."""
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("query_len", [1, 20])
def test_logits_that_are_all_far_below_zero_are_weighed(dtype, query_len):
    """A bias so large that it hides all differences leaves the mean of the values that are seen."""
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


def unpacked(format, words, groups):
    """Words as the codes that `quantize.decode` takes, with scales of one."""
    codes = words
    if format.values_per_word == 2:
        codes = np.stack([words % 16, words // 16], axis=-1).reshape(len(words), -1)
        if groups is None:
            codes = (codes.astype(np.int8) ^ 8) - 8
    shape = format.quant_param_shapes((1, 1, len(words), words.shape[1]), "HND")
    ones = None if shape.scale is None else np.ones(len(words), np.float32)
    zero = None if shape.zero is None else np.zeros(len(words), np.float32)
    return codes, ones, zero, groups


def test_machines_without_a_kernel_are_named():
    with pytest.raises(build.BuildError, match="no native kernel for riscv64"):
        build.instruction_sets("riscv64", ["g++"])


def test_a_library_that_does_not_fit_says_what_to_do(tmp_path):
    built, version = build.LIBRARY, library.ffi_version()
    assert version is not None
    garbage = tmp_path / "garbage.so"
    garbage.write_bytes(b"nothing")
    for path, stamp, ffi, words in (
        (tmp_path / "none.so", None, version, "not built"),
        (garbage, None, version, "does not load"),
        (built, "other", version, "other sources"),
        (built, build.stamp(), (0, 2), "version 0.3 of XLA's FFI and this JAX 0.2"),
        (built, build.stamp(), (1, 0), "version 0.3 of XLA's FFI and this JAX 1.0"),
    ):
        found = library.open_library(path, stamp, ffi)
        assert found.library is None
        assert words in found.reason
        assert build.COMMAND in found.reason


@pytest.mark.extended
def test_an_instruction_set_that_the_machine_lacks_is_refused_with_a_warning():
    """One warning; then calls go elsewhere, and `explain` has the reason."""
    code = """
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from jattn.cpu.native import library
    print(library.load().reason == library.load().reason, len(said), said[0].message)
"""
    have = ", ".join(library.load().instruction_sets())
    want = f"JATTN_NATIVE_ISA is 'avx3', but must be an instruction set of this machine: {have}\n"
    found = run_python("-c", code, JATTN_NATIVE_ISA="avx3")
    assert found == f"True 1 jattn has no native kernel in this process: {want}"


@pytest.mark.extended
def test_a_library_for_an_older_machine_runs_with_a_warning(tmp_path):
    """As after a move of an editable installation: what it was built with is used."""
    have = library.load().instruction_sets()
    if len(have) == 1:
        pytest.skip("this machine has one instruction set")
    built = tmp_path / "old.so"
    build.build(built, only=("base",))
    assert not build.is_current(built)
    code = """
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from jattn.cpu.native import library
    print(library.load().instruction_sets(), [str(one.message) for one in said])
"""
    missing = ", ".join(have[:-1])
    want = f"jattn's native kernel was built without {missing}, which this machine has"
    found = run_python("-c", code, JATTN_NATIVE_LIBRARY=str(built))
    assert found.startswith(f"('base',) [\"{want}: for its full speed run `{build.COMMAND}`\"]")


def test_a_build_for_this_machine_has_all_that_it_can_use(tmp_path):
    command = build.compiler()
    here = build.instruction_sets_here(command)
    assert set(library.load().instruction_sets()) <= set(here)
    sets = tuple(build.instruction_sets(platform.machine(), command))
    assert set(here) <= set(sets)
    processor = tmp_path / "cpuinfo"
    assert build.instruction_sets_here(command, processor) == sets  # nothing says what it has
    for words, found in (("fpu sse2", ("base",)), ("avx2 fma f16c bf16", sets[:2])):
        processor.write_text(f"model : 1\nflags\t\t: {words}\n\nmodel : 2\nflags : x\n")
        assert build.instruction_sets_here(command, processor) == found
    assert build._knows(command, ("-Wall",))
    assert not build._knows(command, ("-mno-such-instructions",))


def test_a_library_of_other_sources_is_not_kept(monkeypatch, tmp_path):
    garbage = tmp_path / "garbage.so"
    garbage.write_bytes(b"nothing")
    assert build.is_current()
    assert not build.is_current(garbage)
    assert not build.is_current(tmp_path / "none.so")
    monkeypatch.setattr(build, "stamp", lambda: "other")
    assert not build.is_current()


def run_python(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout


def test_importing_loads_nothing_and_a_wrong_library_breaks_nothing(tmp_path):
    code = (
        "import jattn, jax; from jattn.cpu.native import library\n"
        "assert library.load.cache_info().currsize == 0\n"
        "assert 'not built' in library.missing()[0]\n"
        "print(jax.devices()[0].platform)"
    )
    missing = str(tmp_path / "none.so")
    assert run_python("-c", code, JATTN_NATIVE_LIBRARY=missing).strip() == "cpu"


@pytest.mark.extended
@pytest.mark.parametrize("value_dim", [None, 64])
def test_a_scale_that_codes_would_make_infinite(value_dim):
    """e4m3's numbers are multiplied as 2^-8 of what they are, and the scale makes up for it."""
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
@pytest.mark.parametrize("isa", library.load().instruction_sets() if not REASONS else ())
def test_every_instruction_set(isa):
    out = run_python("-m", "tests.support.native_cases", "--count", "4", JATTN_NATIVE_ISA=isa)
    assert f"on {isa} of" in out
    assert f"written: {native_writing.digest()}\n" in out


@pytest.mark.extended
def test_sums_over_many_keys_keep_their_digits():
    """16 rows over 4,096 float32 keys in one split: a kv tile is summed before it is added."""
    w = workloads.workload("decode-block128", 128, 1, "float32")
    found = ours.Attention(w, 1, "native").result()
    assert oracle.check(w, oracle.answer(w), found, "native") <= 1


@pytest.mark.extended
def test_under_sanitizers():
    """Minutes: builds a library of its own."""
    if not os.path.isabs(native_sanitize.located("libasan.so")):
        pytest.skip("the C++ compiler brings no AddressSanitizer")
    run_python("-m", "tests.support.native_sanitize", "--count", "4")


@pytest.mark.extended
def test_threads_do_not_race():
    """ThreadSanitizer on one instruction set: all share the split over threads."""
    if not os.path.isabs(native_sanitize.located("libtsan.so")):
        pytest.skip("the C++ compiler brings no ThreadSanitizer")
    run_python("-m", "tests.support.native_sanitize", "--thread", "--count", "1", "--isa", "avx2")


@pytest.mark.extended
@pytest.mark.parametrize("threads", ["8", "1"])
def test_one_core(threads):
    command = ("-m", "tests.support.native_cases", "--count", "1", "--cores", "1")
    run_python(*command, PJRT_NPROC=threads)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are moved on Linux only")
def test_a_thread_moves_off_a_core_that_its_call_uses(native):
    allowed = os.sched_getaffinity(0)
    for _ in range(20):
        assert bool(native.jattn_native_moves()) == (len(allowed) > 1)
        assert os.sched_getaffinity(0) == allowed
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert not native.jattn_native_moves()
        assert os.sched_getaffinity(0) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)


THP = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


HUGE = 2 << 20
huge_pages = pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="the system has no huge pages to give"
)


@huge_pages
def test_large_results_are_in_huge_pages():
    """Where their memory is new: the C library keeps what other tests had, in small pages."""
    tokens = 1088
    query = np.ones((tokens, 64, 128), np.float32)
    cache = np.ones((tokens // 64, 1, 64, 128), np.float32)
    tables = np.arange(tokens // 64, dtype=np.int32)[None]
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))
    out = jattn.paged_attention(
        query,
        cache,
        cache,
        block_tables=tables,
        seq_lens=np.array([tokens], np.int32),
        query_start_loc=np.array([0, tokens], np.int32),
        sliding_window=1,
        implementation="native",
    )
    assert huge_bytes(out.unsafe_buffer_pointer(), out.nbytes) > out.nbytes - 2 * HUGE
    np.testing.assert_array_equal(out, 1)


@huge_pages
def test_large_pools_are_in_huge_pages():
    """From their making to after a donated update; under jit, zeros are XLA's.

    In memory that was used, in small pages, as well.
    """
    shape = (272, 4, 64, 128)
    for _ in range(2):  # the second time it is the C library's own
        used = [b"used" * (8 * HUGE // 4) for _ in range(4)]
        del used
    caches = jattn.init_kv_cache(*shape)
    assert caches[0].nbytes > 8 * HUGE
    before = [cache.data.unsafe_buffer_pointer() for cache in caches]
    rows = np.ones((2, 4, 128), np.float32)
    update = jax.jit(jattn.update_kv_cache, donate_argnums=(0, 1))
    caches = update(*caches, rows, rows, np.arange(2, dtype=np.int32))
    assert [cache.data.unsafe_buffer_pointer() for cache in caches] == before
    for cache, address in zip(caches, before, strict=True):
        assert huge_bytes(address, cache.nbytes) > cache.nbytes - 2 * HUGE  # but for its ends
        np.testing.assert_array_equal(np.asarray(cache.data[1:]), 0)
    traced = jax.jit(lambda: jattn.init_kv_cache(*shape)[0].data.sum())()
    assert int(traced) == 0
    del caches
    for cache in jattn.init_kv_cache(4608, 4, 128, 32, format=jattn.Int4(zero_point=True)):
        for array, value in ((cache.scale, 1), (cache.zero, 0)):
            assert huge_bytes(array.unsafe_buffer_pointer(), array.nbytes) > array.nbytes - 2 * HUGE
            assert float(array.min()) == float(array.max()) == value


def huge_bytes(address: int, count: int) -> int:
    """Bytes in huge pages of the mappings that hold `count` bytes from an address on."""
    found, inside = 0, False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            first, end = (int(part, 16) for part in line.split()[0].split("-"))
            inside = first < address + count and address < end
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_has_the_same_bits_in_every_batch(dtype):
    """Those whose keys are split over threads, prompts too, alone and among others."""
    whole, parts = native_batches.run(dtype)
    for part in parts:
        for have, want in zip(part.found, whole.found, strict=True):
            rows = [want[whole.rows(b)] for b in part.sequences]
            np.testing.assert_array_equal(have, np.concatenate(rows), str(part.sequences))


@pytest.mark.extended
def test_bits_do_not_depend_on_the_number_of_threads():
    digests = {
        run_python("-m", "tests.support.native_batches", PJRT_NPROC=str(n)) for n in (1, 2, 3, 9)
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    "seq_lens",
    [
        BASE.seq_lens,
        pytest.param((0, 2300, 15, 16, 1700, 130, 23), marks=pytest.mark.extended),
    ],
)
def test_many_threads_at_once(seq_lens):
    """Small calls, which stay on their thread, and others whose keys are split and merged."""
    batch = problems.build(BASE.replace(seq_lens=seq_lens))
    want = batch.run("native")
    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        for have in pool.map(lambda _: batch.run("native"), range(400)):
            np.testing.assert_array_equal(have[0], want[0])


def test_broken_promises_are_nan():
    """In the rows of the sequence that breaks them; in all where starts do."""
    batch = problems.build(BASE)
    out, _ = batch.run("native")
    starts = np.asarray(batch.kwargs["query_start_loc"])
    tables = np.asarray(batch.kwargs["block_tables"])
    lens = np.asarray(batch.kwargs["seq_lens"])

    def broken(rows: slice, **changes) -> None:
        have, have_lse = batch.run("native", **{k: jnp.asarray(v) for k, v in changes.items()})
        assert np.isnan(have[rows]).all()
        assert np.isnan(have_lse[rows]).all()
        rest = np.ones(len(have), bool)
        rest[rows] = False
        np.testing.assert_array_equal(have[rest], out[rest])

    for b in (3, 5):
        rows = slice(starts[b], starts[b + 1])
        wrong = lens.copy()
        wrong[b] = tables.shape[1] * 16 + 1
        broken(rows, seq_lens=wrong)
        for value in (-1, batch.key_cache.shape[0], 2**31 - 1):
            wrong = tables.copy()
            wrong[b, 0] = value
            broken(rows, block_tables=wrong)
    for at, value in ((0, 1), (4, starts[3] - 2), (-1, len(out) + 1)):
        wrong = starts.copy()
        wrong[at] = value
        broken(slice(None), query_start_loc=wrong)


def test_behind_a_window_ids_may_be_anything():
    batch = problems.build(BASE.replace(options=frozenset({"return_lse", "sliding_window"})))
    tables = np.asarray(batch.kwargs["block_tables"]).copy()
    tables[5, : (130 - 20 - 11) // 16] = -7
    for have, want in zip(
        batch.run("native", block_tables=jnp.asarray(tables)), batch.run("native"), strict=True
    ):
        np.testing.assert_array_equal(have, want)


def attend(query, key_cache, value_cache, tables, lens):
    return jattn.paged_attention(
        *(query, key_cache, value_cache),
        block_tables=tables,
        seq_lens=lens,
        implementation="native",
    )


def called(caches, query, new, slots, *batch):
    return attend(query, *caches, *batch)


def updated(caches, query, new, slots, *batch):
    caches = jattn.update_kv_cache(*caches, new, new, slots, implementation="native")
    return attend(query, *caches, *batch), caches


def carried(caches, query, new, slots, *batch):
    """Layers that write and read the pool in the carry of a scan."""

    def layer(carry, i):
        return updated(carry[1], carry[0], new, slots + i, *batch), None

    return jax.lax.scan(layer, (query, caches), jnp.arange(3, dtype=jnp.int32))[0]


def stacked(caches, query, new, slots, tables, lens):
    """Layers that read their part of a pool for all of them, outside of the scan."""
    blocks = caches[0].shape[0] // 4

    def layer(carry, i):
        return attend(carry, *caches, tables + i * blocks, lens), None

    return jax.lax.scan(layer, query, jnp.arange(4, dtype=jnp.int32))[0]


def sharded(caches, *arrays):
    """`shard_map` over KV heads, with its default checks."""
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    heads, whole = jax.sharding.PartitionSpec(None, "heads"), jax.sharding.PartitionSpec()
    pools = tuple(
        jattn.sharding.cache_specs(cache, mesh=mesh, axis_name="heads") for cache in caches
    )
    call = jax.shard_map(
        updated,
        mesh=mesh,
        in_specs=(pools, heads, heads, whole, whole, whole),
        out_specs=(heads, pools),
    )
    return call(caches, *arrays)


def mapped(caches, query, new, slots, *batch):
    """`vmap` of queries, tables and lengths over one pool."""
    twice = [jnp.stack([x, x]) for x in (query, *batch)]
    return jax.vmap(lambda query, *batch: attend(query, *caches, *batch))(*twice)


@pytest.mark.parametrize(
    ("step", "format"),
    [
        *((called, "bfloat16"), (called, "nvfp4")),
        *((updated, "float32"), (updated, "int4_zero")),
        *((carried, "bfloat16"), (carried, "fp8_e4m3")),
        *((stacked, "float32"), (stacked, "nvfp4")),
        *((sharded, "bfloat16"), (sharded, "int4_zero")),
        *((mapped, "fp8_e4m3"), (mapped, "float32")),
    ],
)
def test_a_step_copies_nothing(step, format):
    """With keys of 1 GiB and values of as much, which are never allocated."""
    init = functools.partial(jattn.init_kv_cache, format=problems.FORMATS[format])
    block = jax.eval_shape(lambda: init(1, 2, 16, 64))[0].data
    blocks = 2**30 // (block.size * block.dtype.itemsize)
    caches = jax.eval_shape(lambda: init(blocks, 2, 16, 64))
    shape = jax.ShapeDtypeStruct
    query, new = (shape((3, heads, 64), jnp.bfloat16) for heads in (4, 2))
    slots, tables, lens = (shape(sizes, jnp.int32) for sizes in ((3,), (3, 8), (3,)))
    donated = (0,) if step in (updated, carried, sharded) else ()
    lowered = jax.jit(step, donate_argnums=donated).lower(caches, query, new, slots, tables, lens)
    compiled = lowered.compile()
    assert compiled.as_text().count('"jattn_native_attend"') == 1
    testing.assert_nothing_pool_sized(compiled, caches, max_temporaries=2**16)


@pytest.mark.extended
def test_vmap_and_gradients():
    batch = problems.build(BASE.replace(plain=True))

    def loss(query, implementation):
        out, lse = jattn.paged_attention(
            *(query, batch.key_cache, batch.value_cache),
            implementation=implementation,
            **batch.kwargs,
        )
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    query = jnp.nan_to_num(jnp.asarray(batch.query))
    have, want = (jax.grad(loss)(query, name) for name in ("native", "xla"))
    np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)
    both = jax.vmap(lambda q: loss(q, "native"))(jnp.stack([query, 2 * query]))
    np.testing.assert_allclose(both[0], loss(query, "native"), rtol=1e-6)


def test_after_a_fork():
    """The child calls the library, and what was compiled before; XLA hangs when it compiles there.

    So does a compiled call of `xla`: it waits for threads that did not survive. The native kernel
    waits only for splits that some thread has begun.
    """
    code = """
import os, signal, sys
import jax, jattn, numpy as np
from jattn.cpu.native import library
from tests.support import native_cases, problems

batch = problems.build(native_cases.LONG)
arrays = {name: x for name, x in batch.kwargs.items() if isinstance(x, jax.Array)}
rest = {name: x for name, x in batch.kwargs.items() if name not in arrays}
attend = jax.jit(lambda *pools, **arrays: jattn.paged_attention(
    *pools, **arrays, **rest, implementation="native"
))
given = jax.numpy.asarray(batch.query), batch.key_cache, batch.value_cache
want = [np.asarray(x) for x in attend(*given, **arrays)]
pid = os.fork()
if pid == 0:
    signal.alarm(120)  # ends a child that hangs
    same = bool(library.load().instruction_set())
    for _ in range(3):
        have = attend(*given, **arrays)
        same &= all(np.allclose(x, y, atol=1e-5) for x, y in zip(have, want))
    os._exit(0 if same else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    run_python("-W", "ignore", "-c", code)


def test_both_sides_of_the_split_agree_with_the_oracle():
    """One long sequence is split by its keys; its rows are merged in the same call."""
    problem = problems.Problem(
        query_lens=(1,),
        seq_lens=(9000,),
        num_heads=8,
        num_kv_heads=1,
        head_dim=128,
        value_dim=128,
        block_size=64,
        ragged=False,
        options=frozenset({"return_lse", "sinks"}),
    )
    batch = problems.build(problem)
    budget.of(batch).check(*batch.run("native"))
