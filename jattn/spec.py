"""What attention means here: who sees whom, what a logit is, what an empty row returns.

This is the one place that says so. The oracle calls these functions with NumPy, the XLA path and
the Pallas kernels with JAX; they use nothing but arithmetic, so both work. A Triton kernel cannot
call them: it has one fragment that a test compares with this file point by point.

With `n` query tokens, query token `i` of a sequence of `seq_len` keys sits at position

    q = seq_len - n + i

and sees the key at position `k`, `0 <= k < seq_len`, when

    causal:      k <= q   and, with a window,   k > q - window
    not causal:               with a window,   |q - k| < window

The window counts the keys visible to a query, its own included: what transformers calls
`sliding_window`, FlashAttention `(window - 1, 0)` and jax.nn `local_window_size=(window - 1, 0)`.
The logit of a visible key is

    s = cap * tanh(scale * (query . key) / cap) + slope * (k - q)

with the soft cap and the ALiBi term where they are given, in that order.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

Array = Any  # a NumPy or a JAX array, or a Python number


def first_query_position(seq_len: Array, num_queries: Array) -> Array:
    """The position of a sequence's first query; negative where keys are fewer than queries."""
    return seq_len - num_queries


def visible(
    q_pos: Array,
    k_pos: Array,
    seq_len: Array,
    *,
    is_causal: Array,
    sliding_window: Array | None,
) -> Array:
    """Whether the query at `q_pos` sees the key at `k_pos`; broadcasts, traces."""
    seen = (k_pos >= 0) & (k_pos < seq_len)
    if isinstance(is_causal, bool):
        ahead_ok = k_pos <= q_pos if is_causal else None
    else:
        ahead_ok = (k_pos <= q_pos) | ~is_causal
    if ahead_ok is not None:
        seen = seen & ahead_ok
    if sliding_window is not None:
        # k < q + window holds for every causal key, so one rule serves both kinds. Differences,
        # not sums: a window of 2^31 - 1 ("no window") must not overflow.
        seen = seen & (q_pos - k_pos < sliding_window) & (k_pos - q_pos < sliding_window)
    return seen


def key_range(
    first_q: Array,
    last_q: Array,
    seq_len: Array,
    *,
    is_causal: Array,
    sliding_window: Array | None,
    xp: Any = jnp,
) -> tuple[Array, Array]:
    """`(start, end)`: no query in `[first_q, last_q]` sees a key outside `start <= k < end`.

    Tight for the hull of what the queries see; `start == end` where they see nothing.
    """
    start = xp.zeros_like(seq_len)
    end = xp.maximum(seq_len, 0)
    causal_end = xp.minimum(end, last_q + 1)
    if isinstance(is_causal, bool):
        end = causal_end if is_causal else end
    else:
        end = xp.where(is_causal, causal_end, end)
    if sliding_window is not None:
        window = xp.minimum(sliding_window, xp.full_like(seq_len, 2**30))
        start = xp.maximum(start, first_q - window + 1)
        end = xp.minimum(end, last_q + window)
    end = xp.maximum(end, 0)
    return xp.minimum(start, end), end


def transform_logits(
    dots: Array,
    *,
    scale: Array,
    logits_soft_cap: Array | None,
    alibi_slopes: Array | None,
    q_pos: Array,
    k_pos: Array,
    xp: Any = jnp,
) -> Array:
    """Scaled, capped, biased logits from the dot products `query . key`. Broadcasts."""
    logits = dots * scale
    if logits_soft_cap is not None:
        logits = logits_soft_cap * xp.tanh(logits / logits_soft_cap)
    if alibi_slopes is not None:
        distance = k_pos - q_pos
        logits = logits + alibi_slopes * distance.astype(logits.dtype)
    return logits


def empty_row_lse(sink: Array | None) -> Array:
    """The lse of a row that sees nothing; its output is zeros."""
    return -np.inf if sink is None else sink
