"""Reading the fields of a JSON body, and collecting everything that is wrong with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from examples.engine.request import cut

MOST_PROBLEMS = 8  # in an answer
_WORDS = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def is_a(value: Any, kind: type) -> bool:
    """Whether a JSON value is of a type: true is no integer, and an integer is a number."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


class Fields:
    """The fields of a body."""

    def __init__(self, body: Any, known: set[str], nothing: Mapping[str, tuple]):
        """Read the names.

        Args:
          body: what was sent, parsed.
          known: fields that will be read.
          nothing: fields that are not, with the values that ask for nothing.

        Raises:
          ValueError: the body is no object.
        """
        if not isinstance(body, Mapping):
            raise ValueError("the body must be a JSON object")
        self.body = body
        self.problems: list[str] = []
        for name, value in body.items():
            if name in nothing and value not in nothing[name]:
                self.problems.append(f"{name} is {cut(value)}, which this server cannot do")
            elif name not in nothing and name not in known:
                self.problems.append(f"{name[:60]} is not a field this server knows")

    def get(self, name: str, kind: type, default: Any) -> Any:
        """A field of a type, or its default; null counts as not given."""
        value = self.body.get(name)
        if value is None:
            return default
        if not is_a(value, kind):
            self.problems.append(f"{name} is {cut(value)}, but must be {_WORDS[kind]}")
            return default
        return value

    def within(self, name: str, default: Any, low: float, high: float, kind: type = int) -> Any:
        """A number of a range, both ends included."""
        value = self.get(name, kind, default)
        if value is not None and not low <= value <= high:
            self.problems.append(f"{name} is {cut(value)}, but must be in {low:g}..{high:g}")
            return default
        return value

    def refuse(self, names: Collection[str], reason: str) -> None:
        """Note fields that were given and have no meaning here; null counts as not given."""
        given = (name for name in self.body if name in names and self.body[name] is not None)
        self.problems += [f"{name} {reason}" for name in given]

    def finish(self) -> None:
        """Raise if anything was wrong.

        Raises:
          ValueError: it all.
        """
        if self.problems:
            rest = len(self.problems) - MOST_PROBLEMS
            more = [f"and {rest} more"] if rest > 0 else []
            raise ValueError("; ".join([*self.problems[:MOST_PROBLEMS], *more]))
