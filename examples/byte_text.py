"""English prose about Python, for `examples/train_byte_model.py`.

`paragraphs` finds the prose that comes with every CPython: the language reference behind `help()`
(`pydoc_data.topics`), the docstrings of the standard library, IDLE's help and the licence.
`documentation` reads Python's documentation in HTML from a directory. All of it is under the PSF
License Agreement (https://docs.python.org/3/license.html). Nothing is downloaded.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

SKIPPED = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
ASCII = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--"}
    | {"\u2026": "...", "\xa0": " ", "\xb6": ""}
)
RUN = 8  # words in a row: if two paragraphs share these, it is by copying rather than by chance


def paragraphs() -> list[str]:
    """Return every paragraph of CPython's prose once, in order, each as one line of ASCII."""
    return _prose(part for text in _texts() for part in re.split(r"\n\s*\n", text))


def documentation(directory: Path) -> list[str]:
    """Return every paragraph of the HTML files in a directory, in the form of `paragraphs`.

    Code, tables and navigation are left out. Raises FileNotFoundError if there is no HTML file.
    """
    found: list[str] = []
    for path in sorted(directory.rglob("*.html")):
        reader = _Html()
        reader.feed(path.read_text(errors="replace"))
        reader.close_paragraph()
        found += [part.translate(ASCII) for part in reader.found]
    if not found:
        raise FileNotFoundError(f"docs: {directory} has no HTML file with a paragraph")
    return _prose(found)


def without(lines: Iterable[str], known: bytes) -> list[str]:
    """Return the lines that share no eight words in a row with a text."""
    seen = {run for line in known.decode().splitlines() for run in _runs(line)}
    return [line for line in lines if seen.isdisjoint(_runs(line))]


def split(lines: list[str], run: int = 20, every: int = 20) -> tuple[bytes, bytes]:
    """Split lines into training and held-out text, a paragraph per line.

    One in `every` runs of `run` neighbouring paragraphs is held out: neighbours resemble each
    other, and a paragraph between two that were read would be too easy.
    """
    parts: tuple[list[str], list[str]] = ([], [])
    for i, line in enumerate(lines):
        parts[i // run % every == every - 1].append(line)
    train, held_out = ("\n".join(part) + "\n" for part in parts)
    return train.encode(), held_out.encode()


class _Html(HTMLParser):
    """Collects the text of `<p>` elements."""

    IGNORED = frozenset({"pre", "table", "nav", "script", "style"})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.words: list[str] | None = None  # of the paragraph that is open
        self.num_ignored = 0  # elements that are open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.IGNORED:
            self.num_ignored += 1
        if tag == "p":  # it also ends an unclosed one
            self.close_paragraph()
            self.words = []

    def handle_endtag(self, tag: str) -> None:
        if tag in self.IGNORED:
            self.num_ignored = max(self.num_ignored - 1, 0)
        if tag == "p":
            self.close_paragraph()

    def close_paragraph(self) -> None:
        if self.words is not None:
            self.found.append("".join(self.words))
            self.words = None

    def handle_data(self, data: str) -> None:
        if self.words is not None and not self.num_ignored:
            self.words.append(data)


def _prose(parts: Iterable[str]) -> list[str]:
    """Return the parts that are prose, each once and as one line of ASCII."""
    lines = (" ".join(part.split()) for part in parts)
    return list(dict.fromkeys(line for line in lines if _is_prose(line)))


def _runs(line: str) -> set[str]:
    """Return every run of eight words, without case and punctuation; a shorter line is one run."""
    words = re.findall(r"[a-z0-9]+", line.lower())
    return {" ".join(words[i : i + RUN]) for i in range(max(len(words) - RUN, 0) + 1)}


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
    """Yield the docstrings of a module."""
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
