"""Mosaic GPU's entry: which kernel runs which sequences, and the shape of the result.

Sequences of 1 to 8 query tokens take the decode kernel, which reads K and V once for all of them;
longer ones take the prefill kernel. Only the device knows which is which, so a call whose
`max_query_len` allows both compiles both, and each finds nothing to do for the other's sequences.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn import call as calls
from jattn import capability
from jattn.pallas import promises
from jattn.pallas.machine import DECODE_TOKENS
from jattn.pallas.mosaic_gpu.decode import kernel as decode
from jattn.varying import as_varying, axes_of


def run(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """Return `(out [T, H, V] in the output dtype, lse [T, H] float32)`.

    Tokens past `query_start_loc[B]` are zeros and -inf; both kernels write NaN for sequences that
    break a promise.
    """
    lengths = {"seq_lens": operands.seq_lens, "query_start_loc": operands.query_start_loc}
    for name, x in lengths.items():
        if axes := ", ".join(map(repr, sorted(axes_of(x)))):
            # A kernel's loops depend on lengths, and Pallas does not type their results as varying.
            raise capability.UnsupportedError(
                f"paged_attention: implementation 'mosaic_gpu': {name} varies over {axes}, which "
                "it takes only in jax.shard_map(..., check_vma=False); implementation='triton' "
                "takes it anywhere"
            )
    # Decode meets every id that a sequence uses; a tile of prefill only those that it sees.
    operands = promises.marked(call, operands, ids=call.max_query_len > DECODE_TOKENS)
    starts = operands.query_start_loc
    counts = starts[1:] - starts[:-1]
    short = jnp.where(counts <= DECODE_TOKENS, counts, 0)
    if call.max_query_len > DECODE_TOKENS:
        from jattn.pallas.mosaic_gpu.prefill import kernel as prefill

        # Prefill has most of the tokens of a mixture, so decode's rows go into its result. It also
        # handles sequences that are too long, and padding.
        long = jnp.where(counts > DECODE_TOKENS, counts, 0)
        others = as_varying(prefill.run(call, operands, long), operands)
        return decode.run(call, operands, short, DECODE_TOKENS, others=others)
    return decode.run(call, operands, short, call.max_query_len)
