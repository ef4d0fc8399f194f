"""The results that a step leaves for a model's own layer that guesses (`mtp.py`)."""

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
    """The caches with the layer's keys and values of a step's tokens.

    What it would guess after them is in no compiled program, since nothing asks for it.

    Args:
      model, params, caches, batch, inputs: the step's.
      hidden: [T, E], of its tokens.
      chosen: int32 [B, 1 + drafts], the tokens it chose.
    """
    shifted = dataclasses.replace(batch, tokens=following(inputs, chosen))
    return model.mtp.guess(params, caches, shifted, hidden)[-1]


def following(inputs: Inputs, chosen: jax.Array) -> jax.Array:
    """The token after each of a step's tokens, int32 [T]; arguments as for `read_ahead`.

    After a draft that is refused it is a token that will not be there. Nor will the draft.
    """
    starts, order = inputs.query_start_loc, jnp.arange(inputs.tokens.shape[0], dtype=jnp.int32)
    owner = jnp.searchsorted(starts[1:], order, side="right").astype(jnp.int32)
    first = (starts[1:] - 1 - inputs.num_drafts).at[owner].get(mode="clip")
    after = chosen.at[owner, order - first].get(mode="clip")
    return jnp.where(inputs.targets >= 0, inputs.targets, after)


def keep_hidden(hidden: jax.Array, num_seqs: int, num_choices: int) -> jax.Array:
    """Hidden states [B, 1 + drafts, E] in the shape that steps of all shapes share."""
    padding = (0, num_seqs - hidden.shape[0]), (0, num_choices - hidden.shape[1]), (0, 0)
    return jnp.pad(hidden, padding)
