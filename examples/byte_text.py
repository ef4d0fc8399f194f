"""English prose that comes with every CPython: what `examples/train_byte_model.py` reads.

The language reference behind `help()` (`pydoc_data.topics`), the docstrings of the standard
library, IDLE's help and the licence. All of it is under the PSF License Agreement
(https://docs.python.org/3/license.html). Nothing is downloaded.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


def paragraphs() -> list[str]:
    """Every paragraph of prose, each in one line of ASCII and each once, in a fixed order."""
    found: dict[str, None] = {}
    for text in _texts():
        for part in re.split(r"\n\s*\n", text):
            line = " ".join(part.split())
            if _is_prose(line):
                found[line] = None
    return list(found)


def split(lines: list[str], run: int = 20, every: int = 20) -> tuple[bytes, bytes]:
    """Training and held-out text, a paragraph per line.

    One in `every` runs of `run` neighbouring paragraphs is held out: neighbours resemble each
    other, and a paragraph between two that were read would be too easy.
    """
    parts: tuple[list[str], list[str]] = ([], [])
    for i, line in enumerate(lines):
        parts[i // run % every == every - 1].append(line)
    train, held_out = ("\n".join(part) + "\n" for part in parts)
    return train.encode(), held_out.encode()


def _texts() -> Iterator[str]:
    from pydoc_data import topics

    yield from topics.topics.values()
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED.intersection(path.relative_to(root).parts):
            yield from _of_python(path.read_text(errors="replace"))
    for name in ("LICENSE.txt", "email/architecture.rst", "idlelib/help.html"):
        if (root / name).is_file():  # a distribution may leave these out
            yield re.sub(r"<[^>]*>", "", (root / name).read_text(errors="replace"))


def _of_python(source: str) -> Iterator[str]:
    """The docstrings of a module."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # an example of a broken file
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            yield ast.get_docstring(node) or ""


def _is_prose(line: str) -> bool:
    """Whether a line reads as English rather than as code, a table or a drawing."""
    if len(line.split()) < 8 or not line.isascii() or not line.isprintable() or ">>>" in line:
        return False
    return sum(c.isalpha() or c in " ,.'" for c in line) > 0.93 * len(line)
