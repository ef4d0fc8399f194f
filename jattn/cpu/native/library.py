"""The native kernel's shared library: found, checked and registered with JAX on first use.

A library that does not fit is never registered: one built with newer FFI headers than this JAX has
would stop JAX's whole CPU backend.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import pathlib
import re
import typing
import warnings

import jax

from jattn import device
from jattn.cpu.native import build

TARGET = "jattn_native_attend"
UPDATE = "jattn_native_update"
ZEROS = "jattn_native_zeros"
CALLS = (TARGET, UPDATE)  # those that compiled programs contain


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A library that fits this JAX, or why there is none."""

    library: typing.Any  # ctypes.CDLL or None
    reason: str | None

    def instruction_set(self) -> str:
        """The instruction set that calls use: a name of `build.instruction_sets`."""
        return self.library.jattn_native_isa().decode()

    def instruction_sets(self) -> tuple[str, ...]:
        """The library's instruction sets that this machine can use, newest first."""
        return tuple(self.library.jattn_native_isas().decode().split())

    def left_out(self) -> tuple[str, ...]:
        """The instruction sets that this machine could use but the library was built without."""
        return tuple(self.library.jattn_native_left_out().decode().split())


@functools.cache
def load() -> Loaded:
    """Load and register the library once; starts no backend.

    Warns if the library was built for a machine with fewer instruction sets. Returns no library if
    JATTN_NATIVE_ISA does not name an instruction set of this machine.
    """
    path = pathlib.Path(os.environ.get("JATTN_NATIVE_LIBRARY") or build.LIBRARY)
    try:
        stamp = build.stamp()
    except OSError as error:
        return Loaded(None, f"its C++ sources, which the library must match, are missing: {error}")
    found = open_library(path, stamp, ffi_version())
    wanted = os.environ.get("JATTN_NATIVE_ISA")
    if found.library is not None and wanted and wanted not in found.instruction_sets():
        found = Loaded(
            None,
            f"JATTN_NATIVE_ISA is {wanted!r}, but must be an instruction set of this machine: "
            f"{', '.join(found.instruction_sets())}",
        )
    if found.library is not None and found.left_out():
        warnings.warn(
            f"jattn's native kernel was built without {', '.join(found.left_out())}, which this "
            f"machine has: for its full speed run `{build.COMMAND}`",
            stacklevel=2,
        )
    if found.library is not None:
        for target in (TARGET, UPDATE, ZEROS):
            handler = jax.ffi.pycapsule(getattr(found.library, target))
            jax.ffi.register_ffi_target(target, handler, platform="cpu")
    return found


def version() -> int:
    """Return a number of the loaded library's sources, which compiled programs carry."""
    return int(load().library.jattn_native_stamp().decode()[:15], 16)


def open_library(path: pathlib.Path, stamp: str, version: tuple[int, int] | None) -> Loaded:
    """Load `path` and compare it with the sources' `stamp`, and with JAX's FFI version if known."""
    rebuild = f"run `{build.COMMAND}`"
    if not path.exists():
        return Loaded(None, f"its library is not built: {rebuild}")
    try:
        library = ctypes.CDLL(str(path.resolve()))  # a name without a slash is searched elsewhere
        for name in ("stamp", "isa", "isas", "left_out"):
            getattr(library, f"jattn_native_{name}").restype = ctypes.c_char_p
        built = library.jattn_native_stamp().decode()
        speaks = (library.jattn_native_ffi_major(), library.jattn_native_ffi_minor())
    except (OSError, AttributeError) as error:
        return Loaded(None, f"its library does not load ({error}): {rebuild}")
    if built != stamp:
        return Loaded(None, f"its library was built from other sources: {rebuild}")
    if not library.jattn_native_isas():
        return Loaded(None, f"its library has no instruction set of this machine: {rebuild}")
    if version is not None and (speaks[0] != version[0] or speaks[1] > version[1]):
        have, takes = (".".join(map(str, v)) for v in (speaks, version))
        return Loaded(
            None,
            f"its library has version {have} of XLA's FFI, but this JAX has {takes}: {rebuild}",
        )
    return Loaded(library, None)


def ffi_version() -> tuple[int, int] | None:
    """Return the FFI version of jaxlib, from the headers that it ships; None without them."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.exists():
        return None
    text = header.read_text()
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    if len(found) < 2:
        return None
    return int(found["MAJOR"]), int(found["MINOR"])


def missing() -> tuple[str, ...]:
    """Return why no library fits, or (). Warn once on a CPU that could have one."""
    reason = load().reason
    if reason is None:
        return ()
    if device.platform() == "cpu" and build.is_supported():
        _warn(reason)
    return (reason,)


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"jattn has no native kernel in this process and uses the slower `xla`: {reason}",
        stacklevel=2,
    )
