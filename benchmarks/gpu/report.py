"""Report registers, spills, memory, occupancy and instructions of GPU kernels, without a GPU.

    python -m benchmarks.gpu.report [--sm 80 90 100] [--filter REGEX] [--json] [--fail-on-spill]
    python -m benchmarks.gpu.report FILE.py:FUNCTION ...

Without a file it reports jattn's own kernels (`benchmarks.gpu.cases`). `FUNCTION()` returns a list
of `(label, fn, arguments)`; arguments are arrays or `jax.ShapeDtypeStruct`s. From a test:

    for kernel in gpu_report.report(fn, *arguments, sm=90):
        assert kernel.spill_bytes == 0

XLA compiles the function for a described device (`benchmarks.gpu.targets`), and ptxas assembles
every kernel's PTX and reports what it uses. There are three kinds of kernels: `triton` (jax-triton
embeds PTX in the module), `mosaic` (Pallas on Mosaic GPU compiles to PTX when XLA compiles the
module) and `xla` (fusions that XLA generates).

Occupancy is what the counts allow; a Mosaic kernel that moves registers between its warpgroups at
run time is counted as it is launched.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu.targets import GPUS, MissingCompilerError, device_for, occupancy

# Counted in the PTX: which matrix unit and which copy engine a kernel uses.
INSTRUCTIONS = {
    "mma": r"\bmma\.sync\.",
    "wgmma": r"\bwgmma\.mma_async\.",
    "tcgen05": r"\btcgen05\.mma\.",
    "ldmatrix": r"\bldmatrix\.",
    "cp.async": r"\bcp\.async\.c[ag]\.",
    "tma": r"\bcp\.async\.bulk\.tensor\.",
    "ld.global": r"\bld\.(?:global|relaxed|volatile)",
    "atom": r"\b(?:atom|red)\.",
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a compiled function.

    Attributes:
      name: its entry point.
      kind: "triton", "mosaic" or "xla".
      target: the architecture in its PTX, such as "sm_90a".
      grid: blocks launched.
      threads: threads per block.
      registers: registers per thread.
      spill_stores, spill_loads: bytes of registers stored to memory and loaded back.
      stack: bytes per thread.
      shared: bytes per block, static and dynamic.
      blocks_per_core: how many blocks fit on one streaming multiprocessor.
      limited_by: what prevents more blocks.
      instructions: how often those of `INSTRUCTIONS` occur in the PTX, without zeros.
      ptx: the text of the PTX.
    """

    name: str
    kind: str
    target: str
    grid: tuple[int, ...]
    threads: int
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    blocks_per_core: int
    limited_by: str
    instructions: dict[str, int]
    ptx: str = dataclasses.field(repr=False)

    @property
    def spill_bytes(self) -> int:
        """Bytes stored and loaded for lack of registers."""
        return self.spill_stores + self.spill_loads

    def as_json(self) -> dict[str, Any]:
        """Return all fields except the PTX."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "ptx"}


@dataclasses.dataclass(frozen=True)
class Launch:
    """The PTX of one kernel, and how it is launched."""

    kind: str
    ptx: str
    grid: tuple[int, ...]
    dynamic_shared: int


def report(
    fn: Callable, *arguments: Any, sm: int = 90, keep: str | None = None, xla: bool = True
) -> list[Kernel]:
    """Compile `fn(*arguments)` for one GPU, and return what each of its kernels uses.

    Args:
      fn: a function, jitted or not.
      *arguments: pytrees; leaves with a shape and a dtype are abstracted to these.
      sm: a key of `GPUS`.
      keep: a folder for what the compiler writes (HLO, PTX), or None.
      xla: whether to compile the module too. Without it the report has only jax-triton's kernels,
        and is four times as fast.

    Raises:
      MissingCompilerError: the CUDA plugin or an assembler is not installed.
    """
    with lowering(fn, *arguments, sm=sm) as lowered:
        launches = launches_of(lowered, sm, keep=keep, xla=xla)
        return [kernel for launch in launches for kernel in assemble(launch, sm)]


@contextlib.contextmanager
def lowering(fn: Callable, *arguments: Any, sm: int) -> Iterator[Any]:
    """Lower `fn(*arguments)` for one GPU; the context has the settings to compile it."""
    device = device_for(sm)
    sharding = jax.sharding.SingleDeviceSharding(device)

    def abstract(x: Any) -> Any:
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return x

    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    with jax.default_device(device), _jax_triton_compiles_for(sm):
        yield jitted.lower(*jax.tree.map(abstract, arguments))


def launches_of(
    lowered: Any, sm: int, *, keep: str | None = None, xla: bool = True
) -> list[Launch]:
    """Return the PTX of each kernel of a function lowered for `device_for(sm)`; see `report`."""
    launches, mosaic = _custom_calls(lowered)
    if xla:
        with contextlib.ExitStack() as stack:
            folder = keep or stack.enter_context(tempfile.TemporaryDirectory())
            launches += _compiled_by_xla(lowered, sm, Path(folder), mosaic)
    return launches


def assemble(launch: Launch, sm: int) -> Iterator[Kernel]:
    """Yield ptxas' figures for each entry point of a module."""
    target = re.search(r"^\.target (\w+)", launch.ptx, re.M)[1]
    bodies = re.split(r"\.entry\s+([\w$]+)", launch.ptx)
    texts = dict(zip(bodies[1::2], bodies[2::2], strict=True))
    for part in re.split(r"Compiling entry function ", _ptxas(launch.ptx, target))[1:]:
        name = re.match(r"'([^']+)'", part)[1]

        def count(pattern: str, part: str = part) -> int:
            found = re.search(pattern, part)
            return int(found[1]) if found else 0

        size = re.search(r"\.(?:reqntid|maxntid) (\d+)(?:, (\d+))?(?:, (\d+))?", texts[name])
        threads = 1
        for n in size.groups(default="1") if size else ():
            threads *= int(n)
        shared = launch.dynamic_shared
        if launch.kind != "mosaic":  # its one static byte marks the dynamic allocation
            shared += count(r"(\d+) bytes smem")
        registers = count(r"Used (\d+) registers")
        fit, limit = occupancy(GPUS[sm], threads, registers, shared)
        counts = {key: len(re.findall(p, texts[name])) for key, p in INSTRUCTIONS.items()}
        yield Kernel(
            name=name.removesuffix("_mosaic_gpu_kernel"),
            kind=launch.kind,
            target=target,
            grid=launch.grid,
            threads=threads,
            registers=registers,
            spill_stores=count(r"(\d+) bytes spill stores"),
            spill_loads=count(r"(\d+) bytes spill loads"),
            stack=count(r"(\d+) bytes stack frame"),
            shared=shared,
            blocks_per_core=fit,
            limited_by=limit,
            instructions={key: n for key, n in counts.items() if n},
            ptx=launch.ptx,
        )


def _ptxas(ptx: str, target: str) -> str:
    """Run ptxas on a module, and return its output."""
    version = float(re.search(r"^\.version (\S+)", ptx, re.M)[1])
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [find_ptxas(version), "-v", f"-arch={target}", source, "-o", f"{folder}/cubin"]
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"ptxas refused the kernel:\n{run.stderr}")
    return run.stderr


def find_ptxas(version: float = 0.0) -> str:
    """Find the first assembler that takes PTX of `version`: $PTXAS, the toolkit's, a package's.

    Raises:
      MissingCompilerError: there is none.
    """
    places = [os.environ.get("PTXAS"), shutil.which("ptxas")]
    roots = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    places += [f"{root}/bin/ptxas" for root in roots if root]
    for site in sys.path:
        places.append(f"{site}/nvidia/cu13/bin/ptxas")
        places += [f"{site}/triton/backends/nvidia/bin/{p}" for p in ("ptxas-blackwell", "ptxas")]
    newest = 0.0
    for place in places:
        if place and os.access(place, os.X_OK):
            said = subprocess.run([place, "--version"], capture_output=True, text=True).stdout
            if release := re.search(r"release (\d+)\.(\d+)", said):
                takes = int(release[1]) - 4 + int(release[2]) / 10  # CUDA 13.0 takes PTX 9.0
                if takes >= version:
                    return place
                newest = max(newest, takes)
    raise MissingCompilerError(
        f"no ptxas for PTX {version} (the newest found takes {newest}): install a CUDA toolkit, or "
        "pip install nvidia-cuda-nvcc, or name one in $PTXAS"
    )


@contextlib.contextmanager
def _jax_triton_compiles_for(sm: int) -> Iterator[None]:
    """Make jax-triton compile for `sm`; it asks the driver unless a call says what to target."""
    lib = getattr(sys.modules.get("jax_triton.triton_lib"), "triton_kernel_call_lib", None)
    if lib is None:
        yield
        return
    ask = lib.get_compute_capability
    lib.get_compute_capability = lambda device: sm
    try:
        yield
    finally:
        lib.get_compute_capability = ask


def operations(operation: Any) -> Iterator[Any]:
    """Yield every operation inside one, with a region's operations after the one that has it."""
    # Mosaic GPU's serialized dialect has no Python module, and MLIR would search the disk for it at
    # each operation, which takes 15 s per kernel.
    name = "jaxlib.mlir.dialects.stable_mosaic_gpu"
    sys.modules.setdefault(name, types.ModuleType(name))
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from operations(inner.operation)


def _custom_calls(lowered: Any) -> tuple[list[Launch], dict[bytes, tuple]]:
    """Return jax-triton's kernels, and `{hash: (name, grid, shared)}` of Mosaic GPU's."""
    from jax._src.lib.mlir import ir

    module = lowered.compiler_ir()
    launches, mosaic = [], {}
    for op in operations(module.operation):
        if op.name != "stablehlo.custom_call":
            continue
        target = ir.StringAttr(op.attributes["call_target_name"]).value
        config = None
        if "mhlo.backend_config" in op.attributes:
            config = op.attributes["mhlo.backend_config"]
        if target.startswith("triton_kernel_call"):
            if config is not None:
                packed = ir.StringAttr(ir.DictAttr(config)["opaque"])
            else:
                packed = ir.StringAttr(op.attributes["backend_config"])
            launches += _jax_triton_launches(packed.value_bytes)
        elif target.startswith("mosaic_gpu"):
            config = ir.DictAttr(config)
            module.context.allow_unregistered_dialects = True
            kernel = ir.Module.parse(
                ir.StringAttr(config["module"]).value_bytes, context=module.context
            )
            for launch in operations(kernel.operation):
                if launch.name.endswith("gpu.launch"):
                    # (Tokens,) grid xyz, block xyz, (cluster xyz,) shared.
                    tokens, *_ = ir.DenseI32ArrayAttr(launch.attributes["operandSegmentSizes"])
                    sizes = [
                        ir.IntegerAttr(operand.owner.attributes["value"]).value
                        for operand in list(launch.operands)[tokens:]
                    ]
                    key = ir.StringAttr(config["kernel_hash"]).value_bytes
                    mosaic[key] = _function_around(launch), tuple(sizes[:3]), sizes[-1]
    return launches, mosaic


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield `(field number, value)` of each field of a serialized protobuf message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        elif key & 7 == 2:
            size = varint()
            yield key >> 3, message[at : at + size]
            at += size
        else:
            at += 8 if key & 7 == 1 else 4


def _jax_triton_launches(packed: bytes) -> Iterator[Launch]:
    """Yield the kernels in a jax-triton call's backend config, which is a compressed protobuf."""

    def launch(message: bytes) -> Launch:
        kernel, grid = {}, [1, 1, 1]
        for number, value in _fields(message):
            if number == 1:
                kernel = dict(_fields(value))
            elif 2 <= number <= 4:
                grid[number - 2] = value
        return Launch("triton", kernel[4].decode(), tuple(grid), kernel.get(3, 0))

    for number, value in _fields(zlib.decompress(packed)):
        if number == 1:
            yield launch(value)


# Mosaic GPU compiles a kernel once per process: {(kernel hash, sm): its PTX}.
_mosaic_ptx: dict[tuple[bytes, int], str] = {}


def thunks_of(lowered: Any, folder: Path) -> str:
    """Return the launches of a lowered function, one line each, as XLA describes them.

    Launches inside a `kCommandBuffer` are one graph. The compiler writes its files to `folder`.
    """
    before = set(folder.iterdir())
    options = {"xla_dump_to": str(folder)}
    if jax.__version_info__ >= (0, 11):  # earlier versions dump PTX always
        options["xla_dump_emitter_re"] = "ptx"
    lowered.compile(compiler_options=options)
    new = sorted(set(folder.iterdir()) - before)
    found = {
        p.name.rpartition("thunk_sequence")[2]: p.read_text()
        for p in new
        if "thunk_sequence" in p.name
    }
    if not found:
        raise RuntimeError("XLA compiled nothing: is the persistent compilation cache on?")
    # The second file is written if passes, such as the one that makes graphs, changed the first.
    return found.get("_after_thunk_passes.txt", found.get(".txt", ""))


def _function_around(op: Any) -> str:
    """Return the name of the function that an operation is in."""
    while not op.name.endswith("func.func"):
        op = op.parent
    return op.attributes["sym_name"].value


def _compiled_by_xla(lowered: Any, sm: int, folder: Path, mosaic: dict) -> list[Launch]:
    """Return the kernels that exist only once XLA has compiled the module."""
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    printed = folder / "mosaic.ptx"
    with _mosaic_ptx_to(printed):
        thunks = thunks_of(lowered, folder)
    new = sorted(set(folder.iterdir()) - before - {printed})
    launches = []
    for name, grid, shared in re.findall(
        r"\s([\w$.]+) grid: \[([^\]]*)\].*shared_memory: (\d+) bytes", thunks
    ):
        sizes = tuple(int(n) for n in grid.split(","))
        for path in new:
            if path.suffix == ".ptx" and (text := _entry(path.read_text(), name)):
                launches.append(Launch("xla", text, sizes, int(shared)))
                break
    fresh = [key for key in mosaic if (key, sm) not in _mosaic_ptx]
    for text in re.split(r"(?m)^(?=\.version )", printed.read_text()):
        if "_mosaic_gpu_kernel(" in text:
            entry = re.search(r"\.entry (\w+)_kernel\(", text)[1]
            key = next(key for key in fresh if mosaic[key][0] == entry)
            fresh.remove(key)
            _mosaic_ptx[key, sm] = text
    if fresh:
        raise RuntimeError(
            "a Mosaic GPU kernel was compiled earlier in this process, so its PTX is gone: "
            "report on it first, or in a separate process"
        )
    for key, (_, grid, shared) in mosaic.items():
        launches.append(Launch("mosaic", _mosaic_ptx[key, sm], grid, shared))
    return launches


def _entry(ptx: str, name: str) -> str | None:
    """Return a module with only the entry point `name`, or None if there is none."""
    parts = re.split(r"(?m)^(?=\.visible \.entry|\.entry|// \.globl)", ptx)
    mine = [part for part in parts[1:] if re.search(rf"\.entry\s+{re.escape(name)}\b", part)]
    return parts[0] + mine[0] if mine else None


@contextlib.contextmanager
def _mosaic_ptx_to(path: Path) -> Iterator[None]:
    """Make Mosaic GPU print its PTX; its output, file descriptor 1, is redirected to `path`."""
    sys.stdout.flush()
    stdout = os.dup(1)
    old = os.environ.get("MOSAIC_GPU_DUMP_PTX")
    os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
    try:
        with open(path, "w") as file:
            os.dup2(file.fileno(), 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        if old is None:
            del os.environ["MOSAIC_GPU_DUMP_PTX"]
        else:
            os.environ["MOSAIC_GPU_DUMP_PTX"] = old


def table(kernels: Sequence[Kernel]) -> str:
    """Format the kernels as an aligned table."""
    head = (
        *("kernel", "kind", "target", "grid", "threads", "regs", "spill st/ld", "shared"),
        *("per core", "limit", "instructions"),
    )
    rows = [head]
    for kernel in kernels:
        instructions = " ".join(f"{name}:{n}" for name, n in kernel.instructions.items())
        spills = f"{kernel.spill_stores}/{kernel.spill_loads}"
        grid = "x".join(map(str, kernel.grid))
        rows.append(
            (
                *(kernel.name, kernel.kind, kernel.target, grid, str(kernel.threads)),
                *(str(kernel.registers), spills, str(kernel.shared)),
                *(str(kernel.blocks_per_core), kernel.limited_by, instructions),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def line(cells: Iterable[Any]) -> str:
    """Format a line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown(titles: Sequence[str]) -> tuple[str, str]:
    """Format the head of a Markdown table."""
    return line(titles), "|" + "---|" * len(titles)


def _load(spec: str) -> list[tuple[str, Callable, tuple]]:
    path, _, name = spec.partition(":")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    found = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return getattr(module, name or "cases")()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if something does not compile or, if asked, spills."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("cases", nargs="?", help="FILE.py:FUNCTION; jattn's own if not given")
    parser.add_argument("--sm", type=int, nargs="+", default=[90], choices=sorted(GPUS))
    parser.add_argument("--filter", default="", metavar="REGEX", help="only cases labelled so")
    parser.add_argument("--keep", metavar="DIR", help="keep the compiler's files here")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each kernel")
    parser.add_argument("--fail-on-spill", action="store_true", help="exit 1 if a kernel spills")
    options = parser.parse_args(arguments)
    if options.cases:
        cases = _load(options.cases)
    else:
        from benchmarks.gpu import cases as gpu_cases

        cases = gpu_cases.cases()
    cases = [case for case in cases if re.search(options.filter, case[0])]
    failed = not cases
    for label, fn, args in cases:
        for sm in options.sm:
            keep = options.keep
            if keep:
                keep = f"{keep}/{hashlib.sha1(f'{label}{sm}'.encode()).hexdigest()[:10]}"
            try:
                kernels = report(fn, *args, sm=sm, keep=keep)
            except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
                failed = True  # too much shared memory, a dtype this GPU lacks
                print(f"== {label}, sm_{sm}: does not compile: {error}\n", flush=True)
                continue
            failed |= options.fail_on_spill and any(k.spill_bytes for k in kernels)
            if options.json:
                for kernel in kernels:
                    print(json.dumps({"case": label, "sm": sm, **kernel.as_json()}), flush=True)
            else:
                print(f"== {label}, {GPUS[sm].kind} (sm_{sm}), jax {jax.__version__}")
                print(table(kernels), end="\n\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
