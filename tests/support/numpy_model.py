"""Qwen3, Llama and Gemma 2 in NumPy, float64 and without a cache: a reference without torch.

With `precision=bfloat16` every result is rounded to it. That gives the error of a plain
computation, which bounds the error of a host in bfloat16.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

COMMON = {
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "vocab_size": 96,
}
QWEN3 = {
    **COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "model_type": "qwen3",
    "tie_word_embeddings": False,
}
GEMMA2 = {
    **COMMON,
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention"],
    "model_type": "gemma2",
    "query_pre_attn_scalar": 24,
    "sliding_window": 9,
    "tie_word_embeddings": True,
}
LLAMA = {**QWEN3, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
Weights = dict[str, np.ndarray]


def make(folder: pathlib.Path, config: dict[str, Any], seed: int = 0) -> Weights:
    """Write a random checkpoint of numbers that bfloat16 can hold, and return its weights."""
    rng = np.random.default_rng(seed)
    gemma = config["model_type"] == "gemma2"
    size, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (heads * dim, size),
        "self_attn.k_proj": (kv_heads * dim, size),
        "self_attn.v_proj": (kv_heads * dim, size),
        "self_attn.o_proj": (size, heads * dim),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), size)
    if gemma:
        norms |= dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), size)
    elif config["model_type"] == "qwen3":
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    low, high = (-0.5, 0.5) if gemma else (0.5, 1.5)  # Gemma adds 1 to a stored norm
    weights = {"model.norm": np.full(size, (low + high) / 2)}
    for name in ("model.embed_tokens",) if gemma else ("model.embed_tokens", "lm_head"):
        weights[name] = rng.normal(size=(config["vocab_size"], size))
        weights[name] /= size**0.5 if gemma else 1
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            weight = rng.normal(size=shape) / shape[1] ** 0.5
            weights[f"model.layers.{layer}.{name}"] = weight
        for name, count in norms.items():
            weights[f"model.layers.{layer}.{name}"] = rng.uniform(low, high, count)
    weights = {name: x.astype(ml_dtypes.bfloat16) for name, x in weights.items()}
    stored = {f"{name}.weight": x.astype(np.float32) for name, x in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return {name: x.astype(np.float64) for name, x in weights.items()}


def save_tokenizer(folder: str) -> None:
    """Save a tokenizer whose words are the numbers of tokens, in a checkpoint's folder."""
    import tokenizers
    import transformers

    words = {str(token): token for token in range(COMMON["vocab_size"])}
    numbers = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    numbers.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=numbers, unk_token="0", eos_token="2"
    ).save_pretrained(folder)


def save_letters(folder: str) -> None:
    """Save a byte tokenizer, which grammars need, in a checkpoint's folder.

    The checkpoint must have at least 259 tokens. From 3 on they are the bytes of `letters()`; 2
    ends a completion.
    """
    import tokenizers
    import transformers

    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words |= {letter: token for token, letter in enumerate(letters(), 3)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)


def letters() -> list[str]:
    """Return how tokenizers write each byte."""
    import tokenizers

    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def frequencies(config: dict[str, Any]) -> np.ndarray:
    """Return frequencies of rotary embeddings, scaled as in Llama 3.1 if the configuration asks."""
    half = config["head_dim"] // 2
    found = config["rope_theta"] ** (-np.arange(half) / half)
    scaling = config.get("rope_scaling")
    if scaling is None:
        return found
    assert scaling["rope_type"] == "llama3"
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    for i, frequency in enumerate(found):
        turns = scaling["original_max_position_embeddings"] / (2 * np.pi / frequency)
        if turns < low:
            found[i] = frequency / scaling["factor"]
        elif turns <= high:
            part = (turns - low) / (high - low)
            found[i] = (1 - part) * frequency / scaling["factor"] + part * frequency
    return found


def logits(
    config: dict[str, Any],
    weights: Weights,
    tokens: list[int],
    precision: Any = np.float64,
) -> np.ndarray:
    """Return logits [T, vocabulary] after every token.

    Args:
      config, weights: as for `make`; features missing in `config` are left out.
      tokens: T tokens.
      precision: the dtype that every result is rounded to.
    """
    gemma = config["model_type"] == "gemma2"
    heads, dim, size = config["num_attention_heads"], config["head_dim"], config["hidden_size"]
    distance = np.arange(len(tokens))[:, None] - np.arange(len(tokens))[None, :]

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(precision).astype(np.float64)

    def product(x: np.ndarray, name: str) -> np.ndarray:
        return rounded(x @ weights[name].T)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean = np.square(x).mean(-1, keepdims=True)
        return rounded(x / np.sqrt(mean + config["rms_norm_eps"]) * (weights[name] + gemma))

    def rotate(x: np.ndarray) -> np.ndarray:
        half, angle = dim // 2, np.arange(len(x))[:, None] * frequencies(config)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        left, right = x[..., :half], x[..., half:]
        return rounded(np.concatenate([left * cos - right * sin, right * cos + left * sin], -1))

    def attention(x: np.ndarray, index: int) -> np.ndarray:
        layer = f"model.layers.{index}.self_attn"
        q, k, v = (product(x, f"{layer}.{name}_proj").reshape(len(x), -1, dim) for name in "qkv")
        if config["model_type"] == "qwen3":
            q, k = norm(q, f"{layer}.q_norm"), norm(k, f"{layer}.k_norm")
        k, v = (np.repeat(rows, heads // rows.shape[1], axis=1) for rows in (rotate(k), v))
        scale = config.get("query_pre_attn_scalar", dim) ** -0.5
        scores = np.einsum("qhd,khd->hqk", rotate(q), k) * scale
        cap, window = config.get("attn_logit_softcapping"), config.get("sliding_window")
        scores = cap * np.tanh(scores / cap) if cap else scores
        seen = distance >= 0
        if window and config["layer_types"][index] == "sliding_attention":
            seen &= distance < window
        scores = np.where(seen, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", rounded(shares / shares.sum(-1, keepdims=True)), v)
        return product(rounded(out).reshape(len(x), -1), f"{layer}.o_proj")

    def feed_forward(x: np.ndarray, index: int) -> np.ndarray:
        layer = f"model.layers.{index}.mlp"
        gate, up = (product(x, f"{layer}.{name}_proj") for name in ("gate", "up"))
        if gemma:
            inner = (2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)
            gate = gate / 2 * (1 + np.tanh(inner))
        else:
            gate = gate / (1 + np.exp(-gate))
        return product(rounded(rounded(gate) * up), f"{layer}.down_proj")

    x = weights["model.embed_tokens"][tokens] * (size**0.5 if gemma else 1)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        out = attention(norm(x, f"{layer}.input_layernorm"), index)
        between = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        x = rounded(x + (norm(out, f"{layer}.post_attention_layernorm") if gemma else out))
        out = feed_forward(norm(x, f"{layer}.{between}"), index)
        x = rounded(x + (norm(out, f"{layer}.post_feedforward_layernorm") if gemma else out))
    head = "model.embed_tokens" if gemma else "lm_head"
    found, cap = product(norm(x, "model.norm"), head), config.get("final_logit_softcapping")
    return rounded(cap * np.tanh(found / cap)) if cap else found


def logprobs(
    config: dict[str, Any],
    weights: Weights,
    tokens: list[int],
    count: int,
    precision: Any = np.float64,
) -> list[float]:
    """Return log probabilities of the last `count` of `tokens`, each given those before it."""
    found = normalized(logits(config, weights, tokens[:-1], precision)[-count:])
    return [float(row[token]) for row, token in zip(found, tokens[-count:], strict=True)]


def normalized(found: np.ndarray) -> np.ndarray:
    """Turn logits into log probabilities."""
    found = found - found.max(-1, keepdims=True)
    return found - np.log(np.exp(found).sum(-1, keepdims=True))


def greedy(config: dict[str, Any], weights: Weights, prompt: list[int], count: int) -> list[int]:
    """Generate `count` tokens greedily; fail if two are nearly equally likely."""
    tokens = list(prompt)
    for _ in range(count):
        last = logits(config, weights, tokens)[-1]
        second, best = np.argsort(last)[-2:]
        assert last[best] - last[second] > 1e-4
        tokens.append(int(best))
    return tokens[len(prompt) :]


def errors(tokens: list, logprobs: list, judged_tokens: list, judged: list) -> list[float]:
    """Return errors of log probabilities, in each text up to the first token that differs.

    Args:
      tokens, judged_tokens: lists of tokens, one per text, to test and of the reference.
      logprobs, judged: the tokens' log probabilities.
    """
    found: list[float] = []
    for row, values, want, exact in zip(tokens, logprobs, judged_tokens, judged, strict=True):
        pairs = list(zip(row, want, strict=True))
        same = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
        found += np.subtract(values, exact)[:same].tolist()
    return found
