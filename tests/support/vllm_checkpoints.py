"""Checkpoints in the form that vLLM's host expects."""

from __future__ import annotations

import json
import pathlib


def publish_gemma4(folder: pathlib.Path) -> None:
    """Change a text-only Gemma 4 into the form of published checkpoints, for the host's JAX model.

    Its configuration becomes a `text_config`, and layers that share keys get weights for keys,
    which nothing reads.
    """
    import safetensors.numpy

    text = json.loads((folder / "config.json").read_text())
    whole = {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForCausalLM"],
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    for name in [name for name in weights if "q_norm" in name]:
        norm, rows = weights[name], weights[name.replace("q_norm", "q_proj")][: len(weights[name])]
        unread = {"k_norm": norm, "k_proj": rows, "v_proj": rows.copy()}
        weights = {name.replace("q_norm", key): x for key, x in unread.items()} | weights
    renamed = {name.replace("model.", "model.language_model.", 1): x for name, x in weights.items()}
    safetensors.numpy.save_file(renamed, folder / "model.safetensors", {"format": "pt"})
