"""A GPU implementation under JAX's transformations."""

from __future__ import annotations

import functools

import jax

from jattn import call as calls
from jattn.call import batching
from jattn.varying import as_varying


def of(run: calls.Run) -> calls.Run:
    """Make `run(call, operands)` work under `jax.vmap`, one by one, and under `jax.shard_map`."""
    one = batching.one_by_one(run)

    @functools.wraps(run)
    def transformed(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
        # Under `jax.shard_map` kernels' results count as the same on all devices, even where an
        # operand varies.
        return as_varying(one(call, operands), operands)

    return transformed
