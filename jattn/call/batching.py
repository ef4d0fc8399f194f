"""`jax.vmap` of an implementation that takes one call at a time.

The calls of a batch run one after another. If each has its own pools, they are not sliced, because
a custom call would get a copy of the slice. Instead the pools of the batch become one pool, with
their blocks one after another:

    [A, N, ...] is [A N, ...]        call a reads block a N + id
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import integers
from jattn.call.call import Call, Operands, Run
from jattn.varying import gathered

Results = tuple[jax.Array, jax.Array]
POOLS = ("key_cache", "value_cache", "k_quant_params", "v_quant_params")  # each has N blocks


def one_by_one(attend: Run) -> Run:
    """Give `attend(call, operands)` a rule for `jax.vmap`.

    Pools are copied only if keys have a batch axis and values do not, or the other way round, if an
    explicit mesh splits a batch of pools or their blocks, or if a batch of pools has more slots
    than int32 can number.
    """

    @functools.lru_cache(maxsize=1024)
    def of(call: Call) -> Callable[[Operands], Results]:
        one = jax.custom_batching.custom_vmap(functools.partial(attend, call))

        @one.def_vmap
        def many(size: int, flags: Any, operands: Operands) -> tuple[Results, tuple[bool, bool]]:
            (is_batched,) = flags
            joined = _can_join(call, size, _pools(is_batched), _pools(operands))
            if joined:
                operands = operands._replace(**jax.tree.map(_join, _pools(operands)))
                in_none = jax.tree.map(lambda _: False, _pools(is_batched))
                is_batched = is_batched._replace(**in_none)
            arrays, structure = jax.tree.flatten(operands)
            each = jax.tree.leaves(is_batched)

            def turn(given: tuple[jax.Array, list[jax.Array]]) -> Results:
                a, left = given[0], iter(given[1])
                call_operands = jax.tree.unflatten(
                    structure,
                    [next(left) if flag else x for flag, x in zip(each, arrays, strict=True)],
                )
                if not joined:
                    return one(call_operands)
                ids = call_operands.block_tables
                known = (ids >= 0) & (ids < call.num_blocks)
                ids = jnp.where(known, ids + a * np.int32(call.num_blocks), -1)
                wide = dataclasses.replace(call, num_blocks=size * call.num_blocks)
                return of(wide)(call_operands._replace(block_tables=ids))

            # `lax.map` cannot step along an axis that an explicit mesh splits.
            batch = gathered([x for flag, x in zip(each, arrays, strict=True) if flag], 1)
            found = jax.lax.map(turn, (jnp.arange(size, dtype=jnp.int32), batch))
            return found, (True, True)

        return one

    return lambda call, operands: of(call)(operands)


def _pools(operands: Operands) -> dict[str, Any]:
    return {name: getattr(operands, name) for name in POOLS}


def _join(pools: jax.Array) -> jax.Array:
    return pools.reshape(-1, *pools.shape[2:])


def _can_join(call: Call, size: int, is_batched: dict[str, Any], pools: dict[str, Any]) -> bool:
    """Whether every pool has the batch axis, and the pools of a batch can become one."""

    def is_whole(x: jax.Array) -> bool:  # along its first two axes
        sharding: Any = jax.typeof(x).sharding
        return not any(sharding.spec[:2])

    return (
        all(jax.tree.leaves(is_batched))
        and size * call.num_blocks <= integers.max_blocks(call.block_size)
        and all(map(is_whole, jax.tree.leaves(pools)))
    )
