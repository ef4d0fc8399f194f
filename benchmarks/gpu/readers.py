"""Several ways to only read memory: the best of them is the read ceiling.

Each reads one half, given by its index, of int32 `numbers` [2, words], and returns a value that
depends on every word. XLA's are reductions. Triton's programs are persistent and go through the
memory in steps of the grid, as decode's do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.integers import ceil_div
from jattn.pallas import machine

# Programs per multiprocessor, words of a step, warps, stages.
TRITON = ((2, 8192, 8, 3), (4, 4096, 4, 3), (8, 2048, 4, 2), (16, 1024, 4, 1))
ROW = 8192


def as_float(word: Any) -> Any:
    """Return the word as a float for the loop: any integer times zero would be a known zero."""
    return jax.lax.bitcast_convert_type(word, jnp.float32)[None]


def xla_words(numbers: Any, i: Any) -> Any:
    """Reduce to the maximum, which costs nothing but the reading."""
    return as_float(jnp.take(numbers, i % 2, axis=0).max())


def xla_half_words(numbers: Any, i: Any) -> Any:
    """Reduce 16-bit words to the maximum."""
    words = jax.lax.bitcast_convert_type(jnp.take(numbers, i % 2, axis=0), jnp.uint16)
    return as_float(words.max().astype(jnp.int32))


def xla_rows(numbers: Any, i: Any) -> Any:
    """Reduce row by row to the maximum."""
    rows = numbers.reshape(2, -1, ROW)
    return as_float(jnp.take(rows, i % 2, axis=0).max(axis=-1).max())


def triton_reader(
    gpu: machine.Machine, per_core: int, step: int, warps: int, stages: int
) -> Callable[[Any, Any], Any]:
    """Make a reader: `per_core` programs on a multiprocessor that read `step` words at a time."""
    from benchmarks.gpu import read_kernel
    from jattn.pallas.triton import packed

    programs = gpu.cores * per_core

    def read(numbers: Any, i: Any) -> Any:
        words = numbers.shape[1]
        (out,) = packed.call(
            read_kernel.read,
            [numbers, i[None] % 2],
            [ceil_div(words, programs * step)],
            [jax.ShapeDtypeStruct((programs,), jnp.int32)],
            name="jattn_read",
            grid=(programs,),
            num_warps=warps,
            num_stages=stages,
            compute_capability=gpu.sm,
            aliases={},
            constants={"WORDS": words, "STEP": step},
        )
        return as_float(out.max())

    return read


def readers(gpu: machine.Machine | None) -> dict[str, Callable[[Any, Any], Any]]:
    """Return all readers by name; Triton's only with a GPU and its packages."""
    from jattn.pallas.triton import needs

    found = {"xla words": xla_words, "xla halves": xla_half_words, "xla rows": xla_rows}
    if gpu is not None and not needs.installed_lack():
        for sizes in TRITON:
            found["triton {}x{} {}w {}s".format(*sizes)] = triton_reader(gpu, *sizes)
    return found
