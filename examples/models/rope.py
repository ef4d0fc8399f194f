"""Rotary positions: frequencies, angles, rotation, and their part of a config.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROPE_NEEDS = {  # by rope_type
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": (),
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """How a layer rotates positions. Static in jit, so it must be hashable."""

    frequencies: tuple[float, ...]  # of each pair of a head, in angle per position
    factor: float = 1.0  # of cosine and sine

    @classmethod
    def from_hf(cls, parameters: Mapping[str, Any], head_dim: int) -> Rope:
        """Make one from the `rope_parameters` of a config.json."""
        frequencies, factor = rope_frequencies(parameters, head_dim)
        return cls(tuple(frequencies.tolist()), factor)

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return factor times cosine and sine of tokens' angles, float32 [T, 1, R / 2] each."""
        frequencies = np.array(self.frequencies, np.float32)
        angles = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None, :]
        return jnp.cos(angles) * self.factor, jnp.sin(angles) * self.factor


def rope_frequencies(parameters: Mapping[str, Any], head_dim: int) -> tuple[np.ndarray, float]:
    """Return angles per position, and the factor of cosine and sine.

    The first R = head_dim * partial_rotary_factor elements of a head rotate, pair (j, j + R / 2) by
    `f_j = theta ** (-2 j / R)` per position. "linear" divides all f_j by `factor`. So does
    "proportional", with R = head_dim and f_j = 0 past the partial_rotary_factor. "yarn" divides
    those that turn less than `beta_slow` times within `original_max_position_embeddings`, keeps
    those that turn more than `beta_fast` times, and blends in between:

        f_j ((1 - r_j) + r_j / factor),   r_j a ramp from 0 to 1 over j.

    Returns: float32 [R / 2], and the factor (1, or for yarn 0.1 log(factor) + 1).
    Raises: `ValueError` for any other rope_type.
    """
    kind, factor = parameters.get("rope_type", "default"), parameters.get("factor", 1.0)
    fraction = parameters.get("partial_rotary_factor", 1.0)
    size = head_dim if kind == "proportional" else int(head_dim * fraction)
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    # Rounded to float32 where the models' own code does: the last bit of a frequency changes an
    # angle by 1e-5 after a hundred tokens, half of the logits' distance to another implementation.
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
        scales = [parameters.get(key) for key in ("mscale", "mscale_all_dim")]
        if not all(scales):
            scales = [1.0, 0.0]
        attention_factor = yarn_growth(factor, scales[0]) / yarn_growth(factor, scales[1])
    return slow * (1 - kept) + frequencies * kept, attention_factor


def yarn_growth(factor: float, scale: float) -> float:
    """Return YaRN's factor of the logits for positions stretched by `factor`."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate each pair (x[..., j], x[..., j + R / 2]) of x [T, heads, D] by its angle.

    Elements past the R that the angles are for do not change.
    """
    cos, sin = (a.astype(x.dtype) for a in angles)
    size = cos.shape[-1]
    left, right, rest = x[..., :size], x[..., size : 2 * size], x[..., 2 * size :]
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)


def rope_parameters(config: Mapping[str, Any], default_theta: float = 1e4) -> dict[str, Any]:
    """Read a config's rotary parameters, in the new spelling or the old one."""
    old = {"rope_theta": config.get("rope_theta", default_theta)}
    if "partial_rotary_factor" in config:
        old["partial_rotary_factor"] = config["partial_rotary_factor"]
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"config.json: rope_parameters is {given!r}, but must be an object")
    given = dict(given)
    given.setdefault("rope_type", given.pop("type", "default"))
    return {**old, **given}


def rope_problems(parameters: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    """Find problems with rotary parameters, given the types that a model knows."""
    kind = parameters.get("rope_type", "default")
    if kind not in known:
        return [f"rope_type is {kind!r}, but must be one of {', '.join(known)}"]
    missing = [key for key in ("rope_theta", *ROPE_NEEDS[kind]) if key not in parameters]
    return [f"rope_parameters lacks {', '.join(missing)}"] if missing else []
