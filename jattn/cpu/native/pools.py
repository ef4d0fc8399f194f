"""Memory for pools: in huge pages, where Linux lets programs ask for them.

With pages of 4 KiB decode misses the table of pages every few kilobytes. A page's size is decided
when it is touched first, so the library makes the zeros itself.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jattn import device
from jattn.cpu.native import library

LARGE_BYTES = 16 << 20  # smaller pools have few pages


def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """`jnp.zeros`; a large array on a CPU in huge pages if the system's setting allows them.

    Under a transformation, and where the native library is missing, it is `jnp.zeros` alone.
    """
    large = math.prod(shape) * np.dtype(dtype).itemsize >= LARGE_BYTES
    if not large or device.platform() != "cpu" or library.missing() or _traced():
        return jnp.zeros(shape, dtype)
    found: jax.Array = jax.ffi.ffi_call(library.ZEROS, jax.ShapeDtypeStruct(shape, dtype))()
    return found


def _traced() -> bool:
    return isinstance(jnp.zeros(()), jax.core.Tracer)
