"""jattn's compiled GPU kernels, executed on the CPU by `tests.support.ptx`.

The kernels are compiled to PTX for a described GPU. A batch's arrays go into the interpreter's
memory, the kernels of its call run one after the other, and the result is checked like that of any
other kernel. An `edit` changes a kernel's PTX first: tests plant bugs with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import targets as gpu_targets
from jattn import call as calls
from jattn.pallas import machine
from jattn.pallas.triton import launch as triton_launch
from tests.support import mosaic_host, problems, ptx

Edit = Callable[[str, str], str]  # a kernel's name and its PTX: the PTX to run instead
Lines = dict[str, frozenset[int]]  # the lines of each kernel's PTX that were reached
Descriptors = tuple[mosaic_host.Descriptor, ...]


def missing_compiler() -> str:
    """Return a description of the GPU compiler that is missing, or ""."""
    try:
        gpu_targets.device_for(90)
        gpu_report.find_ptxas(8.7)
    except gpu_targets.MissingCompilerError as error:
        return str(error)
    return ""


def needs_compiler() -> None:
    """Skip the test where Triton's kernels cannot be compiled for GPUs."""
    try:
        gpu_targets.device_for(90)
    except gpu_targets.MissingCompilerError as error:
        pytest.skip(f"pip install -e '.[test,gpu-check]': {error}")
    pytest.importorskip("jax_triton", reason="pip install -e '.[test,gpu-check]'")


def unchanged(name: str, text: str) -> str:
    """Return the PTX as compiled."""
    return text


@contextlib.contextmanager
def pretended(gpu: machine.Machine) -> Iterator[None]:
    """Make calls for this GPU; one with few multiprocessors gives a small grid."""
    here, machine.here = machine.here, lambda: gpu
    try:
        yield
    finally:
        machine.here = here


@dataclasses.dataclass(frozen=True)
class TritonKernels:
    """The Triton kernels of a batch's call, compiled for one architecture."""

    launches: tuple[triton_launch.Launch, ...]
    compiled: list[gpu_report.Launch]
    buffers: dict[str, Any]

    @classmethod
    def of(cls, batch: problems.Batch, sm: int, cores: int = 1) -> TritonKernels:
        """Compile those that dispatch would launch on a GPU with `cores` multiprocessors."""
        call, operands = batch.call()
        gpu = machine.Machine(sm, cores)
        run = functools.partial(triton_launch.run, call)
        with pretended(gpu), gpu_report.lowering(run, operands, sm=sm) as lowered:
            compiled = gpu_report.launches_of(lowered, sm, xla=False)
        buffers = triton_launch.buffers_of(call, operands)
        return cls(triton_launch.launches(call, gpu), compiled, buffers)

    def run(
        self, seed: int = 0, edit: Edit = unchanged, lines: Lines | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run them and return `(out, lse)`; the seed decides the order in which warps run."""
        memory, address = ptx.Memory(), {}
        lines = {} if lines is None else lines
        for name, x in self.buffers.items():
            address[name] = memory.put(name, np.asarray(x), constant=True)
        for launch, found in zip(self.launches, self.compiled, strict=True):
            kernel = ptx.parse(edit(launch.kernel, found.ptx))
            assert (*launch.grid, 1, 1)[:3] == found.grid
            inputs = [address[name] for name in launch.inputs]
            continued = {to: inputs[i] for i, to in launch.aliases.items()}
            outputs = []
            for at, (name, shape, dtype) in enumerate(launch.outputs):
                if at not in continued:
                    empty = np.zeros(shape, jnp.dtype(dtype))
                    continued[at] = memory.put(name, empty, written=False)
                outputs.append(continued[at])
                address[name] = continued[at]
            # A number that is 1 is compiled in; the last two pointers belong to the launcher.
            numbers = [n for n in launch.numbers.values() if n != 1]
            given = [*inputs, *numbers, *outputs]
            given += [0] * (len(kernel.parameters) - len(given))
            shared = found.dynamic_shared
            done = ptx.launch(kernel, memory, launch.grid, given, dynamic_shared=shared, seed=seed)
            lines[launch.kernel] = done.lines
        for name in ("out", "lse"):
            assert memory.buffer(name).written.all(), f"a part of {name} was not written"
        return memory.get("out"), memory.get("lse")


@dataclasses.dataclass(frozen=True)
class MosaicKernel:
    """A Mosaic GPU kernel compiled for an H200, and the arrays it was called with.

    Attributes:
      name, text: its name and its PTX.
      host: what launches it.
      registers: per thread, according to ptxas.
      outs: shapes and dtypes of its results.
      values: its operands.
    """

    name: str
    text: str
    host: mosaic_host.Host
    registers: int
    outs: tuple[jax.ShapeDtypeStruct, ...]
    values: tuple[np.ndarray, ...] = ()

    @classmethod
    def of(cls, fn: Callable[..., Any], arrays: Any, outs: list[Any]) -> MosaicKernel:
        """Compile the only kernel of a function of arrays like these."""
        with gpu_report.lowering(fn, *_structs(arrays), sm=90) as lowered:
            (found,) = (k for k in gpu_report.launches_of(lowered, 90) if k.kind == "mosaic")
            (used,) = gpu_report.assemble(found, 90)
            host = mosaic_host.read(lowered)
        return cls(used.name, found.ptx, host, used.registers, tuple(outs))

    def run(
        self,
        seed: int = 0,
        edit: Edit = unchanged,
        describe: Callable[[Descriptors], Descriptors] = lambda found: found,
        lines: Lines | None = None,
    ) -> tuple[np.ndarray, ...]:
        """Run it and return its results; `describe` may change the host's tensor descriptors."""
        kernel = ptx.parse(edit(self.name, self.text))
        host = dataclasses.replace(self.host, descriptors=describe(self.host.descriptors))
        memory = ptx.Memory()
        places = [memory.put(f"operand {i}", x, constant=True) for i, x in enumerate(self.values)]
        for i, out in enumerate(self.outs):
            empty = np.zeros(out.shape, out.dtype)
            places.append(memory.put(f"result {i}", empty, written=False))
        done = ptx.launch(
            kernel,
            memory,
            host.grid,
            host.arguments(places),
            dynamic_shared=host.shared,
            cluster=host.cluster,
            registers=self.registers,
            seed=seed,
        )
        if lines is not None:
            lines[self.name] = done.lines
        return tuple(memory.get(f"result {i}") for i in range(len(self.outs)))


def _structs(arrays: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def mosaic_hosts(batch: problems.Batch) -> list[mosaic_host.Host]:
    """Return the host code of the Mosaic GPU kernels of a batch's call, without compiling them."""
    from jattn.pallas.mosaic_gpu import compat
    from jattn.pallas.mosaic_gpu import launch as mosaic_launch

    call, operands = batch.call()
    plain, found = compat.kernel, []

    def recorded(body: Callable[..., None], **settings: Any) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            with gpu_report.lowering(plain(body, **settings), *_structs(arrays), sm=90) as lowered:
                found.append(mosaic_host.read(lowered))
            return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), settings["out_type"])

        return run

    compat.kernel = recorded
    try:
        with pretended(machine.Machine(90, 2)):
            jax.eval_shape(functools.partial(mosaic_launch.run, call), operands)
    finally:
        compat.kernel = plain
    return found


def mosaic(
    batch: problems.Batch,
    *,
    kernel: Callable[[calls.Call, Any], Any] | None = None,
    cores: int = 2,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, list[MosaicKernel]]:
    """Run a batch with the Mosaic GPU kernels; return `(out, lse)` and the executed kernels.

    What JAX computes around the kernels, plans and merges of results, runs on the CPU.

    Args:
      batch: the batch.
      kernel: a function of the call and its operands; `mosaic_gpu.launch.run` by default.
      cores: the number of multiprocessors that the kernels are told.
      seed: decides the order in which warps run and copies land.
    """
    from jattn.pallas.mosaic_gpu import compat
    from jattn.pallas.mosaic_gpu import launch as mosaic_launch

    call, operands = batch.call()
    plain, executed, errors = compat.kernel, [], []

    def recorded(body: Callable[..., None], **settings: Any) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            # A kernel is compiled while the call is traced, and executed when it runs.
            outs = jax.tree.leaves(settings["out_type"])
            compiled = MosaicKernel.of(plain(body, **settings), arrays, outs)

            def on_host(*values: Any) -> Any:
                given = tuple(np.asarray(x) for x in values)
                executed.append(dataclasses.replace(compiled, values=given))
                try:
                    return executed[-1].run(seed)
                except ptx.PtxError as error:
                    errors.append(error)  # XLA would turn it into text
                    raise

            found = jax.pure_callback(on_host, tuple(outs), *arrays)
            return jax.tree.unflatten(jax.tree.structure(settings["out_type"]), found)

        return run

    compat.kernel = recorded
    try:
        with pretended(machine.Machine(90, cores)):
            out, lse = jax.jit(functools.partial(kernel or mosaic_launch.run, call))(operands)
            return np.asarray(out), np.asarray(lse), executed
    except jax.errors.JaxRuntimeError:
        if errors:
            raise errors[0] from None
        raise
    finally:
        compat.kernel = plain
