"""Types of documented names: `Any` only where there is no better type, with the reason."""

from __future__ import annotations

import ast
import functools
import pathlib
import re

import pytest

import jattn
from tests.project.test_imports import FILES, MODULES, part_of

ROOT = pathlib.Path(jattn.__file__).parent.parent
# Arguments and aliases whose whole type may be `Any`, and why.
_XP = "numpy, jax.numpy, or in a kernel an object with a few of their functions"
ALLOWED = {
    "Array": "an alias of spec, which says why",
    **dict.fromkeys(("key_range.xp", "broken_promises.xp", "path_bits.xp", "tree_path.xp"), _XP),
    **dict.fromkeys(("relative_index.xp", "transform_logits.xp", "selected_columns.xp"), _XP),
    "KVArray.replace.changes": "fields by name, as in dataclasses.replace",
    "KVRows.replace.changes": "likewise",
}
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign


@functools.cache
def definitions(path: pathlib.Path) -> dict[str, Definition]:
    """Return the public names that a file defines; of overloads, the last definition."""
    found: dict[str, Definition] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
    return {name: node for name, node in found.items() if not name.startswith("_")}


def documented() -> list[tuple[str, Definition]]:
    """Return definitions shown in the reference pages: names, and public names of modules."""
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    outside = [path for path in FILES if part_of(path) not in ("cpu", "pallas")]
    shown = []
    for name in re.findall(r"^::: ([\w.]+)$", pages, re.M):
        if name in MODULES:
            path = MODULES[name]
            within = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
            nodes = [pair for file in within for pair in definitions(file).items()]
            public = re.search(r"^__all__ = \[(.*?)\]", path.read_text(), re.M | re.S)
            names = re.findall(r'"(\w+)"', public[1]) if public else [pair[0] for pair in nodes]
        else:
            nodes = [pair for file in outside for pair in definitions(file).items()]
            names = [name.rpartition(".")[2]]
            assert any(defined in names for defined, _ in nodes), name
        shown += [(name, node) for name, node in nodes if name in names]
    return shown


def untyped(name: str, node: ast.AST) -> list[str]:
    """Return arguments, results, fields and aliases of a definition whose type contains `Any`."""

    def says_any(part: ast.AST | None) -> bool:
        return part is not None and any(
            isinstance(x, ast.Name) and x.id == "Any" for x in ast.walk(part)
        )

    if isinstance(node, ast.FunctionDef):
        given = [x for x in ast.walk(node.args) if isinstance(x, ast.arg)]
        found = [f"{name}.{x.arg}" for x in given if says_any(x.annotation)]
        return found + [f"{name} ->"] * says_any(node.returns)
    if isinstance(node, ast.AnnAssign):
        return [f"{name}.{ast.unparse(node.target)}"] * says_any(node.annotation)
    if isinstance(node, ast.Assign):
        return [name] * says_any(node.value)
    found = []
    for part in node.body if isinstance(node, ast.ClassDef) else ():
        called = name
        if isinstance(part, ast.FunctionDef):
            if part.name.startswith("_") and part.name != "__init__":
                continue
            called = f"{name}.{part.name}"
        if isinstance(part, ast.FunctionDef | ast.AnnAssign):
            found += untyped(called, part)
    return found


def test_documented_names_have_types():
    found = {argument for name, node in documented() for argument in untyped(name, node)}
    assert found == set(ALLOWED), "give the type, or explain in ALLOWED why there is none"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "def f(x: Any, *y: Any, z: dict[str, Any] = {}) -> Any: ...",
            {"f.x", "f.y", "f.z", "f ->"},
        ),
        (
            "class f:\n a: Any = None\n def g(self, x: Any): ...\n def _h(self, x: Any): ...",
            {"f.a", "f.g.x"},
        ),
        ("f = int | list[Any]", {"f"}),
        ("def f(x: int) -> 'str': ...", set()),
    ],
)
def test_any_is_found(text, found):
    (node,) = ast.parse(text).body
    assert set(untyped("f", node)) == found
