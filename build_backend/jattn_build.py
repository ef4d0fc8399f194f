"""The build backend: setuptools, and a C++ compiler from PyPI where the machine has none.

setup.py compiles the native CPU kernel. Where no compiler is found, the package ziglang brings one
for the build, on the platforms it has wheels for; without either, the package is pure Python.
"""

import os
import pathlib
import platform
import runpy
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
        return [ZIG]
    return []


def get_requires_for_build_wheel(config_settings=None):
    """What building a wheel needs."""
    return _requires_wheel(config_settings) + _compiler()


def get_requires_for_build_editable(config_settings=None):
    """What an editable installation needs."""
    return _requires_editable(config_settings) + _compiler()
