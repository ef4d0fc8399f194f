"""What the site changes in pages and docstrings when mkdocs builds it (mkdocs.yml)."""

from __future__ import annotations

import pathlib
import re
import textwrap
from typing import Any

import griffe

ROOT = pathlib.Path(__file__).parent.parent
GITHUB = "https://github.com/jattn/jattn/blob/main/"
# Pages that are files of the repository, which GitHub shows where they are.
COPIES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put copies in place and make links leave `docs/` as they would on GitHub."""
    if page.file.src_uri == "support.md":
        page.meta["hide"] = ["toc"]  # room for its wide table
    copied = COPIES.get(page.file.src_uri)
    text = (ROOT / copied).read_text() if copied else markdown
    folder = pathlib.PurePosixPath("." if copied else "docs") / (
        "" if copied else pathlib.PurePosixPath(page.file.src_uri).parent
    )
    here = pathlib.PurePosixPath("docs") / pathlib.PurePosixPath(page.file.src_uri).parent
    return re.sub(
        r'(\]\(|(?:src|srcset|href)=")(?!\w+:|#)([^)"#]+)',
        lambda found: found[1] + _target(folder, here, found[2]),
        text,
    )


def _target(folder: pathlib.PurePosixPath, here: pathlib.PurePosixPath, link: str) -> str:
    """A link of a page that lies in `folder`, as seen from `here` on the site."""
    parts: list[str] = []
    for part in (folder / link).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    path = "/".join(parts)
    for page, copied in COPIES.items():
        if path == copied:
            path = f"docs/{page}"
    if not path.startswith("docs/"):
        return GITHUB + path
    up = "../" * (len(here.parts) - 1)
    return up + path.removeprefix("docs/")


class DocstringStyle(griffe.Extension):
    """Read docstrings as this project writes them: in Google's style, with shorter forms of it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Give a docstring's sections the form that griffe parses."""
        if obj.docstring:
            obj.docstring.value = sections(obj.docstring.value)


def sections(text: str) -> str:
    """Headings and lists of names on lines of their own, `ValueError: why`, headed examples."""
    text = re.sub(r"(?m)^Example:$", "Examples:", text)
    text = re.sub(r"(?m)^Returns: (?=\S)", r"Returns:\n  ", text)
    text = re.sub(
        r"(?m)^Raises: `(\w+)` (.*(?:\n  .*)*)",
        lambda found: f"Raises:\n  {found[1]}: " + found[2].replace("\n", "\n  "),
        text,
    )
    text = re.sub(
        r"(?m)^  (?:\w+,\s+)+\w+(?=: )", lambda found: "  " + " ".join(found[0].split()), text
    )
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(">>> "):
            heading = "" if paragraphs[-1].startswith(("Examples:", "  >>> ")) else "Examples:\n"
            paragraph = heading + textwrap.indent(paragraph, "  ")
        paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)
