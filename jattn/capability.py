"""The calls that each implementation can run, as data: one row next to each kernel.

Dispatch, error messages, the table of docs/support.md and the test matrix are all read from the
rows, so that they cannot disagree. Adding a head size is one edit, in one row.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Collection

from jattn import call as calls
from jattn import device, formats


class UnsupportedError(Exception):
    """A valid call that the named implementations cannot run, with every reason."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes a kernel takes: every multiple of `multiple_of` in `[low, high]`.

    `tested` are the ones the test matrix runs; each must be one that the kernel takes.
    """

    low: int
    high: int
    multiple_of: int
    tested: tuple[int, ...]

    def __post_init__(self) -> None:
        wrong = [size for size in self.tested if size not in self]
        if wrong:
            raise ValueError(f"tested: {wrong}, but must be among {self}")

    def __contains__(self, size: int) -> bool:
        return self.low <= size <= self.high and size % self.multiple_of == 0

    def __str__(self) -> str:
        step = "" if self.multiple_of == 1 else f", multiples of {self.multiple_of}"
        return f"{self.low} to {self.high}{step}"


@dataclasses.dataclass(frozen=True)
class Need:
    """A kernel's requirement of a machine or its packages.

    Attributes:
      text: its description for the table.
      lacks: returns what this machine lacks of it, each with what to do; called to check a call.
    """

    text: str
    lacks: Callable[[], tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Row:
    """The calls that one implementation takes.

    Attributes:
      implementation: its name, as in `implementation=`.
      summary: one line for the table.
      devices: JAX platforms it runs on, or ("any",).
      head_dims, value_dims, block_sizes: sizes of D, V and S.
      query_dtypes: dtypes of the query (and of the output).
      formats: names of cache formats (`Format.name`).
      layouts: cache layouts.
      options: which of `call.OPTIONS` it takes.
      automatic: whether `implementation=None` may choose it.
      differentiable: whether gradients flow to query and plain caches.
      requirements: what it needs beyond its devices and the core dependencies.
      refuses: returns what of a call this machine cannot do, although the kernels could, and what
        cannot be combined.
      prefers_others: returns reasons to leave a call to another row that should be faster; called
        if `implementation` is None.
      may_hang: whether its warps wait for each other, so that a mistake could hang.
      results: the file under benchmarks/results that shows that the test matrix passed on the
        row's hardware; None if there is none yet, or if any machine can run the tests.
      newer: layouts, options and formats that were added after `results`.
    """

    implementation: str
    summary: str
    devices: tuple[str, ...]
    head_dims: Sizes
    value_dims: Sizes
    block_sizes: Sizes
    query_dtypes: tuple[str, ...]
    formats: tuple[str, ...]
    layouts: tuple[str, ...]
    options: tuple[str, ...]
    automatic: bool
    differentiable: bool
    requirements: tuple[Need, ...] = ()
    refuses: Callable[[calls.Call], tuple[str, ...]] = lambda call: ()
    prefers_others: Callable[[calls.Call], tuple[str, ...]] = lambda call: ()
    may_hang: bool = False
    results: str | None = None
    newer: tuple[str, ...] = ()

    def untried(self, call: calls.Call) -> bool:
        """Whether it is for hardware on which calls like this one have not yet run."""
        return self.devices == ("gpu",) and (self.results is None or bool(self._newer(call)))

    def _newer(self, call: calls.Call) -> list[str]:
        """What a call uses that was added after `results`."""
        has = {call.kv_layout, *call.options, call.key_format.name, call.value_format.name}
        return sorted(has & {*self.newer})

    @property
    def needs(self) -> str:
        """A description of its requirements for the table."""
        return ", ".join(need.text for need in self.requirements) or "nothing"

    def missing(self) -> tuple[str, ...]:
        """Describe the requirements that the current machine does not meet."""
        here, found = device.platform(), []
        if "any" not in self.devices and here not in self.devices:
            found.append(f"it runs on {', '.join(self.devices)}, and this is {here}")
        return (*found, *(reason for need in self.requirements for reason in need.lacks()))

    def refusals(self, call: calls.Call) -> list[str]:
        """Return every reason why this implementation cannot run `call`; empty if it can."""
        reasons = [*self.missing(), *self.refuses(call)]
        for name, size, sizes in (
            ("head size D", call.head_dim, self.head_dims),
            ("value size V", call.value_dim, self.value_dims),
            ("block size S", call.block_size, self.block_sizes),
        ):
            if size not in sizes:
                reasons.append(f"{name} is {size}; it takes {sizes}")
        for name, have, takes in (
            ("query dtype", call.query_dtype, self.query_dtypes),
            ("output dtype", call.out_dtype, self.query_dtypes),
            ("key cache format", call.key_format.name, self.formats),
            ("value cache format", call.value_format.name, self.formats),
            ("kv_layout", call.kv_layout, self.layouts),
        ):
            if have not in takes:
                reasons.append(f"{name} is {have}; it takes {', '.join(takes)}")
        reasons += [
            f"option {option} is not supported" for option in sorted(call.options - {*self.options})
        ]
        return reasons

    def automatic_refusals(self, call: calls.Call) -> list[str]:
        """Return every reason why `implementation=None` does not choose it for `call`."""
        reasons = self.refusals(call)
        if not reasons:
            reasons += self.prefers_others(call)
        if self.untried(call) and self.may_hang:
            newer = self._newer(call)
            what = f"with {', '.join(newer)} " if newer and self.results else ""
            reasons.append(
                f"it has not yet run {what}on hardware, where a mistake in it could hang; "
                f"pass implementation={self.implementation!r} to run it anyway"
            )
        return reasons


ALL_FORMATS = tuple(format.name for format in formats.ALL)
FP8_FORMATS = tuple(formats.Fp8(kind).name for kind in formats.Fp8.kinds)


def table(rows: tuple[Row, ...]) -> str:
    """Return the rows as a Markdown table, one column each, then what each is and needs."""

    def names(all_of: Collection[str], some: tuple[str, ...], **words: Collection[str]) -> str:
        """Join the names, with a word replacing the names that it stands for."""
        if set(some) == set(all_of):
            return "all"
        left = dict.fromkeys(some)
        for word, these in words.items():
            if set(these) <= left.keys():
                left = dict.fromkeys((word if name in these else name) for name in left)
        return ", ".join(left)

    def sizes(some: Sizes) -> str:
        return str(some).replace(str(2**20), "2^20").replace(str(2**16), "2^16")

    lines = {
        "": [f"`{row.implementation}`" for row in rows],
        "---": ["---"] * len(rows),
        "runs on": [", ".join(row.devices) for row in rows],
        "head sizes D": [sizes(row.head_dims) for row in rows],
        "value sizes V": [sizes(row.value_dims) for row in rows],
        "block sizes S": [sizes(row.block_sizes) for row in rows],
        "query": [names(calls.QUERY_DTYPES, row.query_dtypes) for row in rows],
        "cache formats": [names(ALL_FORMATS, row.formats, fp8=FP8_FORMATS) for row in rows],
        "layouts": [names(formats.ALL_LAYOUTS, row.layouts) for row in rows],
        "options": [names(calls.OPTIONS, row.options, core=calls.CORE_OPTIONS) for row in rows],
        "gradients": ["yes" if row.differentiable else "no" for row in rows],
    }
    below = [
        f"`fp8` stands for {' and '.join(FP8_FORMATS)}.",
        f"`core` stands for {', '.join(calls.CORE_OPTIONS)}.",
        *(f"`{row.implementation}`: {row.summary}. Needs {row.needs}." for row in rows),
    ]
    return "\n".join(
        [
            *(f"| {' | '.join((name, *cells))} |" for name, cells in lines.items()),
            "",
            *(textwrap.fill(f"- {text}", 118, subsequent_indent="  ") for text in below),
        ]
    )
