"""The implementations in order of preference, and the choice between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax

from jattn import call as calls
from jattn import capability, checks, reference
from jattn.cpu import capability_rows as cpu_rows
from jattn.cpu.native import launch as native
from jattn.cpu.xla import attention as xla
from jattn.cpu.xla import gradient
from jattn.pallas import capability_rows as gpu_rows
from jattn.pallas import transforms
from jattn.pallas.triton import launch as triton_launch

REFERENCE_ROW = dataclasses.replace(
    cpu_rows.XLA,
    implementation="reference",
    summary="the oracle: NumPy, float64, loops; for tests",
    automatic=False,
    differentiable=False,
)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A row and its function, `run(call, operands) -> (out, lse)`."""

    row: capability.Row
    run: calls.Run


def _mosaic_gpu(call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    # Imported on first use: an older JAX lacks names that it imports.
    from jattn.pallas.mosaic_gpu import launch as mosaic_launch

    return mosaic_launch.run(call, operands)


def _transformed(run: calls.Run) -> calls.Run:
    """Let JAX's transformations apply to a GPU implementation, with the XLA path's gradients."""
    return gradient.differentiable(transforms.of(run))


BY_NAME: dict[str, Implementation] = {
    one.row.implementation: one
    for one in (
        Implementation(gpu_rows.MOSAIC_GPU, _transformed(_mosaic_gpu)),
        Implementation(gpu_rows.TRITON, _transformed(triton_launch.run)),
        Implementation(cpu_rows.NATIVE, native.run),
        Implementation(cpu_rows.XLA, xla.run),
        Implementation(REFERENCE_ROW, reference.run),
    )
}
ROWS = tuple(one.row for one in BY_NAME.values())


def names(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the implementations a call may take, in order of preference.

    Raises:
      ValueError: an unknown name.
    """
    if implementation is None:
        return tuple(name for name, one in BY_NAME.items() if one.row.automatic)
    wanted: tuple[str, ...] = ()
    if isinstance(implementation, str):
        wanted = (implementation,)
    elif isinstance(implementation, Sequence):
        wanted = tuple(implementation)
    with checks.checking("paged_attention") as problems:
        problems.require(
            bool(wanted) and all(isinstance(name, str) and name in BY_NAME for name in wanted),
            "implementation",
            repr(implementation),
            f"None, one of {tuple(BY_NAME)}, or a sequence of them",
        )
    return wanted


def refusals(
    call: calls.Call, implementation: str | Sequence[str] | None
) -> Iterator[tuple[str, list[str]]]:
    """Yield the implementations a call may take, in order, with all reasons not to take each.

    Raises:
      ValueError: an unknown name.
    """
    for name in names(implementation):
        row = BY_NAME[name].row
        yield name, row.automatic_refusals(call) if implementation is None else row.refusals(call)


def choose(call: calls.Call, implementation: str | Sequence[str] | None) -> Implementation:
    """Return the first of the requested implementations that can run `call`.

    Raises:
      ValueError: an unknown name.
      UnsupportedError: none of them can; lists every reason of each.
    """
    refused = {}
    for name, reasons in refusals(call, implementation):
        if not reasons:
            return BY_NAME[name]
        refused[name] = reasons
    lines = "".join(f"\n  - {name}: {'; '.join(why)}" for name, why in refused.items())
    raise capability.UnsupportedError(
        f"paged_attention: no implementation among {tuple(refused)} can run this call{lines}"
    )
