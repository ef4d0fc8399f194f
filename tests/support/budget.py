"""How far from the oracle a result may be: a budget, never a constant.

A plain computation in the call's own precision makes some error against the float64 oracle. For
the same sequence a kernel may make twice that error, plus a few units in the last place of its
results and of the float32 logits under every softmax. So the tolerance follows from the dtypes, the
head size, the lengths and the options, and `tests/support/wrong.py` keeps it honest.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import jattn
from tests.support import dense, problems

ULPS = 2


@dataclasses.dataclass(frozen=True)
class Budget:
    """The oracle's result and, per sequence, how far another result may be from it."""

    batch: problems.Batch
    exact: tuple[np.ndarray, np.ndarray]  # out, lse of the real tokens, float64
    allowed: tuple[np.ndarray, np.ndarray]  # the same shapes

    def violations(self, out: np.ndarray, lse: np.ndarray | None = None) -> list[str]:
        """Return errors outside the budget, a line per sequence and result, ignoring padding."""
        found = []
        starts = self.batch.view.starts
        for name, have, exact, allowed in zip(
            ("out", "lse"), (out, lse), self.exact, self.allowed, strict=True
        ):
            if have is None:
                continue
            have = np.asarray(have)[: starts[-1]].astype(np.float64)
            same = have == exact  # equal infinities
            with np.errstate(invalid="ignore"):
                error = np.where(same, 0.0, np.abs(have - exact))
            for b in range(len(starts) - 1):
                rows = slice(starts[b], starts[b + 1])
                bad = ~(error[rows] <= allowed[rows])  # NaN is bad
                if bad.any():
                    worst = np.unravel_index(np.nanargmax(np.where(bad, 1, 0)), bad.shape)
                    over = np.max(np.where(bad, error[rows] / allowed[rows], 0))
                    found.append(
                        f"{name} of sequence {b} ({starts[b + 1] - starts[b]} queries, "
                        f"{self.batch.problem.seq_lens[b]} keys): {int(bad.sum())} of {bad.size} "
                        f"outside, up to {over:.3g} times the budget, first at {worst}: "
                        f"{have[rows][worst]:.9g}, exact {exact[rows][worst]:.9g}"
                    )
        return found

    def check(self, out: np.ndarray, lse: np.ndarray | None = None) -> None:
        """Assert that a result is within the budget, and that rows of padding are zeros."""
        found = self.violations(out, lse)
        assert not found, "\n".join(found)
        real = self.batch.view.starts[-1]
        np.testing.assert_array_equal(np.asarray(out)[real:].astype(np.float32), 0)
        if lse is not None:
            np.testing.assert_array_equal(np.asarray(lse)[real:], -np.inf)


def plain_dtype(problem: problems.Problem) -> Any:
    """The dtype in which plain code would multiply: what query and cache promote to."""
    query = jnp.dtype(problem.query_dtype)
    stored = {problem.format, problem.value_format or problem.format}
    floats = {jnp.dtype(name) for name in stored if name in jattn.Dense.dtypes}
    return query if floats <= {query} else np.dtype(np.float32)


def of(batch: problems.Batch, ulps: int = ULPS) -> Budget:
    """Return the budget of a batch; it includes `ulps` units in the last place."""
    problem, view = batch.problem, batch.view
    real = view.starts[-1]
    out, lse = (x[:real] for x in batch.oracle())
    out_dtype = jnp.dtype(batch.kwargs.get("out_dtype") or problem.query_dtype)
    plain_out, plain_lse = dense.attend(view, plain_dtype(problem))
    plain_out = plain_out.astype(out_dtype).astype(np.float64)
    return Budget(
        batch,
        (out, lse),
        (
            _allowed(view, plain_out, out, out_dtype, lse, ulps),
            _allowed(view, plain_lse.astype(np.float64), lse, np.dtype(np.float32), None, ulps),
        ),
    )


def _allowed(
    view: dense.View,
    plain: np.ndarray,
    exact: np.ndarray,
    dtype: Any,
    lse: np.ndarray | None,
    ulps: int,
) -> np.ndarray:
    """Return the budget of each number; pass `lse` if they are softmax-weighted sums."""
    with np.errstate(invalid="ignore"):
        error = np.where(plain == exact, 0.0, np.abs(plain - exact))
    finite = np.where(np.isfinite(exact), exact, 0.0)
    allowed = ulps * np.abs(np.spacing(finite.astype(dtype)).astype(np.float64))
    for b in range(view.num_seqs):
        rows = slice(view.starts[b], view.starts[b + 1])
        if rows.stop > rows.start:
            top = np.abs(finite[rows]).max()
            unit = _ulp(top)
            if lse is not None:
                # An error of one ulp in a float32 logit is that relative error in its weight.
                unit = top * _ulp(np.where(np.isfinite(lse[rows]), np.abs(lse[rows]), 0).max())
            allowed[rows] += 2 * error[rows].max() + ulps * unit
    return allowed


def _ulp(x: float) -> float:
    """A float32 ulp of `x`, or of 1 where that is larger."""
    return float(np.spacing(np.float32(max(x, 1.0))))
