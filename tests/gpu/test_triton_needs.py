"""The needs of the Triton row, and its reasons for refusals: packages, versions, machines."""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib

import numpy as np
import pytest

from jattn import device, implementations
from jattn.pallas import capability_rows as gpu_rows
from jattn.pallas import machine
from jattn.pallas.triton import needs as triton_needs
from tests.support import problems


def test_packages():
    lack = triton_needs.packages_lack
    assert lack("0.3.1", "3.6.0", None) == ()
    assert lack("0.3.1", "3.9.0", "0.12.0.1") == ()
    assert lack("0.4.1", "3.9.0", "0.12.0.1") == ()
    assert lack(None, None, "0.12.0.1") == (
        "jax-triton is not installed: pip install 'jattn[cuda13]'",
    )
    assert lack(None, "3.6.0", None) == (
        "jax-triton is not installed: pip install 'jattn[cuda12]'",
    )
    assert lack("0.4.1", "3.6.0", None) == (
        "triton is 3.6.0; it takes 3.9: pip install triton==3.9.0",
    )
    assert lack("0.4.1", None, None) == ("triton is not installed: pip install triton==3.9.0",)
    assert lack("0.5.0", "3.6.0", None) == (
        "jax-triton is 0.5.0; it takes 0.3.1 or 0.4.1: pip install jax-triton==0.3.1",
    )
    assert lack("0.3.1", None, None) == ("triton is not installed: pip install triton==3.6.0",)
    assert lack("0.4.0", "3.5.1", None) == (
        "jax-triton is 0.4.0; it takes 0.3.1 or 0.4.1: pip install jax-triton==0.3.1",
        "triton is 3.5.1; it takes 3.6 to 3.9: pip install triton==3.6.0",
    )


def test_versions_are_those_of_the_extras():
    """Errors recommend installing the versions that the extras install."""
    path = pathlib.Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(path.read_text())["project"]["optional-dependencies"]
    lowest, highest, wanted = triton_needs.TRITON[triton_needs.JAX_TRITON]
    assert f"triton=={wanted}" in extras["gpu-check"]
    for extra in ("cuda12", "cuda13", "gpu-check"):
        assert f"jax-triton=={triton_needs.JAX_TRITON}" in extras[extra]
    assert lowest <= tuple(int(n) for n in wanted.split(".")[:2]) <= highest


@pytest.mark.parametrize(
    ("platform", "gpu", "words"),
    [
        ("cpu", None, "it runs on gpu, and this is cpu"),
        ("gpu", None, "it runs on NVIDIA GPUs, and this GPU is not one"),
        ("gpu", machine.Machine(75, 40), "it takes sm_80 and up, and this is sm_75"),
    ],
)
def test_machines(monkeypatch, platform, gpu, words):
    monkeypatch.setattr(device, "platform", lambda: platform)
    monkeypatch.setattr(machine, "here", lambda: gpu)
    assert gpu_rows.TRITON.missing()[0] == words


@pytest.mark.parametrize(
    ("name", "sm", "takes"),
    [
        ("int4", 90, 8),
        ("int8", 90, 4),
        ("fp8_e4m3", 80, 4),
        ("fp8_e4m3", 89, 1),
        ("fp8_e5m2", 80, 1),
    ],
)
def test_sizes_that_are_not_whole_words(monkeypatch, name, sm, takes):
    """Kernels load packed numbers four bytes at a time."""
    call = problems.build(problems.Problem(query_lens=(1,), seq_lens=(9,))).call()[0]
    format = problems.FORMATS[name]
    changed = dataclasses.replace(
        call, head_dim=18, value_dim=24, key_format=format, value_format=format
    )
    monkeypatch.setattr(machine, "here", lambda: machine.Machine(sm, 100))
    words = (f"head size D is 18 in {name}; it takes multiples of {takes}",)
    assert triton_needs.refuses(changed) == (words if takes > 1 else ())


def test_every_reason_is_given(monkeypatch):
    call = problems.build(problems.Problem(query_lens=(1,), seq_lens=(9,))).call()[0]
    format = problems.FORMATS["int8"]
    changed = dataclasses.replace(
        call, head_dim=18, value_dim=22, key_format=format, value_format=format
    )
    assert triton_needs.refuses(changed) == (
        "head size D is 18 in int8; it takes multiples of 4",
        "value size V is 22 in int8; it takes multiples of 4",
    )


@pytest.mark.parametrize(("columns", "packed"), [(256, False), (257, False), (8, True), (9, True)])
def test_trees_of_many_tokens(columns, packed):
    batch = problems.build(
        problems.Problem(query_lens=(2,), seq_lens=(9,), options=frozenset({"tree_mask"}))
    )
    tokens = batch.query.shape[0]
    mask = np.ones((tokens, columns), np.uint32 if packed else bool)
    batch = dataclasses.replace(batch, kwargs=batch.kwargs | {"tree_mask": mask})
    words = "tree_mask has bits for 288 query tokens; it takes up to 256; draft tokens past these "
    words = (words + "must form a chain",) if columns in (257, 9) else ()
    assert triton_needs.refuses(batch.call()[0]) == words


@pytest.mark.parametrize("sm", [80, 86, 89, 90])
def test_keys_and_values_in_one_array_are_not_unpacked(monkeypatch, sm):
    """Such rows are addressed by number, but e4m3 below sm_89 is read in words of four bytes."""
    problem = problems.Problem(
        query_lens=(1,), seq_lens=(9,), query_dtype="bfloat16", format="fp8_e4m3", kv_layout="rows"
    )
    call = problems.build(problem).call()[0]
    monkeypatch.setattr(machine, "here", lambda: machine.Machine(sm, 100))
    words = (
        "kv_layout is rows and the cache format fp8_e4m3, which needs sm_89 and up, "
        f"and this is sm_{sm}; it takes fp8_e5m2",
    )
    assert triton_needs.refuses(call) == (words if sm < 89 else ())


def test_rows_keep_to_their_devices(monkeypatch):
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    for row in implementations.ROWS:
        words = f"it runs on {', '.join(row.devices)}, and this is tpu"
        assert (words in row.missing()) == (row.devices != ("any",)), row.implementation


def test_this_machine():
    assert device.platform() == "cpu"
    assert machine.here() is None
    assert machine.Machine(90, 132).block_shared == 227 * 1024
