"""Measure the best this machine can do, in the same run as what is compared with it.

Three figures: bytes that all cores together read from memory in a second, and operations of a
square matrix product in float32 and in bfloat16. A workload cannot be faster than `bound`.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import cache_bytes, num_cores, seconds_of
from benchmarks.workloads import ITEM_BYTES, Workload, flops, kv_bytes

MATRIX_SIZE = 2048


@dataclass(frozen=True)
class Ceilings:
    """The machine's best rates.

    Attributes:
      read: bytes per second, all cores.
      matrix: operations per second of a matrix product, by dtype.
    """

    read: float
    matrix: dict[str, float]

    def __post_init__(self):
        if min(self.read, *self.matrix.values()) <= 0:
            raise ValueError(f"ceilings must be positive: {self}")

    def __str__(self) -> str:
        matrix = ", ".join(f"{dtype} {rate / 1e9:.0f}" for dtype, rate in self.matrix.items())
        return f"ceilings: read {self.read / 1e9:.1f} GB/s; matrix {matrix} GFLOP/s"

    def bound(self, w: Workload) -> tuple[float, str]:
        """Return the least seconds that `w` can take, and what bounds it: "read" or "matrix"."""
        reading = kv_bytes(w) / self.read
        multiplying = flops(w) / self.matrix[w.dtype]
        return max((reading, "read"), (multiplying, "matrix"))


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the shortest of `repeats` calls, after one that is not counted."""
    return min(seconds_of(call, repeats + 1)[1:])


def on_all_cores(call: Callable[..., object], arrays: list, repeats: int) -> float:
    """Return the shortest time in which every core calls `call` on an element of `arrays`."""
    with ThreadPoolExecutor(len(arrays)) as pool:
        return best_seconds(lambda: list(pool.map(call, arrays)), repeats)


def read_rate(repeats: int = 9) -> float:
    """Return the bytes per second that all cores together read from memory.

    Every core reads its own array; together the arrays are four times the last-level caches.
    """
    words = 4 * cache_bytes() // 8 // num_cores()
    arrays = [np.ones(words, np.int64) for _ in range(num_cores())]
    return 8 * words * len(arrays) / on_all_cores(np.bitwise_or.reduce, arrays, repeats)


def copy_rate() -> float:
    """Return the bytes per second, read plus written, at which all cores together copy memory."""
    words = 2 * cache_bytes() // 8 // num_cores()
    pairs = [(np.ones(words, np.int64), np.zeros(words, np.int64)) for _ in range(num_cores())]
    seconds = on_all_cores(lambda pair: np.copyto(pair[1], pair[0]), pairs, 9)
    return 2 * 8 * words * len(pairs) / seconds


def matrix_rate(dtype: str, size: int = MATRIX_SIZE, repeats: int = 9) -> float:
    """Return the operations per second of a square `jnp.dot`."""
    a = jnp.ones((size, size), dtype)
    dot = jax.jit(jnp.dot)
    return 2 * size**3 / best_seconds(lambda: dot(a, a).block_until_ready(), repeats)


def measure(
    peer_rate: Callable[[str], float] | None = None,
) -> tuple[Ceilings, dict[str, dict[str, float]]]:
    """Measure all ceilings, and return also the candidates that each is the best of.

    A ceiling is the best that anything reached, so torch's products count if there is a peer:
    `peer_rate` returns the operations per second of its product in a dtype.
    """
    found: dict[str, dict[str, float]] = {"read": {"numpy": read_rate()}}
    for dtype in ITEM_BYTES:
        found[dtype] = {"jax.numpy.dot": matrix_rate(dtype)}
        if peer_rate is not None:
            found[dtype]["torch.matmul"] = peer_rate(dtype)
    best = {name: max(rates.values()) for name, rates in found.items()}
    return Ceilings(best["read"], {dtype: best[dtype] for dtype in ITEM_BYTES}), found
