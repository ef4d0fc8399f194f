"""Products of linear layers and of experts in C++, which XLA calls on a CPU: `product.cc`.

XLA's own products copy one operand to another layout in every call. These read weights in place,
with AVX-512 or AVX2, and in bfloat16 with the matrix unit (AMX) if there is one. Products of 8
layers of Qwen3-0.6B on two cores of a Xeon, in milliseconds, first XLA's (JAX 0.12), then these
(float32 of up to 16 tokens before the current blocking; docs/performance-serving.md also has other
machines):

    tokens       1            8            16            64            96           256
    bfloat16  13.5  11.0   12.6  11.0   13.5  10.8   23.8  14.6   28.0  19.1   52.8  40.9
    float32   21.2  19.3   27.3  22.0   30.5  29.2   69.3  59.7    103  79.5    233   217

Within a step, one token in float32 is no faster here, so XLA computes it.

`load` compiles the source once for the installed JAX, if the processor has the instructions and
there is a compiler. Until it is called, as the server does (`examples/engine/serve.py`), XLA
computes all products.
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
# Features that a processor must have, as /proc/cpuinfo names them.
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
LEAST_FLOAT32 = 2  # tokens: for one, a step of the engine is as fast with XLA, or faster
OUTPUTS, BYTES = 32, 64  # outputs, and bytes of a row, must be multiples of these

_taken: list[str] = []  # dtypes, once the library is loaded
_instructions = ""  # of the loaded library
_tiles = False  # whether the matrix unit multiplies bfloat16


def load(folder: Path | None = None) -> str | None:
    """Compile the library unless it exists, and use it for products from now on.

    Args:
      folder: the library's folder, which only this user may write; None: `default_folder()`.

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
        return str(error)  # RuntimeError means that there is no home directory
    _instructions = instructions_of(features)
    for name in (TARGET, GROUPED):
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(target(name), handler, platform="cpu")
    _tiles = bool(features >= WIDE | TILES and library.examples_product_tiles())
    pairs = _instructions == "avx2" or features >= PAIRS
    _taken.extend(("float32", "bfloat16") if pairs else ("float32",))
    return None


def target(name: str = TARGET) -> str:
    """Return the name of the loaded library's products in XLA."""
    return f"{name}_{_instructions}"


def instructions_of(features: set[str]) -> str:
    """Return the key of `INSTRUCTIONS` for a processor with these features."""
    return "avx512" if features >= WIDE else "avx2"


def processor_features() -> set[str]:
    """Return the first core's features by Linux's names; none on other systems or processors."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return set()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def default_folder() -> Path:
    """Return the folder of libraries in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jattn" / "native"


def compiler() -> list[str]:
    """Return the command of a C++ compiler: $CXX if set, else g++ or clang++.

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
    """Return the library of this source for this JAX, compiling it unless it exists.

    Raises:
      OSError: there is no compiler, the folder cannot be written, or other users may write to it.
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
    """Raise PermissionError if another user owns a library's file or folder, or may write it."""
    found, user = path.stat(), os.geteuid()
    if found.st_uid != user or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(
            f"{path} is owned by user {found.st_uid} and has mode {mode:03o}, but must be owned by "
            f"user {user}, and neither its group nor others may write it"
        )


def takes(x: jax.Array, weight: jax.Array) -> bool:
    """Whether `product` is loaded and can compute `x @ weight.T`, except one token in float32.

    For weights [E, out, in], whether `grouped_product` can.
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
    """Compute `x @ weight.T` [T, out] in `dtype`: sums in float32, rounded once.

    Args:
      x: [T, in], float32 or bfloat16.
      weight: [out, in] in x's dtype, which `takes` accepts with x.
      dtype: x's, or float32.
      columns: store the result in memory as [out, T], in float32.
      rows: int32 [], how many of x's first rows to multiply; the result has zeros for the others.
        None: all.
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
    """Multiply each run of x's rows with its matrix: [n, out], summed in float32, rounded once.

    Args:
      x: [n, in], float32 or bfloat16: the rows of matrix 0 first, then those of matrix 1, ...
      weights: [E, out, in] in x's dtype, which `takes` accepts with x.
      counts: int32 [E], the runs' lengths; the result has zeros for rows after the last run.
      dtype: of the result: x's, or float32.
    """
    result = jax.ShapeDtypeStruct((len(x), weights.shape[1]), dtype)
    return _call(target(GROUPED), result)(x, weights, counts, tiles=np.int64(_tiles))


@functools.cache
def _call(target: str, result: jax.ShapeDtypeStruct):
    return jax.ffi.ffi_call(target, result, vmap_method="sequential")


def _open(folder: Path) -> ctypes.CDLL:
    """Open the library, compiling it again if it is broken, such as after a power failure.

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
        _ctypes.dlclose(library._handle)  # otherwise the next library of this name is not opened
        raise
    return library
