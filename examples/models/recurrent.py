"""The recurrence over a ragged batch that gated delta nets and Mamba-2 share.

Both keep, per sequence and head, a matrix S [V, D] that every token decays, corrects and reads:

    S_t = a_t S_{t-1} + (v_t - [delta] a_t b_t S_{t-1} k_t) k_t^T,     o_t = S_t q_t

where the bracket is the delta rule (with it, v_t stands for b_t v_t). Mamba-2 is the case without
it: k = B, q = C, v = dt x, a = exp(dt A).

A step has tokens of many sequences, one of some and hundreds of others. They are arranged in chunks
of C tokens of one sequence; within a chunk, with the running decay A_i = prod_{j <= i} a_j,

    u = T^-1 v,  w = T^-1 (b k A)     T = I + strictly lower part of (b_i k_i . k_j A_i / A_j)
    v' = u - w S^T                    (without the delta rule: T = I, w = 0)
    o_i = sum_{j <= i} (q_i . k_j A_i / A_j) v'_j + A_i S q_i
    S  <- A_C S + sum_j (A_C / A_j) v'_j k_j^T

so everything except the three products with S is one batched product over all chunks, and the loop
that carries S has one iteration per chunk. A step with one token per sequence has no loop. It does
not matter where steps divide a sequence's tokens: S is carried exactly.

Axes: T tokens, B sequences, H heads, D key size, V value size, C tokens of a chunk, n chunks.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

_einsum = functools.partial(jnp.einsum, precision="highest")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The sequence of each of a step's T tokens. Make one with `ragged_rows`, once per step."""

    starts: jax.Array  # int32 [B + 1]
    lengths: jax.Array  # int32 [B], how many tokens of each sequence its new state covers
    sequence: jax.Array  # int32 [T], B for padded tokens
    offset: jax.Array  # int32 [T], a token's index among its sequence's tokens in this step
    max_query_len: int | None = dataclasses.field(metadata={"static": True})

    @property
    def num_seqs(self) -> int:
        """B."""
        return self.starts.shape[0] - 1

    def first(self, lengths: jax.Array) -> Rows:
        """Return the same step for the states after each sequence's first `lengths` tokens.

        `lengths` is int32 [B]. The tokens' own outputs are then meaningless.
        """
        return dataclasses.replace(self, lengths=lengths)


def ragged_rows(query_start_loc: jax.Array, num_tokens: int, max_query_len: int | None) -> Rows:
    """Make the rows of a step whose `num_tokens` tokens `query_start_loc` assigns to sequences."""
    starts = jnp.asarray(query_start_loc)
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    sequence = jnp.searchsorted(starts[1:], tokens, side="right").astype(jnp.int32)
    offset = tokens - starts.at[sequence].get(mode="clip")
    return Rows(starts, starts[1:] - starts[:-1], sequence, offset, max_query_len)


def causal_conv(
    x: jax.Array, state: jax.Array, weight: jax.Array, bias: jax.Array | None, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """Convolve each channel causally along each sequence, carried from step to step.

    Args:
      x: [T, channels].
      state: [B, k - 1, channels], the inputs before this step's first, the newest last.
      weight: [channels, k], the newest input's tap last.
      bias: [channels] or None.
      rows: each token's sequence.

    Returns: [T, channels], and the state after this step.
    """
    past = state.shape[1]
    history = functools.partial(_input_before, x, state, rows)
    y = x * weight[:, past][None]
    for back in range(1, past + 1):
        y = y + history(rows.sequence, rows.offset - back) * weight[:, past - back][None]
    y = y if bias is None else y + bias[None]
    sequences = jnp.arange(rows.num_seqs, dtype=jnp.int32)
    kept = [history(sequences, rows.lengths - past + i) for i in range(past)]
    return y, jnp.stack(kept, axis=1)


def _input_before(
    x: jax.Array, state: jax.Array, rows: Rows, sequence: jax.Array, offset: jax.Array
) -> jax.Array:
    """Return sequences' inputs at offsets; inputs before the step come from the state."""
    token = rows.starts.at[sequence].get(mode="clip") + offset
    ours = x.at[jnp.maximum(token, 0)].get(mode="clip")
    # A row of the state; an offset of -1 is its last.
    row = jnp.clip(state.shape[1] + offset, 0, state.shape[1] - 1)
    before = state.at[sequence, row].get(mode="clip")
    return jnp.where((offset >= 0)[:, None], ours, before.astype(x.dtype))


def recur(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    state: jax.Array,
    rows: Rows,
    *,
    chunk_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Run the recurrence over a step's tokens, in float32.

    Args:
      query, key: [T, H, D].
      value: [T, H, V].
      log_decay: [T, H], log a_t, at most 0.
      beta: [T, H], b_t of the delta rule; None for a recurrence without it.
      state: float32 [B, H, V, D], before this step.
      rows: each token's sequence.
      chunk_size: C, static; None: chosen from the step's shape.

    Returns: o [T, H, V], and the states after this step.
    """
    inputs = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32), (query, key, value, log_decay, beta)
    )
    if rows.max_query_len == 1:
        return _one_token_each(inputs, state, rows)
    num_tokens = rows.sequence.shape[0]
    size = chunk_size or _chunk_size(num_tokens, rows)
    chunks = _deal(rows, num_tokens, size)
    taken = jax.tree.map(lambda x: x.at[chunks.tokens].get(mode="fill", fill_value=0), inputs)
    out, state = _chunked(taken, state, chunks.sequence)
    first = chunks.first.at[rows.sequence].get(mode="clip")
    chunk, row = first + rows.offset // size, rows.offset % size
    return out.at[chunk, row].get(mode="clip"), state


def _chunk_size(num_tokens: int, rows: Rows) -> int:
    """Choose C: few chunks for long prompts, little padding for many short ones."""
    longest = min(rows.max_query_len or num_tokens, num_tokens)
    size = 16
    while size < 64 and size * 2 * rows.num_seqs <= num_tokens:
        size *= 2
    return min(size, longest)


@dataclasses.dataclass(frozen=True)
class _Chunks:
    tokens: jax.Array  # int32 [n, C], T where a chunk is not full
    sequence: jax.Array  # int32 [n], B for unused chunks
    first: jax.Array  # int32 [B], each sequence's first chunk


def _deal(rows: Rows, num_tokens: int, size: int) -> _Chunks:
    count = num_tokens // size + min(rows.num_seqs, num_tokens)  # enough for any lengths
    needed = -(-rows.lengths // size)
    ends = jnp.cumsum(needed)
    chunk = jnp.arange(count, dtype=jnp.int32)
    sequence = jnp.searchsorted(ends, chunk, side="right").astype(jnp.int32)
    first = ends - needed
    offset = (chunk - first.at[sequence].get(mode="clip")) * size
    offset = offset[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    inside = offset < rows.lengths.at[sequence].get(mode="fill", fill_value=0)[:, None]
    tokens = rows.starts.at[sequence].get(mode="clip")[:, None] + offset
    return _Chunks(jnp.where(inside, tokens, num_tokens), sequence, first)


def _chunked(inputs, state: jax.Array, sequence: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Run the recurrence over chunks [n, C, ...] in order; rows of zeros change nothing."""
    query, key, value, log_decay, beta = inputs
    size = query.shape[1]
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))  # [n, H, C, ...]
    total = jnp.cumsum(log_decay.swapaxes(1, 2), axis=-1)  # log A_i, [n, H, C]
    visible = jnp.tril(jnp.ones((size, size), bool))[None, None]
    between = jnp.where(visible, total[..., :, None] - total[..., None, :], -jnp.inf)
    between = jnp.exp(between)  # A_i / A_j, [n, H, C, C]
    scores = _einsum("nhid,nhjd->nhij", query, key) * between
    grown = jnp.exp(total)[..., None]
    corrections = None
    if beta is not None:
        beta = beta.swapaxes(1, 2)[..., None]
        system = _einsum("nhid,nhjd->nhij", beta * key, key) * between
        both = jnp.concatenate([beta * value, beta * key * grown], axis=-1)
        both = jax.lax.linalg.triangular_solve(
            system, both, left_side=True, lower=True, unit_diagonal=True
        )
        value, corrections = both[..., : value.shape[-1]], both[..., value.shape[-1] :]
    left = jnp.exp(total[..., -1:] - total)[..., None]  # A_C / A_j

    def turn(states, chunk):
        owner, query, key, value, scores, corrections, decay = chunk
        mine = states.at[owner].get(mode="fill", fill_value=0)
        if corrections is not None:
            value = value - _einsum("hid,hvd->hiv", corrections, mine)
        out = _einsum("hij,hjv->hiv", scores, value) + _einsum("hid,hvd->hiv", query, mine)
        mine = mine * decay[:, None, None] + _einsum("hjv,hjd->hvd", value, key)
        return states.at[owner].set(mine, mode="drop"), out

    decay = jnp.exp(total[..., -1])
    chunks = (sequence, query * grown, key * left, value, scores, corrections, decay)
    state, out = jax.lax.scan(turn, state, chunks)
    return out.swapaxes(1, 2), state


def _one_token_each(inputs, state: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Run the recurrence for at most one token per sequence, without chunks or a loop."""
    has_one = rows.lengths > 0
    token = jnp.where(has_one, rows.starts[:-1], rows.sequence.shape[0])
    query, key, value, log_decay, beta = jax.tree.map(
        lambda x: x.at[token].get(mode="fill", fill_value=0), inputs
    )
    state = state * jnp.exp(log_decay)[..., None, None]
    if beta is not None:
        value = beta[..., None] * (value - _einsum("bhvd,bhd->bhv", state, key))
    state = state + value[..., :, None] * key[..., None, :]
    out = _einsum("bhvd,bhd->bhv", state, query)
    return out.at[rows.sequence].get(mode="clip"), state
