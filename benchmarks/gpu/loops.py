"""Count the machine instructions of a kernel's inner loops by opcode.

    python -m benchmarks.gpu.loops --head 64 64 --kind mixed [--implementation mosaic_gpu] [--sm 90]

One line per loop that contains a matrix instruction and no other such loop. Instructions in its
branches count, whether taken or not.

Needs `nvdisasm`, which Triton's wheel contains.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu import report as gpu_report
from benchmarks.gpu.cases import Case
from benchmarks.gpu.targets import MissingCompilerError
from jattn.pallas.triton import needs

MATRIX = ("HMMA", "HGMMA", "UTCHMMA", "UTCQMMA")
LABEL = re.compile(r"(\.L_x_\d+):")
BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Z0-9_]+)*)")


@dataclasses.dataclass(frozen=True)
class Loop:
    """An innermost loop with matrix instructions.

    Attributes:
      kernel: its entry point.
      opcodes: how often each occurs; MUFU with its function ("MUFU.EX2").
    """

    kernel: str
    opcodes: collections.Counter[str]

    @property
    def instructions(self) -> int:
        """The number of instructions."""
        return self.opcodes.total()


def find_nvdisasm() -> str:
    """Find the disassembler, on the path, in the toolkit or in Triton.

    Raises:
      MissingCompilerError: there is none.
    """
    places = [shutil.which("nvdisasm"), "/usr/local/cuda/bin/nvdisasm"]
    places += [f"{site}/triton/backends/nvidia/bin/nvdisasm" for site in sys.path]
    for place in places:
        if place and os.access(place, os.X_OK):
            return place
    triton = needs.TRITON[needs.JAX_TRITON].wanted
    raise MissingCompilerError(f"no nvdisasm: pip install triton=={triton}, or a CUDA toolkit")


def disassembled(ptx: str) -> str:
    """Return the machine instructions that ptxas makes of a module."""
    target = re.search(r"^\.target (\w+)", ptx, re.M)[1]
    version = float(re.search(r"^\.version (\S+)", ptx, re.M)[1])
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "cubin")
        source.write_text(ptx)
        assemble = [gpu_report.find_ptxas(version), f"-arch={target}", source, "-o", cubin]
        subprocess.run(assemble, check=True, capture_output=True)
        command = [find_nvdisasm(), "-c", cubin]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def loops_of(kernel: gpu_report.Kernel) -> list[Loop]:
    """Return the kernel's innermost loops that contain a matrix instruction, in order."""
    lines = disassembled(kernel.ptx).splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := LABEL.match(line))}
    spans = []
    for last, line in enumerate(lines):
        found = BRANCH.search(line)
        if found and (first := labels.get(found[1], last)) < last:
            counted = _count(lines[first : last + 1])
            # Waiting code is placed after the kernel's end, and jumps back from there.
            if any(counted[name] for name in MATRIX) and not counted["EXIT"]:
                spans.append((first, last, counted))

    def is_innermost(first: int, last: int) -> bool:
        inside = [s for s in spans if first <= s[0] and s[1] <= last]
        return len(inside) == 1

    return [Loop(kernel.name, counted) for *at, counted in spans if is_innermost(*at)]


def _count(lines: list[str]) -> collections.Counter[str]:
    counted: collections.Counter[str] = collections.Counter()
    for line in lines:
        if found := OPCODE.search(line):
            name, modifiers = found.groups()
            counted[f"MUFU.{modifiers.split('.')[1]}" if name == "MUFU" else name] += 1
    return counted


def main() -> None:
    """Print the loops of one call's kernels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", type=int, nargs=2, default=(64, 64), metavar=("D", "V"))
    parser.add_argument("--kind", default="mixed", help="decode, speculative, mixed or extend")
    parser.add_argument("--implementation", default="triton", choices=("triton", "mosaic_gpu"))
    parser.add_argument("--format", default="bfloat16")
    parser.add_argument("--options", nargs="*", default=())
    parser.add_argument("--sm", type=int, default=90)
    args = parser.parse_args()
    case = Case(
        tuple(args.head), args.kind, format=args.format, options=tuple(args.options),
        implementation=args.implementation, num_blocks=1024,
    )  # fmt: skip
    fn, arguments = case.function()
    xla = args.implementation != "triton"
    for kernel in gpu_report.report(fn, *arguments, sm=args.sm, xla=xla):
        if kernel.kind == "xla":
            continue
        for loop in loops_of(kernel):
            counts = ", ".join(f"{name} {n}" for name, n in loop.opcodes.most_common(16))
            print(f"{loop.kernel}: {loop.instructions} instructions: {counts}")


if __name__ == "__main__":
    main()
