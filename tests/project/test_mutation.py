"""The tool that plants bugs: every mutant is valid Python and differs from the source."""

from __future__ import annotations

import ast

import pytest

from tests.tools import mutation

SPEC = mutation.ROOT / "jattn" / "spec.py"


@pytest.mark.extended
def test_every_mutant_is_a_different_program():
    source = SPEC.read_text()
    found = mutation.mutants(SPEC)
    assert len(found) > 50
    whole = ast.dump(ast.parse(source))
    for mutant in found:
        assert ast.dump(ast.parse(mutant.apply(source))) != whole, mutant


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        ("a < b", {"(a <= b)", "(a < b + 1)"}),
        ("a & b", {"(a | b)", "a"}),
        ("jnp.minimum(a, b)", {"(jnp.maximum(a, b))"}),
        ("not a", {"a"}),
        ("7", {"8"}),
        ("-1", {"1", "-2"}),
        ("x if a else y", {"(y if a else x)"}),
        ('f"{a + 1}"', set()),
        ("zip(a, strict=True)", set()),
    ],
)
def test_mistakes_of_an_expression(tmp_path, monkeypatch, text, mistakes):
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    path = tmp_path / "code.py"
    path.write_text(f'def f(a, b, x, y):\n    """1 < 2."""\n    return {text}\n')
    lines = {m.apply(path.read_text()).splitlines()[2] for m in mutation.mutants(path)}
    plain = {line.removeprefix("    return ") for line in lines}
    assert {line.removeprefix("(").removesuffix(")") for line in plain} == {
        line.removeprefix("(").removesuffix(")") for line in mistakes
    }


def test_every_source_file_has_tests_that_exist():
    for pattern, tests in mutation.TESTS.items():
        assert list(mutation.ROOT.glob(pattern)), pattern
        for name in tests:
            assert (mutation.ROOT / name).is_file(), name
