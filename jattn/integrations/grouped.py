"""Grouped matrix products, each matrix with its own rows, for mixtures of experts.

On CPUs `jax.lax.ragged_dot` multiplies all rows by every matrix and keeps the products it needs:
with E experts that is E times the work, and memory for E copies of the rows. The functions here
multiply one tile of rows at a time, by the matrix of its first row, so that a matrix is read once
per tile of its rows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jattn.formats import rounding
from jattn.integers import ceil_div, power_of_two

SMALLEST, LARGEST = 8, 128  # rows of a tile


def grouped_dot(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    scales: jax.Array | None = None,
    *,
    transposed: bool = False,
) -> jax.Array:
    """Multiply each run of rows by its matrix.

    Args:
      rows: [n, in], the rows of matrix 0 first, then those of matrix 1, ...
      weights: [E, in, out], or [E, out, in] if `transposed`; of any dtype.
      sizes: int32 [E], the runs' lengths; their sum is at most n.
      scales: [E, blocks, 1, out], or None. Each multiplies a block of `in / blocks` weights of a
        column. Not with `transposed`.

    Returns: float32 [n, out]; rows after the last run hold any finite numbers.
    """
    return jax.lax.platform_dependent(
        *(rows, weights, sizes, scales),
        cpu=functools.partial(_by_tiles, transposed=transposed),
        default=functools.partial(_ragged, transposed=transposed),
    )


def multiply_grouped(
    rows: jax.Array,
    weights: jax.Array,
    scales: jax.Array | None,
    bias: jax.Array | None,
    group_sizes: jax.Array,
    group_offset: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Multiply each row by its expert's matrix and add a bias, for the experts of one device.

    Args:
      rows: [n, in], sorted by expert.
      weights: [E, in, out], of this device's E experts.
      scales: [E, blocks, 1, out], each for a block of `in / blocks` numbers of a column; or None.
      bias: [E, 1, out], or None.
      group_sizes: int32, the number of rows of each expert, including experts of other devices.
      group_offset: int32 [1], the first expert of this device.

    Returns:
      float32 [n, out], undefined for rows of other devices' experts; and bool [n], which rows
      belong to this device.
    """
    first = group_offset[0]
    before = jnp.where(jnp.arange(group_sizes.size) < first, group_sizes, 0).sum()
    sizes = jax.lax.dynamic_slice_in_dim(group_sizes, first, len(weights)).astype(jnp.int32)
    # Put this device's rows first.
    out = grouped_dot(jnp.roll(rows, -before, axis=0), weights, sizes, scales)
    if bias is not None:
        expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(rows)), side="right")
        out += bias.astype(jnp.float32).at[expert, 0].get(mode="clip")
    mine = jnp.arange(len(rows)) < sizes.sum()
    return jnp.roll(out, before, axis=0), jnp.roll(mine, before)


def _ragged(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    scales: jax.Array | None,
    *,
    transposed: bool,
) -> jax.Array:
    weights = _scaled(weights, scales, rows.dtype)
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transposed else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return jax.lax.ragged_dot_general(
        *(rows, weights, sizes, numbers), precision="highest", preferred_element_type=jnp.float32
    )


def _by_tiles(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    scales: jax.Array | None,
    *,
    transposed: bool,
) -> jax.Array:
    """Multiply tiles in order: one may write past its run's end, which the next run overwrites."""
    n, experts, width = len(rows), len(weights), weights.shape[1 if transposed else 2]
    tile = tile_rows(n, experts)
    tiles = ceil_div(sizes, tile)
    tile_ends, starts = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
    padded = jnp.pad(rows, ((0, tile), (0, 0)))
    words, dtype = _as_words(weights), weights.dtype

    def multiply(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(tile_ends, i, side="right").astype(jnp.int32)
        start = starts[expert] + (i - tile_ends[expert] + tiles[expert]) * tile
        matrix = jax.lax.dynamic_index_in_dim(words, expert, keepdims=False)
        matrix = rounding.bitcast(matrix, dtype)
        scale = None if scales is None else scales.at[expert].get(mode="clip")
        product = _product(
            jax.lax.dynamic_slice_in_dim(padded, start, tile),
            _scaled(matrix, scale, rows.dtype),
            transposed=transposed,
        )
        return jax.lax.dynamic_update_slice_in_dim(out, product, start, 0)

    out = jnp.zeros((n + tile, width), jnp.float32)
    return jax.lax.fori_loop(0, tile_ends[-1], multiply, out)[:n]


def _as_words(weights: jax.Array) -> jax.Array:
    """Floats of 4 and 8 bits as integers, or XLA for CPUs widens them all to slice one matrix."""
    narrow = jnp.issubdtype(weights.dtype, jnp.floating) and jnp.finfo(weights.dtype).bits < 16
    if not narrow:
        return weights
    return rounding.bitcast(weights, np.dtype(f"uint{jnp.finfo(weights.dtype).bits}"))


def _product(rows: jax.Array, matrix: jax.Array, *, transposed: bool) -> jax.Array:
    """The product in the form that XLA for CPUs copies least: float32 [out, in] on the left."""
    dot = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    if transposed and rows.dtype == jnp.float32:
        columns = dot("oi,ti->ot", matrix, rows)
        return jax.lax.optimization_barrier(columns).T  # or XLA would swap them back
    return dot("ti,oi->to" if transposed else "ti,io->to", rows, matrix)


def _scaled(weights: jax.Array, scales: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Weights [..., in, out] times their scales, computed in float32."""
    if scales is None:
        return weights.astype(dtype)
    blocks = weights.reshape(*scales.shape[:-2], -1, weights.shape[-1]).astype(jnp.float32)
    return (blocks * scales.astype(jnp.float32)).reshape(weights.shape).astype(dtype)


def tile_rows(n: int, experts: int) -> int:
    """A power of two near an expert's mean number of rows, but at most n."""
    mean = max(1, n // experts)
    return min(max(n, 1), LARGEST, max(SMALLEST, power_of_two(mean)))
