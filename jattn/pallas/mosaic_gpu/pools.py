"""Where keys and values are stored: in two pools or in one.

One pool holds both side by side in its rows (`jattn.KVRows`), or keys whose first numbers are the
values (MLA). Kernels then copy from it twice, the second time from L2.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from jattn import call as calls


def arrays(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """The pools of keys and values as kernels take them, in the call's layout.

    Rows are [N, S, rows, width].
    """
    keys = call.key_format.decode(operands.key_cache)
    if call.rows is not None:
        shape = (call.num_blocks, call.block_size, call.rows.count, call.rows.width)
        keys = keys.reshape(shape)
    if operands.value_cache is None:
        return keys, keys
    return keys, call.value_format.decode(operands.value_cache)


def first_value_column(call: calls.Call) -> int:
    """The column of the values' pool at which a head's values begin."""
    return 0 if call.rows is None else call.rows.value_start


def copy_source(
    call: calls.Call, pool: Any, block: jax.Array, kv_head: jax.Array, slots: Any, columns: Any
) -> Any:
    """Columns of one KV head in slots of one block."""
    if call.kv_layout == "HND":
        return pool.at[block, kv_head, slots, columns]
    return pool.at[block, slots, kv_head, columns]


def refusals(call: calls.Call) -> list[str]:
    """Return why a copy would begin in the middle of a swizzled tile of up to 64 columns."""
    d, v = call.head_dim, call.value_dim
    step = max(math.gcd(d, 64), math.gcd(v, 64))
    if call.rows is not None:
        width, start = call.rows.width, call.rows.value_start
        if width % step or start % step:
            return [
                f"key_cache has row_width {width} and value_start {start}; where D is {d} and V "
                f"{v}, it takes multiples of {step}"
            ]
    elif call.values_in_keys and d % step:
        return [f"value_dim is {v} and D {d}; it takes keys of a multiple of {step} numbers"]
    return []
