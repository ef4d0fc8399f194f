"""The host code of a Mosaic GPU kernel: descriptors for the copy engine, and the launch.

Mosaic GPU compiles a function that fills tensor maps (`mosaic_gpu_init_tma_desc`) and launches the
kernel. This module interprets that function from the lowered module, so a test can check the boxes,
strides and swizzles that a GPU would get.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu import report as gpu_report
from tests.support import ptx

# Bytes of the element types of `mosaic_gpu_init_tma_desc`, by their numbers in jaxlib's runtime.
ITEM_BYTES = {1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 2, 8: 4, 9: 8}
DIALECT = "stable_mosaic_gpu."


@dataclasses.dataclass(frozen=True)
class Pointer:
    """An address in the host code: in a kernel argument, or in memory of the host code itself."""

    owner: Any
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class View:
    """A memref: where it starts, and its static sizes and strides in elements."""

    base: Pointer
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """A tensor map whose tensor is one of the kernel's arrays; outermost axis first."""

    argument: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    def tensor_map(self, address: int) -> ptx.TensorMap:
        """Return the map with its innermost axis first, as `cuTensorMapEncodeTiled` takes it."""
        if self.strides[-1] != 1:
            raise ptx.PtxError(f"the innermost axis of {self} is not contiguous")
        return ptx.TensorMap(
            address,
            self.itemsize,
            self.sizes[::-1],
            tuple(n * self.itemsize for n in self.strides[-2::-1]),
            self.box[::-1],
            self.swizzle,
        )


@dataclasses.dataclass(frozen=True)
class Host:
    """A launch: its grid, cluster, shared memory and parameters."""

    grid: tuple[int, ...]
    cluster: tuple[int, ...]
    shared: int
    pointers: tuple[int, ...]
    descriptors: tuple[Descriptor, ...]

    def arguments(self, addresses: Sequence[int]) -> list[Any]:
        """Return the kernel's parameters, given the addresses of its arrays."""
        maps = tuple(d.tensor_map(addresses[d.argument]) for d in self.descriptors)
        return [*(addresses[i] for i in self.pointers), *([maps] if maps else [])]


def read(lowered: Any) -> Host:
    """Read the host code of the only Mosaic GPU kernel of a lowered function."""
    from jax._src.lib.mlir import ir

    module = lowered.compiler_ir()
    (config,) = (
        ir.DictAttr(op.attributes["mhlo.backend_config"])
        for op in gpu_report.operations(module.operation)
        if op.name == "stablehlo.custom_call"
        and ir.StringAttr(op.attributes["call_target_name"]).value.startswith("mosaic_gpu")
    )
    module.context.allow_unregistered_dialects = True
    text = ir.StringAttr(config["module"]).value_bytes
    kernel = ir.Module.parse(text, context=module.context)
    functions = (op for op in gpu_report.operations(kernel.operation) if op.name.endswith(".func"))
    (body,) = (f for f in functions if len(f.regions) and len(f.regions[0].blocks))
    return _Interpreter().run(body.regions[0].blocks[0])


class _Interpreter:
    """The values in straight-line host code."""

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}
        self.memory: dict[Pointer, Any] = {}
        self.descriptors: dict[int, Descriptor] = {}

    def run(self, block: Any) -> Host:
        self.values = {
            argument: Pointer(("argument", i)) for i, argument in enumerate(block.arguments)
        }
        for op in block.operations:
            name = op.operation.name.removeprefix(DIALECT)
            if name == "gpu.launch":
                return self.launch(op.operation)
            results = self.step(name, op.operation)
            for result, value in zip(op.operation.results, results, strict=True):
                self.values[result] = value
        raise AssertionError("the host code launches nothing")

    def step(self, name: str, op: Any) -> tuple[Any, ...]:
        from jax._src.lib.mlir import ir

        given = [self.values[x] for x in op.operands]
        if name in ("arith.constant", "llvm.mlir.constant"):
            value = op.attributes["value"]
            return (value.value if isinstance(value, ir.IntegerAttr) else None,)
        if name == "llvm.getelementptr":
            (index,) = ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"])
            size = 8 if "ptr" in str(op.attributes["elem_type"]) else 1
            if index == -(2**31):  # it is an operand
                index = given[1]
            return (Pointer(given[0].owner, given[0].offset + size * index),)
        if name == "llvm.load":
            pointer = given[0]
            if pointer.owner == ("argument", 1):  # the array of the kernel's buffers
                return (Pointer(("array", pointer.offset // 8)),)
            return (pointer,)
        if name in ("llvm.alloca", "memref.alloca"):
            pointer = Pointer(("own", op))
            return (View(pointer) if name.startswith("memref") else pointer,)
        if name == "llvm.store":
            value, pointer = given
            self.memory[pointer] = value
            return ()
        if name == "memref.store":
            value, view, *index = given
            self.memory[Pointer(view.base.owner, index[0] if index else 0)] = value
            return ()
        if name == "memref.extract_strided_metadata":
            view = given[0]
            return (view, 0, *view.sizes, *view.strides)
        if name == "memref.extract_aligned_pointer_as_index":  # jax 0.11.2
            return (given[0].base if isinstance(given[0], View) else given[0],)
        if name in ("llvm.add", "llvm.mul") and None not in given:
            a, b = given
            if isinstance(a, Pointer):
                return (Pointer(a.owner, a.offset + b),)
            return (a + b if name == "llvm.add" else a * b,)
        if name == "func.call":
            assert op.attributes["callee"].value == "mosaic_gpu_init_tma_desc"
            self.describe(given)
            return ()
        if name == "llvm.insertvalue":
            return (given[1] if isinstance(given[1], Pointer) else given[0],)
        if name == "llvm.extractvalue":
            pointer = given[0].base if isinstance(given[0], View) else given[0]
            is_pointer = "ptr" in str(op.results[0].type)
            return (pointer if is_pointer else 0,)
        if len(op.results) == 1 and str(op.results[0].type).startswith("memref"):
            base = given[0].base if isinstance(given[0], View) else given[0]
            kind = ir.MemRefType(op.results[0].type)
            strides, offset = kind.get_strides_and_offset()
            assert offset == 0
            return (View(base, tuple(kind.shape), tuple(strides)),)
        assert name in (
            *("builtin.unrealized_conversion_cast", "arith.index_cast", "llvm.mlir.undef"),
            *("llvm.ptrtoint", "llvm.inttoptr", "memref.assume_alignment"),
        ), name
        return (given[0] if given else None,) * len(op.results)

    def describe(self, given: list[Any]) -> None:
        """`mosaic_gpu_init_tma_desc(map, base, type, rank, sizes, strides, swizzle, box)`."""
        place, base, kind, rank, sizes, strides, swizzle, box = given

        def numbers(pointer: Pointer) -> tuple[int, ...]:
            return tuple(self.memory[Pointer(pointer.owner, i)] for i in range(rank))

        (what, argument) = base.owner
        assert what == "array"
        assert base.offset == 0
        self.descriptors[place.offset] = Descriptor(
            argument, ITEM_BYTES[kind], numbers(sizes), numbers(strides), numbers(box), swizzle
        )

    def launch(self, op: Any) -> Host:
        from jax._src.lib.mlir import ir

        counts = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))
        tokens = counts[0]
        sizes = [self.values[x] for x in list(op.operands)[tokens:]]
        cluster = (1, 1, 1)
        if len(sizes) == 10:
            cluster = tuple(sizes[6:9])
        used = _captured(op.regions[0], self.values)
        pointers = []
        for operand in used:
            value = self.values[operand]
            value = value.base if isinstance(value, View) else value
            if isinstance(value, Pointer) and value.owner[0] == "array":
                pointers.append(value.owner[1])
        descriptors = tuple(self.descriptors[at] for at in sorted(self.descriptors))
        assert list(sorted(self.descriptors)) == [128 * i for i in range(len(descriptors))]
        return Host(tuple(sizes[:3]), cluster, sizes[-1], tuple(pointers), descriptors)


PURE = ("arith.", "memref.", "builtin.", "llvm.extractvalue", "llvm.insertvalue", "llvm.ptrtoint")
PURE += ("llvm.inttoptr", "llvm.getelementptr", "llvm.add", "llvm.mul")
EFFECTS = ("memref.store", "memref.load", "memref.copy", "memref.atomic")


def _captured(region: Any, outside: dict[Any, Any]) -> list[Any]:
    """Return outside values that a region uses, in the order in which they become parameters.

    Like compilers, first drop unused ones, such as the view of an array that only the copy engine
    reads.
    """
    found = [op for op in _after_order(region)]
    users: dict[Any, int] = {}
    for op in found:
        for operand in op.operands:
            users[operand] = users.get(operand, 0) + 1
    dead: set[int] = set()
    for i in reversed(range(len(found))):
        op = found[i]
        name = op.name.removeprefix(DIALECT)
        pure = name.startswith(PURE) and not name.startswith(EFFECTS)
        if pure and not any(users.get(result) for result in op.results):
            dead.add(i)
            for operand in op.operands:
                users[operand] -= 1
    used: list[Any] = []
    for i, op in enumerate(found):
        for operand in () if i in dead else op.operands:
            if operand in outside and operand not in used:
                used.append(operand)
    return used


def _after_order(region: Any) -> Iterator[Any]:
    """Yield operations of a region in post-order: nested ones before the operation itself."""
    for block in region.blocks:
        for op in block.operations:
            for inner in op.operation.regions:
                yield from _after_order(inner)
            yield op.operation
