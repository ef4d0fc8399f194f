"""Products of linear layers and of experts in C++, which XLA calls on a CPU: `product.cc`.

XLA's own products copy one operand to another layout in every call. This one reads weights where
they lie, by AVX-512 or AVX2, and in bfloat16 by the matrix unit (AMX) where there is one. The 8
layers' products of Qwen3-0.6B on two cores of a Xeon, milliseconds with XLA's (JAX 0.12) and with
these (float32 of up to 16 tokens before it was blocked as it is now; docs/performance-serving.md
has other machines', too):

    tokens       1            8            16            64            96           256
    bfloat16  13.5  11.0   12.6  11.0   13.5  10.8   23.8  14.6   28.0  19.1   52.8  40.9
    float32   21.2  19.3   27.3  22.0   30.5  29.2   69.3  59.7    103  79.5    233   217

Between a step's other operations one token gains nothing in float32, so XLA has it.

`load` compiles the source for the JAX that is installed, once, if the processor has what it takes
and there is a compiler; until it is called, as the server does (`examples/engine/serve.py`),
nothing is taken.
"""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from jattn.cpu.native.build import SOURCES

SOURCE = Path(__file__).parent / "product.cc"
HEADERS = (
    *(SOURCE.with_name(name) for name in ("product.h", "avx512.h", "avx2.h")),
    *(SOURCES / name for name in ("cores.h", "matrix.h", "vectors.h")),
)
TARGET, GROUPED = "examples_product", "examples_grouped"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-math-errno")
FLAGS += ("-pthread", "-Wno-psabi")
# What a processor must have, as /proc/cpuinfo names it.
LEAST = {"avx2", "fma"}
WIDE = LEAST | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
PAIRS, TILES = {"avx512_bf16"}, {"amx_tile", "amx_bf16"}
INSTRUCTIONS = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": (
        *("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
        *("-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
}
LEAST_FLOAT32 = 2  # tokens: for one, a step of the engine takes as long with XLA's, or less
OUTPUTS, BYTES = 32, 64  # what outputs, and bytes of a row, must be multiples of

_taken: list[str] = []  # dtypes, once it is loaded
_instructions = ""  # of the library that is loaded
_tiles = False  # bfloat16 is multiplied by the matrix unit


def load(folder: Path | None = None) -> str | None:
    """Compile the library if that was not done before, and take products from now on.

    Args:
      folder: where the library is kept, which only this user may write; None: `default_folder()`.

    Returns: why XLA computes all products, or None.
    """
    global _instructions, _tiles
    if _taken:
        return None
    features = processor_features()
    if not features >= LEAST:
        return "the processor has no AVX2, or this is not Linux on x86-64"
    try:
        library = _open(default_folder() if folder is None else folder)
    except subprocess.CalledProcessError as error:
        return f"the C++ compiler failed: {error.stderr.strip()[-300:]}"
    except (OSError, AttributeError, subprocess.SubprocessError, RuntimeError) as error:
        return str(error)  # a RuntimeError: there is no home directory
    _instructions = instructions_of(features)
    for name in (TARGET, GROUPED):
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(target(name), handler, platform="cpu")
    _tiles = bool(features >= WIDE | TILES and library.examples_product_tiles())
    pairs = _instructions == "avx2" or features >= PAIRS
    _taken.extend(("float32", "bfloat16") if pairs else ("float32",))
    return None


def target(name: str = TARGET) -> str:
    """The name of the loaded library's products in XLA."""
    return f"{name}_{_instructions}"


def instructions_of(features: set[str]) -> str:
    """The key of `INSTRUCTIONS` for a processor with these features."""
    return "avx512" if features >= WIDE else "avx2"


def processor_features() -> set[str]:
    """Of the first core, as Linux names them; none on another system or kind of processor."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return set()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def default_folder() -> Path:
    """The folder of libraries, under the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jattn" / "native"


def compiler() -> list[str]:
    """The command of a C++ compiler: $CXX where it is set, else g++ or clang++.

    Raises:
      FileNotFoundError: there is none.
    """
    value = os.environ.get("CXX")
    if value is None:
        for name in ("g++", "clang++"):
            if shutil.which(name):
                return [name]
        raise FileNotFoundError("there is no C++ compiler: neither g++ nor clang++, nor $CXX")
    try:
        command = shlex.split(value)
    except ValueError:  # an open quotation mark
        command = []
    if not command or not shutil.which(command[0]):
        raise FileNotFoundError(f"CXX is {value!r}, but must be a compiler's command")
    return command


def build(folder: Path) -> Path:
    """The library of this source for this JAX, compiled unless it is there.

    Raises:
      OSError: there is no compiler, the folder cannot be written, or others may write in it.
      subprocess.SubprocessError: the compiler failed.
    """
    sources = b"".join(path.read_bytes() for path in (SOURCE, *HEADERS))
    flags = FLAGS + INSTRUCTIONS[instructions_of(processor_features())]
    digest = hashlib.sha256(sources + repr((flags, jaxlib.__version__)).encode())
    library = folder / f"product-{digest.hexdigest()[:16]}.so"
    if library.exists():
        _check_private(folder)
        _check_private(library)
        return library
    command = compiler()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder)
    include = ("-I", str(SOURCES), "-isystem", jax.ffi.include_dir())
    scratch = Path(tempfile.mkdtemp(dir=folder))  # several may compile at once
    try:
        made = scratch / library.name
        command += [*flags, *include, str(SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        made.chmod(0o700)
        os.replace(made, library)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return library


def _check_private(path: Path) -> None:
    """Raise PermissionError if another user owns what a library is loaded from, or may write it."""
    found, user = path.stat(), os.geteuid()
    if found.st_uid != user or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(
            f"{path} is owned by user {found.st_uid} and has mode {mode:03o}, but must be owned by "
            f"user {user}, and neither its group nor others may write it"
        )


def takes(x: jax.Array, weight: jax.Array) -> bool:
    """Whether `product` is loaded and can compute `x @ weight.T`; XLA has one token in float32.

    Of weights [E, out, in], whether `grouped_product` can.
    """
    several = weight.ndim == 3
    return (
        x.dtype == weight.dtype
        and x.dtype.name in _taken
        and x.ndim == 2
        and weight.ndim in (2, 3)
        and weight.shape[-2] % OUTPUTS == 0
        and weight.shape[-1] * weight.dtype.itemsize % BYTES == 0
        and (several or x.dtype == jnp.bfloat16 or len(x) >= LEAST_FLOAT32)
    )


def product(
    x: jax.Array,
    weight: jax.Array,
    dtype: jnp.dtype,
    *,
    columns: bool = False,
    rows: jax.Array | None = None,
) -> jax.Array:
    """`x @ weight.T` [T, out] in `dtype`: sums in float32, rounded once.

    Args:
      x: [T, in], float32 or bfloat16.
      weight: [out, in] in x's dtype, which `takes` accepts with x.
      dtype: x's, or float32.
      columns: the result lies in memory as [out, T], in float32.
      rows: int32 [], how many rows of x to multiply, the first ones; the result has zeros for the
        others. None: all.
    """
    num_tokens, num_out = len(x), len(weight)
    shape = (num_out, num_tokens) if columns else (num_tokens, num_out)
    result = jax.ShapeDtypeStruct(shape, dtype)
    count = jnp.int32(num_tokens) if rows is None else rows
    options = {"tiles": np.int64(_tiles), "transposed": np.int64(columns)}
    y = _call(target(), result)(x, weight, count, **options)
    return y.T if columns else y


def grouped_product(
    x: jax.Array, weights: jax.Array, counts: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Each run of rows of x times its matrix [n, out] in `dtype`: sums in float32, rounded once.

    Args:
      x: [n, in], float32 or bfloat16: the rows of matrix 0 first, then those of matrix 1, ...
      weights: [E, out, in] in x's dtype, which `takes` accepts with x.
      counts: int32 [E], the runs' lengths; the result has zeros for rows after the last run.
      dtype: x's, or float32.
    """
    result = jax.ShapeDtypeStruct((len(x), weights.shape[1]), dtype)
    return _call(target(GROUPED), result)(x, weights, counts, tiles=np.int64(_tiles))


@functools.cache
def _call(target: str, result: jax.ShapeDtypeStruct):
    return jax.ffi.ffi_call(target, result, vmap_method="sequential")


def _open(folder: Path) -> ctypes.CDLL:
    """The library, compiled again if it is broken, as after a loss of power.

    Raises:
      AttributeError, OSError, subprocess.SubprocessError: it cannot be compiled or opened.
    """
    path = build(folder)
    try:
        return _with_symbols(path)
    except (AttributeError, OSError):
        path.unlink(missing_ok=True)
    return _with_symbols(build(folder))


def _with_symbols(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    try:
        _ = library.examples_product, library.examples_grouped, library.examples_product_tiles
    except AttributeError:
        _ctypes.dlclose(library._handle)  # or the next library of this name would not be opened
        raise
    return library
