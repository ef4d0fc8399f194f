"""The log of what tests compile: its report finds programs that are compiled twice."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
from jax._src import compiler

from tests.support import compile_log


def read(path) -> list[compile_log.Program]:
    return [compile_log.Program(**json.loads(line)) for line in path.read_text().splitlines()]


def test_numbers_in_programs_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "compile_or_get_cached", compiler.compile_or_get_cached)
    compile_log.start(str(tmp_path / "log"))

    def scaled(by: float, size: int) -> None:
        jax.jit(lambda x: x * np.float32(by))(np.ones(size, np.float32))

    for by, size in ((2.5, 3), (3.5, 3), (2.5, 3), (2.5, 4)):
        scaled(by, size)
    programs = read(tmp_path / "log")
    assert len(programs) == 4
    assert programs[0].test.endswith("test_compile_log.py::test_numbers_in_programs_are_found")
    (group,) = compile_log.equal_but_for_constants(programs)
    assert group == programs[:2]
    assert programs[0].constants != programs[1].constants
    assert programs[2].cached or compile_log.repeated(programs) == [programs[2]]


def test_the_report_fails_above_its_limit(tmp_path, capsys):
    one = compile_log.Program("t", "jit_f", "m1", "s", "dense<1>", 1.0, False)
    two = dataclasses.replace(one, module="m2", constants="dense<2>")
    rest = dataclasses.replace(one, module="m3", shape="other", seconds=98.0)
    log = tmp_path / "log"
    log.write_text("".join(json.dumps(dataclasses.asdict(p)) + "\n" for p in (one, two, rest, one)))
    assert compile_log.main([str(log), "--limit", "1"]) == 0
    assert compile_log.main([str(log), "--limit", "0.9"]) == 1
    said = capsys.readouterr().out
    assert "4 programs, 101.0 s" in said
    assert "compiled again: 1, 1.0 s" in said
    assert "equal but for constants: 1 groups, 1.0 s" in said
