"""Loads, stores and atomics: parameters, global and shared memory, generic addresses."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tests.support.ptx.machine import Block, Warp
from tests.support.ptx.memory import RANK_BITS, SHARED_WINDOW
from tests.support.ptx.numbers import LANES, PtxError, numpy_type, width_of
from tests.support.ptx.program import Form, Program, Step, handles, vector

HINTS = {"nc", "volatile", "relaxed", "weak", "acquire", "release", "cta", "cluster", "gpu", "sys"}
SPACES = ("global", "shared", "shared::cta", "shared::cluster", "param", "param::entry")


def _form(form: Form) -> tuple[str, int, str]:
    """Return space ("" if generic), count and type of an access; cache hints are ignored."""
    *modifiers, kind = form.modifiers
    space = next((m for m in modifiers if m in SPACES), "")
    count = next((int(m[1:]) for m in modifiers if re.fullmatch(r"v[248]", m)), 1)
    hint = re.compile(r"v[248]|L1::\w+|L2::\w+|L2::cache_hint")
    rest = {m for m in modifiers if not hint.fullmatch(m)} - {space} - HINTS
    if rest:
        raise ValueError(f"modifiers {rest}")
    return space.split(":")[0], count, kind


def _shared_of(w: Warp, at: np.ndarray) -> tuple[Block, np.ndarray]:
    """Return the block whose shared memory all addresses are in, and the offsets there."""
    if (at >> np.uint32(RANK_BITS)).any():
        rank = np.unique(at >> np.uint32(RANK_BITS))
        if rank.size > 1:
            raise PtxError("lanes access shared memory of several blocks")
        block, _ = w.block.at(int(at[0]))
        return block, at & np.uint32((1 << RANK_BITS) - 1)
    return w.block, at


def _address(p: Program, text: str, space: str) -> Callable[[Warp], tuple[str, np.ndarray]]:
    """Return a function for `(space, addresses of running lanes)`, generic ones resolved."""
    if space == "shared":
        shared = p.shared_address(text)
        return lambda w: ("shared", shared(w) if w.mask is None else shared(w)[w.mask])
    wide = p.address(text, True)

    def generic(w: Warp) -> tuple[str, np.ndarray]:
        at = wide(w) if w.mask is None else wide(w)[w.mask]
        if space == "":
            inside = (at >= np.uint64(SHARED_WINDOW)) & (at < np.uint64(SHARED_WINDOW + 2**32))
            if inside.any():
                if not inside.all():
                    raise PtxError("lanes access shared and global memory in one instruction")
                return "shared", (at - np.uint64(SHARED_WINDOW)).astype(np.uint32)
        return "global", at

    return generic


@handles("ld")
def ld(p: Program, form: Form) -> Step:
    """`ld`: one number or a vector, aligned to its whole size."""
    space, count, kind = _form(form)
    names = vector(form.operands[0])
    puts = [p.setter(name, kind) for name in names]
    if len(puts) != count:
        raise ValueError("vector")
    if space == "param":
        return _ld_param(p, form, kind)
    get = _address(p, form.operands[1], space)
    part = numpy_type(kind)
    size = part.itemsize * count

    def load(w: Warp) -> None:
        where, at = get(w)
        if where == "shared":
            block, at = _shared_of(w, at)
            found = block.shared.read(w, at, size).view(part)
        else:
            found = w.block.memory.read(at, size).view(part)
        if w.mask is not None:
            whole = np.zeros((LANES, count), part)
            whole[w.mask] = found
            found = whole
        for i, put in enumerate(puts):
            put(w, found[:, i].copy())

    return load


def _ld_param(p: Program, form: Form, kind: str) -> Step:
    name, offset = re.match(r"\[\s*([\w$]+)\s*(?:\+\s*(\w+))?\s*\]$", form.operands[1]).groups()
    at = p.constant(name) + int(offset or "0", 0)
    put, dtype = p.setter(form.operands[0], kind), numpy_type(kind)

    def load(w: Warp) -> None:
        value = p.parameters[at : at + dtype.itemsize].view(dtype)
        put(w, np.full(LANES, value[0], dtype))

    return load


@handles("st")
def st(p: Program, form: Form) -> Step:
    """`st`: one number or a vector, aligned to its whole size."""
    space, count, kind = _form(form)
    kind = f"u{width_of(kind)}"
    gets = [p.getter(name, kind) for name in vector(form.operands[1])]
    if len(gets) != count or space == "param":
        raise ValueError("vector")
    get = _address(p, form.operands[0], space)

    def store(w: Warp) -> None:
        where, at = get(w)
        values = np.stack([g(w) for g in gets], 1).view(np.uint8)
        if w.mask is not None:
            values = values[w.mask]
        if where == "shared":
            block, at = _shared_of(w, at)
            block.shared.write(w, at, values)
        else:
            w.block.memory.write(at, values)

    return store


ATOMIC = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda old, new: new,
}  # fmt: skip


@handles("atom", "red")
def atom(p: Program, form: Form) -> Step:
    """`atom`, `red`: read, combine and write, lane after lane; `atom` returns the old number.

    A GPU may take any order of lanes. Here atomics synchronize nothing.
    """
    *modifiers, kind = form.modifiers
    space = next((m for m in modifiers if m in SPACES), "")
    names = [m for m in modifiers if m in (*ATOMIC, "cas")]
    if set(modifiers) - {space, *names} - HINTS or len(names) != 1:
        raise ValueError("modifiers")
    swap = names[0] == "cas"
    operands = list(form.operands)
    put = p.setter(operands.pop(0), kind) if form.name == "atom" else None
    get = _address(p, operands[0], space.split(":")[0])
    gets = [p.getter(x, kind) for x in operands[1:]]
    part = numpy_type(kind)
    if len(gets) != 1 + swap:
        raise ValueError("operands")

    def step(w: Warp) -> None:
        where, at = get(w)
        given = [g(w) if w.mask is None else g(w)[w.mask] for g in gets]
        found = np.zeros(at.size, part)
        block = w.block
        if where == "shared":
            block, at = _shared_of(w, at)
        for i in range(at.size):
            one = at[i : i + 1]
            if where == "shared":
                old = block.shared.read(w, one, part.itemsize).view(part)[0]
            else:
                old = w.block.memory.read(one, part.itemsize).view(part)[0]
            found[i : i + 1] = old[0]
            values = [x[i : i + 1] for x in given]
            if swap:
                new = np.where(old == values[0], values[1], old)
            else:
                new = ATOMIC[names[0]](old, values[0])
            raw = np.ascontiguousarray(new.astype(part)).view(np.uint8).reshape(1, -1)
            if where == "shared":
                block.shared.write(w, one, raw)
            else:
                w.block.memory.write(one, raw, atomic=True)
        if put is not None:
            whole = np.zeros(LANES, part)
            whole[w.active()] = found
            put(w, whole)

    return step


@handles("prefetch")
def prefetch(p: Program, form: Form) -> Step:
    """`prefetch.tensormap`: the address must hold a tensor map."""
    form.take("tensormap", "param")
    get = p.address(form.operands[0], True)

    def step(w: Warp) -> None:
        for at in np.unique(get(w)[w.active()]):
            if int(at) not in p.tensor_maps:
                raise PtxError(f"no tensor map is at {int(at):#x}")

    return step
