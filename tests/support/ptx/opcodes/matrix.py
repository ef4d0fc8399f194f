"""Warp-level matrices: `ldmatrix`, `stmatrix`, `mma`.

Fragments are those of "Matrix Fragments for mma.m16n8k16". Products are summed in float32 here;
hardware rounds the sum differently.
"""

from __future__ import annotations

import numpy as np

from tests.support.ptx.machine import Warp
from tests.support.ptx.numbers import LANE, LANES, bf16_to_f32
from tests.support.ptx.program import Form, Getter, Program, Step, handles, vector

_GROUP, _THREAD = LANE.astype(int)[:, None] >> 2, LANE.astype(int)[:, None] & 3
_PAIR = np.arange(2)[None]
# [registers, lanes, elements of a register]: places in row-major A [16, 16], B [16, 8].
A_AT = np.stack([
    (_GROUP + row) * 16 + 2 * _THREAD + column + _PAIR
    for row, column in ((0, 0), (8, 0), (0, 8), (8, 8))
])  # fmt: skip
B_AT = np.stack([(2 * _THREAD + row + _PAIR) * 8 + _GROUP for row in (0, 8)])
# [registers, lanes]: places in row-major C [16, 8].
C_AT = np.concatenate([((_GROUP + row) * 8 + 2 * _THREAD + _PAIR).T for row in (0, 8)])


def widened(bits: np.ndarray, kind: str) -> np.ndarray:
    """Convert 16-bit floats to float32."""
    return bf16_to_f32(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


def fragment(gets: list[Getter], at: np.ndarray, kind: str, shape: tuple[int, int], w: Warp):
    """Read a matrix of 16-bit floats from registers, and convert it to float32."""
    raw = np.stack([get(w) for get in gets]).view(np.uint16)
    matrix = np.empty(shape[0] * shape[1], np.float32)
    matrix[at.reshape(-1)] = widened(raw, kind).reshape(-1)
    return matrix.reshape(shape)


def _eights(form: Form) -> tuple[int, bool]:
    """Return the number of 8 by 8 matrices, and whether they are transposed."""
    form.take("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    count = next(int(m[1]) for m in form.modifiers if m in ("x1", "x2", "x4"))
    return count, "trans" in form.modifiers


@handles("ldmatrix")
def ldmatrix(p: Program, form: Form) -> Step:
    """`ldmatrix`: load 8 by 8 matrices of 16-bit numbers; lanes hold the addresses of rows."""
    count, transposed = _eights(form)
    puts = [p.setter(name, "b32") for name in vector(form.operands[0])]
    get = p.shared_address(form.operands[1])
    if len(puts) != count:
        raise ValueError("vector")

    def load(w: Warp) -> None:
        w.whole("ldmatrix")
        rows = w.block.shared.read(w, get(w)[: 8 * count], 16).view(np.uint16)
        for put, matrix in zip(puts, rows.reshape(count, 8, 8), strict=True):
            pairs = np.ascontiguousarray(matrix.T if transposed else matrix).view(np.uint32)
            put(w, pairs.reshape(LANES).copy())

    return load


@handles("stmatrix")
def stmatrix(p: Program, form: Form) -> Step:
    """`stmatrix`: the reverse of `ldmatrix`."""
    count, transposed = _eights(form)
    gets = [p.getter(name, "b32") for name in vector(form.operands[1])]
    at = p.shared_address(form.operands[0])
    if len(gets) != count:
        raise ValueError("vector")

    def store(w: Warp) -> None:
        w.whole("stmatrix")
        rows = np.stack([get(w) for get in gets]).view(np.uint16).reshape(count, 8, 8)
        if transposed:
            rows = rows.transpose(0, 2, 1)
        values = np.ascontiguousarray(rows).reshape(8 * count, 8).view(np.uint8)
        w.block.shared.write(w, at(w)[: 8 * count], values)

    return store


@handles("mma")
def mma(p: Program, form: Form) -> Step:
    """`mma.sync.m16n8k16` of bfloat16 and float16, summed in float32."""
    *shape, out, kind, other, acc = form.modifiers
    if shape != ["sync", "aligned", "m16n8k16", "row", "col"]:
        raise ValueError("shape")
    if (out, acc, other) != ("f32", "f32", kind) or kind not in ("bf16", "f16"):
        raise ValueError("types")
    d, a, b, c = (vector(x) for x in form.operands)
    puts = [p.setter(x, "f32") for x in d]
    gets_a, gets_b = ([p.getter(x, "b32") for x in y] for y in (a, b))
    gets_c = [p.getter(x, "f32") for x in c]

    def multiply(w: Warp) -> None:
        w.whole("mma")
        left = fragment(gets_a, A_AT, kind, (16, 16), w)
        right = fragment(gets_b, B_AT, kind, (16, 8), w)
        found = (left @ right).reshape(-1)
        for put, at, get in zip(puts, C_AT, gets_c, strict=True):
            put(w, found[at] + get(w))

    return multiply
