"""Models with linear attention or sinks in NumPy: float64, and without a cache.

`numpy_model` has the plain ones. The models that transformers 5.24 has too (Qwen3.5, Kimi-Linear
and MiMo-V2-Flash) differ from it in float64 by less than 1e-5. A forward pass names each weight and
its shape where it uses it, and creates it on first use.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file

COMMON = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 96,
}
QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "text_config": {
        **COMMON,
        "model_type": "qwen3_5_text",
        "head_dim": 64,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
            "rope_type": "default",
        },
    },
}
KIMI_LINEAR = {
    **COMMON,
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "first_k_dense_replace": 2,
    "kv_lora_rank": 32,
    "linear_attn_config": {
        "full_attn_layers": [2],
        "head_dim": 16,
        "kda_layers": [1],
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
BAILING = {
    **COMMON,
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "model_type": "bailing_hybrid",
    "first_k_dense_replace": 2,
    "full_attention_type": "gqa",
    "group_norm_size": 2,
    "head_dim": 16,
    "layer_group_size": 2,
    "num_experts": 1,
    "num_key_value_heads": 4,
    "rope_theta": 10000.0,
}
# Published checkpoints of MiMo-V2-Flash bring their own configuration class; this one needs none.
MIMO = {
    **COMMON,
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "llama",
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_value_scale": 0.7,
    "head_dim": 192,
    "hybrid_layer_pattern": [1, 0],
    "layernorm_epsilon": 1e-5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
    "sliding_window": 9,
    "sliding_window_size": 9,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_rope_theta": 1000.0,
    "swa_v_head_dim": 128,
    "v_head_dim": 128,
}


@dataclasses.dataclass
class Model:
    """A configuration, and the weights used so far."""

    config: dict[str, Any]
    weights: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    rng: np.random.Generator = dataclasses.field(default_factory=lambda: np.random.default_rng(0))

    @property
    def text(self) -> dict[str, Any]:
        return self.config.get("text_config", self.config)

    def weight(self, name: str, *shape: int, low: float | None = None) -> np.ndarray:
        """Return a weight in float64: normal, or uniform in [low, low + 1) if `low` is given."""
        if name not in self.weights:
            made = self.rng.normal(size=shape) / shape[-1] ** 0.5
            if low is not None:
                made = self.rng.uniform(low, low + 1, shape)
            self.weights[name] = made.astype(np.float32)
        return self.weights[name].astype(np.float64)

    def product(self, x: np.ndarray, name: str, size: int) -> np.ndarray:
        return x @ self.weight(f"{name}.weight", size, x.shape[-1]).T

    def norm(self, x: np.ndarray, name: str, plus_one: bool = False) -> np.ndarray:
        eps = self.text.get("layernorm_epsilon", self.text["rms_norm_eps"])
        weight = self.weight(f"{name}.weight", x.shape[-1], low=-0.5 if plus_one else 0.5)
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * (weight + plus_one)

    def save(self, folder: pathlib.Path) -> None:
        self.logits([0, 1])  # makes the weights
        save_file(self.weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config))

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return logits [T, vocabulary] after every token."""
        mixer, body, embedding = MIXERS[self.config["architectures"][0]]
        plus_one = mixer is qwen3_5
        text = self.text
        x = self.weight(f"{body}.{embedding}.weight", text["vocab_size"], text["hidden_size"])
        x = x[tokens]
        for index in range(text["num_hidden_layers"]):
            layer = f"{body}.layers.{index}"
            x = x + mixer(self, self.norm(x, f"{layer}.input_layernorm", plus_one), layer, index)
            inner = self.norm(x, f"{layer}.post_attention_layernorm", plus_one)
            x = x + self.feed_forward(inner, f"{layer}.mlp")
        return self.product(self.norm(x, f"{body}.norm", plus_one), "lm_head", text["vocab_size"])

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """Generate `count` tokens greedily; return them and their log probabilities."""
        tokens, found = list(prompt), []
        for _ in range(count):
            last = self.logits(tokens)[-1]
            second, best = np.argsort(last)[-2:]
            assert last[best] - last[second] > 1e-4
            tokens.append(int(best))
            found.append(float(-np.log(np.exp(last - last[best]).sum())))
        return tokens[len(prompt) :], found

    def feed_forward(self, x: np.ndarray, name: str) -> np.ndarray:
        gate, up = (
            self.product(x, f"{name}.{part}_proj", self.text["intermediate_size"])
            for part in ("gate", "up")
        )
        return self.product(silu(gate) * up, f"{name}.down_proj", x.shape[-1])

    def convolved(self, x: np.ndarray, name: str, width: int) -> np.ndarray:
        """Convolve each channel with its own weights over the tokens so far."""
        weight = self.weight(f"{name}.weight", x.shape[-1], 1, width)[:, 0]
        padded = np.pad(x, ((width - 1, 0), (0, 0)))
        return silu(sum(padded[i : i + len(x)] * weight[:, i] for i in range(width)))


def logprobs(model: Model, tokens: list[int]) -> list[float]:
    """Return log probabilities of every token but the first, given those before it."""
    found = model.logits(tokens[:-1])
    found = found - np.log(np.exp(found).sum(-1, keepdims=True))
    return [float(row[token]) for row, token in zip(found, tokens[1:], strict=True)]


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6)


def rotate(x: np.ndarray, size: int, theta: float) -> np.ndarray:
    """Rotate the first `size` numbers of each head by the token's position."""
    half = size // 2
    angle = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    left, right, rest = x[..., :half], x[..., half:size], x[..., size:]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin, rest], -1)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    window: int | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Compute [T, H, V] from q [T, H, D], k [T, K, D] and v [T, K, V]."""
    heads = q.shape[1]
    k, v = (np.repeat(rows, heads // rows.shape[1], axis=1) for rows in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    distance = np.arange(len(q))[:, None] - np.arange(len(q))[None, :]
    seen = (distance >= 0) & (distance < (window or len(q)))
    weights = np.exp(np.where(seen, scores, -np.inf))
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks)[:, None, None]
    return np.einsum("hqk,khd->qhd", weights / total, v)


def recurrence(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray | None,
) -> np.ndarray:
    """Compute [T, H, V] with a state per head that decays and accumulates keys and values.

    With `beta` it is the delta rule: a new value first loses what the state returns for its key.

    Args:
      q, k: [T, H, K].
      v: [T, H, V].
      decay: [T, H, K or 1].
      beta: [T, H], or None.
    """
    state, out = np.zeros((*k.shape[1:], v.shape[-1])), []
    for t in range(len(q)):
        state = state * decay[t][..., None]
        new = v[t]
        if beta is not None:
            new = beta[t][:, None] * (new - (k[t][..., None] * state).sum(1))
        state = state + k[t][..., None] * new[:, None]
        out.append((q[t][..., None] * state).sum(1) * q.shape[-1] ** -0.5)
    return np.array(out)


def decay_of(model: Model, x: np.ndarray, name: str, *shape: int) -> np.ndarray:
    """Compute the decay of a delta net from x [T, H, K or 1]; `A_log` has the shape `shape`."""
    rate = np.exp(model.weight(f"{name}.A_log", *shape, low=0.0)).reshape(-1, 1)
    bias = model.weight(f"{name}.dt_bias", x[0].size, low=0.0).reshape(x.shape[1:])
    return np.exp(-rate * np.log1p(np.exp(x + bias)))


def qwen3_5(model: Model, x: np.ndarray, layer: str, index: int) -> np.ndarray:
    """Gated delta net, or attention with a gated output."""
    text, count = model.text, len(x)
    if text["layer_types"][index] == "full_attention":
        name, dim = f"{layer}.self_attn", text["head_dim"]
        heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
        pairs = model.product(x, f"{name}.q_proj", heads * 2 * dim).reshape(count, heads, 2 * dim)
        q, gate = pairs[..., :dim], pairs[..., dim:]
        k, v = (
            model.product(x, f"{name}.{one}_proj", kv_heads * dim).reshape(count, kv_heads, dim)
            for one in "kv"
        )
        rope = text["rope_parameters"]
        size = int(dim * rope["partial_rotary_factor"])
        q, k = (
            rotate(model.norm(rows, f"{name}.{one}_norm", True), size, rope["rope_theta"])
            for one, rows in (("q", q), ("k", k))
        )
        out = attention(q, k, v) * sigmoid(gate)
        return model.product(out.reshape(count, -1), f"{name}.o_proj", x.shape[-1])
    name = f"{layer}.linear_attn"
    key_heads, heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    key_dim, dim = text["linear_key_head_dim"], text["linear_value_head_dim"]
    keys, values = key_heads * key_dim, heads * dim
    mixed = model.product(x, f"{name}.in_proj_qkv", 2 * keys + values)
    mixed = model.convolved(mixed, f"{name}.conv1d", text["linear_conv_kernel_dim"])
    z = model.product(x, f"{name}.in_proj_z", values)
    b, a = (model.product(x, f"{name}.in_proj_{one}", heads) for one in "ba")
    q, k = (
        np.repeat(unit(rows.reshape(count, key_heads, key_dim)), heads // key_heads, axis=1)
        for rows in (mixed[:, :keys], mixed[:, keys : 2 * keys])
    )
    v = mixed[:, 2 * keys :].reshape(count, heads, dim)
    decay = decay_of(model, a[..., None], name, heads)
    out = recurrence(q, k, v, decay, sigmoid(b))
    out = model.norm(out, f"{name}.norm").reshape(count, -1) * silu(z)
    return model.product(out, f"{name}.out_proj", x.shape[-1])


def kimi_linear(model: Model, x: np.ndarray, layer: str, index: int) -> np.ndarray:
    """Kimi delta attention, or latent attention without positions."""
    config, count, name = model.config, len(x), f"{layer}.self_attn"
    linear = config["linear_attn_config"]
    if index + 1 in linear["kda_layers"]:
        heads, dim = linear["num_heads"], linear["head_dim"]
        inputs = []
        for one in "qkv":
            rows = model.product(x, f"{name}.{one}_proj", heads * dim)
            rows = model.convolved(rows, f"{name}.{one}_conv1d", linear["short_conv_kernel_size"])
            inputs.append(rows.reshape(count, heads, dim))
        gates = []
        for one in "fg":
            narrow = model.product(x, f"{name}.{one}_a_proj", dim)
            gates.append(model.product(narrow, f"{name}.{one}_b_proj", heads * dim))
        f, g = (gate.reshape(count, heads, dim) for gate in gates)
        beta = sigmoid(model.product(x, f"{name}.b_proj", heads))
        decay = decay_of(model, f, name, 1, 1, heads, 1)
        out = recurrence(unit(inputs[0]), unit(inputs[1]), inputs[2], decay, beta)
        out = model.norm(out, f"{name}.o_norm") * sigmoid(g)
        return model.product(out.reshape(count, -1), f"{name}.o_proj", x.shape[-1])
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, dim = (config[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
    q = model.product(x, f"{name}.q_proj", heads * (nope + rope)).reshape(count, heads, -1)
    latent = model.product(x, f"{name}.kv_a_proj_with_mqa", rank + rope)
    shared = np.broadcast_to(latent[:, None, rank:], (count, heads, rope))
    latent = model.norm(latent[:, :rank], f"{name}.kv_a_layernorm")
    both = model.product(latent, f"{name}.kv_b_proj", heads * (nope + dim))
    both = both.reshape(count, heads, -1)
    out = attention(q, np.concatenate([both[..., :nope], shared], -1), both[..., nope:])
    return model.product(out.reshape(count, -1), f"{name}.o_proj", x.shape[-1])


def bailing(model: Model, x: np.ndarray, layer: str, index: int) -> np.ndarray:
    """Lightning attention, or softmax attention."""
    config, count, name = model.config, len(x), f"{layer}.attention"
    heads, kv_heads, dim = (
        config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    linear = (index + 1) % config["layer_group_size"] != 0
    kv_heads = heads if linear else kv_heads
    mixed = model.product(x, f"{name}.query_key_value", (heads + 2 * kv_heads) * dim)
    q, k, v = np.split(mixed.reshape(count, -1, dim), [heads, heads + kv_heads], axis=1)
    q, k = (
        rotate(model.norm(rows, f"{name}.{one}_layernorm"), dim, config["rope_theta"])
        for one, rows in (("query", q), ("key", k))
    )
    if not linear:
        out = attention(q, k, v)
        return model.product(out.reshape(count, -1), f"{name}.dense", x.shape[-1])
    slopes = 2.0 ** (-8 / heads * np.arange(1, heads + 1))
    slopes = slopes * (1 - (index - 1) / (config["num_hidden_layers"] - 1) + 1e-5)
    decay = np.broadcast_to(np.exp(-slopes)[:, None], (count, heads, 1))
    out = recurrence(q, k, v, decay, None).reshape(count, config["group_norm_size"], -1)
    out = out / np.sqrt(np.square(out).mean(-1, keepdims=True) + config["rms_norm_eps"])
    out = out.reshape(count, -1) * model.weight(f"{name}.g_norm.weight", heads * dim, low=0.5)
    out = out * sigmoid(model.product(x, f"{name}.g_proj", heads * dim))
    return model.product(out, f"{name}.dense", x.shape[-1])


def mimo(model: Model, x: np.ndarray, layer: str, index: int) -> np.ndarray:
    """Attention; some layers have sinks, a window and their own numbers of heads."""
    config, count, name = model.config, len(x), f"{layer}.self_attn"
    slides = config["hybrid_layer_pattern"][index] == 1
    prefix = "swa_" if slides else ""
    heads, kv_heads, dim, value_dim, theta = (
        config[f"{prefix}{n}"]
        for n in (
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "v_head_dim",
            "rope_theta",
        )
    )
    q, k, v = (
        model.product(x, f"{name}.{one}_proj", number * size).reshape(count, number, size)
        for one, number, size in (
            ("q", heads, dim),
            ("k", kv_heads, dim),
            ("v", kv_heads, value_dim),
        )
    )
    rotated = int(dim * config["partial_rotary_factor"])
    q, k = rotate(q, rotated, theta), rotate(k, rotated, theta)
    window = config["sliding_window"] if slides else None
    sinks = model.weight(f"{name}.attention_sink_bias", heads, low=0.5) if slides else None
    if not config.get("add_swa_attention_sink_bias"):
        sinks = None
    out = attention(q, k, v * config["attention_value_scale"], window, sinks)
    return model.product(out.reshape(count, -1), f"{name}.o_proj", x.shape[-1])


MIXERS = {
    "BailingMoeV2_5ForCausalLM": (bailing, "model", "word_embeddings"),
    "KimiLinearForCausalLM": (kimi_linear, "model", "embed_tokens"),
    "MiMoV2FlashForCausalLM": (mimo, "model", "embed_tokens"),
    "Qwen3_5ForConditionalGeneration": (qwen3_5, "model.language_model", "embed_tokens"),
}
