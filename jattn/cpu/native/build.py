"""Build the native kernel's shared library: `python -m jattn.cpu.native [--all]`.

A wheel's library has every instruction set of its architecture. A library built where it is used
has only that machine's newest, which takes less time to compile.

This file imports only the standard library, so that an installer can run it before JAX is there.
The library is plain C++17 without libpython: one file serves every Python. `include` has copies of
the FFI headers of the oldest supported JAX, because a library built with newer ones stops an older
JAX's whole CPU backend.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib.util
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection

HERE = pathlib.Path(__file__).parent
SOURCES = HERE / "src"
LIBRARY = HERE / "lib" / "libjattn_native.so"  # in a separate folder: not an extension module
COMMAND = "python -m jattn.cpu.native"
PER_SET_SOURCES = ("kernel", "few_rows")  # compiled once for each instruction set

_FLAGS = (
    *("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-unknown-pragmas"),
    "-Werror=switch",  # a format missing from a switch
)
# The parts of GCC's -O3 that make the kernel faster; all of it takes half as long again to compile.
_GCC = ("-O2", "-fvect-cost-model=dynamic", "-fipa-cp-clone")
# Replaces an instruction set that is not compiled: has its name, or null if the compiler lacks it.
_LEFT_OUT = """#include "problem.h"
namespace jattn_native {{
Kernels kernels_{}() {{ return {{{}, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr}}; }}
}}
"""
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_X86 = {
    "base": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512vbmi", "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512vbmi", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
# Without flags Zig compiles for the machine it runs on; a wheel's library must run on others too.
_ZIG_BASE = ("-mcpu=baseline",)
# What old compilers fail at: the vector extension as the sources use it, atomics, linking.
_PROBE = """#include <atomic>
#include "vectors.h"
extern "C" float probe(const float* x) {
  static std::atomic<int> calls;
  return ++calls + jattn_native::sum(jattn_native::read<jattn_native::Floats>(x));
}
"""
# The features that Linux lists for a processor with an instruction set.
_AVX512_FEATURES = {"avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
_FEATURES = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": _AVX512_FEATURES,
    "avx512bf16": _AVX512_FEATURES | {"avx512vbmi", "avx512_bf16"},
    "amx": _AVX512_FEATURES | {"avx512vbmi", "avx512_bf16", "amx_tile", "amx_bf16"},
    "bf16": {"bf16"},
}


class BuildError(Exception):
    """The library could not be built; the message says why."""


def instruction_sets(machine: str, command: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the instruction sets of one library: their names, with the compiler's flags.

    Raises:
      BuildError: there is no kernel for `machine`, a name from `platform.machine()`.
    """
    zig = any("zig" in pathlib.Path(word).name for word in command)
    base = _ZIG_BASE if zig else ()
    if machine.lower() in ("x86_64", "amd64"):
        return _X86 | {"base": base}
    if machine.lower() not in ("aarch64", "arm64"):
        raise BuildError(f"no native kernel for {machine}: it needs x86-64 or 64-bit ARM")
    return {"base": base, "bf16": ("-mcpu=generic+bf16" if zig else "-march=armv8.2-a+bf16",)}


def is_supported() -> bool:
    """Whether there is a kernel for this machine."""
    machines = ("x86_64", "amd64", "aarch64", "arm64")
    return sys.platform != "win32" and platform.machine().lower() in machines


def newest_here(
    command: list[str], processor: pathlib.Path = pathlib.Path("/proc/cpuinfo")
) -> str | None:
    """Return the newest of `instruction_sets` of processor and compiler; None if not known."""
    sets = instruction_sets(platform.machine(), command)
    try:
        lines = processor.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            have = [name for name in sets if _FEATURES.get(name, set()) <= {*words.split()}]
            return next(
                name for name in reversed(have) if name == "base" or _knows(command, sets[name])
            )
    return None


def build_here(library: pathlib.Path = LIBRARY, extra: tuple[str, ...] = ()) -> None:
    """Compile this machine's newest instruction set, or all if it is not known or does not run.

    Raises:
      BuildError: as in `build`.
    """
    newest = newest_here(compiler())
    build(library, extra, None if newest is None else (newest,))
    if newest is not None and not _said(library, "isas"):  # a container may hide what Linux lists
        build(library, extra)


def stamp() -> str:
    """Return a digest of the sources next to this file, which a library must be built from."""
    digest = hashlib.sha256()
    sources = (path for path in SOURCES.iterdir() if path.suffix in (".cc", ".h"))
    for path in sorted((*sources, *(HERE / "include").rglob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def is_current(library: pathlib.Path = LIBRARY) -> bool:
    """Whether the library was built from these sources, with the newest set that runs here."""
    try:
        return (
            _said(library, "stamp") == stamp()
            and bool(_said(library, "isas"))
            and not _said(library, "left_out")
        )
    except (AttributeError, OSError):
        return False


def _said(library: pathlib.Path, what: str) -> str:
    """Ask a library about itself, in another process: this one would keep it loaded."""
    code = (
        "import ctypes, sys; f = getattr(ctypes.CDLL(sys.argv[1]), 'jattn_native_' + sys.argv[2]); "
        "f.restype = ctypes.c_char_p; print(f().decode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(library.resolve()), what], capture_output=True, text=True
    )
    if done.returncode:
        raise OSError(done.stderr)
    return done.stdout.strip()


def compiler() -> list[str]:
    """Return the command of a C++ compiler: $CXX, one on the PATH that works, or ziglang's.

    Raises:
      BuildError: none works, with the reason for each; or $CXX is not the command of one.
    """
    if given := os.environ.get("CXX"):
        try:
            command = shlex.split(given)
        except ValueError as error:
            raise BuildError(f"CXX is {given!r}, but must be a command: {error}") from None
        if not command or shutil.which(command[0]) is None:
            raise BuildError(f"CXX is {given!r}, but must be the command of a C++ compiler")
        return command
    reasons = []
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            try:
                _probe([name])
            except BuildError as error:
                reasons.append(f"{name} cannot compile it ({str(error).splitlines()[0]})")
            else:
                return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    if reasons:
        advice = "install a newer g++ or clang++, or pip install ziglang"
        raise BuildError("; ".join((*reasons, advice)))
    raise BuildError("no C++ compiler: install g++ or clang++, or pip install ziglang")


def _probe(command: list[str]) -> None:
    """Compile and link a small shared library; raise BuildError where that fails."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "probe.cc")
        source.write_text(_PROBE)
        flags = (*_FLAGS, "-I", str(SOURCES), "-shared", "-pthread")
        _run([*command, *flags, str(source), "-o", str(source.with_suffix(".so"))])


def optimization(command: list[str]) -> tuple[str, ...]:
    """Return the optimization flags for the compiler that `command` starts."""
    with tempfile.NamedTemporaryFile(suffix=".cc") as nothing:
        defined = _run([*command, "-dM", "-E", nothing.name])
    return ("-O3",) if "__clang__" in defined else _GCC


def build(
    library: pathlib.Path = LIBRARY,
    extra: tuple[str, ...] = (),
    only: Collection[str] | None = None,
) -> None:
    """Compile the sources into `library`, replacing it in one step.

    Args:
      library: where the shared library goes.
      extra: more flags for compiling and linking, such as sanitizers.
      only: instruction sets to compile; None for all. A machine that has others uses the newest of
        these.

    Raises:
      BuildError: no compiler, an unknown machine, or the compiler's error.
    """
    command = compiler()
    sets = instruction_sets(platform.machine(), command)
    if sys.platform == "win32":
        raise BuildError("no native kernel for Windows")
    of_machine = "-DJATTN_X86" if "avx2" in sets else "-DJATTN_ARM"
    flags = (*_FLAGS, *optimization(command), of_machine, *extra)
    with tempfile.TemporaryDirectory() as folder:
        objects = pathlib.Path(folder)
        units: list[tuple[str, pathlib.Path, tuple[str, ...]]] = []
        for name, of_set in sets.items():
            known = name == "base" or _knows(command, of_set)
            if not known or (only is not None and name not in only):
                source = objects / f"{name}.cc"
                source.write_text(_LEFT_OUT.format(name, f'"{name}"' if known else "nullptr"))
                units.append((f"kernel_{name}", source, sets["base"]))
                continue
            for source_name in PER_SET_SOURCES:
                flags_of = (*of_set, f"-DINSTRUCTION_SET={name}")
                units.append((f"{source_name}_{name}", SOURCES / f"{source_name}.cc", flags_of))
        headers = (f'-DJATTN_STAMP="{stamp()}"', "-isystem", str(HERE / "include"))
        units += [(name, SOURCES / f"{name}.cc", sets["base"]) for name in ("schedule", "update")]
        units += [("ffi", SOURCES / "ffi.cc", (*sets["base"], *headers))]

        def compile_one(unit: tuple[str, pathlib.Path, tuple[str, ...]]) -> str:
            name, source, of_unit = unit
            result = str(objects / f"{name}.o")
            _run([*command, *flags, *of_unit, "-I", str(SOURCES), "-c", str(source), "-o", result])
            return result

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = list(pool.map(compile_one, units))
        linked = objects / library.name
        _run([*command, "-shared", *extra, "-o", str(linked), *compiled, "-pthread"])
        library.parent.mkdir(parents=True, exist_ok=True)
        # Copy it next to the old one, then replace that: a process that has it loaded keeps it.
        new = library.with_name(f".{library.name}.{os.getpid()}")
        shutil.copyfile(linked, new)
        new.replace(library)


def _knows(command: list[str], flags: tuple[str, ...]) -> bool:
    """Whether the compiler takes an instruction set's flags; one older than the set does not."""
    try:
        _run([*command, *flags, "-E", "-x", "c++", os.devnull])
    except BuildError:
        return False
    return True


def _run(command: list[str]) -> str:
    """Run a command and return its output; raise BuildError with its errors."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.splitlines()
        first = next((line for line in lines if "error" in line), "it gives no reason")
        raise BuildError(f"{first}\n{shlex.join(command)}\n{done.stderr[-4000:]}")
    return done.stdout


def main() -> int:
    """Build the library and print its path."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Build jattn's native CPU kernel.")
    parser.add_argument("--all", action="store_true", help="for all machines of this architecture")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="PATH",
        help="where to write it; JATTN_NATIVE_LIBRARY=PATH loads that (default: %(default)s)",
        default=LIBRARY,
    )
    given = parser.parse_args()
    try:
        extra = tuple(shlex.split(os.environ.get("CXXFLAGS", "")))
        (build if given.all else build_here)(given.out, extra)
    except (BuildError, OSError, ValueError) as error:  # ValueError: from CXXFLAGS
        print(f"jattn: the native kernel was not built: {error}", file=sys.stderr)
        return 1
    print(given.out)
    return 0
