"""Draft models for random checkpoints, which know what follows each token in given completions.

If drafts were never accepted, a test would not cover what follows an acceptance; if always, what
follows a rejection. These models read only the last token, and propose what first followed it.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

Weights = dict[str, np.ndarray]
HEADS, HEAD_DIM, INNER = 2, 64, 32  # of draft models with their own keys
HIDDEN = HEADS * HEAD_DIM


def followers(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return the first follower in completions of every token that has one."""
    found: dict[int, int] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        for token, after in zip([prompt[-1], *answer], answer, strict=False):
            found.setdefault(token, after)
    return found


def eagle3(folder: pathlib.Path, target: str, after: dict[int, int]) -> None:
    """Save a layer whose queries find their own key, and whose values are embeddings.

    It has half of the vocabulary: tokens outside it cannot be proposed, so they cause rejections.
    """
    _, weights = _read(target)
    embeddings = weights["model.embed_tokens.weight"]
    vocab_size = len(embeddings)
    likely = [*after.values(), *range(vocab_size)]
    words = np.sort([*dict.fromkeys(likely)][: vocab_size // 2])
    said = np.array([*after.values()])[:, None] == words
    find = np.random.default_rng(0).standard_normal((HIDDEN, HIDDEN)) / 5
    ones, eye, zeros = np.ones(HIDDEN), np.eye(HIDDEN), np.zeros((HIDDEN, HIDDEN))
    layer = {
        **_no_mlp(HIDDEN),
        "input_layernorm": ones,
        "hidden_norm": 0 * ones,
        "post_attention_layernorm": ones,
        "self_attn.q_proj": np.hstack([find, zeros]),
        "self_attn.k_proj": np.hstack([find, zeros]),
        "self_attn.v_proj": np.hstack([eye, zeros]),
        "self_attn.o_proj": eye,
    }
    config = {
        **_config("Eagle3LlamaForCausalLM", "llama", vocab_size),
        "draft_vocab_size": len(words),
        "norm_before_residual": True,
    }
    others = {
        "fc.weight": np.hstack([zeros] * 3),
        "norm.weight": ones,
        "lm_head.weight": _solve(_normalized(embeddings)[[*after]], said.astype(float)),
        "d2t": words - np.arange(len(words)),
    }
    _save(folder, config, {**_named("midlayer", layer), **others})


def dflash(folder: pathlib.Path, target: str, after: dict[int, int], layers: list[int]) -> None:
    """Save a layer that weighs all keys equally; only the last token's value is not zero.

    So it proposes the same at every position. `layers` are the target's layers that it reads.
    """
    _, weights = _read(target)
    embeddings, said = weights["model.embed_tokens.weight"].copy(), _said(weights, after)
    mask = next(token for token in range(len(embeddings)) if token not in after)
    embeddings[mask] = 0
    ones, eye, zeros = np.ones(HIDDEN), np.eye(HIDDEN), np.zeros((HIDDEN, HIDDEN))
    layer = {
        **_no_mlp(HIDDEN),
        "input_layernorm": ones,
        "post_attention_layernorm": ones,
        "self_attn.q_proj": zeros,
        "self_attn.k_proj": eye,
        "self_attn.v_proj": eye,
        "self_attn.o_proj": said,
        "self_attn.q_norm": ones[:HEAD_DIM],
        "self_attn.k_norm": ones[:HEAD_DIM],
    }
    config = {
        **_config("DFlashDraftModel", "qwen3", len(embeddings)),
        "block_size": 4,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": layers},
    }
    others = {
        "fc.weight": np.hstack([zeros] * len(layers)),
        "hidden_norm.weight": ones,
        "norm.weight": ones,
        "embed_tokens.weight": embeddings,
    }
    _save(folder, config, {**_named("layers.0", layer), **others})


def mtp(folder: pathlib.Path, target: str, after: dict[int, int]) -> None:
    """Save the target with one more layer, as in GLM-4-MoE and DeepSeek."""
    config, weights = _read(target)
    last = config["num_hidden_layers"] - 1
    added, said = f"model.layers.{last + 1}", _said(weights, after)
    ones = np.ones(len(said))
    others = {
        "enorm": ones,
        "hnorm": ones,
        "eh_proj": np.hstack([said, 0 * said]),
        "shared_head.norm": ones,
        "shared_head.head": weights["lm_head.weight"],
        "embed_tokens": weights["model.embed_tokens.weight"],
    }
    weights |= {**_quieter(weights, f"model.layers.{last}", added), **_named(added, others)}
    _save(folder, {**config, "num_nextn_predict_layers": 1}, weights)


def mimo(folder: pathlib.Path, target: str, after: dict[int, int]) -> None:
    """Save a Qwen2 with one more layer, which makes it a MiMo."""
    config, weights = _read(target)
    last, added = f"model.layers.{config['num_hidden_layers'] - 1}", "model.mtp_layers.0"
    said = _said(weights, after)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    others = {name: np.ones(len(said)) for name in norms}
    others["input_proj"] = np.hstack([0 * said, said])
    weights |= {**_quieter(weights, last, added), **_named(added, others)}
    changes = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    _save(folder, {**config, **changes}, weights)


def gemma4(folder: pathlib.Path, target: str, after: dict[int, int]) -> None:
    """Save a sliding-window layer and a global one that attend to the target's caches."""
    config, weights = _read(target)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rng = np.random.default_rng(0)
    ones = np.ones(hidden)
    said = _said(weights, after)
    embeddings = weights["model.embed_tokens.weight"]
    made = {
        "pre_projection": np.hstack([said, 0 * said]),
        "post_projection": np.eye(hidden),
        "model.norm": ones,
        "model.embed_tokens": embeddings,
    }
    for i in range(2):
        head_dim = len(weights[f"model.layers.{i}.self_attn.q_norm.weight"])
        rows = heads * head_dim
        layer = {
            **_no_mlp(hidden),
            "input_layernorm": ones,
            "post_attention_layernorm": ones,
            "pre_feedforward_layernorm": ones,
            "post_feedforward_layernorm": 0 * ones,
            "self_attn.q_proj": rng.standard_normal((rows, hidden)) / hidden**0.5,
            "self_attn.q_norm": np.ones(head_dim),
            "self_attn.o_proj": rng.standard_normal((hidden, rows)) / rows**0.5,
        }
        made |= {f"model.layers.{i}.{name}": x for name, x in layer.items()}
    named = {f"{name}.weight": x for name, x in made.items()}
    named |= {f"model.layers.{i}.layer_scalar": np.ones(1) for i in range(2)}
    text = {
        **config,
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "layer_types": config["layer_types"][:2],
        "per_layer_config": {"1": config["per_layer_config"]["1"]},
        "intermediate_size": INNER,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    assistant = {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": hidden,
        "tie_word_embeddings": True,
        "text_config": text,
    }
    _save(folder, assistant, named)


def _config(architecture: str, model_type: str, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
    }


def _no_mlp(hidden: int) -> Weights:
    inner = np.zeros((INNER, hidden))
    return {"mlp.gate_proj": inner, "mlp.up_proj": inner, "mlp.down_proj": inner.T}


def _named(layer: str, weights: Weights) -> Weights:
    return {f"{layer}.{name}.weight": x for name, x in weights.items()}


def _quieter(weights: Weights, layer: str, name: str) -> Weights:
    """Return a layer under another name, scaled so that it adds little to its input."""
    found = {}
    for key, x in weights.items():
        if key.startswith(f"{layer}."):
            adds = key.endswith(("o_proj.weight", "down_proj.weight"))
            found[key.replace(layer, name)] = 0.05 * x if adds else x
    return found


def _said(weights: Weights, after: dict[int, int]) -> np.ndarray:
    """Return a matrix from a token's normalized embedding to a hidden state of its follower."""
    embeddings = weights["model.embed_tokens.weight"]
    head = _normalized(weights.get("lm_head.weight", embeddings))
    return 100 * _solve(_normalized(embeddings)[[*after]], head[[*after.values()]])


def _normalized(rows: np.ndarray) -> np.ndarray:
    """Scale rows to a mean square of 1, as RMS norms do."""
    return rows / np.sqrt(np.square(rows).mean(1, keepdims=True))


def _solve(given: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the matrix that maps rows of `given` to rows of `wanted`, by least squares."""
    return np.linalg.lstsq(given, wanted, rcond=None)[0].T


def _read(target: str) -> tuple[dict[str, Any], Weights]:
    """Return a checkpoint's configuration and weights."""
    import safetensors.numpy

    folder = pathlib.Path(target)
    config = json.loads((folder / "config.json").read_text())
    return config, safetensors.numpy.load_file(folder / "model.safetensors")


def _save(folder: pathlib.Path, config: dict[str, Any], weights: Weights) -> None:
    import safetensors.numpy

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    kinds = {name: np.int64 if x.dtype.kind == "i" else np.float32 for name, x in weights.items()}
    small = {name: np.ascontiguousarray(x, kinds[name]) for name, x in weights.items()}
    safetensors.numpy.save_file(small, folder / "model.safetensors", {"format": "pt"})
