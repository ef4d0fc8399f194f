"""`cascade_attention` equals the flat call, within twice its error; wrong sharing shows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from benchmarks import oracle
from benchmarks.cpu import cascade
from tests.support.compiled import compilations

pytestmark = pytest.mark.usefixtures("each_row")

S, K, H, D, SHARED = 16, 2, 6, 64, 4
# An empty sequence, one just past the shared blocks, others; a token of padding at the end.
QUERY_LENS, SEQ_LENS = (0, 1, 3, 9, 1), (0, 65, 80, 130, 97)


def make(dtype: str, kv_layout: str):
    """Make `(query, caches, options)` of a batch whose sequences share their first blocks."""
    rng = np.random.default_rng(7)
    blocks = rng.permutation(60)
    tables = np.full((5, 9), 10**6, np.int32)
    for b, length in enumerate(SEQ_LENS):
        count = -(-length // S)
        tables[b, :count] = [*blocks[:SHARED], *blocks[10 * (b + 1) :]][:count]
    shape = (60, S, K, D) if kv_layout == "NHD" else (60, K, S, D)
    words = [rng.normal(size=shape) for _ in range(2)]
    unowned = np.setdiff1d(np.arange(60), tables)
    for x in words:
        x[unowned] = np.nan
    kind = jattn.Dense(dtype)
    caches = tuple(
        jattn.KVArray(jnp.asarray(x, dtype).view(kind.word_dtype), None, kind, kv_layout=kv_layout)
        for x in words
    )
    options = {
        "block_tables": jnp.asarray(tables),
        "seq_lens": jnp.asarray(SEQ_LENS, jnp.int32),
        "query_start_loc": jnp.asarray(np.cumsum((0, *QUERY_LENS)), jnp.int32),
        "logits_soft_cap": 3.0,
        "sinks": jnp.asarray(rng.normal(size=H), jnp.float32),
        "k_scale": jnp.asarray([0.5, 2.0], jnp.float32),
        "v_scale": 0.75,
        "kv_layout": kv_layout,
        "return_lse": True,
    }
    return jnp.asarray(rng.normal(size=(sum(QUERY_LENS) + 1, H, D)), dtype), caches, options


def errors(have, exact) -> list[float]:
    """Return the largest errors of out and lse; infinities must be equal."""
    found = []
    for x, want in zip(have, exact, strict=True):
        x, want = (np.asarray(y).astype(np.float64) for y in (x, want))
        np.testing.assert_array_equal(x[~np.isfinite(want)], want[~np.isfinite(want)])
        with np.errstate(invalid="ignore"):
            found.append(float(np.where(x == want, 0, np.abs(x - want)).max()))
    return found


def budget(plain: list[float], exact, dtype: str) -> list[float]:
    """Return twice the flat call's errors plus two ulps of the largest numbers."""
    size = [np.abs(np.where(np.isfinite(x), x, 0)).max() for x in map(np.float64, exact)]
    eps = float(jnp.finfo(dtype).eps), float(jnp.finfo(jnp.float32).eps)
    return [2 * e + 2 * u * n for e, u, n in zip(plain, eps, size, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "kv_layout"),
    [pytest.param("float32", "HND", marks=pytest.mark.slow), ("bfloat16", "NHD")],
)
def test_it_is_the_flat_call(dtype, kv_layout):
    query, caches, options = make(dtype, kv_layout)
    exact = jattn.paged_attention(query, *caches, **options, implementation="reference")
    plain = errors(jattn.paged_attention(query, *caches, **options), exact)
    allowed = budget(plain, exact, dtype)
    shared = jax.jit(
        lambda count, options: jattn.cascade_attention(
            query, *caches, num_shared_blocks=count, **options, kv_layout=kv_layout, return_lse=True
        )
    )
    options = {name: options[name] for name in options.keys() - {"kv_layout", "return_lse"}}
    for count in (SHARED, 1, 0):
        with compilations(at_least=1) if count == SHARED else compilations(at_most=0):
            have = shared(count, options)
        assert have[0].dtype == query.dtype
        found = errors(have, exact)
        assert all(e <= most for e, most in zip(found, allowed, strict=True)), (found, allowed)
    # If one sequence's first blocks are not the shared ones, the same budget rejects the result.
    tables = np.array(options["block_tables"])
    tables[1, :SHARED] = np.roll(tables[1, :SHARED], 1)
    tables[1, 0] = tables[2, SHARED]
    wrong = shared(SHARED, {**options, "block_tables": jnp.asarray(tables)})
    assert all(e > 2 * most for e, most in zip(errors(wrong, exact), allowed, strict=True))
    # 7 of a sequence's 9 queries are in the prefix.
    lens = options["seq_lens"].at[3].set(SHARED * S + 2)
    for x in map(np.asarray, shared(SHARED, {**options, "seq_lens": lens})):
        assert np.isnan(x[4:13]).all()
        assert np.isfinite(x[:4]).all()


def test_decode_with_padding_and_broken_promises():
    query, caches, options = make("float32", "HND")
    options = {name: options[name] for name in ("block_tables", "seq_lens", "return_lse")}
    lens = np.array(options["seq_lens"])
    lens[2] = SHARED * S  # its query is in the prefix
    lens[3] = 9 * S + 1  # one key more than its table has room for
    options["seq_lens"] = jnp.asarray(lens)
    right, broken = np.array([0, 1, 4]), np.array([2, 3])

    def rows(result):
        return [x[right] for x in result]

    exact = rows(jattn.paged_attention(query[:5], *caches, **options, implementation="reference"))
    plain = errors(rows(jattn.paged_attention(query[:5], *caches, **options)), exact)
    returns = options.pop("return_lse")
    cascade = jax.jit(
        functools.partial(jattn.cascade_attention, num_shared_blocks=SHARED, return_lse=returns)
    )
    out, lse = map(np.asarray, cascade(query[:5], *caches, **options))
    found, allowed = errors(rows((out, lse)), exact), budget(plain, exact, "float32")
    assert all(e <= most for e, most in zip(found, allowed, strict=True)), (found, allowed)
    assert not np.asarray(out)[0].any()
    assert np.isnan(out[broken]).all()
    assert np.isnan(lse[broken]).all()


@pytest.mark.slow
def test_gradients_are_the_flat_calls():
    """Of the query, keys and values in shared and other blocks, scales, sinks and the cap."""
    query, caches, options = make("float32", "HND")
    caches = [jnp.nan_to_num(cache.data) for cache in caches]  # NaN times a zero gradient is NaN
    names = ("logits_soft_cap", "sinks", "k_scale", "v_scale")
    numbers = [jnp.asarray(options.pop(name)) for name in names]
    weights = jnp.asarray(np.random.default_rng(1).normal(size=query.shape), jnp.float32)

    def loss(attend, arguments):
        query, key_cache, value_cache, *numbers = arguments
        given = options | dict(zip(names, numbers, strict=True))
        out, lse = attend(query, key_cache, value_cache, **given)
        return (out * weights).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    arguments = (query, *caches, *numbers)
    flat = jax.grad(lambda x: loss(jattn.paged_attention, x))(arguments)
    shared = jax.grad(
        lambda x: loss(
            lambda *a, **k: jattn.cascade_attention(*a, num_shared_blocks=SHARED, **k), x
        )
    )(arguments)
    for have, want in zip(shared, flat, strict=True):
        assert np.abs(want).max() > 1e-3
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_a_count_out_of_range_gives_nan_in_every_sequence():
    query, caches, options = make("float32", "HND")
    run = jax.jit(
        lambda count: jattn.cascade_attention(query, *caches, num_shared_blocks=count, **options)
    )
    real = sum(QUERY_LENS)
    assert np.isfinite(np.asarray(run(jnp.int32(SHARED))[0])).all()
    # A table of 256 blocks is wider than 8 bits can count.
    tables = jnp.pad(options["block_tables"], ((0, 0), (0, 256 - 9)))
    wide = {**options, "block_tables": tables}
    out, _ = jattn.cascade_attention(query, *caches, num_shared_blocks=jnp.uint8(SHARED), **wide)
    assert np.isfinite(np.asarray(out)).all()
    for count in (-1, 10, 2**30):
        out, lse = (np.asarray(x) for x in run(jnp.int32(count)))
        assert np.isnan(out[:real]).all(), count
        assert np.isnan(lse[:real]).all(), count
        np.testing.assert_array_equal(out[real:], 0)


def test_bad_arguments_are_named():
    query, caches, options = make("float32", "HND")
    bad = {**options, "seq_lens": options["seq_lens"][1:], "kv_layout": "KND"}
    with pytest.raises(ValueError, match=r"^cascade_attention: 2 wrong argument") as error:
        jattn.cascade_attention(query, *caches, num_shared_blocks=10, **bad)
    for part in ("kv_layout", "seq_lens: int32[4]"):
        assert part in str(error.value)
    for name, wrong in (("out_dtype", jnp.int32), ("return_lse", 1), ("query", [[1.0]])):
        given = {**options, name: wrong}
        rows = given.pop("query", query)
        with pytest.raises(ValueError, match=rf"cascade_attention: .*\n  - {name}: "):
            jattn.cascade_attention(rows, *caches, num_shared_blocks=1, **given)
    for count in (10, -1, np.int64(10), np.int8(-1), True, 1.5, jnp.ones(2, jnp.int32)):
        with pytest.raises(ValueError, match="num_shared_blocks"):
            jattn.cascade_attention(query, *caches, num_shared_blocks=count, **options)
    with pytest.raises(TypeError, match="sliding_window"):
        jattn.cascade_attention(query, *caches, num_shared_blocks=1, sliding_window=5, **options)


@pytest.mark.extended
def test_the_benchmark_times_right_results_only(monkeypatch):
    given = {"sequences": 3, "shared": 256, "rest": 128, "head_dim": 64, "turns": 1}
    assert cascade.measure(**given)["ratio"] > 0
    monkeypatch.setattr(
        jattn, "cascade_attention", lambda q, *args, **kwargs: jnp.zeros_like(jnp.asarray(q))
    )
    with pytest.raises(oracle.WrongResultError, match="cascade is wrong at token"):
        cascade.measure(**given)
