"""Timing loops that run on the device: calls that wait for each other, on copies out of L2.

All arrays are arguments of the compiled loop. One that it closed over would become a constant of
the program, which gigabytes cannot be.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

TURNS = 7
HOW = "host clock around a loop on the device"


def time_loop(
    step: Callable[[Any, Any], Any], arrays: Any, tables: Any, turns: int = TURNS
) -> list[float]:
    """Seconds of one `step(arrays, table)`, of each of several loops over `tables`."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def loop(arrays: Any, tables: Any) -> Any:
        def body(carry: Any, table: Any) -> tuple[Any, None]:
            # Each step waits for the last: its table depends on a number that is always zero.
            out = step(arrays, table + carry)
            return (out.reshape(-1)[0] * 0).astype(jnp.int32), None

        return jax.lax.scan(body, jnp.int32(0), tables)[0]

    return _rounds(lambda: loop(arrays, tables), len(tables), turns)


def time_copies(
    step: Callable[[Any, Any], Any], query: Any, copies: Sequence[Any], turns: int = TURNS
) -> list[float]:
    """The same of `step(query, copy)`, whose keys are arrays of their own.

    The loop is unrolled: a scan would first copy the keys of a step out of an array of all.
    """
    import jax

    @jax.jit
    def loop(query: Any, copies: Sequence[Any]) -> Any:
        carry = query.reshape(-1)[0] * 0
        for copy in copies:
            carry = step(query + carry, copy).reshape(-1)[0] * 0
        return carry

    return _rounds(lambda: loop(query, copies), len(copies), turns)


def _rounds(run: Callable[[], Any], steps: int, turns: int) -> list[float]:
    run().block_until_ready()
    found = []
    for _ in range(turns):
        start = time.perf_counter()
        run().block_until_ready()
        found.append((time.perf_counter() - start) / steps)
    return found
