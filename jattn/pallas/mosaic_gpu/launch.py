"""Mosaic GPU's entry: which kernel runs which sequences, and the shape of the result.

Sequences of 1 to 8 query tokens take the decode kernel, which reads K and V once for all of them;
longer ones the prefill kernel. Which is which only the device knows, so a call whose
`max_query_len` allows both compiles both, and each finds nothing to do for the other's sequences.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn import call as calls
from jattn.pallas import promises
from jattn.pallas.machine import DECODE_TOKENS
from jattn.pallas.mosaic_gpu.decode import kernel as decode


def run(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """`(out [T, H, V] in the output dtype, lse [T, H] float32)`.

    Tokens past `query_start_loc[B]` are zeros and -inf; both kernels write NaN for sequences that
    break a promise.
    """
    # Decode meets every id that a sequence uses; a tile of prefill only those that it sees.
    operands = promises.marked(call, operands, ids=call.max_query_len > DECODE_TOKENS)
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
    return decode.run(call, operands, short, call.max_query_len)
