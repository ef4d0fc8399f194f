"""`wgmma`: asynchronous products of a warpgroup, with operands in shared memory.

Each of the four warps multiplies its 16 rows when it reaches the instruction. The result is in its
registers after it has waited for the group. Until then nothing may read or write these registers,
write the registers of A, or write an operand in shared memory.
"""

from __future__ import annotations

import re

import numpy as np

from tests.support.ptx import clocks
from tests.support.ptx.machine import Warp
from tests.support.ptx.numbers import PtxError
from tests.support.ptx.opcodes.matrix import A_AT, C_AT, fragment, widened
from tests.support.ptx.program import Form, Program, Step, handles, uniform, vector
from tests.support.ptx.tensor_map import swizzled

SWIZZLE = {0: 0, 1: 128, 2: 64, 3: 32}  # of a descriptor's layout type, bytes
UNDER_WAY = "a wgmma that writes it is under way"


@handles("wgmma")
def wgmma(p: Program, form: Form) -> Step:
    """`wgmma`: "Asynchronous Warpgroup Level Matrix Instructions"."""
    kind, *rest = form.modifiers
    if kind == "mma_async":
        return _mma_async(p, rest, form.operands)
    if rest != ["sync", "aligned"]:
        raise ValueError("modifiers")
    if kind == "fence":

        def fence(w: Warp) -> None:
            w.whole("wgmma.fence")
            w.fenced_registers = list(w.R)

        return fence
    if kind == "commit_group":
        return lambda w: w.groups[clocks.WGMMA].commit()
    if kind == "wait_group":
        left = int(form.operands[0])

        def wait(w: Warp) -> None:
            w.groups[clocks.WGMMA].wait(w, left)
            w.land_products()

        return wait
    raise ValueError(kind)


def _mma_async(p: Program, modifiers: list[str], operands: tuple[str, ...]) -> Step:
    sync, aligned, shape, out, kind, other = modifiers
    size = re.fullmatch(r"m64n(\d+)k16", shape)
    if (sync, aligned, out, other) != ("sync", "aligned", "f32", kind):
        raise ValueError("form")
    if kind not in ("bf16", "f16"):
        raise ValueError("types")
    columns = int(size[1])
    names, held = vector(operands[0]), operands[1][0] == "{"
    if columns % 8 or len(names) != columns // 2:
        raise ValueError("accumulators")
    slots = [p.slot(name) for name in names]
    gets = [p.getter(name, "f32") for name in names]
    a_names = vector(operands[1])
    a = [p.getter(x, "b32" if held else "b64") for x in a_names]
    b = p.getter(operands[2], "b64")
    keeps = p.getter(operands[3] if operands[3] != "0" else "false", "pred")
    scales, transposed = operands[4:6], [x != "0" for x in operands[6:]]
    if tuple(scales) != ("1", "1") or len(transposed) != (1 if held else 2):
        raise ValueError("scales")
    watched = [*slots, *((p.slot(x) for x in a_names) if held else ())]

    def multiply(w: Warp) -> None:
        w.whole("wgmma")
        _check_registers(w, watched)
        group = w.groups[clocks.WGMMA]
        if held:
            left = fragment(a, A_AT, kind, (16, 16), w)
        else:
            first = w.number % 4 * 16
            descriptor = uniform(w, a[0](w), "a wgmma descriptor")
            left = matrix(w, descriptor, first, 16, transposed[0])
            left = widened(left, kind)
        right = matrix(w, uniform(w, b(w), "a wgmma descriptor"), 0, columns, transposed[-1])
        found = left @ widened(right, kind).T  # [16, columns]
        tiles = found.reshape(16, -1, 8).transpose(1, 0, 2).reshape(-1, 128)
        keep = bool(uniform(w, keeps(w), "a wgmma's scale-d"))
        results = []
        for i, (slot, get) in enumerate(zip(slots, gets, strict=True)):
            x = tiles[i // 4][C_AT[i % 4]]
            if keep:
                old = w.products.get(slot)
                x = x + (get(w) if old is None else old[1].view(np.float32))
            results.append((slot, np.ascontiguousarray(x, np.float32).view(np.uint32)))
        for slot, x in results:
            w.products[slot] = (group.number, x)
            w.flying[slot] = UNDER_WAY
            w.R[slot] = None
        saved = [(p.slot(x), w.R[p.slot(x)]) for x in a_names] if held else []

        def land() -> None:
            if any(w.R[slot] is not old for slot, old in saved):
                raise PtxError(
                    "a register of A is written while a wgmma that reads it is under way"
                )

        group.open.append(land)

    return multiply


def _check_registers(w: Warp, slots: list[int]) -> None:
    """Raise if a register was written after the last wgmma.fence."""
    fenced = w.fenced_registers
    for slot in slots:
        if slot not in w.products and (fenced is None or w.R[slot] is not fenced[slot]):
            raise PtxError("a register of a wgmma was written after the last wgmma.fence")


def matrix(w: Warp, descriptor: int, first: int, rows: int, across: bool) -> np.ndarray:
    """Read rows `[first, first + rows)` by 16 columns of 16-bit numbers from shared memory.

    See "Matrix Descriptor Format" and "Strides": addresses count 16 bytes. Patterns of 8 rows of
    the swizzle's width lie `stride` apart along rows. If the matrix is stored transposed (`across`,
    with contiguous rows), patterns lie `leading` apart along rows and `stride` along columns.
    """
    start, leading, stride = (descriptor >> at & 0x3FFF for at in (0, 16, 32))
    swizzle = SWIZZLE[descriptor >> 62]
    if descriptor >> 49 & 7:
        raise PtxError("a descriptor with a base offset is not modelled")
    r, k = np.arange(first, first + rows)[:, None], np.arange(0, 16, 8)[None]
    if not across:
        # Runs of 8 numbers along k.
        if swizzle:
            at = r // 8 * 16 * stride + r % 8 * swizzle + k * 2
        else:
            at = r // 8 * 16 * stride + r % 8 * 16 + k // 8 * 16 * leading
        return _runs(w, start, at, swizzle).reshape(rows, 16)
    if not swizzle:
        raise PtxError("a transposed matrix without a swizzle is not modelled")
    # Runs of 8 numbers along r.
    wide = swizzle // 2
    r, k = np.arange(first, first + rows, 8)[None], np.arange(16)[:, None]
    at = r // wide * 16 * leading + r % wide * 2 + k // 8 * 16 * stride + k % 8 * swizzle
    return _runs(w, start, at, swizzle).reshape(16, rows).T


def _runs(w: Warp, start: int, at: np.ndarray, swizzle: int) -> np.ndarray:
    at = swizzled(16 * start + at.reshape(-1), swizzle)
    group = w.groups[clocks.WGMMA]
    found = w.block.shared.read_async(w, at.astype(np.uint32), 16, group.agent, group.number)
    return found.view(np.uint16)
