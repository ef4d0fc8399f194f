"""What an installed jattn has: every module, the native kernel's sources, and `py.typed`."""

from __future__ import annotations

import shutil
import zipfile

import pytest

from tests.support import processes

pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77 or newer")


def test_every_file_is_in_the_wheel(tmp_path):
    root = processes.ROOT
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    for name in ("build_backend", "jattn"):
        ignored = shutil.ignore_patterns("*.pyc", "*.so", "*.dylib")
        shutil.copytree(root / name, tmp_path / name, ignore=ignored)
    code = "import jattn_build; jattn_build.build_wheel('dist')"
    paths = {"PYTHONPATH": str(tmp_path / "build_backend"), "JATTN_NATIVE": "skip"}
    processes.python(code, folder=tmp_path, **paths)
    [wheel] = (tmp_path / "dist").glob("*-py3-none-any.whl")  # any platform: no library in it
    with zipfile.ZipFile(wheel) as opened:
        names = [name.split(".data/purelib/")[-1] for name in opened.namelist()]
    built = {name for name in names if ".dist-info/" not in name}
    kinds = (".py", ".typed", ".cc", ".h")
    ours = (path for path in (root / "jattn").rglob("*") if path.suffix in kinds)
    assert built >= {path.relative_to(root).as_posix() for path in ours}
    assert {name.split("/")[0] for name in built} == {"jattn"}
