"""sglang-jax's mixtures of experts without TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jattn import checks
from jattn.integrations.grouped import multiply_grouped


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    preferred_element_type: DTypeLike = jnp.float32,
    rhs_scale: jax.Array | None = None,
    rhs_bias: jax.Array | None = None,
    group_offset: jax.Array | None = None,
    existing_out: None = None,
    activation_quantized_dtype: DTypeLike | None = None,
    **of_the_kernel: object,
) -> jax.Array:
    """Multiply each run of rows with its expert's matrix, as sglang-jax's kernel does.

    Args:
      lhs: [n, in], sorted by expert.
      rhs: [E, in, out], of E experts of this device.
      group_sizes: int32; how many rows each expert has, including other devices' experts.
      preferred_element_type: of the result.
      rhs_scale: [E, blocks, 1, out], or None.
      rhs_bias: [E, 1, out], or None.
      group_offset: int32; the first expert of this device.
      existing_out: None.
      activation_quantized_dtype: ignored: rows are not quantized.
      **of_the_kernel: tiles and the like; ignored.

    Returns: [n, out]; zeros for other devices' experts.

    Raises:
      ValueError: `existing_out` is given.
    """
    with checks.checking("jattn.integrations.sglang_jax") as problems:
        problems.expect(existing_out is None, "existing_out", existing_out, "None")
    del activation_quantized_dtype, of_the_kernel
    first = jnp.zeros(1, jnp.int32) if group_offset is None else group_offset.reshape(1)
    out, mine = multiply_grouped(lhs, rhs, rhs_scale, rhs_bias, group_sizes, first)
    return jnp.where(mine[:, None], out, 0).astype(preferred_element_type)
