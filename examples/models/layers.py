"""Layers that models share: linear maps, norms, rotary positions, gated feed-forward.

Modules hold parameters and nothing else, under the names a Hugging Face checkpoint gives them;
linear weights keep its [out, in] layout, so that loading is a matter of names.

Axes: T tokens of all sequences one after another, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ROPE_NEEDS = {  # by rope_type
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": (),
}
INTEGERS = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")


class Linear(nnx.Module):
    """`x @ weight.T + bias` with weight [out, in]; float32 stays float32 on every machine."""

    def __init__(self, num_in: int, num_out: int, dtype: jnp.dtype, *, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((num_out, num_in), dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros((num_out,), dtype))
        self.has_bias = bias

    def __call__(self, x: jax.Array) -> jax.Array:
        y = product(x, self.weight[...])
        return y + self.bias[...][None] if self.has_bias else y


class Embedding(nnx.Module):
    """Rows of a table [vocabulary, E], times a constant rounded to the table's dtype."""

    def __init__(
        self, num_rows: int, num_columns: int, dtype: jnp.dtype, *, scale: float | None = None
    ):
        self.weight = nnx.Param(jnp.zeros((num_rows, num_columns), dtype))
        self.scale = scale

    def __call__(self, tokens: jax.Array) -> jax.Array:
        rows = self.weight[...].at[tokens].get(mode="clip")
        return rows if self.scale is None else rows * jnp.asarray(self.scale, rows.dtype)


def logits_from(x: jax.Array, table: jax.Array) -> jax.Array:
    """`x @ table.T` in float32."""
    return product(x, table, jnp.float32)


def product(x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """`x @ weight.T` [T, out] of x [T, in] and weight [out, in], in `dtype` or x's.

    How a product is written decides how fast XLA for CPU runs it. Measured on two cores, JAX 0.10
    and 0.12, layers of 14 million numbers after one another, 16 tokens:

    - float32: the right operand is copied to another layout in every call, so the weight is on
      the left: 3.1 ms a layer instead of 6.
    - bfloat16: XLA converts a weight to float32 in every call where the product is asked for in
      bfloat16 (JAX 0.10), stands the other way round, or has fewer than 4 tokens. Asked for in
      float32, rounded after, with rows of zeros up to 4: 3 ms a layer instead of 19.
    """
    rows = x.shape[0]
    options = {"precision": "highest", "preferred_element_type": jnp.float32}
    if x.dtype == jnp.float32:
        # Without the barrier XLA would turn this back into a product of x and the weight.
        y = jax.lax.optimization_barrier(jnp.einsum("oi,ti->ot", weight, x, **options)).T
    else:
        if rows < 4:
            x = jnp.concatenate([x, jnp.zeros((4 - rows, x.shape[1]), x.dtype)])
        y = jnp.einsum("ti,oi->to", x, weight, **options)[:rows]
    return y.astype(dtype or x.dtype)


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x ** 2) + eps)` over the last axis, in float32."""
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
    """A vector with as many axes as x, to be broadcast over all but the last."""
    return jnp.expand_dims(vector, range(x.ndim - 1))


def gelu(x: jax.Array) -> jax.Array:
    """The tanh approximation."""
    return jax.nn.gelu(x, approximate=True)


class DepthwiseConv(nnx.Module):
    """The weights [channels, 1, taps] and the bias of a convolution per channel."""

    def __init__(self, channels: int, taps: int, dtype: jnp.dtype, *, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((channels, 1, taps), dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros((channels,), dtype))


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(
        self,
        size: int,
        intermediate_size: int,
        dtype: jnp.dtype,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    ):
        self.activation = activation
        self.gate_proj = Linear(size, intermediate_size, dtype)
        self.up_proj = Linear(size, intermediate_size, dtype)
        self.down_proj = Linear(intermediate_size, size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


# -- rotary positions -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rope:
    """How a layer rotates positions. Static in jit, so it must be hashable."""

    frequencies: tuple[float, ...]  # of each pair of a head, in angle per position
    factor: float = 1.0  # of cosine and sine

    @classmethod
    def from_hf(cls, parameters: Mapping[str, Any], head_dim: int) -> Rope:
        """From the `rope_parameters` of a config.json."""
        frequencies, factor = rope_frequencies(parameters, head_dim)
        return cls(tuple(frequencies.tolist()), factor)

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine of every token's angles times the factor, float32 [T, 1, R / 2] each."""
        frequencies = np.array(self.frequencies, np.float32)
        angles = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None, :]
        return jnp.cos(angles) * self.factor, jnp.sin(angles) * self.factor


def rope_frequencies(parameters: Mapping[str, Any], head_dim: int) -> tuple[np.ndarray, float]:
    """Angles per position, and what cosine and sine are multiplied by.

    The first R = head_dim * partial_rotary_factor elements of a head turn, pair (j, j + R / 2) by
    `f_j = theta ** (-2 j / R)` a position. "linear" divides all f_j by `factor`. "proportional"
    does so too, with R = head_dim and f_j = 0 past the partial_rotary_factor. "yarn" divides
    those that turn less than `beta_slow` times within `original_max_position_embeddings`, leaves
    those that turn more than `beta_fast` times, and blends between:

        f_j ((1 - r_j) + r_j / factor),   r_j a ramp from 0 to 1 over j.

    Returns: float32 [R / 2], and the factor (1 but for yarn: 0.1 log(factor) + 1).
    Raises: `ValueError` for another rope_type.
    """
    kind, factor = parameters.get("rope_type", "default"), parameters.get("factor", 1.0)
    fraction = parameters.get("partial_rotary_factor", 1.0)
    size = head_dim if kind == "proportional" else int(head_dim * fraction)
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    # Rounded to float32 where the models' own code does: one last bit in a frequency is 1e-5 in
    # an angle after a hundred tokens, and half of the logits' distance to another implementation.
    theta = parameters["rope_theta"]
    powers = np.power(theta, exponents, dtype=np.float64).astype(np.float32)
    frequencies = np.float32(1) / powers
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / np.float32(factor), 1.0
    if kind == "proportional":
        turns = np.arange(size // 2) < int(fraction * size // 2)
        return np.where(turns, frequencies / np.float32(factor), np.float32(0)), 1.0
    if kind != "yarn":
        raise ValueError(f"rope_type is {kind!r}, but must be one of {tuple(ROPE_NEEDS)}")
    context = parameters["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return size * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_that_turns(parameters.get("beta_fast") or 32)
    last = pair_that_turns(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last += 0.001 if last == first else 0
    ramp = np.clip((np.arange(size // 2, dtype=np.float32) - first) / (last - first), 0, 1)
    kept = np.float32(1) - ramp.astype(np.float32)
    slow = np.float32(1) / (np.float32(factor) * powers)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return slow * (1 - kept) + frequencies * kept, attention_factor


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn each pair (x[..., j], x[..., j + R / 2]) of x [T, heads, D] by its angle.

    Elements past the R that the angles are for stay as they are.
    """
    cos, sin = (a.astype(x.dtype) for a in angles)
    size = cos.shape[-1]
    left, right, rest = x[..., :size], x[..., size : 2 * size], x[..., 2 * size :]
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)


# -- what a config.json must say ------------------------------------------------------------------


def check_config(
    config: Mapping[str, Any],
    model_types: tuple[str, ...],
    integers: tuple[str, ...],
    only: Mapping[str, tuple[Any, ...]],
    *,
    rope: Mapping[str, Any] | None = None,
    layer_types: Iterable[str] = (),
    more: Callable[[], list[str]] = list,
) -> None:
    """Refuse a `config.json` that a model would not compute as it says.

    Args:
      config: the file.
      model_types: the `model_type`s the model runs.
      integers: keys that must be integers, besides `INTEGERS`.
      only: the values the model knows of some keys, which may be absent.
      rope: what `rope_parameters` returned.
      layer_types: the kinds of layer the model knows.
      more: returns further problems, called only where there are none so far.

    Raises:
      ValueError: everything that does not fit, at once.
    """
    if config.get("model_type") not in model_types:
        known = ", ".join(model_types)
        raise ValueError(
            f"config.json: model_type is {config.get('model_type')!r}, but must be {known}"
        )
    problems = [
        f"{key} is missing"
        for key in (*INTEGERS, *integers)
        if not isinstance(config.get(key), int)
    ]
    for key, values in {**only, "quantization_config": (None,)}.items():
        if key in config and config[key] not in values:
            allowed = " or ".join(map(repr, values))
            problems.append(f"{key} is {config[key]!r}, but must be {allowed}")
    problems += [] if rope is None else rope_problems(rope, ("default", "linear", "yarn"))
    if layer_types and (given := config.get("layer_types")) is not None:
        known, count = sorted(layer_types), config.get("num_hidden_layers")
        if unknown := sorted(set(given) - set(known)):
            problems.append(f"layer_types has {unknown}, but must be of {known}")
        if len(given) != count:
            problems.append(
                f"layer_types has {len(given)} entries, but num_hidden_layers is {count}"
            )
    problems += [] if problems else more()
    if problems:
        raise ValueError("config.json: " + "; ".join(problems))


def rope_parameters(config: Mapping[str, Any], default_theta: float = 1e4) -> dict[str, Any]:
    """A config's rotary parameters, in the new spelling or the old one."""
    old = {"rope_theta": config.get("rope_theta", default_theta)}
    if "partial_rotary_factor" in config:
        old["partial_rotary_factor"] = config["partial_rotary_factor"]
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    given.setdefault("rope_type", given.pop("type", "default"))
    return {**old, **given}


def rope_problems(parameters: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    """What is wrong with rotary parameters, of the types that a model knows."""
    kind = parameters.get("rope_type", "default")
    if kind not in known:
        return [f"rope_type is {kind!r}, but must be one of {', '.join(known)}"]
    missing = [key for key in ("rope_theta", *ROPE_NEEDS[kind]) if key not in parameters]
    return [f"rope_parameters lacks {', '.join(missing)}"] if missing else []
