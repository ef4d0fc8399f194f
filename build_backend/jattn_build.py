"""The build backend: setuptools, plus a C++ compiler from PyPI if the machine has none.

setup.py compiles the native CPU kernel. If no compiler is found, the package ziglang brings one for
the build, on platforms that it has wheels for and from indices that have it. Without either, the
package is pure Python.
"""

import os
import pathlib
import platform
import runpy
import subprocess
import sys

from setuptools.build_meta import *  # noqa: F403
from setuptools.build_meta import get_requires_for_build_editable as _requires_editable
from setuptools.build_meta import get_requires_for_build_wheel as _requires_wheel

ZIG = "ziglang>=0.13"


def _compiler() -> list[str]:
    build = runpy.run_path(str(pathlib.Path("jattn/cpu/native/build.py")))
    known = sys.platform in ("linux", "darwin")
    known = known and platform.machine().lower() in ("x86_64", "amd64", "aarch64", "arm64")
    if not known or os.environ.get("JATTN_NATIVE") == "skip":
        return []
    try:
        build["compiler"]()
    except build["BuildError"]:
        return [] if _index_lacks_zig() else [ZIG]
    return []


def _index_lacks_zig() -> bool:
    """Whether pip's index says that it has no ziglang: requiring it would fail the installation.

    False if the index cannot be reached or pip cannot be run. `-I` finds the pip outside of the
    build's environment.
    """
    command = [sys.executable, "-I", "-m", "pip", "index", "versions", "ziglang"]
    environment = {**os.environ, "PIP_RETRIES": "1", "PIP_TIMEOUT": "15"}
    try:
        said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    answered = "No matching distribution found" in said.stderr and "Retrying" not in said.stderr
    return said.returncode != 0 and answered


def get_requires_for_build_wheel(config_settings=None):
    """Return what building a wheel needs."""
    return _requires_wheel(config_settings) + _compiler()


def get_requires_for_build_editable(config_settings=None):
    """Return what an editable installation needs."""
    return _requires_editable(config_settings) + _compiler()
