"""How much memory a process may still use, on machines whose devices are CPUs.

Memory of the page cache counts as available, because the kernel gives it back. In a container the
limits of its control groups (version 1 or 2) apply as well, each to all groups below it.
"""

from __future__ import annotations

import os
import pathlib

# By version of control groups: the folder that accounts for memory, the files with its limit and
# its use, and the line of `memory.stat` with what the kernel can give back.
GROUPS = {
    2: ("", "memory.max", "memory.current", "inactive_file"),
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available(root: str | os.PathLike[str] = "/") -> int:
    """Return how many bytes this process may still use.

    Args:
      root: of the file system with `proc` and `sys`.
    """
    base = pathlib.Path(root)
    lines = (base / "proc/meminfo").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    left = [int(found["MemAvailable"].split()[0]) * 1024]
    try:
        groups = (base / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for group in groups:
        _, kinds, path = group.split(":", 2)
        version = 1 if "memory" in kinds.split(",") else 2 if not kinds else 0
        if version:
            left += _left_in_groups(base / "sys/fs/cgroup", path, version)
    return max(0, min(left))


def _left_in_groups(mount: pathlib.Path, path: str, version: int) -> list[int]:
    """Return what a group and those above it have left; a container may see only the topmost."""
    folder, limit, use, line = GROUPS[version]
    parts = [part for part in path.split("/") if part and part != ".."]
    places = [mount.joinpath(folder, *parts[:depth]) for depth in range(len(parts) + 1)]
    found = []
    for place in places:
        try:
            most, used = ((place / name).read_text().strip() for name in (limit, use))
            stat = dict(row.split() for row in (place / "memory.stat").read_text().splitlines())
        except OSError:
            continue  # not mounted here, or no limit
        if most != "max":
            found.append(int(most) - int(used) + int(stat.get(line, 0)))
    return found
