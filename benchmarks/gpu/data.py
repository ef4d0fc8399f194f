"""Make the data of a GPU workload, and check a result for it.

Every element of the pools is a function of its block and its place in the block: a hash picks one
of 65,536 normal numbers. JAX, torch and NumPy make exactly the same bytes from it on any device, so
peers in another process get our data without gigabytes being sent.

Axis letters: `T` query tokens, `B` sequences, `H` query heads, `K` KV heads, `D` head size of q
and k, `V` of v, `N` blocks in the pool, `S` tokens per block, `M` width of a block table.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu import workloads as gpu_workloads
from benchmarks.workloads import Workload, make_block_tables, to_bfloat16_words

# How far sampled rows may be off, in bfloat16 ulps of the largest output.
ULPS = 4
QUERY, KEY, VALUE = range(3)
_MASK = 0xFFFFFFFF


# --- The data -------------------------------------------------------------------------------------


def normal_words(scale: float = 1.0) -> np.ndarray:
    """Return 65,536 normal numbers times `scale`, as uint16 words of bfloat16."""
    numbers = np.random.default_rng(0).standard_normal(2**16, dtype=np.float32)
    return to_bfloat16_words(numbers * np.float32(scale))


def _mix(x: Any, number: Callable[[int], Any]) -> Any:
    """Mix 32 bits by a bijection (Wellons' `lowbias32`)."""
    x = x ^ (x >> number(16))
    x = (x * number(0x7FEB352D)) & number(_MASK)
    x = x ^ (x >> number(15))
    x = (x * number(0x846CA68B)) & number(_MASK)
    return x ^ (x >> number(16))


def choices(stream: int, rows: Any, columns: Any, number: Callable[[int], Any] = np.uint32) -> Any:
    """Return which of the normal numbers is at (row, column) of `QUERY`, `KEY` or `VALUE`.

    Args:
      stream: which array.
      rows: [R, 1], unsigned integers of 32 bits or more.
      columns: [1, C], the same.
      number: makes a constant of their dtype.

    Returns:
      [R, C], below 65,536.
    """
    seed = (stream + 1) * 0x9E3779B9 & _MASK
    hashed = _mix((rows + number(seed)) & number(_MASK), number)
    return _mix((hashed + columns) & number(_MASK), number) >> number(16)


class Data(NamedTuple):
    """A workload's arrays on the device; tables [copies, B, M]. A pytree, for `jax.jit`."""

    query: Any
    key_cache: Any
    value_cache: Any
    tables: Any
    seq_lens: Any
    starts: Any


def arrays_of(w: Workload, copies: int, make: Callable[[int, tuple[int, ...], float], Any]) -> Data:
    """Make queries and pools by `make(stream, shape, scale)`; the rest in NumPy."""
    tables, num_blocks = make_block_tables(w, copies, w.block_size)
    block = (num_blocks, w.num_kv_heads, w.block_size)
    return Data(
        make(QUERY, (w.num_tokens, w.num_heads, w.head_dim), 2.0),
        make(KEY, (*block, w.head_dim), 1.0),
        make(VALUE, (*block, w.value_dim), 1.0),
        tables,
        np.asarray(w.seq_lens, np.int32),
        np.asarray(w.query_start(), np.int32),
    )


def described(w: Workload) -> Data:
    """Return the shapes and dtypes of the data, and of one table, as `jax.ShapeDtypeStruct`s."""
    import jax
    import jax.numpy as jnp

    struct = jax.ShapeDtypeStruct
    data = arrays_of(w, 1, lambda stream, shape, scale: struct(shape, jnp.bfloat16))
    data = data._replace(tables=data.tables[0])
    return jax.tree.map(lambda x: struct(x.shape, x.dtype), data)


def arguments(w: Workload, data: Data, table: Any) -> dict[str, Any]:
    """Return the arguments of `jattn.paged_attention` on one of the copies."""
    return {
        "query": data.query,
        "key_cache": data.key_cache,
        "value_cache": data.value_cache,
        "block_tables": table,
        "seq_lens": data.seq_lens,
        "query_start_loc": data.starts,
        "max_query_len": w.max_query_len,
        "sliding_window": w.sliding_window,
    }


def num_copies(w: Workload, l2_bytes: int) -> int:
    """Return how many copies of the keys make a loop over them read five times L2."""
    size = max(1, gpu_workloads.moved_bytes(w))
    return int(min(32, max(2, -(-5 * l2_bytes // size))))


def make_data(w: Workload, l2_bytes: int) -> Data:
    """Make queries and pools, and tables of enough copies to exceed five times L2."""
    import jax
    import jax.numpy as jnp

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def make(stream: int, shape: tuple[int, ...], words: Any) -> Any:
        numbers = jax.lax.bitcast_convert_type(words, jnp.bfloat16)
        rows = jnp.arange(shape[0], dtype=jnp.uint32)[:, None]
        columns = jnp.arange(np.prod(shape[1:]), dtype=jnp.uint32)[None]
        return jnp.take(numbers, choices(stream, rows, columns)).reshape(shape)

    def of(stream: int, shape: tuple[int, ...], scale: float) -> Any:
        return make(stream, shape, normal_words(scale))

    return jax.tree.map(jnp.asarray, arrays_of(w, num_copies(w, l2_bytes), of))


def named_blocks(w: Workload, tables: np.ndarray) -> np.ndarray:
    """Cut tables [..., B, M] to the blocks that are used, with block 0 past a sequence's end.

    This is for kernels that read everything in a table.
    """
    used = -(-np.asarray(w.seq_lens) // w.block_size)
    tables = tables[..., : used.max()]
    return np.where(np.arange(used.max()) < used[:, None], tables, 0).astype(np.int32)


def visible_slots(w: Workload, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the visible tokens are, for kernels that need them contiguous.

    Args:
      w: the workload.
      tables: [copies, B, M].

    Returns:
      Slots `block * S + place`, int64 [copies, B, L], filled past a sequence's end with its first
      slot; and the number of tokens of each sequence, [B].
    """
    firsts = np.array([w.first_visible(b) for b in range(w.num_seqs)])
    lengths = np.asarray(w.seq_lens) - firsts
    places = np.arange(lengths.max())
    positions = firsts[:, None] + np.where(places < lengths[:, None], places, 0)
    blocks = np.take_along_axis(tables, (positions // w.block_size)[None], axis=-1)
    return blocks.astype(np.int64) * w.block_size + positions % w.block_size, lengths


# --- The answer -----------------------------------------------------------------------------------


def sampled_rows(w: Workload) -> list[tuple[int, int]]:
    """Return `(sequence, its query token)` of the batch's first and last, and some between."""
    rng = np.random.default_rng(w.seed)
    picked = {(0, 0), (w.num_seqs - 1, w.query_lens[-1] - 1)}
    while len(picked) < min(6, w.num_tokens):
        b = int(rng.integers(w.num_seqs))
        picked.add((b, int(rng.integers(w.query_lens[b]))))
    return sorted(picked)


def sampled_tokens(w: Workload) -> list[int]:
    """Return the same as indices into the T query tokens."""
    starts = w.query_start()
    return [int(starts[b]) + i for b, i in sampled_rows(w)]


def expected_row(w: Workload, data: Data, table: np.ndarray, b: int, i: int) -> np.ndarray:
    """Compute [H, V] of one query token, in float64."""
    position = w.seq_lens[b] - w.query_lens[b] + i
    first = 0 if w.sliding_window is None else max(0, position - w.sliding_window + 1)
    blocks = table[b, first // w.block_size : position // w.block_size + 1]
    skip = first - first // w.block_size * w.block_size

    def tokens(cache: Any) -> np.ndarray:
        pages = np.asarray(cache[np.asarray(blocks)]).astype(np.float64)
        flat = pages.swapaxes(1, 2).reshape(-1, *pages.shape[1:2], pages.shape[3])
        return flat[skip : skip + position - first + 1].swapaxes(0, 1)

    query = np.asarray(data.query[int(w.query_start()[b]) + i]).astype(np.float64)
    query = query.reshape(w.num_kv_heads, -1, w.head_dim)
    logits = np.einsum("kgd,knd->kgn", query, tokens(data.key_cache)) * w.scale
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("kgn,knv->kgv", weights, tokens(data.value_cache)).reshape(w.num_heads, -1)


def expected_rows(w: Workload, data: Data, table: np.ndarray) -> np.ndarray:
    """Compute [n, H, V] of the sampled rows, in float64."""
    return np.stack([expected_row(w, data, table, b, i) for b, i in sampled_rows(w)])


def wrong_rows(w: Workload, want: np.ndarray, have: np.ndarray) -> list[str]:
    """Describe sampled rows [n, H, V] that differ from float64 more than bfloat16 explains."""
    found = []
    for (b, i), exact, row in zip(sampled_rows(w), want, have, strict=True):
        allowed = ULPS * np.abs(exact).max() * 2.0**-8
        error = np.abs(row.astype(np.float64) - exact).max()
        if not error <= allowed:
            found.append(f"sequence {b}, token {i}: off by {error:.3g}, allowed {allowed:.3g}")
    return found
