"""Time calls on the device: each waits for the one before, on copies that are not in L2.

A chain of calls, one on every copy of the keys, is one program, and on a GPU one captured graph:
a call's output is the next one's query, so nothing but the calls is launched. Calls that cannot be
chained, because they return something else or the program would be too large, run in a loop.

All arrays are arguments of the compiled function. An array that it closed over would become a
constant of the program, which gigabytes cannot be.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

TURNS = 7
LOOP = "host clock around a loop on the device"
GRAPH = "host clock around graphs of a call on every copy"
LAYERS = f"{GRAPH}, with one plan"
# How long a round should take, so that its start and end do not matter.
LOOP_SECONDS = 20e-3
MOST_REPEATS = 100


def repeats_for(seconds: float, copies: int) -> int:
    """Return how often a loop goes over its copies if a step takes `seconds` or more."""
    return int(min(MOST_REPEATS, max(1, -(-LOOP_SECONDS // (seconds * copies)))))


def time_loop(
    step: Callable[[Any, Any], Any], arrays: Any, tables: Any, turns: int = TURNS, repeats: int = 1
) -> list[float]:
    """Return the seconds of one `step(arrays, table)` in each of several loops over `tables`.

    A step must return floats: the compiler would drop a step whose integers are multiplied by zero.
    """
    import jax

    loop = jax.jit(loop_of(step, repeats))
    return _rounds(lambda: loop(arrays, tables), len(tables) * repeats, turns)


def loop_of(step: Callable[[Any, Any], Any], repeats: int = 1) -> Callable[[Any, Any], Any]:
    """Make `loop(arrays, tables)`, to be compiled: `repeats` times over all tables."""
    import jax
    import jax.numpy as jnp

    def loop(arrays: Any, tables: Any) -> Any:
        def body(carry: Any, index: Any) -> tuple[Any, None]:
            # Each step waits for the one before: its table depends on a number that is always zero.
            out = step(arrays, tables[index] + carry)
            return (out.reshape(-1)[0] * 0).astype(jnp.int32), None

        order = jnp.tile(jnp.arange(len(tables), dtype=jnp.int32), repeats)
        return jax.lax.scan(body, jnp.int32(0), order)[0]

    return loop


def time_steps(run: Callable[[Any, int], Any], array: Any, steps: int) -> list[float]:
    """Return the seconds of one of the steps that `run(array, steps)` takes on the device."""
    return _rounds(lambda: run(array, steps), steps, TURNS)


def chain_of(step: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Sequence[Any]], Any]:
    """Make `chain(query, arrays, copies)`, to be compiled: `step` on every copy.

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
    """Return the seconds of one step of a compiled chain in each of several rounds.

    A round launches the chain `repeats` times, one after another, before it waits.
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
