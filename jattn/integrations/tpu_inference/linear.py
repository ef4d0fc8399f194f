"""Gated delta nets of tpu-inference without TPUs: the host's own reference code, run by XLA.

These are the layers between the attention layers of Qwen3-Next and its kin: a causal convolution
over the last few tokens, then a recurrence whose state is a matrix per head. States lie in slots
that the host assigns and never clears. A step reads the states of its sequences from their slots,
computes with them in float32 whatever their dtype, and writes them back.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

CHUNK = 64  # tokens of a prompt at a time


@functools.cache
def backend_class() -> type[Any]:
    """Return a `LinearAttentionBackend` of the host with `convolve_and_scan` as its kernel."""
    from tpu_inference.layers.common.attention_backend import LinearAttentionBackend

    class Backend(LinearAttentionBackend):
        def conv1d_gdn_kernel(self) -> Any:
            return convolve_and_scan

    return Backend


def convolve_and_scan(
    qkv: jax.Array,
    b: jax.Array,
    a: jax.Array,
    conv_state: jax.Array,
    recurrent_state: jax.Array,
    conv_weight: jax.Array,
    conv_bias: jax.Array | None,
    a_log: jax.Array,
    dt_bias: jax.Array,
    query_start_loc: jax.Array,
    state_indices: jax.Array,
    distribution: jax.Array,
    seq_lens: jax.Array,
    read_state_indices: jax.Array,
    *,
    n_kq: int,
    n_v: int,
    d_k: int,
    d_v: int,
    kernel_size: int,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Run a layer's step on one device, like the host's `kernels.gdn.v3.wrapper.fused_conv1d_gdn`.

    Args:
      qkv: [T, 2 * n_kq * d_k + n_v * d_v], the step's tokens, sequence by sequence.
      b, a: [T, n_v]; they determine the weight of new values and the decay of the state.
      conv_state: [slots, kernel_size - 1, ...], the last tokens of each sequence.
      recurrent_state: [slots, n_v, d_k, d_v].
      conv_weight, conv_bias: [..., 1, kernel_size] and [...], or None.
      a_log, dt_bias: [n_v].
      query_start_loc: int32 [B + 1].
      state_indices: int32 [B], the slots to write; anything for rows without a sequence.
      distribution: int32 [3]; the first number counts sequences that decode, the last one all.
      seq_lens: int32 [B], including this step's tokens.
      read_state_indices: int32 [B], the slots to read, for sequences that are not new.
      n_kq, n_v: heads of queries and keys; heads of values, a multiple of it.
      d_k, d_v: their sizes.
      kernel_size: of the convolution.

    Returns: `((conv_state, recurrent_state), out [T, n_v * d_v])`.
    """
    from tpu_inference.kernels.gdn.reference import ragged_gated_delta_rule_chunked as delta
    from tpu_inference.layers.common import ragged_conv1d_jax

    count, tokens, keys = len(seq_lens), len(qkv), n_kq * d_k
    lengths = query_start_loc[1:] - query_start_loc[:-1]
    real = (jnp.arange(count) < distribution[2]) & (lengths > 0)
    resumed = real & (seq_lens > lengths)  # the others are new, and start from zeros
    slots = jnp.where(real, jnp.arange(1, count + 1), 0)  # 0: padding
    mixed, convolved = ragged_conv1d_jax.ragged_conv1d(
        qkv.astype(jnp.float32),
        _take(conv_state, read_state_indices, resumed),
        conv_weight.astype(jnp.float32),
        None if conv_bias is None else conv_bias.astype(jnp.float32),
        *(query_start_loc, slots, distribution, resumed),
        kernel_size=kernel_size,
    )
    query, key, value = jnp.split(jax.nn.silu(mixed), (keys, 2 * keys), axis=1)
    query, key = (
        jnp.repeat(x.reshape(tokens, n_kq, d_k), n_v // n_kq, axis=1) for x in (query, key)
    )
    given = {
        "query": query,
        "key": key,
        "value": value.reshape(tokens, n_v, d_v),
        "b_reshaped": b,
        "a_reshaped": a,
        "recurrent_state": _take(recurrent_state, read_state_indices, resumed),
        "A_log": a_log,
        "dt_bias": dt_bias,
        "query_start_loc": query_start_loc,
        "distribution": distribution,
        "use_qk_norm_in_gdn": True,
    }

    def decode() -> tuple[jax.Array, jax.Array]:
        of_tokens = jnp.pad(slots, (0, max(0, tokens - count)))
        return delta.ragged_gated_delta_rule_decode_only(**given, state_indices=of_tokens)

    def mixed_or_prefill() -> tuple[jax.Array, jax.Array]:
        return delta.ragged_gated_delta_rule_mixed_prefill(
            **given,
            state_indices=slots,
            has_initial_state=resumed,
            chunk_size=CHUNK,
            compute_dtype=jnp.float32,
            triangle_solver_impl=_inverse,
        )

    decodes_only = distribution[0] == distribution[2]
    scanned, out = jax.lax.cond(decodes_only, decode, mixed_or_prefill)
    states = (
        _put(conv_state, state_indices, real, convolved),
        _put(recurrent_state, state_indices, real, scanned),
    )
    return states, out.astype(qkv.dtype)


def _take(states: jax.Array, slots: jax.Array, resumed: jax.Array) -> jax.Array:
    """Return the sequences' states in float32, zeros for new ones, after one for padding."""
    found = states.at[slots].get(mode="clip").astype(jnp.float32)
    found = jnp.where(resumed.reshape(-1, *(1,) * (found.ndim - 1)), found, 0)
    return jnp.pad(found, ((1, 0), *((0, 0),) * (found.ndim - 1)))


def _put(states: jax.Array, slots: jax.Array, real: jax.Array, found: jax.Array) -> jax.Array:
    """Return `states` with the new states of this step's sequences in their slots."""
    targets = jnp.where(real, slots, len(states))  # past the end: dropped
    return states.at[targets].set(found[1:].astype(states.dtype), mode="drop")


def _inverse(lower: jax.Array) -> jax.Array:
    """Invert unit lower-triangular matrices."""
    one = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    return jax.lax.linalg.triangular_solve(
        lower, one, left_side=True, lower=True, unit_diagonal=True
    )
