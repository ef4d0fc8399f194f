"""Mixtures of experts: every token goes through the few experts its router chose.

Tokens are sorted by expert, so that each expert multiplies one run of rows (`jax.lax.ragged_dot`),
whatever the runs' lengths: shapes stay static and no expert computes for a token it was not given.

Axes: T tokens, E experts, I their inner size, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from examples.models import parallel
from examples.models.checkpoint import Assembly

# The one contraction there is: rows of tokens with an expert's [in, out] or [out, in] matrix.
_ROWS_TIMES_MATRIX = {
    transposed: jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transposed else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    for transposed in (False, True)
}


def expert_dot(
    rows: jax.Array, weights: jax.Array, counts: jax.Array, *, transposed: bool
) -> jax.Array:
    """Each run of rows times its expert's matrix.

    Args:
      rows: [n, in], those of expert 0 first, then those of expert 1, ...
      weights: [E, in, out], or [E, out, in] if `transposed`.
      counts: int32 [E], the runs' lengths.
    """
    return jax.lax.ragged_dot_general(
        rows, weights, counts, _ROWS_TIMES_MATRIX[transposed], precision="highest"
    )


def mix_experts(
    x: jax.Array,
    choices: jax.Array,
    shares: jax.Array,
    num_experts: int,
    run: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    *,
    num_devices: int = 1,
) -> jax.Array:
    """`sum_i shares[t, i] * expert[choices[t, i]](x[t])` for every token.

    Where `num_devices` have a run of the experts each, it is the part of the sum that this device's
    experts contribute; `parallel.add_up` completes it.

    Args:
      x: [T, hidden].
      choices: int32 [T, k], the experts of each token.
      shares: [T, k], what each contributes.
      num_experts: E.
      run: all experts at once, of (rows [T * k, hidden] sorted by expert, each row's expert
        int32 [T * k], the runs' lengths int32 [E]). On several devices those of its own experts,
        with the rows of other devices' experts, which count for nothing, after the last run.
      num_devices: over how many the experts are split; E is a multiple.

    Returns: [T, hidden].
    """
    num_tokens, per_token = choices.shape
    experts, num_own = choices.reshape(-1), num_experts // num_devices
    if num_devices > 1:
        experts = experts - parallel.rank(*parallel.MODEL) * num_own
        experts = jnp.where((experts >= 0) & (experts < num_own), experts, num_own)
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    sorted_experts = experts.at[order].get(mode="clip")
    counts = jnp.zeros((num_own,), jnp.int32).at[experts].add(1, mode="drop")
    rows = x.at[order // per_token].get(mode="clip")
    outputs = run(rows, sorted_experts, counts)
    if num_devices > 1:
        outputs = jnp.where((sorted_experts < num_own)[:, None], outputs, jnp.zeros_like(outputs))
    weighted = outputs * shares.reshape(-1).at[order].get(mode="clip")[:, None].astype(x.dtype)
    # Back in the tokens' order before they are summed: no token's sum depends on the others'.
    unsorted = jnp.zeros_like(weighted).at[order].set(weighted, mode="drop", unique_indices=True)
    return unsorted.reshape(num_tokens, per_token, -1).sum(axis=1)


def stacked_experts(path: str, num_experts: int, pieces: dict[str, tuple[str, ...]]) -> dict:
    """Assemblies of the stacked matrices of `path` from one file entry per expert.

    Args:
      path: of the experts, such as "layers.3.mlp.experts".
      num_experts: E.
      pieces: for each stacked parameter the matrices [out, in] of an expert that lie, one below the
        other, in its [E, out, in].
    """

    def assembly(names: tuple[str, ...]) -> Assembly:
        parts = (f"{path}.{e}.{name}.weight" for e in range(num_experts) for name in names)

        def put_together(matrices: Sequence[np.ndarray]) -> np.ndarray:
            rows = [
                np.concatenate(matrices[i : i + len(names)])
                for i in range(0, len(matrices), len(names))
            ]
            return np.stack(rows)

        return Assembly(tuple(parts), put_together, parts_per_row=len(names))

    return {f"{path}.{name}": assembly(names) for name, names in pieces.items()}
