"""How the words of a KV cache are read: the one vocabulary of cache formats."""

from jattn.formats.formats import (
    ALL,
    Beside,
    Dense,
    Format,
    Fp8,
    Int4,
    Int8,
    KVArray,
    Nvfp4,
    Quantized,
    along,
    plain_format,
    storage,
)

__all__ = [
    "ALL",
    "Beside",
    "Dense",
    "Format",
    "Fp8",
    "Int4",
    "Int8",
    "KVArray",
    "Nvfp4",
    "Quantized",
    "along",
    "plain_format",
    "storage",
]
