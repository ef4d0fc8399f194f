"""Rotary embeddings of configurations that transformers 5 has written, which sglang-jax misreads.

Version 5 has one dictionary `rope_parameters`. The host has version 4, and its models read
`rope_theta`, `rope_scaling` and `partial_rotary_factor`: without them they take a base of their
own, and no scaling.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

COUNTS_NUMBERS = ("minimax_m2",)  # models that read `rotary_dim`, of a head
SEPARATE = ("rope_theta", "partial_rotary_factor")  # fields of their own in version 4


def enable() -> None:
    """Have the host read each model's configuration with the fields of version 4.

    Raises:
      ImportError: sglang-jax is not installed, or is another version.
    """
    from sgl_jax.srt.configs import model_config

    get = model_config.get_config

    @functools.wraps(get)
    def get_and_separate(*args: Any, **kwargs: Any) -> Any:
        config = get(*args, **kwargs)
        separate(config, kwargs.get("model_override_args") or {})
        if hasattr(config, "text_config"):  # which `model_override_args` do not reach
            separate(config.text_config, {})
        return config

    model_config.get_config = get_and_separate


def separate(config: object, given: Mapping[str, object]) -> None:
    """Set the fields of version 4 from `rope_parameters`, but for those that the user gave.

    Where layers of several kinds have parameters each, nothing is set: Gemma 4 reads those, and
    `refusals` refuses other models.

    Args:
      config: of transformers.
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
