"""What attention means, on arrays in registers: `jattn.spec` with layouts.

A fragment is an array spread over the registers of a warpgroup, and an operation on two of them
needs both spread alike: a number per row or per column is broadcast by hand, and positions are
made in the layout of what they are compared with. That is all this file adds; who sees whom and
what a logit is are `spec`'s own functions, traced into the kernel.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn import spec
from jattn.pallas.mosaic_gpu import compat as mgpu


def positions(shape: tuple[int, int], axis: int, first: jax.Array, layout: Any = None) -> jax.Array:
    """int32 `shape`: `first` plus the index along `axis`."""
    layout = mgpu.WGMMA if layout is None else layout
    return mgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) + first


def along(vector: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """`vector`, a number for every index along `axis`, broadcast to `shape`."""
    return lax.broadcast_in_dim(vector, shape, (axis,))


def vector(ref: Any, axis: int) -> jax.Array:
    """A number for every index along `axis` of a `wgmma` result, from a 1-d ref."""
    return mgpu.load(ref, mgpu.WGMMA.reduce(1 - axis), optimized=False)


def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """float32 `shape` of one number, in `layout`."""
    return mgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def visible(
    q_pos: jax.Array,
    k_pos: jax.Array,
    seq_len: jax.Array,
    *,
    is_causal: bool | jax.Array,
    sliding_window: jax.Array | None,
) -> jax.Array:
    """`spec.visible` of two fragments of one layout.

    Args:
      q_pos, k_pos: int32 fragments.
      seq_len: int32 [].
      is_causal: a bool, or int32 [], 0 or 1 (a bool scalar does not lower beside fragments).
      sliding_window: int32 [] or None.
    """
    if not isinstance(is_causal, bool):
        # A query that is not causal is one that stands past every key, for the causal rule alone.
        ahead_ok = k_pos <= q_pos + (1 - is_causal) * (2**30)
        rest = spec.visible(q_pos, k_pos, seq_len, spec.Sight(False, sliding_window))
        return ahead_ok & rest
    return spec.visible(q_pos, k_pos, seq_len, spec.Sight(is_causal, sliding_window))


def logits(
    dots: jax.Array,
    *,
    scale: jax.Array,
    logits_soft_cap: jax.Array | None,
    alibi_slopes: jax.Array | None,
    q_pos: jax.Array,
    k_pos: jax.Array,
) -> jax.Array:
    """`spec.transform_logits` of fragments of one layout; `scale` and `alibi_slopes` too."""
    return spec.transform_logits(
        dots,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        q_pos=q_pos,
        k_pos=k_pos,
    )
