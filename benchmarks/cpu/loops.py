"""Compile C++ loops for this machine when they are needed."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

from jattn.cpu.native import build


def compiled(source: Path) -> ctypes.CDLL:
    """Compile a source file and load its functions.

    Raises:
      build.BuildError: there is no compiler, or it failed.
      OSError: the compiler cannot be started.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / source.with_suffix(".so").name
        flags = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")
        command = [*build.compiler(), *flags, str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise build.BuildError(done.stderr)
        return ctypes.CDLL(str(library))
