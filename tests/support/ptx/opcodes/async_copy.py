"""`cp.async`: copies of 4, 8 or 16 bytes a lane, in groups that a warp waits for."""

from __future__ import annotations

import functools

import numpy as np

from tests.support.ptx import clocks
from tests.support.ptx.machine import Warp
from tests.support.ptx.numbers import PtxError
from tests.support.ptx.opcodes import tensor_copy
from tests.support.ptx.program import Form, Program, Step, handles


@handles("cp")
def cp(p: Program, form: Form) -> Step:
    """`cp.async`, its groups, and `cp.async.bulk`: "Data Movement and Conversion Instructions:
    Asynchronous Copy".

    The bytes of a group arrive when it is waited for: reading or writing them earlier is an error.
    If the source size is smaller than the copy, the rest is zeros.
    """
    kind, *rest = form.modifiers
    if kind != "async":
        raise ValueError("cp")
    if rest[0] == "bulk":
        return tensor_copy.bulk(p, Form("cp.async.bulk", tuple(rest[1:]), form.operands))
    if rest == ["commit_group"]:
        return lambda w: w.groups[clocks.CP_ASYNC].commit()
    if rest == ["wait_group"]:
        left = int(form.operands[0])
        return lambda w: w.groups[clocks.CP_ASYNC].wait(w, left)
    if rest == ["wait_all"]:

        def wait_all(w: Warp) -> None:
            w.groups[clocks.CP_ASYNC].commit()
            w.groups[clocks.CP_ASYNC].wait(w, 0)

        return wait_all
    return _copy(p, rest, form)


def _copy(p: Program, modifiers: list[str], form: Form) -> Step:
    cache, to, of, *hints = modifiers
    known = cache in ("ca", "cg") and of == "global" and to in ("shared", "shared::cta")
    if not known or any(not hint.startswith("L2::") for hint in hints):
        raise ValueError("modifiers")
    target, source = p.shared_address(form.operands[0]), p.address(form.operands[1], True)
    size = int(form.operands[2], 0)
    if size not in (4, 8, 16) or (cache == "cg" and size != 16):
        raise ValueError(f"{size} bytes")
    filled = p.getter(form.operands[3] if len(form.operands) > 3 else str(size), "u32")

    def copy(w: Warp) -> None:
        active = w.active()
        at, origin, count = target(w)[active], source(w)[active], filled(w)[active]
        if (count > size).any():
            raise PtxError("cp.async reads more than it writes")
        if (origin & np.uint64(size - 1)).any():
            raise PtxError(f"cp.async from an address that is not a multiple of {size}")
        values = np.zeros((at.size, size), np.uint8)
        for n in np.unique(count):
            lanes = count == n
            for i in np.flatnonzero(lanes) if 0 < n < size else ():
                addresses = origin[i] + np.arange(int(n), dtype=np.uint64)
                values[i, : int(n)] = w.block.memory.read(addresses, 1)[:, 0]
            if n == size:
                values[lanes] = w.block.memory.read(origin[lanes], size)
        group = w.groups[clocks.CP_ASYNC]
        land = w.block.shared.begin_copy(w.clock, at, values, group.stamp, proxy=False)
        group.open.append(functools.partial(land, group.stamp))

    return copy
