"""The contents of an installed jattn: all modules, the native kernel's sources, and `py.typed`."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

from jattn.cpu.native import build as native_build
from tests.support import processes

pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77 or newer")


def copy_checkout(folder: pathlib.Path) -> None:
    """Copy the files that jattn is installed from, without build results."""
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(processes.ROOT / name, folder)
    for name in ("build_backend", "jattn"):
        ignored = shutil.ignore_patterns("*.pyc", "*.so", "*.dylib")
        shutil.copytree(processes.ROOT / name, folder / name, ignore=ignored)


def build(checkout: pathlib.Path, kind: str, folder: pathlib.Path, **environment: str) -> None:
    """Make the build backend put a `kind`, "sdist" or "wheel", into a folder."""
    code = f"import jattn_build; jattn_build.build_{kind}({str(folder)!r})"
    paths = {"PYTHONPATH": str(checkout / "build_backend")}
    processes.python(code, folder=checkout, **paths, **environment)


def files_of(wheel: pathlib.Path) -> set[str]:
    """Return the files that a wheel installs."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    return {name for name in names if ".dist-info/" not in name}


def test_every_file_is_in_the_wheel_of_a_source_distribution(tmp_path):
    root, checkout = processes.ROOT, tmp_path / "checkout"
    checkout.mkdir()
    copy_checkout(checkout)

    build(checkout, "sdist", tmp_path, JATTN_NATIVE="skip")
    [archive] = tmp_path.glob("jattn-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    build(tmp_path / archive.name.removesuffix(".tar.gz"), "wheel", tmp_path, JATTN_NATIVE="skip")
    [wheel] = tmp_path.glob("*-py3-none-any.whl")  # any platform: no library in it
    built = files_of(wheel)
    kinds = (".py", ".typed", ".cc", ".h")
    ours = (path for path in (root / "jattn").rglob("*") if path.suffix in kinds)
    assert built >= {path.relative_to(root).as_posix() for path in ours}
    assert {name.split("/")[0] for name in built} == {"jattn"}


# A fake compiler: an object file holds its source's name, and a library the names of its objects.
COMPILER = """
import pathlib, sys
words = sys.argv[1:]
if "-o" in words:
    text = " ".join(pathlib.Path(word).name for word in words if word.endswith(".cc"))
    if "-shared" in words:
        text = " ".join(pathlib.Path(word).read_text() for word in words if word.endswith(".o"))
    pathlib.Path(words[words.index("-o") + 1]).write_text(text)
"""


@pytest.mark.extended
def test_a_wheel_with_the_library_is_for_its_platform_and_every_python(tmp_path):
    checkout, compiler = tmp_path / "checkout", tmp_path / "compiler.py"
    checkout.mkdir()
    copy_checkout(checkout)
    compiler.write_text(COMPILER)
    command = f"{sys.executable} {compiler}"
    build(checkout, "wheel", tmp_path, CXX=command, JATTN_NATIVE="require")
    [wheel] = tmp_path.glob("jattn-*.whl")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    library = native_build.LIBRARY.relative_to(processes.ROOT).as_posix()
    assert library in files_of(wheel)
    with zipfile.ZipFile(wheel) as opened:
        [name] = [name for name in opened.namelist() if name.endswith(library)]
        linked = opened.read(name).decode().split()
    assert {"kernel.cc", "few_rows.cc", "schedule.cc", "update.cc", "ffi.cc"} == set(linked)

    [kept] = checkout.glob("build/lib*/jattn")
    (kept / "gone.py").touch()  # a stale file of the first build must not be installed again
    build(checkout, "wheel", tmp_path, CXX=command, JATTN_NATIVE="require")
    assert "jattn/gone.py" not in files_of(wheel)


class NoCompiler:
    """A virtual environment without a C++ compiler, and a local index of wheels."""

    def __init__(self, folder: pathlib.Path):
        self.checkout, self.index = folder / "checkout", folder / "index"
        self.checkout.mkdir()
        copy_checkout(self.checkout)
        self.python = folder / "venv" / "bin" / "python"
        self.environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "PYTHONPATH")}
        self.environment["PATH"] = str(self.python.parent)  # neither a compiler nor a shell
        self.environment["ZIG_GLOBAL_CACHE_DIR"] = str(folder / "zig")
        self.run(sys.executable, "-m", "venv", self.python.parents[1], seconds=120)

    def run(self, *command: object, seconds: float, **more: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(word) for word in command],
            env=self.environment | more,
            cwd=self.checkout.parent,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def download(self, *packages: str) -> None:
        """Download packages from PyPI into the index."""
        command = ("-m", "pip", "download", "-q", "--no-deps", "-d", self.index, *packages)
        try:
            done = self.run(self.python, *command, seconds=300)
        except subprocess.TimeoutExpired:
            pytest.skip(f"PyPI did not provide {', '.join(packages)} within 300 seconds")
        if done.returncode:
            pytest.skip(f"PyPI cannot be reached: {done.stderr.strip().splitlines()[-1]}")

    def install(self, *options: str, **more: str) -> str:
        """Reinstall jattn, building with packages of the index, and return pip's output."""
        command = ("-m", "pip", "install", "--no-deps", "--force-reinstall", *options)
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index)}
        done = self.run(self.python, *command, self.checkout, seconds=1500, **offline, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def explained(self) -> str:
        """Return the native kernel's line of `explain`, from the installed jattn and our JAX."""
        code = f"""
import sys
sys.path.append({sysconfig.get_paths()["purelib"]!r})
import jax.numpy as jnp, jattn
assert {str(self.python.parents[1])!r} in jattn.__file__, jattn.__file__
cache = jnp.ones((2, 1, 16, 64))
lengths = {{"block_tables": jnp.zeros((1, 1), jnp.int32), "seq_lens": jnp.ones(1, jnp.int32)}}
print(jattn.explain(jnp.ones((1, 1, 64)), cache, cache, **lengths))
out = jattn.paged_attention(jnp.ones((1, 1, 64)), cache, cache, **lengths)
assert bool((out == 1).all())
"""
        done = self.run(self.python, "-c", code, seconds=300, JAX_PLATFORMS="cpu")
        assert done.returncode == 0, done.stderr
        return re.search(r"^native: (.*)", done.stdout, re.MULTILINE)[1]


@pytest.fixture(scope="module")
def no_compiler(tmp_path_factory):
    machine = NoCompiler(tmp_path_factory.mktemp("no_compiler"))
    machine.download("setuptools")
    return machine


WARNING = "jattn's native kernel was not built: no C++ compiler"
posix = pytest.mark.skipif(
    sys.platform not in ("linux", "darwin"), reason="ziglang is not used on this platform"
)


@posix
@pytest.mark.extended
@pytest.mark.parametrize("skip", [False, True])
def test_without_a_compiler_and_without_ziglang_it_is_pure_python(no_compiler, skip):
    """The index has no ziglang, or building is turned off, which gives no warning."""
    said = no_compiler.install("-v", **({"JATTN_NATIVE": "skip"} if skip else {}))
    assert said.count(WARNING) == (0 if skip else 1), said
    assert said.count("native kernel") == said.count(WARNING)
    reason = no_compiler.explained()
    assert "refused" in reason
    assert "its library is not built: run `python -m jattn.cpu.native`" in reason


@posix
@pytest.mark.extended
@pytest.mark.rotated
@pytest.mark.long
def test_without_a_compiler_ziglang_from_pypi_builds_the_library(no_compiler):
    """Takes minutes: it downloads 100 MB, and also compiles the C++ standard library."""
    no_compiler.download("ziglang")
    said = no_compiler.install()
    assert WARNING not in said
    assert no_compiler.explained() == "taken"
