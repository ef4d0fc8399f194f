"""Timing on the device: calls that wait for each other, on copies out of L2.

A chain of calls, one on every copy of the keys, is one program, and on a GPU one captured graph:
a call's output is the next one's query, so that nothing but the calls is launched. What cannot be
chained so, because it returns something else or would be a program too large, runs in a loop.

All arrays are arguments of what is compiled. One that it closed over would become a constant of
the program, which gigabytes cannot be.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

TURNS = 7
LOOP = "host clock around a loop on the device"
GRAPH = "host clock around graphs of a call on every copy"
LAYERS = f"{GRAPH}, with one plan"
# What a round should take, so that its start and its end do not count.
LOOP_SECONDS = 20e-3
MOST_REPEATS = 100


def repeats_for(seconds: float, copies: int) -> int:
    """How often a loop goes over its copies, if a step takes `seconds` or more."""
    return int(min(MOST_REPEATS, max(1, -(-LOOP_SECONDS // (seconds * copies)))))


def time_loop(
    step: Callable[[Any, Any], Any], arrays: Any, tables: Any, turns: int = TURNS, repeats: int = 1
) -> list[float]:
    """Seconds of one `step(arrays, table)`, of each of several loops over `tables`.

    What a step returns are floats: an integer times zero would need no step.
    """
    import jax

    loop = jax.jit(loop_of(step, repeats))
    return _rounds(lambda: loop(arrays, tables), len(tables) * repeats, turns)


def loop_of(step: Callable[[Any, Any], Any], repeats: int = 1) -> Callable[[Any, Any], Any]:
    """`loop(arrays, tables)`, to be compiled: `repeats` times over all tables."""
    import jax
    import jax.numpy as jnp

    def loop(arrays: Any, tables: Any) -> Any:
        def body(carry: Any, index: Any) -> tuple[Any, None]:
            # Each step waits for the last: its table depends on a number that is always zero.
            out = step(arrays, tables[index] + carry)
            return (out.reshape(-1)[0] * 0).astype(jnp.int32), None

        order = jnp.tile(jnp.arange(len(tables), dtype=jnp.int32), repeats)
        return jax.lax.scan(body, jnp.int32(0), order)[0]

    return loop


def time_steps(run: Callable[[Any, int], Any], array: Any, steps: int) -> list[float]:
    """Seconds of one of the steps that `run(array, steps)` takes on the device."""
    return _rounds(lambda: run(array, steps), steps, TURNS)


def chain_of(step: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Sequence[Any]], Any]:
    """`chain(query, arrays, copies)`, to be compiled: `step(query, arrays, copy)` on every copy.

    A step's output has the query's shape and dtype, and is the next one's query.
    """

    def chain(query: Any, arrays: Any, copies: Sequence[Any]) -> Any:
        for copy in copies:
            out = step(query, arrays, copy)
            assert (out.shape, out.dtype) == (query.shape, query.dtype), "no query of the next step"
            query = out
        return query

    return chain


def time_chain(
    chain: Callable[[Any, Any, Sequence[Any]], Any],
    query: Any,
    arrays: Any,
    copies: Sequence[Any],
    turns: int = TURNS,
    repeats: int = 1,
) -> list[float]:
    """Seconds of one step of a compiled chain, of each of several rounds.

    A round sends the chain off `repeats` times before it waits, each after the last.
    """

    def round_() -> Any:
        out = query
        for _ in range(repeats):
            out = chain(out, arrays, copies)
        return out

    return _rounds(round_, len(copies) * repeats, turns)


def _rounds(run: Callable[[], Any], steps: int, turns: int) -> list[float]:
    run().block_until_ready()
    found = []
    for _ in range(turns):
        start = time.perf_counter()
        run().block_until_ready()
        found.append((time.perf_counter() - start) / steps)
    return found
