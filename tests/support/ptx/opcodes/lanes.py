"""Operations across the lanes of a warp: shuffles, votes, reductions, elections."""

from __future__ import annotations

import numpy as np

from tests.support.ptx.machine import Warp
from tests.support.ptx.numbers import LANE, LANES, PtxError
from tests.support.ptx.program import Form, Getter, Program, Step, handles


def members(w: Warp, mask: np.ndarray, of: np.ndarray | None = None) -> np.ndarray:
    """Return bool [32], the lanes of a member mask; all of them, and lanes in `of`, must run."""
    active = w.active()
    bits = int(mask[active][0])
    named = (bits >> LANE.astype(np.int64) & 1).astype(bool)
    if (named != active).any():
        raise PtxError(f"member mask {bits:#x}, but other lanes are here")
    if of is not None and not active[of[active]].all():
        raise PtxError("a lane that is not here is asked")
    return named


@handles("shfl")
def shfl(p: Program, form: Form) -> Step:
    """`shfl.sync`: the value of the lane above, below, across or by number, within segments."""
    _, mode, _ = form.modifiers
    form.take("sync", "up", "down", "bfly", "idx", "b32")
    first, _, second = form.operands[0].partition("|")
    put = p.setter(first.strip(), "b32")
    put_valid = p.setter(second.strip(), "pred") if second else None
    value = p.getter(form.operands[1], "b32")
    b, c = p.getter(form.operands[2], "s32"), p.getter(form.operands[3], "s32")
    mask = p.getter(form.operands[4], "b32")
    lane = LANE.astype(np.int64)

    def shuffle(w: Warp) -> None:
        distance, bounds = b(w) & 31, c(w)
        clamp, segment = bounds & 31, (bounds >> 8) & 31
        low = lane & segment
        high = low | (clamp & ~segment)
        if mode == "up":
            of = lane - distance
            valid = of >= high
        else:
            of = {"down": lane + distance, "bfly": lane ^ distance}.get(
                mode, low | (distance & ~segment)
            )
            valid = of <= high
        of = np.where(valid, of, lane)
        members(w, mask(w), of)
        put(w, value(w)[of])
        if put_valid:
            put_valid(w, valid)

    return shuffle


REDUCE = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@handles("redux")
def redux(p: Program, form: Form) -> Step:
    """`redux.sync`: reduce the numbers of all lanes, and give each lane the result."""
    sync, operation, kind = form.modifiers
    if sync != "sync" or kind not in ("s32", "u32", "b32"):
        raise ValueError("modifiers")
    function = REDUCE[operation]
    put, value = p.setter(form.operands[0], kind), p.getter(form.operands[1], kind)
    mask = p.getter(form.operands[2], "b32")

    def reduce(w: Warp) -> None:
        named = members(w, mask(w))
        x = value(w)
        put(w, np.full(LANES, function.reduce(x[named], dtype=x.dtype), x.dtype))

    return reduce


@handles("vote")
def vote(p: Program, form: Form) -> Step:
    """`vote.sync`: whether a predicate is true in all lanes, in any, or uniform, or in which."""
    sync, mode, kind = form.modifiers
    if sync != "sync" or (mode == "ballot") != (kind == "b32"):
        raise ValueError("modifiers")
    put, value = p.setter(form.operands[0], kind), p.getter(form.operands[1], "pred")
    mask = p.getter(form.operands[2], "b32")

    def step(w: Warp) -> None:
        named = members(w, mask(w))
        yes = value(w) & named
        if mode == "ballot":
            bits = np.uint32((yes.astype(np.uint64) << LANE.astype(np.uint64)).sum())
            put(w, np.full(LANES, bits))
            return
        found = {"all": yes[named].all(), "any": yes.any()}.get(mode)
        if found is None:
            found = yes[named].all() or not yes.any()
        put(w, np.full(LANES, bool(found)))

    return step


@handles("elect")
def elect(p: Program, form: Form) -> Step:
    """`elect.sync`: elect a lane, here the first; give its number, and a predicate true in it."""
    form.take("sync")
    first, _, second = form.operands[0].partition("|")
    put, chosen = p.setter(first.strip(), "b32"), p.setter(second.strip(), "pred")
    mask: Getter = p.getter(form.operands[1], "b32")

    def step(w: Warp) -> None:
        leader = int(np.flatnonzero(members(w, mask(w)))[0])
        put(w, np.full(LANES, leader, np.uint32))
        chosen(w, np.arange(LANES) == leader)

    return step


@handles("activemask")
def activemask(p: Program, form: Form) -> Step:
    """`activemask`: the lanes that run."""
    form.take("b32")
    put = p.setter(form.operands[0], "b32")

    def step(w: Warp) -> None:
        bits = (w.active().astype(np.uint64) << LANE.astype(np.uint64)).sum()
        put(w, np.full(LANES, np.uint32(bits)))

    return step
