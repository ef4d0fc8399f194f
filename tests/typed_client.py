"""The types that a caller sees of jattn: mypy reads this file, and nothing runs it."""

from __future__ import annotations

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jattn
import jattn.blocks as jb
import jattn.nnx
import jattn.sharding


def caches() -> None:
    """A cache's type says whether there are values; writing gives back the type it was given."""
    keys, values = jattn.init_kv_cache(8, 1, 16, 64, format=(jattn.Fp8("e4m3"), jattn.Int8()))
    assert_type(keys, jattn.KVArray)
    new, slots = jnp.zeros((2, 1, 64)), jnp.zeros((2,), jnp.int32)
    written = jattn.update_kv_cache(keys, values, new, new, slots, kv_layout="HND")
    assert_type(written, tuple[jattn.KVArray, jattn.KVArray])
    latents = jattn.init_kv_cache(8, 1, 16, 64, values_in_keys=True)
    assert_type(latents, tuple[jattn.KVArray, None])
    pool = jnp.zeros((8, 1, 16, 64))
    assert_type(jattn.update_kv_cache(pool, pool, new, new, slots), tuple[jax.Array, jax.Array])
    assert_type(keys.values(), jax.Array)
    assert_type(keys.nbytes, int)


def attention(query: jax.Array, keys: jattn.KVArray, pool: jax.Array, wants_lse: bool) -> None:
    """`return_lse` decides what comes back; a cache is an array or a `KVArray`."""
    meta = jattn.AttentionMetadata.from_lengths([1, 3], np.array([17, 3]), [[3, 5], [1, 0]], 16)
    tables, lens = meta.block_tables, meta.seq_lens
    out = jattn.paged_attention(query, keys, keys, block_tables=tables, seq_lens=lens)
    assert_type(out, jax.Array)
    both = jattn.paged_attention(
        *(query, pool, pool),
        block_tables=tables,
        seq_lens=lens,
        is_causal=False,
        scale=0.1,
        sinks=jnp.zeros(4),
        implementation=("native", "xla"),
        return_lse=True,
    )
    assert_type(both, tuple[jax.Array, jax.Array])
    either = jattn.paged_attention(
        query, keys, None, block_tables=tables, seq_lens=lens, value_dim=32, return_lse=wants_lse
    )
    assert_type(either, jax.Array | tuple[jax.Array, jax.Array])
    assert_type(jattn.merge_attention_states(*both, *both), tuple[jax.Array, jax.Array])
    batch = meta.as_kwargs()
    for lse in (False, wants_lse):
        some = jattn.cascade_attention(
            *(query, keys, keys), num_shared_blocks=1, return_lse=lse, **batch
        )
        assert_type(some, jax.Array | tuple[jax.Array, jax.Array])
    shared = jattn.cascade_attention(query, keys, keys, num_shared_blocks=1, **batch)
    assert_type(shared, jax.Array)
    why = jattn.explain(query, keys, keys, **meta.as_kwargs())
    assert_type(why.taken, str | None)
    assert_type(why.refusals, dict[str, tuple[str, ...]])


def several_devices(query: jax.Array, keys: jattn.KVArray, mesh: Mesh, wants_lse: bool) -> None:
    """`jattn.sharding` has the types of the functions that it stands for."""
    batch = jattn.AttentionMetadata.from_lengths([3], [3], [[5]], 16).as_kwargs()
    out = jattn.sharding.paged_attention(
        *(query, keys, keys), mesh=mesh, axis_name="heads", **batch
    )
    assert_type(out, jax.Array)
    where = jattn.sharding.paged_attention(
        *(query, keys, keys), mesh=mesh, axis_name="heads", return_lse=wants_lse, **batch
    )
    assert_type(where, jax.Array | tuple[jax.Array, jax.Array])


def layers(
    attention: jattn.nnx.PagedAttention, query: jax.Array, new: jax.Array, wants_lse: bool
) -> None:
    """A module's result is that of the function."""
    batch = jattn.AttentionMetadata.from_lengths([3], [3], [[5]], 16)
    assert_type(attention(query, new, new, batch), jax.Array)
    assert_type(attention.attend(query, batch, sliding_window=5), jax.Array)
    both = attention(query, new, new, batch, return_lse=True)
    assert_type(both, tuple[jax.Array, jax.Array])
    either = attention.attend(query, batch, return_lse=wants_lse)
    assert_type(either, jax.Array | tuple[jax.Array, jax.Array])
    attention.attend(query, batch, value_dim="8")  # type: ignore[call-overload]


def numbers(query: jax.Array, keys: jattn.KVArray, meta: jattn.AttentionMetadata) -> None:
    """Numbers are Python's, NumPy's, or arrays."""
    batch = meta.as_kwargs()
    jattn.paged_attention(
        *(query, keys, keys),
        **batch,
        sliding_window=np.int32(5),
        attention_chunk_size=np.asarray(8),
        scale=np.float32(0.1),
        logits_soft_cap=np.int64(30),
        k_scale=np.ones(1, np.float32),
        v_scale=jnp.ones(()),
    )
    jattn.cascade_attention(query, keys, keys, num_shared_blocks=np.int32(1), **batch)
    jattn.paged_attention(query, keys, keys, **batch, scale="1")  # type: ignore[call-overload]
    jattn.paged_attention(  # type: ignore[call-overload]
        query, keys, keys, **batch, sliding_window=np.float32(5)
    )


def structs(query: jax.Array, keys: jattn.KVArray, struct: jax.ShapeDtypeStruct) -> None:
    """`explain` takes arrays or structs; what computes takes arrays only."""
    jattn.explain(
        *(struct, struct, struct),
        block_tables=struct,
        seq_lens=np.asarray([3]),
        scale=struct,
        sliding_window=np.int32(5),
        sinks=struct,
    )
    lens = jnp.asarray([3])
    jattn.paged_attention(  # type: ignore[call-overload]
        struct, keys, keys, block_tables=lens, seq_lens=lens
    )
    jattn.paged_attention(  # type: ignore[call-overload]
        query, struct, struct, block_tables=lens, seq_lens=lens
    )
    jattn.paged_attention(  # type: ignore[call-overload]
        query, keys, keys, block_tables=lens, seq_lens=lens, sinks=struct
    )


def blocks(row: jax.Array, slots: jb.StateSlots) -> None:
    """Block ids and rows are integers, arrays of them, or lists."""
    tables = jb.init_block_tables([jb.BlockGroup(16, 4)], max_num_seqs=2)
    tables, _ = jb.append_block_ids(tables, row, [[7, 3, 0]], np.asarray([2]))
    assert_type(jb.move_row(tables, 0, row), jb.BlockTables)
    jb.move_row(tables, "0", 1)  # type: ignore[arg-type]
    jb.zero_pages(slots, [1.5])  # type: ignore[arg-type]


def mistakes(query: jax.Array, keys: jattn.KVArray) -> None:
    """Each of these lines is an error; mypy says so if one is not."""
    where = {"block_tables": query, "seq_lens": query}
    jattn.paged_attention(query, keys, keys)  # type: ignore[call-overload]
    jattn.paged_attention(query, "keys", keys, **where)  # type: ignore[call-overload]
    jattn.init_kv_cache(8, 1, 16, 64, format="bfloat16")  # type: ignore[call-overload]
