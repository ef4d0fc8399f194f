"""Random LoRA adapters as PEFT writes them, and the models they make when they are merged."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import numpy as safetensors

from examples.engine.model import Model
from examples.models.lora import CONFIG, TENSORS, read_lora


def write_adapter(
    directory: Path,
    model: Model,
    *,
    targets: str = ".*",
    rank: int = 4,
    ranks: dict[str, int] | None = None,
    seed: int = 0,
    size: float = 0.5,
    **config,
) -> Path:
    """Save an adapter of the linear layers whose path ends in a match of `targets`.

    Its product is about `size` times as large as a weight.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (whole, _) in model.linears.items():
        if not re.search(rf"{targets}$", name):
            continue
        of_it = next((r for key, r in (ranks or {}).items() if name.endswith(key)), rank)
        num_out, num_in = whole.shape
        path = f"base_model.model.model.{name}"
        scale = size * (0.02 / (of_it**0.5)) ** 0.5
        for which, shape in (("A", (of_it, num_in)), ("B", (num_out, of_it))):
            values = (scale * rng.normal(size=shape)).astype(np.float32)
            tensors[f"{path}.lora_{which}.weight"] = values
    assert tensors
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.1,
        "bias": "none",
        "target_modules": [targets],
        "rank_pattern": ranks or {},
        "init_lora_weights": True,
        "use_dora": False,
        "modules_to_save": None,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps({**said, **config}))
    safetensors.save_file(tensors, directory / TENSORS)
    return directory


def merged(model: Model, directory: Path) -> Model:
    """The model whose weights have an adapter's products added."""
    lora = read_lora(directory, model.linears, model.unused)
    flat = dict(nnx.to_flat_state(model.params))
    for path, variable in flat.items():
        name = ".".join(map(str, path)).removesuffix(".weight")
        if name in lora.factors:
            down, up = lora.factors[name]
            weight = np.asarray(variable.get_value(), np.float64) + up.astype(np.float64) @ down
            flat[path] = variable.replace(jnp.asarray(weight, variable.get_value().dtype))
    return dataclasses.replace(model, params=nnx.from_flat_state(list(flat.items())))
