"""The native kernel's shared library: found, checked and registered with JAX on first use.

A library that does not fit is never registered: one built with newer FFI headers than this JAX has
would stop its whole CPU backend.
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
CALLS = (TARGET, UPDATE)  # what compiled programs hold


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A library that fits this JAX, or why there is none."""

    library: typing.Any  # ctypes.CDLL or None
    reason: str | None

    def instruction_set(self) -> str:
        """The one that calls run on: a name of `build.instruction_sets`."""
        return self.library.jattn_native_isa().decode()

    def instruction_sets(self) -> tuple[str, ...]:
        """Those of the library that this machine can use, newest first."""
        return tuple(self.library.jattn_native_isas().decode().split())

    def left_out(self) -> tuple[str, ...]:
        """Those that this machine could use and that the library was built without."""
        return tuple(self.library.jattn_native_left_out().decode().split())


@functools.cache
def load() -> Loaded:
    """Load and register the library once; starts no backend.

    Warns where the library was built for a machine with fewer instruction sets. There is none where
    JATTN_NATIVE_ISA names no instruction set of this machine.
    """
    path = pathlib.Path(os.environ.get("JATTN_NATIVE_LIBRARY") or build.LIBRARY)
    try:
        stamp = build.stamp()
    except OSError as error:
        return Loaded(None, f"its C++ sources, which a library has to match, are missing: {error}")
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
    """A number of the loaded library's sources, which programs carry."""
    return int(load().library.jattn_native_stamp().decode()[:15], 16)


def open_library(path: pathlib.Path, stamp: str, version: tuple[int, int] | None) -> Loaded:
    """Load `path` and compare it with the sources' `stamp`, and with JAX's FFI version if known."""
    rebuild = f"run `{build.COMMAND}`"
    if not path.exists():
        return Loaded(None, f"its library is not built: {rebuild}")
    try:
        library = ctypes.CDLL(str(path.resolve()))  # a name without a slash is looked for elsewhere
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
            None, f"its library speaks version {have} of XLA's FFI and this JAX {takes}: {rebuild}"
        )
    return Loaded(library, None)


def ffi_version() -> tuple[int, int] | None:
    """The FFI version of the installed jaxlib, from the headers it ships; None without them."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.exists():
        return None
    text = header.read_text()
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    if len(found) < 2:
        return None
    return int(found["MAJOR"]), int(found["MINOR"])


def missing() -> tuple[str, ...]:
    """Why there is no library that fits, or (). Warns once where a CPU could have one."""
    reason = load().reason
    if reason is None:
        return ()
    if device.platform() == "cpu" and build.is_supported():
        _warn(reason)
    return (reason,)


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"jattn has no native kernel in this process, and the slower `xla` runs: {reason}",
        stacklevel=2,
    )
