"""Random LoRA adapters as PEFT writes them, models with merged adapters, and engines."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import numpy as safetensors

from examples.engine.caches import group_layers
from examples.engine.drafts.speculation import Speculation
from examples.engine.engine import Engine
from examples.engine.mesh import Parameter
from examples.engine.model import Model, load_model
from examples.engine.request import Request
from examples.engine.scheduler import Limits
from examples.engine.step import Bucket
from examples.models.lora import CONFIG, TENSORS, Room, read_lora
from examples.options import CHECKPOINTS
from examples.text import Bytes
from tests.support.tiny_model import tiny_model

ROOM = Room(count=2, rank=6)
MIXED = Bucket(40, 8, 40)
LINEARS = {f"layers.0.{name}": (Parameter((6, 8)),) * 2 for name in ("q_proj", "mlp.up_proj")}


def small_model() -> Model:
    """A model of two linear layers, which never computes anything."""
    return dataclasses.replace(tiny_model(), linears=LINEARS)


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
    """Return the model with an adapter merged into its weights."""
    lora = read_lora(directory, model.linears, model.unused)
    flat = dict(nnx.to_flat_state(model.params))
    for path, variable in flat.items():
        name = ".".join(map(str, path)).removesuffix(".weight")
        if name in lora.factors:
            down, up = lora.factors[name]
            weight = np.asarray(variable.get_value(), np.float64) + up.astype(np.float64) @ down
            flat[path] = variable.replace(jnp.asarray(weight, variable.get_value().dtype))
    return dataclasses.replace(model, params=nnx.from_flat_state(list(flat.items())))


def build(model: Model, speculation: Speculation | None = None, **loras) -> Engine:
    """Build an engine for eight sequences with adapters, given by name."""
    limits = Limits(group_layers(model.layers), 8, 40, 8, 96, adapters=ROOM)
    drafted = speculation and Bucket(40, 8, 1 + speculation.num_drafts, speculation.num_drafts)
    return Engine(
        model,
        limits,
        tokenizer=Bytes(),
        buckets=(MIXED, drafted) if drafted else (MIXED,),
        speculation=speculation,
        loras=loras,
        keep_logits=True,
    )


def restart(engine: Engine, *, base: Model | None = None, **changes) -> None:
    """Empty the caches, and switch to the weights of `base`, which have the same shapes."""
    engine.reset(**changes)
    if base is not None:
        engine.adapters._base = base
        engine.adapters._place()


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts that share a prefix."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 256, size=17).tolist()
    return [(*shared, *rng.integers(0, 256, size=int(n)).tolist()) for n in range(3, 3 + count)]


def run(engine: Engine, prompt, name: str | None, new: int = 12, **options):
    """Generate from a prompt with the adapter of this name, and return the sequence."""
    adapter = None if name is None else engine.adapters[name]
    return engine.generate([Request(prompt, new, adapter=adapter, **options)])[0]


def two_adapters(model: Model, folder: Path) -> dict[str, Path]:
    """Write two adapters, for all linear layers and for some, of several ranks and scales."""
    patterns = {"alpha_pattern": {"o_proj": 9, ".*mlp.*": 7}}
    rslora = {"use_rslora": True, "lora_alpha": 3}
    some = "(q_proj|q_b_proj|v_proj|o_proj|out_proj)"
    return {
        "a": write_adapter(folder / "a", model, ranks={"q_proj": 6}, **patterns),
        "b": write_adapter(folder / "b", model, targets=some, rank=2, seed=1, size=0.9, **rslora),
    }


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Engine:
    """An engine of a bundled checkpoint with adapters "a" and "b"."""
    model = load_model(CHECKPOINTS / "qwen3-tiny")
    return build(model, **two_adapters(model, tmp_path_factory.mktemp("adapters")))
