"""A measurement of the GPU benchmark, and the ceilings of this GPU in the same run."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu import readers as gpu_readers
from benchmarks.gpu import timing as gpu_timing
from benchmarks.gpu import workloads as gpu_workloads
from benchmarks.gpu.kernels import KernelTimes
from benchmarks.workloads import Workload, flops
from jattn.pallas import machine

HEADER = (
    f"{'workload':<52} {'with':<14} {'median us':>10} {'spread':>6} {'GB/s':>7} {'TFLOP/s':>8} "
    f"{'of ceiling':>13} {'kernels us':>10} {'launches':>8}"
)


@dataclass(frozen=True)
class Ceilings:
    """The rates that this GPU reached in this run.

    Attributes:
      read: bytes a second, by the best reader.
      matrix: FLOPs a second of a product of bfloat16 matrices.
      reader: the name of the best reader.
      readers: bytes a second of each reader.
    """

    read: float
    matrix: float
    reader: str = ""
    readers: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One workload with one implementation, checked and timed.

    Attributes:
      name, implementation: the workload, and what ran it.
      median, spread: seconds of a call, and the width of their middle half over the median.
      gigabytes, teraflops: per second.
      share: the share of what the ceilings allow.
      bound: which ceiling, "read" or "matrix".
      timed: how the call was timed.
      kernels: seconds of only a call's kernels, by the GPU's clock; None if not requested.
      launches: how many kernels there are.
      parts: microseconds of each kernel.
      source: where the kernel times are from.
    """

    name: str
    implementation: str
    median: float
    spread: float
    gigabytes: float
    teraflops: float
    share: float
    bound: str
    timed: str
    kernels: float | None = None
    launches: float | None = None
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    source: str = ""

    def line(self) -> str:
        """Format the row as a line of the table."""
        kernels = "-" if self.kernels is None else f"{self.kernels * 1e6:.1f}"
        launches = "-" if self.launches is None else f"{self.launches:.1f}"
        return (
            f"{self.name:<52} {self.implementation:<14} {self.median * 1e6:>10.1f} "
            f"{self.spread:>6.0%} {self.gigabytes:>7.0f} {self.teraflops:>8.1f} "
            f"{self.share:>6.0%} {self.bound:<6} {kernels:>10} {launches:>8}"
        )


def row_of(line: dict[str, Any]) -> Row:
    """Return the row that a line of results holds."""
    fields = {field.name for field in dataclasses.fields(Row)}
    return Row(**{name: value for name, value in line.items() if name in fields})


def make_row(
    w: Workload,
    implementation: str,
    seconds: Sequence[float],
    limits: Ceilings,
    timed: str = gpu_timing.LOOP,
    kernels: KernelTimes | None = None,
) -> Row:
    """Make the row for several timings of a workload and one of its kernels."""
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
        **({} if kernels is None else dataclasses.asdict(kernels)),
    )


def products(a: Any, count: int) -> Any:
    """Compute `count` products, each of the previous one, with nothing between them."""
    import jax

    return jax.lax.scan(lambda x, _: (a @ x, None), a, length=count)[0]


def random_words(words: int) -> Any:
    """Make pseudo-random int32 [2, words]: a GPU may be faster if all bits are alike."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def make() -> Any:
        index = jax.lax.broadcasted_iota(jnp.uint32, (2, words), 1)
        mixed = (index ^ (index >> 15)) * jnp.uint32(0x9E3779B1)
        return jax.lax.bitcast_convert_type(mixed ^ (mixed >> 13), jnp.int32)

    return make()


def measure_ceilings(gpu: machine.Machine | None) -> Ceilings:
    """Measure the rates of reading 2 GiB and of a product of two bfloat16 matrices of 8,192.

    Args:
      gpu: the GPU, for Triton's readers; None to leave them out.
    """
    import jax
    import jax.numpy as jnp

    size, words = 8192, 2**29
    numbers, turns = random_words(words), jnp.tile(jnp.arange(2, dtype=jnp.int32), 10)
    rates: dict[str, float] = {}
    for name, reader in gpu_readers.readers(gpu).items():
        try:
            rates[name] = 4 * words / float(np.median(gpu_timing.time_loop(reader, numbers, turns)))
        except Exception as error:  # a reader that does not compile is not the best
            print(f"reader {name}: {str(error).splitlines()[0]}")
    del numbers
    best = max(rates, key=rates.__getitem__)
    # Rows have length 1, so products stay as large as their factors.
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16) * size**-0.5
    product = gpu_timing.time_steps(jax.jit(products, static_argnums=1), a, 20)
    return Ceilings(rates[best], float(2 * size**3 / np.median(product)), best, rates)
