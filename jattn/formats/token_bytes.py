"""Bytes that keys and values take in one layer, on one tensor-parallel rank.

With h KV heads on the rank, D and V the head sizes of keys and values:

    dense            h (D + V) bytes per element
    MLA              D bytes per element        (one latent for all heads: D = 576, say)
    nvfp4            h ((D + V) / 2 + (D + V) / 16)     4-bit words, and a scale per 16
    per token head   h (D + V) + 8 h            8-bit words, and a float32 scale each for K and V

A cache format is sized by its `Format.bytes_per_token`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn.checks import Problems, checking
from jattn.formats.base import Format
from jattn.formats.fp8 import Fp8
from jattn.formats.integer import Int8
from jattn.formats.nvfp4 import Nvfp4
from jattn.integers import require_int, with_python_ints

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
_CACHE_ITEM_BYTES = ITEM_BYTES | {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
# vLLM's names of formats with scales.
_FORMATS: dict[str, Format] = {
    "nvfp4": Nvfp4(),
    "int8_per_token_head": Int8(),
    "fp8_per_token_head": Fp8("e4m3", "token"),
}
CacheDtype = str | Format | tuple[str | Format, str | Format]  # or what `with_name` converts


@with_python_ints
def kv_bytes_per_token(
    num_kv_heads: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    dtype: CacheDtype = "bfloat16",
    is_mla: bool = False,
    tensor_parallel: int = 1,
) -> int:
    """Return the bytes of one token in one layer's KV cache.

    Args:
      num_kv_heads: K, KV heads of the model; a rank keeps `max(1, K // tensor_parallel)`.
      head_dim: D, of keys; the latent's width with `is_mla`.
      value_dim: V, of values; None for D. MLA has no values.
      dtype: a cache format (`jattn.Int4()`, say), a dtype or its name, "fp8", "fp8_e4m3",
        "fp8_e5m2", "nvfp4", "int8_per_token_head" or "fp8_per_token_head"; or a pair, for keys and
        for values.
        A scale per block belongs to no token and is not counted: see `FullAttention.page_bytes`.
      is_mla: one latent vector per token instead of keys and values per head, on every rank:
        `num_kv_heads`, `value_dim` and `tensor_parallel` then have no effect.
      tensor_parallel: ranks that share the heads.

    Returns: bytes, an integer.
    Raises: `ValueError` for a dtype, head count or head size that has no such layout.

    >>> kv_bytes_per_token(2, 128)
    1024
    >>> kv_bytes_per_token(1, 576, is_mla=True)
    1152
    >>> kv_bytes_per_token(2, 128, dtype=Nvfp4())
    288
    """
    dtype = with_name(dtype)
    with checking("kv_bytes_per_token") as problems:
        check_token_layout(problems, num_kv_heads, head_dim, value_dim, dtype, is_mla)
        require_int(problems, "tensor_parallel", tensor_parallel, 1)
    heads = 1 if is_mla else max(1, num_kv_heads // tensor_parallel)
    rows = _rows(head_dim, value_dim, dtype, is_mla)
    return heads * sum(
        dim * _CACHE_ITEM_BYTES[one] if isinstance(one, str) else one.bytes_per_token(dim)
        for dim, one in rows
    )


def word_bytes_per_token(
    num_kv_heads: int,
    head_dim: int,
    value_dim: int | None,
    dtype: CacheDtype,
    *,
    is_mla: bool = False,
) -> int:
    """Return the bytes of one token's words, without scales and zero points."""
    return num_kv_heads * sum(_word_bytes(_rows(head_dim, value_dim, dtype, is_mla)))


def _word_bytes(rows: Sequence[tuple[int, str | Format]]) -> list[int]:
    """Return the bytes of the words of one head's key, and of its value."""
    return [
        dim * _CACHE_ITEM_BYTES[one] if isinstance(one, str) else one.word_bytes(dim)
        for dim, one in rows
    ]


def page_share_bytes(
    num_kv_heads: int,
    head_dim: int,
    value_dim: int | None,
    dtype: CacheDtype,
    *,
    is_mla: bool = False,
) -> int:
    """Return the bytes of a page's smallest share of whole words of K and V, in their ratio.

    States in pages occupy a whole number of these shares.
    """
    rows = _rows(head_dim, value_dim, dtype, is_mla)
    sizes = [num_kv_heads * size for size in _word_bytes(rows)]
    word = max(
        _CACHE_ITEM_BYTES[x] if isinstance(x, str) else np.dtype(x.word_dtype).itemsize
        for _, x in rows
    )
    return word * sum(sizes) // math.gcd(*sizes)


def scale_bytes_per_block(num_kv_heads: int, dtype: CacheDtype, *, is_mla: bool = False) -> int:
    """Return the bytes of a block's scales, for formats with a scale per block and head."""
    stored = _pair(dtype)[: 1 if is_mla else 2]
    return 4 * num_kv_heads * sum(isinstance(x, Format) and x.per == "block" for x in stored)


def check_token_layout(
    problems: Problems,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int | None,
    dtype: CacheDtype,
    is_mla: bool,
) -> bool:
    """Note every argument that `kv_bytes_per_token` cannot accept; return whether all are good."""
    good = require_int(problems, "num_kv_heads", num_kv_heads, 1)
    sized = require_int(problems, "head_dim", head_dim, 1)
    if value_dim is not None:
        sized &= require_int(problems, "value_dim", value_dim, 1)
    known = [*_CACHE_ITEM_BYTES, *(() if is_mla else _FORMATS)]
    pair = _pair(dtype)
    good &= problems.require(
        len(pair) == 2
        and not (is_mla and isinstance(dtype, tuple))
        and all(isinstance(one, Format) or one in known for one in pair),
        "dtype",
        f"{dtype!r}",
        f"a cache format{'' if is_mla else ', a pair of them'} or one of {known}",
    )
    rows = _rows(head_dim, value_dim, dtype, is_mla) if good and sized else []
    for dim, one in dict.fromkeys(rows):
        if isinstance(one, Format):
            good &= problems.require(
                dim % one.dim_multiple == 0,
                "head_dim" if dim == head_dim else "value_dim",
                f"{dim} with {one.name}",
                f"a multiple of {one.dim_multiple}",
            )
    return good and sized


def with_name(dtype: Any) -> Any:
    """Convert a dtype or scalar type, alone or in a pair, to its name; keep anything else."""
    if isinstance(dtype, tuple):
        return tuple(map(with_name, dtype))
    if not isinstance(dtype, np.dtype | type) or np.dtype(dtype) == np.dtype(object):
        return dtype  # NumPy takes a type that has nothing to do with numbers for one of objects
    return np.dtype(dtype).name


def _pair(dtype: CacheDtype) -> tuple[str | Format, ...]:
    return dtype if isinstance(dtype, tuple) else (dtype, dtype)


def _rows(
    head_dim: int, value_dim: int | None, dtype: CacheDtype, is_mla: bool
) -> list[tuple[int, str | Format]]:
    """Return `(dim, dtype)` of a head's row of keys and of values, or of MLA's one row."""
    dims = (head_dim,) if is_mla else (head_dim, head_dim if value_dim is None else value_dim)
    return [
        (dim, _FORMATS.get(one, one) if isinstance(one, str) else one)
        for dim, one in zip(dims, _pair(dtype), strict=False)
    ]
