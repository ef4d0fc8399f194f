"""Where a suite's files come from: a wheel, a source distribution, or a checkout."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import urllib.request
import zipfile

from tests.peers.suites import Checkout, SourceArchive, Suite, Wheel

TESTS = ("tests/", "hopper/")  # the folders to unpack from a source distribution


class NotFetchedError(Exception):
    """A suite's files cannot be fetched, and why."""


def sources(suite: Suite, cache: pathlib.Path) -> pathlib.Path:
    """Return the folder that has the suite's files, fetching them if needed.

    Raises:
      NotFetchedError: a module that they import is not installed, no checkout is given, or PyPI
        cannot be reached.
    """
    missing = [name for name in suite.needs if importlib.util.find_spec(name) is None]
    if missing:
        raise NotFetchedError(f"it needs {' and '.join(missing)}")
    source = suite.source
    if isinstance(source, Checkout):
        return _checkout(source, suite.files)
    folder = cache / f"{source.project}-{source.version}"
    if not all((folder / file).exists() for file in suite.files):
        folder.mkdir(parents=True, exist_ok=True)
        (_wheel if isinstance(source, Wheel) else _source_archive)(source, folder)
    return folder


def _checkout(source: Checkout, files: tuple[str, ...]) -> pathlib.Path:
    given = os.environ.get(source.variable)
    if not given or not all((pathlib.Path(given) / file).exists() for file in files):
        raise NotFetchedError(
            f"it needs a checkout of {source.url}: set {source.variable} to its folder, which "
            f"must have {files[0]} (now {given!r})"
        )
    return pathlib.Path(given).resolve()


def _wheel(source: Wheel, folder: pathlib.Path) -> None:
    # Tests are part of the wheel. Its requirements do not matter, since it is only unpacked.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    options = ["--ignore-requires-python", "--only-binary", ":all:", "--dest", str(folder)]
    name = f"{source.project}=={source.version}"
    done = subprocess.run(
        [*pip, *options, name], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise NotFetchedError(f"pip cannot fetch {name}: {done.stderr[-300:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def _source_archive(source: SourceArchive, folder: pathlib.Path) -> None:
    # pip would build these to get their metadata, which needs a compiler for GPUs.
    name = f"{source.project.replace('-', '_')}-{source.version}.tar.gz"
    page = urllib.request.Request(
        f"https://pypi.org/simple/{source.project}/",
        headers={"Accept": "application/vnd.pypi.simple.v1+json"},
    )
    try:
        with urllib.request.urlopen(page, timeout=60) as answer:
            files = [file for file in json.load(answer)["files"] if file["filename"] == name]
        if not files:
            raise NotFetchedError(f"PyPI has no {name}")
        with urllib.request.urlopen(files[0]["url"], timeout=600) as answer:
            packed = answer.read()
    except OSError as error:
        raise NotFetchedError(f"PyPI cannot provide {name}: {error}") from error
    if hashlib.sha256(packed).hexdigest() != files[0]["hashes"]["sha256"]:
        raise NotFetchedError(f"{name} from PyPI does not have the sha256 that PyPI lists")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            member.name = member.name.partition("/")[2]
            if member.name.startswith(TESTS):
                archive.extract(member, folder, filter="data")
