"""What is written down runs: docstring examples, README's code and its table."""

from __future__ import annotations

import doctest
import importlib
import pathlib
import pkgutil
import re

import numpy as np
import pytest

import jattn
from jattn.call import masks as mask_arguments

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(jattn.__path__, "jattn.")
    # The examples of blocks share a namespace, and have a test of their own.
    if not module.name.startswith("jattn.blocks")
)
PUBLIC = (
    *("paged_attention", "update_kv_cache", "merge_attention_states"),
    *("init_kv_cache", "calibrate", "cascade_attention", "explain"),
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    if re.search(r"\.triton\.(fragments|decode|prefill)$", name):
        pytest.importorskip("triton", reason="needs triton: pip install -e '.[test,gpu-check]'")
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_have_an_example(name):
    assert ">>> " in getattr(jattn, name).__doc__


def blocks(text: str = README) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)


def test_readme_code_runs():
    """Every block in turn, in one namespace, as a reader would paste them."""
    code = blocks()
    assert any("jattn.paged_attention(" in block for block in code)
    namespace = {"__name__": "readme"}
    for block in code:
        exec(compile(block, "README.md", "exec"), namespace)


def test_the_page_about_masks_runs():
    """Every block in turn; what each shows differs from plain attention, where it is to show."""
    page = (ROOT / "docs" / "masks.md").read_text()
    namespace = {"__name__": "masks"}
    for block in re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S):
        exec(compile(block, "docs/masks.md", "exec"), namespace)
    for name in ("both_ways", "drafted", "selected", "biased", "per_token"):
        assert np.isfinite(namespace[name]).all(), name
        assert np.abs(namespace[name] - namespace["plain"]).max() > 0.01, name
    for argument in (*mask_arguments.NAMES, "sinks", "value_dim", "is_causal", "sliding_window"):
        assert f"| `{argument}`" in page, argument


def test_the_page_of_formats_runs_and_names_them_all():
    page = (ROOT / "docs" / "formats.md").read_text()
    namespace = {"__name__": "formats"}
    for block in blocks(page):
        exec(compile(block, "formats.md", "exec"), namespace)
    for name in ("Dense", "Fp8", "Int8", "Int4", "Nvfp4"):
        assert f"`{name}(" in page


def test_readme_table_is_the_support_table():
    found = re.search(r"<!-- support table -->\n(.*?)\n<!-- /support table -->", README, re.S)
    assert found, "README.md has no support table between its markers"
    assert found.group(1).strip() == jattn.support_table()


@pytest.mark.parametrize("heading", ["Try it", "Test it"])
def test_readme_commands_are_one_line(heading):
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    assert section, f"README.md has no heading '{heading}'"
    commands = re.findall(r"^```\w*\n(.*?)^```", section.group(1), re.M | re.S)
    assert len(commands) == 1
    assert len(commands[0].strip().splitlines()) == 1
