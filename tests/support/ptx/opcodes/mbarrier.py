"""mbarriers, and addresses of other blocks of a cluster."""

from __future__ import annotations

import numpy as np

from tests.support.ptx.barriers import Mbarrier
from tests.support.ptx.machine import Warp
from tests.support.ptx.memory import RANK_BITS
from tests.support.ptx.numbers import LANES, PtxError
from tests.support.ptx.parser import SHARED_BASE
from tests.support.ptx.program import Form, Program, Step, handles, uniform

TIME_LIMIT = 0.2  # the share of waits that give up
SCOPES = ("shared", "shared::cta", "shared::cluster", "b64", "release", "acquire", "cta", "cluster")


@handles("mbarrier")
def mbarrier(p: Program, form: Form) -> Step:
    """`mbarrier`: "Parallel Synchronization and Communication Instructions: mbarrier".

    An arrival releases the warp's earlier accesses; a wait that succeeds acquires them. A wait for
    an incomplete phase suspends the warp until the phase completes.
    """
    kind, *rest = form.modifiers
    operation = {"init": _init, "arrive": _arrive, "expect_tx": _expect, "inval": _inval}
    operation |= {"try_wait": _wait, "test_wait": _wait}
    return operation[kind](p, Form(kind, tuple(rest), form.operands))


def _found(w: Warp, at: int) -> Mbarrier:
    found = w.block.mbarrier(at)
    found.check_initialised(w.clock)
    return found


def _lanes(w: Warp, *given: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(int(x[lane]) for x in given) for lane in np.flatnonzero(w.active())]


def _init(p: Program, form: Form) -> Step:
    """`mbarrier.init`: set the arrivals of a phase; nothing else may use the 8 bytes."""
    form.take("shared", "shared::cta", "b64")
    at, count = p.shared_address(form.operands[0]), p.getter(form.operands[1], "u32")

    def init(w: Warp) -> None:
        shared = w.block.shared
        for place, arrivals in _lanes(w, at(w), count(w)):
            if place % 8:
                raise PtxError(f"mbarrier address {place:#x} is not a multiple of 8")
            if not SHARED_BASE <= place <= SHARED_BASE + shared.size - 8:
                raise PtxError(f"an mbarrier at {place:#x}, outside shared memory")
            if place in shared.mbarriers:
                raise PtxError(f"the mbarrier at {place:#x} is initialised twice")
            shared.state[place - SHARED_BASE : place - SHARED_BASE + 8] = shared.MBARRIER
            shared.mbarriers[place] = Mbarrier(place, arrivals, shared.agents, w)

    return init


def _inval(p: Program, form: Form) -> Step:
    """`mbarrier.inval`: free the memory."""
    form.take("shared", "shared::cta", "b64")
    at = p.shared_address(form.operands[0])

    def inval(w: Warp) -> None:
        for (place,) in _lanes(w, at(w)):
            if _found(w, place).transfers:
                raise PtxError("an mbarrier is invalidated while copies are under way")
            del w.block.shared.mbarriers[place]
            w.block.shared.state[place - SHARED_BASE : place - SHARED_BASE + 8] = 0

    return inval


def _arrive(p: Program, form: Form) -> Step:
    """`mbarrier.arrive`, with `.expect_tx` of bytes; each lane that runs arrives.

    It does not write the returned state, so the kernel may not read that register.
    """
    form.take("expect_tx", *SCOPES)
    expects = "expect_tx" in form.modifiers
    at = p.shared_address(form.operands[1])
    given = form.operands[2] if len(form.operands) > 2 else "1"
    number = p.getter(given, "u32")

    def arrive(w: Warp) -> None:
        for place, n in _lanes(w, at(w), number(w)):
            found = _found(w, place)
            if expects:
                found.expect(n)
            found.arrive(1 if expects else n, w.clock)
        w.tick()

    return arrive


def _expect(p: Program, form: Form) -> Step:
    """`mbarrier.expect_tx`: expect more bytes, without an arrival."""
    form.take("relaxed", *SCOPES)
    at, number = p.shared_address(form.operands[0]), p.getter(form.operands[1], "u32")

    def expect(w: Warp) -> None:
        for place, n in _lanes(w, at(w), number(w)):
            _found(w, place).expect(n)

    return expect


def _wait(p: Program, form: Form) -> Step:
    """`mbarrier.try_wait.parity`, `mbarrier.test_wait.parity`; the latter returns at once.

    `try_wait` may give up, so a kernel must retry: now and then it does so here.
    """
    form.take("parity", *SCOPES)
    if "parity" not in form.modifiers:
        raise ValueError("the state of a phase")
    put = p.setter(form.operands[0], "pred")
    at, parity = p.shared_address(form.operands[1]), p.getter(form.operands[2], "u32")
    patient = form.name == "try_wait"

    def wait(w: Warp) -> int | None:
        place = uniform(w, at(w), "the mbarrier of a wait")
        wanted = uniform(w, parity(w), "the parity of a wait")
        found, rng = _found(w, place), w.block.cluster.rng
        done = found.passed(wanted, rng)
        if not done and patient and rng.random() > TIME_LIMIT:
            reason = f"parity {wanted} of {found}"
            return w.wait(reason, lambda: found.passed(wanted, rng))
        if done:
            w.learn(found.complete)
        put(w, np.full(LANES, done))
        return None

    return wait


@handles("mapa")
def mapa(p: Program, form: Form) -> Step:
    """`mapa`: the address of another block's shared memory."""
    form.take("shared::cluster", "u32")
    put = p.setter(form.operands[0], "u32")
    at, rank = p.getter(form.operands[1], "u32"), p.getter(form.operands[2], "u32")

    def map_address(w: Warp) -> None:
        ranks = rank(w)
        if (ranks[w.active()] >= len(w.block.cluster.blocks)).any():
            raise PtxError("mapa: no block of the cluster has that rank")
        place = at(w) & np.uint32((1 << RANK_BITS) - 1)
        put(w, place | (ranks + np.uint32(1)) << np.uint32(RANK_BITS))

    return map_address
