"""Every notebook runs from its first cell to its last, without Jupyter or a network."""

import ast
import contextlib
import importlib.util
import io
import json
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import jattn
from examples import generate
from examples.job import prepare
from examples.options import SPEAKING, options_parser

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = ("paged_attention", "hybrid_pages", "gemma4_colab")
COLAB = "https://colab.research.google.com/github/jattn/jattn/blob/main/examples/notebooks/"


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.ipynb").read_text())


def sources(name: str, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in read(name)["cells"] if cell["cell_type"] == kind]


def run(name: str, monkeypatch) -> tuple[dict, str]:
    """Execute a notebook's code as a module; return what it defined and what it printed."""
    for variable in ("HF_TOKEN", "JATTN_NOTEBOOK_ON_CPU"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MPLBACKEND", "agg")
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")  # another notebook's figures
    module, printed = types.ModuleType(f"notebook_{name}"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        for number, source in enumerate(sources(name, "code")):
            exec(compile(source, f"{name}.ipynb[{number}]", "exec"), module.__dict__)
    return module.__dict__, printed.getvalue()


def test_every_notebook_is_listed():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_as_a_notebook_with_outputs(name):
    """`python examples/notebooks/execute.py` stores them."""
    notebook = read(name)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    printed = "".join(line for output in outputs for line in output.get("text", ()))
    pictures = [output for output in outputs if output["output_type"] == "display_data"]
    assert len(pictures) == {"gemma4_colab": 0, "hybrid_pages": 2, "paged_attention": 2}[name]
    assert name == "hybrid_pages" or "native: taken" in printed  # what `explain` printed
    if name == "gemma4_colab":
        assert "equal tokens: True on cpu" in printed
        assert "skipped: there is no GPU" in printed.splitlines()[-1]
        said = next(text for text in sources(name, "markdown") if "`explain` names" in text)
        assert "a CPU uses `native` if its library was built" in said
        assert "a decode step on this cpu takes native" in printed
    first, *_ = sources(name, "markdown")
    assert f"]({COLAB}{name}.ipynb)" in first
    install, *_ = sources(name, "code")
    assert 'find_spec("jattn")' in install
    assert "github.com/jattn/jattn" in install
    for source in sources(name, "code"):
        ast.parse(source)  # plain Python: no magics


def test_outputs_are_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    execute = importlib.import_module("execute")
    cell = {"cell_type": "code", "source": ["x = 2\n", "print('a')\n", "print(x)"], "outputs": []}
    words = {"cell_type": "markdown", "source": ["words"]}
    path = tmp_path / "small.ipynb"
    path.write_text(json.dumps({"cells": [cell, words, {**cell, "source": ["x += 1"]}]}))
    execute.execute(path)
    first, second, third = json.loads(path.read_text())["cells"]
    assert first["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["a\n", "2\n"]}]
    assert (first["execution_count"], third["execution_count"], third["outputs"]) == (1, 2, [])
    assert second == words
    assert not capsys.readouterr().out


def test_paged_attention(monkeypatch):
    found, printed = run("paged_attention", monkeypatch)
    assert found["D"] == 512
    assert found["num_compilations"] == 1
    assert found["dense"] / found["paged"] > 2
    assert found["needed"] <= found["paged"] <= found["needed"] * 1.1
    assert len(found["paged_ms"]) == len(found["dense_ms"]) == 5
    assert all(ms > 0 for ms in found["paged_ms"] + found["dense_ms"])
    assert "xla" in printed
    assert found["plt"] is None or len(found["plt"].get_fignums()) == 2


@pytest.mark.extended
def test_a_wrong_attention_does_not_pass_the_first_notebook(monkeypatch):
    right = jattn.paged_attention
    monkeypatch.setattr(
        jattn, "paged_attention", lambda *a, **k: right(*a, **{**k, "sliding_window": 36})
    )
    with pytest.raises(AssertionError):
        run("paged_attention", monkeypatch)


def test_hybrid_pages(monkeypatch):
    found, printed = run("hybrid_pages", monkeypatch)
    assert found["aligned"].block_size == 1072
    assert set(found["waste"]) == {"two pools", "over pages", "one per page"}
    assert all(w >= 0 for values in found["waste"].values() for w in values)
    assert bool(jax.numpy.array_equal(found["from_slots"], found["from_pages"]))
    np.testing.assert_allclose(np.asarray(found["from_pages"]), 5.61, rtol=1e-5)
    assert found["difference"] < 1e-6
    assert "block 1072 tokens" in printed


@pytest.mark.extended
def test_gemma4_serves_the_model_it_brings(monkeypatch):
    found, printed = run("gemma4_colab", monkeypatch)
    assert found["status"] == 0
    assert "  The server|" in printed
    assert "served           2 requests" in printed


def test_gemma4_finds_its_clone_after_a_restart(monkeypatch, tmp_path):
    (tmp_path / "jattn" / "examples").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    exec(sources("gemma4_colab", "code")[0], {})
    assert sys.path[0] == "jattn"


def test_gemma4_says_what_it_leaves_out(monkeypatch):
    """The program parses its arguments and loads its model; `extended` runs also serve it."""

    def main(arguments):
        options = options_parser().parse_args(arguments)
        assert len(prepare(options.model or SPEAKING, options).requests) == 2
        return 0

    monkeypatch.setattr(generate, "main", main)
    found, printed = run("gemma4_colab", monkeypatch)
    assert found["status"] == 0
    assert "skipped: " in printed.splitlines()[-1]


def test_without_a_network_the_download_is_skipped_with_a_reason(monkeypatch, capsys):
    hub = types.ModuleType("huggingface_hub")
    hub.__spec__ = importlib.util.spec_from_loader("huggingface_hub", None)

    def snapshot_download(*_, **__):
        raise OSError("no route to host")

    hub.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    last = sources("gemma4_colab", "code")[-1]
    namespace = {
        "importlib": importlib,
        "os": types.SimpleNamespace(environ={"JATTN_NOTEBOOK_ON_CPU": "1"}),
        "device": types.SimpleNamespace(platform="cpu"),
    }
    exec(compile(last, "last cell", "exec"), namespace)
    assert "OSError: no route to host" in capsys.readouterr().out
