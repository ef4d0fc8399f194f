"""The Triton kernels interpreted on NumPy, with the usual matrix, budgets and wrong kernels.

Ids read like `triton-head512-block16-bf16-window-hnd-group2-mixed-words`, as in test_matrix.py,
where the same cases run on a GPU. Here the same source runs on `triton_numpy.py`, on a machine of 7
programs, so that most sequences are split over several.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import call as calls
from jattn.cpu.xla import attention as xla
from jattn.cpu.xla import gradient
from jattn.pallas import capability_rows as gpu_rows
from jattn.pallas import machine, transforms
from jattn.pallas.triton import launch as triton_launch
from tests.support import budget, matrix, problems, promises, random_calls, triton_numpy, wrong

GPU = machine.Machine(sm=90, cores=7)
CASES = matrix.sample(gpu_rows.TRITON)[::3]  # only every third of them, since they take long
SAMPLED = set(CASES)
BF16 = {"query_dtype": "bfloat16", "format": "bfloat16"}
EVERYTHING = frozenset(calls.CORE_OPTIONS) - {"not_causal"}


def interpret(batch: problems.Batch, gpu: machine.Machine = GPU, track: tuple[str, ...] = ()):
    """Interpret the batch's kernels, and return `(out, lse, buffers)`."""
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


@pytest.mark.rotated
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
    """Return `(name, text, its replacement)`, a single mistake in the kernels each."""
    return (
        ("window", "q_pos - k_pos < sight.limits.window", "q_pos - k_pos <= sight.limits.window"),
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
    """Return `(name, options, text, its replacement)`, a single mistake in a mask each."""
    return (
        ("end", AHEAD, "reach | (k_pos < sight.visible_end)", "reach"),
        ("window ahead", AHEAD, "| (sight.is_causal != 0))", ")"),
        ("path", DRAFTED, "on_path & visible(q_pos, keys", "visible(q_pos, keys"),
        ("depth", DRAFTED, "first + depth_of(tree, index, real, C)", "positions"),
        ("distance", DRAFTED, "keys = q_pos - distance", "keys = keys"),
        ("word", DRAFTED, "at = key - 32 * word", "at = key"),
        ("bias", DRAFTED, "-EXTENT), EXTENT) + EXTENT", "-EXTENT), EXTENT)"),
        ("far", DRAFTED, "last - rows.lowest > -EXTENT", "last - rows.lowest > 0"),
        ("token", DRAFTED, "index = out_row", "index = query_head"),
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
            found = [str(error)]  # the interpreter raised: written twice, out of bounds
        assert found


@pytest.mark.parametrize("cores", [pytest.param(1, marks=pytest.mark.slow), 3, 11])
def test_any_number_of_programs(cores):
    """Sequences are whole, split in two, or split over many; some have draft tokens."""
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
    """If prefill has too few rows to keep the GPU busy, decode takes them all, in several tiles."""
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
    """With decode whole and split, prefill in several tiles, and blocks below and above a tile."""
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
    """The last key before the query tokens ends within a tile, and every token is a root."""
    problem = problems.Problem(
        query_lens=(50,), seq_lens=(177,), padded_seqs=0, options=frozenset({"tree_mask"}),
        head_dim=16, value_dim=16,
    )  # fmt: skip
    batch = problems.build(problem)
    mask = np.zeros((batch.query.shape[0], 50), bool)
    batch = dataclasses.replace(
        batch,
        kwargs=batch.kwargs | {"tree_mask": jnp.asarray(mask)},
        view=batch.view.replace(parents=[np.full(50, -1)]),
    )
    allowed = budget.of(batch)
    allowed.check(*interpret(batch)[:2])
    with triton_numpy.edited("tl.minimum(whole_to, tl.maximum(rows.first, 0))", "whole_to"):
        assert allowed.violations(*interpret(batch)[:2])


@pytest.mark.parametrize("hidden", [-np.inf, np.finfo(np.float32).min])
def test_biases_that_hide_keys(hidden):
    """Keys far back, where prefill masks nothing, get the table's first number."""
    problem = problems.Problem(
        query_lens=(40, 1), seq_lens=(300, 290), head_dim=16, value_dim=16,
        options=frozenset({"relative_bias", "return_lse"}),
    )  # fmt: skip
    batch = problems.build(problem)
    table = np.array(batch.kwargs["relative_bias"])
    table[:, :17] = hidden
    batch = dataclasses.replace(
        batch,
        kwargs=batch.kwargs | {"relative_bias": jnp.asarray(table)},
        view=batch.view.replace(bias=table.astype(np.float64)),
    )
    budget.of(batch).check(*interpret(batch)[:2])


@pytest.mark.rotated
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.extended)
                                               for n in range(4, 60))])  # fmt: skip
def test_random_calls(seed):
    """With any sizes, formats and options that make sense together."""
    batch = problems.build(random_calls.draw(seed, gpu_rows.TRITON))
    while gpu_rows.TRITON.refuses(batch.call()[0]):  # a size that the format does not support
        seed += 1000
        batch = problems.build(random_calls.draw(seed, gpu_rows.TRITON))
    budget.of(batch).check(*interpret(batch)[:2])


def test_gradients_are_xlas():
    """The XLA path's backward pass uses the kernels' out and lse."""
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
            # All weights of lse are positive, so that terms of the scale's gradient do not cancel.
            weights = jnp.linspace(1, 2, real)[:, None]
            return jnp.sin(out[:real]).sum() + (lse[:real] * weights).sum()

        return jax.jit(jax.grad(loss))({name: getattr(operands, name) for name in names})

    have, want = map(gradients, (gradient.differentiable(transforms.of(interpreted)), xla.run))
    for name in names:
        assert np.abs(want[name]).max() > 1e-3
        np.testing.assert_allclose(have[name], want[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_many_heads_per_kv_head():
    """If a group has more rows than a tile, several tiles read the same keys."""
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
    """Build a small batch with a bound on query tokens per sequence."""
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
def test_invalid_starts_are_nan_everywhere(mistake, query_lens):
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
    """Whole tiles of prefill assume a positive scale: here no tile may be treated as whole."""
    problem = problems.Problem(
        query_lens=(1, 70, 9), seq_lens=(40, 150, 100), **BF16, options=frozenset({option}),
        explicit_scale=True, scale_times=times,
    )  # fmt: skip
    batch = problems.build(problem)
    budget.of(batch).check(*interpret(batch)[:2])


def test_queries_beyond_float16_meet_an_8_bit_cache():
    """Its products are in float16, where a bfloat16 query of 10^6 must not become infinite."""
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
    """An A100 decodes it with integers; newer GPUs have a conversion."""
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
    np.testing.assert_array_equal(have, want * times)  # powers of two change only exponents


@pytest.mark.parametrize("format", ["nvfp4", "int4", "int8"])
def test_values_that_end_within_a_group(format):
    """The first 24 numbers of a key are its value: one group of 16 and half of the next."""
    problem = problems.Problem(
        query_lens=(1, 12), seq_lens=(70, 40), num_heads=4, num_kv_heads=1, query_dtype="bfloat16",
        format=format, head_dim=64, value_dim=24, options=frozenset({"value_dim", "return_lse"}),
    )  # fmt: skip
    batch = problems.build(problem)
    budget.of(batch).check(*interpret(batch)[:2])
