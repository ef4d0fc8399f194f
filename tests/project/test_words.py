"""Words this project avoids (CONTRIBUTING.md, Words): in names, comments, docstrings and pages."""

from __future__ import annotations

import ast
import functools
import pathlib
import re

import pytest

import jattn

ROOT = pathlib.Path(jattn.__file__).parent.parent
FOLDERS = ("jattn", "benchmarks", "examples", "tests")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
CPP = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".h", ".cc") and "include" not in path.parts  # XLA's own
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Jargon; the glossary has better words: chunk, part, contender, local, read, implementation.
WORDS = "slab slabs piece pieces beside look looks side sides halves tame tames anew few_k"
# Phrases with better ones: replaces, with a clear error, fixed, draft tokens, bit for bit.
ODD = r"takes? the place of|refused in words|mended|drafted tokens?|bit by bit"
# These are jargon only in names: a text may say "a row of its own" and "who may send requests".
NAMES = f"{WORDS} own who"
# Names that may stay, by file.
ALLOWED = {
    ("jattn/blocks/planning/align.py", "who"): "a field of jattn.blocks.Ask, which is public",
    ("benchmarks/serving/__main__.py", "own"): "a key of stored records",
    ("examples/text.py", "piece"): "what a tokenizer calls the text of a token",
}
# Phrases that may stay in texts, pages and C++, because they are ordinary English there.
PHRASES = re.compile("side by side")
IN_PAGES = re.compile(
    r"side by side|(both|either|one)\s+sides?|median of a side|looks?\s+(up|for)", re.I
)
IN_CPP = re.compile("side by side|looks up|halves")  # of registers, vectors and words
# Strings and comments; docstrings are the strings with three quotes.
NO_CODE = re.compile(
    r'"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])*'|#[^\n]*",
    re.S,
)
IN_TEXTS = re.compile(rf"\b({'|'.join(WORDS.split())}|{ODD})\b", re.I)
IN_NAMES = frozenset(NAMES.split())


@functools.cache
def is_banned(name: str) -> bool:
    """Whether a name has a banned word; a test's name is a sentence, so it is checked as text."""
    if name.startswith("test_"):
        return bool(IN_TEXTS.search(PHRASES.sub("", name.replace("_", " "))))
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return "few_k" in name.lower() or any(part.lower() in IN_NAMES for part in parts)


def names_in(source: str) -> list[tuple[int, str]]:
    """Return names that a file introduces, with their lines, but not those of other libraries."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.append((node.lineno, node.name))
            case ast.arg():
                found.append((node.lineno, node.arg))
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.append((node.lineno, name))
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                found.append((node.lineno, name))
    return found


def banned_in(source: str, path: str) -> list[str]:
    """Return where a file has a banned word."""
    found = []
    if any(map(is_banned, set(re.findall(r"[A-Za-z_]\w*", NO_CODE.sub("", source))))):
        found += [
            f"{path}:{line}: {name}"
            for line, name in names_in(source)
            if is_banned(name) and (path, name) not in ALLOWED
        ]
    for text in NO_CODE.finditer(source):
        if text[0].startswith(("#", '"""')):
            line = source.count("\n", 0, text.start()) + 1
            said = IN_TEXTS.findall(PHRASES.sub("", text[0]))
            found += [f"{path}:{line}: {word!r} in a comment or docstring" for word in said]
    return found


def blank(text: re.Match[str]) -> str:
    """Replace a match by as many empty lines."""
    return "\n" * text[0].count("\n")


def banned_in_page(source: str, path: str) -> list[str]:
    """Return where a page has a banned word outside code."""
    prose = re.sub(r"^```.*?^```|`[^`]*`|<!--.*?-->", blank, source, flags=re.S | re.M)
    return banned_in_texts(IN_PAGES.sub(blank, prose), path)


def banned_in_cpp(source: str, path: str) -> list[str]:
    """Return where a comment in C++ has a banned word."""
    comments = re.sub(r"^((?!//).)*", "", source, flags=re.M)
    return banned_in_texts(IN_CPP.sub("", comments), path)


def banned_in_texts(text: str, path: str) -> list[str]:
    return [
        f"{path}:{text.count(chr(10), 0, word.start()) + 1}: {word[0]!r}"
        for word in IN_TEXTS.finditer(text)
    ]


def test_banned_words_are_not_used():
    found = []
    for paths, check in ((FILES, banned_in), (PAGES, banned_in_page), (CPP, banned_in_cpp)):
        assert paths
        for path in paths:
            found += check(path.read_text(), path.relative_to(ROOT).as_posix())
    assert not found, "\n".join(found)


def test_allowed_names_exist():
    """A name that no longer exists must leave the list."""
    for path, name in ALLOWED:
        assert name in {given for _, given in names_in((ROOT / path).read_text())}, (path, name)


@pytest.mark.parametrize(
    "source",
    [
        "own = 1",
        "def look(): pass",
        "class Side: pass",
        "def f(who): pass",
        "self.num_pieces = 1",
        "for few_k in (): pass",
        "import a as xHalves",
        "x = 1  # a piece of it",
        '"""Keys beside values."""',
        '"""It takes the place of the kernel."""',
        'def f():\n    """It looks right."""',
    ],
)
def test_a_planted_word_is_found(source):
    assert banned_in(source, "x.py")


@pytest.mark.parametrize(
    "source",
    [
        "f(side=1)",
        "known, lookup, inside = 1, 2, 3",
        'x = "a piece"',
        '"""Keys and values side by side, each of its own."""',
    ],
)
def test_other_words_are_not(source):
    assert not banned_in(source, "x.py")


def test_pages_and_comments_in_cpp():
    page = "Both\nsides `look` side by side.\n```\npieces\n```\nIt looks right.\n"
    assert banned_in_page(page, "x.md") == ["x.md:6: 'looks'"]
    comments = "int side;  // halves of words\nint x;  // its pieces\n"
    assert banned_in_cpp(comments, "x.h") == ["x.h:2: 'pieces'"]
