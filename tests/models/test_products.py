"""The example server's matrix products in C++: when they are used, and how they are compiled."""

import os
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

from examples import native
from examples.engine import serve
from examples.models import layers, moe
from tests.support import products

nothing_taken = products.nothing_taken  # the fixture


TEXT = "the processor has no AVX2, or this is not Linux on x86-64"


def zeros(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_nothing_is_taken_before_it_is_loaded(nothing_taken):
    assert not native.takes(jnp.zeros((128, 64)), jnp.zeros((32, 64)))
    text = jax.jit(layers.product).lower(zeros(128, 64), zeros(32, 64)).as_text()
    assert native.TARGET not in text


@pytest.mark.parametrize(
    ("x", "weight", "taken"),
    [
        ((1, 32, "bfloat16"), (32, 32, "bfloat16"), True),
        ((2, 16, "float32"), (32, 16, "float32"), True),
        ((1, 16, "float32"), (32, 16, "float32"), False),  # XLA is as fast
        ((65, 8, "float32"), (32, 8, "float32"), False),
        ((65, 16, "float32"), (40, 16, "float32"), False),
        ((65, 32, "bfloat16"), (32, 32, "float32"), False),
        ((65, 32, "float16"), (32, 32, "float16"), False),
        ((1, 16, "float32"), (4, 32, 16, "float32"), True),
        ((1, 16, "float32"), (4, 16, 32, "float32"), False),
        ((1, 16, "float32"), (1, 4, 32, 16, "float32"), False),
    ],
)
def test_which_products_are_taken(nothing_taken, x, weight, taken):
    native._taken.extend(["float32", "bfloat16"])
    x, weight = (jnp.zeros(size, dtype) for *size, dtype in (x, weight))
    assert native.takes(x, weight) == taken


@pytest.mark.parametrize(
    ("features", "compiler", "reason"),
    [
        (set(), None, TEXT),
        (native.LEAST, None, "neither g++ nor clang++"),
        (native.WIDE, "", "CXX is '', but must be a compiler's command"),
        (native.WIDE, "no-such-compiler", "CXX is 'no-such-compiler', but must be"),
        (native.WIDE, "g++ '", """CXX is "g++ '", but must be"""),
        (native.WIDE, f"{sys.executable} -c 'import sys; sys.exit(sys.argv[-1])'", "failed: /"),
    ],
)
def test_why_there_is_no_library_is_reported(
    nothing_taken, monkeypatch, tmp_path, features, compiler, reason
):
    monkeypatch.setattr(native, "processor_features", lambda: features)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    if compiler is not None:
        monkeypatch.setenv("CXX", compiler)
    assert reason in native.load(tmp_path)
    assert not native._taken
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("size", "taken"), [(64, True), (40, False)])
def test_products_of_experts_use_it(nothing_taken, size, taken):
    native._taken.extend(["float32", "bfloat16"])
    given = zeros(6, 32), zeros(4, size, 32), zeros(4, dtype="int32")
    assert (native.GROUPED in jax.jit(moe.expert_dot).lower(*given).as_text()) == taken


@pytest.fixture
def compiled(monkeypatch):
    """Replace the compiler by one that writes "a library", and list what it wrote."""
    calls = []

    def compile_it(command, **_):
        made = Path(command[-1])
        assert made.parent.stat().st_mode & 0o777 == 0o700
        made.write_text("a library")
        calls.append(made)

    monkeypatch.setattr(native, "compiler", lambda: ["a-compiler"])
    monkeypatch.setattr(native.subprocess, "run", compile_it)
    return calls


def test_each_compilation_has_a_folder_of_its_own(compiled, monkeypatch, tmp_path):
    """Processes with the same id, in containers that share a folder, must not write one file."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    library = native.build(tmp_path / "a" / "b")
    library.unlink()
    assert native.build(tmp_path / "a" / "b") == library
    assert native.build(tmp_path / "a" / "b") == library  # it is there already
    assert compiled[0].parent != compiled[1].parent
    assert len(compiled) == 2
    assert [*library.parent.iterdir()] == [library]
    assert library.parent.stat().st_mode & 0o777 == 0o700


def test_a_library_belongs_to_one_source(compiled, monkeypatch, tmp_path):
    header = tmp_path / "other.h"
    header.write_text("// another")
    found = {native.build(tmp_path / "products")}
    for name, value in (("HEADERS", (header,)), ("SOURCE", header), ("FLAGS", ("-O0",))):
        monkeypatch.setattr(native, name, value)
        found.add(native.build(tmp_path / "products"))
    assert len(found) == len(compiled) == 4


@pytest.mark.parametrize("what", ["folder", "library"])
@pytest.mark.parametrize(
    ("mode", "owner", "is_refused"),
    [(0o755, 0, False), (0o770, 0, True), (0o702, 0, True), (0o700, 1, True)],
)
def test_a_library_that_others_may_write_is_not_opened(
    compiled, monkeypatch, tmp_path, what, mode, owner, is_refused
):
    folder = tmp_path / "products"
    library = native.build(folder)
    path = folder if what == "folder" else library
    path.chmod(mode)
    user = os.geteuid() + owner
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if owner and what == "library":
        check = native._check_private
        monkeypatch.setattr(native, "_check_private", lambda p: None if p == folder else check(p))
    if not is_refused:
        assert native.build(folder) == library
        return
    must = f"mode {mode:o}, but must be owned by user {user}, and neither its group nor others"
    with pytest.raises(PermissionError) as found:
        native.build(folder)
    assert str(found.value).startswith(f"{path} is owned by user {user - owner} and has {must}")
    if what == "folder":
        library.unlink()
        with pytest.raises(PermissionError):
            native.build(folder)  # and nothing is compiled there


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_a_library_that_stays_broken_is_reported(nothing_taken, monkeypatch, tmp_path, error):
    monkeypatch.setattr(native, "processor_features", lambda: native.WIDE)
    monkeypatch.setattr(native, "_open", Mock(side_effect=error("too short")))
    assert native.load(tmp_path) == "too short"
    assert not native._taken


@pytest.mark.parametrize("reason", [None, "there is no compiler"])
@pytest.mark.parametrize(
    ("arguments", "is_asked"),
    [((), True), (("--products", "xla"), False), (("--mesh", "tensor=1"), False)],
)
def test_the_server_says_why_xla_multiplies(monkeypatch, capsys, arguments, is_asked, reason):
    asked = []
    monkeypatch.setattr(native, "load", lambda: asked.append(1) or reason)
    monkeypatch.setattr(serve, "Engine", lambda *_, **__: None)
    options = serve.options_parser().parse_args(arguments)
    serve.build(options)
    assert len(asked) == is_asked
    line = f"XLA computes all products: {reason}\n" if is_asked and reason else ""
    assert capsys.readouterr().err == line
