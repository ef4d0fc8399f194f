"""The contract: what never reaches an output, what an empty row returns, how calls compose.

All problems share one frame, so that each set of options is compiled only once.
"""

from __future__ import annotations

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jattn
from tests.support import budget, problems, promises

pytestmark = pytest.mark.usefixtures("each_row")

FRAME = (72, 8, 10, 40)  # T, B, M, N
LSE = frozenset({"return_lse"})
BASE = problems.Problem(
    query_lens=(0, 1, 1, 16, 1, 20, 9),
    seq_lens=(0, 1, 15, 16, 17, 130, 23),
    options=LSE,
    frame=FRAME,
    seed=7,
)


def with_options(*options: str) -> problems.Problem:
    return BASE.replace(options=LSE | set(options))


def check(batch: problems.Batch, **changes) -> tuple[np.ndarray, np.ndarray]:
    """Run the batch, check it against the budget, and return `(out, lse)`."""
    out, lse = batch.run(**changes)
    budget.of(batch).check(out, lse)
    return out, lse


def cleaned(batch: problems.Batch) -> problems.Batch:
    """Return the batch with zeros wherever the contract says that nothing is read."""
    p = batch.problem
    tables = np.asarray(batch.kwargs["block_tables"]).copy()
    owned = np.zeros((batch.key_cache.shape[0], p.block_size), bool)
    for b, n in enumerate(p.seq_lens):
        used = -(-n // p.block_size)
        tables[b, used:] = 0
        at = np.arange(n)
        owned[tables[b, at // p.block_size], at % p.block_size] = True
    tables[len(p.seq_lens) :] = 0

    def clean(cache):
        words = np.asarray(cache.data)
        keep = owned[:, None] if p.kv_layout == "HND" else owned[:, :, None]
        return cache.replace(
            data=jnp.asarray(np.where(keep[..., None], words, words.dtype.type(0)))
        )

    query = batch.query.copy()
    query[batch.view.starts[-1] :] = 0
    return dataclasses.replace(
        batch,
        query=query,
        key_cache=clean(batch.key_cache),
        value_cache=clean(batch.value_cache),
        kwargs={**batch.kwargs, "block_tables": jnp.asarray(tables)},
    )


@pytest.mark.parametrize(
    ("format", "kv_layout", "options"),
    [
        ("float32", "HND", ()),
        ("bfloat16", "NHD", ("sliding_window", "sinks")),
        ("fp8_e5m2", "HND", ("not_causal", "alibi_slopes", "logits_soft_cap")),
    ],
)
def test_garbage_never_reaches_an_output(format, kv_layout, options):
    problem = with_options(*options).replace(format=format, kv_layout=kv_layout)
    batch = problems.build(problem)
    words = np.asarray(batch.value_cache.values()).astype(np.float32)
    assert np.isnan(words).any()
    assert np.isinf(words).any()
    least = float(jnp.finfo(problems.FORMATS[format].value_dtype).smallest_normal)
    assert ((words != 0) & (np.abs(words) < least)).any()
    assert np.isnan(batch.query.astype(np.float32)).any()
    dirty, clean = batch.run(), cleaned(batch).run()
    for have, want in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(have, want)
    budget.of(batch).check(*dirty)


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing(ragged, sinks):
    """Empty sequences with query tokens, and more queries than keys."""
    problem = with_options(*(["sinks"] if sinks else []))
    if ragged:
        problem = problem.replace(query_lens=(3, 12, 1, 0, 1), seq_lens=(0, 5, 0, 0, 19))
        blind = [0, 1, 2, *range(3, 10), 15]
    else:
        problem = problem.replace(
            query_lens=(1,) * 8, seq_lens=(0, 5, 0, 1, 15, 16, 17, 130), ragged=False
        ).replace(frame=(8, 8, 10, 40))
        blind = [0, 2]
    batch = problems.build(problem)
    out, lse = check(batch)
    np.testing.assert_array_equal(out[blind], 0)
    empty = np.broadcast_to(batch.view.sinks if sinks else -np.inf, lse[blind].shape)
    np.testing.assert_array_equal(lse[blind], empty.astype(np.float32))


def test_decode_where_one_sequence_has_no_query_token():
    """For sequences after it, the row of the query token is not the sequence's number."""
    lengths = {"query_lens": (1, 1, 0, 1, 1, 1, 1, 1), "seq_lens": (1, 17, 4, 15, 130, 16, 23, 9)}
    check(problems.build(with_options().replace(frame=(8, 8, 10, 40), **lengths)), max_query_len=1)


def test_decode_is_the_last_row_of_prefill():
    batch = problems.build(BASE)
    whole = check(batch)
    starts = batch.view.starts
    last = [(b, n - 1, 1) for b, n in enumerate(BASE.query_lens) if n]
    rows = [int(starts[b + 1]) - 1 for b, _, _ in last]
    steps = problems.select(batch, last)
    out, lse = check(steps)
    allowed = [2 * x for x in budget.of(steps).allowed]
    n = len(rows)
    assert (np.abs(out[:n] - whole[0][rows]) <= allowed[0]).all()
    assert (np.abs(lse[:n] - whole[1][rows]) <= allowed[1]).all()


@pytest.mark.parametrize("options", [(), ("sliding_window",)])
def test_chunked_prefill_is_prefill(options):
    problem = with_options(*options).replace(query_lens=(61, 0), seq_lens=(61, 20))
    batch = problems.build(problem)
    whole = budget.of(batch)
    whole.check(*batch.run())
    parts = [check(problems.select(batch, [(0, at, min(17, 61 - at))])) for at in (0, 17, 34, 51)]
    sizes = (17, 17, 17, 10)
    out, lse = (
        np.concatenate([part[i][:n] for part, n in zip(parts, sizes, strict=True)]) for i in (0, 1)
    )
    whole.check(out, lse)


def test_a_mixed_call_is_its_sequences_one_by_one():
    batch = problems.build(BASE)
    whole = budget.of(batch)
    out, lse = batch.run()
    whole.check(out, lse)
    alone = [check(problems.select(batch, [(b, 0, n)])) for b, n in enumerate(BASE.query_lens) if n]
    counts = [n for n in BASE.query_lens if n]
    whole.check(
        np.concatenate([part[0][:n] for part, n in zip(alone, counts, strict=True)]),
        np.concatenate([part[1][:n] for part, n in zip(alone, counts, strict=True)]),
    )


def test_order_of_sequences_does_not_matter():
    batch = problems.build(BASE)
    order = [6, 3, 1, 5, 4, 2]
    chunks = [(b, 0, BASE.query_lens[b]) for b in order]
    check(problems.select(batch, chunks))


def test_batch_padding_does_not_matter():
    small = problems.build(BASE)
    large = problems.build(BASE.replace(frame=(90, 12, 14, 55)))
    real = small.view.starts[-1]
    np.testing.assert_array_equal(small.query[:real], large.query[:real])
    for batch in (small, large):
        check(batch)


def test_reading_writes_nothing_and_any_query_may_read():
    """A layer that shares another layer's cache attends with its own queries and no new keys."""
    batch = problems.build(BASE)
    before = [np.asarray(cache.data).copy() for cache in (batch.key_cache, batch.value_cache)]
    rng = np.random.default_rng(3)
    query = batch.query + rng.standard_normal(batch.query.shape).astype(np.float32)
    real = int(batch.view.starts[-1])
    other = dataclasses.replace(
        batch, query=query, view=batch.view.replace(query=query[:real].astype(np.float64))
    )
    check(batch)
    check(other)
    for cache, words in zip((batch.key_cache, batch.value_cache), before, strict=True):
        np.testing.assert_array_equal(np.asarray(cache.data), words)


def split(batch: problems.Batch, block: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Run the same queries over the first `block` blocks of every sequence, and over the rest."""
    size = batch.problem.block_size
    tables = np.asarray(batch.kwargs["block_tables"])
    lens = np.asarray(batch.kwargs["seq_lens"])
    head = np.minimum(lens, block * size)
    later = np.full_like(tables, -1)
    later[:, : tables.shape[1] - block] = tables[:, block:]
    return [
        batch.run(seq_lens=jnp.asarray(head)),
        batch.run(seq_lens=jnp.asarray(lens - head), block_tables=jnp.asarray(later)),
    ]


@pytest.mark.parametrize("block", [1, 3, 9])
def test_split_kv_merges_into_the_whole(block):
    batch = problems.build(with_options("not_causal"))
    whole = budget.of(batch)
    whole.check(*batch.run())
    (out_a, lse_a), (out_b, lse_b) = split(batch, block)
    merged = jattn.merge_attention_states(*map(jnp.asarray, (out_a, lse_a, out_b, lse_b)))
    whole.check(*map(np.asarray, merged))
    swapped = jattn.merge_attention_states(*map(jnp.asarray, (out_b, lse_b, out_a, lse_a)))
    whole.check(*map(np.asarray, swapped))


def test_a_sink_is_a_merge():
    plain, with_sinks = problems.build(BASE), problems.build(with_options("sinks"))
    out, lse = check(plain)
    sinks = np.broadcast_to(with_sinks.view.sinks.astype(np.float32), lse.shape)
    merged = jattn.merge_attention_states(
        jnp.asarray(out), jnp.asarray(lse), jnp.full(out.shape, jnp.nan), jnp.asarray(sinks)
    )
    assert np.isnan(np.asarray(merged[0])).all(), "the out of a sink must be zeros"
    merged = jattn.merge_attention_states(
        jnp.asarray(out), jnp.asarray(lse), jnp.zeros(out.shape), jnp.asarray(sinks)
    )
    real = int(with_sinks.view.starts[-1])
    budget.of(with_sinks).check(*(np.asarray(x)[:real] for x in merged))


@pytest.mark.parametrize(
    "lses", [(0.5, 1.5), (2.0, 2.0), (-np.inf, 1.0), (1.0, -np.inf), (-np.inf, -np.inf)]
)
def test_gradients_of_a_merge(lses):
    """With w_i = exp(lse_i - lse): d lse / d lse_i = w_i, d out / d lse_i = w_i (out_i - out).

    An empty result has no share and no gradient, whatever its `out` holds.
    """
    rng = np.random.default_rng(13)
    outs = rng.standard_normal((2, 4)).astype(np.float32)
    outs[np.isneginf(lses)] = np.nan
    slope = rng.standard_normal(4).astype(np.float32)

    def value(out_a, lse_a, out_b, lse_b):
        out, lse = jattn.merge_attention_states(out_a[None], lse_a[None], out_b[None], lse_b[None])
        return (out[0] * slope).sum() + jnp.where(jnp.isfinite(lse[0]), 3 * lse[0], 0)

    states = [
        x for pair in zip(outs, np.float32(lses), strict=True) for x in map(jnp.asarray, pair)
    ]
    found = jax.jit(jax.grad(value, argnums=(0, 1, 2, 3)))(*states)
    shares = np.exp(np.float64(lses) - np.logaddexp(*lses)) if max(lses) > -np.inf else np.zeros(2)
    known = np.nan_to_num(outs)
    out = shares @ known
    for i, share in enumerate(shares):
        by_lse = share * (3 + (known[i] - out) @ slope)
        np.testing.assert_allclose(found[2 * i], share * slope, rtol=1e-6)
        np.testing.assert_allclose(found[2 * i + 1], by_lse, rtol=1e-5, atol=1e-6)


floats = st.floats(-30, 30, width=32)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@hypothesis.given(st.lists(st.one_of(floats, st.just(-np.inf)), min_size=3, max_size=3))
def test_merging_is_associative_commutative_and_neutral(lses):
    rng = np.random.default_rng(11)
    parts = []
    for lse in lses:
        out = rng.standard_normal((1, 4)).astype(np.float32)
        # Where lse is -inf, out is never read.
        out = np.full_like(out, np.nan) if lse == -np.inf else out
        parts.append((jnp.asarray(out), jnp.full((1,), lse, jnp.float32)))
    a, b, c = parts

    def merge(x, y):
        return jattn.merge_attention_states(*x, *y)

    shares = np.array(lses, np.float64)
    top = shares.max() if np.isfinite(shares.max()) else 0.0
    weights = np.exp(shares - top)
    total = weights.sum()
    outs = np.nan_to_num(np.stack([np.asarray(out)[0] for out, _ in parts]).astype(np.float64))
    exact = weights @ outs / total if total else np.zeros(4)
    exact_lse = top + np.log(total) if total else -np.inf
    ulp = np.finfo(np.float32).eps
    for out, lse in (merge(merge(a, b), c), merge(a, merge(b, c)), merge(c, merge(b, a))):
        np.testing.assert_allclose(np.asarray(out)[0], exact, rtol=0, atol=8 * ulp * 4)
        # exp turns an absolute error of the lse into a relative one
        np.testing.assert_allclose(float(lse[0]), exact_lse, rtol=4 * ulp, atol=8 * ulp)
    nothing = jnp.full((1, 4), jnp.nan), jnp.full((1,), -jnp.inf)
    for out, lse in (merge(a, nothing), merge(nothing, a)):
        want = np.nan_to_num(np.asarray(a[0]))
        np.testing.assert_allclose(np.asarray(out), want, rtol=2 * ulp, atol=0)
        np.testing.assert_array_equal(np.asarray(lse), np.asarray(a[1]))


def test_causal_per_sequence():
    """An array of flags means the same as the bool, for each sequence."""
    batch = problems.build(with_options("is_causal_per_sequence"))
    check(batch)
    for flag in (True, False):
        options = () if flag else ("not_causal",)
        static = problems.build(with_options(*options))
        out, lse = batch.run(is_causal=jnp.full((FRAME[1],), flag))
        budget.of(static).check(out, lse)


def test_the_widest_window_is_no_window():
    batch = problems.build(with_options("sliding_window"))
    check(batch)
    plain = budget.of(problems.build(BASE))
    widest = 2**31 - 1
    for window in (widest, jnp.int32(widest), np.int32(widest), 2**30, 131):
        plain.check(*batch.run(sliding_window=window))
    assert plain.violations(*batch.run(sliding_window=110))
    both = budget.of(problems.build(with_options("not_causal")))
    wide = problems.build(with_options("not_causal", "sliding_window"))
    both.check(*wide.run(sliding_window=widest))


@pytest.mark.parametrize("cap", [1e-3, 50.0])
def test_a_cap_bounds_huge_logits(cap):
    """At logits of 10^4 a softmax without a cap picks one key; a cap must not overflow."""
    batch = problems.build(with_options("logits_soft_cap"))
    view = batch.view.replace(scale=float(np.float32(1e4)), cap=float(np.float32(cap)))
    kwargs = {**batch.kwargs, "scale": 1e4, "logits_soft_cap": cap}
    out, lse = check(dataclasses.replace(batch, view=view, kwargs=kwargs))
    assert np.isfinite(out).all()
    assert np.isfinite(lse[1 : batch.view.starts[-1]]).all()


def test_huge_logits_without_a_cap():
    batch = problems.build(BASE)
    view = batch.view.replace(scale=float(np.float32(1e4)))
    check(dataclasses.replace(batch, view=view, kwargs={**batch.kwargs, "scale": 1e4}))


@pytest.mark.parametrize("bound", [1, 12])
def test_a_broken_bound_on_query_lengths_gives_nan(bound):
    batch = problems.build(BASE)
    out, lse = batch.run(max_query_len=bound)
    promises.check(batch, out, lse, {b for b, n in enumerate(BASE.query_lens) if n > bound})


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("bad", [-1, "N", 10**6, -(2**31)])
def test_a_used_id_outside_the_pool_gives_nan(bad, ragged):
    """Only the rows of that sequence are NaN; unused ids may be anything."""
    problem = with_options("sliding_window")
    if not ragged:
        query_lens, seq_lens = problems.lengths(problem.block_size, ragged)
        problem = problem.replace(
            query_lens=query_lens, seq_lens=seq_lens, ragged=False, frame=None
        )
    batch = problems.build(problem)
    right = np.array(batch.kwargs["block_tables"])
    longest = max(range(len(problem.seq_lens)), key=lambda b: problem.seq_lens[b])
    one_key_in_its_last_block = problem.seq_lens.index(problem.block_size + 1)
    for victim in (longest, one_key_in_its_last_block):
        tables = right.copy()
        tables[longest, :1] = -1  # outside the window
        last = (problem.seq_lens[victim] - 1) // problem.block_size
        tables[victim, last] = batch.key_cache.shape[0] if bad == "N" else bad
        out, lse = batch.run(block_tables=jnp.asarray(tables))
        promises.check(batch, out, lse, {victim})
    assert problem.seq_lens[longest] > 4 * problem.block_size, "all blocks are in the window"
    right[longest, :1] = -1
    budget.of(batch).check(*batch.run(block_tables=jnp.asarray(right)))


def test_more_keys_than_the_table_has_room_for_give_nan():
    longest = int(np.argmax(BASE.seq_lens))
    full = list(BASE.seq_lens)
    full[longest] = FRAME[2] * BASE.block_size
    check(problems.build(BASE.replace(seq_lens=tuple(full))))
    batch = problems.build(BASE)
    lens = np.array(batch.kwargs["seq_lens"])
    room = batch.kwargs["block_tables"].shape[1] * BASE.block_size
    victim = int(np.argmax(BASE.query_lens))
    for length in (room + 1, 2**31 - 1):
        lens[victim] = length
        out, lse = batch.run(seq_lens=jnp.asarray(lens))
        promises.check(batch, out, lse, {victim})


@pytest.mark.parametrize("mistake", promises.MISTAKES)
def test_invalid_starts_give_nan_everywhere(mistake):
    out, lse = promises.with_starts(problems.build(BASE), mistake).run()
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": np.nan},
        {"scale": np.inf},
        {"logits_soft_cap": 0.0},
        {"logits_soft_cap": -6.0},
        {"sliding_window": 0},
        {"sliding_window": -3},
        {"attention_chunk_size": 0},
    ],
    ids=str,
)
def test_meaningless_numbers_give_nan_as_arrays(wrong):
    """If they are Python numbers, they are refused."""
    batch = problems.build(BASE)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        batch.run(**wrong)
    ((name, number),) = wrong.items()
    dtype = jnp.int32 if isinstance(number, int) else jnp.float32
    out, lse = batch.run(**{name: jnp.asarray(number, dtype)})
    real = batch.view.starts[-1]
    seen = np.isfinite(batch.oracle()[1][:real])
    assert np.isnan(lse[:real][seen]).all()
    assert np.isnan(out[:real][seen]).all()


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("wrong", [0.0, np.inf, -np.inf])
def test_meaningless_scales_of_a_head_give_nan_in_its_rows(name, wrong):
    batch = problems.build(BASE)
    lse = batch.oracle()[1]
    scales = np.ones(BASE.num_kv_heads, np.float32)
    scales[1] = wrong
    with pytest.raises(ValueError, match=rf"{name}: .* finite and not 0"):
        batch.run(**{name: scales})
    out, _ = batch.run(**{name: jnp.asarray(scales)})
    real, group = batch.view.starts[-1], BASE.num_heads // BASE.num_kv_heads
    seen = np.isfinite(lse[:real])
    bad = np.isin(np.arange(BASE.num_heads) // group, [1])
    assert np.isnan(out[:real][seen & bad]).all()
    assert np.isfinite(out[:real][seen & ~bad]).all()


def test_a_nan_that_is_seen_shows():
    """In both out and lse: a row of NaN must not merge as if it had seen nothing."""
    batch = problems.build(BASE)
    query = batch.query.copy()
    query[0] = np.nan
    out, lse = dataclasses.replace(batch, query=query).run()
    assert np.isnan(out[0]).all()
    assert np.isnan(lse[0]).all()


def test_a_bound_on_query_lengths_that_holds_changes_nothing():
    batch = problems.build(BASE)
    budget.of(batch).check(*batch.run(max_query_len=20))


@pytest.mark.parametrize("bound", [2, 8, 9])
def test_a_few_queries_each(bound):
    """Speculative decoding: every sequence has up to `bound` query tokens."""
    query_lens = (0, 1, 2, bound, bound - 1, bound, 1)
    problem = BASE.replace(query_lens=query_lens, seq_lens=(0, 1, 15, 16, 17, 130, 23))
    batch = problems.build(problem)
    check(batch, max_query_len=bound)


@pytest.mark.parametrize(("query", "out"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_out_dtype(query, out):
    batch = problems.build(BASE.replace(query_dtype=query, format="bfloat16"))
    batch = dataclasses.replace(batch, kwargs={**batch.kwargs, "out_dtype": jnp.dtype(out)})
    have, _ = check(batch)
    assert have.dtype == jnp.dtype(out)


def test_numbers_may_be_python_numpy_or_jax():
    options = ("sliding_window", "logits_soft_cap", "sinks", "alibi_slopes", "k_scale", "v_scale")
    batch = problems.build(with_options(*options))
    first = check(batch)
    changes = {
        "scale": np.float32(BASE.head_dim**-0.5),
        "sliding_window": np.int32(batch.problem.window),
        "logits_soft_cap": jnp.asarray(batch.kwargs["logits_soft_cap"]),
        "sinks": np.asarray(batch.kwargs["sinks"]),
        "k_scale": np.asarray(batch.kwargs["k_scale"]),
        "block_tables": np.asarray(batch.kwargs["block_tables"]),
        "seq_lens": np.asarray(batch.kwargs["seq_lens"]),
        "query_start_loc": np.asarray(batch.kwargs["query_start_loc"]),
    }
    for have, want in zip(batch.run(**changes), first, strict=True):
        np.testing.assert_array_equal(have, want)


def test_inside_jit_it_is_the_same_call():
    batch = problems.build(BASE)

    @jax.jit
    def step(query, key_cache, value_cache, arrays):
        return jattn.paged_attention(query, key_cache, value_cache, return_lse=True, **arrays)

    arrays = {name: batch.kwargs[name] for name in ("block_tables", "seq_lens", "query_start_loc")}
    have = step(jnp.asarray(batch.query), batch.key_cache, batch.value_cache, arrays)
    budget.of(batch).check(*map(np.asarray, have))


def test_negative_lengths_mean_empty_sequences():
    batch, victim = problems.build(with_options("sinks")), int(np.argmax(BASE.query_lens))
    for length in (-1, -(2**31)):
        lens = np.array(batch.kwargs["seq_lens"])
        lens[victim] = 0
        want = batch.run(seq_lens=jnp.asarray(lens))
        lens[victim] = length
        for implementation in (None, "reference"):
            out, lse = batch.run(implementation, seq_lens=jnp.asarray(lens))
            rows = slice(*batch.view.starts[victim : victim + 2])
            assert not out[rows].any()
            np.testing.assert_array_equal(lse[rows], want[1][rows])
            if implementation is None:
                np.testing.assert_array_equal(out, want[0])


def test_the_reference_as_an_implementation():
    batch = problems.build(with_options("sinks"))
    out, lse = check(batch, implementation="reference")
    exact = batch.oracle()
    np.testing.assert_array_equal(out, exact[0].astype(np.float32))
    np.testing.assert_array_equal(lse, exact[1].astype(np.float32))


def test_the_reference_keeps_the_same_promises():
    batch = problems.build(with_options("sliding_window"))
    victim = int(np.argmax(BASE.query_lens))
    tables, lens = (np.array(batch.kwargs[name]) for name in ("block_tables", "seq_lens"))
    tables[victim, (BASE.seq_lens[victim] - 1) // BASE.block_size] = -1
    out, lse = batch.run("reference", block_tables=jnp.asarray(tables))
    promises.check(batch, out, lse, {victim})
    lens[victim] = tables.shape[1] * BASE.block_size + 1
    out, lse = batch.run("reference", seq_lens=jnp.asarray(lens))
    promises.check(batch, out, lse, {victim})
    starts = jnp.asarray(batch.kwargs["query_start_loc"]).at[0].set(1)
    assert np.isnan(batch.run("reference", query_start_loc=starts)[0]).all()


def test_merging_empty_results_makes_no_nan_internally():
    nothing = jnp.zeros((2, 4)), jnp.asarray([-jnp.inf, 0.0])
    with jax.debug_nans(True):
        out, lse = jattn.merge_attention_states(*nothing, *nothing)
    np.testing.assert_array_equal(np.asarray(out), 0)
    np.testing.assert_allclose(np.asarray(lse), [-np.inf, np.log(2)], rtol=1e-6)


def test_a_table_with_room_for_two_to_the_31_keys():
    """M * S need not be an int32."""
    pool = jnp.ones((2, 1, 2**20, 1))
    tables = jnp.zeros((1, 2**11), jnp.int32)
    query, lens = jnp.ones((1, 1, 1)), jnp.asarray([40], jnp.int32)
    starts = jnp.asarray([0, 1], jnp.int32)
    for given in ({}, {"query_start_loc": starts}):
        out = jattn.paged_attention(query, pool, pool, block_tables=tables, seq_lens=lens, **given)
        np.testing.assert_allclose(np.asarray(out), 1, rtol=1e-6)
