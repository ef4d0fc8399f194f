"""The meaning of attention: which keys a query sees, what a logit is, what an empty row returns.

No other place defines it. The oracle calls these functions with NumPy, the XLA path and the Mosaic
kernels with JAX; they use nothing but arithmetic, so both work. Triton and C++ cannot call them:
each has one fragment that a test compares with this file point by point.

With `n` query tokens, query token `i` of a sequence of `seq_len` keys sits at position

    q = seq_len - n + i

and sees the key at position `k`, `0 <= k < seq_len`, when all of these hold:

    causal:      k <= q   or, with a visible end,   k < visible_end
                 and, with a window,   k > q - window
    not causal:               with a window,   |q - k| < window
    either:      with chunks,   k // chunk == q // chunk
                 with selected blocks,   k // S is one of them
                 with a tree,   k is before the query tokens, or a token on the query's path

The window counts the keys visible to a query, its own included: what transformers calls
`sliding_window`, FlashAttention `(window - 1, 0)` and jax.nn `local_window_size=(window - 1, 0)`.
A visible end only extends what a query sees ahead of the causal edge. A window hides keys before a
query, but none that the end lets it see ahead: this is how Gemma masks its images.

In a tree of draft tokens, the query token `i` sees only those of its sequence's query tokens that
are on its path: itself and the earlier ones whose bit is set. A tree token's position follows from
its depth, not from its place among the query tokens: `tree_path` counts the tokens of the path
between two tokens, and `q` and `k` above are positions counted that way. Windows, chunks and
position biases therefore act as if the path alone were the sequence.

The logit of a visible key is

    s = cap * tanh(scale * (query . key) / cap) + slope * (k - q) + bias[clip(k - q, -E, E) + E]

where the soft cap, the ALiBi term and the relative position bias are optional.

A sequence whose numbers break a promise has NaN in all its rows, never a plausible number:
`broken_promises` says which.
"""

from __future__ import annotations

import typing
from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn.integers import INT32_MAX, NO_LIMIT

# A NumPy or a JAX array or a Python number. Not their union: a type checker would then want every
# operation to be defined for plain numbers too, and most here are not.
Array = Any

# How far a kernel's own tanh may be from the true one, at every argument. A capped logit is then
# off by at most `cap * TANH_ERROR`, 5e-5 for a cap of 50; the approximation in a GPU's hardware,
# good to 2^-11, would make that 0.02.
TANH_ERROR = 2.0**-20


class Sight(typing.NamedTuple):
    """The limits of visibility, other than lengths. A pytree; None for a limit not given.

    Arrays broadcast against the positions they are used with: NumPy's, JAX's or plain numbers.

    Attributes:
      is_causal: a bool, which is static, or an array of them.
      sliding_window: the keys a query sees, its own included.
      attention_chunk_size: a query sees only keys of its own chunk.
      visible_end: causal queries also see keys at positions below it.
    """

    is_causal: bool | Array = True
    sliding_window: Array | None = None
    attention_chunk_size: Array | None = None
    visible_end: Array | None = None

    def of(self, b: Array, t: Array | None = None) -> Sight:
        """Select sequence `b` and token `t`, from a sight with those axes.

        With `t` None, the result has no visible end.
        """
        causal, end = self.is_causal, self.visible_end
        return self._replace(
            is_causal=causal if isinstance(causal, bool) else causal[b],
            visible_end=None if t is None or end is None else end[t],
        )


def first_query_position(seq_len: Array, num_queries: Array) -> Array:
    """The position of a sequence's first query; negative where keys are fewer than queries."""
    return seq_len - num_queries


def visible(q_pos: Array, k_pos: Array, seq_len: Array, sight: Sight) -> Array:
    """Return whether the query at `q_pos` sees the key at `k_pos`; broadcasts, can be traced.

    The caller must add trees and selected blocks: `tree_path`, `is_selected`.
    """
    is_causal, window, chunk, visible_end = sight
    seen = (k_pos >= 0) & (k_pos < seq_len)
    reach = k_pos <= q_pos
    if visible_end is not None:
        reach = reach | (k_pos < visible_end)
    if window is not None:
        # Differences, not sums: a window of 2^31 - 1 ("no window") must not overflow.
        seen = seen & (q_pos - k_pos < window)
    if isinstance(is_causal, bool):
        if is_causal:
            seen = seen & reach
        elif window is not None:
            seen = seen & (k_pos - q_pos < window)
    elif window is None:
        seen = seen & (reach | ~is_causal)
    else:
        seen = seen & (reach | ~is_causal) & ((k_pos - q_pos < window) | is_causal)
    if chunk is not None:
        seen = seen & (q_pos // chunk == k_pos // chunk)
    return seen


def key_range(
    first_q: Array, last_q: Array, seq_len: Array, sight: Sight, xp: Any = jnp
) -> tuple[Array, Array]:
    """`(start, end)`: no query in `[first_q, last_q]` sees a key outside `start <= k < end`.

    Without visible ends the range is tight around the keys that the queries see; `start == end` if
    they see none. `sight.visible_end` must be the largest of the queries' own. Trees and selected
    blocks only remove keys. In a tree, `first_q` must be the position of the sequence's first query
    token, because any token of the tree may be as early as that.
    """
    is_causal, window, chunk, visible_end = sight
    start = xp.zeros_like(seq_len)
    end = xp.maximum(seq_len, 0)
    reach = last_q + 1 if visible_end is None else xp.maximum(last_q + 1, visible_end)
    causal_end, free_end = xp.minimum(end, reach), end
    if window is not None:
        window = xp.minimum(window, xp.full_like(seq_len, NO_LIMIT))
        start = xp.maximum(start, first_q - window + 1)
        free_end = xp.minimum(end, last_q + window)
    if isinstance(is_causal, bool):
        end = causal_end if is_causal else free_end
    else:
        end = xp.where(is_causal, causal_end, free_end)
    if chunk is not None:
        chunk = xp.minimum(chunk, xp.full_like(seq_len, NO_LIMIT))
        start = xp.maximum(start, first_q // chunk * chunk)
        end = xp.minimum(end, (last_q // chunk + 1) * chunk)
    end = xp.maximum(end, 0)
    return xp.minimum(start, end), end


def broken_promises(
    starts: Array,
    seq_lens: Array,
    block_tables: Array,
    sight: Sight,
    selected_blocks: Array | None = None,
    *,
    num_tokens: int,
    num_blocks: int,
    block_size: int,
    max_query_len: int,
    ids: bool = True,
    xp: Any = jnp,
) -> tuple[Array, Array]:
    """`(bool [B], bool [])`: sequences whose rows are NaN, and whether all rows of the call are.

    A sequence breaks a promise when it has more query tokens than `max_query_len`, more keys than
    its table has room for, or an id outside the pool where its queries may see a key: ids behind a
    window, outside a chunk or not selected may be anything. Starts that do not begin at 0, decrease
    or exceed the tokens do not tell which tokens belong to which sequence: all rows are NaN.

    Args:
      starts: int32 [B + 1]; `query_start_loc`.
      seq_lens, block_tables, selected_blocks: int32 [B], [B, M], [B, M'] or None.
      sight: of the sequences.
      num_tokens, num_blocks, block_size, max_query_len: T, N, S and the bound.
      ids: whether to check ids; if not, the caller must.
    """
    counts = starts[1:] - starts[:-1]
    # Compare entries, because a count may wrap around.
    ordered = (starts[0] == 0) & (starts[1:] >= starts[:-1]).all() & (starts[-1] <= num_tokens)
    width = block_tables.shape[1]
    capacity = min(width * block_size, INT32_MAX)
    broken = (counts > max_query_len) | (seq_lens > capacity)
    if not ids:
        return broken | ~ordered, ~ordered
    # The last query sits at the last key, so visible ends reach no further.
    start, end = key_range(
        first_query_position(seq_lens, counts),
        seq_lens - 1,
        xp.minimum(seq_lens, xp.full_like(seq_lens, capacity)),
        sight._replace(visible_end=None),
        xp,
    )
    if selected_blocks is None:
        columns, named = xp.arange(width, dtype=np.int32)[None], block_tables
    else:
        columns = selected_blocks
        named = xp.take_along_axis(block_tables, xp.clip(columns, 0, width - 1), axis=1)
    used = (columns >= (start // block_size)[:, None]) & (
        columns <= ((end - 1) // block_size)[:, None]
    )
    used = used & ((end > start) & (counts > 0))[:, None]
    broken = broken | (used & ((named < 0) | (named >= num_blocks))).any(axis=1)
    return broken | ~ordered, ~ordered


def is_selected(k_pos: Array, selected_blocks: Array, block_size: int) -> Array:
    """Return whether the key's block is among `selected_blocks` [..., M'], with one more axis."""
    return (k_pos[..., None] // block_size == selected_blocks).any(axis=-1)


def selected_columns(
    selected_blocks: Array, start: Array, end: Array, block_size: int, width: int, xp: Any = jnp
) -> tuple[Array, Array]:
    """`(columns int32 [P, M'], count int32 [P])`: the selected blocks with keys in `[start, end)`.

    The first `count` entries of a row are the columns, each once, ascending; the rest are `width`.
    An empty range has none.

    Args:
      selected_blocks: int32 [P, M'].
      start, end: int32 [P], from `key_range`.
      block_size, width: S and M.
    """
    none = np.int32(width)
    inside = selected_blocks >= (start // block_size)[:, None]
    inside = inside & (selected_blocks <= ((end - 1) // block_size)[:, None])
    columns = xp.where(inside & (end > start)[:, None], selected_blocks, none)
    columns = xp.sort(columns, axis=1)
    again = xp.pad(columns[:, 1:] == columns[:, :-1], ((0, 0), (1, 0)))
    columns = xp.sort(xp.where(again, none, columns), axis=1)
    return columns, (columns < none).sum(axis=1, dtype=np.int32)


def path_bits(tree_mask: Array, query: Array, xp: Any = jnp) -> Array:
    """Return the bits of a query token's path: itself, and the earlier ones that its mask names.

    Args:
      tree_mask: uint32 [..., W]; bit `j % 32` of word `j // 32` is the sequence's query token `j`.
      query: int32 [...]; its index among its sequence's query tokens.
    """
    words = []
    for word in range(tree_mask.shape[-1]):
        until = _bits_until(query - 32 * word, xp)
        before = _bits_until(query - 1 - 32 * word, xp)
        words.append((tree_mask[..., word] & before) | (until ^ before))
    return xp.stack(words, axis=-1)


def tree_path(bits: Array, query: Array, key: Array, xp: Any = jnp) -> tuple[Array, Array]:
    """`(seen, distance)` from query token `query` to `key`, both of one sequence; broadcasts.

    `key` counts from the sequence's first query token. Negative ones are the keys before it, which
    every query token sees. `distance` is how many tokens of the query's path come after the key, up
    to the query: the difference of their true positions if the key is seen. Query tokens past the
    32 W bits of the mask form a plain chain: all later ones see them.

    Args:
      bits: uint32 [..., W] from `path_bits`; `query` and `key` are int32 without the last axis.
    """
    size = 32 * bits.shape[-1]
    one = xp.uint32(1)
    seen = (key < 0) | ((key >= size) & (key <= query))
    distance = xp.maximum(query - xp.maximum(key, size - 1), 0) + xp.maximum(-1 - key, 0)
    for word in range(bits.shape[-1]):
        path, at = bits[..., word], key - 32 * word
        bit = (path >> (at & 31).astype(xp.uint32)) & one
        seen = seen | ((at >= 0) & (at < 32) & (bit == one))
        after = xp.bitwise_count(path & ~_bits_until(at, xp))
        distance = distance + after.astype(distance.dtype)
    return seen, distance


def _bits_until(last: Array, xp: Any) -> Array:
    """Return a uint32 with bits 0 to `last` set: none if it is negative, all from 31 on."""
    one = xp.uint32(1)
    shift = xp.clip(last + 1, 0, 31).astype(xp.uint32)
    return xp.where(last >= 31, xp.uint32(2**32 - 1), (one << shift) - one)


def relative_index(q_pos: Array, k_pos: Array, num_columns: int, xp: Any = jnp) -> Array:
    """Return the column of a bias table with E = num_columns // 2: `clip(k - q, -E, E) + E`."""
    extent = num_columns // 2
    return xp.clip(k_pos - q_pos, -extent, extent) + extent


def transform_logits(
    dots: Array,
    *,
    scale: Array,
    logits_soft_cap: Array | None,
    alibi_slopes: Array | None,
    q_pos: Array,
    k_pos: Array,
    position_bias: Array | None = None,
    xp: Any = jnp,
) -> Array:
    """Turn the dot products `query . key` into scaled, capped, biased logits. Broadcasts.

    `position_bias` is the entry of the bias table at `relative_index`.
    """
    logits = dots * scale
    if logits_soft_cap is not None:
        logits = logits_soft_cap * xp.tanh(logits / logits_soft_cap)
    if alibi_slopes is not None:
        distance = k_pos - q_pos
        logits = logits + alibi_slopes * distance.astype(logits.dtype)
    if position_bias is not None:
        logits = logits + position_bias
    return logits


def empty_row_lse(sink: Array | None) -> Array:
    """The lse of a row that sees nothing; its output is zeros."""
    return -np.inf if sink is None else sink
