"""Read the fields of a JSON body, and collect all problems with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from examples.engine.request import cut

MOST_PROBLEMS = 8  # reported in a response
_WORDS = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def is_a(value: Any, kind: type) -> bool:
    """Whether a JSON value has a type: true is not an integer, and an integer is a number."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


class Fields:
    """The fields of a body."""

    def __init__(self, body: Any, known: set[str], nothing: Mapping[str, tuple]):
        """Check the names.

        Args:
          body: the parsed body.
          known: fields that will be read.
          nothing: unsupported fields, with the values that request nothing.

        Raises:
          ValueError: the body is not an object.
        """
        if not isinstance(body, Mapping):
            raise ValueError("the body must be a JSON object")
        self.body = body
        self.problems: list[str] = []
        for name, value in body.items():
            if name in nothing and value not in nothing[name]:
                self.problems.append(f"{name} is {cut(value)}, which this server does not support")
            elif name not in nothing and name not in known:
                self.problems.append(f"{name[:60]} is not a field this server knows")

    def get(self, name: str, kind: type, default: Any) -> Any:
        """Return a field of a type, or its default; null counts as not given."""
        value = self.body.get(name)
        if value is None:
            return default
        if not is_a(value, kind):
            self.problems.append(f"{name} is {cut(value)}, but must be {_WORDS[kind]}")
            return default
        return value

    def within(self, name: str, default: Any, low: float, high: float, kind: type = int) -> Any:
        """Return a number in a range, both ends included."""
        value = self.get(name, kind, default)
        if value is not None and not low <= value <= high:
            self.problems.append(f"{name} is {cut(value)}, but must be in {low:g}..{high:g}")
            return default
        return value

    def refuse(self, names: Collection[str], reason: str) -> None:
        """Report fields that were given but have no meaning here; null counts as not given."""
        given = (name for name in self.body if name in names and self.body[name] is not None)
        self.problems += [f"{name} {reason}" for name in given]

    def finish(self) -> None:
        """Raise if there were problems.

        Raises:
          ValueError: its message lists them.
        """
        if self.problems:
            rest = len(self.problems) - MOST_PROBLEMS
            more = [f"and {rest} more"] if rest > 0 else []
            raise ValueError("; ".join([*self.problems[:MOST_PROBLEMS], *more]))
