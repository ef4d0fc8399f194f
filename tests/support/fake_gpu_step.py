"""A fake step of the first hour, without a GPU: works, fails, hangs, loses its device or dies."""

import os
import sys
import time

from benchmarks.gpu import session as gpu_session

WORKLOADS = ("a", "b", "c")


def main() -> int:
    how = sys.argv[sys.argv.index("--part") + 1]
    folder = sys.argv[sys.argv.index("--resume") + 1]
    lines = gpu_session.Lines(folder, (how, str(os.getpid())))
    for name in WORKLOADS:
        if (name, how) in gpu_session.answered(folder):
            continue
        print("asked", name, flush=True)
        if how == "hangs":
            time.sleep(60)
        failed = how in ("lost", "dies", "wrong")
        lines.write(kind="none", name=name, implementation=how, why="FAILED" if failed else "no")
        if how == "lost":
            return gpu_session.HUNG
        if how == "dies":
            os.abort()
    return int(how == "wrong")


if __name__ == "__main__":
    sys.exit(main())
