"""Choose next tokens on the device, for all rows of a step at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from examples.engine import request as requests


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """How each row's token is chosen. Every field is an array [B]."""

    temperature: jax.Array  # float32; 0: greedy
    top_p: jax.Array  # float32
    top_k: jax.Array  # int32; 0: all
    min_p: jax.Array  # float32; 0: all
    seed: jax.Array  # uint32
    count: jax.Array  # int32, tokens of the sequence so far: which sample of the seed this is

    def of_next(self, num_tokens: int) -> SamplingRows:
        """Return rows for the next `num_tokens` tokens of each sequence: [B * num_tokens]."""
        rows = jax.tree.map(lambda x: jnp.repeat(x, num_tokens), self)
        offsets = jnp.tile(jnp.arange(num_tokens, dtype=jnp.int32), self.count.shape[0])
        return dataclasses.replace(rows, count=rows.count + offsets)


def sampling_rows(sequences: Sequence[requests.Sequence], num_rows: int) -> SamplingRows:
    """Pack how each sequence's next token is chosen into arrays; further rows are greedy."""
    temperature, top_p, min_p = np.zeros((3, num_rows), np.float32)
    top_k, count = np.zeros((2, num_rows), np.int32)
    seeds = np.zeros(num_rows, np.uint32)
    for i, sequence in enumerate(sequences):
        asked = sequence.request.sampling
        temperature[i] = asked.temperature if asked.draws else 0.0
        top_p[i], min_p[i] = asked.top_p, asked.min_p
        top_k[i], seeds[i], count[i] = asked.top_k, asked.seed, len(sequence.tokens)
    return SamplingRows(temperature, top_p, top_k, min_p, seeds, count)


def sample(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Choose the next token of each row, int32 [B].

    A sample is `argmax(logits / temperature + gumbel noise)`, which has the softmax's distribution
    and needs no sum over it. A step skips drawing samples, and sorting the vocabulary, if no row
    needs it: both are branches on the device.

    Args:
      logits: float32 [B, vocabulary].
      rows: how to sample each row.
    """
    greedy = likeliest(logits)
    drawn = rows.temperature > 0
    return jax.lax.cond(
        jnp.any(drawn),
        lambda: jnp.where(drawn, _draw(logits, rows), greedy),
        lambda: greedy,
    )


def likeliest(logits: jax.Array) -> jax.Array:
    """Return the token with each row's largest logit, the first of equal ones, int32 [B].

    This finds the part of the vocabulary that has the token, then its place there: XLA on CPUs
    computes a maximum of many numbers with vectors, but an argmax one number at a time.
    """
    columns = logits.T  # the layout that a product with few tokens produces: `layers.product`
    size = math.gcd(columns.shape[0], 64)
    parts = columns.reshape(-1, size, columns.shape[1])
    highest = jax.lax.optimization_barrier(jnp.max(parts, axis=1))
    part = jnp.argmax(highest, axis=0)
    rows = jnp.arange(columns.shape[1])
    place = jnp.argmax(parts.at[part, :, rows].get(mode="clip"), axis=-1)
    return (part * size + place).astype(jnp.int32)


def _draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    likely = keep_likely(scaled, rows.min_p)
    filtered = jax.lax.cond(
        jnp.any((rows.top_k > 0) | (rows.top_p < 1)),
        lambda: keep_likeliest(likely, rows.top_k, rows.top_p),
        lambda: likely,
    )

    def noise(seed: jax.Array, count: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), count)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    return jnp.argmax(filtered + jax.vmap(noise)(rows.seed, rows.count), axis=-1).astype(jnp.int32)


def keep_likely(logits: jax.Array, min_p: jax.Array) -> jax.Array:
    """Set logits [B, vocabulary] to -inf if less than `min_p` times as likely as the likeliest."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits >= best + jnp.log(min_p)[:, None], logits, -jnp.inf)


def keep_likeliest(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Set logits [B, vocabulary] of all but the likeliest tokens to -inf.

    Each row keeps its `top_k` largest logits (0: all), and of these the fewest whose probabilities
    among them sum to `top_p` or more. Equal logits are kept or dropped together.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    ranks = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
    allowed = ranks < jnp.where(top_k > 0, top_k, logits.shape[1])[:, None]
    ordered = jnp.where(allowed, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = allowed & ((before < top_p[:, None]) | (ranks == 0))
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1)
    return jnp.where(logits >= threshold[:, None], logits, -jnp.inf)
