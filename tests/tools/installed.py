"""Check an installed wheel: `python tests/tools/installed.py` where jattn is installed.

Attend with the native kernel, and compare with the oracle. The wheels' workflow runs this in an
environment that has the wheel and its dependencies, and no checkout to import from.
"""

from __future__ import annotations

import pathlib

import jax
import numpy as np

import jattn


def main() -> None:
    """Raise unless the installed package's native kernel agrees with the oracle."""
    checkout = pathlib.Path(__file__).parents[2]
    installed = pathlib.Path(jattn.__file__)
    assert checkout not in installed.parents, f"jattn is imported from the checkout: {installed}"
    query, keys, values = (
        jax.random.normal(key, shape)
        for key, shape in zip(
            jax.random.split(jax.random.key(0), 3),
            [(3, 4, 64), (4, 2, 16, 64), (4, 2, 16, 64)],
            strict=True,
        )
    )
    batch = jattn.AttentionMetadata.from_lengths(
        query_lens=[2, 1], seq_lens=[20, 7], block_tables=[[3, 1], [2]], block_size=16
    )
    outs = [
        jattn.paged_attention(query, keys, values, implementation=name, **batch.as_kwargs())
        for name in ("native", "reference")
    ]
    np.testing.assert_allclose(*outs, atol=1e-5)
    print(f"jattn {jattn.__version__} at {installed}: the native kernel is right")


if __name__ == "__main__":
    main()
