"""Small ragged batches for the Mosaic GPU kernels, and how to run them without a GPU.

The interpreter steps through every barrier and copy in Python, so a case here is a handful of
tiles: enough for a sequence that ends within a kernel block, one that is split between grid blocks,
an empty one, and one that is not split.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from tests.support import matrix, problems

SKIP_REASON = "the Mosaic GPU kernels need jax 0.11.2 or newer (Python 3.12 or newer)"
NEW_ENOUGH = jax.__version_info__ >= (0, 11, 2)
needs_mosaic = pytest.mark.skipif(not NEW_ENOUGH, reason=SKIP_REASON)
ALL = frozenset(matrix.EVERYTHING)
LSE = frozenset({"return_lse"})
# All of a problem except for its lengths.
SMALL = dict(
    num_heads=4, num_kv_heads=2, head_dim=64, value_dim=64, query_dtype="bfloat16",
    format="bfloat16", options=LSE,
)  # fmt: skip


def interpret(
    batch: problems.Batch, *, detect_races: bool = False, num_cores: int = 2, kernel: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Interpret `kernel`, or `mosaic_launch.run`, on the CPU; return `(out, lse)` of a batch."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    from jattn.pallas.mosaic_gpu import compat as mosaic_compat
    from jattn.pallas.mosaic_gpu import launch as mosaic_launch

    call, operands = batch.call()

    def run(operands: Any) -> Any:
        return (kernel or mosaic_launch.run)(call, operands)

    with (
        mosaic_compat.interpreted(detect_races=detect_races, num_cores=num_cores),
        _races_raise(),
        _products_are_reads(),
        warnings.catch_warnings(),
    ):
        # NumPy warns of NaN from slots that no sequence owns, in products that are masked later.
        warnings.filterwarnings("ignore", "invalid value encountered", RuntimeWarning)
        warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning)
        try:
            out, lse = jax.jit(run)(operands)
            return np.asarray(out), np.asarray(lse)
        except Exception:
            # The state that an interrupted kernel leaves would fail every later one.
            gpu_callbacks.reset_gpu_interpret_mode_state()
            raise


@contextlib.contextmanager
def _races_raise() -> Iterator[None]:
    """Raise at a race, which jax 0.11.2 only prints."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    right = gpu_callbacks.GPURaceDetectionState
    states = []

    def kept(**given: Any) -> Any:
        states.append(right(**given))
        return states[-1]

    gpu_callbacks.GPURaceDetectionState = kept
    error = None
    try:
        yield
    except Exception as other:  # may be a consequence of a race
        error = other
    finally:
        gpu_callbacks.GPURaceDetectionState = right
    if any(state.races_found for state in states):
        raise RuntimeError("RACE DETECTED, as printed") from error
    if error is not None:
        raise error


@contextlib.contextmanager
def _products_are_reads() -> Iterator[None]:
    """Tell the race detector what `wgmma` reads from shared memory, which it does not track."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    right = gpu_callbacks.wgmma

    @gpu_callbacks.fail_on_exception
    def read(name: str, given: dict[str, Any]) -> None:
        memory, thread = gpu_callbacks._get_shared_memory(), given["thread"]
        key = given[name + "_allocation_key_as_array"]
        key = gpu_callbacks.HostAllocationKey.from_array(key)
        transforms = gpu_callbacks._remove_noop_transforms(given[name + "_transforms"])
        access = memory.access(key, jax.tree.map(int, transforms))
        if memory.detect_races:
            with memory.lock:  # advance the thread's clock of committed accesses
                clock = memory.clocks[thread].async_smem_clock
                clock.inc(memory.thread_to_vc_position(thread))
                clock = clock.copy()
            races = gpu_callbacks.get_races()
            races.check_read(thread, clock, key, access, source_info=given["source_info"])

    def wgmma(**given: Any) -> Any:
        for name in "ab":
            read(name, given)
        return right(**given)

    gpu_callbacks.wgmma = wgmma
    try:
        yield
    finally:
        gpu_callbacks.wgmma = right


@dataclasses.dataclass(frozen=True)
class Case:
    """One decode batch: sequences of up to four query tokens and a few tiles of keys."""

    head_dim: int
    value_dim: int
    block_size: int
    format: str
    options: frozenset[str] | set[str]
    kv_layout: str
    group: int
    query_dtype: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", frozenset(self.options) | {"return_lse"})
        if not self.query_dtype:
            fp8 = self.format.startswith("fp8")
            object.__setattr__(self, "query_dtype", "bfloat16" if fp8 else self.format)

    @property
    def id(self) -> str:
        """Like `mosaic_gpu-head512-block16-bf16-everything-hnd-group8`."""
        return matrix.Case(
            implementation="mosaic_gpu",
            head=(self.head_dim, self.value_dim),
            block_size=self.block_size,
            format=self.format,
            query_dtype=self.query_dtype,
            option=tuple(sorted(self.options - {"return_lse"})),
            kv_layout=self.kv_layout,
            kind="decode",
            heads=(self.group, 1),
            storage="words",
        ).id

    def problem(self) -> problems.Problem:
        """Return the problem: one KV head for large groups, two for small ones."""
        kv_heads = 1 if self.group > 4 else 2
        return problems.Problem(
            query_lens=(0, 1, 1, 3, 2),
            seq_lens=(0, 1, 140, 15, 18),
            num_heads=kv_heads * self.group,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            block_size=self.block_size,
            query_dtype=self.query_dtype,
            format=self.format,
            options=self.options,
            kv_layout=self.kv_layout,
            row_step=64,
            seed=zlib.crc32(self.id.encode()),
        )

    def batch(self) -> problems.Batch:
        """Build the arrays."""
        batch = problems.build(self.problem())
        return dataclasses.replace(batch, kwargs={**batch.kwargs, "max_query_len": 4})
