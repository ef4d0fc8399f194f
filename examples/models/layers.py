"""Layers that models share: linear maps, embeddings, norms, gated feed-forward.

Modules hold only parameters, under their names in a Hugging Face checkpoint; linear weights keep
its [out, in] layout, so that loading is a matter of names.

Axes: T tokens of all sequences, concatenated, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from examples import native
from examples.models import padding, parallel

# The most tokens for which a product has the weight on its left, by dtype: see `product`.
MOST_ON_THE_RIGHT = {"float32": 64, "bfloat16": 64}


class Linear(nnx.Module):
    """`x @ weight.T + bias` with weight [out, in]; float32 stays float32 on every machine.

    Several devices may each have some of the outputs, or, with `sums_parts`, some of the inputs:
    then the result is the sum over devices. `sections` are the sizes of the parts stacked in the
    weight, if each of them is split over the devices separately.

    `change(x, y)`, if set, replaces y with the product that adapters have changed (`lora.py`).
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        dtype: jnp.dtype,
        *,
        bias: bool = False,
        sums_parts: bool = False,
        sections: tuple[int, ...] = (),
    ):
        self.weight = nnx.Param(jnp.zeros((num_out, num_in), dtype), sections=sections)
        if bias:
            self.bias = nnx.Param(jnp.zeros((num_out,), dtype), sections=sections)
        self.has_bias, self.sums_parts = bias, sums_parts
        self.change: Callable[[jax.Array, jax.Array], jax.Array] | None = None
        self.joined: Callable[[jax.Array], jax.Array] | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.finish(x, product(x, self.weight[...]))

    def join_with(self, weight: jax.Array) -> None:
        """Make `apply_all` multiply with a weight that has the layers' weights stacked."""
        self.joined = lambda x: product(x, weight)

    def finish(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Compute the result from the product with the weight."""
        y = y if self.change is None else self.change(x, y)
        y = parallel.add_up(y) if self.sums_parts else y
        return y + self.bias[...][None] if self.has_bias else y


def apply_all(x: jax.Array, linears: Sequence[Linear]) -> list[jax.Array]:
    """Apply linear layers to one input, by one product if they are joined (`joined.py`)."""
    joined = linears[0].joined
    if joined is None:
        return [linear(x) for linear in linears]
    ends = list(itertools.accumulate(len(linear.weight[...]) for linear in linears))
    parts = jnp.split(joined(x), ends[:-1], axis=1)
    return [linear.finish(x, part) for linear, part in zip(linears, parts, strict=True)]


class Embedding(nnx.Module):
    """Rows of a table [vocabulary, E], times a constant rounded to the table's dtype.

    Each of `num_devices` has a run of the rows, or all rows if they do not divide evenly.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        dtype: jnp.dtype,
        *,
        scale: float | None = None,
        num_devices: int = 1,
    ):
        self.is_split = num_devices > 1 and num_rows % num_devices == 0
        num_rows = num_rows // num_devices if self.is_split else num_rows
        self.weight = nnx.Param(jnp.zeros((num_rows, num_columns), dtype))
        self.scale = scale

    def __call__(self, tokens: jax.Array) -> jax.Array:
        rows = parallel.lookup_rows(self.weight[...], tokens, split=self.is_split)
        return rows if self.scale is None else rows * jnp.asarray(self.scale, rows.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """Compute `x @ table.T` [B, vocabulary] in float32."""
        return parallel.join_columns(logits_from(x, self.weight[...]), split=self.is_split)


def logits_from(x: jax.Array, table: jax.Array) -> jax.Array:
    """Compute `x @ table.T` in float32."""
    return product(x, table, jnp.float32)


def product(x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Compute `x @ weight.T` [T, out] of x [T, in] and weight [out, in], in `dtype` or x's.

    On CPUs, XLA's speed depends on how a product is written. XLA copies the right operand to
    another layout in every call, so few tokens go on the right and many on the left. It also
    converts bfloat16 weights to float32 in every call if the product is not requested in float32,
    or has a single token, to which a row of zeros is therefore added. Weights read, on two cores
    with AMX and JAX 0.12:

        tokens     float32, GB/s          bfloat16, GB/s
                weight left   right    weight left   right
          16        18         10          21         15
          64         8          6          14         11
         128         4.1        3.9         6          7
         256         1.8        2.1         3          5

    If `examples.native` is loaded, it computes the products that it `takes`, with zeros for rows
    that are `padding`. It leaves logits, which are requested in float32, as columns, because
    `likeliest` reads columns.
    """
    if native.takes(x, weight) and not parallel.axes_here(*parallel.AXES):
        are_logits = dtype is not None
        rows = padding.used_rows(len(x), logits=are_logits)
        return native.product(x, weight, dtype or x.dtype, columns=are_logits, rows=rows)
    return product_by_xla(x, weight, dtype)


def product_by_xla(x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Compute the same with XLA, in the fastest form."""
    num_tokens = x.shape[0]
    options = {"precision": "highest", "preferred_element_type": jnp.float32}
    if x.dtype != jnp.float32 and num_tokens == 1:
        x = jnp.concatenate([x, jnp.zeros_like(x)])
    # Without the barriers XLA would turn the first back into a product of x and the weight, and
    # make the second write in `dtype`, which takes longer.
    if num_tokens <= MOST_ON_THE_RIGHT.get(x.dtype.name, 0):
        y = jax.lax.optimization_barrier(jnp.einsum("oi,ti->ot", weight, x, **options)).T
    else:
        y = jax.lax.optimization_barrier(jnp.einsum("ti,oi->to", x, weight, **options))
    y = y[:num_tokens]
    return y.astype(dtype or x.dtype)


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
    """Compute `x / sqrt(mean(x ** 2) + eps)` over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """`unit_rms(x) * (weight + offset)`, computed in float32 and returned in x's dtype."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, *, offset: float = 0.0):
        self.weight = nnx.Param(jnp.full((size,), 1.0 - offset, dtype))
        self.eps, self.offset = eps, offset

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...].astype(jnp.float32) + self.offset
        return (unit_rms(x, self.eps) * over_last_axis(weight, x)).astype(x.dtype)


def over_last_axis(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Give a vector as many axes as x, so that it broadcasts over all but the last."""
    return jnp.expand_dims(vector, range(x.ndim - 1))


def gelu(x: jax.Array) -> jax.Array:
    """Compute the tanh approximation of GELU."""
    return jax.nn.gelu(x, approximate=True)


class DepthwiseConv(nnx.Module):
    """The weights [channels, 1, taps] and the bias of a convolution per channel."""

    def __init__(
        self, sections: tuple[int, ...], taps: int, dtype: jnp.dtype, *, bias: bool = False
    ):
        """Make zeros; `sections` are sizes of runs of channels, each of which devices split."""
        self.weight = nnx.Param(jnp.zeros((sum(sections), 1, taps), dtype), sections=sections)
        if bias:
            self.bias = nnx.Param(jnp.zeros((sum(sections),), dtype), sections=sections)


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(
        self,
        size: int,
        intermediate_size: int,
        dtype: jnp.dtype,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
        *,
        sums_parts: bool = True,
    ):
        self.activation = activation
        self.gate_proj = Linear(size, intermediate_size, dtype)
        self.up_proj = Linear(size, intermediate_size, dtype)
        self.down_proj = Linear(intermediate_size, size, dtype, sums_parts=sums_parts)

    @property
    def inputs(self) -> tuple[Linear, ...]:
        """The layers whose weights multiply its input."""
        return self.gate_proj, self.up_proj

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = apply_all(x, self.inputs)
        return self.down_proj(self.activation(gate) * up)
