"""Communication between devices that share a model's layers, inside a step.

A step under `jax.shard_map` runs once on every device of a mesh, with that device's part of the
parameters (`examples/engine/mesh.py`). Layers compute with this part, and call these functions to
combine results:

    columns of a weight split (q, k, v, gate, up)   nothing: each device has its own outputs
    rows split (o, down)                            add_up: each has a part of every sum
    rows of a table split (embedding, head)         lookup_rows, join_columns

Without a mesh they do nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

DATA, TENSOR, CONTEXT = "data", "tensor", "context"
AXES = (DATA, TENSOR, CONTEXT)
MODEL = (TENSOR, CONTEXT)  # the axes whose devices share the weights of a layer


def axes_here(*names: str) -> tuple[str, ...]:
    """Return those of the axes over which the code being traced runs once per device."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in names if name in manual)


def num_devices(*names: str) -> int:
    """Return the number of devices along some axes: 1 without a mesh."""
    axes = axes_here(*names)
    return jax.lax.axis_size(axes) if axes else 1


def rank(*names: str) -> jax.Array:
    """Return this device's index along some axes, int32: 0 without a mesh."""
    axes = axes_here(*names)
    return jax.lax.axis_index(axes) if axes else jnp.int32(0)


def add_up(parts):
    """Sum the devices' parts of an array or a pytree: one all-reduce."""
    axes = axes_here(*MODEL)
    return jax.lax.psum(parts, axes) if axes else parts


def lookup_rows(table: jax.Array, rows: jax.Array, *, split: bool) -> jax.Array:
    """Return rows int32 [T] of a table [rows, E], of which a device has a run if `split`.

    Each device contributes the rows it has, and zeros for the others: one all-reduce of [T, E].
    """
    if not split:
        return table.at[rows].get(mode="clip")
    local = rows - rank(*MODEL) * table.shape[0]
    inside = (local >= 0) & (local < table.shape[0])
    found = table.at[local].get(mode="clip")
    return add_up(jnp.where(inside[:, None], found, jnp.zeros_like(found)))


def join_columns(x: jax.Array, *, split: bool) -> jax.Array:
    """Gather every device's [B, columns] into [B, n * columns] if `split`: one all-gather."""
    axes = axes_here(*MODEL)
    return jax.lax.all_gather(x, axes, axis=1, tiled=True) if split and axes else x
