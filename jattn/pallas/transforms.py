"""JAX's transformations of a GPU implementation: `vmap`, and no gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jattn import call as calls
from jattn import capability
from jattn.call import batching
from jattn.varying import as_varying


def of(implementation: str, run: calls.Run) -> calls.Run:
    """`run(call, operands)` for callers: a batch of `jax.vmap` runs one by one.

    Derivatives raise `UnsupportedError`.
    """
    one = batching.one_by_one(run)

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    @functools.wraps(run)
    def transformed(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
        # Under `jax.shard_map` kernels' results count as the same on all devices, even where an
        # operand varies.
        return as_varying(one(call, operands), operands)

    @transformed.defjvp
    def _no_gradients(call: calls.Call, primals: Any, tangents: Any) -> Any:
        raise capability.UnsupportedError(
            f"paged_attention: implementation {implementation!r} has no gradients; "
            "implementation='xla' has"
        )

    return transformed
