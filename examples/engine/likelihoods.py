"""Log-probabilities of tokens in the model's own distribution.

These are `log softmax(logits)` before temperature, bias, penalties and filters, so not the
distribution that tokens are sampled from.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

MOST_ALTERNATIVES = 20


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """One token's log-probability, and the likeliest tokens at its position."""

    token: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()  # with log-probabilities, likeliest first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Likelihoods:
    """Log-probabilities of some tokens, on the device; zeros if no request asks for them."""

    logprobs: jax.Array  # float32 [B]
    top_tokens: jax.Array  # int32 [B, MOST_ALTERNATIVES], or the whole vocabulary if smaller
    top_logprobs: jax.Array  # float32, likewise

    def of(self, index: int, token: int, count: int) -> Likelihood:
        """Return one token's log-probability, with `count` alternatives."""
        top = zip(self.top_tokens[index, :count], self.top_logprobs[index, :count], strict=True)
        alternatives = tuple((int(other), float(logprob)) for other, logprob in top)
        return Likelihood(token, float(self.logprobs[index]), alternatives)

    def fetched(self) -> Likelihoods:
        """Copy them to the host."""
        return jax.tree.map(np.asarray, self)


def likelihoods(logits: jax.Array, tokens: jax.Array, wanted: jax.Array) -> Likelihoods:
    """Compute the log-probabilities of tokens.

    Args:
      logits: float32 [B, vocabulary].
      tokens: int32 [B], the tokens that follow.
      wanted: bool [], whether any request asks for them; selects a branch on the device.
    """
    most = min(MOST_ALTERNATIVES, logits.shape[1])
    columns = logits.T  # XLA passes these to a branch without a copy: `step.py`

    def found() -> Likelihoods:
        all = jax.nn.log_softmax(columns.T, axis=-1)
        top, which = jax.lax.top_k(all, most)
        chosen = jnp.take_along_axis(all, tokens[:, None], axis=1, mode="clip")[:, 0]
        return Likelihoods(chosen, which.astype(jnp.int32), top)

    def nothing() -> Likelihoods:
        zeros = jnp.zeros((logits.shape[0], most), jnp.float32)
        return Likelihoods(zeros[:, 0], zeros.astype(jnp.int32), zeros)

    return jax.lax.cond(wanted, found, nothing)
