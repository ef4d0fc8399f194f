"""Choosing next tokens on the device, for all rows of a step at once."""

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
    count: jax.Array  # int32, tokens of the sequence so far: which draw of the seed it is

    def of_next(self, num_tokens: int) -> SamplingRows:
        """Rows for the next `num_tokens` tokens of each sequence: [B * num_tokens]."""
        rows = jax.tree.map(lambda x: jnp.repeat(x, num_tokens), self)
        offsets = jnp.tile(jnp.arange(num_tokens, dtype=jnp.int32), self.count.shape[0])
        return dataclasses.replace(rows, count=rows.count + offsets)


def sampling_rows(sequences: Sequence[requests.Sequence], num_rows: int) -> SamplingRows:
    """How each sequence's next token is chosen, as arrays; further rows are greedy."""
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
    """The next token of each row, int32 [B].

    A draw is `argmax(logits / temperature + gumbel noise)`, which has the distribution of the
    softmax and needs no sum over it. Sorting the vocabulary is left out in a step where no row asks
    for it, and so is drawing: both are branches taken on the device.

    Args:
      logits: float32 [B, vocabulary].
      rows: how each row is to be sampled.
    """
    greedy = likeliest(logits)
    drawn = rows.temperature > 0
    return jax.lax.cond(
        jnp.any(drawn),
        lambda: jnp.where(drawn, _draw(logits, rows), greedy),
        lambda: greedy,
    )


def likeliest(logits: jax.Array) -> jax.Array:
    """The token with the largest of each row's logits, the first of equals, int32 [B].

    First the part of the vocabulary in which it is, then its place there: XLA for CPU takes the
    maximum of many numbers at once, but their argmax one by one.
    """
    columns = logits.T  # as a product with few tokens leaves them: `layers.product`
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
    """Logits [B, vocabulary] with -inf for tokens less than `min_p` times as likely as the best."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits >= best + jnp.log(min_p)[:, None], logits, -jnp.inf)


def keep_likeliest(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Logits [B, vocabulary] with -inf for all but the likeliest.

    Of each row the `top_k` largest stay (0: all), then the fewest of those whose probabilities,
    among them, sum to `top_p` or more. Equal logits stay or go together.
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
