"""Branches, exits, barriers of warps and blocks, fences, registers."""

from __future__ import annotations

from tests.support.ptx.barriers import NamedBarrier
from tests.support.ptx.clocks import FENCED, INITED, SEEN
from tests.support.ptx.machine import EXIT, Warp
from tests.support.ptx.numbers import LANES, PtxError
from tests.support.ptx.program import Form, Program, Step, handles, uniform

REGISTERS = 65536  # of a multiprocessor


@handles("bra")
def bra(p: Program, form: Form) -> Step:
    """`bra`: "Control Flow Instructions"."""
    form.take("uni")
    target = p.kernel.labels[form.operands[0]]
    return lambda w: target


@handles("ret", "exit")
def ret(p: Program, form: Form) -> Step:
    """`ret`, `exit`: end the running lanes."""
    form.take()
    return lambda w: EXIT


@handles("trap")
def trap(p: Program, form: Form) -> Step:
    """`trap`: the kernel reports an error."""
    form.take()

    def step(w: Warp) -> None:
        raise PtxError("the kernel traps")

    return step


@handles("bar", "barrier")
def bar(p: Program, form: Form) -> Step:
    """`bar.sync`, `bar.arrive`, `bar.warp.sync`, `barrier.cluster`: whole warps arrive.

    Without a count, all threads of the block that have not ended take part. A barrier orders all
    their accesses before it ahead of those after it.
    """
    kind, *rest = form.modifiers
    if kind == "cluster":
        return _cluster(form)
    if kind == "warp":
        return lambda w: None
    if kind == "cta":
        kind, *rest = rest
    if kind not in ("sync", "arrive") or set(rest) - {"aligned"}:
        raise ValueError("modifiers")
    name = p.getter(form.operands[0], "u32")
    count = p.getter(form.operands[1], "u32") if len(form.operands) > 1 else None
    if kind == "arrive" and count is None:
        raise ValueError("count")

    def sync(w: Warp) -> int | None:
        w.whole("a barrier")
        number = uniform(w, name(w), "the number of a barrier")
        expected = w.block.live_threads()
        if count is not None:
            expected = uniform(w, count(w), "the threads of a barrier")
            if expected % LANES and expected != w.threads:
                raise PtxError(f"a barrier of {expected} threads, not a multiple of {LANES}")
        if number > 15:
            raise PtxError(f"barrier {number} of 16")
        barrier = w.block.named.setdefault(number, NamedBarrier(w.block.cluster.agents))
        complete = barrier.arrive(w, expected, waits=kind == "sync")
        if kind == "arrive":
            w.tick()
            return None
        if complete:
            return None
        return w.wait(f"{expected - barrier.arrived} more threads at barrier {number}")

    return sync


def _cluster(form: Form) -> Step:
    """`barrier.cluster.arrive` and `.wait`; `.relaxed` orders nothing but initialised mbarriers."""
    _, kind, *rest = form.modifiers
    if kind not in ("arrive", "wait") or set(rest) - {"relaxed", "release", "acquire", "aligned"}:
        raise ValueError("modifiers")

    def arrive(w: Warp) -> None:
        w.whole("a barrier")
        if w.cluster_phase is not None:
            raise PtxError("a warp arrives twice at the barrier of its cluster")
        if "relaxed" in rest:
            known = w.clock.copy()
            known[[SEEN, FENCED]] = 0
            w.cluster_phase = w.block.cluster.barrier.arrive(known)
        else:
            w.cluster_phase = w.block.cluster.barrier.arrive(w.clock)
        w.tick()

    def wait(w: Warp) -> int | None:
        barrier, phase = w.block.cluster.barrier, w.cluster_phase
        if phase is None:
            raise PtxError("a warp waits at the barrier of its cluster without an arrival")
        if barrier.phase <= phase:
            return w.wait("the barrier of the cluster", lambda: barrier.phase > phase)
        w.cluster_phase = None
        w.learn(barrier.complete[phase])
        return None

    return arrive if kind == "arrive" else wait


@handles("fence", "membar")
def fence(p: Program, form: Form) -> Step:
    """`fence.proxy.async`, `fence.mbarrier_init`: make accesses visible to the async proxy.

    Other fences do nothing: they order accesses that barriers already order here.
    """
    if form.name == "membar":
        form.take("cta", "gl", "sys")
        return lambda w: None
    kind, *rest = form.modifiers
    if kind == "proxy":
        if rest[0] != "async" or set(rest[1:]) - {"shared::cta", "shared::cluster", "global"}:
            raise ValueError("proxy")
        return lambda w: w.fence(FENCED, INITED)
    if kind == "mbarrier_init":
        return lambda w: w.fence(INITED)
    form.take("acq_rel", "sc", "cta", "cluster", "gpu", "sys")
    return lambda w: None


@handles("setmaxnreg")
def setmaxnreg(p: Program, form: Form) -> Step:
    """`setmaxnreg`: a warpgroup releases registers, or waits until enough are free."""
    form.take("inc", "dec", "sync", "aligned", "u32")
    wanted, more = int(form.operands[0]), "inc" in form.modifiers
    if wanted % 8 or not 24 <= wanted <= 256:
        raise PtxError(f"setmaxnreg {wanted}: a multiple of 8 between 24 and 256")

    def step(w: Warp) -> int | None:
        w.whole("setmaxnreg")
        if w.registers is None:
            return None
        change = (wanted - w.registers) * LANES
        if (change < 0) == more and change:
            raise PtxError(
                f"setmaxnreg.{'inc' if more else 'dec'} to {wanted} from {w.registers} registers"
            )
        if more and change > w.block.free_registers:
            return w.wait(
                f"{change} registers, of which {w.block.free_registers} are free",
                lambda: change <= w.block.free_registers,
            )
        w.block.free_registers -= change
        w.registers = wanted
        return None

    return step


@handles("griddepcontrol")
def griddepcontrol(p: Program, form: Form) -> Step:
    """`griddepcontrol`: does nothing, because launches run one after the other here."""
    form.take("wait", "launch_dependents")
    return lambda w: None
