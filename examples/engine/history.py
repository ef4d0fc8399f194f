"""The device's records of sequences whose logits are changed before a token is chosen.

Penalties need to know which tokens a sequence has, and how often it generated each. So every
sequence that may run has a row of counts, as large as its logits. The host fills it in once, when
the sequence begins (`begin`); from then on the step adds each token that it chooses. The history
also has a request's `logit_bias`, and the tokens that a grammar allows next, which the host sends
before each step (`constrain`). Rows of sequences that need none of this are never read.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from examples.engine.request import MOST_BIASES, Sequence

IN_PROMPT = 1 << 30  # added to the count of a token that is in the prompt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """The rows of all sequences that may run."""

    counts: jax.Array  # int32 [rows, vocabulary]: how often each was generated, and IN_PROMPT
    bias_tokens: jax.Array  # int32 [rows, MOST_BIASES]; the vocabulary's size pads
    biases: jax.Array  # float32 [rows, MOST_BIASES]
    allowed: jax.Array  # int32 [rows, ceil(vocabulary / 32)]: a bit per token, the lowest first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adjustments:
    """How each row's logits are changed. Every field is an array [B]."""

    row: jax.Array  # int32, of the history; -1: logits are not changed
    presence: jax.Array  # float32, subtracted from the logits of generated tokens
    frequency: jax.Array  # float32, likewise, times how often they were generated
    repetition: jax.Array  # float32, divides the logits of tokens in the prompt or generated
    # Whether the chosen token is the sequence's next one. It is not within a prompt.
    is_next: jax.Array  # bool
    constrained: jax.Array  # bool: only tokens that the history allows are chosen

    def of_next(self, num_tokens: int) -> Adjustments:
        """Return rows for the next `num_tokens` tokens of each sequence: [B * num_tokens].

        All use the same history: a sequence whose logits are changed has no draft tokens.
        """
        return jax.tree.map(lambda x: jnp.repeat(x, num_tokens), self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beginning:
    """A sequence's data for `begin`."""

    row: np.ndarray  # int32 []
    tokens: np.ndarray  # int32 [longest sequence]; the vocabulary's size pads
    num_prompt: np.ndarray  # int32 []
    bias_tokens: np.ndarray  # int32 [MOST_BIASES]
    biases: np.ndarray  # float32 [MOST_BIASES]


def init_history(num_rows: int, vocab_size: int) -> History:
    """Make empty rows."""
    return History(
        jnp.zeros((num_rows, vocab_size), jnp.int32),
        jnp.full((num_rows, MOST_BIASES), vocab_size, jnp.int32),
        jnp.zeros((num_rows, MOST_BIASES), jnp.float32),
        jnp.zeros((num_rows, -(-vocab_size // 32)), jnp.int32),
    )


def pack_beginning(sequence: Sequence, max_len: int, vocab_size: int) -> Beginning:
    """Lay out a sequence's data for `begin`."""
    tokens = np.full(max_len, vocab_size, np.int32)
    bias_tokens = np.full(MOST_BIASES, vocab_size, np.int32)
    biases = np.zeros(MOST_BIASES, np.float32)
    tokens[: len(sequence.tokens)] = sequence.tokens
    bias = sequence.request.sampling.logit_bias
    bias_tokens[: len(bias)] = [token for token, _ in bias]
    biases[: len(bias)] = [value for _, value in bias]
    num_prompt = np.int32(len(sequence.request.prompt))
    return Beginning(np.int32(sequence.row), tokens, num_prompt, bias_tokens, biases)


def begin(history: History, given: Beginning) -> History:
    """Fill in the row of a sequence that begins, or restarts; in place, if donated."""
    place = jnp.arange(given.tokens.shape[0], dtype=jnp.int32)
    counts = history.counts.at[given.row].set(0)
    # A prompt may repeat a token: the flag is set only once. Generated tokens are added to it.
    inside = jnp.where(place < given.num_prompt, given.tokens, history.counts.shape[1])
    counts = counts.at[given.row, inside].set(IN_PROMPT, mode="drop")
    generated = jnp.where(place < given.num_prompt, history.counts.shape[1], given.tokens)
    counts = counts.at[given.row, generated].add(1, mode="drop")
    return dataclasses.replace(
        history,
        counts=counts,
        bias_tokens=history.bias_tokens.at[given.row].set(given.bias_tokens),
        biases=history.biases.at[given.row].set(given.biases),
    )


def constrain(history: History, rows: jax.Array, allowed: jax.Array) -> History:
    """Set which tokens may come next; in place, if donated.

    Args:
      rows: int32 [B], of the history; the number of rows pads.
      allowed: int32 [B, ceil(vocabulary / 32)], a bit per token.
    """
    return dataclasses.replace(history, allowed=history.allowed.at[rows].set(allowed, mode="drop"))


def adjust(logits: jax.Array, history: History, asked: Adjustments) -> jax.Array:
    """Adjust logits [B, vocabulary] as the rows ask.

    First `l += bias`. Then, with a repetition penalty r, `l = l / r if l > 0 else l * r` for tokens
    in the prompt or generated. Then, for tokens that were generated n > 0 times,
    `l -= frequency * n + presence`. Tokens that a grammar does not allow get -inf.
    """

    def changed() -> jax.Array:
        row = jnp.maximum(asked.row, 0)
        counts = history.counts[row]
        b = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        found = logits.at[b, history.bias_tokens[row]].add(history.biases[row], mode="drop")
        by = jnp.where(counts > 0, asked.repetition[:, None], 1.0)
        found = jnp.where(found > 0, found / by, found * by)
        times = (counts & (IN_PROMPT - 1)).astype(jnp.float32)
        found -= asked.frequency[:, None] * times
        found -= jnp.where(times > 0, asked.presence[:, None], 0.0)
        token = jnp.arange(logits.shape[1], dtype=jnp.int32)
        bits = jnp.right_shift(history.allowed[row][:, token // 32], (token % 32)[None]) & 1
        found = jnp.where(asked.constrained[:, None] & (bits == 0), -jnp.inf, found)
        return jnp.where((asked.row >= 0)[:, None], found, logits)

    return jax.lax.cond(jnp.any(asked.row >= 0), changed, lambda: logits)


def note(history: History, asked: Adjustments, tokens: jax.Array) -> History:
    """Add the chosen tokens int32 [B] to the history; in place, if donated."""
    noted = (asked.row >= 0) & asked.is_next
    row = jnp.where(noted, asked.row, history.counts.shape[0])
    counts = history.counts.at[row, tokens].add(1, mode="drop")
    return dataclasses.replace(history, counts=counts)
