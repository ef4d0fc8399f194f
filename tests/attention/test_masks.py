"""Masks: trees, chunks, visible ends, selected blocks, biases of relative positions, token sinks.

Two sets of options hold all masks and share one frame, so only two programs are compiled. To leave
a mask out, a test gives it a value that hides nothing (`NEUTRAL`). One test checks that neutral
masks change nothing; others compare one mask at a time with a dense computation of only that mask.
"""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jattn
from jattn import call as calls
from jattn import implementations, reference, spec
from jattn.call import masks as mask_arguments
from jattn.cpu.xla import masks, work_items
from tests.support import budget, problems, promises, random_calls, wrong
from tests.support.compiled import compilations

pytestmark = pytest.mark.usefixtures("each_row")

FRAME = (72, 8, 10, 40)  # T, B, M, N
BOTH = {"sliding_window", "attention_chunk_size", "selected_blocks", "relative_bias"}
BOTH |= {"sinks_per_token", "return_lse"}
IMAGES = frozenset(BOTH | {"visible_end", "is_causal_per_sequence"})
TREES = frozenset(BOTH | {"tree_mask"})
MASKS = BOTH - {"return_lse"} | {"visible_end", "is_causal_per_sequence", "tree_mask"}
BASE = problems.Problem(
    query_lens=(0, 1, 1, 16, 1, 20, 9),
    seq_lens=(0, 1, 15, 16, 17, 130, 23),
    frame=FRAME,
    head_dim=16,
    value_dim=8,
    seed=3,
)
NEUTRAL = {
    "sliding_window": np.int32(2**31 - 1),
    "attention_chunk_size": np.int32(2**31 - 1),
    "selected_blocks": np.tile(np.arange(12, dtype=np.int32), (8, 1)),
    "relative_bias": np.zeros((4, 41), np.float32),
    "sinks": np.full((72, 4), -np.inf, np.float32),
    "visible_end": np.zeros(72, np.int32),
    "is_causal": np.ones(8, bool),
    "tree_mask": np.full((72, 2), 2**32 - 1, np.uint32),
}
ARGUMENT = {"sinks_per_token": "sinks", "is_causal_per_sequence": "is_causal"}


def run(batch: problems.Batch, options: frozenset[str], **more) -> tuple[np.ndarray, np.ndarray]:
    """Run the batch with the program of `options`; masks that it lacks get neutral values."""
    names = [ARGUMENT.get(name, name) for name in options - {"return_lse"}]
    given = {name: NEUTRAL[name] for name in names} | batch.kwargs | {"return_lse": True}
    for name, dtype in (("sliding_window", jnp.int32), ("attention_chunk_size", jnp.int32)):
        given[name] = jnp.asarray(given[name], dtype)
    if "tree_mask" in given:
        words = np.asarray(given["tree_mask"])  # one shape and type for trees of all widths
        if words.dtype == np.bool_:
            words = np.pad(words, ((0, 0), (0, 64 - words.shape[1])), constant_values=True)
            words = np.asarray(mask_arguments.pack_bits(jnp.asarray(words)))
        words = np.pad(words, ((0, 0), (0, 2 - words.shape[1])), constant_values=2**32 - 1)
        given["tree_mask"] = jnp.asarray(words)
    out = jattn.paged_attention(
        jnp.asarray(batch.query), batch.key_cache, batch.value_cache, **(given | more)
    )
    return tuple(np.asarray(x) for x in out)


def problem(*options: str, **changes) -> problems.Problem:
    return BASE.replace(options=frozenset({"return_lse", *options}), **changes)


def family(options) -> frozenset[str]:
    return TREES if "tree_mask" in options else IMAGES


def rejects(batch: problems.Batch, allowed: budget.Budget) -> None:
    """Check that every wrong kernel that applies is outside the budget."""
    passed = [name for name, kernel in wrong.kernels(batch) if not allowed.violations(*kernel())]
    assert not passed, f"within the budget: {passed}"


@pytest.mark.parametrize("name", sorted(MASKS))
def test_one_mask(name):
    """A single mask among neutral ones is right, and its wrong kernels are rejected."""
    batch = problems.build(problem(name))
    allowed = budget.of(batch)
    allowed.check(*run(batch, family({name})))
    rejects(batch, allowed)


@pytest.mark.parametrize("options", [IMAGES, TREES], ids=["images", "trees"])
def test_neutral_masks_change_nothing(options):
    batch = problems.build(problem())
    budget.of(batch).check(*run(batch, options))


@pytest.mark.parametrize("options", [IMAGES, TREES], ids=["images", "trees"])
def test_new_masks_never_compile(options):
    first, other = (
        problems.build(problem(*options, seed=seed, query_lens=lens, window=window, chunk=chunk))
        for seed, lens, window, chunk in (
            (4, (0, 1, 1, 16, 1, 20, 9), 11, 32),
            (5, (0, 1, 9, 2, 3, 30, 20), 40, 21),
        )
    )
    budget.of(first).check(*run(first, options))
    with compilations(at_most=0):
        found = run(other, options)
    budget.of(other).check(*found)


@st.composite
def batches(draw) -> problems.Problem:
    """Draw up to eight sequences that fit the frame, with some masks of a family."""
    options = draw(st.sampled_from([IMAGES, TREES]))
    chosen = draw(st.sets(st.sampled_from(sorted(options - {"return_lse"})), min_size=1))
    query_lens, seq_lens = draw(random_calls.lengths_within(FRAME, BASE.block_size))
    return problem(
        *chosen,
        *({"tree_mask"} & options),
        query_lens=query_lens,
        seq_lens=seq_lens,
        window=draw(st.integers(1, 120)),
        chunk=draw(st.integers(1, 150)),
        tree_columns=draw(st.integers(1, 64)),
        seed=draw(st.integers(0, 2**20)),
    )


def check_batch(problem):
    batch = problems.build(problem)
    budget.of(batch).check(*run(batch, family(problem.options)))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(batches())
def test_random_batches(problem):
    check_batch(problem)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(batches())
def test_more_random_batches(problem):
    check_batch(problem)


def test_draft_tokens_of_several_sequences():
    """With up to 8 draft tokens each, the decode loop runs several query tokens per sequence."""
    drafts = problem(
        "tree_mask",
        "sliding_window",
        "selected_blocks",
        query_lens=(8, 1, 5, 8, 0, 3),
        seq_lens=(130, 17, 5, 16, 0, 33),
        window=20,
    )
    batch = problems.build(drafts)
    batch.kwargs["max_query_len"] = 8
    batch.kwargs["tree_mask"] = mask_arguments.pack_bits(batch.kwargs["tree_mask"])
    budget.of(batch).check(*batch.run())


def test_trees_wider_than_a_word():
    """A tree of 40 tokens needs two words of bits; another sequence has a chain past its mask."""
    wide = problem("tree_mask", "relative_bias", query_lens=(40, 3), seq_lens=(51, 3))
    for columns in (40, 33, 32, 8):
        batch = problems.build(wide.replace(tree_columns=columns))
        budget.of(batch).check(*run(batch, TREES))


def test_a_path_is_a_sequence():
    """Each path of a tree, as a sequence in a separate cache, gives the tree's rows.

    A window and ALiBi slopes would reveal a token positioned by its place instead of its depth.
    """
    rng = np.random.default_rng(5)
    parents = [-1, 0, 0, 1, 1, 2, 5]  # two branches, of depths 2 and 3
    past, drafted = 21, len(parents)
    key, value = rng.standard_normal((2, past + drafted, 2, 16)).astype(np.float32)
    query = rng.standard_normal((drafted, 4, 16)).astype(np.float32)
    mask = np.zeros((drafted, drafted), bool)
    for i, parent in enumerate(parents):
        mask[i] = mask[parent] if parent >= 0 else False
        mask[i, i] = True
    options = {"alibi_slopes": jnp.linspace(0.1, 0.8, 4), "sliding_window": 9}

    def attend(rows, tokens, **more):
        """`rows` of the query after `tokens` of the keys, all in one sequence."""
        caches = jattn.init_kv_cache(4, 2, 8, 16, format=jattn.Dense("float32"))
        slots = jnp.arange(len(tokens), dtype=jnp.int32)
        caches = jattn.update_kv_cache(*caches, key[tokens], value[tokens], slots)
        return jattn.paged_attention(
            query[rows],
            *caches,
            block_tables=jnp.arange(4, dtype=jnp.int32)[None],
            seq_lens=jnp.array([len(tokens)], jnp.int32),
            query_start_loc=jnp.array([0, len(rows)], jnp.int32),
            implementation="reference",
            **options,
            **more,
        )

    everything = np.arange(past + drafted)
    tree = attend(np.arange(drafted), everything, tree_mask=jnp.asarray(mask))
    for i in range(drafted):
        path = np.concatenate([np.arange(past), past + np.flatnonzero(mask[i])])
        alone = attend(np.array([i]), path)
        np.testing.assert_allclose(np.asarray(tree)[i], np.asarray(alone)[0], rtol=0, atol=1e-6)
    flat = attend(np.arange(drafted), everything)
    assert np.abs(np.asarray(tree) - np.asarray(flat)).max() > 0.1


def test_gemma_images():
    """transformers' mask of Gemma 4: AND(window, OR(causal, same image)), a window on the past.

    Tokens of an image that is longer than the window still see the rest of the image ahead.
    """
    images = np.array([-1] * 3 + [0] * 9 + [-1] * 4 + [1] * 3 + [2] * 2 + [-1])
    n, window = len(images), 5
    q, k = np.arange(n)[:, None], np.arange(n)[None]
    same = (images[:, None] == images[None]) & (images[:, None] >= 0)
    want = (k > q - window) & ((k <= q) | same)
    ends = [0 if i < 0 else int(np.flatnonzero(images == i)[-1]) + 1 for i in images]
    have = spec.visible(q, k, n, spec.Sight(True, window, visible_end=np.array(ends)[:, None]))
    np.testing.assert_array_equal(have, want)
    assert (want & (k - q >= window)).any()


def test_llama_chunks():
    """transformers' mask of Llama 4: causal, and within the same chunk."""
    q, k = np.arange(30)[:, None], np.arange(30)[None]
    have = spec.visible(q, k, 30, spec.Sight(attention_chunk_size=8))
    np.testing.assert_array_equal(have, (k <= q) & (k // 8 == q // 8))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    first=st.integers(-8, 30),
    count=st.integers(1, 8),
    seq_len=st.integers(0, 30),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 40),
    chunk=st.none() | st.integers(1, 40) | st.just(2**31 - 1),
    ends=st.none() | st.lists(st.integers(-2, 40), min_size=8, max_size=8),
)
def test_key_ranges_hold_all_that_is_seen(first, count, seq_len, causal, window, chunk, ends):
    sight = spec.Sight(causal, window, chunk)
    q, k = first + np.arange(count)[:, None], np.arange(seq_len)[None]
    ends = None if ends is None or not causal else np.array(ends[:count])
    of_queries = sight._replace(visible_end=None if ends is None else ends[:, None])
    seen = spec.visible(q, k, seq_len, of_queries).any(axis=0)
    start, end = spec.key_range(
        *(np.int64(x) for x in (first, first + count - 1, seq_len)),
        sight._replace(visible_end=None if ends is None else ends.max()),
        xp=np,
    )
    assert 0 <= start <= end <= seq_len
    found = np.flatnonzero(seen)
    if len(found):
        assert start <= found[0]
        assert end > found[-1]
        if ends is None:  # and the range holds nothing else
            assert (start, end) == (found[0], found[-1] + 1)


def paths_by_hand(mask: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `(seen, how many seen ones come later)` for query tokens [n] and keys of `tokens`."""
    n, columns = mask.shape
    seen = np.zeros((n, len(tokens)), bool)
    for i in range(n):
        for c, j in enumerate(tokens):
            seen[i, c] = j < 0 or j == i or (j < i and (j >= columns or mask[i, j]))
    return seen, np.cumsum(seen[:, ::-1], axis=1)[:, ::-1] - seen


def check_paths(n: int, columns: int, seed: int, xp) -> None:
    mask = np.random.default_rng(seed).random((70, columns)) < 0.5
    words = np.asarray(mask_arguments.pack_bits(jnp.asarray(mask)))[:n]
    i, j = np.arange(n, dtype=np.int32), np.arange(-3, n, dtype=np.int32)

    def paths(words, i, j):
        rows = spec.path_bits(words, i, xp=xp)
        return spec.tree_path(rows[:, None], i[:, None], j[None], xp=xp)

    have = paths(words, i, j) if xp is np else jax.jit(paths)(words, i, j)
    seen, later = paths_by_hand(mask[:n], j)
    np.testing.assert_array_equal(np.asarray(have[0]), seen)
    np.testing.assert_array_equal(np.asarray(have[1])[seen], later[seen])


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    n=st.integers(1, 70),
    columns=st.sampled_from([1, 31, 32, 33, 64, 70]),
    seed=st.integers(0, 1000),
)
def test_every_bit_of_a_tree_path(n, columns, seed):
    """Words of bits agree with a walk over the mask."""
    check_paths(n, columns, seed, np)


def test_tree_paths_in_jax():
    check_paths(70, 40, 3, jnp)


@pytest.mark.parametrize(("tokens", "count"), [(1, 16), (5, 8), (8, 5)])
def test_a_bias_that_is_shifted_along_equals_a_lookup(tokens, count):
    """If positions have no gaps; two items, at both ends of the table and across its middle."""
    heads, group, columns = 6, 3, 9
    rng = np.random.default_rng(tokens)
    table = rng.standard_normal((heads, columns)).astype(np.float32)
    pulled = rng.standard_normal((2, 2, tokens * group, count)).astype(np.float32)
    q = np.array([[7], [40]]) + np.arange(tokens)
    k = np.array([[4], [0]]) + np.arange(count)
    rows = work_items.QueryRows(
        jnp.asarray(np.repeat(q, group, axis=1), jnp.int32), spec.Sight(), None, None
    )
    call = types.SimpleNamespace(num_kv_heads=2, group=group)
    run = work_items.KeyRun(*(None,) * 6)
    items = types.SimpleNamespace(rows=rows, run=run)

    def bias(table):
        return masks.position_bias(table, items, jnp.asarray(k, jnp.int32)[:, None], call)

    have, transpose = jax.vjp(jax.jit(bias), jnp.asarray(table))
    want, back = np.zeros(have.shape, np.float32), np.zeros(table.shape)
    for item, head, row, key in np.ndindex(2, heads, tokens, count):
        column = np.clip(k[item, key] - q[item, row], -4, 4) + 4
        at = item, head // group, row * group + head % group, key
        want[at] = table[head, column]
        back[head, column] += pulled[at]
    np.testing.assert_array_equal(np.asarray(have), want)
    np.testing.assert_allclose(np.asarray(transpose(jnp.asarray(pulled))[0]), back, atol=1e-5)


def t5_bucket(distance: int, num_buckets: int = 32, max_distance: int = 128) -> int:
    """Return T5's bucket of a key `distance` tokens back, in decoders: exact, then logarithmic."""
    exact = num_buckets // 2
    if distance < exact:
        return max(distance, 0)
    far = np.log(distance / exact) / np.log(max_distance / exact) * (num_buckets - exact)
    return min(exact + int(far), num_buckets - 1)


@pytest.mark.parametrize("kind", ["t5", "alibi"])
def test_a_table_is_t5_or_alibi(kind):
    """T5's buckets are constant from 128 on: a table of E = 128 holds them all. ALiBi grows on."""
    rng = np.random.default_rng(1)
    batch = problems.build(problem())
    if kind == "t5":
        weights = rng.uniform(-2, 2, (4, 32)).astype(np.float32)
        whole, extent = weights[:, [t5_bucket(-d) for d in range(-160, 161)]], 128
    else:
        slopes = np.linspace(0.4, 0.05, 4).astype(np.float32)
        whole, extent = slopes[:, None] * np.arange(-160, 161, dtype=np.float32)[None], 130
    table = jnp.asarray(whole[:, 160 - extent : 161 + extent])
    other = dataclasses.replace(batch, view=batch.view.replace(bias=whole.astype(np.float64)))
    if kind == "alibi":
        view = batch.view.replace(slopes=slopes.astype(np.float64))
        other = dataclasses.replace(
            batch, view=view, kwargs={**batch.kwargs, "alibi_slopes": jnp.asarray(slopes)}
        )
    else:
        kwargs = {**batch.kwargs, "relative_bias": jnp.asarray(whole)}
        other = dataclasses.replace(other, kwargs=kwargs)
    kwargs = {**batch.kwargs, "relative_bias": table}
    call, operands = dataclasses.replace(batch, kwargs=kwargs).call()
    budget.of(other).check(*reference.attention(call, operands))


def test_a_sink_of_an_empty_row():
    batch = problems.build(
        problem("sinks_per_token", query_lens=(3, 12, 1, 0, 1), seq_lens=(0, 5, 0, 0, 19))
    )
    out, lse = run(batch, IMAGES)
    budget.of(batch).check(out, lse)
    blind = [0, 1, 2, *range(3, 10), 15]
    np.testing.assert_array_equal(out[blind], 0)
    sinks = np.asarray(batch.kwargs["sinks"])[blind]
    np.testing.assert_array_max_ulp(lse[blind], sinks, maxulp=1)  # kernels work in base 2
    broken = batch.kwargs["sinks"].at[jnp.asarray([0, 14])].set(jnp.nan)
    out, lse = run(batch, IMAGES, sinks=broken)
    assert np.isnan(lse[[0, 14]]).all()
    assert np.isnan(out[14]).all()
    assert not np.isnan(lse[1:14]).any()


def test_nothing_selected_is_nothing_seen():
    batch = problems.build(problem())
    nothing = jnp.asarray([[-1, 10**6, 2**31 - 1, -(2**31)] * 3] * 8, jnp.int32)
    out, lse = run(batch, IMAGES, selected_blocks=nothing)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_a_selected_id_outside_the_pool_gives_nan():
    """Only the rows of that sequence are NaN; ids of unselected blocks may be anything."""
    batch = problems.build(problem("selected_blocks"))
    victim = int(np.argmax(BASE.seq_lens))
    columns = np.arange(-(-BASE.seq_lens[victim] // BASE.block_size))
    chosen = np.isin(columns, np.asarray(batch.kwargs["selected_blocks"])[victim])
    for bad in (-1, FRAME[3]):
        tables = np.array(batch.kwargs["block_tables"])
        tables[victim, columns[~chosen]] = bad
        budget.of(batch).check(*run(batch, IMAGES, block_tables=jnp.asarray(tables)))
        tables[victim, columns[chosen][-1]] = bad
        out, lse = run(batch, IMAGES, block_tables=jnp.asarray(tables))
        promises.check(batch, out, lse, {victim})


def test_a_window_that_begins_among_keys_read_at_once_and_ends_after_them():
    batch = problems.build(
        problem("sliding_window", window=60, query_lens=(9, 1), seq_lens=(130, 130))
    )
    budget.of(batch).check(*run(batch, IMAGES))


def test_biases_of_keys_around_the_end_of_their_table():
    """The native kernel reads a single bias for a tile of keys that are all past that end."""
    batch = problems.build(problem("relative_bias", query_lens=(1, 9, 9), seq_lens=(83, 72, 87)))
    budget.of(batch).check(*run(batch, IMAGES))


REFUSED = {
    "ends_of_no_edge": ({"visible_end": "T", "is_causal": False}, "visible_end", "causal edge"),
    "tree_not_causal": ({"tree_mask": "tree", "is_causal": False}, "tree_mask", "is_causal"),
    "tree_per_sequence": ({"tree_mask": "tree", "is_causal": "B"}, "tree_mask", "is_causal"),
    "tree_with_ends": ({"tree_mask": "tree", "visible_end": "T"}, "tree_mask", "visible_end"),
    "two_biases": ({"relative_bias": "bias", "alibi_slopes": "H"}, "relative_bias", "slope"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_contradictory_masks_are_refused(key):
    changes, argument, words = REFUSED[key]
    struct = jax.ShapeDtypeStruct
    arrays = {
        "T": struct((6,), jnp.int32),
        "B": struct((3,), jnp.bool_),
        "H": struct((4,), jnp.float32),
        "tree": struct((6, 1), jnp.uint32),
        "bias": struct((4, 9), jnp.float32),
    }
    with pytest.raises(ValueError, match="1 wrong argument") as error:
        jattn.explain(
            struct((6, 4, 16), jnp.float32),
            *(struct((9, 2, 8, 16), jnp.float32),) * 2,
            block_tables=struct((3, 4), jnp.int32),
            seq_lens=struct((3,), jnp.int32),
            query_start_loc=struct((4,), jnp.int32),
            **{name: arrays.get(x, x) if isinstance(x, str) else x for name, x in changes.items()},
        )
    assert f"- {argument}: given with" in str(error.value)
    assert words in str(error.value)


def test_kernels_that_do_not_claim_a_mask_refuse_it():
    batch = problems.build(problem("visible_end"))
    assert "visible_end" in implementations.BY_NAME["xla"].row.options
    assert not set(calls.MASK_OPTIONS) & set(implementations.BY_NAME["mosaic_gpu"].row.options)
    why = jattn.explain(
        batch.query, batch.key_cache, batch.value_cache, implementation="mosaic_gpu", **batch.kwargs
    )
    assert "option visible_end is not supported" in why.refusals["mosaic_gpu"]
