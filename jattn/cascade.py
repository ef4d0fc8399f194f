"""Attention over a prefix that all sequences of a batch share: its keys are read once.

flat:     every sequence reads the prefix and what follows it
cascade:  all query tokens together read the prefix, as one sequence that sees all of it;
          every sequence reads what follows; the two results are merged by their lse
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn import api, checks, softmax
from jattn.call import arguments


def cascade_attention(
    query: jax.Array,
    key_cache: Any,
    value_cache: Any,
    *,
    num_shared_blocks: Any,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array | None = None,
    max_query_len: int | None = None,
    scale: Any = None,
    is_causal: Any = True,
    logits_soft_cap: Any = None,
    sinks: jax.Array | None = None,
    value_dim: int | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_layout: str = "HND",
    out_dtype: Any = None,
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Any:
    """`jattn.paged_attention` where all sequences begin with the same blocks, which are read once.

    The result is that of `paged_attention` with the same arguments, for sequences whose tables
    name the same first `num_shared_blocks` blocks. With P = num_shared_blocks * S shared keys,

        out, lse = merge(attend(all tokens, the shared blocks), attend(query, what follows them))

    It pays where many sequences share many keys: the shared ones are read once instead of B times.
    Differentiable where `paged_attention` is.

    Args:
      num_shared_blocks: how many blocks, from the first on, are the same in all sequences that are
        not empty: an integer or a 0-d integer array, which compiles nothing anew. 0 shares nothing.
      query, key_cache, value_cache, block_tables, seq_lens and the others: as `paged_attention`
        takes them, shared keys included in `seq_lens`. Options that depend on where keys lie
        (windows, ALiBi, masks) are not taken: a prefix is a different distance from every sequence.

    Returns:
      As `paged_attention`. A query token inside the shared blocks breaks the promise that it comes
      after them, and gets NaN, as do all of its sequence.

    Raises:
      ValueError: arguments that do not fit, as `paged_attention`; a number of shared blocks below 0
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
    _check(key_cache, num_shared_blocks, block_tables, seq_lens, kv_layout)
    block_size = key_cache.shape[1 if kv_layout == "NHD" else 2]
    shared = jnp.asarray(num_shared_blocks, jnp.int32)
    width, num_tokens = block_tables.shape[1], query.shape[0]
    block_tables, seq_lens = jnp.asarray(block_tables), jnp.asarray(seq_lens)
    if query_start_loc is None:
        last, lens = jnp.int32(num_tokens), jnp.ones_like(seq_lens)
        sequence = jnp.arange(num_tokens, dtype=jnp.int32)
    else:
        starts = jnp.asarray(query_start_loc)
        last, lens = starts[-1], jnp.diff(starts)
        token = jnp.arange(num_tokens, dtype=starts.dtype)
        sequence = jnp.searchsorted(starts[1:], token, side="right")
    same = {
        "scale": scale,
        "logits_soft_cap": logits_soft_cap,
        "value_dim": value_dim,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "kv_layout": kv_layout,
        "out_dtype": jnp.float32,  # rounded once, after the merge
        "return_lse": True,
        "implementation": implementation,
    }
    after = jnp.maximum(seq_lens - shared * block_size, 0)
    columns = jnp.minimum(jnp.arange(width, dtype=jnp.int32) + shared, width - 1)
    out, lse = api.paged_attention(
        *(query, key_cache, value_cache),
        block_tables=jnp.take(block_tables, columns, axis=1, mode="clip"),
        seq_lens=after,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        is_causal=is_causal,
        sinks=sinks,
        **same,
    )
    # The first sequence that is not empty names the shared blocks.
    owner = jnp.argmax(seq_lens > 0)
    prefix, prefix_lse = api.paged_attention(
        *(query, key_cache, value_cache),
        block_tables=jnp.take(block_tables, owner[None], axis=0, mode="clip"),
        seq_lens=(shared * block_size)[None],
        query_start_loc=jnp.stack([jnp.zeros_like(last), last]).astype(jnp.int32),
        is_causal=False,
        **same,
    )

    def of_tokens(x: jax.Array) -> jax.Array:
        return x.at[sequence].get(mode="fill", fill_value=0)[:, None]

    prefix_lse = jnp.where(of_tokens(seq_lens) > 0, prefix_lse, -jnp.inf)
    broken = of_tokens((seq_lens > 0) & (after < lens))
    out, lse = softmax.merge_attention_states(out, lse, prefix, prefix_lse)
    out = jnp.where(broken[..., None], jnp.nan, out)
    out = out.astype(query.dtype if out_dtype is None else out_dtype)
    return (out, jnp.where(broken, jnp.nan, lse)) if return_lse else out


def _check(
    key_cache: Any, num_shared_blocks: Any, block_tables: Any, seq_lens: Any, kv_layout: Any
) -> None:
    """What the tables are cut by; all else is `paged_attention`'s to check."""
    with checks.checking("cascade_attention") as problems:
        problems.require(
            getattr(key_cache, "ndim", len(getattr(key_cache, "shape", ()))) == 4,
            "key_cache",
            checks.describe(key_cache),
            "a cache of four axes",
        )
        problems.require(
            kv_layout in arguments.LAYOUTS,
            "kv_layout",
            repr(kv_layout),
            f"one of {arguments.LAYOUTS}",
        )
        tables = getattr(block_tables, "shape", ())
        good = problems.require(
            len(tables) == 2, "block_tables", checks.describe(block_tables), "int32 [B, M]"
        )
        if good:
            problems.require(
                getattr(seq_lens, "shape", None) == tables[:1],
                "seq_lens",
                checks.describe(seq_lens),
                f"int32 [{tables[0]}], as block_tables says",
            )
        if isinstance(num_shared_blocks, numbers.Integral):
            whole = not isinstance(num_shared_blocks, bool)
            whole &= not good or 0 <= num_shared_blocks <= tables[1]
        else:
            dtype = getattr(num_shared_blocks, "dtype", None)
            whole = getattr(num_shared_blocks, "shape", None) == () and jnp.issubdtype(
                dtype, jnp.integer
            )
        most = tables[1] if good else "M"
        problems.require(
            whole,
            "num_shared_blocks",
            checks.describe(num_shared_blocks),
            f"an integer from 0 to {most}, or a 0-d integer array",
        )
