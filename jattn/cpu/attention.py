"""The XLA path's entry: which loop runs which sequences, and the shape of the result."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn import call as calls
from jattn.cpu import ragged


def run(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """`(out [T, H, V] in the output dtype, lse [T, H] float32)`."""
    out, lse = ragged.run(call, operands)
    out = out.transpose(1, 0, 2, 3).reshape(call.num_tokens, call.num_heads, call.value_dim)
    lse = lse.transpose(1, 0, 2).reshape(call.num_tokens, call.num_heads)
    return out.astype(jnp.dtype(call.out_dtype)), lse
