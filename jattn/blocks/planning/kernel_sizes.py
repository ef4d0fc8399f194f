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
from collections.abc import Iterable, Mapping, Sequence

from jattn.checks import Problems, checking
from jattn.integers import is_int, keep_python_ints, python_int, require_int


@dataclasses.dataclass(frozen=True)
class MultipleOf:
    """Any multiple of `base` tokens is a kernel block.

    Attributes:
      base: tokens.

    Raises: `ValueError` if `base` is below 1.

    >>> supports_block_size([MultipleOf(16)], 528)
    True
    """

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
    """Return the kernel block that every backend takes, for a block of `block_size` tokens.

    This is the block itself if all backends take it. Otherwise it is the largest size that some
    backend names exactly, that divides the block and that all backends take.

    Args:
      block_size: tokens in a block.
      supported_per_backend: for each backend, the sizes it takes; a mapping names the backends.

    Returns: the kernel block size, a divisor of `block_size`; `block_size` without backends.
    Raises: `ValueError` if there is none, with one line per backend: what it takes, and why that
      does not fit. Also for a size that is neither a positive integer nor a `MultipleOf`.

    >>> select_kernel_block_size(528, {"flash": [MultipleOf(16)], "infer": [16, 32, 64]})
    16
    """
    with checking("select_kernel_block_size") as problems:
        require_int(problems, "block_size", block_size, 1)
        named = named_backends(problems, "supported_per_backend", supported_per_backend)
    found = _common_kernel_block(block_size, named)
    if found is not None:
        return found
    raise ValueError(
        f"block_size: no kernel block divides {block_size} and suits every backend"
        + "".join(f"\n  - {name} {_verdict(sizes, block_size)}" for name, sizes in named.items())
    )


def supports_block_size(sizes: KernelSizes, block_size: int) -> bool:
    """Return whether a backend can read blocks of this size, cut into kernel blocks if need be.

    Args:
      sizes: the kernel blocks that the backend takes; empty for any.
      block_size: tokens in a block.

    Returns: whether some size that the backend takes divides the block, or it states none.
    Raises: `ValueError` if `block_size` is below 1, or for a size that is neither a positive
      integer nor a `MultipleOf`.

    >>> supports_block_size([32, MultipleOf(48)], 96), supports_block_size([32], 48)
    (True, False)
    """
    with checking("supports_block_size") as problems:
        require_int(problems, "block_size", block_size, 1)
        known = _known_sizes(problems, "sizes", sizes)
    return _supports(known, block_size)


def preferred_block_size(sizes: KernelSizes, default: int) -> int:
    """Return `default` if the backend can read it, else the smallest size that the backend takes.

    Args:
      sizes: the kernel blocks that the backend takes; empty for any.
      default: tokens in the block to take if possible.

    Returns: a block size in tokens.
    Raises: `ValueError` if `default` is below 1, or for a size that is neither a positive integer
      nor a `MultipleOf`.

    >>> preferred_block_size([MultipleOf(16)], 48), preferred_block_size([64, 32], 48)
    (48, 32)
    """
    with checking("preferred_block_size") as problems:
        require_int(problems, "default", default, 1)
        known = _known_sizes(problems, "sizes", sizes)
    return default if _supports(known, default) else smallest_size(known)


def preferred_common_block_size(
    supported_per_backend: Backends, default: int, *, as_vllm: bool = False
) -> int:
    """Return `default` if every backend can read it, else the smallest block that all can read.

    The candidates are the least common multiples of one size per backend.

    Args:
      supported_per_backend: for each backend, the sizes it takes; a mapping names the backends.
      default: the block to take if possible.
      as_vllm: only ask that each backend has some size that divides the block, as vLLM does, not
        that all of them share a kernel block. For [MultipleOf(32)] and [16, 64] this gives 32,
        which cannot be cut into a kernel block for both, instead of 64.

    Returns: a block size in tokens.
    Raises: `ValueError` if the backends share none, if `default` is below 1, or for a size that is
      neither a positive integer nor a `MultipleOf`.

    >>> backends = {"prefill": [MultipleOf(32)], "decode": [16, 64]}
    >>> preferred_common_block_size(backends, 16)
    64
    """
    with checking("preferred_common_block_size") as problems:
        require_int(problems, "default", default, 1)
        named = named_backends(problems, "supported_per_backend", supported_per_backend)
    return common_block_size("supported_per_backend", named, default, as_vllm=as_vllm)


def common_block_size(
    argument: str, named: Mapping[str, KernelSizes], default: int, *, as_vllm: bool = False
) -> int:
    """Return the block size of `preferred_common_block_size`, for backends that were checked.

    An error says that they are the caller's `argument`.
    """
    stated = [sizes for sizes in named.values() if sizes]
    candidates = {math.lcm(*map(_base, picked)) for picked in itertools.product(*stated)}
    for size in (default, *sorted(candidates)):
        if as_vllm and all(_supports(sizes, size) for sizes in stated):
            return size
        if not as_vllm and _common_kernel_block(size, named) is not None:
            return size
    raise ValueError(
        f"{argument}: the backends share no block size"
        + "".join(f"\n  - {name} takes {list(sizes)}" for name, sizes in named.items())
    )


def smallest_size(sizes: KernelSizes) -> int:
    """Return the smallest size or granularity that a backend names; 1 if it names none."""
    return min(map(_base, sizes), default=1)


def takes(sizes: KernelSizes, kernel_block_size: int) -> bool:
    """Return whether a backend reads kernel blocks of exactly this size."""
    return any(
        kernel_block_size % size.base == 0
        if isinstance(size, MultipleOf)
        else kernel_block_size == size
        for size in sizes
    )


def named_backends(
    problems: Problems, argument: str, backends: Backends
) -> dict[str, tuple[int | MultipleOf, ...]]:
    """Return the backends by name, or as `backend 0`, `backend 1`, ...; note wrong sizes."""
    if not isinstance(backends, Iterable):
        problems.expect(False, argument, backends, "the sizes that each backend takes")
        return {}
    if isinstance(backends, Mapping):
        given = {str(name): sizes for name, sizes in backends.items()}
    else:
        given = {f"backend {i}": sizes for i, sizes in enumerate(backends)}
    return {
        name: _known_sizes(problems, argument, sizes, f"{name} has ")
        for name, sizes in given.items()
    }


def _known_sizes(
    problems: Problems, argument: str, sizes: KernelSizes, prefix: str = ""
) -> tuple[int | MultipleOf, ...]:
    """Return sizes as a tuple; note wrong ones."""
    if not isinstance(sizes, Iterable):
        problems.add(
            argument, f"{prefix}{sizes!r}", "a list of positive integers and MultipleOf(n)"
        )
        return ()
    known = tuple(map(python_int, sizes))
    for size in known:
        problems.require(
            isinstance(size, MultipleOf) or is_int(size, 1),
            argument,
            f"{prefix}{size!r}",
            "a positive integer or MultipleOf(n)",
        )
    return known


def _supports(sizes: KernelSizes, block_size: int) -> bool:
    """Return whether some size divides the block, or there are none."""
    return not sizes or any(block_size % _base(size) == 0 for size in sizes)


def _common_kernel_block(block_size: int, named: Mapping[str, KernelSizes]) -> int | None:
    """Return the kernel block that `select_kernel_block_size` describes, or None."""
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
