"""How the words of a KV cache are read: the one vocabulary of cache formats."""

from jattn.formats.formats import (
    ALL,
    Dense,
    Format,
    Fp8,
    Int4,
    Int8,
    KVArray,
    Nvfp4,
    Quantized,
    QuantParams,
    align_scale,
    plain_format,
    storage,
)

__all__ = [
    "ALL",
    "Dense",
    "Format",
    "Fp8",
    "Int4",
    "Int8",
    "KVArray",
    "Nvfp4",
    "QuantParams",
    "Quantized",
    "align_scale",
    "plain_format",
    "storage",
]
