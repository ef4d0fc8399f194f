"""Random ragged batches against the oracle, within the budget.

Lengths, tables, numbers and flags are random. There are few frames and sets of options, so that
hundreds of batches need only a handful of compilations.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jattn
from tests.support import budget, problems, random_calls

pytestmark = pytest.mark.usefixtures("each_row")

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True, database=None)
MORE = settings(max_examples=300, deadline=None, derandomize=True, database=None)
FRAME = (64, 6, 14, 40)
BLOCK = 8
KINDS = (
    {"options": frozenset({"return_lse"})},
    {
        "options": frozenset({"return_lse", "sliding_window", "is_causal_per_sequence", "sinks"}),
        "query_dtype": "bfloat16",
        "format": "bfloat16",
    },
    {
        "options": frozenset({"logits_soft_cap", "alibi_slopes", "k_scale", "v_scale"}),
        "query_dtype": "bfloat16",
        "format": "fp8_e4m3",
        "kv_layout": "NHD",
    },
)


@st.composite
def batches(draw) -> problems.Problem:
    """Draw up to six sequences whose tokens and blocks fit the frame."""
    kind = draw(st.sampled_from(KINDS))
    query_lens, seq_lens = draw(random_calls.lengths_within(FRAME, BLOCK))
    return problems.Problem(
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_size=BLOCK,
        head_dim=24,
        value_dim=16,
        frame=FRAME,
        window=draw(st.integers(1, 120)),
        explicit_scale=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
        **kind,
    )


def check(problem: problems.Problem) -> None:
    batch = problems.build(problem)
    budget.of(batch).check(*batch.run())


@SETTINGS
@given(batches())
def test_random_batches(problem):
    check(problem)


@pytest.mark.slow
@MORE
@given(batches())
def test_more_random_batches(problem):
    check(problem)


@SETTINGS
@given(st.data())
def test_written_tokens_are_read_back(data):
    """Each step of a random schedule writes to slots, attends, and matches a dense history."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    tables = rng.permutation(12).reshape(3, 4).astype(np.int32)
    caches = jattn.init_kv_cache(12, 2, 4, 16, value_dim=8, format=jattn.Dense("float32"))
    history = [np.zeros((0, 2, 24), np.float32) for _ in range(3)]
    for _ in range(3):
        room = [16 - len(past) for past in history]
        counts = [data.draw(st.integers(0, min(5, left))) for left in room]
        new = [rng.standard_normal((n, 2, 24)).astype(np.float32) for n in counts]
        history = [np.concatenate(pair) for pair in zip(history, new, strict=True)]
        lens = [len(past) for past in history]
        meta = jattn.AttentionMetadata.from_lengths(counts, lens, tables, 4)
        meta = meta.pad_to(num_tokens=15)
        meta.check(num_blocks=12, block_size=4)
        rows = np.full((15, 2, 24), np.nan, np.float32)
        rows[: sum(counts)] = np.concatenate(new)
        caches = jattn.update_kv_cache(
            *caches,
            jnp.asarray(rows[..., :16]),
            jnp.asarray(rows[..., 16:]),
            jnp.asarray(meta.slot_mapping),
        )
        for b, past in enumerate(history):
            at = np.arange(len(past))
            where = tables[b, at // 4], slice(None), at % 4
            np.testing.assert_array_equal(np.asarray(caches[0].data)[where], past[..., :16])
            np.testing.assert_array_equal(np.asarray(caches[1].data)[where], past[..., 16:])
    untouched = np.ones((12, 4), bool)
    for b, past in enumerate(history):
        at = np.arange(len(past))
        untouched[tables[b, at // 4], at % 4] = False
    words = np.asarray(caches[0].data).swapaxes(1, 2)
    np.testing.assert_array_equal(words[untouched], 0)
