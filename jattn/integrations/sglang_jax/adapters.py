"""LoRA adapters that sglang-jax would load only in part."""

from __future__ import annotations

import functools
from typing import Any

from jattn import checks

# Fields of an adapter's configuration that the host does not read, and values that turn them off.
UNREAD: dict[str, tuple[object, ...]] = {
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "bias": (None, "none"),
}


def enable() -> None:
    """Refuse such adapters when they are read.

    Raises:
      ImportError: sglang-jax is not installed, or is another version.
    """
    from sgl_jax.srt.lora.lora_config import LoRAConfig

    read = LoRAConfig.__init__

    @functools.wraps(read)
    def read_and_check(config: Any, path: str, *arguments: Any, **options: Any) -> None:
        read(config, path, *arguments, **options)
        with checks.checking("jattn.integrations.sglang_jax") as problems:
            for name, without in UNREAD.items():
                value = config.hf_config.get(name)
                problems.require(
                    value is None or value in without,
                    "--lora-paths",
                    f"{path}, whose {name} is {value}",
                    "an adapter without it: the host does not read the field",
                )

    LoRAConfig.__init__ = read_and_check
