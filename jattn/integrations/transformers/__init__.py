"""jattn as an attention implementation of transformers: unmodified models, PyTorch tensors.

    import jattn.integrations.transformers as jattn_transformers

    jattn_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="jattn")
    cache = jattn_transformers.PagedCache(model.config, max_cache_len=4096)
    model.generate(**inputs, cache=cache)  # past_key_values=cache before transformers 5.24

`register` makes `attn_implementation="jattn"` run `jattn.paged_attention`. With transformers' own
caches, every call copies its keys and values into the blocks of a pool, and gradients flow through
the copy. With a `PagedCache` the keys stay in pools, and a decode step copies nothing.

Nothing is silently approximated. jattn reads the mask that transformers built for a layer row by
row (`masks`) and finds lengths, windows, chunks and documents that show every query the same keys.
A bias that depends on positions becomes a `relative_bias`. If a mask or bias cannot be read, jattn
raises `jattn.UnsupportedError` and says why. Rows of padding that see no key return zeros.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import types
from typing import Any

__all__ = ["PagedCache", "register"]

# The extra requires it: older versions pass masks and caches differently.
OLDEST = (5, 20)


def register(
    name: str = "jattn",
    *,
    block_size: int = 16,
    implementation: str | None = None,
    kv_layout: str = "HND",
) -> None:
    """Make `attn_implementation=name` select jattn in transformers.

    Args:
      name: the `attn_implementation` to load models with.
      block_size: S of the pools that keys from transformers' own caches are copied into.
      implementation: an implementation of `jattn.paged_attention`, or None for the best one.
      kv_layout: the layout of those pools, "HND" or "NHD".

    Raises:
      ImportError: torch or transformers is missing, or transformers is older than 5.20.
      ValueError: the size, implementation or layout is invalid.
    """
    _part("attention").register(name, block_size, implementation, kv_layout)


def _part(name: str) -> types.ModuleType:
    """Import a module of this folder, which needs torch and transformers."""
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        pass  # the import below reports it
    else:
        if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
            raise ImportError(
                f"{__name__} needs transformers {'.'.join(map(str, OLDEST))} or newer, "
                f"got {found}: pip install 'jattn[transformers]'"
            )
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("torch", "transformers"):
            raise
        raise ImportError(
            f"{__name__} needs {error.name}: pip install 'jattn[transformers]'"
        ) from error


def __getattr__(name: str) -> Any:
    if name == "PagedCache":
        return _part("cache").PagedCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
