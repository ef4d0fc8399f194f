"""Mixtures of experts without TPUs: XLA's operations in place of tpu-inference's TPU kernels.

The host copies each token's row once per expert that it chose, sorts the rows by expert, multiplies
each expert's rows by its matrices, and sums each token's results. With experts split over devices
(`--enable-expert-parallel`), a device has the matrices of a run of experts, and its results for all
other rows are discarded.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jattn.integrations.grouped import multiply_grouped

# Settings that select TPU kernels without a counterpart here.
KERNELS = ("USE_MOE_EP_KERNEL", "USE_GMM_FUSED_RS_KERNEL", "USE_UNFUSED_MEGABLOCKS")


def enable() -> None:
    """Replace the TPU kernels of `layers.common.fused_moe_gmm` with XLA's operations.

    Also the one that `layers.common.linear` calls for a matrix with block scales. Activations
    still use the kernel's functions (`gmm_v2` of tokamax). Its `deinterleave_lane` expects
    gates and the rest to alternate by lanes of a TPU; the hook splits the columns in the middle.

    Raises:
      ImportError: tpu-inference is not installed, or is another version.
    """
    from tokamax._src.ops.experimental.gmm_v2 import gmm_v2
    from tpu_inference.layers.common import fused_moe_gmm, linear

    linear.gmm_v2 = multiply_one
    gmm_v2.deinterleave_lane = _gates_and_rest
    fused_moe_gmm.gmm_wrapper = multiply
    fused_moe_gmm.ragged_gather = _gather
    fused_moe_gmm.ragged_gather_reduce = add_up
    fused_moe_gmm.dense_gather_reduce = _add_up_all


def multiply(
    rows: jax.Array,
    weights: jax.Array,
    scales: jax.Array | None,
    bias: jax.Array | None,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    fuse_act: str | None = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Multiply each row by its expert's matrix: `act(x @ W[e] + b[e])`.

    Args:
      rows, weights, scales, bias, group_sizes, group_offset: as in `multiply_grouped`.
      fuse_act: applies this activation to the gates, which are the first half of the columns, and
        multiplies them by the second half.
      preferred_element_type: dtype of the result; None for that of the rows.

    Returns: [n, out], or with `fuse_act` [n, out / 2]; undefined for other devices' experts.
    """
    rows = rows[:, : weights.shape[1]]
    out, _ = multiply_grouped(rows, weights, scales, bias, group_sizes, group_offset)
    if fuse_act is not None:
        out = _activate(out, fuse_act)
    return out.astype(preferred_element_type or rows.dtype)


def multiply_one(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    rhs_scale: jax.Array,
    preferred_element_type: Any,
    **unused: Any,
) -> jax.Array:
    """Compute `lhs @ W` for a single group, with W unpacked once for all rows.

    Args:
      lhs: [n, in].
      rhs: [1, in, out], of any dtype.
      rhs_scale: [1, blocks, 1, out], as in `multiply_grouped`.
      preferred_element_type: dtype of the result.
      **unused: tiles, and what describes the one group. Rows are not rounded to W's dtype.

    Returns: [n, out].
    """
    del unused
    blocks = rhs.reshape(rhs_scale.shape[1], -1, rhs.shape[2]).astype(jnp.float32)
    matrix = (blocks * rhs_scale[0].astype(jnp.float32)).reshape(rhs.shape[1:])
    out = jnp.dot(
        *(lhs, matrix.astype(lhs.dtype)),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return out.astype(preferred_element_type)


def _activate(both: jax.Array, name: str) -> jax.Array:
    """Apply the activation with the function that the host's kernel calls."""
    from tokamax._src.ops.experimental.gmm_v2 import gmm_v2

    return gmm_v2.apply_act_fn(both, name)


def _gates_and_rest(both: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split gates from what they multiply; in the kernel they alternate every 128 columns."""
    gates, rest = jnp.split(both, 2, axis=-1)
    return gates, rest


def _gather(rows: jax.Array, indices: jax.Array, *unused: Any, **options: Any) -> jax.Array:
    """Gather each expert's rows; `unused` says which of them this device needs."""
    del unused, options
    return rows.at[indices].get(mode="clip")


def add_up(
    rows: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    valid: jax.Array | None,
    per_token: int,
) -> jax.Array:
    """Compute `sum_i weights[t, i] * rows[indices[t, i]]` for every token, in float32.

    Args:
      rows: [n, out].
      indices: int32 [T * per_token].
      weights: T * per_token numbers.
      valid: bool [T * per_token], which rows count; None for all.
      per_token: the number of experts per token.

    Returns: [T, out].
    """
    parts = rows.at[indices].get(mode="clip").astype(jnp.float32)
    parts *= weights.reshape(-1, 1).astype(jnp.float32)
    if valid is not None:
        parts = jnp.where(valid[:, None], parts, 0)
    return parts.reshape(-1, per_token, rows.shape[1]).sum(axis=1).astype(rows.dtype)


def _add_up_all(
    rows: jax.Array, indices: jax.Array, weights: jax.Array, per_token: int
) -> jax.Array:
    return add_up(rows, indices, weights, None, per_token)
