"""Build the native CPU kernel with the package, if there is a C++ compiler.

Without one the package is pure Python, and `jattn.explain` says what is missing. Everything else
about the package is in pyproject.toml.
"""

import os
import pathlib
import runpy
import shutil
import sys

import setuptools
from setuptools.command.build_py import build_py

NATIVE = pathlib.Path("jattn/cpu/native")
BUILD = runpy.run_path(str(NATIVE / "build.py"))


class BuildWithNative(build_py):
    """`build_py` that puts the shared library where the package's files go: here if editable.

    A wheel's library is for every machine of its architecture, an editable installation's only for
    this machine.
    """

    built = False

    def run(self):
        if not self.editable_mode:  # what an earlier build left there would also be installed
            shutil.rmtree(pathlib.Path(self.build_lib) / "jattn", ignore_errors=True)
        super().run()
        if os.environ.get("JATTN_NATIVE") == "skip":
            return
        folder = NATIVE if self.editable_mode else pathlib.Path(self.build_lib) / NATIVE
        library = folder / BUILD["LIBRARY"].relative_to(BUILD["HERE"])
        try:
            if not self.editable_mode:
                BUILD["build"](library)
            elif not BUILD["is_current"](library):
                BUILD["build_here"](library)
            BuildWithNative.built = True
        except (BUILD["BuildError"], OSError) as error:
            library.unlink(missing_ok=True)
            if os.environ.get("JATTN_NATIVE") == "require":
                raise
            print(f"warning: jattn's native kernel was not built: {error}", file=sys.stderr)


class PlatformDistribution(setuptools.Distribution):
    """Install where packages with libraries go: auditwheel refuses libraries elsewhere."""

    def has_ext_modules(self):
        return True


commands = {"build_py": BuildWithNative}
try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # an older setuptools: its wheels are named for any platform
    pass
else:

    class PlatformWheel(bdist_wheel):
        """A wheel for every Python 3: for this platform with the library, for any without it."""

        def get_tag(self):
            return "py3", "none", super().get_tag()[2] if BuildWithNative.built else "any"

    commands["bdist_wheel"] = PlatformWheel

setuptools.setup(cmdclass=commands, distclass=PlatformDistribution)
