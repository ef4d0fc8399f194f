"""Native calls under plain `jit`, over arrays that are split over devices."""

from __future__ import annotations

import pytest

from tests.support import processes
from tests.support.native import library as native_library

pytestmark = native_library.needed


def on_four_devices(code: str, **environment: str) -> None:
    prelude = "import jattn\nfrom tests.support.native.sharded import *\n"
    processes.python(prelude + code, JAX_NUM_CPU_DEVICES="4", **environment)


def test_every_device_runs_its_own_heads():
    """A donated cache is written and read without communication or an array of a pool's size."""
    on_four_devices("check(Case(jattn.Nvfp4(), 'NHD'))\ncheck(Case(kv_heads=1, latent=12))")


@pytest.mark.extended
@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_every_array_of_every_cache(axes):
    on_four_devices(
        f"""
for case in (
    Case(),
    Case(jattn.Dense("bfloat16"), "NHD"),
    Case(jattn.Fp8("e5m2")),
    Case(jattn.Fp8("e4m3", "block"), "NHD"),
    Case(jattn.Fp8("e4m3", "token")),
    Case(jattn.Int8(), "NHD"),
    Case(jattn.Int4(zero_point=True)),
    Case(jattn.Nvfp4()),
    Case(jattn.Int8(True), "NHD", kv_heads=1),
    Case(jattn.Fp8("e4m3"), kv_heads=1, latent=12),
):
    check(dataclasses.replace(case, axes="{axes}"))
"""
    )


@pytest.mark.extended
def test_by_the_older_partitioner():
    on_four_devices(
        "check(Case(jattn.Int8(), 'NHD'))\ncheck(Case(kv_heads=1))",
        JAX_USE_SHARDY_PARTITIONER="0",
    )


@pytest.mark.extended
def test_what_cannot_stay_split_is_gathered():
    on_four_devices("check_other_shardings()")


@pytest.mark.extended
def test_transformations():
    on_four_devices("check_transformations()")


@pytest.mark.extended
def test_gradients_and_xla_on_explicit_axes():
    on_four_devices("check_explicit_axes()")


@pytest.mark.extended
def test_batches_on_explicit_axes():
    on_four_devices("check_batches_on_explicit_axes()")


@pytest.mark.extended
def test_new_rows_split_otherwise_than_the_pool_on_explicit_axes():
    on_four_devices("check_new_rows_on_explicit_axes()")
