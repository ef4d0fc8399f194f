"""The assembly of the innermost loops of prefill, and of decode with large groups."""

from __future__ import annotations

import platform
import re
import subprocess

import pytest

from jattn.cpu.native import build

pytestmark = pytest.mark.extended
SOURCE = """
#include "prefill.h"
#include "vector_rows.h"
void jattn_native::out_of_memory() {{ __builtin_trap(); }}
using namespace jattn_native;
void attend(const Problem& p, const Split& split, Queue& queue) {{
  {calls}
}}
"""
FLOATS = ["many_rows<float>"]
# By instruction set: forms, and how many of their functions are named `multiply` or `add_all`.
CASES = {
    # for keys and values, for one to three vectors of rows in a panel
    "avx2": (FLOATS, 6),
    # for two and three vectors, of floats and of pairs; and for a single vector
    "avx512bf16": (
        [*FLOATS, "many_rows<uint32_t>", "vector_rows<float>", "vector_rows<uint32_t>"],
        12,
    ),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 assembly")
@pytest.mark.parametrize("name", CASES)
def test_sums_stay_in_registers(tmp_path, name):
    """No sum or operand of a loop is on the stack, where each step would read it."""
    command = build.compiler()
    optimization = build.optimization(command)
    if optimization == ("-O3",):
        pytest.skip("reads GCC's assembly, but this compiler is Clang")
    forms, count = CASES[name]
    flags = build.instruction_sets("x86_64", command)[name]
    source, made = tmp_path / "source.cc", tmp_path / "source.s"
    source.write_text(SOURCE.format(calls=" ".join(f"{x}(p, split, queue);" for x in forms)))
    options = ("-std=c++17", "-fno-math-errno", "-DJATTN_X86", "-w", *optimization, *flags)
    run = (*command, *options, "-I", build.SOURCES, "-S", source, "-o", made)
    subprocess.run(run, check=True)
    function = r"^(_Z\w*(?:multiply|add_all)_\w+):\n(.*?)^\s*\.size"
    functions = re.findall(function, made.read_text(), re.M | re.S)
    assert len(functions) == count
    for symbol, lines in functions:
        products = re.findall(r"vfmadd.*|vdpbf16ps.*", lines)
        assert len(products) >= 8
        on_stack = r"\(%r[bs]p.*[yz]mm|[yz]mm.*\(%r[bs]p"
        kept = [line for line in lines.splitlines() if re.search(on_stack, line)]
        assert not kept, symbol
