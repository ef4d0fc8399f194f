"""How the words of a KV cache are read: a type, never a guess from a storage dtype.

A format says which numbers a word stands for, and which scales and zero points go with it.
A cache is a plain float array, or a `KVArray`: the stored words, their scales and zero points, and
the format; or one array of keys and values side by side, a `KVRows`. The words of formats narrower
than 32 bits are integers, because XLA for CPU runs many operations on bfloat16 (JAX 0.10) and
float8 (all versions) by converting the *whole* operand to float32: a pool would be copied on every
step. An integer is never converted, only the words that are read or written.

    number = decode(word) * group_scale * scale + zero

with `group_scale` one per 16 numbers (NVFP4), `scale` one for the cache, per KV head, per block and
head or per token and head, and `zero` per token and head: each where the format has it.
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
