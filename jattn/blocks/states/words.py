"""A state's tensors as words of a pool, and back, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jattn.blocks.states.layouts import StateLayout
from jattn.formats.rounding import bitcast

# Integers and float32 move unchanged, but bfloat16 does not: XLA for CPU in JAX 0.10 moves it
# through float32, which converts the whole pool and rewrites NaNs, and the bits of a state
# sometimes are NaNs.
POOL_WORDS = ("uint8", "int8", "uint16", "uint32", "float32")


def unsigned(itemsize: int) -> np.dtype:
    """Return the dtype of unsigned integers of `itemsize` bytes."""
    return np.dtype(f"uint{8 * itemsize}")


def slot_dtype(dtype: str) -> np.dtype:
    """Return the dtype in which slots store `dtype`: unsigned words below 32 bits, else itself."""
    numbers = jnp.dtype(dtype)
    return unsigned(numbers.itemsize) if numbers.itemsize < 4 else numbers


def flatten_rows(x: jax.Array) -> jax.Array:
    """Return [B, ...] as [B, n], also where B is 0 and a reshape could not infer n."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def to_words(states: Sequence[jax.Array], itemsize: int) -> jax.Array:
    """Return the tensors of each state as one row of unsigned words, [B, words]."""
    rows = []
    for x in states:
        flat = flatten_rows(x)
        ratio = itemsize // x.dtype.itemsize
        if ratio > 1:
            flat = flat.reshape(x.shape[0], flat.shape[1] // ratio, ratio)
        rows.append(flatten_rows(bitcast(flat, unsigned(itemsize))))
    return jnp.concatenate(rows, axis=1)


def from_words(words: jax.Array, layout: StateLayout) -> tuple[jax.Array, ...]:
    """Return the tensors of each state: the inverse of `to_words`."""
    itemsize, start, states = words.dtype.itemsize, 0, []
    for shape, dtype, nbytes in zip(layout.shapes, layout.dtypes, layout.tensor_bytes, strict=True):
        mine = words[:, start : start + nbytes // itemsize]
        start += nbytes // itemsize
        ratio = jnp.dtype(dtype).itemsize // itemsize
        if ratio > 1:
            mine = mine.reshape(words.shape[0], mine.shape[1] // ratio, ratio)
        states.append(bitcast(mine, jnp.dtype(dtype)).reshape(words.shape[0], *shape))
    return tuple(states)
