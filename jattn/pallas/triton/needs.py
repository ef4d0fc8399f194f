"""What the Triton kernels need from a machine and its packages, and which calls they refuse."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from typing import NamedTuple

from jattn import call as calls
from jattn import formats
from jattn.integers import INT32_MAX
from jattn.pallas import machine


class Triton(NamedTuple):
    """The versions of Triton with which a version of jax-triton compiled the kernels."""

    lowest: tuple[int, int]
    highest: tuple[int, int]
    wanted: str  # the one to install


# By version of jax-triton. 0.3.1 was tried with jax 0.10.2, 0.11.2 and 0.12 and, from jax 0.11 on,
# also with Triton 3.7 and 3.9; 0.4.1 with jax 0.12.
TRITON = {
    "0.3.1": Triton((3, 6), (3, 9), wanted="3.6.0"),
    "0.4.1": Triton((3, 9), (3, 9), wanted="3.9.0"),
}
JAX_TRITON = "0.3.1"  # the one to install: it runs on every JAX and Python that jattn supports
LOWEST_SM = 80
UNPACKED = ("e4m3", "int8", "int4", "e2m1")  # codes that kernels load four bytes at a time
TREE_WORDS = 8  # the most in a tree's mask: each adds instructions to a kernel
E4M3_SM = 89  # the lowest that converts e4m3; below it the kernels do


def gpu_lacks() -> tuple[str, ...]:
    """Return why the current GPU cannot run the kernels; empty if it can, or if there is none."""
    gpu = machine.here()
    if gpu is not None and gpu.sm < LOWEST_SM:
        return (f"it takes sm_{LOWEST_SM} and up, and this is sm_{gpu.sm}",)
    return machine.not_nvidia()


def installed_lack() -> tuple[str, ...]:
    """Return `packages_lack` of the installed packages."""
    return packages_lack(*map(_version, ("jax-triton", "triton", "jax-cuda13-plugin")))


def packages_lack(
    jax_triton: str | None, triton: str | None, plugin: str | None
) -> tuple[str, ...]:
    """Return problems with the installed versions; a version is None if it is not installed."""
    extra = "cuda12" if plugin is None else "cuda13"
    if jax_triton is None:
        return (f"jax-triton is not installed: pip install 'jattn[{extra}]'",)
    found = []
    if jax_triton not in TRITON:
        found.append(
            f"jax-triton is {jax_triton}; it takes {' or '.join(TRITON)}: "
            f"pip install jax-triton=={JAX_TRITON}"
        )
    lowest, highest, wanted = TRITON.get(jax_triton, TRITON[JAX_TRITON])
    if triton is None:
        found.append(f"triton is not installed: pip install triton=={wanted}")
    elif not lowest <= tuple(int(n) for n in triton.split(".")[:2]) <= highest:
        low, high = (".".join(map(str, version)) for version in (lowest, highest))
        takes = low if low == high else f"{low} to {high}"
        found.append(f"triton is {triton}; it takes {takes}: pip install triton=={wanted}")
    return tuple(found)


def codes_of(format: formats.Format, sm: int) -> str:
    """The CODES of a format's words in `pools.numbers_of`; "" for numbers in Triton's dtype."""
    is_e4m3 = format.triton_dtype == "float8e4nv"
    return "e4m3" if is_e4m3 and sm < E4M3_SM else format.triton_codes


def numbers_of_four_bytes(format: formats.Format) -> int:
    """Return how many numbers kernels load at a time, of a format that they unpack."""
    return 4 // format.word_dtype.itemsize * format.values_per_word


def refuses(call: calls.Call) -> tuple[str, ...]:
    """Return why the kernels cannot run a call although they support each of its parts."""
    reasons, gpu = [], machine.here()
    sm = E4M3_SM if gpu is None else gpu.sm
    for name, size, format in (
        ("head size D", call.head_dim, call.key_format),
        ("value size V", call.value_dim, call.value_format),
    ):
        if codes_of(format, sm) not in UNPACKED:
            continue
        if call.rows is not None:  # whose strides are in numbers, not in words of four bytes
            reasons.append(
                f"kv_layout is rows and the cache format {format.name}, which needs "
                f"sm_{E4M3_SM} and up, and this is sm_{sm}; it takes fp8_e5m2"
            )
            break
        count = numbers_of_four_bytes(format)
        if size % count:
            reasons.append(f"{name} is {size} in {format.name}; it takes multiples of {count}")
    if call.tree_words > TREE_WORDS:
        reasons.append(
            f"tree_mask has bits for {32 * call.tree_words} query tokens; it takes up to "
            f"{32 * TREE_WORDS}; draft tokens past these must form a chain"
        )
    widest = max(call.head_dim, call.value_dim)
    if call.kv_layout == "HND" and (call.num_kv_heads - 1) * call.block_size * widest > INT32_MAX:
        reasons.append(
            f"a block has {call.num_kv_heads} KV heads of {call.block_size} tokens and {widest} "
            "numbers; in HND a head's offset must fit int32: use kv_layout='NHD'"
        )
    return tuple(reasons)


@functools.cache
def _version(package: str) -> str | None:
    """Return the installed version of a package, or None. Imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
