"""fp8 caches on sm_90: products in float16, which holds every number of e4m3 and of e5m2.

One instruction turns two fp8 numbers into two float16; bfloat16 takes many. Products of fp8 itself,
which sm_90 has, would round the query and the probabilities to fp8, and need V transposed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jattn.pallas.mosaic_gpu import compat as mgpu
from jattn.pallas.mosaic_gpu import scratch


def narrowed(queries: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return rows [..., D] as `dtype`, and what to multiply their dots by: float32 [...].

    float16 has fewer exponents than bfloat16, so a row is divided by the power of two that brings
    its largest element into [1, 2), and its logits are multiplied by that.
    """
    wide = queries.astype(jnp.float32)
    top = jnp.max(jnp.abs(wide), axis=-1)
    power = jnp.exp2(jnp.floor(jnp.log2(jnp.where(top > 0, top, jnp.ones_like(top)))))
    return (wide / power[..., None]).astype(dtype), power


def widen(stored: Any, into: Any, width: int) -> None:
    """Widen an fp8 tile, in shared memory as a copy left it, into a float16 tile.

    Args:
      stored: [rows, columns], rows a multiple of `scratch.PRODUCT_ROWS`.
      into: the same shape in float16.
      width: columns of one swizzle, in both. A loop takes this many at a time: unrolled, the
        addresses of all columns would take registers, 48 more in decode.
    """
    rows, columns = into.shape

    @pl.loop(0, columns // width)
    def _(i: jax.Array) -> None:
        here = pl.ds(pl.multiple_of(i * width, width), width)
        for row in range(0, rows, scratch.PRODUCT_ROWS):
            some = pl.ds(row, scratch.PRODUCT_ROWS)
            words = mgpu.load(stored.at[some, here], mgpu.WGMMA_UPCAST_2X)
            into[some, here] = words.astype(into.dtype)

    # Order the reads before the copy that may come next, and the writes before a product.
    mgpu.commit_smem()
