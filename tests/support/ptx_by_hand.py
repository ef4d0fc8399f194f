"""Kernels written by hand for the tests of the PTX interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support import ptx


def kernel(
    body: str, parameters: Sequence[str], *, threads: int = 32, shared: int = 0, maps: int = 0
) -> ptx.Kernel:
    """Parse a kernel with registers of each kind.

    %rd0, %rd1 and so on hold its parameters, %rd8 the address of its tensor maps, if any, %r1 the
    address of its shared memory, and %r0 the thread.
    """
    declared = [f".param .u64 {name}" for name in parameters]
    declared += [f".param .align 64 .b8 maps[{128 * maps}]"] * bool(maps)
    begin = [f".shared .align 1024 .b8 s[{shared}];", "mov.b32 %r1, s;"] * bool(shared)
    begin += [f"ld.param.b64 %rd{i}, [{name}];" for i, name in enumerate(parameters)]
    begin += ["mov.b64 %rd9, maps;", "cvta.param.u64 %rd8, %rd9;"] * bool(maps)
    return ptx.parse(f"""
.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(
{",".join(declared)}
)
.reqntid {threads}
{{
 .reg .pred %p<8>;
 .reg .b16 %rs<8>;
 .reg .b32 %r<64>;
 .reg .b64 %rd<16>;
 {" ".join(begin)}
 mov.u32 %r0, %tid.x;
{body}
 ret;
}}
""")


def lanes(body: str, *inputs: np.ndarray, dtype: Any = np.uint32) -> np.ndarray:
    """Run a body with one warp, and return each lane's result [32].

    The body reads its inputs from %a, %b and %c, as wide as their elements, and leaves a `dtype` in
    %d.
    """
    memory, addresses = ptx.Memory(), []
    result = np.zeros(32, dtype)
    text = f" .reg .b{8 * result.itemsize} %d;\n"
    for i, (name, x) in enumerate(zip("abc", inputs, strict=False)):
        addresses.append(memory.put(name, x, constant=True))
        text += f" .reg .b{8 * x.itemsize} %{name};\n mad.wide.u32 %rd9, %r0, {x.itemsize}, %rd{i};"
        text += f"\n ld.global.b{8 * x.itemsize} %{name}, [%rd9];\n"
    addresses.append(memory.put("out", result, written=False))
    text += f"{body}\n mad.wide.u32 %rd9, %r0, {result.itemsize}, %rd{len(inputs)};\n"
    text += f" st.global.b{8 * result.itemsize} [%rd9], %d;\n"
    names = [f"p{i}" for i in range(len(addresses))]
    ptx.launch(kernel(text, names), memory, (1,), addresses)
    return memory.get("out")


def run(
    body: str,
    operands: Sequence[np.ndarray] = (),
    *,
    out: int | np.ndarray = 256,
    threads: int = 32,
    shared: int = 4096,
    maps: Sequence[Callable[[list[int]], ptx.TensorMap]] = (),
    grid: Sequence[int] = (1,),
    cluster: Sequence[int] = (1,),
    registers: int | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Run a body and return its results: `out` 32-bit numbers at %rd0.

    Its operands are at %rd1 and so on. `maps` make tensor maps from the addresses of the output and
    the operands.
    """
    memory = ptx.Memory()
    result = np.zeros(out, np.uint32) if isinstance(out, int) else out
    addresses = [memory.put("out", result, written=False)]
    addresses += [memory.put(f"operand {i}", x, constant=True) for i, x in enumerate(operands)]
    names = [f"p{i}" for i in range(len(addresses))]
    parsed = kernel(body, names, threads=threads, shared=shared, maps=len(maps))
    given = [*addresses, *([tuple(make(addresses) for make in maps)] if maps else [])]
    ptx.launch(parsed, memory, grid, given, cluster=cluster, registers=registers, seed=seed)
    return memory.get("out")
