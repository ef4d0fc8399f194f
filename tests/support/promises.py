"""Batches whose numbers break what callers promise, and the results they must have."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from tests.support import budget, problems

MISTAKES = ("begins at 1", "decreases", "wraps around", "passes T")  # of `query_start_loc`


def some_broken(batch: problems.Batch) -> tuple[problems.Batch, set[int]]:
    """Break the three longest sequences: an id of -1, an id of N, more keys than the table holds.

    Returns: the batch and these three sequences.
    """
    problem = batch.problem
    tables, lens = (np.array(batch.kwargs[name]) for name in ("block_tables", "seq_lens"))
    below, past, full = (int(b) for b in np.argsort(problem.seq_lens)[-3:])
    for b, bad in ((below, -1), (past, batch.call()[0].num_blocks)):
        tables[b, (problem.seq_lens[b] - 1) // problem.block_size] = bad
    lens[full] = tables.shape[1] * problem.block_size + 1
    changes = {"block_tables": jnp.asarray(tables), "seq_lens": jnp.asarray(lens)}
    return dataclasses.replace(batch, kwargs=batch.kwargs | changes), {below, past, full}


def with_starts(batch: problems.Batch, mistake: str) -> problems.Batch:
    """Return the batch with a mistake in `query_start_loc`."""
    starts = np.array(batch.kwargs["query_start_loc"])
    if mistake == "begins at 1":
        starts = np.maximum(starts, 1)  # and decreases nowhere
    elif mistake == "decreases":
        starts[2] = starts[3] + 1
    elif mistake == "wraps around":  # differences of int32 that are all positive
        starts[-2:] = 2**31 - 1, -(2**31)
    else:
        starts[-1] = batch.query.shape[0] + 1
    changes = {"query_start_loc": jnp.asarray(starts)}
    return dataclasses.replace(batch, kwargs=batch.kwargs | changes)


def check(batch: problems.Batch, out: np.ndarray, lse: np.ndarray, sequences: set[int]) -> None:
    """Check that the rows of `sequences` are NaN and all others are right."""
    allowed, starts = budget.of(batch), batch.view.starts
    broken = np.zeros(out.shape[0], bool)
    for b in sequences:
        broken[starts[b] : starts[b + 1]] = True
    assert broken.any()
    assert not broken.all()
    assert np.isnan(out[broken]).all()
    assert np.isnan(lse[broken]).all()
    real = int(starts[-1])
    fine = ~broken[:real]
    assert (np.abs(out[:real] - allowed.exact[0]) <= allowed.allowed[0])[fine].all()
    np.testing.assert_array_equal(out[real:], 0)
