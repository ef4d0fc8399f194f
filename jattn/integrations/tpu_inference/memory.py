"""How much memory a process may still take, on machines whose devices are CPUs.

What the machine has left counts the page cache, which it gives back; and in a container the limits
of its control groups count, of version 1 or 2, each of which holds for all groups below it.
"""

from __future__ import annotations

import os
import pathlib

# Of a control group, by version: where memory is accounted for, the files of its limit and of its
# use, and the line of `memory.stat` with what the kernel can give back.
GROUPS = {
    2: ("", "memory.max", "memory.current", "inactive_file"),
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available(root: str | os.PathLike[str] = "/") -> int:
    """Bytes that this process may still take.

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
    """What a group and those above it have left; a container may see the topmost alone."""
    folder, limit, use, line = GROUPS[version]
    parts = [part for part in path.split("/") if part and part != ".."]
    places = [mount.joinpath(folder, *parts[:depth]) for depth in range(len(parts) + 1)]
    found = []
    for place in places:
        try:
            most, used = ((place / name).read_text().strip() for name in (limit, use))
            stat = dict(row.split() for row in (place / "memory.stat").read_text().splitlines())
        except OSError:
            continue  # not mounted here, or without a limit
        if most != "max":
            found.append(int(most) - int(used) + int(stat.get(line, 0)))
    return found
