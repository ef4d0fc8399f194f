"""Plant one-line bugs in the core, one at a time, and check whether the tests find them.

    python -m tests.tools.mutation                          # 60 mutants drawn from all files below
    python -m tests.tools.mutation --files spec softmax     # only from these files
    python -m tests.tools.mutation --count 200 --seed 3     # more, and different ones
    python -m tests.tools.mutation --list                   # only print them

Every mutant is a copy of the tree in a temporary folder with one expression of one function
changed: a comparison or its bound, a sign, a constant by one, a minimum for a maximum, a condition
negated, an operand dropped. The test files for that source file run on it and stop at the first
failure. A mutant survives if all of them pass. Then either a test is missing, or the change has no
visible effect (`EQUIVALENT` lists such changes, with reasons). CONTRIBUTING.md has the score.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _of(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


# The test files for each source file, those that fail fastest first.
TESTS = {
    "jattn/spec.py": _of("attention", "spec", "masks", "contract", "properties"),
    "jattn/softmax.py": _of("attention", "spec", "properties", "cascade", "gradients"),
    "jattn/cache.py": _of("attention", "quantized", "formats", "contract"),
    "jattn/cascade.py": _of("attention", "cascade"),
    "jattn/metadata.py": _of("attention", "metadata"),
    "jattn/sharding.py": _of("attention", "sharding"),
    "jattn/reference.py": _of("attention", "spec", "masks", "mla"),
    "jattn/formats/*.py": (*_of("attention", "formats", "quantized"), *_of("blocks", "sizes")),
    "jattn/cpu/xla/*.py": _of(
        *("attention", "properties", "masks", "quantized", "gradients", "kv_rows", "mla"),
        *("contract", "compile"),
    ),
    "jattn/blocks/tables/*.py": _of("blocks", "tables", "kernel_blocks"),
    "jattn/blocks/planning/*.py": _of("blocks", "align", "plans", "layer_groups", "kernel_blocks"),
    "jattn/blocks/states/*.py": _of("blocks", "pools", "plans"),
}

# From `(file, line, changed line)` to the reason why the change has no visible effect.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "jattn/formats/rounding.py",
        "return to_float(jnp.clip(x, -57344, 57344), 2, -14, 0x7E)",
        "return to_float(jnp.clip(x, -57345, 57344), 2, -14, 0x7E)",
    ): "-57345 rounds to -57344",
    (
        "jattn/spec.py",
        "used = used & ((end > start) & (counts > 0))[:, None]",
        "used = used & (((end >= start)) & (counts > 0))[:, None]",
    ): "only an empty sequence has end == start, both 0",
    (
        "jattn/spec.py",
        "used = used & ((end > start) & (counts > 0))[:, None]",
        "used = used & (((end > start) | (counts > 0)))[:, None]",
    ): "a sequence without query tokens has no rows, and one without keys no columns",
    (
        "jattn/cpu/xla/masks.py",
        "whole &= (keys[:, 0] >= run.first_key) & (keys[:, 1] < run.end_key)",
        "whole &= (keys[:, 0] >= run.first_key) & ((keys[:, 1] <= run.end_key))",
    ): "columns are sorted, and the corners show that no row sees the key at the end",
    (
        "jattn/cpu/xla/masks.py",
        "whole &= (keys[:, 0] >= run.first_key) & (keys[:, 1] < run.end_key)",
        "whole &= ((keys[:, 0] >= run.first_key + 1)) & (keys[:, 1] < run.end_key)",
    ): "a tile that begins with the first key is masked, which is only slower",
    (
        "jattn/cpu/xla/masks.py",
        "whole &= (keys[:, 0] >= run.first_key) & (keys[:, 1] < run.end_key)",
        "whole &= ((keys[:, 0] > run.first_key)) & (keys[:, 1] < run.end_key)",
    ): "a tile that begins with the first key is masked, which is only slower",
}

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
NAMES = {"minimum": "maximum", "min": "max", "round": "floor", "left": "right", "any": "all"}
NAMES |= {new: old for old, new in NAMES.items()}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One expression of a file, by its place in the text, and the text that replaces it."""

    file: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """Return the source with the bug."""
        lines = source.splitlines(keepends=True)
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + self.text + line[self.end :]
        return "".join(lines)

    def key(self, source: str) -> tuple[str, str, str]:
        """Return its key in `EQUIVALENT`."""
        before = source.splitlines()[self.line - 1]
        after = self.apply(source).splitlines()[self.line - 1]
        return self.file, before.strip(), after.strip()


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every small mistake that can be planted in one expression."""

    def changed(**fields: object) -> ast.AST:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    match node:
        case ast.Compare(ops=[op], comparators=[right]) if type(op) in SWAPS:
            yield changed(ops=[SWAPS[type(op)]()])
            if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                yield changed(comparators=[ast.BinOp(right, ast.Add(), ast.Constant(1))])
        case ast.BinOp(left=left, op=op) if type(op) in SWAPS:
            yield changed(op=SWAPS[type(op)]())
            if isinstance(op, ast.BitAnd | ast.Add | ast.Mult):
                yield left
        case ast.BoolOp(op=op):
            yield changed(op=SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.IfExp(body=body, orelse=orelse):
            yield changed(body=orelse, orelse=body)
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in NAMES:
            yield changed(func=ast.Attribute(value, NAMES[name], ast.Load()))
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield changed(func=ast.Name(NAMES[name], ast.Load()))


def mutants(path: pathlib.Path) -> list[Mutant]:
    """Return the mutants of one file: of code in functions, except annotations and error texts."""
    source = path.read_text()
    found: list[Mutant] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                visit(statement, True)
            return
        if isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                visit(node.value, inside)
            return
        if inside and isinstance(node, ast.expr) and node.lineno == node.end_lineno:
            for other in changes(node):
                text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(other)))
                text = text if isinstance(other, ast.Constant) else f"({text})"
                assert node.end_col_offset is not None
                place = (node.lineno, node.col_offset, node.end_col_offset)
                found.append(Mutant(str(path.relative_to(ROOT)), *place, text))
        for child in ast.iter_child_nodes(node):
            if not (isinstance(child, ast.keyword) and child.arg == "strict"):
                visit(child, inside)

    visit(ast.parse(source), False)
    ascii_only = [m for m in found if source.splitlines()[m.line - 1].isascii()]
    return [m for m in ascii_only if m.key(source) not in EQUIVALENT]


def files(wanted: list[str]) -> dict[pathlib.Path, tuple[str, ...]]:
    """Return source files and their tests; `wanted` are parts of paths, or empty for all."""
    found = {}
    for pattern, tests in TESTS.items():
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            if path.name != "__init__.py" and (not wanted or any(part in name for part in wanted)):
                found[path] = tests
    return found


def survives(mutant: Mutant, tests: tuple[str, ...], minutes: float) -> tuple[bool, str]:
    """Return whether the tests pass with the bug, and else the first test that failed."""
    with tempfile.TemporaryDirectory(prefix="jattn-mutant-") as folder:
        tree = pathlib.Path(folder)
        for part in ("jattn", "tests", "examples", "benchmarks", "docs"):
            ignore = shutil.ignore_patterns("__pycache__", "checkpoints", "notebooks")
            shutil.copytree(ROOT / part, tree / part, ignore=ignore)
        for part in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / part, tree / part)
        target = tree / mutant.file
        target.write_text(mutant.apply(target.read_text()))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p"]
        command += ["no:cacheprovider", "-m", "not slow and (fallback or not extended)"]
        command += tests
        environment = {**os.environ, "PYTHONPATH": folder}
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60 * minutes,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False, "a timeout"
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return done.returncode == 0, failed[0].split(" - ")[0] if failed else done.stderr[-80:]


def main(arguments: list[str] | None = None) -> int:
    """Run the mutants asked for, and return the number of survivors as the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--files", nargs="*", default=[], help="parts of paths of source files")
    parser.add_argument("--count", type=int, default=60, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit per mutant")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    options = parser.parse_args(arguments)
    chosen = [(m, tests) for path, tests in files(options.files).items() for m in mutants(path)]
    random.Random(options.seed).shuffle(chosen)
    chosen = chosen[: options.count]
    survivors = 0
    for number, (mutant, tests) in enumerate(chosen, 1):
        _, before, after = mutant.key((ROOT / mutant.file).read_text())
        print(f"{number}/{len(chosen)} {mutant.file}:{mutant.line}\n    {before}\n    {after}")
        if options.list:
            continue
        begun = time.monotonic()
        alive, failed = survives(mutant, tests, options.minutes)
        survivors += alive
        result = "SURVIVED" if alive else f"killed by {failed}"
        print(f"    {result} ({time.monotonic() - begun:.0f} s)", flush=True)
    if not options.list:
        print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    return min(survivors, 125)


if __name__ == "__main__":
    sys.exit(main())
