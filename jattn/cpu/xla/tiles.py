"""Static sizes of the XLA path's loops, and the rules that choose them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jattn import call as calls
from jattn.cpu.xla import nvfp4_dots, pool
from jattn.integers import ceil_div, power_of_two

# Sequences with up to this many query tokens go through the decode loop when every sequence of the
# call does (speculative decoding); in mixtures only those with one token do. The GPU kernels' limit
# (`pallas.machine.DECODE_TOKENS`) is equal by coincidence: there it chooses one of two kernels per
# sequence; here every sequence of a call is padded to the longest query.
MAX_DECODE_QUERIES = 8

# Bytes of keys that a step of the decode loop copies, and as many of values. Measured on two cores
# with 1 MiB of L2 each and 32 MiB of L3, 8 sequences of 4,096 tokens, head sizes 64 to 512: 2 MiB
# is near the best everywhere, 0.5 MiB costs up to 1.5 times (operations too small to parallelize),
# 8 MiB up to 3 times (tiles fall out of cache between the copy and the dots).
STEP_BYTES = 2 * 2**20

# The same if keys and values have two numbers per byte: more operations in a step, less in cache.
# NVFP4: 2 MiB takes 1.0 to 1.1 times as long at head sizes 128 to 512, 8 MiB up to 1.5.
# int4: 2 MiB takes as long at 128; at 512 1.06 times as long in JAX 0.12, 0.92 times in JAX 0.10.
PACKED_STEP_BYTES = 4 * 2**20


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """Query tokens per sequence, workers that step together, and the tile each reads in a step."""

    query_tokens: int
    num_workers: int
    kv_tile: pool.KVTile


@dataclasses.dataclass(frozen=True)
class PrefillTiles:
    """Query tokens per tile, and the tile of keys one step reads."""

    query_tokens: int
    kv_tile: pool.KVTile


def compute_dtype(call: calls.Call) -> np.dtype:
    """The dtype of the dots' operands; they accumulate in float32.

    bfloat16 if no input is wider (numbers of 8 and 4 bits fit it exactly), else float32: float16
    has no fast dot on CPU and would overflow where float32 does not.
    """
    wide = {"float32", "float16"}
    narrow = wide.isdisjoint({call.query_dtype, call.key_format.name, call.value_format.name})
    return np.dtype(jnp.bfloat16 if narrow else jnp.float32)


def run_width(call: calls.Call, operands: calls.Operands) -> int:
    """How many blocks a sequence's queries may attend to: its table's, or the selected ones."""
    selected = operands.selected_blocks
    return call.table_width if selected is None else min(call.table_width, selected.shape[1])


def decode_tiles(call: calls.Call, width: int) -> DecodeTiles:
    """Choose workers and tiles of the decode loop: `STEP_BYTES` of keys a step, up to 4 workers.

    `PACKED_STEP_BYTES` for formats with two numbers a byte, and at most 8 workers where the dots
    read bytes (`nvfp4_dots`).

    Tiles have up to 512 tokens: more only adds work past the ends of sequences. Short sequences
    have short tiles, an eighth of the longest: four of 128 were 1.1 to 1.2 times as fast as longer
    ones at 16 sequences of up to 1,000 tokens, and 0.7 to 0.8 times at 8 of 4,096 with 16 KV heads.
    Never more tokens or workers than the `width` blocks of a sequence could hold.
    """
    query_tokens = call.max_query_len if call.max_query_len <= MAX_DECODE_QUERIES else 1
    token_bytes = call.num_kv_heads * call.head_dim * compute_dtype(call).itemsize
    formats = (call.key_format, call.value_format)
    packed = all(format.values_per_word == 2 for format in formats)
    step_tokens = (PACKED_STEP_BYTES if packed else STEP_BYTES) // token_bytes
    capacity = width * call.block_size
    longest = power_of_two(capacity)
    tokens = min(512, max(128, min(power_of_two(step_tokens), longest // 8)), longest)
    kv_tile = pool.KVTile.of(call.block_size, tokens)
    most = call.num_seqs * ceil_div(capacity, kv_tile.tokens)
    rows = query_tokens * call.group
    most = min(most, 8 if all(nvfp4_dots.fits(x, rows, kv_tile.tokens) for x in formats) else 4)
    return DecodeTiles(query_tokens, max(1, min(most, step_tokens // kv_tile.tokens)), kv_tile)


def prefill_tiles(call: calls.Call) -> PrefillTiles:
    """Choose tiles of the prefill loop: 256 to 1,024 rows of a KV head against 256 keys.

    As many rows as keep the tile's float32 accumulators within 2 MiB: they are read and written at
    every step. Measured on two cores at 2,048 tokens in bfloat16: 1,024 x 256 is 1.2 times as fast
    as 256 x 512 at head size 128, 1.3 times at 64 and 1.1 times at 512.

    Short sequences have short tiles: what a tile computes past its sequence's tokens, or past the
    keys they see, is wasted. With two prompt chunks in a step of 128 tokens, of sequences of up to
    208, 128 tokens against 256 keys took 1.6 to 2 times as long as 32 against 64; with four chunks,
    3 to 4 times as long.
    """
    rows = 2 * 2**20 // (4 * call.num_kv_heads * call.value_dim)
    rows = max(256, min(1024, rows))
    capacity = power_of_two(call.table_width * call.block_size)
    longest = max(32, capacity // 8)
    query_tokens = max(1, min(call.max_query_len, rows // call.group, longest))
    keys = min(256, max(64, capacity // 4), capacity)
    return PrefillTiles(query_tokens, pool.KVTile.of(call.block_size, keys))
