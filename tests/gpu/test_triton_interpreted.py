"""The Triton kernels interpreted on NumPy: the matrix, budgets and wrong kernels used elsewhere.

Ids read like `triton-head512-block16-bf16-window-hnd-group2-mixed-words`, as in test_matrix.py,
where the same cases run on a GPU. What runs here is the text that is compiled there
(`triton_numpy.py`), on a machine of 7 programs, so that most sequences are split over several.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import call as calls
from jattn import spec
from jattn.cpu.xla import attention as xla
from jattn.cpu.xla import gradient
from jattn.pallas import capability_rows as gpu_rows
from jattn.pallas import machine, transforms
from jattn.pallas.triton import launch as triton_launch
from jattn.pallas.triton import tiles as triton_tiles
from tests.support import budget, matrix, problems, promises, random_calls, triton_numpy, wrong

GPU = machine.Machine(sm=90, cores=7)
CASES = matrix.sample(gpu_rows.TRITON)[::3]  # every third of those with all levels: they take long
SAMPLED = set(CASES)
BF16 = {"query_dtype": "bfloat16", "format": "bfloat16"}
EVERYTHING = frozenset(calls.CORE_OPTIONS) - {"not_causal"}


class Fragments:
    """The functions that the kernels are made of, with plain arrays as results."""

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


def interpret(batch: problems.Batch, gpu: machine.Machine = GPU, track: tuple[str, ...] = ()):
    """`(out, lse, buffers)` of the batch's kernels."""
    return triton_numpy.run(*batch.call(), gpu, track)


def check(case: matrix.Case) -> None:
    batch = problems.build(case.problem())
    allowed = budget.of(batch)
    allowed.check(*interpret(batch)[:2])
    if case.head == (matrix.FULL_SIZE, matrix.FULL_SIZE):
        passed = [
            name for name, kernel in wrong.kernels(batch) if not allowed.violations(*kernel())
        ]
        assert not passed, f"within the budget: {passed}"


by_id = functools.partial(pytest.mark.parametrize, "case", ids=lambda case: case.id)


@by_id(CASES)
def test_claimed(case):
    check(case)


@pytest.mark.extended
@by_id([case for case in matrix.default(gpu_rows.TRITON) if case not in SAMPLED])
def test_claimed_pairwise(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", matrix.thorough(gpu_rows.TRITON), ids=lambda case: case.id)
def test_claimed_more(case):
    batch = problems.build(case.problem())
    budget.of(batch).check(*interpret(batch)[:2])


def broken_kernels():
    """`(name, text, its replacement)`: the kernels with one mistake each."""
    return (
        ("window", "q_pos - k_pos < sight.window", "q_pos - k_pos <= sight.window"),
        ("causal", "reach = k_pos <= q_pos", "reach = k_pos < q_pos"),
        ("mask", "tl.where(seen & inside[None, :], x", "tl.where(inside[None, :], x"),
        ("cap", "tanh(dots * (scale / cap)[:, None])", "dots * (scale / cap)[:, None]"),
        ("shrink", "acc0 * shrink[:, None]", "acc0"),
        ("sink", "l * rescale + tl.exp2(sinks * LOG2E - base)", "l * rescale"),
        ("slopes", "distance = (k_pos - q_pos)", "distance = (q_pos - k_pos)"),
        ("head", "head * C.GROUP + row % C.GROUP", "head + row % C.GROUP"),
    )


DRAFTED = frozenset({"tree_mask", "sliding_window", "relative_bias", "sinks_per_token"})
SELECTED = frozenset({"selected_blocks", "attention_chunk_size", "alibi_slopes"})
AHEAD = frozenset({"visible_end", "sliding_window", "is_causal_per_sequence"})


def broken_masks():
    """`(name, options, text, its replacement)`."""
    return (
        ("end", AHEAD, "reach | (k_pos < sight.visible_end)", "reach"),
        ("window ahead", AHEAD, "| (sight.is_causal != 0))", ")"),
        ("path", DRAFTED, "on_path & visible(q_pos, keys", "visible(q_pos, keys"),
        ("depth", DRAFTED, "first + depth_of(tree, index, real, C)", "positions"),
        ("distance", DRAFTED, "keys = q_pos - distance", "keys = keys"),
        ("word", DRAFTED, "at = key - 32 * word", "at = key"),
        ("bias", DRAFTED, "-EXTENT), EXTENT) + EXTENT", "-EXTENT), EXTENT)"),
        ("far", DRAFTED, "last - rows.lowest > -EXTENT", "last - rows.lowest > 0"),
        ("token", DRAFTED, "at = place", "at = query_head"),
        (
            "column",
            SELECTED,
            "columns * C.BLOCK_SIZE + tokens",
            "tokens // C.BLOCK_SIZE * C.BLOCK_SIZE + tokens",
        ),
        ("before", SELECTED, "(columns < start // C.BLOCK_SIZE)", "(columns <= start)"),
        ("below", SELECTED, "columns * C.BLOCK_SIZE < end", "columns * C.BLOCK_SIZE + 8 < end"),
    )


@pytest.mark.parametrize(
    ("options", "text", "mistake"),
    [
        *((EVERYTHING - {"is_causal_per_sequence"}, *broken[1:]) for broken in broken_kernels()),
        *(broken[1:] for broken in broken_masks()),
    ],
    ids=[broken[0] for broken in (*broken_kernels(), *broken_masks())],
)
def test_a_mistake_in_the_kernels_is_noticed(options, text, mistake):
    problem = problems.Problem(
        query_lens=(9, 1, 40),
        seq_lens=(40, 290, 160 if options == DRAFTED else 60),
        **BF16,
        options=options | {"return_lse"},
        window={AHEAD: 3, DRAFTED: 70}.get(options, 45),
        block_size=8 if "selected_blocks" in options else 16,
        chunk=30,
        tree_columns=40,
    )
    batch = problems.build(problem)
    allowed = budget.of(batch)
    right = interpret(batch)[:2]
    assert not allowed.violations(*right)
    with triton_numpy.edited(text, mistake):
        try:
            found = allowed.violations(*interpret(batch)[:2])
        except AssertionError as error:
            found = [str(error)]  # the interpreter noticed: written twice, out of bounds
        assert found


@pytest.mark.parametrize("cores", [pytest.param(1, marks=pytest.mark.slow), 3, 11])
def test_any_number_of_programs(cores):
    """Sequences whole, split in two and split over many, speculative tokens among them."""
    problem = problems.Problem(
        query_lens=(1, 4, 1, 8, 3, 0, 1),
        seq_lens=(700, 40, 1, 300, 2, 5, 31),
        num_heads=10,
        num_kv_heads=2,
        **BF16,
        options=EVERYTHING,
        window=500,
    )
    batch = problems.build(problem)
    batch = dataclasses.replace(batch, kwargs=batch.kwargs | {"max_query_len": 8})
    budget.of(batch).check(*interpret(batch, machine.Machine(90, cores))[:2])


def test_few_new_tokens_behind_many_keys_are_split():
    """Too few rows for prefill to keep the GPU busy: decode has them all, tiles of rows too."""
    problem = problems.Problem(
        query_lens=(40, 9),
        seq_lens=(2100, 90),
        num_heads=4,
        num_kv_heads=1,
        **BF16,
        options=EVERYTHING,
        window=1500,
    )
    batch = problems.build(problem)
    call, _ = batch.call()
    kernels = [
        [launch.kernel for launch in triton_launch.launches(call, machine.Machine(90, cores))]
        for cores in (132, 11, 2)
    ]
    assert kernels == [
        ["decode", "merge_splits"],
        ["decode", "merge_splits"],
        [*triton_launch.Kernels._fields],
    ]
    budget.of(batch).check(*interpret(batch, machine.Machine(90, 11))[:2])


@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize(
    "options",
    [
        AHEAD,
        frozenset({"visible_end", "attention_chunk_size", "relative_bias"}),
        frozenset({"tree_mask", "attention_chunk_size", "alibi_slopes"}),
        DRAFTED,
        SELECTED,
        frozenset({"selected_blocks", "tree_mask", "sliding_window", "relative_bias"}),
        frozenset({"selected_blocks", "visible_end", "is_causal_per_sequence"}),
        frozenset({"relative_bias", "not_causal", "sliding_window"}),
    ],
    ids=lambda options: "-".join(sorted(options)) if isinstance(options, frozenset) else None,
)
def test_masks_meet(options, block_size):
    """Decode whole and split, prefill in several tiles; blocks smaller and larger than a tile."""
    problem = problems.Problem(
        query_lens=(1, 3, 50, 0, 2),
        seq_lens=(300, 41, 130, 9, 64),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        value_dim=16,
        block_size=block_size,
        options=options | {"return_lse"},
        window=45,
        chunk=30,
        tree_columns=40,
        seed=block_size + 1,
    )
    batch = problems.build(problem)
    budget.of(batch).check(*interpret(batch)[:2])


def test_a_tree_of_many_roots_ends_within_a_tile():
    """The last key before the query tokens ends a tile, and no token follows the first."""
    problem = problems.Problem(
        query_lens=(50,), seq_lens=(177,), padded_seqs=0, options=frozenset({"tree_mask"}),
        head_dim=16, value_dim=16,
    )  # fmt: skip
    batch = problems.build(problem)
    mask = np.zeros((batch.query.shape[0], 50), bool)
    batch = dataclasses.replace(batch, kwargs=batch.kwargs | {"tree_mask": jnp.asarray(mask)})
    want = batch.oracle()[0]
    np.testing.assert_allclose(interpret(batch)[0], want, atol=1e-5)
    with triton_numpy.edited("tl.minimum(whole_to, tl.maximum(rows.first, 0))", "whole_to"):
        assert np.abs(interpret(batch)[0] - want).max() > 1e-3


@pytest.mark.parametrize("hidden", [-np.inf, np.finfo(np.float32).min])
def test_biases_that_hide_keys(hidden):
    """Keys far behind, where prefill masks nothing, have the table's first number."""
    problem = problems.Problem(
        query_lens=(40, 1), seq_lens=(300, 290), head_dim=16, value_dim=16,
        options=frozenset({"relative_bias", "return_lse"}),
    )  # fmt: skip
    batch = problems.build(problem)
    table = np.array(batch.kwargs["relative_bias"])
    table[:, :17] = hidden
    batch = dataclasses.replace(batch, kwargs=batch.kwargs | {"relative_bias": jnp.asarray(table)})
    for have, want in zip(interpret(batch)[:2], batch.oracle(), strict=True):
        np.testing.assert_allclose(have, want, atol=1e-5)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.extended)
                                               for n in range(4, 60))])  # fmt: skip
def test_random_calls(seed):
    """Any sizes, formats and options that mean something together."""
    batch = problems.build(random_calls.draw(seed, gpu_rows.TRITON))
    while gpu_rows.TRITON.refuses(batch.call()[0]):  # a size that its format does not go with
        seed += 1000
        batch = problems.build(random_calls.draw(seed, gpu_rows.TRITON))
    budget.of(batch).check(*interpret(batch)[:2])


def test_gradients_are_xlas():
    """Of what the kernels compute: the XLA path's backward pass takes their out and lse."""
    problem = problems.Problem(
        query_lens=(1, 12), seq_lens=(40, 30), num_heads=4, num_kv_heads=2, head_dim=16,
        value_dim=16, plain=True, options=frozenset({"sinks", "relative_bias", "visible_end"}),
    )  # fmt: skip
    call, operands = problems.build(problem).call()

    def interpreted(call, operands):
        shape = (call.num_tokens, call.num_heads)
        results = (
            jax.ShapeDtypeStruct((*shape, call.value_dim), call.out_dtype),
            jax.ShapeDtypeStruct(shape, np.float32),
        )

        def run(operands):
            return triton_numpy.run(call, operands, GPU)[:2]

        return jax.pure_callback(run, results, operands)

    names = ("query", "key_cache", "value_cache", "sinks", "relative_bias", "scale")
    real = sum(problem.query_lens)

    def gradients(attend):
        def loss(floats):
            out, lse = attend(call, operands._replace(**floats))
            return jnp.sin(out[:real]).sum() + jnp.cos(lse[:real]).sum()

        return jax.grad(loss)({name: getattr(operands, name) for name in names})

    have, want = map(gradients, (gradient.differentiable(transforms.of(interpreted)), xla.run))
    for name in names:
        assert np.abs(want[name]).max() > 1e-3
        np.testing.assert_allclose(have[name], want[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_many_heads_per_kv_head():
    """Groups of more rows than a tile: several tiles read the same keys."""
    problem = problems.Problem(
        query_lens=(1, 2, 12), seq_lens=(150, 33, 40), num_heads=100, num_kv_heads=1
    )
    batch = problems.build(problem)
    budget.of(batch).check(*interpret(batch)[:2])


def test_more_sequences_than_one_chunk_of_the_plan():
    lens = tuple(int(n) for n in np.random.default_rng(0).integers(0, 40, 150))
    problem = problems.Problem(
        query_lens=(1,) * 150, seq_lens=lens, num_heads=2, num_kv_heads=1, head_dim=16, value_dim=16
    )
    batch = problems.build(problem)
    batch = dataclasses.replace(batch, kwargs=batch.kwargs | {"max_query_len": 1})
    chunked = triton_numpy.chunked_plan(64)
    with chunked:
        budget.of(batch).check(*interpret(batch)[:2])


@pytest.mark.parametrize("queries", [1, 20])
def test_blocks_outside_the_window_are_not_read(queries):
    problem = problems.Problem(
        query_lens=(queries,),
        seq_lens=(1000,),
        options=frozenset({"sliding_window"}),
        window=50,
        padded_seqs=0,
    )
    batch = problems.build(problem)
    _, _, buffers = interpret(batch, track=("key_cache", "value_cache", "block_tables"))
    table = np.asarray(batch.kwargs["block_tables"])[0]
    first = (1000 - queries - 50 + 1) // problem.block_size
    wanted = set(table[first : 1000 // problem.block_size + 1].tolist())
    block = problem.num_kv_heads * problem.block_size * problem.head_dim
    for name in ("key_cache", "value_cache"):
        assert {at // block for at in buffers[name].read} == wanted
    assert min(buffers["block_tables"].read) >= first


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_a_sequence_that_breaks_max_query_len_returns_nan(kind):
    problem = problems.Problem(query_lens=(3, 12, 1), seq_lens=(40, 12, 17))
    batch = problems.build(problem)
    bound = 2 if kind == "decode" else 11
    batch = dataclasses.replace(batch, kwargs=batch.kwargs | {"max_query_len": bound})
    out, lse, _ = interpret(batch)
    want = budget.of(batch).exact[0]
    broken = np.zeros(out.shape[0], bool)
    broken[: 15 if kind == "decode" else 0] = True
    broken[3:15] = True
    assert np.isnan(out[broken]).all()
    assert np.isnan(lse[broken]).all()
    np.testing.assert_allclose(out[:16][~broken[:16]], want[~broken[:16]], atol=1e-4)
    np.testing.assert_array_equal(out[16:], 0)


KINDS = pytest.mark.parametrize(
    "query_lens", [(3, 1, 3, 2), (3, 40, 12, 2), (40, 3, 12, 2)], ids=["decode", "mixed", "both"]
)


def bounded(query_lens: tuple[int, ...], **changes) -> problems.Batch:
    """A small batch that says how many query tokens its sequences have at most."""
    problem = problems.Problem(query_lens=query_lens, seq_lens=(40, 350, 12, 17), **changes)
    batch = problems.build(problem)
    return dataclasses.replace(batch, kwargs=batch.kwargs | {"max_query_len": max(query_lens)})


@KINDS
def test_sequences_that_break_a_promise_are_nan(query_lens):
    batch = bounded(query_lens)
    broken, sequences = promises.some_broken(batch)
    promises.check(batch, *interpret(broken)[:2], sequences)


@KINDS
@pytest.mark.parametrize("mistake", promises.MISTAKES)
def test_starts_that_say_nothing_are_nan_everywhere(mistake, query_lens):
    for found in interpret(promises.with_starts(bounded(query_lens), mistake))[:2]:
        assert np.isnan(found).all()


@KINDS
@pytest.mark.parametrize("options", [frozenset(), frozenset({"sinks", "logits_soft_cap"})])
def test_a_row_of_nan_shows_in_its_lse(query_lens, options):
    batch = bounded(query_lens, options=options | {"return_lse"})
    query = batch.query.copy()
    query[[0, 3]] = np.nan
    nan = np.isin(np.arange(len(query)), [0, 3])
    for found in interpret(dataclasses.replace(batch, query=query))[:2]:
        assert np.isnan(found[nan]).all()
        assert not np.isnan(found[~nan]).any()


@pytest.mark.parametrize("option", ["k_scale", "logits_soft_cap", "alibi_slopes"])
@pytest.mark.parametrize("times", [-0.7, 0.0])
def test_scales_that_are_not_positive(times, option):
    """Whole tiles of prefill take the scale for positive; here no tile may be one."""
    problem = problems.Problem(
        query_lens=(1, 70, 9), seq_lens=(40, 150, 100), **BF16, options=frozenset({option}),
        explicit_scale=True, scale_times=times,
    )  # fmt: skip
    batch = problems.build(problem)
    budget.of(batch).check(*interpret(batch)[:2])


def test_queries_beyond_float16_meet_an_8_bit_cache():
    """The dots are in float16 there; a bfloat16 query of 10^6 must not become infinite."""
    problem = problems.Problem(
        query_lens=(1, 9), seq_lens=(40, 60), query_dtype="bfloat16", format="fp8_e4m3",
        head_dim=80, value_dim=80,
    )  # fmt: skip
    batch = problems.build(problem)
    query = (batch.query.astype(np.float32) * 2.0**20).astype(jnp.bfloat16)
    scaled = dataclasses.replace(
        batch, query=query, kwargs=batch.kwargs | {"scale": problem.head_dim**-0.5 * 2.0**-20}
    )
    np.testing.assert_array_equal(interpret(batch)[0], interpret(scaled)[0])


@pytest.mark.parametrize(("name", "sm"), [("fp8_e4m3", 80), ("fp8_e4m3_token", 89)])
def test_e4m3_with_and_without_an_instruction_for_it(name, sm):
    """What an A100 reads by integers; newer GPUs convert it."""
    problem = problems.Problem(
        query_lens=(1, 12, 1), seq_lens=(70, 40, 3), query_dtype="bfloat16", format=name,
        head_dim=80, value_dim=80,
    )  # fmt: skip
    batch = problems.build(problem)
    gpu = machine.Machine(sm, 7)
    decode, *_ = triton_launch.launches(batch.call()[0], gpu)
    codes = "e4m3" if sm == 80 else ""
    assert codes == decode.constants.K_CODES
    budget.of(batch).check(*interpret(batch, gpu)[:2])


@pytest.mark.parametrize("times", [2.0**-60, 2.0**60])
def test_scales_of_values_beyond_float16(times):
    """Weights times such scales would be 0 or infinite in float16."""
    problem = problems.Problem(
        query_lens=(1, 9), seq_lens=(40, 60), query_dtype="bfloat16", format="int8",
        head_dim=80, value_dim=80,
    )  # fmt: skip
    batch = problems.build(problem)
    values = batch.value_cache
    values = values.replace(scale=values.scale * np.float32(times))
    changed = dataclasses.replace(batch, value_cache=values)
    have, want = (interpret(x)[0].astype(np.float64) for x in (changed, batch))
    np.testing.assert_array_equal(have, want * times)  # powers of two change exponents alone


@pytest.mark.parametrize("format", ["nvfp4", "int4", "int8"])
def test_values_that_end_within_a_group(format):
    """The first 24 numbers of every key are its value, one group of 16 and a part of the next."""
    problem = problems.Problem(
        query_lens=(1, 12), seq_lens=(70, 40), num_heads=4, num_kv_heads=1, query_dtype="bfloat16",
        format=format, head_dim=64, value_dim=24, options=frozenset({"value_dim", "return_lse"}),
    )  # fmt: skip
    batch = problems.build(problem)
    budget.of(batch).check(*interpret(batch)[:2])


# --- The fragments against spec.py, point by point ------------------------------------------------

POSITIONS = np.arange(-3, 12, dtype=np.int32)
WINDOWS = (None, 1, 2, 5, 2**31 - 1)
CODES = {True: 1, False: 0, "array": 2}


CHUNKS = (None, 1, 4, 2**31 - 1)


def masks(seq_len, causal, flag, window, chunk, end=None):
    """A fragment's masks, and which of them there are."""
    numbers = (seq_len, flag, window or 0, chunk or 0, 0 if end is None else end)
    static = types.SimpleNamespace(
        CAUSAL=CODES[causal],
        HAS_WINDOW=window is not None,
        HAS_CHUNK=chunk is not None,
        HAS_END=end is not None,
    )
    numbers = (triton_numpy.tensor(np.int32(x)) for x in numbers)
    return triton_numpy.fragments().SequenceSight(*numbers), static


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
    """Random masks; tokens within their words and past them, keys before the query tokens."""
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
    """All bytes, as words of a cache, in each dtype that products may take."""
    stored, codes, per_word = triton_launch.stored_as(format, machine.Machine(sm, 7))
    words = np.arange(256, dtype=np.uint8)
    want = np.asarray(format.decode(jnp.asarray(words.view(format.word_dtype))), np.float32)
    words = words.view(getattr(triton_numpy.language, stored)).reshape(4, -1)
    have = fragments.numbers_of(words, codes, dtype)
    assert have.dtype == (np.float16 if format.group else dtype)  # where scales are multiplied next
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


# --- Sizes ----------------------------------------------------------------------------------------


def test_parts_hold_every_head_size():
    for size in range(1, 577):
        first, second = triton_tiles.parts(size)
        assert first + second >= size
        assert first + second < 2 * max(size, 32)
        for part in (first, second):
            assert part & (part - 1) == 0
    assert triton_tiles.parts(576) == (512, 64)
    assert triton_tiles.parts(512) == (512, 0)
    assert triton_tiles.parts(80) == (64, 32)


@pytest.mark.parametrize("sm", [86, 89, 120])
def test_tiles_fit_where_a_block_has_99_kib(sm):
    """Every head size, format, group and kind of call, masks in turn; the count is held to the
    compiler's in test_triton_compiled.py. The largest is near enough to the limit to be worth a
    rule."""
    gpu = machine.Machine(sm, 60)
    assert gpu.block_shared == 99 * machine.KIB
    call = problems.build(problems.Problem(query_lens=(1, 12), seq_lens=(40, 17))).call()[0]
    largest = 0
    masks = itertools.cycle(
        [{}, {"bias_columns": 257}, {"tree_words": 2, "bias_columns": 257}, {"num_selected": 9}, {}]
    )
    for dtype, format in itertools.product(
        ("float32", "bfloat16", "float16"),
        (problems.FORMATS[f] for f in gpu_rows.TRITON.formats),
    ):
        for size, group, queries in itertools.product(
            (*range(16, 577, 16), 80, 576), (1, 8, 32, 128), (1, 4, 100)
        ):
            changed = dataclasses.replace(
                call, head_dim=size, value_dim=min(size, 512), num_heads=2 * group,
                num_kv_heads=2, query_dtype=dtype, key_format=format, value_format=format,
                max_query_len=queries, **next(masks),
            )  # fmt: skip
            for tiles in (
                triton_tiles.decode_tiles(changed, gpu),
                triton_tiles.prefill_tiles(changed, gpu),
            ):
                needed = triton_tiles.shared_bytes(changed, tiles)
                assert needed <= gpu.block_shared, (dtype, format.name, size, group, tiles)
                largest = max(largest, needed)
    assert largest > 60 * machine.KIB


def test_every_line_of_the_tables_is_taken():
    """A line that an earlier one hides would be a rule that no call follows."""
    widths = (16, 64, 96, 128, 160, 192, 256, 288, 512, 576)
    facts = [
        *itertools.product(triton_tiles.Arch, triton_tiles.ProductOperands, widths, (16, 32, 64))
    ]
    for table in (triton_tiles.DECODE, triton_tiles.PREFILL):
        taken = {next(i for i, rule in enumerate(table) if rule.fits(*f)) for f in facts}
        assert taken == set(range(len(table)))


def test_nvfp4_has_32_keys_or_more():
    """With 16, Triton 3.6 adds up every key's value twice: seen by executing its PTX."""
    call = problems.build(problems.Problem(query_lens=(1, 12), seq_lens=(40, 17))).call()[0]
    in_16_bits = 0
    for sm, dtype, keys, size, group in itertools.product(
        (80, 86, 90, 100, 120), calls.QUERY_DTYPES, problems.FORMATS.values(),
        (16, 64, 80, 128, 192, 256, 288, 512, 576), (1, 32, 64),
    ):  # fmt: skip
        gpu = machine.Machine(sm, 100)
        changed = dataclasses.replace(
            call, head_dim=size, value_dim=min(size, 512), num_heads=2 * group, num_kv_heads=2,
            query_dtype=dtype, key_format=keys, value_format=jattn.Nvfp4(), max_query_len=1,
        )  # fmt: skip
        assert min(triton_tiles.parts_of(changed, gpu, size)[0], 32) == 32
        if triton_tiles.dot_dtypes(changed)[1] == "float32":
            continue  # on plain cores
        in_16_bits += 1
        for pick in (triton_tiles.decode_tiles, triton_tiles.prefill_tiles):
            assert pick(changed, gpu).keys >= 32, (sm, dtype, keys, size, group)
    assert in_16_bits


def test_new_shapes_share_kernels():
    """Batch, tokens, table width and pool size are numbers of a kernel, never constants of it."""

    def constants(**sizes):
        problem = problems.Problem(query_lens=(1, 12), seq_lens=(40, 17), frame=(24, 4, 5, 16))
        call = problems.build(problem).call()[0]
        call = dataclasses.replace(call, **sizes)
        return [launch.constants for launch in triton_launch.launches(call, GPU)]

    assert constants() == constants(num_tokens=40, num_seqs=9, table_width=70, num_blocks=999)
    assert constants() != constants(head_dim=64)


def test_the_row_is_in_the_table():
    assert "triton" in jattn.support_table()
