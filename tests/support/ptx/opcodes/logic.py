"""Logic, shifts, comparison, selection, and moving bits between registers."""

from __future__ import annotations

import numpy as np

from tests.support.ptx.machine import Warp
from tests.support.ptx.memory import PARAMETER_WINDOW, SHARED_WINDOW
from tests.support.ptx.numbers import LANES, numpy_type, width_of
from tests.support.ptx.program import Form, Program, Step, elementwise, handles, vector

LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}


@handles(*LOGIC)
def bitwise(p: Program, form: Form) -> Step:
    """`and`, `or`, `xor`, `not`: "Logic and Shift Instructions"."""
    (kind,) = form.modifiers
    if kind not in ("pred", "b16", "b32", "b64"):
        raise ValueError("type")
    return elementwise(p, form, LOGIC[form.name], [kind] * (len(form.operands) - 1), kind)


@handles("shl", "shr")
def shift(p: Program, form: Form) -> Step:
    """`shl`, `shr`: shift, by at most the width, which shifts out all bits."""
    (kind,) = form.modifiers
    bits, left = width_of(kind), form.name == "shl"

    def shifted(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        by = np.minimum(n, np.uint32(bits - 1)).astype(a.dtype)
        found = a << by if left else a >> by
        far = n >= bits
        if far.any() and (left or a.dtype.kind == "u"):
            found = np.where(far, np.zeros_like(found), found)
        return found

    return elementwise(p, form, shifted, [kind, "u32"], kind)


@handles("shf")
def funnel_shift(p: Program, form: Form) -> Step:
    """`shf`: shift the 64 bits of two registers; `.l` returns the high half, `.r` the low half."""
    direction, mode, kind = form.modifiers
    if direction not in ("l", "r") or mode not in ("wrap", "clamp") or kind != "b32":
        raise ValueError("modifiers")

    def shifted(low: np.ndarray, high: np.ndarray, n: np.ndarray) -> np.ndarray:
        n = n & np.uint32(31) if mode == "wrap" else np.minimum(n, np.uint32(32))
        both = high.astype(np.uint64) << np.uint64(32) | low
        n = n.astype(np.uint64)
        moved = both << n >> np.uint64(32) if direction == "l" else both >> n
        return moved.astype(np.uint32)

    return elementwise(p, form, shifted, ["b32"] * 3, "b32")


@handles("lop3")
def lop3(p: Program, form: Form) -> Step:
    """`lop3`: any function of three bits, given as a table of eight bits."""
    table = int(form.operands[4], 0)

    def logic(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        found = np.zeros_like(a)
        for i in range(8):
            if table >> i & 1:
                found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return found

    form.take("b32")
    return elementwise(
        p, Form(form.name, form.modifiers, form.operands[:4]), logic, ["b32"] * 3, "b32"
    )


@handles("prmt")
def prmt(p: Program, form: Form) -> Step:
    """`prmt`: pick four of the eight bytes of two registers, or their signs."""
    form.take("b32")

    def permute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        both = np.stack([a, b], 1).view(np.uint8)  # [32, 8]
        picks = (c[:, None] >> np.array([0, 4, 8, 12], np.uint32)) & np.uint32(15)
        found = np.take_along_axis(both, (picks & np.uint32(7)).astype(np.int64), 1)
        found = np.where(picks & np.uint32(8), np.where(found & 128, 255, 0), found)
        return np.ascontiguousarray(found.astype(np.uint8)).view(np.uint32)[:, 0]

    return elementwise(p, form, permute, ["b32"] * 3, "b32")


COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip
JOIN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@handles("setp")
def setp(p: Program, form: Form) -> Step:
    """`setp`: "Comparison and Selection Instructions"; a NaN is unordered."""
    *modifiers, kind = form.modifiers
    name = modifiers[0]
    compare = _comparison(name, kind[0] == "f")
    if set(modifiers[1:]) - {"ftz", *JOIN}:
        raise ValueError("modifiers")
    join = next((JOIN[m] for m in modifiers[1:] if m in JOIN), None)
    first, _, second = form.operands[0].partition("|")
    put = p.setter(first.strip(), "pred")
    opposite = p.setter(second.strip(), "pred") if second else None
    a, b = (p.getter(x, kind) for x in form.operands[1:3])
    if join is None and opposite is None:
        return lambda w: put(w, compare(a(w), b(w)))
    c = p.getter(form.operands[3], "pred") if join else None

    def step(w: Warp) -> None:
        found = compare(a(w), b(w))
        put(w, join(found, c(w)) if join else found)
        if opposite:
            opposite(w, join(~found, c(w)) if join else ~found)

    return step


def _comparison(name: str, is_float: bool):
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "ne" and is_float:
        return lambda a, b: (a < b) | (a > b)
    if name in COMPARE:
        return COMPARE[name]
    ordered = COMPARE[name.removesuffix("u")]  # equ, neu, ltu: true with a NaN
    if not is_float:
        raise ValueError(name)
    return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)


@handles("selp")
def selp(p: Program, form: Form) -> Step:
    """`selp`: one of two, by a predicate."""
    (kind,) = form.modifiers
    kind = f"u{width_of(kind)}"
    put, c = p.setter(form.operands[0], kind), p.getter(form.operands[3], "pred")
    a, b = (p.getter(x, kind) for x in form.operands[1:3])
    return lambda w: put(w, np.where(c(w), a(w), b(w)))


@handles("mov")
def mov(p: Program, form: Form) -> Step:
    """`mov`: a register, a constant or an address; a vector of registers to one, or back."""
    (kind,) = form.modifiers
    kind = kind if kind == "pred" else f"u{width_of(kind)}"
    to, of = form.operands
    if to[0] == "{":
        return _unpack(p, vector(to), of, kind)
    put = p.setter(to, kind)
    if of[0] == "{":
        names = vector(of)
        gets = [p.getter(name, f"u{width_of(kind) // len(names)}") for name in names]
        whole = numpy_type(kind)
        return lambda w: put(w, np.stack([g(w) for g in gets], 1).view(whole)[:, 0])
    get = p.getter(of, kind)
    if of not in p.kernel.registers:
        return lambda w: put(w, get(w))
    source, target = p.slot(of), p.slot(to)

    def move(w: Warp) -> None:
        # Compilers copy accumulators whose wgmma is under way: the copy is then under way too.
        if w.flying and source in w.flying and w.mask is None:
            w.rename(source, target)
        else:
            put(w, get(w))

    return move


def _unpack(p: Program, names: list[str], of: str, kind: str) -> Step:
    part = f"u{width_of(kind) // len(names)}"
    get = p.getter(of, kind)
    puts = [p.setter(name, part) for name in names]

    def unpack(w: Warp) -> None:
        parts = np.ascontiguousarray(get(w)).view(numpy_type(part)).reshape(LANES, -1)
        for i, put in enumerate(puts):
            put(w, parts[:, i].copy())

    return unpack


@handles("cvta")
def cvta(p: Program, form: Form) -> Step:
    """`cvta`: convert between addresses of a state space and generic ones, which have windows."""
    *to, space, kind = form.modifiers
    if to not in ([], ["to"]) or kind not in ("u64", "u32"):
        raise ValueError("modifiers")
    window = {"global": 0, "shared": SHARED_WINDOW, "param": PARAMETER_WINDOW}[space.split(":")[0]]
    if kind == "u32" and window:
        raise ValueError("32 bits")
    base = np.uint64(window)
    if to:
        return elementwise(p, form, lambda a: a - base, ["u64"], "u64")
    return elementwise(p, form, lambda a: a + base, ["u64"], "u64")
