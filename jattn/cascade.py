"""Attention over a prefix that all sequences of a batch share: its keys are read once.

flat:     every sequence reads the prefix and what follows it
cascade:  all query tokens together read the prefix, as one sequence that sees all of it;
          every sequence reads what follows; the two results are merged by their lse
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jattn import api, checks, formats, integers, softmax
from jattn import call as calls
from jattn.call import arguments, arrays
from jattn.varying import gathered


@overload
def cascade_attention(
    query: calls.Array,
    key_cache: formats.Cache,
    value_cache: formats.Cache | None,
    *,
    num_shared_blocks: calls.Integer,
    return_lse: Literal[False] = False,
    **options: Unpack[calls.CascadeOptions[calls.Array]],
) -> jax.Array: ...


@overload
def cascade_attention(
    query: calls.Array,
    key_cache: formats.Cache,
    value_cache: formats.Cache | None,
    *,
    num_shared_blocks: calls.Integer,
    return_lse: Literal[True],
    **options: Unpack[calls.CascadeOptions[calls.Array]],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def cascade_attention(
    query: calls.Array,
    key_cache: formats.Cache,
    value_cache: formats.Cache | None,
    *,
    num_shared_blocks: calls.Integer,
    return_lse: bool,
    **options: Unpack[calls.CascadeOptions[calls.Array]],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def cascade_attention(
    query: calls.Array,
    key_cache: formats.Cache,
    value_cache: formats.Cache | None,
    *,
    num_shared_blocks: calls.Integer,
    block_tables: calls.Array,
    seq_lens: calls.Array,
    query_start_loc: calls.Array | None = None,
    max_query_len: int | None = None,
    scale: calls.Number | None = None,
    is_causal: bool | calls.Array = True,
    logits_soft_cap: calls.Number | None = None,
    sinks: calls.Array | None = None,
    value_dim: int | None = None,
    k_scale: calls.Number | None = None,
    v_scale: calls.Number | None = None,
    kv_layout: str | None = None,
    out_dtype: DTypeLike | None = None,
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute `jattn.paged_attention` for sequences that share their first blocks, read once.

    The result is that of `paged_attention` with the same arguments, for sequences whose tables
    name the same first `num_shared_blocks` blocks:

        out, lse = merge(attend(all tokens, the shared blocks), attend(query, what follows them))

    This pays off if many sequences share many keys, which are then read once instead of B times.
    Differentiable where `paged_attention` is.

    Args:
      num_shared_blocks: how many leading blocks are the same in all sequences that are not empty:
        an integer or a 0-d integer array. A new value compiles nothing. 0 shares nothing.
      query, key_cache, value_cache, block_tables, seq_lens and the others: as in `paged_attention`;
        `seq_lens` include shared keys. Options that depend on where keys are (windows, ALiBi,
        masks) are not accepted: a prefix is at a different distance from every sequence.
      implementation: as in `paged_attention`, except "mosaic_gpu", which cannot write the float32
        results that are merged.

    Returns:
      As `paged_attention`. If a query token is in the shared blocks, its whole sequence is NaN. If
      `num_shared_blocks` is a JAX array whose value is out of range, all sequences are.

    Raises:
      ValueError: arguments do not fit, as in `paged_attention`, or `num_shared_blocks` is below 0
        or above the width of `block_tables`.
      UnsupportedError: as `paged_attention`.

    Example:
      >>> import jax.numpy as jnp, jattn
      >>> caches = jattn.init_kv_cache(8, 1, 16, 64)
      >>> tables = jnp.asarray([[3, 5, 1], [3, 5, 2]], jnp.int32)  # blocks 3 and 5 are shared
      >>> query, lens = jnp.ones((2, 2, 64), jnp.bfloat16), jnp.asarray([40, 33], jnp.int32)
      >>> jattn.cascade_attention(
      ...     query, *caches, num_shared_blocks=2, block_tables=tables, seq_lens=lens).shape
      (2, 2, 64)
    """
    common: calls.Options[calls.Array] = {
        "scale": scale,
        "logits_soft_cap": logits_soft_cap,
        "value_dim": value_dim,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "kv_layout": kv_layout,
        "out_dtype": out_dtype,
        "implementation": implementation,
    }
    options: calls.Options[calls.Array] = {**common, "is_causal": is_causal, "sinks": sinks}
    given = calls.Arguments(
        *(query, key_cache, value_cache),
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        return_lse=return_lse,
        **options,
    )
    call = calls.describe_call(given, "cascade_attention")
    arrays.check_numbers("cascade_attention", vars(given))
    _check_shared(num_shared_blocks, call.table_width)
    query = jnp.asarray(query)
    batch = _Batch.of(call, num_shared_blocks, block_tables, seq_lens, query_start_loc)
    # Rounded once, after the merge.
    common["out_dtype"] = options["out_dtype"] = jnp.float32
    out, lse = api.paged_attention(
        *(query, key_cache, value_cache),
        block_tables=batch.tables_after(),
        seq_lens=batch.keys_after(),
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        return_lse=True,
        **options,
    )
    common["is_causal"] = False
    prefix, prefix_lse = api.paged_attention(
        *(query, key_cache, value_cache), **batch.as_one_sequence(), return_lse=True, **common
    )
    prefix_lse = jnp.where(batch.of_tokens(batch.seq_lens) > 0, prefix_lse, -jnp.inf)
    broken = batch.of_tokens(batch.broken_promises())
    out, lse = softmax.merge_attention_states(out, lse, prefix, prefix_lse)
    out = jnp.where(broken[..., None], jnp.nan, out)
    out = out.astype(query.dtype if out_dtype is None else out_dtype)
    return (out, jnp.where(broken, jnp.nan, lse)) if return_lse else out


def _check_shared(num_shared_blocks: object, width: int) -> None:
    """Raise `ValueError` unless a table of this width has so many blocks."""
    known = integers.of_array(num_shared_blocks)
    with checks.checking("cascade_attention") as problems:
        problems.expect(
            integers.is_int(known, 0) and int(known) <= width
            if isinstance(known, numbers.Number)
            else arrays.matches(num_shared_blocks, np.integer, ()),
            "num_shared_blocks",
            num_shared_blocks,
            f"an integer from 0 to {width}, or a 0-d integer array",
        )


@dataclasses.dataclass(frozen=True)
class _Batch:
    """A batch whose sequences share their first blocks, as arrays and two static sizes."""

    block_tables: jax.Array  # int32 [B, M]
    seq_lens: jax.Array  # int32 [B]
    query_lens: jax.Array  # int32 [B]
    num_tokens: jax.Array  # int32 []: T without padding
    sequence: jax.Array  # int32 [T]: each token's sequence; B or more for padding
    shared: jax.Array  # int32 []: how many blocks, from 0 to M
    out_of_range: jax.Array  # bool []: whether `num_shared_blocks` was not within 0 to M
    block_size: int  # S
    capacity: int  # keys that a table row has room for

    @classmethod
    def of(
        cls,
        call: calls.Call,
        num_shared_blocks: calls.Integer,
        block_tables: calls.Array,
        seq_lens: calls.Array,
        query_start_loc: calls.Array | None,
    ) -> _Batch:
        """The batch of a checked call."""
        # Only the device may see that it is out of range, which breaks every sequence's promise.
        promised = jnp.asarray(num_shared_blocks)
        if promised.dtype.itemsize < 4:  # fewer bits may not hold the width
            promised = promised.astype(jnp.int32)
        shared = jnp.clip(promised, 0, call.table_width).astype(jnp.int32)
        out_of_range = (promised < 0) | (promised > call.table_width)
        # Explicit axes refuse to gather rows of arrays that they split.
        block_tables, seq_lens = gathered((jnp.asarray(block_tables), jnp.asarray(seq_lens)))
        if query_start_loc is None:
            last, query_lens = jnp.int32(call.num_tokens), jnp.ones_like(seq_lens)
            sequence = jnp.arange(call.num_tokens, dtype=jnp.int32)
        else:
            starts = gathered(jnp.asarray(query_start_loc))
            last, query_lens = starts[-1], jnp.diff(starts)
            token = jnp.arange(call.num_tokens, dtype=starts.dtype)
            sequence = jnp.searchsorted(starts[1:], token, side="right")
        return cls(
            *(block_tables, seq_lens, query_lens, last, sequence, shared, out_of_range),
            block_size=call.block_size,
            capacity=call.capacity,
        )

    def keys_after(self) -> jax.Array:
        """int32 [B]: keys that follow the shared ones."""
        return jnp.maximum(self.seq_lens - self.shared * self.block_size, 0)

    def tables_after(self) -> jax.Array:
        """int32 [B, M]: the blocks that follow the shared ones."""
        width = self.block_tables.shape[1]
        columns = jnp.minimum(jnp.arange(width, dtype=jnp.int32) + self.shared, width - 1)
        return jnp.take(self.block_tables, columns, axis=1, mode="clip")

    def as_one_sequence(self) -> arguments.Batch[calls.Array]:
        """Describe one sequence with all query tokens, whose keys are the shared ones."""
        # The first sequence that is not empty names the shared blocks.
        owner = jnp.argmax(self.seq_lens > 0)
        last = self.num_tokens
        return {
            "block_tables": jnp.take(self.block_tables, owner[None], axis=0, mode="clip"),
            "seq_lens": (self.shared * self.block_size)[None],
            "query_start_loc": jnp.stack([jnp.zeros_like(last), last]).astype(jnp.int32),
        }

    def broken_promises(self) -> jax.Array:
        """bool [B]: sequences with a query token in the shared blocks, or more keys than the table.

        If `out_of_range`, all of them; empty sequences never are.
        """
        too_short = self.keys_after() < self.query_lens
        # `tables_after` is as wide as the whole table, so `paged_attention` cannot detect this.
        too_long = self.seq_lens > self.capacity
        return (self.seq_lens > 0) & (too_short | too_long | self.out_of_range)

    def of_tokens(self, x: jax.Array) -> jax.Array:
        """Give every token its sequence's value, [T, 1] from [B]; 0 for padding."""
        return x.at[self.sequence].get(mode="fill", fill_value=0)[:, None]
