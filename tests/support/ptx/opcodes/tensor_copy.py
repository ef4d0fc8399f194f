"""`cp.async.bulk`: copies that a thread starts and the copy engine (TMA) performs."""

from __future__ import annotations

import re

import numpy as np

from tests.support.ptx import clocks
from tests.support.ptx.barriers import Transfer
from tests.support.ptx.clocks import INITED
from tests.support.ptx.machine import Block, Warp
from tests.support.ptx.numbers import PtxError
from tests.support.ptx.program import Form, Program, Step
from tests.support.ptx.tensor_map import TensorMap

LOADS = ("shared::cta", "shared::cluster")


def bulk(p: Program, form: Form) -> Step:
    """`cp.async.bulk` and its groups, by the modifiers after `bulk`."""
    first = form.modifiers[0] if form.modifiers else ""
    if first == "commit_group":
        return lambda w: w.groups[clocks.BULK].commit()
    if first == "wait_group":
        # Writes to global memory happen at once here, so `.read` makes no difference.
        form.take("wait_group", "read")
        left = int(form.operands[0])
        return lambda w: w.groups[clocks.BULK].wait(w, left)
    if first == "tensor":
        if form.modifiers[2] in LOADS:
            return _tensor_load(p, form)
        return _tensor_store(p, form)
    if first == "global":
        return _plain_store(p, form)
    raise ValueError("modifiers")


def _box(p: Program, text: str, rank: int):
    """Return a getter of each lane's tensor map and coordinates in `[map, {x, y, ...}]`."""
    base, inner = re.match(r"\[\s*([%\w$@+]+)\s*,\s*\{([^}]*)\}\s*\]$", text).groups()
    tensor_map = p.address(f"[{base}]", True)
    coordinates = [p.getter(x.strip(), "s32") for x in inner.split(",")]
    if len(coordinates) != rank:
        raise ValueError("coordinates")

    def get(w: Warp) -> list[tuple[int, TensorMap, tuple[int, ...]]]:
        found = []
        at, where = tensor_map(w), [x(w) for x in coordinates]
        for lane in np.flatnonzero(w.active()):
            described = p.tensor_maps.get(int(at[lane]))
            if described is None:
                raise PtxError(f"no tensor map is at {int(at[lane]):#x}")
            if len(described.shape) != rank:
                raise PtxError(f"a copy of rank {rank} by {described}")
            found.append((int(lane), described, tuple(int(x[lane]) for x in where)))
        return found

    return get


def _tensor_load(p: Program, form: Form) -> Step:
    """`cp.async.bulk.tensor` into shared memory: a box, zeros outside, completing on an mbarrier.

    With `.multicast::cluster` the box goes to the same place in every block of the mask.
    """
    _, dim, space, source, *rest = form.modifiers
    multicast = "multicast::cluster" in rest
    if source != "global" or set(rest) - {"mbarrier::complete_tx::bytes", "multicast::cluster"}:
        raise ValueError("modifiers")
    if multicast and space != "shared::cluster":
        raise ValueError("multicast")
    to = p.shared_address(form.operands[0])
    boxes = _box(p, form.operands[1], int(dim[0]))
    barrier = p.shared_address(form.operands[2])
    if len(form.operands) != 3 + multicast:
        raise ValueError("operands")
    mask = p.getter(form.operands[3], "u16") if multicast else None

    def load(w: Warp) -> None:
        for lane, tensor_map, first in boxes(w):
            at, mbarrier = int(to(w)[lane]), int(barrier(w)[lane])
            values = _gather(w, tensor_map, first)
            if mask is None:
                targets = [(*w.block.at(at), *w.block.at(mbarrier))]
            else:
                ranks = int(mask(w)[lane])
                if ranks >> len(w.block.cluster.blocks):
                    raise PtxError(f"a multicast to blocks {ranks:#b} of a smaller cluster")
                blocks = [b for b in w.block.cluster.blocks if ranks >> b.rank & 1]
                targets = [(block, at, block, mbarrier) for block in blocks]
            for block, place, owner, where in targets:
                _begin(w, block, place, owner, where, tensor_map, values)

    return load


def _gather(w: Warp, tensor_map: TensorMap, first: tuple[int, ...]) -> np.ndarray:
    """Return the bytes of a box, [n, 16]."""
    offset, inside = tensor_map.elements(first)
    values = np.zeros((offset.size, tensor_map.itemsize), np.uint8)
    if inside.any():
        where, buffer = _global_bytes(w, tensor_map, offset[inside])
        values[inside] = w.block.memory.read_box(buffer, where)
    return values.reshape(-1, 16)


def _global_bytes(w: Warp, tensor_map: TensorMap, offset: np.ndarray):
    """Return `(offsets of every byte in the buffer, the buffer)`; the tensor must lie in one."""
    memory = w.block.memory
    low = tensor_map.address + int(offset.min())
    high = tensor_map.address + int(offset.max()) + tensor_map.itemsize
    buffer = memory.locate(tensor_map.address, high)
    if low < buffer.base:
        raise PtxError(f"{buffer.name}: a copy begins {buffer.base - low} bytes before it")
    start = tensor_map.address - buffer.base
    return (start + offset)[:, None] + np.arange(tensor_map.itemsize), buffer


def _check_place(at: int, tensor_map: TensorMap) -> None:
    if at % 128:
        raise PtxError(f"a tensor copy has shared address {at:#x}, not a multiple of 128")


def _begin(
    w: Warp,
    block: Block,
    at: int,
    owner: Block,
    mbarrier_at: int,
    tensor_map: TensorMap,
    values: np.ndarray,
) -> None:
    if mbarrier_at % 8:
        raise PtxError(f"mbarrier address {mbarrier_at:#x} is not a multiple of 8")
    mbarrier = owner.shared.mbarriers.get(mbarrier_at)
    if mbarrier is None:
        raise PtxError(f"no mbarrier is initialised at {mbarrier_at:#x}")
    mbarrier.check_initialised(w.clock, INITED)
    _check_place(at, tensor_map)
    transfer = Transfer(tensor_map.bytes, lambda stamp: None)
    stamp = mbarrier.begin(transfer)
    rows = tensor_map.shared_rows(at)
    transfer.land = block.shared.begin_copy(w.clock, rows, values, stamp, proxy=True)


def _tensor_store(p: Program, form: Form) -> Step:
    """`cp.async.bulk.tensor` to global memory: a box without what lies outside, in bulk groups.

    Shared memory counts as being read until the group is waited for: writing to it earlier is an
    error.
    """
    _, dim, target, source, *rest = form.modifiers
    if (target, source, rest) != ("global", "shared::cta", ["bulk_group"]):
        raise ValueError("modifiers")
    boxes = _box(p, form.operands[0], int(dim[0]))
    of = p.shared_address(form.operands[1])

    def store(w: Warp) -> None:
        group = w.groups[clocks.BULK]
        for lane, tensor_map, first in boxes(w):
            at = int(of(w)[lane])
            _check_place(at, tensor_map)
            rows = tensor_map.shared_rows(at)
            values = w.block.shared.read_async(w, rows, 16, group.agent, group.number)
            values = values.reshape(-1, tensor_map.itemsize)
            offset, inside = tensor_map.elements(first)
            if inside.any():
                where, buffer = _global_bytes(w, tensor_map, offset[inside])
                w.block.memory.write_box(buffer, where, values[inside])
            group.open.append(lambda: None)

    return store


def _plain_store(p: Program, form: Form) -> Step:
    """`cp.async.bulk.global.shared::cta`: copy consecutive bytes, in multiples of 16."""
    if form.modifiers != ("global", "shared::cta", "bulk_group"):
        raise ValueError("modifiers")
    to, of = p.address(form.operands[0], True), p.shared_address(form.operands[1])
    size = p.getter(form.operands[2], "u32")

    def store(w: Warp) -> None:
        group = w.groups[clocks.BULK]
        for lane in np.flatnonzero(w.active()):
            target, at, count = int(to(w)[lane]), int(of(w)[lane]), int(size(w)[lane])
            if target % 16 or at % 16 or count % 16:
                raise PtxError(
                    f"a bulk copy of {count} bytes from {at:#x} to {target:#x}: not all multiples "
                    "of 16"
                )
            rows = (at + 16 * np.arange(count // 16)).astype(np.uint32)
            values = w.block.shared.read_async(w, rows, 16, group.agent, group.number)
            where = (target + 16 * np.arange(count // 16)).astype(np.uint64)
            w.block.memory.write(where, values)
            group.open.append(lambda: None)

    return store
