"""The GPU suite: layers of real models with batches, as frozen workloads, and their least times.

A batch is written `<n>q<queries>s<keys>`, several joined by `_`: `2q4s8k_q512` is two sequences
with 4 query tokens and 8,192 keys and one that prefills 512. This is only arithmetic; nothing runs.
"""

import re

from benchmarks.workloads import Workload, flops, kv_bytes

# Model layer: H, K, D, sliding window.
LAYERS = {
    "llama-8b": (32, 8, 128, None),
    "llama-70b-tp4": (16, 2, 128, None),
    "qwen3-next": (16, 2, 256, None),
    "gpt-oss": (64, 8, 64, None),
    "gpt-oss-window": (64, 8, 64, 128),
    "gemma4-31b-window": (32, 16, 256, 1024),
    "gemma4-31b": (32, 4, 512, None),
    "gemma4-31b-tp4": (8, 1, 512, None),
}
BATCHES = {
    "llama-8b": (
        *("q1s8k", "32q1s4k", "128q1s2k", "64q1s32k", "q8k", "q128s32k", "q2ks32k"),
        "q2k_64q1s4k",
    ),
    "llama-70b-tp4": ("64q1s8k", "q1s128k", "q8k", "8q4s16k"),
    "qwen3-next": ("64q1s8k", "q1s128k", "q8k"),
    "gpt-oss": ("64q1s8k", "q8k"),
    "gpt-oss-window": ("64q1s8k", "q8k"),
    "gemma4-31b-window": ("64q1s8k", "q8k"),
    "gemma4-31b": (
        *("q1s8k", "q1s128k", "16q1s8k", "64q1s8k", "64q4s8k", "q2k", "q8k", "q2ks32k"),
        *("q2k_64q1s4k", "q257_7q1s1057_3q4s2051_2q129s4093"),
    ),
    "gemma4-31b-tp4": ("64q1s8k", "q8k", "q128s64k"),
}


def parse_batch(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parse a batch into `(query_lens, seq_lens)`.

    Raises:
      ValueError: a part is not `<n>q<queries>s<keys>`.
    """
    query_lens, seq_lens = [], []
    for part in text.split("_"):
        found = re.fullmatch(r"(\d*)q(\d+)(k?)(?:s(\d+)(k?))?", part)
        if found is None:
            raise ValueError(f"batch {text!r}: {part!r} is not <n>q<queries>s<keys>")
        count, queries, thousands, keys, key_thousands = found.groups()
        queries = int(queries) * (1024 if thousands else 1)
        keys = queries if keys is None else int(keys) * (1024 if key_thousands else 1)
        query_lens += [queries] * int(count or 1)
        seq_lens += [keys] * int(count or 1)
    return tuple(query_lens), tuple(seq_lens)


def workload(layer: str, batch: str, block_size: int = 16) -> Workload:
    """Make one workload of the suite, in bfloat16."""
    num_heads, num_kv_heads, head_dim, window = LAYERS[layer]
    query_lens, seq_lens = parse_batch(batch)
    return Workload(
        name=f"{layer}-{batch}-block{block_size}",
        group="decode" if max(query_lens) <= 8 else "prefill",
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        block_size=block_size,
        dtype="bfloat16",
        sliding_window=window,
    )


def suite(block_size: int = 16) -> tuple[Workload, ...]:
    """Return all workloads."""
    return tuple(
        workload(layer, batch, block_size)
        for layer, batches in BATCHES.items()
        for batch in batches
    )


def moved_bytes(w: Workload) -> int:
    """Count the bytes to read and write once: visible keys and values, queries and outputs."""
    rows = w.num_tokens * w.num_heads * (w.head_dim + w.value_dim)
    return kv_bytes(w) + 2 * rows


def floor(w: Workload, read_rate: float, matrix_rate: float) -> tuple[float, str]:
    """Return `(seconds, "read" or "matrix")`: at these rates no kernel is faster."""
    read, matrix = moved_bytes(w) / read_rate, flops(w) / matrix_rate
    return (read, "read") if read > matrix else (matrix, "matrix")
