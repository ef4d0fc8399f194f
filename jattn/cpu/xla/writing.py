"""Write new rows into a cache in pure JAX: scatters, in place if the cache is donated."""

from __future__ import annotations

import functools
import typing

import jax
import jax.numpy as jnp

from jattn import formats
from jattn.formats import base, rounding
from jattn.varying import axes_along, on_automatic_axes


class NewRows(typing.NamedTuple):
    """A pool of keys or of values, with the rows to write into it."""

    pool: formats.Quantized  # words HND [N, K, S, W] or NHD [N, S, K, W]
    rows: jax.Array  # [T, K, D]
    scale: jax.Array | None  # float32 [K], what a stored number is multiplied by when read


class Writing(typing.NamedTuple):
    """The static part of writing: the formats of keys and values, or of keys alone."""

    formats: tuple[formats.Format, ...]
    kv_layout: str


@functools.partial(jax.jit, static_argnums=0, inline=True)
def run(
    writing: Writing, new_rows: tuple[NewRows, ...], slots: jax.Array
) -> tuple[formats.Quantized, ...]:
    """Return the pools with the rows written at `slots` [T]; a slot outside the pool is dropped."""

    def scatter(
        given: tuple[tuple[NewRows, ...], jax.Array],
    ) -> tuple[formats.Quantized, ...]:
        pairs = zip(given[0], writing.formats, strict=True)
        return tuple(_scatter(new, given[1], format, writing.kv_layout) for new, format in pairs)

    pools = tuple(new.pool for new in new_rows)
    specs = jax.tree.map(lambda x: axes_along(x, x.ndim), pools)
    return on_automatic_axes(scatter, (new_rows, slots), specs)


def _scatter(
    given: NewRows, slots: jax.Array, format: formats.Format, kv_layout: str
) -> formats.Quantized:
    pool, new, scale = given
    num_blocks = pool.words.shape[0]
    block_size = pool.words.shape[1 if kv_layout == "NHD" else 2]
    # A negative slot must not wrap around to the pool's end: it becomes a block past the end, which
    # "drop" does drop.
    inside = (slots >= 0) & (slots < num_blocks * block_size)
    block = jnp.where(inside, slots // block_size, num_blocks)
    offset = slots % block_size

    def put(array: jax.Array, rows: jax.Array) -> jax.Array:
        if kv_layout == "NHD":
            return array.at[block, offset].set(rows, mode="drop")
        return array.at[block, :, offset].set(rows, mode="drop")

    scale = None if scale is None else scale[None, :, None]
    if not (isinstance(format, formats.Fp8) and format.per == "block"):
        words, params = format.quantize(new, scale)
    else:
        new = rounding.clamp(base.divided(new, scale))
        assert pool.quant_params.scale is not None
        blocks = _set_block_scales(pool.quant_params.scale, new, block, offset, format)
        rows = blocks.at[block].get(mode="fill", fill_value=1.0)
        words, params = format.encode(rounding.divide(new, rows[..., None])), formats.QuantParams()
    stored = pool.words
    if stored.dtype != words.dtype and rounding.scatter_converts(stored.dtype):
        stored = rounding.bitcast(stored, words.dtype)
    elif stored.dtype != words.dtype:  # a plain float array stores the numbers, not words
        words = format.decode(words)
    placed = (
        old if old is None or row is None else put(old, row)
        for old, row in zip(pool.quant_params, params, strict=True)
    )
    params = formats.QuantParams(*placed)
    if format.per == "block":
        params = params._replace(scale=blocks)
    return formats.Quantized(rounding.bitcast(put(stored, words), pool.words.dtype), params)


# How much larger a block's later tokens may be than those that set its scale.
HEADROOM = 8.0


def _set_block_scales(
    scales: jax.Array,
    new: jax.Array,
    block: jax.Array,
    offset: jax.Array,
    format: formats.Fp8,
) -> jax.Array:
    """Set the `scales` [N, K] of blocks whose first slot this call writes.

    In place: the scattered arrays are as long as the call, never as the pool.

    Args:
      scales: float32 [N, K], positive.
      new: float32 [T, K, D].
      block, offset: int32 [T]; a block of N writes nothing.
      format: for its largest number.
    """
    most = rounding.largest(new) * jnp.float32(HEADROOM / format.largest)
    first = jnp.where(offset == 0, block, scales.shape[0])
    # A negative scale marks a block as begun by this call: the maximum is over the call's rows.
    scales = scales.at[first].set(jnp.float32(-1), mode="drop")
    begun = scales.at[block].get(mode="fill", fill_value=1.0) < 0
    scales = scales.at[block].max(jnp.where(begun, most, jnp.float32(-1)), mode="drop")
    chosen = scales.at[first].get(mode="fill", fill_value=1.0)
    return scales.at[first].max(rounding.usable_scale(chosen), mode="drop")
