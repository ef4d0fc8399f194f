"""Checkpoints that lack weights which sglang-jax's model needs.

The host warns about each missing weight and leaves an empty array in its place. Compiling the layer
then fails, with `--disable-precompile` only in the first request. Examples are Phi-3, which has one
weight for queries, keys and values, and checkpoints with packed weights.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from jattn import checks

MISSING = "jattn_missing"  # attribute of a loader: the names that it has not found
NEEDED = re.compile(r"layers\.\d+\..*\b(q|k|v|o|gate|up|down)_proj\.weight")


def enable() -> None:
    """Refuse such checkpoints when they are loaded.

    Raises:
      ImportError: sglang-jax is not installed, or is another version.
    """
    from sgl_jax.srt.utils.weight_utils import WeightLoader

    load, is_left_out = (
        WeightLoader.load_weights_from_safetensors,
        WeightLoader._is_excluded_layer_weight,
    )

    @functools.wraps(is_left_out)
    def note(loader: Any, name: str) -> bool:
        """Called for each weight that is not in a checkpoint."""
        found: bool = is_left_out(loader, name)
        if not found and NEEDED.search(name):
            getattr(loader, MISSING).append(name)
        return found

    @functools.wraps(load)
    def load_and_check(loader: Any, *arguments: Any, **options: Any) -> None:
        setattr(loader, MISSING, [])
        load(loader, *arguments, **options)
        missing = getattr(loader, MISSING)
        with checks.checking("jattn.integrations.sglang_jax") as problems:
            problems.require(
                not missing,
                "--model-path",
                f"a checkpoint without {', '.join(missing[:3])} ({len(missing)} such weights)",
                "one with all weights of the host's model",
            )

    WeightLoader._is_excluded_layer_weight = note
    WeightLoader.load_weights_from_safetensors = load_and_check
