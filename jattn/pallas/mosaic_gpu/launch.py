"""Mosaic GPU's entry: which kernel runs which sequences, and the shape of the result.

Sequences of 1 to 8 query tokens take the decode kernel, which reads K and V once for all of them;
longer ones the prefill kernel. Which is which only the device knows, so a call whose
`max_query_len` allows both compiles both, and each finds nothing to do for the other's sequences.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn import call as calls
from jattn.pallas.machine import DECODE_TOKENS
from jattn.pallas.mosaic_gpu.decode import kernel as decode


def run(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """`(out [T, H, V] in the output dtype, lse [T, H] float32)`.

    Tokens past `query_start_loc[B]` are zeros and -inf; those of a sequence longer than
    `max_query_len` NaN.
    """
    starts = operands.query_start_loc
    counts = starts[1:] - starts[:-1]
    short = jnp.where(counts <= DECODE_TOKENS, counts, 0)
    if call.max_query_len > DECODE_TOKENS:
        from jattn.pallas.mosaic_gpu.prefill import kernel as prefill

        # Prefill has most of the tokens of a mixture, so decode's rows go into its result. It also
        # has the sequences that are too long, and padding.
        long = jnp.where(counts > DECODE_TOKENS, counts, 0)
        return decode.run(
            call, operands, short, DECODE_TOKENS, others=prefill.run(call, operands, long)
        )
    out, lse = decode.run(call, operands, short, call.max_query_len)
    if not call.ragged:
        return out, lse
    broken = _per_token(call, starts, counts > call.max_query_len)
    out = jnp.where(broken[:, None, None], jnp.full_like(out, jnp.nan), out)
    return out, jnp.where(broken[:, None], jnp.full_like(lse, jnp.nan), lse)


def _per_token(call: calls.Call, starts: jax.Array, of_sequence: jax.Array) -> jax.Array:
    """bool [T]: what holds for each token's sequence; False for padding."""
    tokens = jnp.arange(call.num_tokens, dtype=jnp.int32)
    b = sequence_of(call, starts, tokens)
    return of_sequence[b] & (tokens < starts[-1])


def sequence_of(call: calls.Call, starts: jax.Array, tokens: jax.Array) -> jax.Array:
    """int32 [T]: the sequence a token belongs to, clipped to the last for padding."""
    # By comparing all pairs: one fusion, where a search would be a loop of launches.
    b = jnp.searchsorted(starts, tokens, side="right", method="compare_all").astype(jnp.int32) - 1
    return jnp.clip(b, 0, call.num_seqs - 1)
