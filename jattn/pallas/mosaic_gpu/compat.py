"""All that jattn uses of Pallas' Mosaic GPU, whose names may change with any release of JAX.

No other file of jattn imports `jax.experimental.pallas.mosaic_gpu`, so that a release that renames
something needs a change in one place only. Written for jax 0.11.2 to 0.12; older versions lack
`layout_cast` in the interpreter and a public `InterpretGPUParams`.

Tests run kernels without a GPU inside `interpreted(...)`, which is read when a kernel is traced.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as _plgpu

from jattn.pallas import machine
from jattn.pallas.mosaic_gpu import scratch

ACC = _plgpu.ACC
Barrier = _plgpu.Barrier
GMEM = _plgpu.GMEM
Layout = _plgpu.Layout
SMEM = _plgpu.SMEM
barrier_arrive = _plgpu.barrier_arrive
barrier_wait = _plgpu.barrier_wait
broadcasted_iota = _plgpu.broadcasted_iota
commit_smem = _plgpu.commit_smem
copy_gmem_to_smem = _plgpu.copy_gmem_to_smem
copy_smem_to_gmem = _plgpu.copy_smem_to_gmem
layout_cast = _plgpu.layout_cast
set_max_registers = _plgpu.set_max_registers
wait_smem_to_gmem = _plgpu.wait_smem_to_gmem
wgmma = _plgpu.wgmma
wgmma_wait = _plgpu.wgmma_wait

WGMMA = Layout.WGMMA
WGMMA_UPCAST_2X = Layout.WGMMA_UPCAST_2X
# Streaming multiprocessors of an H100 or H200 (SXM): the grid if there is no GPU to ask.
HOPPER_CORES = 132


@dataclasses.dataclass(frozen=True)
class Interpretation:
    """How kernels traced now are interpreted on the CPU.

    Attributes:
      detect_races: whether accesses that no barrier orders raise.
      num_cores: how many multiprocessors to pretend there are; a grid of a few is quick.
    """

    detect_races: bool = False
    num_cores: int = 2


_interpretation: contextvars.ContextVar[Interpretation | None] = contextvars.ContextVar(
    "jattn_mosaic_interpretation", default=None
)


@contextlib.contextmanager
def interpreted(*, detect_races: bool = False, num_cores: int = 2) -> Iterator[None]:
    """Run kernels that are traced inside in the interpreter; jit new functions: traces are kept."""
    token = _interpretation.set(Interpretation(detect_races, num_cores))
    try:
        yield
    finally:
        _interpretation.reset(token)


def interpreting() -> bool:
    """Whether a kernel traced now will be interpreted.

    The interpreter lacks `run_state` (so accumulators with initial values) and left operands of
    `wgmma` in registers; a kernel that needs them asks here and takes a detour in tests.
    """
    return _interpretation.get() is not None


def num_cores() -> int:
    """Multiprocessors of the GPU that kernels traced now are for."""
    pretended = _interpretation.get()
    if pretended is not None:
        return pretended.num_cores
    here = machine.here()
    return HOPPER_CORES if here is None else here.cores


def kernel(
    body: Callable[..., None],
    *,
    declared: scratch.Scratch | None = None,
    approx_math: bool = False,
    auto_barriers: bool = True,
    **settings: Any,
) -> Callable[..., Any]:
    """`plgpu.kernel`, interpreted if tests ask for it, with the arguments of jax 0.12.

    Args:
      body: called with refs of the operands, of the outputs, then the scratch refs by name.
      declared: what is in shared memory.
      approx_math: whether exponentials may be the hardware's.
      auto_barriers: whether a barrier of the warpgroup stands around every access to shared memory
        and every copy. If not, the kernel's own barriers must suffice:
        `tests/gpu/test_ptx_kernels.py` executes the compiled kernel and searches for races.
      **settings: out_type, grid, grid_names, cluster, cluster_names, num_threads, thread_name.
    """
    rows = settings["grid"][:-1]  # the last axis is CUDA's x
    assert all(n <= machine.MOST_ROWS_OF_BLOCKS for n in rows), settings["grid"]
    pretended = _interpretation.get()
    if pretended is not None:
        settings["interpret"] = _plgpu.InterpretGPUParams(detect_races=pretended.detect_races)
    params = _plgpu.CompilerParams(
        approx_math=approx_math,
        reduction_scratch_bytes=scratch.REDUCTION_BYTES,
        unsafe_no_auto_barriers=not auto_barriers,
    )
    types = {name: _scratch_type(item) for name, item in (declared or {}).items()}
    return _plgpu.kernel(body, scratch_types=types, compiler_params=params, **settings)


def launch(body: Callable[..., None], inputs: Any, *, name: str, **settings: Any) -> Any:
    """Run `body(inputs, *outputs, scratch)` on refs; see `kernel` for the settings.

    Args:
      name: the kernel's, in profiles.
      body: the kernel; `scratch` has refs by name.
      inputs: a tree of arrays, such as a named tuple, with None for absent ones.
      **settings: of `kernel`.
    """
    given, tree = jax.tree.flatten(inputs)

    def flat(*refs: Any, **scratch_refs: Any) -> None:
        found = jax.tree.unflatten(tree, refs[: len(given)])
        body(found, *refs[len(given) :], scratch_refs)

    flat.__name__ = name
    return kernel(flat, **settings)(*given)


def load(ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    """Load the array that a ref holds into registers, in the given layout.

    `optimized=False` also takes layouts that read less than 128 bytes of global memory at a time.
    """
    return _plgpu.load(ref, layout=layout, optimized=optimized)


def store(ref: Any, value: jax.Array) -> None:
    """Write registers to global memory, or row by row to shared memory with its bank conflicts.

    Without `optimized=False`, Mosaic searches for a layout without conflicts, which takes minutes
    for 256 columns if there is none. jax 0.11.2 has no such argument, and searches.
    """
    if hasattr(_plgpu, "store"):
        _plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def _scratch_type(item: scratch.Item) -> Any:
    """Mosaic's description of an item of the list."""
    match item:
        case scratch.Buffer(shape, dtype, swizzle):
            return SMEM(shape, dtype) if swizzle is None else _swizzled(shape, dtype, swizzle)
        case scratch.Union(choices):
            return _plgpu.RefUnion(*((_scratch_type(choice),) for choice in choices))
        case scratch.Barriers(count, arrivals, None):
            return Barrier(num_arrivals=arrivals, num_barriers=count)
        case scratch.Barriers(count, arrivals, axis):
            return _plgpu.ClusterBarrier(
                collective_axes=(axis,), num_arrivals=arrivals, num_barriers=count
            )


def _swizzled(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    """A buffer in shared memory as TMA writes it and `wgmma` reads it.

    The last two axes are cut into tiles of 8 rows by `swizzle` bytes, and the 16-byte parts of a
    tile are exchanged so that neither a row nor a column meets one bank twice.

    Args:
      shape: the last axis a multiple of `swizzle` bytes, the one before it of 8.
      dtype: of its elements.
      swizzle: 128, 64 or 32.
    """
    columns = swizzle // np.dtype(dtype).itemsize
    transforms = (
        _plgpu.TilingTransform((scratch.COPIED_ROWS, columns)),
        _plgpu.SwizzleTransform(swizzle),
    )
    return _plgpu.SMEM(shape, dtype, transforms=transforms)
