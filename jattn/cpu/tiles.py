"""Static sizes of the XLA path's loops, and the rules that choose them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jattn import call as calls
from jattn.cpu import pool


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Query tokens of one KV head's group per tile, and the slab of keys one iteration reads."""

    query_tokens: int
    slab: pool.Slab


def compute_dtype(call: calls.Call) -> np.dtype:
    """The dtype of the dots' operands; they accumulate in float32.

    bfloat16 where nothing wider comes in (fp8's numbers fit it exactly), else float32: float16 has
    no fast dot on CPU and would overflow where float32 does not.
    """
    names = {call.query_dtype, call.key_format.name, call.value_format.name}
    narrow = names <= {"bfloat16", "fp8_e4m3", "fp8_e5m2"}
    return np.dtype(jnp.bfloat16 if narrow else jnp.float32)


def ragged_tiles(call: calls.Call) -> Tiles:
    """Tiles of the prefill loop: about 256 rows of one KV head against 512 keys."""
    query_tokens = max(1, min(call.max_query_len, 256 // call.group))
    return Tiles(query_tokens, pool.Slab.of(call.block_size, 512))
