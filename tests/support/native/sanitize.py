"""The native kernel under AddressSanitizer and UndefinedBehaviorSanitizer, or ThreadSanitizer.

    python -m tests.support.native.sanitize [--thread] [--count SEEDS] [--isa NAME] [--library PATH]

Builds a separate library and runs `cases` with every instruction set of this machine. It needs the
compiler's sanitizer libraries.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

from jattn.cpu.native import build, library

# Only line numbers of the debug information: the rest would more than double the time.
COMMON = ("-g1", "-O1", "-fno-omit-frame-pointer")
# ThreadSanitizer knows only instrumented code: how the kernel's threads share work, but not XLA's
# own thread pool, whose hand-over of tasks it would take for a race.
SUPPRESSIONS = "race:jaxlib\nrace:libjax\nmutex:jaxlib\n"


def located(name: str) -> str:
    """The path of one of the compiler's shared libraries."""
    command = [*build.compiler(), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Build, and run the cases on every instruction set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--thread", action="store_true", help="ThreadSanitizer")
    parser.add_argument("--count", type=int, default=12, help="seeds of each instruction set")
    parser.add_argument("--isa", help="one instruction set instead of all")
    parser.add_argument("--library", type=pathlib.Path, help="where to keep or find the library")
    args = parser.parse_args()
    name = "thread" if args.thread else "address,undefined"
    flags = (*COMMON, f"-fsanitize={name}")
    if not args.thread:
        flags += ("-fno-sanitize-recover=undefined",)
    with tempfile.TemporaryDirectory() as folder:
        path = args.library or pathlib.Path(folder) / "libjattn_native.so"
        here = library.load()
        if here.library is None:
            parser.exit(1, f"there is no native kernel to test: {here.reason}\n")
        sets = [args.isa] if args.isa else here.instruction_sets()
        if not path.exists():
            # Instruction sets that this machine lacks would take minutes to compile and never run.
            # A library that is kept may be for another machine, so it gets them all.
            build.build(path, flags, only=None if args.library else here.instruction_sets())
        # libstdc++ too: the sanitizers need its __cxa_throw when they start.
        names = ("libtsan.so" if args.thread else "libasan.so", "libstdc++.so")
        runtimes = [located(name) for name in names]
        suppressions = pathlib.Path(folder) / "suppressions"
        suppressions.write_text(SUPPRESSIONS)
        environment = {
            **os.environ,
            "JATTN_NATIVE_LIBRARY": str(path),
            "LD_PRELOAD": " ".join(runtimes),
            "JAX_PLATFORMS": "cpu",
            # Python and XLA keep memory until they exit, and XLA's LLVM handles signals.
            "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:allow_user_segv_handler=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "TSAN_OPTIONS": f"suppressions={suppressions}:ignore_noninstrumented_modules=1",
        }
        for isa in sets:
            command = ["-m", "tests.support.native.cases", "--count", str(args.count)]
            subprocess.run(
                [sys.executable, *command], env={**environment, "JATTN_NATIVE_ISA": isa}, check=True
            )


if __name__ == "__main__":
    main()
