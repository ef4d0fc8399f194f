"""Qwen3 in NumPy, float64 and without a cache: a judge for hosts that bring no torch."""

from __future__ import annotations

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 96,
}
HEADS, KV_HEADS, DIM = (
    CONFIG[f"{name}"] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
)


def make(folder: pathlib.Path, seed: int = 0) -> dict[str, np.ndarray]:
    """Write a random checkpoint; returns its weights."""
    rng = np.random.default_rng(seed)
    size, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, size),
        "self_attn.k_proj": (KV_HEADS * DIM, size),
        "self_attn.v_proj": (KV_HEADS * DIM, size),
        "self_attn.o_proj": (size, HEADS * DIM),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    norms = {"self_attn.q_norm": DIM, "self_attn.k_norm": DIM}
    norms |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), size)
    weights = {"model.norm": np.ones(size)}
    for name in ("model.embed_tokens", "lm_head"):
        weights[name] = rng.normal(size=(CONFIG["vocab_size"], size))
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, shape in shapes.items():
            weight = rng.normal(size=shape) / shape[1] ** 0.5
            weights[f"model.layers.{layer}.{name}"] = weight
        for name, count in norms.items():
            weights[f"model.layers.{layer}.{name}"] = rng.uniform(0.5, 1.5, count)
    stored = {f"{name}.weight": x.astype(np.float32) for name, x in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return {name.removesuffix(".weight"): x.astype(np.float64) for name, x in stored.items()}


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def rotate(x: np.ndarray) -> np.ndarray:
    """Rotary positions 0, 1, ... of `x` [T, heads, D]."""
    half = DIM // 2
    angle = np.arange(len(x))[:, None] * CONFIG["rope_theta"] ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    left, right = x[..., :half], x[..., half:]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def attention(weights: dict[str, np.ndarray], layer: str, x: np.ndarray) -> np.ndarray:
    """Causal attention of `x` [T, size] to itself."""

    def heads(name: str) -> np.ndarray:
        return (x @ weights[f"{layer}.self_attn.{name}_proj"].T).reshape(len(x), -1, DIM)

    query, key = (
        rotate(norm(heads(name), weights[f"{layer}.self_attn.{name}_norm"])) for name in "qk"
    )
    key, value = (np.repeat(side, HEADS // KV_HEADS, axis=1) for side in (key, heads("v")))
    logits = np.einsum("qhd,khd->hqk", query, key) / DIM**0.5
    logits = np.where(np.tril(np.ones(logits.shape[1:], bool)), logits, -np.inf)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    out = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), value)
    return out.reshape(len(x), -1) @ weights[f"{layer}.self_attn.o_proj"].T


def last_logits(weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Logits after the last token."""
    x = weights["model.embed_tokens"][tokens]
    for index in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        x = x + attention(weights, layer, norm(x, weights[f"{layer}.input_layernorm"]))
        inner = norm(x, weights[f"{layer}.post_attention_layernorm"])
        gate, up = (inner @ weights[f"{layer}.mlp.{name}_proj"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{layer}.mlp.down_proj"].T
    return norm(x[-1], weights["model.norm"]) @ weights["lm_head"].T


def greedy(weights: dict[str, np.ndarray], prompt: list[int], count: int) -> list[int]:
    """The `count` likeliest tokens, one after another; fails where two are nearly as likely."""
    tokens = list(prompt)
    for _ in range(count):
        logits = last_logits(weights, tokens)
        second, best = np.argsort(logits)[-2:]
        assert logits[best] - logits[second] > 1e-4
        tokens.append(int(best))
    return tokens[len(prompt) :]
