"""Set the environment that vLLM gives CPU workers: one OpenMP thread bound to each core.

vLLM 0.32 does this by default (`VLLM_CPU_OMP_THREADS_BIND=auto`; its files `platforms/cpu.py` and
`utils/ompmultiprocessing.py`). `variables` sets the same:

- LD_PRELOAD: torch's copy of GNU's OpenMP, unless an OpenMP is already preloaded; libtcmalloc comes
  before it if the vLLM package has one;
- OMP_NUM_THREADS: the number of cores, each with one logical processor, the last of its core;
- what binds thread n to the n-th of these: GOMP_CPU_AFFINITY for GNU's OpenMP; KMP_AFFINITY,
  KMP_BLOCKTIME and KMP_TPAUSE for Intel's and LLVM's; else OMP_PLACES and OMP_PROC_BIND.

It differs from vLLM in two ways, because both contenders get all cores here: no core is reserved
for a scheduler, and the cores of all NUMA nodes count, where a vLLM worker gets those of one node.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks import timing

NAMES = (
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "KMP_TPAUSE",
    "OMP_PLACES",
    "OMP_PROC_BIND",
)


def one_cpu_per_core(allowed: Iterable[int], topology: Path = timing.CPUS) -> list[int]:
    """Return the last allowed logical processor of each core."""
    last: dict[str, int] = {}
    for cpu in sorted(allowed):
        siblings = topology / f"cpu{cpu}/topology/thread_siblings_list"
        last[siblings.read_text().strip() if siblings.exists() else str(cpu)] = cpu
    return sorted(last.values())


def preloads(python: str, preloaded: str) -> str:
    """Return the worker's LD_PRELOAD, given this process's; `python` need not have vLLM."""
    code = (
        "from importlib.util import find_spec\n"
        "for name in ('torch', 'vllm'):\n"
        "    spec = find_spec(name)\n"
        "    print(spec.submodule_search_locations[0] if spec else '')"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return preloaded  # the worker says why it does not start
    torch, vllm = map(Path, done.stdout.split("\n")[:2])
    libraries = list(filter(None, preloaded.split(":")))
    if not any(name in preloaded for name in ("libomp", "libgomp", "libiomp")):
        folders = (torch.parent / "torch.libs", torch / "lib")
        libraries += [str(p) for f in folders for p in sorted(f.glob("libgomp*.so*"))][:1]
    if "libtcmalloc" not in preloaded:
        patterns = ("libtcmalloc_minimal*.so*", "libtcmalloc.so*")
        found = [str(p) for name in patterns for p in sorted((vllm / "libs").glob(name))]
        libraries = found[:1] + libraries
    return ":".join(libraries)


def binding(cpus: Sequence[int], preloaded: str) -> dict[str, str]:
    """Return the variables that make the preloaded OpenMP bind one thread to each of `cpus`."""
    found = {"OMP_NUM_THREADS": str(len(cpus))}
    if "libiomp" in preloaded or "libomp" in preloaded:
        listed = ",".join(map(str, cpus))
        return found | {
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{listed}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
        }
    if "libgomp" in preloaded:
        return found | {"GOMP_CPU_AFFINITY": " ".join(map(str, cpus))}
    places = "{" + ",".join(map(str, cpus)) + "}"
    return found | {"OMP_PLACES": places, "OMP_PROC_BIND": "true"}


def variables(python: str) -> dict[str, str]:
    """Return what the worker's environment has in addition to this process's."""
    preloaded = preloads(python, os.environ.get("LD_PRELOAD", ""))
    given = binding(one_cpu_per_core(timing.cpus()), preloaded)
    return given | ({"LD_PRELOAD": preloaded} if preloaded else {})


def recorded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of these variables in an environment, with paths cut to file names."""
    found = {name: environment[name] for name in NAMES if name in environment}
    if "LD_PRELOAD" in found:
        found["LD_PRELOAD"] = ":".join(Path(p).name for p in found["LD_PRELOAD"].split(":"))
    return found
