"""Paged attention for serving language models with JAX: one function, one meaning everywhere.

`jattn.paged_attention` attends to a paged KV cache, `jattn.update_kv_cache` writes to it,
`jattn.init_kv_cache` makes one. Importing jattn starts no backend.
"""

from jattn import blocks, reference, spec
from jattn.api import Explanation, explain, paged_attention, support_table
from jattn.cache import init_kv_cache, update_kv_cache
from jattn.calibration import Calibration, calibrate
from jattn.capability import UnsupportedError
from jattn.cascade import cascade_attention
from jattn.export import export_checks, load_native
from jattn.formats import Dense, Fp8, Int4, Int8, KVArray, KVRows, Nvfp4
from jattn.metadata import AttentionMetadata
from jattn.softmax import merge_attention_states

__version__ = "0.1.0"

__all__ = [
    "AttentionMetadata",
    "Calibration",
    "Dense",
    "Explanation",
    "Fp8",
    "Int4",
    "Int8",
    "KVArray",
    "KVRows",
    "Nvfp4",
    "UnsupportedError",
    "blocks",
    "calibrate",
    "cascade_attention",
    "explain",
    "export_checks",
    "init_kv_cache",
    "load_native",
    "merge_attention_states",
    "paged_attention",
    "reference",
    "spec",
    "support_table",
    "update_kv_cache",
]


def __dir__() -> list[str]:
    """The public names, without the modules that they come from."""
    return [*__all__, "__version__"]
