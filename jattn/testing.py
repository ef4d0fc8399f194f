"""Assertions for tests of programs with paged caches: that XLA copies no pool."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import numpy as np

from jattn import formats


def assert_nothing_pool_sized(
    compiled: jax.stages.Compiled, pools: object, *, max_temporaries: int | None = None
) -> None:
    """Assert that a compiled program makes no array as large as a pool.

        temporaries < the smallest pool,    outputs - aliased inputs < the smallest pool

    Then pools that are donated and returned are written in place, pools that are only read are
    neither copied nor converted, and temporaries do not grow with them. The check reads XLA's own
    report (`memory_analysis`) and runs nothing. Choose pools larger than all that the program has
    good reason to allocate together; `jax.ShapeDtypeStruct`s cost nothing.

    Args:
      compiled: `jax.jit(f, donate_argnums=...).lower(...).compile()`.
      pools: the program's caches, a pytree of `KVArray`s, arrays or `jax.ShapeDtypeStruct`s. Of a
        `KVArray` only the words count.
      max_temporaries: bytes of temporaries allowed, below the smallest pool; None for anything
        below it.

    Raises:
      AssertionError: with the sizes, and the instructions of the program that make arrays so large.
      ValueError: `pools` has no array, or the platform does not report memory use.

    Example:
      >>> import jax, jax.numpy as jnp, jattn, jattn.testing
      >>> caches = jattn.init_kv_cache(256, 2, 16, 64)
      >>> new, slots = jnp.ones((1, 2, 64)), jnp.zeros(1, jnp.int32)
      >>> step = jax.jit(jattn.update_kv_cache, donate_argnums=(0, 1))
      >>> compiled = step.lower(*caches, new, new, slots).compile()
      >>> jattn.testing.assert_nothing_pool_sized(compiled, caches)
    """
    leaves = jax.tree.leaves(pools, is_leaf=lambda x: isinstance(x, formats.KVArray))
    sizes = [_bytes_of(formats.storage(leaf)[0]) for leaf in leaves]
    if not sizes:
        raise ValueError("assert_nothing_pool_sized: pools: no array, but must hold the caches")
    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError(
            "assert_nothing_pool_sized: compiled: this platform does not report memory use"
        )
    pool = min(sizes)
    most = pool if max_temporaries is None else min(max_temporaries + 1, pool)
    found = {
        "temporaries": (memory.temp_size_in_bytes, most),
        "outputs that reuse no donated input": (
            memory.output_size_in_bytes - memory.alias_size_in_bytes,
            pool,
        ),
    }
    wrong = [
        f"{size:,} bytes of {what}, but must be below {limit:,}"
        for what, (size, limit) in found.items()
        if size >= limit
    ]
    if wrong:
        made = _instructions_making(compiled.as_text() or "", pool)
        raise AssertionError(
            f"with pools of {pool:,} bytes or more: {'; '.join(wrong)}"
            + "".join(f"\n  {line}" for line in made)
        )


def _bytes_of(x: Any) -> int:
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize


_RESULT = re.compile(r"%?[\w.-]+ = (?P<type>[a-z]\w*)\[(?P<shape>[\d,]*)\][^ ]* (?P<op>[\w-]+)\(")
# Instructions that only name memory, or that write into an operand's memory.
_IN_PLACE = {
    *("parameter", "bitcast", "get-tuple-element", "dynamic-update-slice", "scatter"),
    *("while", "conditional", "call", "custom-call", "optimization-barrier"),
}


def _instructions_making(program: str, size: int) -> list[str]:
    """Return up to five lines of an HLO program whose result has `size` bytes or more."""
    lines = []
    for line in map(str.strip, program.splitlines()):
        found = _RESULT.match(line.removeprefix("ROOT "))
        if found is None or found["op"] in _IN_PLACE:
            continue
        bits = int("".join(re.findall(r"\d+", found["type"])[:1]) or 8)
        count = math.prod(int(x) for x in found["shape"].split(",") if x)
        if count * bits >= 8 * size:
            lines.append(line if len(line) <= 160 else f"{line[:157]}...")
    return lines[:5]
