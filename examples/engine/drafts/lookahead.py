"""What a step computes in advance for a model's MTP layer (`mtp.py`)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from examples.engine.caches import Caches
from examples.engine.model import Batch, Model

if TYPE_CHECKING:
    from examples.engine.step import Inputs


def read_ahead(
    model: Model,
    params: Any,
    caches: Caches,
    batch: Batch,
    inputs: Inputs,
    hidden: jax.Array,
    chosen: jax.Array,
) -> Caches:
    """Write the MTP layer's keys and values of a step's tokens to the caches.

    Its guesses are not used, so they are not part of any compiled program.

    Args:
      model, params, caches, batch, inputs: the step's.
      hidden: [T, E], hidden states of its tokens.
      chosen: int32 [B, 1 + drafts], the tokens it chose.
    """
    shifted = dataclasses.replace(batch, tokens=following(inputs, chosen))
    return model.mtp.guess(params, caches, shifted, hidden)[-1]


def following(inputs: Inputs, chosen: jax.Array) -> jax.Array:
    """Return the token after each of a step's tokens, int32 [T]; arguments as for `read_ahead`.

    After a rejected draft token it is meaningless, but that token is discarded as well.
    """
    starts, order = inputs.query_start_loc, jnp.arange(inputs.tokens.shape[0], dtype=jnp.int32)
    owner = jnp.searchsorted(starts[1:], order, side="right").astype(jnp.int32)
    first = (starts[1:] - 1 - inputs.num_drafts).at[owner].get(mode="clip")
    after = chosen.at[owner, order - first].get(mode="clip")
    return jnp.where(inputs.targets >= 0, inputs.targets, after)


def keep_hidden(hidden: jax.Array, num_seqs: int, num_choices: int) -> jax.Array:
    """Pad hidden states [B, 1 + drafts, E] to the shape that all steps share."""
    padding = (0, num_seqs - hidden.shape[0]), (0, num_choices - hidden.shape[1]), (0, 0)
    return jnp.pad(hidden, padding)
