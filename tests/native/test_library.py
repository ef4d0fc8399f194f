"""The native kernel's library: how it is built, found and refused, and its effect on a process."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import pathlib
import platform
import re
import shutil
import sys

import jax
import numpy as np
import pytest

import jattn
from jattn.cpu.native import build, library
from tests.support.native import library as native_library
from tests.support.native import sanitize as native_sanitize
from tests.support.native import writing as native_writing

pytestmark = native_library.needed

native = native_library.native  # the fixture


def test_machines_without_a_kernel_are_named(monkeypatch):
    assert build.is_supported()
    with pytest.raises(build.BuildError, match="no native kernel for riscv64"):
        build.instruction_sets("riscv64", ["g++"])
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not build.is_supported()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("no-such-compiler -O2", "CXX is 'no-such-compiler -O2', but must be the command of a"),
        ("g++ '", 'CXX is "g++ \'", but must be a command: No closing quotation'),
    ],
)
def test_a_wrong_compiler_is_named(monkeypatch, capsys, command, words):
    monkeypatch.setenv("CXX", command)
    monkeypatch.setattr(sys, "argv", ["build"])
    assert build.main() == 1
    assert words in capsys.readouterr().err


def test_a_compiler_that_is_too_old_is_not_taken(monkeypatch, tmp_path):
    """The next one is taken, or ziglang's; if none works, the error has the reasons."""
    compilers = build.compiler()
    for name, says in (("g++", "g++: error: no shuffles"), ("clang++", "clang++: error: no C++17")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wanted = r"g\+\+ cannot compile it \(g\+\+: error: no shuffles\); clang.*; install a newer"
    with pytest.raises(build.BuildError, match=wanted):
        build.compiler()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert build.compiler() == [sys.executable, "-m", "ziglang", "c++"]
    (tmp_path / "c++").symlink_to(shutil.which(compilers[0], path=os.defpath))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")  # for the assembler and linker
    assert build.compiler() == ["c++"]


def test_zig_compiles_the_base_set_for_every_machine():
    """Without flags, zig would compile for the machine that it runs on."""
    zig = [sys.executable, "-m", "ziglang", "c++"]
    for machine in ("x86_64", "aarch64"):
        assert build.instruction_sets(machine, zig)["base"] == ("-mcpu=baseline",)
        assert build.instruction_sets(machine, ["g++"])["base"] == ()


def test_a_library_that_cannot_be_written_is_reported(monkeypatch, capsys, tmp_path):
    """Also, files in the source folder that are not sources do not change the stamp."""
    (tmp_path / "file").touch()

    def build_nothing(library, *_):
        library.parent.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(build, "build", build_nothing)
    monkeypatch.setattr(sys, "argv", ["build", "--out", str(tmp_path / "file" / "lib.so")])
    assert build.main() == 1
    assert "the native kernel was not built: [Errno 17] File exists" in (capsys.readouterr().err)
    shutil.copytree(build.SOURCES, tmp_path / "src")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    want = build.stamp()
    (tmp_path / "src" / ".cache").mkdir()
    (tmp_path / "src" / "kernel.cc~").touch()
    assert build.stamp() == want
    (tmp_path / "src" / "more.h").touch()
    assert build.stamp() != want


def test_a_library_is_found_by_file_name_and_missing_sources_are_a_reason(monkeypatch, tmp_path):
    shutil.copy(build.LIBRARY, tmp_path / "kernel.so")
    monkeypatch.chdir(tmp_path)
    assert library.open_library(pathlib.Path("kernel.so"), build.stamp(), None).library
    assert build._said(pathlib.Path("kernel.so"), "stamp") == build.stamp()
    monkeypatch.setattr(build, "SOURCES", tmp_path / "nowhere")
    assert "its C++ sources, which the library must match, are missing" in (
        library.load.__wrapped__().reason
    )


def test_a_library_that_does_not_fit_says_what_to_do(tmp_path):
    built, version = build.LIBRARY, library.ffi_version()
    assert version is not None
    garbage = tmp_path / "garbage.so"
    garbage.write_bytes(b"nothing")
    for path, stamp, ffi, words in (
        (tmp_path / "none.so", build.stamp(), version, "not built"),
        (garbage, build.stamp(), version, "does not load"),
        (built, "other", version, "other sources"),
        (built, build.stamp(), (0, 2), "version 0.3 of XLA's FFI, but this JAX has 0.2"),
        (built, build.stamp(), (1, 0), "version 0.3 of XLA's FFI, but this JAX has 1.0"),
    ):
        found = library.open_library(path, stamp, ffi)
        assert found.library is None
        assert words in found.reason
        assert build.COMMAND in found.reason


@pytest.mark.extended
def test_an_instruction_set_that_the_machine_lacks_is_refused_with_a_warning():
    """There is one warning; then calls use `xla`, and `explain` has the reason."""
    code = """
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from jattn.cpu.native import library
    print(library.missing() == library.missing() != (), len(said), said[0].message)
"""
    have = ", ".join(library.load().instruction_sets())
    want = f"JATTN_NATIVE_ISA is 'avx3', but must be an instruction set of this machine: {have}\n"
    found = native_library.run_python("-c", code, JATTN_NATIVE_ISA="avx3")
    slower = "jattn has no native kernel in this process and uses the slower `xla`"
    assert found == f"True 1 {slower}: {want}"


@pytest.mark.extended
def test_a_library_for_an_older_machine_runs_with_a_warning(tmp_path):
    """As after moving an editable installation: the instruction sets it was built for are used."""
    have = library.load().instruction_sets()
    if len(have) == 1:
        pytest.skip("this machine has one instruction set")
    built = tmp_path / "old.so"
    build.build(built, only=("base",))
    assert not build.is_current(built)
    code = """
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from jattn.cpu.native import library
    print(library.load().instruction_sets(), [str(one.message) for one in said])
"""
    missing = ", ".join(have[:-1])
    want = f"jattn's native kernel was built without {missing}, which this machine has"
    found = native_library.run_python("-c", code, JATTN_NATIVE_LIBRARY=str(built))
    assert found.startswith(f"('base',) [\"{want}: for its full speed run `{build.COMMAND}`\"]")


def test_a_build_for_this_machine_has_the_newest_that_it_can_use(monkeypatch, tmp_path):
    command = build.compiler()
    sets = build.instruction_sets(platform.machine(), command)
    assert build.newest_here(command) in sets
    assert not library.load().left_out()
    processor = tmp_path / "cpuinfo"
    assert build.newest_here(command, processor) is None  # without a list of features
    second = list(sets)[1]
    for words, found in (("fpu sse2", "base"), ("avx2 fma f16c bf16", second)):
        processor.write_text(f"model : 1\nflags\t\t: {words}\n\nmodel : 2\nflags : x\n")
        assert build.newest_here(command, processor) == found
    assert build._knows(command, ("-Wall",))
    assert not build._knows(command, ("-mno-such-instructions",))
    monkeypatch.setattr(build, "_knows", lambda *_: False)  # an old compiler
    assert build.newest_here(command, processor) == "base"


def test_everything_is_built_where_the_newest_does_not_run(monkeypatch, tmp_path):
    """As in a container that hides instructions that Linux lists."""
    asked = []
    monkeypatch.setattr(build, "build", lambda library, extra=(), only=None: asked.append(only))
    monkeypatch.setattr(build, "newest_here", lambda command: "amx")
    for runs in ("amx", ""):
        monkeypatch.setattr(build, "_said", lambda library, what, runs=runs: runs)
        build.build_here(tmp_path / "lib.so")
    assert asked == [("amx",), ("amx",), None]


def test_a_library_of_other_sources_is_not_kept(monkeypatch, tmp_path):
    garbage = tmp_path / "garbage.so"
    garbage.write_bytes(b"nothing")
    assert build.is_current()
    assert not build.is_current(garbage)
    assert not build.is_current(tmp_path / "none.so")
    monkeypatch.setattr(build, "stamp", lambda: "other")
    assert not build.is_current()


def test_importing_loads_nothing_and_a_wrong_library_breaks_nothing(tmp_path):
    code = (
        "import jattn, jax, warnings; from jattn.cpu.native import library\n"
        "assert library.load.cache_info().currsize == 0\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    assert 'not built' in library.missing()[0] == library.missing()[0]\n"
        "assert [str(one.message).partition(' in')[0] for one in said] == [\n"
        "    'jattn has no native kernel'\n"
        "]\n"
        "print(jax.devices()[0].platform)"
    )
    missing = str(tmp_path / "none.so")
    assert native_library.run_python("-c", code, JATTN_NATIVE_LIBRARY=missing).strip() == "cpu"


@pytest.mark.extended
@pytest.mark.parametrize(
    "isa", library.load().instruction_sets() if not native_library.REASONS else ()
)
def test_every_instruction_set(isa):
    out = native_library.run_python(
        "-m", "tests.support.native.cases", "--count", "4", JATTN_NATIVE_ISA=isa
    )
    assert f"on {isa} of" in out
    assert f"written: {native_writing.digest()}\n" in out


@pytest.mark.extended
@pytest.mark.long
def test_under_sanitizers():
    """Takes minutes, because it builds a separate library."""
    if not os.path.isabs(native_sanitize.located("libasan.so")):
        pytest.skip("the C++ compiler has no AddressSanitizer")
    native_library.run_python("-m", "tests.support.native.sanitize", "--count", "4")


@pytest.mark.extended
def test_threads_do_not_race():
    """ThreadSanitizer with one instruction set: all use the same code to share work."""
    if not os.path.isabs(native_sanitize.located("libtsan.so")):
        pytest.skip("the C++ compiler has no ThreadSanitizer")
    sets = library.load().instruction_sets()
    isa = "avx2" if "avx2" in sets else sets[0]
    native_library.run_python(
        "-m", "tests.support.native.sanitize", "--thread", "--count", "1", "--isa", isa
    )


@pytest.mark.extended
@pytest.mark.parametrize("threads", ["8", "1"])
def test_one_core(threads):
    command = ("-m", "tests.support.native.cases", "--count", "1", "--cores", "1")
    native_library.run_python(*command, PJRT_NPROC=threads)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are moved on Linux only")
def test_a_thread_moves_off_a_core_that_its_call_uses(native):
    allowed = os.sched_getaffinity(0)
    for _ in range(20):
        assert bool(native.jattn_native_moves()) == (len(allowed) > 1)
        assert os.sched_getaffinity(0) == allowed
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert not native.jattn_native_moves()
        assert os.sched_getaffinity(0) == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)


THP = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


HUGE = 2 << 20


huge_pages = pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="the system has no huge pages to give"
)


@huge_pages
def test_large_results_are_in_huge_pages():
    """If their memory is new: the C library may reuse memory of other tests, in small pages."""
    tokens = 1088
    query = np.ones((tokens, 64, 128), np.float32)
    cache = np.ones((tokens // 64, 1, 64, 128), np.float32)
    tables = np.arange(tokens // 64, dtype=np.int32)[None]
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))
    out = jattn.paged_attention(
        query,
        cache,
        cache,
        block_tables=tables,
        seq_lens=np.array([tokens], np.int32),
        query_start_loc=np.array([0, tokens], np.int32),
        sliding_window=1,
        implementation="native",
    )
    check_huge(out.unsafe_buffer_pointer(), out.nbytes)
    np.testing.assert_array_equal(out, 1)


@huge_pages
def test_large_pools_are_in_huge_pages():
    """From their creation to after a donated update, even in reused memory with small pages.

    Under jit, XLA makes the zeros.
    """
    shape = (272, 4, 64, 128)
    for _ in range(2):  # the second time, the C library reuses the memory
        used = [b"used" * (8 * HUGE // 4) for _ in range(4)]
        del used
    caches = jattn.init_kv_cache(*shape)
    assert caches[0].nbytes > 8 * HUGE
    before = [cache.data.unsafe_buffer_pointer() for cache in caches]
    rows = np.ones((2, 4, 128), np.float32)
    update = jax.jit(jattn.update_kv_cache, donate_argnums=(0, 1))
    caches = update(*caches, rows, rows, np.arange(2, dtype=np.int32))
    assert [cache.data.unsafe_buffer_pointer() for cache in caches] == before
    for cache, address in zip(caches, before, strict=True):
        check_huge(address, cache.nbytes)
        np.testing.assert_array_equal(np.asarray(cache.data[1:]), 0)
    traced = jax.jit(lambda: jattn.init_kv_cache(*shape)[0].data.sum())()
    assert int(traced) == 0
    del caches
    for cache in jattn.init_kv_cache(4608, 4, 128, 32, format=jattn.Int4(zero_point=True)):
        for array, value in ((cache.scale, 1), (cache.zero, 0)):
            check_huge(array.unsafe_buffer_pointer(), array.nbytes)
            assert float(array.min()) == float(array.max()) == value


def check_huge(address: int, count: int) -> None:
    """Check that huge pages hold an array except its ends; skip if new memory gets none either."""
    if huge_bytes(address, count) > count - 2 * HUGE:
        return
    with mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        fresh.madvise(mmap.MADV_HUGEPAGE)
        fresh.write(bytes([1]) * count)
        here = ctypes.c_char.from_buffer(fresh)
        granted = huge_bytes(ctypes.addressof(here), count)
        del here
    if granted <= count - 2 * HUGE:
        pytest.skip("the system gives no huge pages now")
    pytest.fail(f"{huge_bytes(address, count)} of {count} bytes are in huge pages")


def huge_bytes(address: int, count: int) -> int:
    """Return bytes in huge pages of the mappings that hold `count` bytes from an address on."""
    found, inside = 0, False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            first, end = (int(part, 16) for part in line.split()[0].split("-"))
            inside = first < address + count and address < end
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


def test_after_a_fork():
    """A forked child can call the library and run programs compiled before the fork.

    XLA hangs in a child when it compiles, and so does a compiled call of `xla`: it waits for
    threads that did not survive. The native kernel waits only for splits that some thread has
    begun.
    """
    code = """
import os, signal, sys
import jax, jattn, numpy as np
from jattn.cpu.native import library
from tests.support import problems
from tests.support.native import cases as native_cases

batch = problems.build(native_cases.LONG)
arrays = {name: x for name, x in batch.kwargs.items() if isinstance(x, jax.Array)}
rest = {name: x for name, x in batch.kwargs.items() if name not in arrays}
attend = jax.jit(lambda *pools, **arrays: jattn.paged_attention(
    *pools, **arrays, **rest, implementation="native"
))
given = jax.numpy.asarray(batch.query), batch.key_cache, batch.value_cache
want = [np.asarray(x) for x in attend(*given, **arrays)]
pid = os.fork()
if pid == 0:
    signal.alarm(120)  # ends a child that hangs
    same = bool(library.load().instruction_set())
    for _ in range(3):
        have = attend(*given, **arrays)
        same &= all(np.allclose(x, y, atol=1e-5) for x, y in zip(have, want))
    os._exit(0 if same else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    native_library.run_python("-W", "ignore", "-c", code)
