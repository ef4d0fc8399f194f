"""The matrix: what a capability row claims runs; what it does not claim is refused for that reason.

Ids read like `xla-head512-block16-bf16-window-hnd-group2-mixed-words`: implementation, head size
(`head576v512` where V differs), block size, query dtype and cache format, option, layout, group,
`mixed` (prefill and decode) or `decode`, and `KVArray` words or plain arrays. So
`pytest -k head512` runs the tests of one head size.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import call as calls
from jattn import capability, formats, implementations
from tests.support import budget, matrix, problems, wrong

ROWS = {row.implementation: row for row in implementations.ROWS}
# The others are compared with the oracle; test_spec.py checks the oracle independently.
KERNELS = [row for row in implementations.ROWS if row.implementation != "reference"]
RUNS = [row for row in KERNELS if not row.missing()]
REFUSES = [row for row in KERNELS if row.missing()]
REPEATS = 3  # further runs on a GPU, which must not differ in a bit
# Tensor cores add products with fewer bits than float32 has. On an H100 the lse of products of 512
# numbers was off by up to 1.5 times the budget for addition in float32.
GPU_ULPS = 4
CASES = [case for row in RUNS for case in matrix.sample(row)]
DESIGNED = [case for row in RUNS for case in matrix.default(row)]

struct = jax.ShapeDtypeStruct
by_id = functools.partial(pytest.mark.parametrize, "case", ids=lambda case: case.id)


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.implementation)
def test_a_row_is_refused_on_a_machine_that_it_does_not_name(row, monkeypatch):
    monkeypatch.setattr(capability.device, "platform", lambda: "tpu")
    said = f"it runs on {', '.join(row.devices)}, and this is tpu"
    assert (said in row.missing()) == (row.devices != ("any",))


def check(case: matrix.Case) -> None:
    """Check that the result is within the budget, which rejects every wrong kernel that applies.

    If the row claims each feature but refuses the combination, check that refusal instead.
    """
    batch = problems.build(case.problem())
    if reasons := ROWS[case.implementation].refuses(batch.call()[0]):
        with pytest.raises(jattn.UnsupportedError, match=re.escape(reasons[0])):
            batch.run(case.implementation)
        return
    allowed = budget.of(batch, GPU_ULPS if jax.default_backend() == "gpu" else budget.ULPS)
    out = batch.run(case.implementation)
    allowed.check(*out)
    # A race between a kernel's warps may show in some runs only.
    for _ in range(REPEATS if jax.default_backend() == "gpu" else 0):
        jax.tree.map(np.testing.assert_array_equal, out, batch.run(case.implementation))
    passed = [name for name, kernel in wrong.kernels(batch) if not allowed.violations(*kernel())]
    assert not passed, f"within the budget: {passed}"


@by_id(CASES)
def test_claimed(case):
    check(case)


@pytest.mark.extended
def test_every_wrong_kernel_is_tried():
    """Each of them applies to some case of the sample."""
    left = set(wrong.NAMES)
    for case in CASES:
        names = {name for name, _ in wrong.kernels(problems.build(case.problem()))}
        assert names <= set(wrong.NAMES)
        left -= names
        if not left:
            return
    raise AssertionError(f"tried nowhere: {left}")


SAMPLED = set(CASES)


@pytest.mark.rotated
@pytest.mark.extended
@by_id([case for case in DESIGNED if case not in SAMPLED])
def test_claimed_pairwise(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("row", RUNS, ids=lambda row: row.implementation)
@pytest.mark.parametrize("head", sorted({case.head for case in DESIGNED}), ids=matrix.head_name)
def test_claimed_thoroughly(row, head):
    failed = {}
    for n, case in enumerate(matrix.thorough(row)):
        if n % 200 == 0:
            jax.clear_caches()  # each program maps memory, and a process may have 65,530 mappings
        if case.head == head and case not in DESIGNED:
            try:
                check(case)
            except AssertionError as error:
                failed[case.id] = str(error)
    assert not failed


def test_every_claim_is_in_the_sample():
    for row in RUNS:
        mine = [case for case in CASES if case.implementation == row.implementation]
        for factor, levels in matrix.factors(row).items():
            assert {getattr(case, factor) for case in mine} == set(levels), factor
        full = [case for case in mine if case.head == (matrix.FULL_SIZE, matrix.FULL_SIZE)]
        for factor, levels in matrix.factors(row).items():
            if factor != "head":
                assert {getattr(case, factor) for case in full} == set(levels), factor


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.implementation)
def test_every_size_of_a_row_has_a_case(row):
    for cases in (matrix.sample(row), matrix.default(row)):
        assert {case.head[0] for case in cases} == {*row.head_dims.tested}
        assert {case.head[1] for case in cases} == {*row.value_dims.tested}
        assert {case.block_size for case in cases} == {*row.block_sizes.tested}


def arguments_of(
    *,
    head_dim: int = 64,
    value_dim: int = 64,
    block_size: int = 16,
    query_dtype: str = "bfloat16",
    format: str = "bfloat16",
    kv_layout: str = "HND",
    options: tuple[str, ...] = (),
) -> dict:
    """Return a call's arguments as ShapeDtypeStructs, with KVArrays as caches."""
    kind = problems.FORMATS[format]

    def cache(dim: int) -> jattn.KVArray:
        inner = (block_size, 2) if kv_layout == "NHD" else (2, block_size)
        words = struct((8, *inner, dim // kind.values_per_word), kind.word_dtype)
        shapes = kind.quant_param_shapes(words.shape, kv_layout)
        scale, zero = (x and struct(x, jnp.float32) for x in (shapes.scale, shapes.zero))
        groups = shapes.group_scale and struct(shapes.group_scale, jnp.uint8)
        return jattn.KVArray(words, scale, kind, zero, groups, kv_layout)

    given = {
        "query": struct((3, 4, head_dim), jnp.dtype(query_dtype)),
        "key_cache": cache(head_dim),
        "value_cache": cache(value_dim),
        "block_tables": struct((3, 5), jnp.int32),
        "seq_lens": struct((3,), jnp.int32),
        "kv_layout": kv_layout,
    }
    values = {
        "not_causal": ("is_causal", False),
        "is_causal_per_sequence": ("is_causal", struct((3,), jnp.bool_)),
        "sliding_window": ("sliding_window", 5),
        "logits_soft_cap": ("logits_soft_cap", 5.0),
        "sinks": ("sinks", struct((4,), jnp.float32)),
        "alibi_slopes": ("alibi_slopes", struct((4,), jnp.float32)),
        "k_scale": ("k_scale", struct((2,), jnp.float32)),
        "v_scale": ("v_scale", 0.5),
        "return_lse": ("return_lse", True),
        "attention_chunk_size": ("attention_chunk_size", 8),
        "visible_end": ("visible_end", struct((3,), jnp.int32)),
        "tree_mask": ("tree_mask", struct((3, 1), jnp.uint32)),
        "selected_blocks": ("selected_blocks", struct((3, 2), jnp.int32)),
        "relative_bias": ("relative_bias", struct((4, 9), jnp.float32)),
        "sinks_per_token": ("sinks", struct((3, 4), jnp.float32)),
        "value_dim": ("value_dim", value_dim),
    }
    if "value_dim" in options:
        given["value_cache"] = None
    if kv_layout == formats.ROWS_LAYOUT:
        words = struct((8, block_size, 2, head_dim + value_dim), kind.word_dtype)
        sizes = (2, head_dim, head_dim + value_dim, head_dim, value_dim)
        given |= {"key_cache": jattn.KVRows(words, *sizes, kind), "value_cache": None}
        given["kv_layout"] = None
    return given | dict(values[option] for option in options)


def of_case(case: matrix.Case) -> dict:
    return arguments_of(
        head_dim=case.head[0],
        value_dim=case.head[1],
        block_size=case.block_size,
        query_dtype=case.query_dtype,
        format=case.format,
        kv_layout=case.kv_layout,
        options=case.option,
    )


@pytest.mark.parametrize("row", REFUSES, ids=lambda row: row.implementation)
def test_a_row_that_refuses_says_only_why(row):
    name = row.implementation
    for case in matrix.default(row):
        why = jattn.explain(**of_case(case), implementation=name)
        assert why.refusals == {name: (*row.missing(), *row.refuses(why.call))}, case.id
        assert why.taken is None
    with pytest.raises(jattn.UnsupportedError, match=re.escape(row.missing()[0])):
        jattn.paged_attention(**of_case(case), implementation=name)


def unclaimed() -> list:
    """Return `(row, words of the reason, arguments)` for what each row does not claim."""
    found = []
    for row in KERNELS:

        def add(reason: str, row=row, **changes) -> None:
            label = f"{row.implementation}-{reason.replace(' ', '_')}"
            found.append(pytest.param(row, reason, arguments_of(**changes), id=label))

        sizes = (
            ("head size D", "head_dim", row.head_dims),
            ("value size V", "value_dim", row.value_dims),
            ("block size S", "block_size", row.block_sizes),
        )
        for words, name, limits in sizes:
            add(f"{words} is {limits.high + 1}", **{name: limits.high + 1})
            if limits.low > 1:
                add(f"{words} is {limits.low - 1}", **{name: limits.low - 1})
            if limits.multiple_of > 1:
                add(f"{words} is {limits.low + 1}", **{name: limits.low + 1})
        for dtype in set(calls.QUERY_DTYPES) - set(row.query_dtypes):
            add(f"query dtype is {dtype}", query_dtype=dtype)
        for format in set(problems.FORMATS) - set(row.formats):
            add(f"key cache format is {format}", format=format)
        for layout in set(formats.ALL_LAYOUTS) - set(row.layouts):
            add(f"kv_layout is {layout}", kv_layout=layout)
        for option in set(calls.OPTIONS) - set(row.options):
            add(f"option {option} is not supported", options=(option,))
    return sorted(found, key=lambda param: param.id)


@pytest.mark.parametrize(("row", "reason", "given"), unclaimed())
def test_unclaimed(row, reason, given):
    name = row.implementation
    with pytest.raises(jattn.UnsupportedError, match=rf"\n  - {name}: ") as error:
        jattn.paged_attention(**given, implementation=name)
    assert reason in str(error.value)
    # The call has no other refusals: one reason, or two where arguments come in pairs (the
    # output has the query's dtype, and both caches have one format).
    pairs = reason.startswith(("query dtype", "key cache format"))
    refusals = jattn.explain(**given, implementation=name).refusals[name]
    assert len(refusals) == len(row.missing()) + (2 if pairs else 1)


def test_a_narrow_row_gives_every_reason():
    row = dataclasses.replace(
        ROWS["xla"], formats=("float32",), layouts=("HND",), options=(), query_dtypes=("float32",)
    )
    options = tuple(matrix.EVERYTHING)
    given = arguments_of(kv_layout="NHD", format="float16", options=options)
    reasons = row.refusals(calls.describe_call(calls.Arguments(**given)))
    assert reasons == [
        "query dtype is bfloat16; it takes float32",
        "output dtype is bfloat16; it takes float32",
        "key cache format is float16; it takes float32",
        "value cache format is float16; it takes float32",
        "kv_layout is NHD; it takes HND",
        *(f"option {option} is not supported" for option in sorted(options)),
    ]
