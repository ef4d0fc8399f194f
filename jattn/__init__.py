"""Paged attention for serving language models with JAX, with one meaning on every machine.

`jattn.init_kv_cache` creates a paged KV cache, `jattn.update_kv_cache` writes to it, and
`jattn.paged_attention` attends to it. Importing jattn starts no backend.
"""

import importlib
import typing

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


# Public modules that are imported on first use: `nnx` needs flax.
_MODULES = ("integrations", "nnx", "sharding", "testing")

if not typing.TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Import a public module on first use."""
        if name not in _MODULES:
            raise AttributeError(f"module 'jattn' has no attribute {name!r}")
        try:
            return importlib.import_module(f"jattn.{name}")
        except ImportError as error:
            raise AttributeError(f"jattn.{name} cannot be imported: {error}") from error


def __dir__() -> list[str]:
    """List the public names, without the modules that define them."""
    return [*__all__, *_MODULES, "__version__"]
