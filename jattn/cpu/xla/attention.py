"""The XLA path's entry: which loop runs which sequences, and the shape of the result.

Sequences with one query token (or a few, when no sequence has more) take the decode loop, all
others the prefill loop. Only the device knows which is which, so a mixed call compiles both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jattn import call as calls
from jattn import softmax
from jattn.cpu.xla import decode, gradient, kv_loop, pool, prefill, tiles
from jattn.formats import rounding
from jattn.varying import axes_along, on_automatic_axes


@gradient.differentiable
def run(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """Return `(out [T, H, V] in the output dtype, lse [T, H] float32)`; differentiable."""
    rows = axes_along(operands.query, 2)
    return on_automatic_axes(lambda x: _attend(call, x), operands, (rows, rows))


def _attend(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    starts = operands.query_start_loc
    broken, all_broken = calls.broken_promises(call, operands)
    counts = jnp.where(broken, 0, starts[1:] - starts[:-1])
    small = tiles.decode_tiles(call, tiles.run_width(call, operands))
    out, lse = _decode(call, operands, counts, small)
    if not call.ragged:
        return _with_nan(out, lse, broken)
    sequence, real = _sequence_of_tokens(call, operands)
    if call.max_query_len <= small.query_tokens:
        row = sequence * small.query_tokens
        row += jnp.minimum(
            jnp.arange(call.num_tokens, dtype=jnp.int32) - starts[sequence], small.query_tokens - 1
        )
        out = jnp.where(real[:, None, None], jnp.take(out, row, axis=0, mode="clip"), 0)
        lse = jnp.where(real[:, None], jnp.take(lse, row, axis=0, mode="clip"), -jnp.inf)
    else:
        long_counts = jnp.where(counts > small.query_tokens, counts, 0)
        words, long_lse = prefill.run(
            call, operands, long_counts, operands.sinks, tiles.prefill_tiles(call)
        )
        # Scatter the decoded rows, one per sequence, to their tokens. A sequence without one points
        # past the end, where "drop" drops it.
        where = jnp.where(counts == 1, starts[:-1], call.num_tokens)
        words = words.at[where].set(pool.words_of(out), mode="drop")
        out = rounding.bitcast(words, out.dtype)
        lse = long_lse.at[where].set(lse, mode="drop")
    return _with_nan(out, lse, (real & broken[sequence]) | all_broken)


def _with_nan(out: jax.Array, lse: jax.Array, broken: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the result with NaN in the rows of `broken` tokens [T]."""
    return jnp.where(broken[:, None, None], jnp.nan, out), jnp.where(broken[:, None], jnp.nan, lse)


def _sequence_of_tokens(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """`(int32 [T], bool [T])`: each token's sequence, and whether it has one."""
    starts = operands.query_start_loc
    tokens = jnp.arange(call.num_tokens, dtype=jnp.int32)
    sequence = jnp.searchsorted(starts, tokens, side="right").astype(jnp.int32) - 1
    return jnp.clip(sequence, 0, call.num_seqs - 1), tokens < starts[-1]


def _decode(
    call: calls.Call,
    operands: calls.Operands,
    counts: jax.Array,
    sizes: tiles.DecodeTiles,
) -> tuple[jax.Array, jax.Array]:
    """`(out [B * Q, H, V] in the output dtype, lse [B * Q, H])` of the decode loop's rows."""
    span = sizes.query_tokens
    shape = (call.num_seqs, call.num_kv_heads, span, call.group)
    state = decode.run(call, operands, counts, sizes)
    sinks = operands.sinks
    if sinks is not None and not call.sinks_per_token:
        sinks = kv_loop.sinks_per_row(call, sinks, span * call.group)
        sinks = jnp.broadcast_to(sinks[None], state.m.shape)
    elif sinks is not None:
        sinks = decode.rows_of_tokens(sinks[..., None], call, operands, span)[..., 0]
    out, lse = softmax.finish(state, sinks)
    if operands.v_scale is not None:
        out = out * operands.v_scale[None, :, None, None]
    out = out.astype(call.out_dtype).reshape(*shape, call.value_dim).swapaxes(1, 2)
    lse = lse.reshape(shape).swapaxes(1, 2)
    rows = (call.num_seqs * span, call.num_heads)
    return out.reshape(*rows, call.value_dim), lse.reshape(rows)
