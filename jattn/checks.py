"""Collect everything that is wrong with a call, so that one error reports it all.

A wrong argument raises `ValueError` before any work, naming the argument, what it is and what
it must be. Every mismatch is reported at once, so that one edit fixes the call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import reprlib
from collections.abc import Iterator

import numpy as np


@dataclasses.dataclass
class Problems:
    """The mismatches found so far in one call of `where`."""

    where: str
    found: list[str] = dataclasses.field(default_factory=list)

    def add(self, argument: str, what_it_is: str, what_it_must_be: str) -> None:
        """Note that `argument` is one thing and must be another."""
        self.found.append(f"{argument}: {what_it_is}, but must be {what_it_must_be}")

    def require(self, ok: bool, argument: str, what_it_is: str, what_it_must_be: str) -> bool:
        """`add` unless `ok`; returns `ok`, so that later checks can depend on it."""
        if not ok:
            self.add(argument, what_it_is, what_it_must_be)
        return ok

    def expect(self, ok: bool, argument: str, value: object, what_it_must_be: str) -> bool:
        """Like `require`, describing the value itself."""
        return ok or self.require(False, argument, describe(value), what_it_must_be)

    def raise_if_any(self) -> None:
        """Raise one `ValueError` that lists every problem, or return."""
        if self.found:
            lines = "".join(f"\n  - {problem}" for problem in self.found)
            raise ValueError(f"{self.where}: {len(self.found)} wrong argument(s){lines}")


@contextlib.contextmanager
def checking(where: str) -> Iterator[Problems]:
    """Collect problems in a block of checks and raise them together at its end."""
    problems = Problems(where)
    yield problems
    problems.raise_if_any()


# A list passed instead of an array could make megabytes of text.
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120


def numpy_dtype(x: object) -> np.dtype | None:
    """Return the dtype of an array-like object; None for other objects and unknown dtypes.

    A class such as `np.float32` has both attributes too, but is no array.
    """
    if isinstance(x, type) or not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return None
    try:
        return np.dtype(x.dtype)
    except TypeError:
        return None


def describe(x: object) -> str:
    """Describe a value for an error message: `float32[8, 16, 512]`, `str 'NHWC'`."""
    dtype = numpy_dtype(x)
    if isinstance(x, np.generic):
        return f"numpy.{type(x).__name__} {x}"
    if dtype is not None and hasattr(x, "shape"):
        text = f"{dtype.name if dtype.isnative else dtype.str}{list(x.shape)}"
        return f"{text} {x}" if isinstance(x, np.ndarray) and x.shape == () else text
    if hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type):
        return f"a {type(x).__module__}.{type(x).__name__} of dtype {x.dtype}"
    text = _REPR.repr(x)
    return f"{type(x).__name__} {text if len(text) <= 120 else text[:117] + '...'}"
