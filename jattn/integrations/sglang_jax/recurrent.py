"""sglang-jax's linear attention without TPUs: Kimi's delta rule (KDA) and Lightning's decay.

A head keeps a state S [K, V] per sequence. A token with query q, key k and value v turns it into

    KDA:        S' = diag(exp(g)) S,  S = S' + beta k (v - k^T S')^T
    Lightning:  S = exp(gamma) S + k v^T

and reads `scale * q^T S`. The host's TPU kernels work in chunks of tokens; here the tokens run one
by one, in float32. The names and arguments are the host's.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Step = Callable[..., tuple[jax.Array, jax.Array]]


def chunk_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float,
    initial_state: jax.Array,
    cu_seqlens: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    output_final_state: bool = True,
    use_gate_in_kernel: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """KDA of the tokens of several sequences, one sequence after another.

    Args:
      q, k: [1, T, H, K], of length 1 per head.
      v: [1, T, H, V].
      g: [1, T, H, K]; the decay is `-exp(A_log) * softplus(g + dt_bias)`.
      beta: [1, T, H].
      scale: of the queries.
      initial_state: [B, H, K, V].
      cu_seqlens: int32 [B + 1]; tokens from its last entry on are padding.
      A_log: [H].
      dt_bias: [H, K].
      output_final_state, use_gate_in_kernel: as the host sets them.

    Returns:
      `(out [1, T, H, V], states [B, H, K, V])`; zeros for padding.
    """
    assert output_final_state
    assert use_gate_in_kernel
    rate, bias = jnp.exp(A_log.astype(jnp.float32))[:, None], dt_bias.astype(jnp.float32)

    def step(state: jax.Array, *row: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = row
        state = state * jnp.exp(-rate * jax.nn.softplus(g + bias))[..., None]
        missing = v - jnp.einsum("hk,hkv->hv", k, state)
        state = state + jnp.einsum("hk,hv->hkv", beta[:, None] * k, missing)
        return state, scale * jnp.einsum("hk,hkv->hv", q, state)

    out, states = _scan(step, initial_state, cu_seqlens, q[0], k[0], v[0], g[0], beta[0])
    return out[None].astype(q.dtype), states


def simple_gla_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    g_gamma: jax.Array,
    h0: jax.Array,
    cu_seqlens_dev: jax.Array,
    scale: float | None = None,
    use_ht: bool = True,
    chunk_size: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Lightning attention of the tokens of several sequences, one sequence after another.

    Args:
      q, k: [1, T, H, K].
      v: [1, T, H, V].
      g_gamma: [H], the logarithm of a token's decay.
      h0: [B, H, K, V].
      cu_seqlens_dev: int32 [B + 1]; tokens from its last entry on are padding.
      scale: of the queries; `K ** -0.5` if None.
      use_ht: as the host sets it.
      chunk_size: ignored.

    Returns:
      `(out [1, T, H, V], states [B, H, K, V])`; zeros for padding.
    """
    assert use_ht
    del chunk_size
    out, states = _scan(_decayed(g_gamma, scale), h0, cu_seqlens_dev, q[0], k[0], v[0])
    return out[None].astype(q.dtype), states


def decode_simple_gla_fused(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    recurrent_buffer: jax.Array,
    recurrent_indices: jax.Array,
    has_initial_state: jax.Array,
    *,
    g_gamma: jax.Array,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Lightning attention of one token per sequence.

    Args:
      q, k, v: [B, H, K] and [B, H, V].
      recurrent_buffer: [slots, H, K, V]; slot 0 is for padding and stays unchanged.
      recurrent_indices: int32 [B]; 0 for rows of padding.
      has_initial_state: bool [B]; if False, a sequence starts from zeros.
      g_gamma, scale: as in `simple_gla_fwd`.

    Returns:
      `(out [B, H, V], recurrent_buffer)`.
    """
    before = recurrent_buffer[recurrent_indices].astype(jnp.float32)
    before = jnp.where(has_initial_state[:, None, None, None], before, 0)
    rows = (x.astype(jnp.float32) for x in (q, k, v))
    after, out = jax.vmap(_decayed(g_gamma, scale))(before, *rows)
    slots = jnp.where(recurrent_indices == 0, recurrent_buffer.shape[0], recurrent_indices)
    after = after.astype(recurrent_buffer.dtype)
    return out.astype(q.dtype), recurrent_buffer.at[slots].set(after, mode="drop")


def _decayed(g_gamma: jax.Array, scale: float | None) -> Step:
    """Return the step of one token of Lightning attention."""
    decay = jnp.exp(g_gamma.astype(jnp.float32))[:, None, None]

    def step(state: jax.Array, *row: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v = row
        state = decay * state + jnp.einsum("hk,hv->hkv", k, v)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        return state, factor * jnp.einsum("hk,hkv->hv", q, state)

    return step


def _scan(
    step: Step, states: jax.Array, starts: jax.Array, *columns: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Run `step` token by token on the state of its sequence; return the outputs and the states.

    Args:
      step: maps a state and a token's row of each column to `(state, out)`.
      states: [B, ...].
      starts: int32 [B + 1].
      *columns: [T, ...] each.
    """
    tokens = jnp.arange(columns[0].shape[0], dtype=starts.dtype)
    owners = jnp.searchsorted(starts[1:], tokens, side="right")  # B for padding

    def one(states: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        owner, *values = row
        state, out = step(states.at[owner].get(mode="clip"), *values)
        out = jnp.where(owner < states.shape[0], out, 0)
        return states.at[owner].set(state, mode="drop"), out

    rows = (x.astype(jnp.float32) for x in columns)
    after, out = jax.lax.scan(one, states.astype(jnp.float32), (owners, *rows))
    return out, after.astype(states.dtype)
