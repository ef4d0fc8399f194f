"""From instructions to Python: operands, guards, and the table of opcodes.

Every instruction becomes a *step*, a function of a warp that returns None to go on, the index of
the next instruction, `BLOCKED` or `EXIT`. An unknown opcode, modifier or type is an error when the
kernel is read, whether or not the instruction would be reached.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence

import numpy as np

from tests.support.ptx.machine import EXIT, Warp
from tests.support.ptx.memory import PARAMETER_WINDOW, Memory
from tests.support.ptx.numbers import LANES, POISON, RAW, PtxError, numpy_type, width_of
from tests.support.ptx.parser import Instruction, Kernel

Step = Callable[[Warp], "int | None"]
Getter = Callable[[Warp], np.ndarray]
Setter = Callable[[Warp, np.ndarray], None]
# Opcodes whose first operand is not a result: a guard leaves no register of theirs half written.
NO_RESULT = {"st", "red", "cp", "bar", "barrier", "fence", "mbarrier", "prefetch", "wgmma"}
NO_RESULT |= {"setmaxnreg", "stmatrix", "griddepcontrol", "discard", "membar", "trap", "nanosleep"}


@dataclasses.dataclass(frozen=True)
class Form:
    """An instruction's opcode, cut at its dots, and its operands."""

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]

    def take(self, *allowed: str) -> set[str]:
        """Return the modifiers; raise unless all of them are `allowed`."""
        unknown = [m for m in self.modifiers if m not in allowed]
        if unknown:
            raise ValueError(f"modifier .{unknown[0]}")
        return set(self.modifiers)


Handler = Callable[["Program", Form], Step]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a function that makes steps for these opcodes."""

    def register(function: Handler) -> Handler:
        for name in names:
            assert name not in HANDLERS
            HANDLERS[name] = function
        return function

    return register


class Program:
    """A kernel as steps.

    Attributes:
      kernel, memory: what runs, and on what.
      shared_bytes: static and dynamic shared memory of a block.
      registers: per thread at launch, or None if unknown.
      parameters: the parameter space.
      tensor_maps: the tensor maps in it, by generic address.
      slots, special: initial registers and constants; slots of special registers by name.
    """

    def __init__(
        self, kernel: Kernel, memory: Memory, dynamic_shared: int, registers: int | None
    ) -> None:
        self.kernel, self.memory, self.registers = kernel, memory, registers
        self.shared_bytes = kernel.static_shared + dynamic_shared
        self.parameters = np.zeros(0, np.uint8)
        self.tensor_maps: dict[int, object] = {}
        self.slots: list[np.ndarray | None] = []
        self.special: dict[str, int] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        for name in kernel.registers:
            self._numbers[name, ""] = len(self.slots)
            self.slots.append(None)
        self.steps = [self._step(i) for i in kernel.code]
        self.steps.append(lambda w: EXIT)  # for guarded exits, and code without an exit

    def watch(self) -> set[int]:
        """Return a set that will hold the index of each instruction that is reached."""
        visited: set[int] = set()

        def first(i: int, step: Step) -> Step:
            def run(w: Warp) -> int | None:
                visited.add(i)
                self.steps[i] = step
                return step(w)

            return run

        self.steps = [first(i, step) for i, step in enumerate(self.steps)]
        return visited

    def _step(self, i: Instruction) -> Step:
        name, *modifiers = i.op.split(".")
        handler = HANDLERS.get(name)
        if handler is None:
            raise PtxError(f"opcode {i.op} is not known: {i}")
        try:
            step = handler(self, Form(name, tuple(modifiers), i.operands))
        except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
            raise PtxError(f"{i.op} is not known in this form: {i}: {error!r}") from error
        if i.guard is None:
            return step
        slot, negated = self.slot(i.guard[0]), i.guard[1]
        if name == "bra":
            return self._branch(i.guard[0], slot, negated, self.kernel.labels[i.operands[0]])
        if name in ("ret", "exit"):
            return self._branch(i.guard[0], slot, negated, len(self.kernel.code))
        return self._guarded(i, name, step, slot, negated)

    def _guarded(self, i: Instruction, name: str, step: Step, slot: int, negated: bool) -> Step:
        results = []  # registers that hold POISON where the predicate is false
        if name not in NO_RESULT:
            names = itertools.chain(
                *(re.findall(r"[%\w$@]+", operand) for operand in i.operands[:1])
            )
            known = [n for n in names if n in self.kernel.registers]
            results = [(self.slot(n), RAW[self.kernel.registers[n]]) for n in known]
        together = name in ("bar", "barrier", "setmaxnreg", "wgmma")

        def guarded(w: Warp) -> int | None:
            p = w.R[slot]
            if p is None:
                raise w.unreadable(slot, i.guard[0])
            if negated:
                p = ~p
            if w.mask is not None:
                p = p & w.mask
            if p.all():
                return step(w)
            if not p.any():
                for result, bits in results:
                    if w.R[result] is None and result not in w.flying:
                        w.R[result] = np.full(LANES, POISON, np.uint64).astype(bits)
                return None
            if together:
                raise PtxError(f"{i.op} by only some lanes")
            saved, w.mask = w.mask, p
            try:
                return step(w)
            finally:
                w.mask = saved

        return guarded

    def _branch(self, name: str, slot: int, negated: bool, target: int) -> Step:
        def branch(w: Warp) -> int | None:
            p = w.R[slot]
            if p is None:
                raise w.unreadable(slot, name)
            if negated:
                p = ~p
            active = w.active()
            taken = p & active
            if not taken.any():
                return None
            stay = active & ~p
            if stay.any():
                w.others.append((w.pc + 1, stay))
                w.mask = taken
            return target

        return branch

    def slot(self, register: str) -> int:
        """Return the slot of a declared register."""
        return self._numbers[register, ""]

    def source(self, text: str, kind: str) -> int:
        """Return the slot of an operand: a register's, or one with a constant's bits."""
        if (text, "") in self._numbers:
            return self._numbers[text, ""]
        if text.startswith("%"):
            if text not in self.special:
                self.special[text] = len(self.slots)
                self.slots.append(None)
            return self.special[text]
        if (text, kind) not in self._numbers:
            bits = RAW[width_of(kind)]
            value = self.constant(text) & (2 ** max(8 * bits.itemsize, 8) - 1)
            self._numbers[text, kind] = len(self.slots)
            self.slots.append(np.full(LANES, value, np.uint64).astype(bits))
        return self._numbers[text, kind]

    def constant(self, text: str) -> int:
        """Return the bits of a literal, or the address that a name stands for."""
        if text[:2] in ("0f", "0F", "0d", "0D"):
            return int(text[2:], 16)
        if text in self.kernel.shared:
            return self.kernel.shared[text]
        for parameter in self.kernel.parameters:
            if parameter.name == text:
                return parameter.offset
        if text in ("true", "false"):
            return int(text == "true")
        return int(text.rstrip("U"), 0)

    def getter(self, text: str, kind: str) -> Getter:
        """Return a function that reads an operand as numbers of a type."""
        slot, dtype = self.source(text, kind), numpy_type(kind)
        bits = RAW[width_of(kind)]
        plain = bits == dtype

        def get(w: Warp) -> np.ndarray:
            x = w.R[slot]
            if x is None:
                raise w.unreadable(slot, text)
            if x.dtype != bits:
                x = x.astype(bits)  # registers may be wider than an instruction reads
            return x if plain else x.view(dtype)

        return get

    def setter(self, text: str, kind: str) -> Setter:
        """Return a function that writes numbers of a type to a register."""
        if text == "_":
            return lambda w, x: None
        slot, bits = self.slot(text), RAW[self.kernel.registers[text]]
        signed = kind[0] == "s"

        def put(w: Warp, x: np.ndarray) -> None:
            if x.dtype.kind in "if":
                x = np.ascontiguousarray(x).view(RAW[8 * x.dtype.itemsize])
            if x.dtype != bits:
                if signed and bits.itemsize > x.dtype.itemsize:
                    x = x.view(f"i{x.dtype.itemsize}").astype(f"i{bits.itemsize}").view(bits)
                else:
                    x = x.astype(bits)
            if w.mask is None and not w.flying:
                w.R[slot] = x
            else:
                w.set(slot, x)

        return put

    def address(self, text: str, wide: bool) -> Getter:
        """Return a function for the addresses of all lanes, from `[register+offset]`."""
        base, sign, offset = re.match(
            r"\[\s*([%\w$@]+)\s*(?:([+-])\s*(-?\w+))?\s*\]$", text
        ).groups()
        get = self.getter(base, "u64" if wide else "u32")
        more = int(offset or "0", 0) * (-1 if sign == "-" else 1)
        if not more:
            return get
        kind = np.uint64 if wide else np.uint32
        add = np.asarray(more & (2 ** (64 if wide else 32) - 1), kind)
        return lambda w: get(w) + add

    def shared_address(self, text: str) -> Getter:
        """Like `address`, in shared memory; the register may have 64 bits."""
        base = re.match(r"\[\s*([%\w$@]+)", text)[1]
        get = self.address(text, self.kernel.registers.get(base, 32) == 64)

        def narrow(w: Warp) -> np.ndarray:
            at = get(w)
            if at.dtype == np.uint64:
                if (at >> np.uint64(32)).any():
                    raise PtxError(f"shared address {int(at.max()):#x} has more than 32 bits")
                at = at.astype(np.uint32)
            return at

        return narrow

    def load_parameters(self, arguments: Sequence[object]) -> None:
        """Fill the parameter space: integers and floats, or a tuple of tensor maps."""
        kernel = self.kernel
        if len(arguments) != len(kernel.parameters):
            raise PtxError(f"{len(arguments)} arguments for {len(kernel.parameters)} parameters")
        last = kernel.parameters[-1] if kernel.parameters else None
        self.parameters = np.zeros(last.offset + last.bytes if last else 0, np.uint8)
        for parameter, value in zip(kernel.parameters, arguments, strict=True):
            if isinstance(value, tuple):
                if parameter.bytes < 128 * len(value):
                    raise PtxError(f"{len(value)} tensor maps in {parameter.bytes} bytes")
                for i, tensor_map in enumerate(value):
                    at = PARAMETER_WINDOW + parameter.offset + 128 * i
                    self.tensor_maps[at] = tensor_map
                continue
            kind = np.float32 if isinstance(value, float) else f"u{parameter.bytes}"
            if not isinstance(value, float):
                value = int(value) & (2 ** (8 * parameter.bytes) - 1)
            data = np.asarray(value, kind).reshape(1).view(np.uint8)
            self.parameters[parameter.offset : parameter.offset + data.size] = data


def vector(text: str) -> list[str]:
    """Return the names in `{a, b}`, or the one name."""
    return [x.strip() for x in text.strip("{} ").split(",")] if text[0] == "{" else [text]


def uniform(w: Warp, x: np.ndarray, what: str) -> int:
    """Return the number that an operand has in all running lanes; raise if it differs."""
    lanes = x if w.mask is None else x[w.mask]
    if (lanes != lanes[0]).any():
        raise PtxError(f"{what} differs between lanes")
    return int(lanes[0])


def elementwise(
    p: Program, form: Form, function: Callable, kinds: Sequence[str], result: str
) -> Step:
    """Make a step that writes `function` of operands of `kinds` as a `result`."""
    put = p.setter(form.operands[0], result)
    gets = [p.getter(x, kind) for x, kind in zip(form.operands[1:], kinds, strict=True)]
    if len(gets) == 1:
        (a,) = gets
        return lambda w: put(w, function(a(w)))
    if len(gets) == 2:
        a, b = gets
        return lambda w: put(w, function(a(w), b(w)))
    a, b, c = gets
    return lambda w: put(w, function(a(w), b(w), c(w)))
