"""Block tables of sglang-jax's steps, as wide as the longest sequence of their own engine.

The host's kernels are functions of modules, which all engines of a process share, but every engine
has its own backends that call them. So a backend stores the length of its engine's longest
sequence, and `bind` passes it to the kernel while the backend runs.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jattn.integers import ceil_div

Result = TypeVar("Result")
FIELD = "jattn_max_seq_len"  # attribute of a backend: static, and kept through jit
_longest: contextvars.ContextVar[int] = contextvars.ContextVar("longest sequence")


def bind(backend: type) -> None:
    """Make a backend's class tell the kernels inside a call how long its sequences get.

    Args:
      backend: `FlashAttention` or `MLAAttentionBackend`, whose objects have `FIELD`.
    """
    call = backend.__call__

    @functools.wraps(call)
    def attend(self: object, *arguments: Any, **options: Any) -> Any:
        before = _longest.set(getattr(self, FIELD))
        try:
            return call(self, *arguments, **options)
        finally:
            _longest.reset(before)

    backend.__call__ = attend  # type: ignore[method-assign]


def bound(kernel: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap `kernel` to pass the `max_seq_len` of the backend that calls it."""

    @functools.wraps(kernel)
    def call(*arguments: Any, **options: Any) -> Result:
        return kernel(*arguments, max_seq_len=_longest.get(), **options)

    return call


def tables_of(
    page_indices: jax.Array, cu_kv_lens: jax.Array, page_size: int, max_seq_len: int
) -> jax.Array:
    """Return block tables [B, M] for the pages of all sequences, one sequence after another."""
    width = min(page_indices.shape[0], ceil_div(max_seq_len, page_size))
    columns = (cu_kv_lens[:-1] // page_size)[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    return page_indices.at[columns].get(mode="clip")
