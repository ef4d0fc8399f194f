"""Check whether measured kernels are still the same: compare their PTX at a commit and now.

    python -m benchmarks.gpu.since COMMIT [--implementation mosaic_gpu] [--sm 90]

The same JAX compiles a sample of calls in a work tree of the commit and in this one, for a
described GPU. Two kernels are the same if their PTX differs only in the names of registers and
labels. Each kernel that differs gets a line: instructions then and now, and which opcodes occur
more or less often. No GPU is needed.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
SIZES = ((64, 64), (128, 128), (256, 256), (512, 512), (576, 512))
FORMATS = ("bfloat16", "fp8_e4m3")
OPTIONS = ((), ("sliding_window", "logits_soft_cap", "sinks", "return_lse"))


def calls() -> list[dict[str, Any]]:
    """Return the arguments of `benchmarks.gpu.cases.Case`: every size, and more for two of them."""
    found = []
    for head, kind in itertools.product(SIZES, ("decode", "mixed")):
        heads = (16, 1) if head == (576, 512) else (32, 4)
        count = 2 if head[0] in (128, 512) else 1
        for format, options in itertools.product(FORMATS[:count], OPTIONS[:count]):
            call = {"head": head, "kind": kind, "format": format, "options": options}
            found.append({**call, "heads": heads})
    return found


def normalized(ptx: str) -> list[str]:
    """Return a kernel's instructions and labels without names of registers, labels, parameters."""
    lines = (line.split("//")[0].strip() for line in ptx.splitlines())
    code = (line for line in lines if line.endswith((";", ":")) and not line.startswith("."))
    names = {r"\$\w+": "L", r"%[a-z]+\d+": "%r", r"\w+_param_\d+": "param"}
    return [functools.reduce(lambda x, y: re.sub(*y, x), names.items(), line) for line in code]


def compiled(implementation: str, sm: int) -> dict[str, list[str]]:
    """Return the PTX of each kernel of `calls` in the tree that this process runs in."""
    import jax

    import jattn
    from benchmarks.gpu import report
    from benchmarks.gpu.cases import Case

    jax.config.update("jax_platforms", "cpu")
    found = {}
    for call in calls():
        case = Case(**call, implementation=implementation)
        label = f"head{case.head[0]}v{case.head[1]}-{case.kind}-{case.format}"
        label += "-options" * bool(case.options)
        try:
            fn, arguments = case.function()
            kernels = report.report(fn, *arguments, sm=sm)
        except jattn.UnsupportedError as error:
            print(f"{label}: {error}", file=sys.stderr)
            continue
        kinds = {"mosaic_gpu": "mosaic", "triton": "triton"}
        ours = [kernel for kernel in kernels if kernel.kind == kinds[implementation]]
        for i, kernel in enumerate(ours):
            found[f"{label} {kernel.name} {i}"] = normalized(kernel.ptx)
    return found


def compiled_in(tree: pathlib.Path, implementation: str, sm: int) -> dict[str, list[str]]:
    """Run `compiled` in another tree, in a separate process."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = (sys.executable, __file__, "--dump", "--implementation", implementation)
    run = subprocess.run(
        (*command, "--sm", str(sm)), cwd=tree, env=environment, stdout=subprocess.PIPE, check=True
    )
    return json.loads(run.stdout)


def opcodes(lines: list[str]) -> collections.Counter[str]:
    """Count each opcode in a kernel, whatever its predicate."""
    words = (line.removeprefix("@%r ").split() for line in lines if line.endswith(";"))
    return collections.Counter(word[0] for word in words)


def compare(then: dict[str, list[str]], now: dict[str, list[str]]) -> list[str]:
    """Write a line for each kernel that differs, and one that counts the others."""
    lines, same = [], 0
    for name in sorted(then.keys() | now.keys()):
        old, new = then.get(name), now.get(name)
        if old == new:
            same += 1
        elif old is None or new is None:
            lines.append(f"{name}: only {'then' if new is None else 'now'}")
        else:
            before, after = opcodes(old), opcodes(new)
            changes = [f"{n:+} {x}" for x in before | after if (n := after[x] - before[x])]
            changed = ", ".join(changes) or "other operands or another order"
            lines.append(f"{name}: {len(old)} lines then, {len(new)} now: {changed}")
    return [*lines, f"{same} of {len(then.keys() | now.keys())} kernels are the same"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("commit", nargs="?", help="what to compare the working tree with")
    parser.add_argument("--implementation", choices=("mosaic_gpu", "triton"), default="mosaic_gpu")
    parser.add_argument("--sm", type=int, default=90, help="compute capability (default: 90)")
    parser.add_argument("--dump", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.dump:
        print(json.dumps(compiled(given.implementation, given.sm)))
        return
    if given.commit is None:
        parser.error("the following arguments are required: commit")
    git = ("git", "-C", str(ROOT), "worktree")
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder, "tree")
        subprocess.run((*git, "add", "--quiet", "--detach", str(tree), given.commit), check=True)
        try:
            then = compiled_in(tree, given.implementation, given.sm)
        finally:
            subprocess.run((*git, "remove", "--force", str(tree)), check=True)
    now = compiled_in(ROOT, given.implementation, given.sm)
    print("\n".join(compare(then, now)))


if __name__ == "__main__":
    main()
