"""`jattn.integrations.rpa` against NumPy, in the layouts of the functions that it replaces."""

from __future__ import annotations

import collections
import functools
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import testing
from jattn.cpu.native import library
from jattn.integrations import rpa

H, K, S, M, B, T = 6, 3, 8, 4, 4, 12
NEW, LENS = (5, 1, 0), (19, 8, 9)  # of the sequences; B rows and T tokens are padded sizes
STARTS = np.array([0, 5, 6, 6, 10**6], np.int32)
struct = jax.ShapeDtypeStruct


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bucket(seed=0, pages=12):
    """Return tables, lengths and `distribution`, with garbage in rows without a sequence."""
    rng = np.random.default_rng(seed)
    tables = rng.permutation(pages)[: B * (M - 1)].reshape(B, M - 1).astype(np.int32)
    tables = np.pad(tables, ((0, 0), (0, 1)), constant_values=10**6)
    tables[len(NEW) :] = -1
    lens = np.array([*LENS, 77], np.int32)
    return tables, lens, np.array([0, 1, len(NEW)], np.int32)


def places(tables, b):
    at = np.arange(LENS[b])
    return tables[b, at // S], at % S


def expected(query, keys, values, *, scale=1.0, window=None, cap=None, sinks=None, causal=True):
    """Return attention in float64 over lists of keys and values [n, K, D]; zeros for padding."""
    out = np.zeros((T, query.shape[1], values[0].shape[-1]))
    for b, (n, length) in enumerate(zip(NEW, LENS, strict=True)):
        for i in range(n):
            t, position = STARTS[b] + i, length - n + i
            seen = np.ones(length, bool)
            if causal:
                seen = np.arange(length) <= position
            if window is not None:
                seen &= position - np.arange(length) < window
            for h in range(query.shape[1]):
                k = h * keys[b].shape[1] // query.shape[1]
                logits = keys[b][:, k].astype(np.float64) @ query[t, h].astype(np.float64) * scale
                logits = logits if cap is None else cap * np.tanh(logits / cap)
                weights = np.where(seen, np.exp(logits), 0)
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[h]))
                out[t, h] = weights @ values[b][:, k] / total
    return out


def step(dim, token, place, dtype=np.float32, **shape):
    """Return the pool before and after a step, its new keys and values, and lists of all of them.

    Args:
      dim: head size.
      token: the shape of one token in the pool; slots that no sequence owns hold NaN.
      place: `place(pool row [token], key [K, D], value [K, D])` writes a token like the original.
    """
    tables, _, _ = bucket()
    before = np.full((12, S, *token), np.nan, np.float32)
    after, all_keys, all_values = before.copy(), [], []
    new_keys, new_values = np.full((2, T, K, dim), np.nan, np.float32)
    for b, (n, length) in enumerate(zip(NEW, LENS, strict=True)):
        keys, values = numbers(b, length, K, dim), numbers(b + 50, length, K, dim)
        for i, (page, offset) in enumerate(zip(*places(tables, b), strict=True)):
            place(after[page, offset], keys[i], values[i])
            if i < length - n:
                place(before[page, offset], keys[i], values[i])
        rows = slice(STARTS[b], STARTS[b] + n)
        new_keys[rows], new_values[rows] = keys[length - n :], values[length - n :]
        all_keys.append(keys)
        all_values.append(values)
    return before, after, new_keys, new_values, all_keys, all_values


def query_of(dim):
    query = np.full((T, H, dim), np.nan, np.float32)
    query[: STARTS[3]] = numbers(9, STARTS[3], H, dim)
    return query


def pairs(rows, width):
    """Return a `place` for alternating keys and values, padded with zeros, like the original."""

    def place(token, key, value):
        flat = token.reshape(rows, 2, width)
        flat[:] = 0
        flat[:K, 0, : key.shape[-1]], flat[:K, 1, : key.shape[-1]] = key, value

    return place


def check(found, want):
    np.testing.assert_allclose(np.asarray(found, np.float32), want, rtol=2e-5, atol=2e-5)


OPTIONS = {
    "plain": ({}, {}),
    "scale": ({"sm_scale": 0.3, "mask_value": -1e4, "vmem_limit_bytes": 5}, {"scale": 0.3}),
    "window": ({"sliding_window": 6, "soft_cap": 3.0}, {"window": 6, "cap": 3.0}),
    "not causal": ({"use_causal_mask": False, "skip_kv_mask": True}, {"causal": False}),
}


@pytest.mark.parametrize("dim", [40, pytest.param(128, marks=pytest.mark.extended)])
@pytest.mark.parametrize("name", OPTIONS)
def test_version_3(name, dim):
    given, means = OPTIONS[name]
    token = (2 * K, 1, 128)
    before, after, keys, values, *held = step(dim, token, pairs(K, 128))
    tables, lens, distribution = bucket()
    query, pool = query_of(dim), jnp.asarray(before)
    out, written = rpa.ragged_paged_attention(
        query, keys, values, pool, lens, tables.reshape(-1), STARTS, distribution, **given
    )
    check(out, expected(query, *held, **means))
    np.testing.assert_array_equal(written, after)
    assert pool.is_deleted()
    again, same = rpa.ragged_paged_attention(
        query, keys * np.nan, values, written, lens, tables.reshape(-1), STARTS, distribution,
        update_kv_cache=False, **given,
    )  # fmt: skip
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(same, after)


def test_version_3_of_fp8():
    """Four numbers in 32 bits, with a padding head; the queries are rounded to fp8 too."""
    fp8, token = jnp.float8_e4m3fn, (2, 4, 128)
    before, after, keys, values, all_keys, all_values = step(128, token, pairs(4, 128))
    tables, lens, distribution = bucket()
    query = query_of(128)
    scales = {"q_scale": 0.03, "k_scale": 0.5, "v_scale": 0.25}

    def rounded(x):
        return np.asarray(jnp.asarray(x).astype(fp8).astype(jnp.float32))

    out, written = rpa.ragged_paged_attention(
        query, *(jnp.asarray(x, fp8) for x in (keys, values, before)), lens, tables.reshape(-1),
        STARTS, distribution, sm_scale=0.2, **scales,
    )  # fmt: skip
    want = expected(
        rounded(np.clip(query / 0.03, -448, 448)),
        [rounded(x) for x in all_keys],
        [rounded(x) * 0.25 for x in all_values],
        scale=0.2 * 0.03 * 0.5,
    )
    check(out, want)
    np.testing.assert_array_equal(np.asarray(written, np.float32), rounded(after))


def test_heads_of_64_with_sinks():
    def place(token, key, value):
        token.reshape(K, 128)[:] = np.concatenate([key, value], axis=-1)

    before, after, keys, values, *held = step(64, (K, 1, 128), place)
    tables, lens, distribution = bucket()
    query, sinks = query_of(64), np.linspace(-1, 3, H).astype(np.float32)
    out, written = rpa.ragged_paged_attention_hd64(
        query, keys, values, jnp.asarray(before), lens, tables.reshape(-1), STARTS, distribution,
        sinks, sm_scale=0.125, sliding_window=7,
    )  # fmt: skip
    check(out, expected(query, *held, scale=0.125, window=7, sinks=sinks))
    np.testing.assert_array_equal(written, after)


@pytest.mark.parametrize("pack", [1, 2])
@pytest.mark.parametrize("version", [1, 2])
def test_latents(version, pack):
    latent, rope = 130, 24
    tables, lens, distribution = bucket()
    before = np.full((12, S, 384), np.nan, np.float32)
    after, new, held = before.copy(), np.full((T, latent + rope), np.nan, np.float32), []
    for b, (n, length) in enumerate(zip(NEW, LENS, strict=True)):
        vectors = numbers(b, length, latent + rope)
        padded = np.zeros((length, 384), np.float32)
        padded[:, :latent], padded[:, 256 : 256 + rope] = vectors[:, :latent], vectors[:, latent:]
        after[places(tables, b)] = padded
        where = places(tables, b)
        before[where[0][: length - n], where[1][: length - n]] = padded[: length - n]
        new[STARTS[b] : STARTS[b] + n] = vectors[length - n :]
        held.append(vectors[:, None])
    query = query_of(latent + rope) * np.float32(0.3)
    q = query[..., :latent] if version == 1 else query[..., :latent].swapaxes(0, 1)
    shape = (12, S // pack, pack, 384)
    function = (rpa.mla_ragged_paged_attention_v1, rpa.mla_ragged_paged_attention)[version - 1]
    out, written = function(
        q, query[..., latent:], new[:, :latent], new[:, latent:],
        jnp.asarray(before.reshape(shape)), lens, tables.reshape(-1), STARTS, distribution,
        sm_scale=0.4, q_scale=0.5, k_scale=2.0, v_scale=3.0, soft_cap=5.0,
    )  # fmt: skip
    want = 3 * expected(query, held, [x[..., :latent] for x in held], scale=0.4, cap=5.0)
    check(out if version == 1 else np.swapaxes(out, 0, 1), want)
    np.testing.assert_array_equal(written, after.reshape(shape))


def test_pages_of_jaxs_ragged_kernel():
    _, after, _, _, keys, values = step(32, (2 * K, 32), pairs(K, 32))
    tables, lens, distribution = bucket()
    query = query_of(32)
    out = rpa.tpu_ragged_paged_attention(
        query, jnp.asarray(after), lens, tables, STARTS, distribution[2:], sm_scale=0.2,
        k_scale=1.5, v_scale=0.5, num_queries_per_block=3,
    )  # fmt: skip
    check(out, expected(query, keys, [x / 2 for x in values], scale=0.3))


def decode_problem(dim=32):
    """Return queries, pages [K, N, S, D] with NaN in unowned slots, tables, lengths and outputs."""
    rng = np.random.default_rng(5)
    tables = np.pad(rng.permutation(12)[:9].reshape(3, 3), ((0, 0), (0, 1)), constant_values=-1)
    pages = np.full((2, K, 12, S, dim), np.nan, np.float32)
    held = ([], [])
    for b, length in enumerate(LENS):
        for part in (0, 1):
            x = numbers(b + 50 * part, length, K, dim)
            pages[part][:, places(tables, b)[0], places(tables, b)[1]] = x.swapaxes(0, 1)
            held[part].append(x)
    query = numbers(9, 3, H, dim)
    want = np.stack([
        expected_row(query[b], held[0][b], held[1][b]) for b in range(3)
    ])  # fmt: skip
    return query, *pages, tables.astype(np.int32), np.array(LENS, np.int32), want


def expected_row(query, keys, values):
    out = []
    for h in range(H):
        k = h * K // H
        weights = np.exp(2 * np.tanh(keys[:, k].astype(np.float64) @ query[h] / 2))
        out.append(weights @ values[:, k] / weights.sum())
    return np.stack(out)


def test_pages_with_heads_first():
    query, keys, values, tables, lens, want = decode_problem()
    cap = {"attn_logits_soft_cap": 2.0}
    check(rpa.gpu_paged_attention(query, keys, values, tables, lens, k_splits=2, **cap), want)
    check(rpa.tpu_paged_attention(query, keys, values, lens, tables, **cap), want)
    whole = rpa.gpu_paged_attention(query, *(np.nan_to_num(x) for x in (keys, values)),
                                    np.maximum(tables, 0), None, **cap)  # fmt: skip
    full = np.full(3, tables.shape[1] * S, np.int32)
    check(whole, rpa.gpu_paged_attention(query, *(np.nan_to_num(x) for x in (keys, values)),
                                         np.maximum(tables, 0), full, **cap))  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4])
def test_pages_of_integers_without_scales_are_refused(dtype):
    pages, lens = jnp.zeros((4, 16, 4, 128), dtype), jnp.asarray([3, 1], jnp.int32)
    starts = jnp.asarray([0, 1, 2], jnp.int32)
    with pytest.raises(ValueError, match=r"kv_pages: int.* but must be floats"):
        rpa.tpu_ragged_paged_attention(
            *(jnp.ones((4, 4, 128)), pages, lens, jnp.zeros((2, 2), jnp.int32), starts),
            jnp.asarray([2], jnp.int32),
        )


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "float8_e5m2", "QuantizedTensor"])
def test_pages_with_scales(kind):
    query, keys, values, tables, lens, want = decode_problem(64)
    limits = {"int8": 127, "QuantizedTensor": 127.5, "float8_e4m3fn": 448, "float8_e5m2": 57344}
    limit, narrow = limits[kind], kind if kind.startswith("float8") else "int8"
    pages, scales = [], []
    for x in (keys, values):
        most = np.abs(np.nan_to_num(x)).max(axis=-1)
        most[most == 0] = np.nan
        numbers = np.nan_to_num(x / most[..., None] * limit)
        numbers = np.clip(np.round(numbers), -128, 127) if narrow == "int8" else numbers
        pages.append(jnp.asarray(numbers, narrow))
        scales.append(most / limit)
    cap = {"attn_logits_soft_cap": 2.0}
    if kind == "QuantizedTensor":

        class Quantized(tuple):
            weight = property(lambda self: self[0])
            scales = property(lambda self: self[1])

        both = [
            Quantized((x, jnp.asarray(127.5 * s[..., None])))
            for x, s in zip(pages, scales, strict=True)
        ]
        out = rpa.tpu_paged_attention(query, *both, lens, tables, **cap)
    else:
        out = rpa.gpu_paged_attention(query, *pages, tables, lens, *scales, **cap)
    assert 1e-5 < np.abs(np.asarray(out) - want).max() < 0.3  # the effect of rounding
    if kind == "int8":  # only keys are narrow
        half = rpa.gpu_paged_attention(query, pages[0], values, tables, lens, scales[0], **cap)
        as_floats = np.asarray(pages[0], np.float32) * scales[0][..., None]
        check(half, rpa.gpu_paged_attention(query, as_floats, values, tables, lens, **cap))
    exact = [np.asarray(x, np.float32) * s[..., None] for x, s in zip(pages, scales, strict=True)]
    check(out, rpa.gpu_paged_attention(query, *exact, tables, lens, **cap))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=["bf16", "fp8"])
def test_a_hosts_step_copies_no_pool(dtype):
    if library.missing():
        pytest.skip("XLA for CPU converts pools of 8-bit floats to write to them")
    pack = 4 // jnp.dtype(dtype).itemsize
    pool = struct((4096, 16, 8 // pack, pack, 128), dtype)
    new = struct((16, 4, 128), dtype)
    given = (struct((16, 8, 128), jnp.bfloat16), new, new, pool, *map(
        functools.partial(struct, dtype=jnp.int32), ((4,), (32,), (5,), (3,))))  # fmt: skip
    compiled = (
        jax.jit(functools.partial(rpa.ragged_paged_attention, sm_scale=0.1), donate_argnums=3)
        .lower(*given)
        .compile()
    )
    testing.assert_nothing_pool_sized(compiled, pool, max_temporaries=2**24)


def test_decode_over_pages_with_heads_first_copies_none():
    if jax.__version_info__ < (0, 12) and library.missing():
        pytest.skip("XLA for CPU before JAX 0.12 copies pages to see them as blocks of one head")
    pages = struct((4, 4096, 16, 128), jnp.float32)
    given = (struct((4, 8, 128), jnp.float32), pages, pages, struct((4, 8), jnp.int32))
    compiled = jax.jit(rpa.gpu_paged_attention).lower(*given, struct((4,), jnp.int32)).compile()
    testing.assert_nothing_pool_sized(compiled, pages)


def test_wrong_arguments_are_refused_by_name():
    pool, new = jnp.zeros((2, S, 2 * K, 1, 128)), jnp.zeros((T, K, 128))
    tables, lens, distribution = bucket()
    rest = (lens, tables.reshape(-1), STARTS, distribution)
    query = jnp.zeros((T, H, 128))

    def call(**changes):
        rpa.ragged_paged_attention(query, new, new, pool, *rest, **changes)

    for changes, message in (
        ({"sliding_window": 4, "use_causal_mask": False}, "sliding_window: 4 with use_causal_mask"),
        ({"sliding_window": 0}, "sliding_window: 0, but must be positive"),
        ({"soft_cap": 0.0}, "soft_cap: 0.0, but must be positive"),
        ({"mask_value": 0.0}, "mask_value: 0.0, but must be None, or at most -10000"),
        ({"skip_kv_mask": True}, "skip_kv_mask: True with use_causal_mask=True, but must be False"),
        ({"debug_mode": True}, "debug_mode: True, but must be False"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**changes)
    with pytest.raises(ValueError, match=r"kv_cache: .*\[N, S, 6, 1, 128\]"):
        rpa.ragged_paged_attention(query, new, new, pool[..., :64], *rest)
    with pytest.raises(ValueError, match=r"kv_cache: list \[0.0\], but must be an array"):
        rpa.ragged_paged_attention(query, new, new, [0.0], *rest)
    with pytest.raises(ValueError, match=r"q: list .*, but must be"):
        rpa.tpu_ragged_paged_attention(
            [0.0], pool[:, :, :, 0], lens, tables, STARTS, distribution[2:]
        )
    with pytest.raises(ValueError, match="2 wrong") as error:
        rpa.mla_ragged_paged_attention_v1(query, [0.0], new, new, [0.0], *rest)
    assert "cache_kv: list [0.0], but must be an array" in str(error.value)
    assert "q_pe: list [0.0], but must be floats" in str(error.value)
    with pytest.raises(ValueError, match=r"v_pages: list .*, but must be"):
        rpa.gpu_paged_attention(query[:4], jnp.zeros((K, 2, S, 128)), [0.0], tables, lens)
    with pytest.raises(ValueError, match="2 wrong") as error:
        rpa.gpu_paged_attention(query[:4], [0.0], [0.0], [0], None)
    assert "k_pages: list [0.0], but must be" in str(error.value)
    assert "block_tables: list [0], but must be" in str(error.value)
    with pytest.raises(ValueError, match=r"keys: float32\[12, 3, 128\], but must be .* bfloat16"):
        rpa.ragged_paged_attention(query, new, new, pool.astype(jnp.bfloat16), *rest)
    with pytest.raises(ValueError, match="keys: heads of 128, but must be of 64"):
        rpa.ragged_paged_attention_hd64(query, new, new, jnp.zeros((2, S, K, 1, 128)), *rest)
    with pytest.raises(ValueError, match="transpose_kv_cache: True, but must be False"):
        rpa.mla_ragged_paged_attention(query, query, new, new, pool, *rest, transpose_kv_cache=True)
    with pytest.raises(ValueError, match="debug: True, but must be False"):
        rpa.gpu_paged_attention(query, pool, pool, tables, lens, debug=True)
    pages = jnp.zeros((K, 2, S, 128), jnp.int8)
    with pytest.raises(ValueError, match=r"k_pages: int8.* but must be floats without scales"):
        rpa.gpu_paged_attention(query[:4], pages, pages, tables, lens)
    scales = jnp.ones(pages.shape[:3])
    for dtype in (jnp.uint8, jnp.bool, jnp.float8_e4m3fnuz, jnp.float8_e4m3b11fnuz, jnp.float32):
        other, name = pages.astype(dtype), jnp.dtype(dtype).name
        wanted = "but must be int8 or float8_e4m3fn or float8_e5m2 with scales"
        with pytest.raises(ValueError, match=rf"k_pages: {name}\[.*{wanted}"):
            rpa.gpu_paged_attention(query[:4], other, pages, tables, lens, scales, scales)
    Quantized = collections.namedtuple("Quantized", ["weight", "scales"])
    quantized = Quantized(pages.astype(jnp.float8_e5m2), scales[..., None])
    with pytest.raises(ValueError, match="2 wrong") as error:
        rpa.tpu_paged_attention(query[:4], quantized, quantized, lens, tables)
    assert "v_pages: float8_e5m2[3, 2, 8, 128], but must be int8 with scales" in str(error.value)


def test_wrong_integers_of_a_step_are_refused_by_name():
    pool, new, query = (
        jnp.zeros(shape) for shape in ((2, S, 2 * K, 1, 128), (T, K, 128), (T, H, 128))
    )
    tables, lens, distribution = bucket()
    rows = lens.shape[0]
    good = {
        "queries": query,
        "values": new,
        "kv_lens": lens,
        "page_indices": tables.reshape(-1),
        "cu_q_lens": STARTS,
        "distribution": distribution,
    }
    for name, wrong, message in (
        ("kv_lens", lens.tolist(), r"kv_lens: .*, but must be int32\[B\]"),
        ("page_indices", tables.reshape(-1)[1:], rf"page_indices: .* int32\[B \* M\], B = {rows}"),
        ("cu_q_lens", STARTS[1:], rf"cu_q_lens: .*, but must be int32\[{rows + 1}\]"),
        ("distribution", distribution[1:], r"distribution: int32\[2\], but must be int32\[3\]"),
        ("queries", query[:, 1:], f"queries: {H - 1} heads, but must be a multiple of the {K}"),
        ("queries", query[..., :64], f"keys: .* of kv_cache's dtype, float32, T = {T}, D = 64"),
        ("values", new[:, 1:], f"values: .* float32, T = {T}, K = {K}, D = 128"),
    ):
        with pytest.raises(ValueError, match=message):
            rpa.ragged_paged_attention(keys=new, kv_cache=pool, **{**good, name: wrong})
    for wrong_tables, wrong_starts, message in (
        (tables, STARTS[1:], r"cu_q_lens: .*, but must be int32\["),
        (tables.reshape(-1), STARTS, rf"page_indices: .*, but must be int32\[B, M\], B = {rows}"),
    ):
        with pytest.raises(ValueError, match=message):
            rpa.tpu_ragged_paged_attention(
                query, pool[:, :, :, 0], lens, wrong_tables, wrong_starts, jnp.ones(1, jnp.int32)
            )
    with pytest.raises(ValueError, match=r"distribution: int32\[2\], but must be int32\[3\]"):
        rpa.mla_ragged_paged_attention(
            query, query, new, new, pool, *list(good.values())[2:5], distribution[1:]
        )


ORIGINALS = {
    "ragged_paged_attention": "tpu_inference.kernels.ragged_paged_attention.v3.kernel",
    "ragged_paged_attention_hd64": "tpu_inference.kernels.ragged_paged_attention.v3.kernel_hd64",
    "mla_ragged_paged_attention": "tpu_inference.kernels.mla.v2.kernel",
    "mla_ragged_paged_attention_v1": "tpu_inference.kernels.mla.v1.kernel",
    "tpu_ragged_paged_attention": "jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel",
    "tpu_paged_attention": "jax.experimental.pallas.ops.tpu.paged_attention.paged_attention_kernel",
    "gpu_paged_attention": "jax.experimental.pallas.ops.gpu.paged_attention",
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ORIGINALS)
def test_signatures_are_the_originals(name):
    """They have the same names in the same order, and the same defaults except for two."""
    module = ORIGINALS[name]
    found = pytest.importorskip(
        module, reason=f"needs {module.split('.')[0]}", exc_type=ImportError
    )
    original = name.removesuffix("_v1").removeprefix("tpu_").removeprefix("gpu_")
    theirs = inspect.signature(
        getattr(importlib.import_module(found.__name__), original)
    ).parameters
    mine = inspect.signature(getattr(rpa, name)).parameters
    assert list(mine) == list(theirs)
    for key, parameter in theirs.items():
        assert mine[key].kind == parameter.kind
        if key not in ("mask_value", "pages_per_compute_block"):
            assert mine[key].default == parameter.default, key
