"""Strictness for every test: no silent dtype or rank promotion, and every warning an error."""

import itertools
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The interpreter of Mosaic GPU runs the warpgroups of a block as threads that wait for each other
# inside XLA's thread pool: with one thread per core, two cores are not enough for three of them.
os.environ.setdefault("PJRT_NPROC", str(max(8, os.cpu_count() or 1)))

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion():
    """JAX refuses what it would otherwise promote in silence."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


# Every program that XLA has compiled for the CPU keeps some mappings of memory, of which Linux
# allows a process 65,530; past them it ends in a segmentation fault. A run of all tests in one
# process needs more.
MOST_MAPPINGS = 20_000
MAPPINGS = pathlib.Path("/proc/self/maps")
tests_begun = itertools.count(1)


@pytest.fixture(autouse=True)
def few_compiled_programs():
    """What earlier tests compiled is forgotten before there is too much of it."""
    yield
    if next(tests_begun) % 20 == 0 and MAPPINGS.exists():
        with MAPPINGS.open("rb") as lines:
            count = sum(1 for _ in lines)
        if count > MOST_MAPPINGS:
            jax.clear_caches()
