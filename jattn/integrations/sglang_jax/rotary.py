"""Rotary embeddings that sglang-jax misreads, or does not scale.

transformers 5 writes one dictionary, `rope_parameters`. The host has version 4, and its models read
`rope_theta`, `rope_scaling` and `partial_rotary_factor`: without them they use a default base and
no scaling. jattn sets these fields from the dictionary.

The host implements the scaling of Llama 3.1 in a method that it never calls. jattn applies it:

    turns = original * frequency / (2 pi),  s = clip((turns - low) / (high - low), 0, 1)
    frequency = (s + (1 - s) / factor) * frequency
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

COUNTS_NUMBERS = ("minimax_m2",)  # models that read `rotary_dim`, of each head
SEPARATE = ("rope_theta", "partial_rotary_factor")  # separate fields in version 4


def enable() -> None:
    """Give the host configurations with the fields of version 4, and Llama 3.1's scaling.

    Raises:
      ImportError: sglang-jax is not installed, or is another version.
    """
    from sgl_jax.srt.configs import model_config
    from sgl_jax.srt.layers.embeddings import Llama3RotaryEmbedding

    get, make = model_config.get_config, Llama3RotaryEmbedding.__init__

    @functools.wraps(get)
    def get_and_separate(*args: Any, **kwargs: Any) -> Any:
        config = get(*args, **kwargs)
        separate(config, kwargs.get("model_override_args") or {})
        if hasattr(config, "text_config"):  # `model_override_args` do not reach it
            separate(config.text_config, {})
        return config

    @functools.wraps(make)
    def make_and_scale(embedding: Any, *args: Any, **kwargs: Any) -> None:
        make(embedding, *args, **kwargs)
        embedding._inv_freq_np = scaled(
            embedding._inv_freq_np,
            embedding.scaling_factor,
            embedding.low_freq_factor,
            embedding.high_freq_factor,
            embedding.orig_max_position,
        )

    model_config.get_config = get_and_separate
    Llama3RotaryEmbedding.__init__ = make_and_scale


def scaled(
    frequencies: np.ndarray, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """Scale frequencies as Llama 3.1: divide those with few turns in `original` tokens.

    Args:
      frequencies: in radians per token.
      factor: the divisor.
      low, high: with up to `low` turns a frequency is divided in full, from `high` on not at all.
      original: the context length that the model was first trained with.
    """
    turns = original * frequencies / (2 * math.pi)
    if low == high:
        share = (turns > low).astype(frequencies.dtype)
    else:
        share = np.clip((turns - low) / (high - low), 0, 1)
    return (share + (1 - share) / factor) * frequencies


def separate(config: object, given: Mapping[str, object]) -> None:
    """Set the fields of version 4 from `rope_parameters`, except those that the user gave.

    If several kinds of layers have their own parameters, set nothing: Gemma 4 reads those, and
    `unread` refuses other models.

    Args:
      config: a configuration of transformers.
      given: the user's `--json-model-override-args`.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        return
    found = {name: parameters[name] for name in SEPARATE if name in parameters}
    rest = {name: x for name, x in parameters.items() if name not in SEPARATE}
    kind = rest.pop("rope_type", rest.pop("type", "default"))
    found["rope_scaling"] = {"rope_type": kind, **rest} if rest or kind != "default" else None
    part = found.get("partial_rotary_factor")
    if part is not None and getattr(config, "model_type", "") in COUNTS_NUMBERS:
        found["rotary_dim"] = int(vars(config)["head_dim"] * part)
    for name, value in found.items():
        if name not in given:
            setattr(config, name, value)
