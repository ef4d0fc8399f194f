"""Memory for pools, in huge pages where Linux lets programs ask for them.

With pages of 4 KiB, decode misses the TLB every few kilobytes. The first touch of a page decides
its size, so the library writes the zeros itself.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jattn import device
from jattn.cpu.native import library

LARGE_BYTES = 4 << 20  # smaller arrays have few pages


def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Like `jnp.zeros`, but a large array on a CPU is in huge pages if the system allows them.

    Under a transformation, or without the native library, it is just `jnp.zeros`.
    """
    if not _huge(shape, dtype):
        return jnp.zeros(shape, dtype)
    found: jax.Array = jax.ffi.ffi_call(library.ZEROS, jax.ShapeDtypeStruct(shape, dtype))()
    return found


def ones(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Like `jnp.ones`, but in huge pages where `zeros` is."""
    return _add_one(zeros(shape, dtype)) if _huge(shape, dtype) else jnp.ones(shape, dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _add_one(x: jax.Array) -> jax.Array:
    return x + jnp.ones((), x.dtype)


def _huge(shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    large = math.prod(shape) * np.dtype(dtype).itemsize >= LARGE_BYTES
    return large and device.platform() == "cpu" and not library.missing() and not _traced()


def _traced() -> bool:
    return isinstance(jnp.zeros(()), jax.core.Tracer)
