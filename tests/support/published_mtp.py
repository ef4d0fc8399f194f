"""MTP layers as published: checkpoints that have one, and the layer in NumPy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import numpy as safetensors

from examples.options import CHECKPOINTS


def write_qwen3_next(target: Path) -> None:
    """Write qwen3-next-tiny with an MTP layer, named as in published checkpoints."""
    rng = np.random.default_rng(5)
    config = json.loads((CHECKPOINTS / "qwen3-next-tiny" / "config.json").read_text())
    tensors = safetensors.load_file(CHECKPOINTS / "qwen3-next-tiny" / "model.safetensors")
    tensors = {name: np.asarray(x, np.float32) for name, x in tensors.items()}
    size, head_dim = config["hidden_size"], config["head_dim"]
    rows, kv_rows = (config[f"num_{n}_heads"] * head_dim for n in ("attention", "key_value"))
    inner = config["moe_intermediate_size"]

    def put(name: str, *shape: int, scale: float = 1.0) -> None:
        x = rng.normal(size=shape) * scale * shape[-1] ** -0.5
        tensors[f"mtp.{name}.weight"] = x.astype(np.float32)

    put("fc", size, 2 * size)
    norms = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
    for name in (*norms, "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        put(name, size)
    for name, shape in {
        "q_proj": (2 * rows, size),
        "k_proj": (kv_rows, size),
        "v_proj": (kv_rows, size),
        "q_norm": (head_dim,),
        "k_norm": (head_dim,),
    }.items():
        put(f"layers.0.self_attn.{name}", *shape)
    put("layers.0.self_attn.o_proj", size, rows, scale=2.0)
    put("layers.0.mlp.gate", config["num_experts"], size)
    put("layers.0.mlp.shared_expert_gate", 1, size)
    for path in ("shared_expert", *(f"experts.{e}" for e in range(config["num_experts"]))):
        put(f"layers.0.mlp.{path}.gate_proj", inner, size)
        put(f"layers.0.mlp.{path}.up_proj", inner, size)
        put(f"layers.0.mlp.{path}.down_proj", size, inner, scale=2.0)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    safetensors.save_file(tensors, target / "model.safetensors")


class Published:
    """The MTP layer of the report and the published checkpoints, in NumPy, float64, no cache."""

    def __init__(self, folder: Path):
        tensors = safetensors.load_file(folder / "model.safetensors")
        self.tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
        self.config = json.loads((folder / "config.json").read_text())

    def weight(self, name: str) -> np.ndarray:
        return self.tensors[f"mtp.{name}.weight"]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weight(name).T

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        unit = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return unit * (1 + self.weight(name))

    def guesses(self, hidden: np.ndarray, tokens: list[int], count: int) -> tuple[int, ...]:
        """Guess greedily after `tokens`, all but the last of which have a hidden state."""
        found = []
        for _ in range(count):
            after = [*tokens, *found][1:]
            embedded = self.tensors["model.embed_tokens.weight"][after]
            both = (
                self.norm("pre_fc_norm_embedding", embedded),
                self.norm("pre_fc_norm_hidden", hidden),
            )
            x = self.linear("fc", np.concatenate(both, axis=-1))
            x = x + self.attend(self.norm("layers.0.input_layernorm", x))
            x = x + self.mix(self.norm("layers.0.post_attention_layernorm", x))
            hidden = np.concatenate([hidden, self.norm("norm", x)[-1:]])
            found.append(int((self.tensors["lm_head.weight"] @ hidden[-1]).argmax()))
        return tuple(found)

    def attend(self, x: np.ndarray) -> np.ndarray:
        path, count, dim = "layers.0.self_attn", len(x), self.config["head_dim"]
        query = self.linear(f"{path}.q_proj", x).reshape(count, -1, 2 * dim)
        query, gate = query[..., :dim], query[..., dim:]
        key = self.linear(f"{path}.k_proj", x).reshape(count, -1, dim)
        value = self.linear(f"{path}.v_proj", x).reshape(count, -1, dim)
        query = self.rotate(self.norm(f"{path}.q_norm", query))
        key = self.rotate(self.norm(f"{path}.k_norm", key))
        group = query.shape[1] // key.shape[1]
        key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
        logits = np.einsum("thd,shd->hts", query, key) / np.sqrt(dim)
        logits = np.where(np.tri(count, dtype=bool), logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hts,shd->thd", weights, value) / (1 + np.exp(-gate))
        return self.linear(f"{path}.o_proj", out.reshape(count, -1))

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """Rotate the first quarter of each head."""
        size = x.shape[-1] // 4
        frequencies = 10_000.0 ** (-np.arange(0, size, 2) / size)
        angles = np.arange(len(x))[:, None, None] * frequencies
        low, high, rest = np.split(x, [size // 2, size], axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)

    def mix(self, x: np.ndarray) -> np.ndarray:
        path = "layers.0.mlp"
        chances = np.exp(self.linear(f"{path}.gate", x))
        chances /= chances.sum(-1, keepdims=True)
        chosen = np.argsort(-chances, axis=-1)[:, : self.config["num_experts_per_tok"]]
        gate = 1 / (1 + np.exp(-self.linear(f"{path}.shared_expert_gate", x)))
        out = gate * self.expert(f"{path}.shared_expert", x)
        for t, experts in enumerate(chosen):
            for e in experts:
                share = chances[t, e] / chances[t, experts].sum()
                out[t] += share * self.expert(f"{path}.experts.{e}", x[t])
        return out

    def expert(self, path: str, x: np.ndarray) -> np.ndarray:
        gate, up = self.linear(f"{path}.gate_proj", x), self.linear(f"{path}.up_proj", x)
        return self.linear(f"{path}.down_proj", gate / (1 + np.exp(-gate)) * up)


def write_deepseek(target: Path) -> None:
    """Write deepseek-v3-tiny with plain RoPE and an MTP layer, published as layer 3."""
    rng, there = np.random.default_rng(6), CHECKPOINTS / "deepseek-v3-tiny"
    config = json.loads((there / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    tensors = safetensors.load_file(there / "model.safetensors")
    tensors = {name: np.asarray(x, np.float32) for name, x in tensors.items()}
    size, path = config["hidden_size"], "model.layers.3"

    def put(name: str, *shape: int) -> None:
        x = rng.normal(size=shape) * shape[-1] ** -0.5
        tensors[f"{path}.{name}"] = x.astype(np.float32)

    put("eh_proj.weight", size, 2 * size)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        put(f"{name}.weight", size)
        tensors[f"{path}.{name}.weight"] += 1
    for name, x in list(tensors.items()):
        if name.startswith("model.layers.2."):
            put(name.removeprefix("model.layers.2."), *x.shape)
            if x.ndim == 1:  # norms, and the bias that balances experts
                tensors[name.replace("layers.2.", "layers.3.")] += "norm" in name
    # Published checkpoints have copies here, which are not read.
    put("embed_tokens.weight", config["vocab_size"], size)
    put("shared_head.head.weight", config["vocab_size"], size)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    safetensors.save_file(tensors, target / "model.safetensors")


DEEPSEEK_NAMES = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "shared_head.norm",
}


class PublishedDeepseek(Published):
    """DeepSeek-V3's layer, with keys and values of all heads."""

    def weight(self, name: str) -> np.ndarray:
        name = DEEPSEEK_NAMES.get(name, name.removeprefix("layers.0."))
        return self.tensors[f"model.layers.3.{name}.weight"]

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * self.weight(name)

    def attend(self, x: np.ndarray) -> np.ndarray:
        path, count, config = "self_attn", len(x), self.config
        plain, rotated, rank = (
            config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
        )
        query = self.norm(f"{path}.q_a_layernorm", self.linear(f"{path}.q_a_proj", x))
        query = self.linear(f"{path}.q_b_proj", query).reshape(count, -1, plain + rotated)
        latent = self.linear(f"{path}.kv_a_proj_with_mqa", x)
        shared = self.rotate(latent[:, None, rank:])
        latent = self.norm(f"{path}.kv_a_layernorm", latent[:, :rank])
        both = self.linear(f"{path}.kv_b_proj", latent).reshape(count, query.shape[1], -1)
        logits = np.einsum("thd,shd->hts", query[..., :plain], both[..., :plain])
        logits += np.einsum("thd,sd->hts", self.rotate(query[..., plain:]), shared[:, 0])
        logits /= np.sqrt(plain + rotated)
        logits = np.where(np.tri(count, dtype=bool), logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hts,shd->thd", weights, both[..., plain:])
        return self.linear(f"{path}.o_proj", out.reshape(count, -1))

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """Rotate interleaved pairs."""
        size = x.shape[-1]
        frequencies = 10_000.0 ** (-np.arange(0, size, 2) / size)
        turns = np.exp(1j * np.arange(len(x))[:, None, None] * frequencies)
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * turns
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)

    def mix(self, x: np.ndarray) -> np.ndarray:
        path, config = "mlp", self.config
        scores = 1 / (1 + np.exp(-self.linear(f"{path}.gate", x)))
        bias = self.tensors["model.layers.3.mlp.gate.e_score_correction_bias"]
        out = self.expert(f"{path}.shared_experts", x)
        for t, score in enumerate(scores):
            groups = np.split(np.arange(len(bias)), config["n_group"])
            best = [np.sort((score + bias)[group])[-2:].sum() for group in groups]
            chosen = np.argsort(best)[-config["topk_group"] :]
            allowed = np.concatenate([groups[g] for g in chosen])
            order = np.argsort((score + bias)[allowed])
            experts = allowed[order[-config["num_experts_per_tok"] :]]
            for e in experts:
                share = score[e] / score[experts].sum() * config["routed_scaling_factor"]
                out[t] += share * self.expert(f"{path}.experts.{e}", x[t])
        return out
