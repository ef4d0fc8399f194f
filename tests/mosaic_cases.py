"""Small ragged batches for the Mosaic GPU kernels, and how to run them without a GPU.

The interpreter steps through every barrier and copy in Python, so a case here is a handful of
tiles: enough for a sequence that ends within a kernel block, one that is split between blocks of
the grid, an empty one, and one that is not.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import problems
import pytest

SKIP_REASON = "the Mosaic GPU kernels need jax 0.11.2 or newer (Python 3.12 or newer)"
NEW_ENOUGH = jax.__version_info__ >= (0, 11, 2)
needs_mosaic = pytest.mark.skipif(not NEW_ENOUGH, reason=SKIP_REASON)


def interpret(
    batch: problems.Batch, *, detect_races: bool = False, num_cores: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """`(out, lse)` of a batch from `mosaic_launch.run`, interpreted on the CPU."""
    from jattn.pallas import mosaic_compat, mosaic_launch

    call, operands = batch.call()

    def run(operands: Any) -> Any:
        return mosaic_launch.run(call, operands)

    with mosaic_compat.interpreted(detect_races=detect_races, num_cores=num_cores):
        out, lse = jax.jit(run)(operands)
        return np.asarray(out), np.asarray(lse)
