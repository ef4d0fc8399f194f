"""Imports go one way, and importing jattn starts nothing.

Imports are read from the source, so those inside functions or for a type checker count too.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import pathlib
import re

import pytest

import jattn
from tests.support import processes

ROOT = pathlib.Path(jattn.__file__).parent
# A module may import only from lower levels.
LEVELS = (
    {"checks", "device", "serialization", "varying"},
    {"integers", "pytrees"},
    {"spec", "formats", "softmax"},
    {"blocks", "call"},
    {"metadata", "calibration", "capability", "testing"},
    {"reference", "cpu", "pallas"},
    {"implementations"},
    {"api", "cache", "export"},
    {"cascade", "sharding", "nnx"},
    {"integrations"},
)
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
FILES = sorted(ROOT.rglob("*.py"))
MODULES = {
    ".".join(("jattn", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in FILES
}


def part_of(path: pathlib.Path) -> str:
    """Return the part of the package that a file belongs to: its module or its folder."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@functools.cache
def imports(path: pathlib.Path) -> set[str]:
    """Return the absolute names that a file imports, with `from a import b` as `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def parts_imported(path: pathlib.Path) -> set[str]:
    """Return the parts of jattn that a file imports."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("jattn.")}


def ids(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in FILES if p != ROOT / "__init__.py"], ids=ids)
def test_imports_go_down(path):
    part = part_of(path)
    assert part in LEVEL, f"{part} has no place in the order of parts"
    for other in parts_imported(path) - {part}:
        assert other in LEVEL, f"{path.name} imports jattn.{other}, which is in no level"
        down = LEVEL[other] < LEVEL[part]
        assert down, f"{ids(path)} ({part}) imports {other}, which is not on a lower level"


def modules_imported(path: pathlib.Path) -> set[str]:
    """Return the modules of jattn that a file imports; `jattn.formats.Fp8` is `jattn.formats`."""
    names = {name if name in MODULES else name.rpartition(".")[0] for name in imports(path)}
    return names & set(MODULES) - {"jattn"}


def test_modules_do_not_import_in_cycles():
    """Inside folders too: modules of a package import each other, never the package."""
    graph = {module: modules_imported(path) for module, path in MODULES.items()}
    assert graph["jattn.cpu.xla.decode"] >= {"jattn.call", "jattn.cpu.xla.kv_loop"}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_optional_packages_are_imported_where_they_belong(path):
    roots = {name.split(".")[0] for name in imports(path)}
    allowed = {"nnx.py": {"flax"}}.get(path.name, set())
    if part_of(path) == "pallas":
        allowed = {"triton", "jax_triton"}
    elif part_of(path) == "integrations":
        allowed = {"flax", "torch"}
    assert not (roots & {"flax", "triton", "jax_triton", "torch", "tests", "examples"}) - allowed


def test_every_part_in_the_order_exists():
    """Every part has a file: renaming one must not leave its rule behind."""
    there = {part_of(path) for path in FILES}
    assert set(LEVEL) <= there


def test_the_page_has_the_same_order():
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    _, _, section = text.partition("## Imports go one way")
    order = section.split("```")[1].split("->")
    assert [set(re.findall(r"\w+", parts)) for parts in order] == [*LEVELS]


def test_public_names():
    assert sorted(jattn.__all__) == jattn.__all__
    for name in jattn.__all__:
        assert getattr(jattn, name) is not None
    modules = ["integrations", "nnx", "sharding", "testing"]
    assert dir(jattn) == sorted([*jattn.__all__, *modules, "__version__"])
    assert dir(jattn.blocks) == sorted(jattn.blocks.__all__)


def test_public_modules_are_imported_when_they_are_used():
    code = """
import sys
import jattn
for name in ("integrations", "sharding", "testing"):
    assert f"jattn.{name}" not in sys.modules, name
    assert getattr(jattn, name).__name__ == f"jattn.{name}"
assert not hasattr(jattn, "cpus")
sys.modules["flax"] = None  # as if it were not installed
assert not hasattr(jattn, "nnx")
try:
    from jattn import nnx
except ImportError as error:
    assert "flax" in str(error)
else:
    raise AssertionError
"""
    processes.python(code)


def test_importing_starts_nothing():
    code = """
import sys
import jattn
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a backend was started"
for name in ("flax", "triton", "jax_triton", "torch"):
    assert name not in sys.modules, name
jattn.support_table()
assert not xla_bridge.backends_are_initialized(), "support_table started a backend"
"""
    processes.python(code)
