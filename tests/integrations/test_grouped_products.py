"""Products of many matrices, each with its own run of rows (`jattn.integrations.grouped`)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.integrations import grouped

RUNS = {
    "equal": ([8] * 5, 40),
    "some empty": ([0, 21, 0, 9, 10, 0], 40),
    "all in one": ([0, 40], 40),
    "longer than a tile": ([140, 3, 157], 300),
    "rows of other devices": ([5, 0, 6], 20),
    "none": ([0, 0, 0], 4),
    "one row": ([0, 1], 1),
}
DTYPES = [jnp.float32, jnp.bfloat16]


@pytest.mark.parametrize(
    ("name", "transposed"),
    [
        pytest.param(
            name, transposed, marks=[] if index % 2 == transposed else pytest.mark.extended
        )
        for index, name in enumerate(RUNS)
        for transposed in (False, True)
    ],
)
def test_each_run_of_rows_is_multiplied_by_its_matrix(name, transposed):
    sizes, n = RUNS[name]
    rng = np.random.default_rng(n)
    dtype = DTYPES[transposed]
    rows = jnp.asarray(rng.normal(size=(n, 6)), dtype)
    weights = jnp.asarray(rng.normal(size=(len(sizes), 6, 7)), dtype)
    given = weights.swapaxes(1, 2) if transposed else weights
    dot = jax.jit(functools.partial(grouped.grouped_dot, transposed=transposed))
    found = dot(rows, given, jnp.asarray(sizes, jnp.int32))
    matrix_of = np.repeat(np.arange(len(sizes)), sizes)
    wide = [np.asarray(x, np.float64) for x in (rows, weights)]
    want = np.einsum("ni,nio->no", wide[0][: len(matrix_of)], wide[1][matrix_of])
    assert found.shape == (n, 7)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found[: len(matrix_of)], want, rtol=1e-5, atol=1e-5)
    assert np.isfinite(found).all()


def test_other_devices_use_jaxs_ragged_dot():
    lowered = jax.jit(grouped.grouped_dot).trace(
        jnp.ones((16, 8)), jnp.ones((4, 8, 8)), jnp.full(4, 4, jnp.int32)
    )
    texts = {name: lowered.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "tpu")}
    assert {name: "while" in text for name, text in texts.items()} == {"cpu": True, "tpu": False}


def test_weights_are_unpacked_matrix_by_matrix():
    """Their scales are applied, and there is never a copy of all weights in a wider dtype."""
    experts, width, blocks = 64, 32, 4
    rng = np.random.default_rng(3)
    rows = jnp.asarray(rng.normal(size=(experts, width)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(experts, width, 48)), jnp.float8_e4m3fn)
    scales = jnp.asarray(rng.uniform(0.5, 2, (experts, blocks, 1, 48)), jnp.float32)
    given = rows, weights, jnp.ones(experts, jnp.int32), scales
    program = jax.jit(grouped.grouped_dot).lower(*given).compile()
    full = np.asarray(weights, np.float64) * np.repeat(scales[:, :, 0], width // blocks, axis=1)
    want = np.einsum("ni,nio->no", np.asarray(rows, np.float64), full)
    np.testing.assert_allclose(program(*given), want, rtol=1e-5, atol=1e-5)
    assert program.memory_analysis().temp_size_in_bytes < 1.5 * weights.size


def test_rows_are_not_copied_for_every_matrix():
    """`jax.lax.ragged_dot` makes such copies on CPUs."""
    shapes = ((256, 64), jnp.float32), ((64, 64, 32), jnp.float32), ((64,), jnp.int32)
    given = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    spent = {
        dot: jax.jit(dot).lower(*given).compile().memory_analysis().temp_size_in_bytes
        for dot in (grouped.grouped_dot, jax.lax.ragged_dot)
    }
    copies = 256 * 64 * 64 * 4
    assert spent[jax.lax.ragged_dot] >= copies, "JAX copies no rows: use its `ragged_dot`"
    assert spent[grouped.grouped_dot] < copies / 8
