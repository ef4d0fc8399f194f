"""The XLA path's entry: which loop runs which sequences, and the shape of the result.

Sequences with one query token (or a few, when no sequence has more) take the decode loop, all
others the ragged one. Which is which only the device knows, so a mixed call compiles both.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jattn import call as calls
from jattn import softmax
from jattn.cpu import decode, gradient, ragged, tiles


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """`(out [T, H, V] in the output dtype, lse [T, H] float32)`; gradients in `gradient.py`."""
    starts = operands.query_start_loc
    counts = starts[1:] - starts[:-1]
    sinks = None
    if operands.sinks is not None:
        sinks = operands.sinks.reshape(call.num_kv_heads, call.group)
    small = tiles.decode_tiles(call)
    out, lse = _decode(call, operands, counts, sinks, small)
    if call.max_query_len > small.query_tokens:
        # A sequence that breaks max_query_len stays with the decode loop, which marks it.
        is_mine = (counts > small.query_tokens) & (counts <= call.max_query_len)
        long_counts = jnp.where(is_mine, counts, 0)
        long_out, long_lse = ragged.run(
            call, operands, long_counts, sinks, tiles.ragged_tiles(call)
        )
        is_long = _flag_of_tokens(call, starts, long_counts > 0)[:, None]
        out = jnp.where(is_long[..., None], long_out, out)
        lse = jnp.where(is_long, long_lse, lse)
    if operands.v_scale is not None:
        out = out * jnp.repeat(operands.v_scale, call.group)[None, :, None]
    return out.astype(jnp.dtype(call.out_dtype)), lse


def _forward(call: calls.Call, operands: calls.Operands):
    out, lse = run(call, operands)
    return (out, lse), (operands, out, lse)


def _backward(call: calls.Call, saved, cotangents):
    operands, out, lse = saved
    return (gradient.run(call, operands, out, lse, *cotangents),)


run.defvjp(_forward, _backward)


def _decode(
    call: calls.Call,
    operands: calls.Operands,
    counts: jax.Array,
    sinks: jax.Array | None,
    tile: tiles.DecodeTiles,
) -> tuple[jax.Array, jax.Array]:
    """`(out [T, H, V], lse [T, H])` in float32; what is not a decode token's means nothing."""
    kv_heads, group, span = call.num_kv_heads, call.group, tile.query_tokens
    state = decode.run(call, operands, counts, tile)
    if sinks is not None:
        sinks = jnp.tile(sinks, (1, span))[None]
        sinks = jnp.broadcast_to(sinks, state.m.shape)
    out, lse = softmax.finish(state, sinks)
    out = out.reshape(call.num_seqs, kv_heads, span, group, call.value_dim).swapaxes(1, 2)
    lse = lse.reshape(call.num_seqs, kv_heads, span, group).swapaxes(1, 2)
    out = out.reshape(call.num_seqs * span, call.num_heads, call.value_dim)
    lse = lse.reshape(call.num_seqs * span, call.num_heads)
    if not call.ragged:
        return out, lse
    starts = operands.query_start_loc
    tokens = jnp.arange(call.num_tokens, dtype=jnp.int32)
    b = jnp.searchsorted(starts, tokens, side="right").astype(jnp.int32) - 1
    b = jnp.clip(b, 0, call.num_seqs - 1)
    row = b * span + jnp.minimum(tokens - starts[b], span - 1)
    real = (tokens < starts[-1])[:, None]
    broken = real & (counts[b] > call.max_query_len)[:, None]
    out = jnp.where(real[..., None], jnp.take(out, row, axis=0, mode="clip"), jnp.float32(0))
    lse = jnp.where(real, jnp.take(lse, row, axis=0, mode="clip"), jnp.float32(-jnp.inf))
    nan = jnp.float32(jnp.nan)
    return jnp.where(broken[..., None], nan, out), jnp.where(broken, nan, lse)


def _flag_of_tokens(call: calls.Call, starts: jax.Array, flags: jax.Array) -> jax.Array:
    """bool [T]: the flag of each token's sequence; False for padding."""
    tokens = jnp.arange(call.num_tokens, dtype=jnp.int32)
    b = jnp.searchsorted(starts, tokens, side="right").astype(jnp.int32) - 1
    return flags[jnp.clip(b, 0, call.num_seqs - 1)] & (tokens < starts[-1])
