"""A digest of a model's weights: two engines have the same one if all their bits are equal.

    of an array    sum over i of mix(bits of number i, i)       modulo 2^32
    of a model     SHA-256 of the sums, with names, dtypes and whole shapes

where i counts the numbers of the whole array in C order, so a permutation of them changes the sum.
Each device adds up its part of an array, using positions in the whole one, and a part that several
devices have counts once, so the sums are the same on every mesh. Joined weights are added up per
layer, as if each layer's rows were a separate array.
"""

from __future__ import annotations

import functools
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np

from examples.engine.mesh import Parameter, part_slices, split_axis
from examples.engine.model import Model
from examples.models.joined import named_arrays
from examples.models.lora import Adapted

NUMBERS_AT_A_TIME = 1 << 24  # XLA on CPUs keeps 4 bytes for each until they are added up


def fingerprint(model: Model) -> str:
    """Return the digest of a model's weights, without its adapters', in hexadecimal."""
    params = model.params.base if isinstance(model.params, Adapted) else model.params
    num_parts = model.mesh.num_parts if model.mesh else 1
    found = []
    for name, array in named_arrays(params):
        here = Parameter(tuple(array.shape))
        whole, local = model.parameters[name] if num_parts > 1 else (here, here)
        total = _sum_of(array, whole, local, num_parts)
        found.append((name, str(array.dtype), whole.shape, total))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:32]


def _sum_of(array: jax.Array, whole: Parameter, local: Parameter, num_parts: int) -> int:
    """Return the sum of an array's mixed numbers, modulo 2^32.

    Args:
      array: all devices' parts, concatenated along the axis that is split.
      whole, local: the parameter in the whole model, and on one device.
      num_parts: how many devices there are.
    """
    axis, total = split_axis(whole, local), 0
    places, counts = _places(whole, local, num_parts)
    if not array.ndim:
        array = array[None]
    # Take parts along the longest axis that is not split, so that devices share every part.
    free = [other for other in range(array.ndim) if other != axis]
    along = max(free, key=lambda other: array.shape[other], default=0)
    size = array.shape[along]
    step = max(1, NUMBERS_AT_A_TIME * size // max(array.size, 1)) if free else size
    for start in range(0, size, step):
        end = min(start + step, size)
        part = jax.lax.slice_in_dim(array, start, end, axis=along) if step < size else array
        here = [p[start:end] if other == along else p for other, p in enumerate(places)]
        total += int(_sum(part, here, counts, axis or 0))
    return total % 2**32


def _places(
    whole: Parameter, local: Parameter, num_parts: int
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Return where the concatenation of all devices' parts is in the whole array.

    Returns: for each axis uint32 [n], whose sum is a number's place in C order, modulo 2^32; and
      bool [n], which entries to count along the split axis, so that each place counts once.
    """
    shape, axis = whole.shape or (1,), split_axis(whole, local)
    runs, counts = [np.arange(size, dtype=np.uint64) for size in shape], None
    if axis is not None:
        slices = (part_slices(whole, local, rank, num_parts) for rank in range(num_parts))
        found = [runs[axis][index[axis]] for part in slices for index in part]
        runs[axis] = np.concatenate(found)
        counts = np.zeros(len(runs[axis]), bool)
        counts[np.unique(runs[axis], return_index=True)[1]] = True
    strides = (math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    places = [(run * np.uint64(n)).astype(np.uint32) for run, n in zip(runs, strides, strict=True)]
    return places, counts


@functools.partial(jax.jit, static_argnames="axis")
def _sum(
    array: jax.Array, places: list[jax.Array], counts: jax.Array | None, axis: int
) -> jax.Array:
    """Sum an array's mixed numbers, uint32; `counts` (None: all) applies along an axis."""
    index = jnp.zeros(array.shape, jnp.uint32)
    for other, steps in enumerate(places):
        index += jax.lax.broadcast_in_dim(steps, array.shape, (other,))
    unsigned = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    x = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    # The finalizer of MurmurHash3, after which every bit depends on all of them.
    x = x ^ (index * jnp.uint32(0x9E3779B1))
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    x = x ^ (x >> 16)
    if counts is not None:
        counted = jax.lax.broadcast_in_dim(counts, array.shape, (axis,))
        x = jnp.where(counted, x, jnp.uint32(0))
    return x.sum(dtype=jnp.uint32)
