"""Parse PTX text into instructions: names, types, labels and sizes, without their meaning.

A kernel is one `.entry` of a module. Names declared within inner braces (inline assembly has its
own labels and registers) are made unique here, so later stages need no scopes.
"""

from __future__ import annotations

import collections
import dataclasses
import re

from tests.support.ptx.numbers import LANES, PtxError, width_of

SHARED_BASE = 1024  # as on sm_90, where the first KiB is the system's; 0 is no valid address


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      guard: a predicate register and whether it is negated, or None.
      op: the opcode with its modifiers.
      operands: the operands as text.
      place: the source it was compiled from, `file:line`.
      line: its line in the PTX.
    """

    guard: tuple[str, bool] | None
    op: str
    operands: tuple[str, ...]
    place: str
    line: int

    def __str__(self) -> str:
        guard = "" if self.guard is None else f"@{'!' * self.guard[1]}{self.guard[0]} "
        return f"{guard}{self.op} {', '.join(self.operands)}  (line {self.line}, {self.place})"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A kernel parameter: `bytes` bytes at `offset` in the parameter space."""

    name: str
    bytes: int
    offset: int


@dataclasses.dataclass
class Kernel:
    """A parsed kernel.

    Attributes:
      name: its entry point.
      target: like "sm_90a".
      parameters: in order.
      block: threads in x, y and z.
      registers: bits of each by name; predicates have 1.
      shared: address of each variable in shared memory.
      static_shared: bytes of these variables; dynamic shared memory follows them.
      code: instructions.
      labels: index of the instruction after each label.
    """

    name: str
    target: str
    parameters: list[Parameter]
    block: tuple[int, int, int]
    registers: dict[str, int]
    shared: dict[str, int]
    static_shared: int
    code: list[Instruction]
    labels: dict[str, int]

    def opcodes(self) -> collections.Counter[str]:
        """Count how often each opcode, with its modifiers, occurs."""
        return collections.Counter(i.op for i in self.code)


def parse(text: str) -> Kernel:
    """Parse the kernel of a module with one entry point."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)
    heads = list(re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", text))
    if len(heads) != 1:
        raise PtxError(f"{len(heads)} entry points; a kernel has one")
    (head,) = heads
    target = re.search(r"^\s*\.target\s+(\w+)", text, re.M)
    size = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", head[3])
    if size is None:
        raise PtxError("no .reqntid or .maxntid: how many threads a block has is not known")
    block = tuple(int(n) for n in size.groups(default="1"))
    files = dict(re.findall(r"\.file\s+(\d+)\s+\"([^\"]*)\"", text))
    parser = _Body({n: p.rpartition("/")[2] for n, p in files.items()})
    parser.shared_variables(text[: head.start()])
    parser.read(text, head.end())
    return Kernel(
        name=head[1],
        target=target[1] if target else "",
        parameters=_parameters(head[2]),
        block=block,
        registers=parser.registers,
        shared=parser.shared,
        static_shared=parser.finish_shared(),
        code=parser.code,
        labels=parser.labels,
    )


def _parameters(text: str) -> list[Parameter]:
    found, offset = [], 0
    for declared in filter(None, (part.strip() for part in text.split(","))):
        match = re.match(r"\.param\s+(.*?)([\w$]+)\s*(?:\[(\d+)\])?$", declared, re.S)
        kind = re.search(r"\.(pred|[bsuf]\d+)\b", match[1])[1]
        align = re.search(r"^(?!.*\.ptr).*\.align\s+(\d+)", match[1], re.S)
        size = width_of(kind) // 8 * int(match[3] or 1)
        each = int(align[1]) if align else size
        offset = -(-offset // each) * each
        found.append(Parameter(match[2], size, offset))
        offset += size
    return found


class _Body:
    """The parser of a kernel's body, with what it has read so far."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files
        self.registers: dict[str, int] = {}
        self.shared: dict[str, int] = {}
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.scopes: list[dict[str, str]] = [{}]
        self.dynamic: list[str] = []
        self.size = 0

    def read(self, text: str, at: int) -> None:
        """Read everything up to the brace that ends the kernel."""
        place, count = "?", 0
        line, counted = 1, 0
        token = re.compile(
            r"\s*(?:(\.loc)\s+(\d+)\s+(\d+)[^\n]*|([\w$]+)\s*:(?!:)|([{}])|([^;]+);)"
        )
        while match := token.match(text, at):
            at = match.end()
            if match[1]:
                place = f"{self.files.get(match[2], match[2])}:{match[3]}"
            elif match[4]:
                self.labels[self.resolve(match[4])] = len(self.code)
            elif match[5] == "{":
                count += 1
                # A label may be used before it is declared: rename a scope's labels at its start.
                inner = _matching(text, at)
                names = re.findall(r"(?:^|[;{\n])\s*([A-Za-z_$][\w$]*)\s*:(?!:)", inner)
                self.scopes.append({name: f"{name}@{count}" for name in names})
            elif match[5] == "}":
                if len(self.scopes) == 1:
                    return  # this brace ends the kernel
                self.scopes.pop()
            else:
                line += text.count("\n", counted, match.start(6))
                counted = match.start(6)
                self.statement(" ".join(match[6].split()), place, line)
        raise PtxError(f"cannot parse PTX: {text[at : at + 80]!r}")

    def resolve(self, name: str) -> str:
        """Return the unique name that a name has in the current scopes."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def statement(self, text: str, place: str, line: int) -> None:
        if text.startswith(".reg"):
            self.declare(text)
            return
        if text.startswith((".shared", ".extern")):
            self.shared_variables(text + ";")
            return
        if text.startswith(".pragma"):
            return
        if text.startswith("."):
            raise PtxError(f"directive {text!r} is not known")
        guard = None
        if found := re.match(r"@\s*(!?)\s*([%\w$]+)\s+", text):
            guard = self.resolve(found[2]), bool(found[1])
            text = text[found.end() :]
        op, _, rest = text.partition(" ")
        if len(self.scopes) > 1:
            rest = re.sub(r"(?<![\w$.%])[A-Za-z_$][\w$]*", lambda m: self.resolve(m[0]), rest)
        self.code.append(Instruction(guard, op, split_operands(rest), place, line))

    def declare(self, text: str) -> None:
        kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text).groups()
        for name in (part.strip() for part in names.split(",")):
            if many := re.match(r"([%\w$]+)<(\d+)>", name):
                for i in range(int(many[2])):
                    self.registers[f"{many[1]}{i}"] = width_of(kind)
                continue
            unique = name
            if len(self.scopes) > 1:
                unique = f"{name}@{len(self.registers)}"
                self.scopes[-1][name] = unique
            self.registers[unique] = width_of(kind)

    def shared_variables(self, text: str) -> None:
        """Read declarations of shared memory; those without a size are dynamic and come last."""
        pattern = r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(\[(\d*)\])?"
        for found in re.finditer(pattern + r"\s*;", text):
            extern, align, kind, name, brackets, count = found.groups()
            # Mosaic GPU declares dynamic shared memory as one aligned byte of a known name.
            if extern or brackets == "[]" or name.startswith("__dynamic_shmem__"):
                self.dynamic.append(name)
                continue
            each = int(align or 1)
            self.size = -(-self.size // each) * each
            self.shared[name] = SHARED_BASE + self.size
            self.size += width_of(kind) // 8 * int(count or 1)

    def finish_shared(self) -> int:
        """Give every variable its address, and return the bytes of static shared memory."""
        if self.dynamic:
            self.size = -(-self.size // 16) * 16
        for name in self.dynamic:
            self.shared[name] = SHARED_BASE + self.size
        return self.size


def _matching(text: str, at: int) -> str:
    """Return the text between a brace and the one that closes it."""
    depth, end = 1, at
    while depth:
        end += 1
        depth += {"{": 1, "}": -1}.get(text[end - 1], 0)
    return text[at : end - 1]


def split_operands(text: str) -> tuple[str, ...]:
    """Split operands at commas, but keep vectors and addresses together."""
    parts, depth, last = [], 0, 0
    for i, letter in enumerate(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(text[last:i].strip())
            last = i + 1
    if text[last:].strip():
        parts.append(text[last:].strip())
    return tuple(parts)


def warps_of(kernel: Kernel) -> int:
    """Warps of a block."""
    x, y, z = kernel.block
    threads = x * y * z
    if threads % LANES and threads > LANES:
        raise PtxError(f"{threads} threads: the last warp of a block is not whole")
    return -(-threads // LANES)
