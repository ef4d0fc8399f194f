"""Strictness for every test: no silent dtype or rank promotion, and every warning an error."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion():
    """JAX refuses what it would otherwise promote in silence."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
