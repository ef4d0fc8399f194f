"""Named workloads: one attention layer in one step of serving, and its data.

A `Workload` is a frozen description; everything else here is a function of it. Only NumPy is
imported, so that a process without JAX (the peer's) can make exactly the same data.

`make_tokens` gives the keys and values of one sequence, and every cache layout is a rearrangement
of them. A bfloat16 array is held as its uint16 words.

Axis letters: `T` query tokens, `B` sequences, `H` query heads, `K` KV heads, `D` head size of q
and k, `V` of v, `N` blocks in the pool, `S` tokens per block, `M` width of a block table.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
SHORT_DTYPE = {"float32": "fp32", "bfloat16": "bf16"}

# Entries of block tables past a sequence's blocks; no kernel may use them.
GARBAGE_IDS = (1_000_000, -1)

# Every out-of-window token is in one shared block, as in an engine that has freed the real ones.
# The block is finite, as every written block is, but attending to it changes the result greatly.
NULL_BLOCK = 0
BAIT = 1000.0

# The length of the bank of normal values that tokens are cut from. It is prime and exceeds the
# number of rows of any workload here, so no two rows of a sequence are equal.
_BANK = 1_048_583


@dataclass(frozen=True)
class Workload:
    """One call of paged attention: lengths, heads, sizes and dtype. Every field is static.

    Attributes:
      name: the row's name in tables and in `--filter`.
      group: the group whose rows are averaged.
      query_lens: query tokens of each sequence.
      seq_lens: keys of each sequence, including this step's.
      num_heads: H.
      num_kv_heads: K; must divide H.
      head_dim: D.
      value_dim: V.
      block_size: S.
      dtype: of queries and cache, "float32" or "bfloat16".
      sliding_window: keys visible to a query, including its own; None for all.
      seed: the seed of all data.
    """

    name: str
    group: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    block_size: int
    dtype: str
    sliding_window: int | None = None
    seed: int = 0

    def __post_init__(self):
        wrong = []
        if len(self.query_lens) != len(self.seq_lens):
            wrong.append(
                f"query_lens has {len(self.query_lens)} sequences, seq_lens {len(self.seq_lens)}"
            )
        wrong += [
            f"sequence {b}: {n} query tokens but {length} keys"
            for b, (n, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=False))
            if not 1 <= n <= length
        ]
        for field in ("num_heads", "num_kv_heads", "head_dim", "value_dim", "block_size"):
            if getattr(self, field) < 1:
                wrong.append(f"{field} is {getattr(self, field)}, must be at least 1")
        if self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads:
            wrong.append(f"num_heads {self.num_heads} is no multiple of {self.num_kv_heads}")
        if self.dtype not in ITEM_BYTES:
            wrong.append(f"dtype is {self.dtype!r}, must be one of {sorted(ITEM_BYTES)}")
        if self.sliding_window is not None and self.sliding_window < 1:
            wrong.append(f"sliding_window is {self.sliding_window}, must be at least 1")
        if wrong:
            raise ValueError(f"workload {self.name}: " + "; ".join(wrong))

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def query_start(self) -> np.ndarray:
        """Return where each sequence's query tokens begin, int32 [B + 1]."""
        return np.cumsum((0, *self.query_lens), dtype=np.int32)

    def first_visible(self, b: int) -> int:
        """Return the earliest key that any query of sequence `b` sees."""
        if self.sliding_window is None:
            return 0
        return max(0, self.seq_lens[b] - self.query_lens[b] - self.sliding_window + 1)


# --- Arithmetic -----------------------------------------------------------------------------------


def kv_bytes(w: Workload) -> int:
    """Count the bytes of K and V that must be read: every visible token once per KV head."""
    tokens = sum(w.seq_lens[b] - w.first_visible(b) for b in range(w.num_seqs))
    return tokens * w.num_kv_heads * (w.head_dim + w.value_dim) * ITEM_BYTES[w.dtype]


def flops(w: Workload) -> int:
    """Count the operations of both products: 2 D + 2 V per head and visible (query, key) pair."""
    pairs = 0
    for n, length in zip(w.query_lens, w.seq_lens, strict=True):
        visible = np.arange(length - n, length, dtype=np.int64) + 1
        if w.sliding_window is not None:
            visible = np.minimum(visible, w.sliding_window)
        pairs += int(visible.sum())
    return pairs * w.num_heads * 2 * (w.head_dim + w.value_dim)


def blocks_of(w: Workload, b: int, block_size: int | None = None) -> range:
    """Return the logical blocks of sequence `b` from the first visible key to the end."""
    size = block_size or w.block_size
    return range(w.first_visible(b) // size, -(-w.seq_lens[b] // size))


def from_json(given: Mapping[str, Any]) -> Workload:
    """Make a workload from `dataclasses.asdict` that went through JSON, where tuples are lists."""
    lengths = {name: tuple(given[name]) for name in ("query_lens", "seq_lens")}
    return Workload(**{**given, **lengths})


# --- Data -----------------------------------------------------------------------------------------


def to_bfloat16_words(x: np.ndarray) -> np.ndarray:
    """Round float32 `x` to bfloat16, to nearest even, and return the uint16 words."""
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def to_float32(stored: np.ndarray) -> np.ndarray:
    """Return the float32 values of a stored array: itself, or its widened bfloat16 words."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored


def _stored(x: np.ndarray, dtype: str) -> np.ndarray:
    return to_bfloat16_words(x) if dtype == "bfloat16" else x


@functools.lru_cache(maxsize=4)
def _bank(seed: int, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    bank = _stored(rng.standard_normal(_BANK, dtype=np.float32), dtype)
    bank.setflags(write=False)
    return bank


def _cut(w: Workload, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return normal values in the stored dtype, read from the bank in a circle from `offset`."""
    return np.resize(np.roll(_bank(w.seed, w.dtype), -offset), shape)


def make_queries(w: Workload) -> np.ndarray:
    """Make queries [T, H, D], twice the usual size so that the softmax prefers some keys."""
    values = np.random.default_rng([w.seed, 1]).standard_normal(
        (w.num_tokens, w.num_heads, w.head_dim), dtype=np.float32
    )
    return _stored(values * np.float32(2), w.dtype)


def make_tokens(w: Workload, b: int, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Make keys [L, K, D] and values [L, K, V] of sequence `b` from token `start` to its end."""
    length = w.seq_lens[b] - start
    offsets = np.random.default_rng([w.seed, 2, b]).integers(_BANK, size=2)
    k_row, v_row = w.num_kv_heads * w.head_dim, w.num_kv_heads * w.value_dim
    # The offset moves with `start`, so a token does not depend on where the slice begins.
    k = _cut(w, int(offsets[0] + start * k_row) % _BANK, (length, w.num_kv_heads, w.head_dim))
    v = _cut(w, int(offsets[1] + start * v_row) % _BANK, (length, w.num_kv_heads, w.value_dim))
    return k, v


@dataclass(frozen=True)
class Pool:
    """The data of a workload as blocks, head-major (HND).

    The pool holds every sequence `copies` times, in separate blocks, with one block table per copy:
    calls that use one table after another find their keys out of cache.

    Attributes:
      key_cache: array [N, K, S, D].
      value_cache: array [N, K, S, V].
      block_tables: int32 array [copies, B, M].
    """

    key_cache: np.ndarray
    value_cache: np.ndarray
    block_tables: np.ndarray

    @property
    def copies(self) -> int:
        return self.block_tables.shape[0]


def make_block_tables(w: Workload, copies: int, block_size: int) -> tuple[np.ndarray, int]:
    """Make block tables [copies, B, M] that share no block, and N, slightly more than they name."""
    kept = [blocks_of(w, b, block_size) for b in range(w.num_seqs)]
    named = copies * sum(len(r) for r in kept)
    first = 0 if w.sliding_window is None else NULL_BLOCK + 1
    num_blocks = first + named + max(2, named // 64)
    ids = first + np.random.default_rng([w.seed, 3]).permutation(num_blocks - first)
    width = max(r.stop for r in kept) + 2
    tables = np.empty((copies, w.num_seqs, width), np.int32)
    tables[...] = np.resize(np.array(GARBAGE_IDS, np.int32), width)
    taken = 0
    for c in range(copies):
        for b, r in enumerate(kept):
            tables[c, b, : r.start] = NULL_BLOCK
            tables[c, b, r.start : r.stop] = ids[taken : taken + len(r)]
            taken += len(r)
    return tables, num_blocks


def make_pool(w: Workload, copies: int = 1) -> Pool:
    """Put the tokens of `w` in shuffled blocks; every slot that no sequence owns holds NaN."""
    tables, num_blocks = make_block_tables(w, copies, w.block_size)
    nan, bait = _stored(np.array([np.nan, BAIT], np.float32), w.dtype)
    caches = [
        np.empty((num_blocks, w.num_kv_heads, w.block_size, size), nan.dtype)
        for size in (w.head_dim, w.value_dim)
    ]
    unowned = np.ones(num_blocks, bool)
    for b in range(w.num_seqs):
        r = blocks_of(w, b)
        for cache, tokens in zip(caches, make_tokens(w, b, r.start * w.block_size), strict=True):
            past_end = len(r) * w.block_size - len(tokens)
            if past_end:
                tail = np.full((past_end, *tokens.shape[1:]), nan, tokens.dtype)
                tokens = np.concatenate([tokens, tail])
            blocks = tokens.reshape(len(r), w.block_size, *tokens.shape[1:]).swapaxes(1, 2)
            if copies > 1:
                blocks = np.ascontiguousarray(blocks)
            for table in tables[:, b, r.start : r.stop]:
                cache[table] = blocks
                unowned[table] = False
    for cache in caches:
        cache[unowned] = nan
    if w.sliding_window is not None:
        caches[0][NULL_BLOCK] = 0
        caches[1][NULL_BLOCK] = bait
    return Pool(*caches, tables)


# --- The suite ------------------------------------------------------------------------------------

# Group -> (query_lens, seq_lens, block_size, sliding_window). The mixture is one chunk of 256
# tokens that starts at position 2,048, between the next tokens of eight sequences of that length.
SHAPES = {
    "decode-block128": ((1,) * 8, (4096,) * 8, 128, None),
    "decode-block16": ((1,) * 8, (4096,) * 8, 16, None),
    "prefill": ((2048,), (2048,), 128, None),
    "mixed": ((*(1,) * 4, 256, *(1,) * 4), (*(2048,) * 4, 2304, *(2048,) * 4), 128, None),
    "window": ((1,) * 8, (16384,) * 8, 128, 1024),
    "short": ((1,), (128,), 128, None),
}
HEAD_DIMS = (64, 128, 256, 512)
NUM_HEADS = 16
NUM_KV_HEADS = (16, 4, 2, 1)


def workload(group: str, head_dim: int, num_kv_heads: int, dtype: str) -> Workload:
    """Make the member of the suite with this shape, such as `("prefill", 512, 4, "bfloat16")`."""
    query_lens, seq_lens, block_size, window = SHAPES[group]
    return Workload(
        name=f"{group}-head{head_dim}-kv{num_kv_heads}-{SHORT_DTYPE[dtype]}",
        group=group,
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_heads=NUM_HEADS,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        sliding_window=window,
    )


def suite() -> tuple[Workload, ...]:
    """Return every group at every head size, number of KV heads and dtype."""
    return tuple(
        workload(group, head_dim, num_kv_heads, dtype)
        for dtype in ("bfloat16", "float32")
        for head_dim in HEAD_DIMS
        for num_kv_heads in NUM_KV_HEADS
        for group in SHAPES
    )


def quick_suite() -> tuple[Workload, ...]:
    """Return two rows of every group and dtype: head sizes 128 and 512, 4 KV heads."""
    return tuple(w for w in suite() if w.num_kv_heads == 4 and w.head_dim in (128, 512))
