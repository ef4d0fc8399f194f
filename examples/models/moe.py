"""Mixtures of experts: every token goes through the few experts that its router chose.

Tokens are sorted by expert, so that each expert multiplies one run of rows (`grouped_dot`) of any
length: shapes stay static, and no expert computes tokens that were not routed to it.

Axes: T tokens, E experts, I their inner size, k experts per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples import native
from examples.models import padding, parallel
from examples.models.checkpoint import Assembly
from jattn.integrations.grouped import grouped_dot


def expert_dot(rows: jax.Array, weights: jax.Array, counts: jax.Array) -> jax.Array:
    """Multiply each run of rows with its expert's matrix.

    Args:
      rows: [n, in], expert 0's first, then expert 1's, ...
      weights: [E, out, in].
      counts: int32 [E], the runs' lengths.

    If `examples.native` is loaded, it computes the products that it `takes`.
    """
    if native.takes(rows, weights) and not parallel.axes_here(*parallel.AXES):
        return native.grouped_product(rows, weights, counts, rows.dtype)
    return grouped_dot(rows, weights, counts, transposed=True).astype(rows.dtype)


def mix_experts(
    x: jax.Array,
    choices: jax.Array,
    shares: jax.Array,
    num_experts: int,
    run: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    *,
    num_devices: int = 1,
) -> jax.Array:
    """Compute `sum_i shares[t, i] * expert[choices[t, i]](x[t])` for every token.

    Rows that are `padding` go to no expert, and become zeros.

    If each of `num_devices` has a run of the experts, the result is the part of the sum that this
    device's experts contribute; `parallel.add_up` completes it.

    Args:
      x: [T, hidden].
      choices: int32 [T, k], the experts of each token.
      shares: [T, k], each expert's weight in the sum.
      num_experts: E.
      run: runs all experts at once, given (rows [T * k, hidden] sorted by expert, each row's expert
        int32 [T * k], the runs' lengths int32 [E]). On several devices these are of the device's
        own experts. Rows of other devices' experts and of padding are ignored, and come after the
        last run.
      num_devices: devices that the experts are split over; E is a multiple.

    Returns: [T, hidden].
    """
    num_tokens, per_token = choices.shape
    experts, num_local = choices.reshape(-1), num_experts // num_devices
    if num_devices > 1:
        experts = experts - parallel.rank(*parallel.MODEL) * num_local
        experts = jnp.where((experts >= 0) & (experts < num_local), experts, num_local)
    used = padding.used_rows(num_tokens)
    if used is not None:
        token = jnp.arange(num_tokens * per_token, dtype=jnp.int32) // per_token
        experts = jnp.where(token < used, experts, num_local)
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    sorted_experts = experts.at[order].get(mode="clip")
    counts = jnp.zeros((num_local,), jnp.int32).at[experts].add(1, mode="drop")
    rows = x.at[order // per_token].get(mode="clip")
    outputs = run(rows, sorted_experts, counts)
    if num_devices > 1 or used is not None:
        outputs = jnp.where((sorted_experts < num_local)[:, None], outputs, jnp.zeros_like(outputs))
    weighted = outputs * shares.reshape(-1).at[order].get(mode="clip")[:, None].astype(x.dtype)
    # Restored to the tokens' order before summing: no token's sum depends on other tokens.
    unsorted = jnp.zeros_like(weighted).at[order].set(weighted, mode="drop", unique_indices=True)
    return unsorted.reshape(num_tokens, per_token, -1).sum(axis=1)


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """A mixture's experts and how its router chooses among them."""

    count: int
    per_token: int
    size: int
    shared_size: int
    latent_size: int | None  # size of the experts' inputs and outputs; None: the hidden size
    num_groups: int  # experts are chosen from only some of these groups
    chosen_groups: int
    normalize: bool
    scale: float


class GatedExperts(nnx.Module):
    """All experts' matrices [out, in]: gate stacked on up, and down."""

    def __init__(self, count: int, size: int, inner: int, dtype: jnp.dtype):
        self.gate_up_proj = nnx.Param(jnp.zeros((count, 2 * inner, size), dtype))
        self.down_proj = nnx.Param(jnp.zeros((count, size, inner), dtype))

    def __call__(self, rows: jax.Array, experts: jax.Array, counts: jax.Array) -> jax.Array:
        both = expert_dot(rows, self.gate_up_proj[...], counts)
        gate, up = jnp.split(both, 2, axis=-1)
        return expert_dot(jax.nn.silu(gate) * up, self.down_proj[...], counts)


class Router(nnx.Module):
    """Chooses a token's experts by sigmoids, corrected for balance, within some groups."""

    def __init__(
        self,
        size: int,
        sizes: ExpertSizes,
        dtype: jnp.dtype,
    ):
        self.weight = nnx.Param(jnp.zeros((sizes.count, size), dtype))
        # In the checkpoints' dtype: if rounded, it would choose other experts.
        self.e_score_correction_bias = nnx.Param(jnp.zeros((sizes.count,), jnp.float32))
        self.sizes = sizes

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return experts int32 [T, k] and their shares [T, k]."""
        sizes = self.sizes
        weight = self.weight[...].astype(jnp.float32)
        scores = jnp.einsum("ti,ei->te", x.astype(jnp.float32), weight, precision="highest")
        scores = jax.nn.sigmoid(scores)
        wanted = scores + self.e_score_correction_bias[...].astype(jnp.float32)[None]
        if sizes.num_groups > 1:
            grouped = wanted.reshape(x.shape[0], sizes.num_groups, -1)
            best = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
            _, groups = jax.lax.top_k(best, sizes.chosen_groups)
            allowed = jax.nn.one_hot(groups, sizes.num_groups, dtype=bool).any(axis=1)
            wanted = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(wanted.shape)
        _, experts = jax.lax.top_k(wanted, sizes.per_token)
        shares = jnp.take_along_axis(scores, experts, axis=1)
        if sizes.normalize:
            shares = shares / (shares.sum(axis=-1, keepdims=True) + 1e-20)
        return experts, shares * sizes.scale


def stacked_experts(path: str, num_experts: int, parts: dict[str, tuple[str, ...]]) -> dict:
    """Return assemblies of the stacked matrices of `path` from one file entry per expert.

    Args:
      path: the experts' path, such as "layers.3.mlp.experts".
      num_experts: E.
      parts: for each stacked parameter [E, out, in], the matrices [out, in] of an expert that it
        stacks.
    """

    def assembly(names: tuple[str, ...]) -> Assembly:
        entries = (f"{path}.{e}.{name}.weight" for e in range(num_experts) for name in names)

        def put_together(matrices: Sequence[np.ndarray]) -> np.ndarray:
            rows = [
                np.concatenate(matrices[i : i + len(names)])
                for i in range(0, len(matrices), len(names))
            ]
            return np.stack(rows)

        return Assembly(tuple(entries), put_together, parts_per_row=len(names))

    return {f"{path}.{name}": assembly(names) for name, names in parts.items()}
