"""Which kernel block a block size can be cut into, given what each backend can read.

A backend states the kernel blocks it takes as exact sizes (`32`) and granularities
(`MultipleOf(16)`). A group's block is cut once for all the backends that read it, so the kernel
block must suit every one of them and divide the block.

The choices are vLLM's (`select_common_block_size`, `get_preferred_block_size` and
`supports_block_size` of 0.23 and 0.32), where a choice exists. Errors name every backend.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from jattn.checks import Problems, checking
from jattn.integers import is_int, keep_python_ints, python_int, require_int


@dataclasses.dataclass(frozen=True)
class MultipleOf:
    """Any multiple of `base` tokens is a kernel block."""

    base: int

    def __post_init__(self) -> None:
        keep_python_ints(self)
        with checking("MultipleOf") as problems:
            require_int(problems, "base", self.base, 1)

    def __repr__(self) -> str:
        return f"MultipleOf({self.base})"


KernelSizes = Sequence[int | MultipleOf]
Backends = Mapping[str, KernelSizes] | Sequence[KernelSizes]


def select_kernel_block_size(block_size: int, supported_per_backend: Backends) -> int:
    """The kernel block for a block of `block_size` tokens: the largest that every backend takes.

    The block itself if all backends take it; else the largest size that some backend names
    exactly, that divides the block and that all backends take.

    Args:
      block_size: tokens in a block.
      supported_per_backend: for each backend, the sizes it takes; a mapping names the backends.

    Returns: the kernel block size, a divisor of `block_size`; without backends, the block.
    Raises: `ValueError` if there is none, with one line per backend: what it takes, and why that
      does not fit; or if a size is neither an integer nor a `MultipleOf`.

    >>> select_kernel_block_size(528, {"flash": [MultipleOf(16)], "infer": [16, 32, 64]})
    16
    """
    with checking("select_kernel_block_size") as problems:
        require_int(problems, "block_size", block_size, 1)
        named = named_backends(supported_per_backend, problems)
    found = _common_kernel_block(block_size, named)
    if found is not None:
        return found
    raise ValueError(
        f"block_size: no kernel block divides {block_size} and suits every backend"
        + "".join(f"\n  - {name} {_verdict(sizes, block_size)}" for name, sizes in named.items())
    )


def supports_block_size(sizes: KernelSizes, block_size: int) -> bool:
    """Whether a backend can read blocks of this size, cut into kernel blocks if need be.

    True if some size it takes divides the block, or if it states none.
    """
    return not sizes or any(block_size % _base(size) == 0 for size in sizes)


def preferred_block_size(sizes: KernelSizes, default: int) -> int:
    """`default` if the backend can read it, else the smallest size that the backend takes."""
    sizes = tuple(sizes)
    return default if supports_block_size(sizes, default) else smallest_size(sizes)


def preferred_common_block_size(
    supported_per_backend: Backends, default: int, *, as_vllm: bool = False
) -> int:
    """`default` if every backend can read it, else the smallest block that all can read.

    The candidates are least common multiples of one size per backend.

    Args:
      supported_per_backend: for each backend, the sizes it takes; a mapping names the backends.
      default: the block to take if possible.
      as_vllm: ask of each backend that some size divides the block, as vLLM does, and not that all
        of them share a kernel block: of [multiples of 32] and [16, 64] it takes 32, which no kernel
        block divides, and not 64.

    Raises: `ValueError` if the backends share none.
    """
    with checking("preferred_common_block_size") as problems:
        require_int(problems, "default", default, 1)
        named = named_backends(supported_per_backend, problems)
    stated = [sizes for sizes in named.values() if sizes]
    candidates = {math.lcm(*map(_base, picked)) for picked in itertools.product(*stated)}
    for size in (default, *sorted(candidates)):
        if as_vllm and all(supports_block_size(sizes, size) for sizes in stated):
            return size
        if not as_vllm and _common_kernel_block(size, named) is not None:
            return size
    raise ValueError(
        "supported_per_backend: the backends share no block size"
        + "".join(f"\n  - {name} takes {list(sizes)}" for name, sizes in named.items())
    )


def smallest_size(sizes: KernelSizes) -> int:
    """The smallest size or granularity a backend names; 1 if it names none."""
    return min(map(_base, sizes), default=1)


def takes(sizes: KernelSizes, kernel_block_size: int) -> bool:
    """Whether a backend reads kernel blocks of this very size."""
    return any(
        kernel_block_size % size.base == 0
        if isinstance(size, MultipleOf)
        else kernel_block_size == size
        for size in sizes
    )


def named_backends(
    backends: Backends, problems: Problems
) -> dict[str, tuple[int | MultipleOf, ...]]:
    """The backends under their names, or as `backend 0`, `backend 1`, ...; sizes checked."""
    if isinstance(backends, Mapping):
        named = {str(name): tuple(map(python_int, sizes)) for name, sizes in backends.items()}
    else:
        named = {f"backend {i}": tuple(map(python_int, sizes)) for i, sizes in enumerate(backends)}
    for name, sizes in named.items():
        for size in sizes:
            problems.require(
                isinstance(size, MultipleOf) or is_int(size, 1),
                "supported_per_backend",
                f"{name} has {size!r}",
                "a positive integer or MultipleOf(n)",
            )
    return named


def _common_kernel_block(block_size: int, named: Mapping[str, KernelSizes]) -> int | None:
    """The largest kernel block that divides the block and that every backend takes."""
    exact = (size for sizes in named.values() for size in sizes if not isinstance(size, MultipleOf))
    for size in (block_size, *sorted(exact, reverse=True)):
        if block_size % size == 0 and all(takes(sizes, size) for sizes in named.values()):
            return size
    return None


def _base(size: int | MultipleOf) -> int:
    return size.base if isinstance(size, MultipleOf) else size


def _verdict(sizes: KernelSizes, block_size: int) -> str:
    if not sizes:
        return "takes no size at all"
    if takes(sizes, block_size):
        return f"takes {list(sizes)}: {block_size} suits it, but not all the others"
    divisors = [size for size in sizes if block_size % _base(size) == 0]
    if not divisors:
        return f"takes {list(sizes)}: none of them divides {block_size}"
    return f"takes {list(sizes)}: {divisors} would divide {block_size}, but do not suit the others"
