"""A state's tensors as words of a pool, and back, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jattn.blocks.states.layouts import StateLayout
from jattn.formats.rounding import bitcast

# Integers are moved as they are. So is float32, but not bfloat16: XLA CPU of JAX 0.10 moves
# it through float32, which converts the whole pool and rewrites NaNs, and a state's bits are NaNs
# now and then.
POOL_WORDS = ("uint8", "int8", "uint16", "uint32", "float32")


def unsigned(itemsize: int) -> np.dtype:
    """The unsigned integers of a size in bytes."""
    return np.dtype(f"uint{8 * itemsize}")


def slot_dtype(dtype: str) -> np.dtype:
    """The dtype that slots store `dtype` in: itself, or unsigned words if narrower than 32 bits."""
    numbers = jnp.dtype(dtype)
    return unsigned(numbers.itemsize) if numbers.itemsize < 4 else numbers


def to_words(states: Sequence[jax.Array], itemsize: int) -> jax.Array:
    """The tensors of each state as one row of unsigned words, [B, words]."""
    rows = []
    for x in states:
        flat = x.reshape(x.shape[0], -1)
        ratio = itemsize // x.dtype.itemsize
        if ratio > 1:
            flat = flat.reshape(x.shape[0], -1, ratio)
        rows.append(bitcast(flat, unsigned(itemsize)).reshape(x.shape[0], -1))
    return jnp.concatenate(rows, axis=1)


def from_words(words: jax.Array, layout: StateLayout) -> tuple[jax.Array, ...]:
    """The inverse of `to_words`."""
    itemsize, start, states = words.dtype.itemsize, 0, []
    for shape, dtype, nbytes in zip(layout.shapes, layout.dtypes, layout.tensor_bytes, strict=True):
        mine = words[:, start : start + nbytes // itemsize]
        start += nbytes // itemsize
        ratio = jnp.dtype(dtype).itemsize // itemsize
        if ratio > 1:
            mine = mine.reshape(words.shape[0], -1, ratio)
        states.append(bitcast(mine, jnp.dtype(dtype)).reshape(words.shape[0], *shape))
    return tuple(states)
