"""What an installed jattn has: every module, and the mark that it is typed."""

from __future__ import annotations

import shutil
import zipfile

import pytest

from tests.support import processes

pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77 or newer")


def test_every_module_is_in_the_wheel(tmp_path):
    root = processes.ROOT
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    shutil.copytree(root / "jattn", tmp_path / "jattn", ignore=shutil.ignore_patterns("*.pyc"))
    (tmp_path / "tests").mkdir()
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    processes.python(code, folder=tmp_path)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        built = {name for name in opened.namelist() if ".dist-info/" not in name}
    ours = (path for path in (root / "jattn").rglob("*") if path.suffix in (".py", ".typed"))
    assert built >= {path.relative_to(root).as_posix() for path in ours}
    assert {name.split("/")[0] for name in built} == {"jattn"}
