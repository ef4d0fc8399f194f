"""Random calls of every implementation that runs here, against the oracle, with garbage around.

pytest -m extended tests/attention/test_random_calls.py                    # minutes
JATTN_RANDOM_CALLS=2000 pytest -m extended tests/attention/test_random_calls.py -k 'not oracle'
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.support import budget, dense, problems, random_calls, rows

MANY = int(os.environ.get("JATTN_RANDOM_CALLS", "24"))
ROW_OF = {row.implementation: row for row in rows.here(oracle=True)}


def check(
    row, seed: int, sizes: random_calls.Sizes = random_calls.SMALL, ulps: int = budget.ULPS
) -> None:
    problem = random_calls.draw(seed, row, sizes)
    batch = problems.build(problem)
    try:
        budget.of(batch, ulps).check(*batch.run(row.implementation))
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {problem}\n{error}") from error


@pytest.mark.parametrize("seed", range(2))
def test_random_calls(each_row, seed):
    check(each_row, seed)


@pytest.mark.extended
@pytest.mark.parametrize("row", rows.here(), ids=lambda row: row.implementation)
@pytest.mark.parametrize("seed", range(2, MANY))
def test_more_random_calls(row, seed):
    check(row, seed)


@pytest.mark.extended
@pytest.mark.skipif("native" not in ROW_OF, reason="no library")
@pytest.mark.parametrize("seed", range(MANY))
def test_calls_whose_keys_are_split(seed):
    """For long sequences, many heads and large head sizes, the native kernel splits and merges.

    It gets twice the ulps: a plain computation's error may be small by chance, and longer sums
    round more often.
    """
    check(ROW_OF["native"], seed, random_calls.LARGE, ulps=2 * budget.ULPS)


@pytest.mark.parametrize(
    "seed",
    [*range(12), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(12, 30))],
)
def test_the_oracle_agrees_with_dense_attention(seed):
    """They are two float64 computations that share no code."""
    batch = problems.build(random_calls.draw(seed, ROW_OF["reference"]))
    real = batch.view.starts[-1]
    for have, want in zip(batch.oracle(), dense.attend(batch.view), strict=True):
        np.testing.assert_allclose(have[:real], want, rtol=1e-9, atol=1e-9)


def test_every_option_and_format_is_drawn():
    row = ROW_OF["reference"]
    drawn = [random_calls.draw(seed, row) for seed in range(400)]
    assert set().union(*(problem.options for problem in drawn)) == set(row.options)
    assert {problem.format for problem in drawn} == set(row.formats)
    assert {problem.value_format for problem in drawn} == set(row.formats)
