"""Checkpoints without weights that sglang-jax's model of them needs.

The host warns of each, and leaves an array of no numbers in its place, which fails where a layer is
compiled: with `--disable-precompile` in the first request. Phi-3's are such (it has one weight for
queries, keys and values), and those of weights that are packed.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from jattn import checks

MISSING = "jattn_missing"  # of a loader: the names that it has not found
NEEDED = re.compile(r"layers\.\d+\..*\b(q|k|v|o|gate|up|down)_proj\.weight")


def enable() -> None:
    """Refuse such checkpoints as they are loaded.

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
