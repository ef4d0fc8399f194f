"""What a compiler makes of the innermost loops of prefill."""

from __future__ import annotations

import platform
import re
import subprocess

import pytest

from jattn.cpu.native import build

pytestmark = pytest.mark.extended
SOURCE = """
#include "prefill.h"
void jattn_native::out_of_memory() { __builtin_trap(); }
using namespace jattn_native;
void attend(const Problem& p, const Split& split, Queue& queue) {
  many_rows<float>(p, split, queue);
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 assembly")
def test_sums_stay_in_registers(tmp_path):
    """With AVX2, of up to 12 sums and 4 operands none is on the stack, to be read in each step."""
    command = build.compiler()
    optimization = build.optimization(command)
    if optimization == ("-O3",):
        pytest.skip("reads what GCC writes, and this compiler is Clang")
    flags = build.instruction_sets("x86_64", command)["avx2"]
    source, made = tmp_path / "source.cc", tmp_path / "source.s"
    source.write_text(SOURCE)
    options = ("-std=c++17", "-fno-math-errno", "-w", *optimization, *flags)
    run = (*command, *options, "-I", build.SOURCES, "-S", source, "-o", made)
    subprocess.run(run, check=True)
    functions = re.findall(r"^(_Z\w*multiply_\w+):\n(.*?)^\s*\.size", made.read_text(), re.M | re.S)
    assert len(functions) == 6  # of keys and values, for each number of vectors in a panel
    for name, lines in functions:
        products = re.findall(r"vfmadd.*", lines)
        assert len(products) >= 8
        kept = [
            line for line in lines.splitlines() if re.search(r"\(%r[bs]p.*ymm|ymm.*\(%r[bs]p", line)
        ]
        assert not kept, name
