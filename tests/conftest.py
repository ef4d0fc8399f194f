"""Strictness for every test: no silent dtype or rank promotion, and every warning an error."""

import os

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
