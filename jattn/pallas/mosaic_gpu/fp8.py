"""fp8 caches on sm_90: products in float16, which holds every number of e4m3 and of e5m2.

One instruction makes two float16 of two fp8; bfloat16 takes many. The products of fp8 themselves,
which sm_90 has, would round the query and the probabilities to fp8, and want V transposed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jattn.pallas.mosaic_gpu import compat as mgpu
from jattn.pallas.mosaic_gpu import scratch


def narrowed(queries: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Rows [..., D] as `dtype`, and what their dots are to be multiplied by [...], float32.

    float16 has fewer exponents than bfloat16: a row goes in as its largest element in [1, 2) times
    a power of two, which the logits get back.
    """
    wide = queries.astype(jnp.float32)
    top = jnp.max(jnp.abs(wide), axis=-1)
    power = jnp.exp2(jnp.floor(jnp.log2(jnp.where(top > 0, top, jnp.ones_like(top)))))
    return (wide / power[..., None]).astype(dtype), power


def widen(stored: Any, into: Any, width: int) -> None:
    """Write an fp8 tile, in shared memory as a copy left it, as float16 in a tile of its own.

    Args:
      stored: [rows, columns], rows a multiple of `scratch.PRODUCT_ROWS`.
      into: the same shape in float16.
      width: columns of one swizzle, of both. So many at a time in a loop: unrolled, the addresses
        of all of them would take registers, 48 more in decode.
    """
    rows, columns = into.shape

    @pl.loop(0, columns // width)
    def _(i: jax.Array) -> None:
        here = pl.ds(pl.multiple_of(i * width, width), width)
        for row in range(0, rows, scratch.PRODUCT_ROWS):
            some = pl.ds(row, scratch.PRODUCT_ROWS)
            words = mgpu.load(stored.at[some, here], mgpu.WGMMA_UPCAST_2X)
            into[some, here] = words.astype(into.dtype)

    # Orders the reads before a copy that is let in next, and the writes before a product.
    mgpu.commit_smem()
