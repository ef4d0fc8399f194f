"""Launching a kernel: its grid runs block by block, or cluster by cluster."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jattn.pallas import machine
from tests.support.ptx import opcodes  # noqa: F401 (fills the table of opcodes)
from tests.support.ptx.machine import Cluster
from tests.support.ptx.memory import Memory
from tests.support.ptx.numbers import PtxError
from tests.support.ptx.parser import Kernel
from tests.support.ptx.program import Program


@dataclasses.dataclass(frozen=True)
class Executed:
    """The work of a launch.

    Attributes:
      blocks: how many the grid has.
      instructions: how many all warps executed.
      lines: lines of the PTX that were reached.
    """

    blocks: int
    instructions: int
    lines: frozenset[int]


def launch(
    kernel: Kernel,
    memory: Memory,
    grid: Sequence[int],
    arguments: Sequence[object],
    *,
    dynamic_shared: int = 0,
    cluster: Sequence[int] = (1, 1, 1),
    registers: int | None = None,
    seed: int = 0,
) -> Executed:
    """Run every block of a grid.

    Args:
      kernel: from `parse`.
      memory: holds its buffers; an address is what `memory.put` returned.
      grid: blocks in x, y and z.
      arguments: one per parameter: integers and addresses, floats (32 bits), and for a block of
        bytes a tuple of tensor maps.
      dynamic_shared: bytes of dynamic shared memory.
      cluster: blocks of a cluster in x, y and z; the grid is a multiple of it.
      registers: per thread, according to ptxas; without it `setmaxnreg` always finds enough.
      seed: decides the order in which warps run and copies land.

    Raises:
      PtxError: the kernel does something wrong; names the block, the warp and the instruction.
    """
    grid = (*grid, 1, 1)[:3]
    if any(n > machine.MOST_ROWS_OF_BLOCKS for n in grid[1:]):
        raise PtxError(f"a grid of {grid} has too many blocks along y or z")
    shape = (*cluster, 1, 1)[:3]
    if any(blocks % each for blocks, each in zip(grid, shape, strict=True)):
        raise PtxError(f"a grid of {grid} is not a multiple of a cluster of {shape}")
    program = Program(kernel, memory, dynamic_shared, registers)
    program.load_parameters(arguments)
    visited = program.watch()
    memory.begin_launch()
    rng = np.random.default_rng(seed)
    blocks = instructions = 0
    starts = [range(0, n, each) for n, each in zip(grid, shape, strict=True)]
    with np.errstate(all="ignore"):
        for z, y, x in itertools.product(*starts[::-1]):
            within = itertools.product(*(range(n) for n in shape[::-1]))
            indices = [(x + i, y + j, z + k) for k, j, i in within]
            try:
                instructions += Cluster(program, indices, grid, shape, rng).run()
            except PtxError as error:
                raise PtxError(f"{kernel.name}: {error}") from error
            blocks += len(indices)
    lines = frozenset(kernel.code[i].line for i in visited if i < len(kernel.code))
    return Executed(blocks, instructions, lines)
