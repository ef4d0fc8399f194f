"""Bytes that one token's keys and values take in one layer, on one tensor-parallel rank.

With h KV heads on the rank, D and V the head sizes of keys and values:

    dense            h (D + V) bytes per element
    MLA              D bytes per element        (one latent for all heads: D = 576, say)
    nvfp4            h ((D + V) / 2 + (D + V) / 16)     4-bit words, and a scale per 16
    per token head   h (D + V) + 8 h            8-bit words, and a float32 scale each for K and V
"""

from __future__ import annotations

from jattn.checks import Problems, checking
from jattn.integers import require_int

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
CACHE_ITEM_BYTES = ITEM_BYTES | {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
PER_TOKEN_HEAD = ("int8_per_token_head", "fp8_per_token_head")


def kv_bytes_per_token(
    num_kv_heads: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    dtype: str = "bfloat16",
    is_mla: bool = False,
    tensor_parallel: int = 1,
) -> int:
    """Bytes of one token in one layer's KV cache.

    Args:
      num_kv_heads: K, KV heads of the model; a rank keeps `max(1, K // tensor_parallel)`.
      head_dim: D, of keys; the latent's width with `is_mla`.
      value_dim: V, of values. None: D. MLA has none of its own.
      dtype: a dtype's name, "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4", "int8_per_token_head" or
        "fp8_per_token_head".
      is_mla: one latent vector per token instead of keys and values per head.

    Raises: `ValueError` for a dtype, head count or head size that has no such layout.

    >>> kv_bytes_per_token(2, 128)
    1024
    >>> kv_bytes_per_token(1, 576, is_mla=True)
    1152
    """
    with checking("kv_bytes_per_token") as problems:
        check_token_layout(problems, num_kv_heads, head_dim, value_dim, dtype, is_mla)
        require_int(problems, "tensor_parallel", tensor_parallel, 1)
    value_dim = head_dim if value_dim is None else value_dim
    if is_mla:
        return head_dim * CACHE_ITEM_BYTES[dtype]
    heads = max(1, num_kv_heads // tensor_parallel)
    elements = heads * (head_dim + value_dim)
    if dtype == "nvfp4":
        return elements // 2 + elements // 16
    if dtype in PER_TOKEN_HEAD:
        return elements + 8 * heads
    return elements * CACHE_ITEM_BYTES[dtype]


def check_token_layout(
    problems: Problems,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int | None,
    dtype: str,
    is_mla: bool,
) -> bool:
    """Note what `kv_bytes_per_token` cannot take; whether it can take everything."""
    good = require_int(problems, "num_kv_heads", num_kv_heads, 1)
    sized = require_int(problems, "head_dim", head_dim, 1)
    if value_dim is not None:
        sized &= require_int(problems, "value_dim", value_dim, 1)
    known = CACHE_ITEM_BYTES if is_mla else (*CACHE_ITEM_BYTES, "nvfp4", *PER_TOKEN_HEAD)
    which = "one of" if not is_mla else "for MLA, one of"
    good &= problems.require(dtype in known, "dtype", f"{dtype!r}", f"{which} {list(known)}")
    if dtype == "nvfp4" and sized:
        dims = (head_dim, head_dim if value_dim is None else value_dim)
        good &= problems.require(
            all(dim % 16 == 0 for dim in dims),
            "head_dim",
            f"{dims[0]} and {dims[1]} with nvfp4",
            "multiples of 16",
        )
    return good and sized
