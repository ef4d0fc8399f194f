"""A measurement of the GPU benchmark, compared with what this GPU reaches in the same run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu import timing as gpu_timing
from benchmarks.gpu import workloads as gpu_workloads
from benchmarks.workloads import Workload, flops

HEADER = (
    f"{'workload':<52} {'with':<14} {'median us':>10} {'spread':>6} {'GB/s':>7} {'TFLOP/s':>8} "
    f"{'of ceiling':>13}"
)


@dataclass(frozen=True)
class Ceilings:
    """What this GPU did in this run: bytes read and matrix FLOPs, a second."""

    read: float
    matrix: float


@dataclass(frozen=True)
class Row:
    """One workload with one implementation, checked and timed."""

    name: str
    implementation: str
    median: float
    spread: float
    gigabytes: float
    teraflops: float
    share: float
    bound: str
    timed: str

    def line(self) -> str:
        """The row of the table."""
        return (
            f"{self.name:<52} {self.implementation:<14} {self.median * 1e6:>10.1f} "
            f"{self.spread:>6.0%} {self.gigabytes:>7.0f} {self.teraflops:>8.1f} "
            f"{self.share:>6.0%} {self.bound:<6}"
        )


def make_row(
    w: Workload,
    implementation: str,
    seconds: Sequence[float],
    limits: Ceilings,
    timed: str = gpu_timing.HOW,
) -> Row:
    """What several timings of a workload say."""
    low, median, high = np.percentile(seconds, (25, 50, 75))
    least, bound = gpu_workloads.floor(w, limits.read, limits.matrix)
    return Row(
        w.name,
        implementation,
        float(median),
        float((high - low) / median),
        gpu_workloads.moved_bytes(w) / median / 1e9,
        flops(w) / median / 1e12,
        least / median,
        bound,
        timed,
    )


def read_step(numbers: Any, i: Any) -> Any:
    """A sum that reads one of the arrays. The maximum of integers: nothing but the reading.

    A float: an integer times zero is zero whatever it is, so that the loop would not need it.
    """
    import jax
    import jax.numpy as jnp

    words = jnp.take(numbers, i % 2, axis=0).max()
    return jax.lax.bitcast_convert_type(words, jnp.bfloat16)[None]


def products(a: Any, count: int) -> Any:
    """`count` products, each of the last one: nothing else is between them."""
    import jax

    return jax.lax.scan(lambda x, _: (a @ x, None), a, length=count)[0]


def measure_ceilings(size: int = 8192, words: int = 2**30) -> Ceilings:
    """The rates of reading 2 GiB and of a product of two bfloat16 matrices of 8,192."""
    import jax
    import jax.numpy as jnp

    numbers = jnp.ones((2, words), jnp.uint16)
    read = gpu_timing.time_loop(read_step, numbers, jnp.tile(jnp.arange(2, dtype=jnp.int32), 10))
    del numbers
    # Rows of length 1: products stay as large as their factors.
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) * size**-0.5
    product = gpu_timing.time_steps(jax.jit(products, static_argnums=1), a, 20)
    return Ceilings(2 * words / np.median(read), 2 * size**3 / np.median(product))
