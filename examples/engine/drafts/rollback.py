"""Recurrent states in speculative decoding: a step keeps the states after the accepted drafts.

    step    reads state S, runs the last token and the drafts, chooses a token after each
            counts the drafts that equal the chosen tokens
            runs the recurrences again, over the accepted ones only:  S, k, v, decays -> S'

A recurrence's inputs are already available, and nothing else of the layer is computed twice. So
nothing rolls back, and no state is kept per draft. docs/performance-serving.md has the times of
other methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from examples.engine.step import Inputs


def accepted_lengths(inputs: Inputs, chosen: jax.Array) -> jax.Array:
    """Return how many tokens of each sequence a step keeps, without rejected drafts, int32 [B].

    A draft is accepted if all drafts before it are, and it equals the token chosen in its place.

    Args:
      inputs: the step's.
      chosen: int32 [B, 1 + drafts].
    """
    starts, count = inputs.query_start_loc, inputs.num_drafts
    order = jnp.arange(chosen.shape[1] - 1, dtype=jnp.int32)[None]
    drafts = inputs.tokens.at[(starts[1:] - count)[:, None] + order].get(mode="clip")
    right = (drafts == chosen[:, :-1]) & (order < count[:, None])
    accepted = jnp.cumprod(right.astype(jnp.int32), axis=1).sum(axis=1)
    return starts[1:] - starts[:-1] - count + accepted
