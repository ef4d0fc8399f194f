"""Cache formats: a type says how a KV cache's words are read, never a guess from a storage dtype.

A format says which numbers a word stands for, and which scales and zero points go with it.
A cache is a plain float array, a `KVArray` (the stored words, their scales and zero points, and the
format), or a `KVRows` (one array of keys and values side by side). The words of formats narrower
than 32 bits are integers, because XLA for CPU runs many operations on bfloat16 (JAX 0.10) and
float8 (all versions) by converting the *whole* operand to float32, which would copy a pool in every
step. It never converts a pool of integers, only the words that are read or written.

    number = decode(word) * group_scale * scale + zero

Formats have some of these: a `group_scale` per 16 numbers (NVFP4); a `scale` per cache, per KV
head, per block and head, or per token and head; a `zero` per token and head.
"""

from jattn.formats.base import Format, Quantized, QuantParams
from jattn.formats.dense import Dense
from jattn.formats.fp8 import Fp8
from jattn.formats.integer import Int4, Int8
from jattn.formats.kv_array import KVArray
from jattn.formats.kv_rows import ALL_LAYOUTS, ROWS_LAYOUT, Cache, KVRows, Rows, storage
from jattn.formats.nvfp4 import Nvfp4
from jattn.formats.registry import ALL, plain_format

__all__ = [
    "ALL",
    "ALL_LAYOUTS",
    "ROWS_LAYOUT",
    "Cache",
    "Dense",
    "Format",
    "Fp8",
    "Int4",
    "Int8",
    "KVArray",
    "KVRows",
    "Nvfp4",
    "QuantParams",
    "Quantized",
    "Rows",
    "plain_format",
    "storage",
]
