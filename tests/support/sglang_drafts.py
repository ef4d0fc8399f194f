"""Checkpoints for sglang-jax with draft models that are often right."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file

from tests.support import numpy_model
from tests.support.sglang_host import COUNT, Judged, prompts


def drafted(target, draft) -> Judged:
    """Save a Qwen3 whose next token depends mostly on its last one, and an EAGLE3 draft model.

    The draft's attention picks its own token and passes on the token's embedding.
    """
    config = {**numpy_model.QWEN3, "num_hidden_layers": 3}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}
    weights = numpy_model.make(target, config)
    follow_last_token(target, weights)
    size, inner, dim = (config[f"{n}"] for n in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    passed = np.tile(np.eye(dim, 2 * size), (heads, 1))  # reads [embedding, hidden state]
    layer = {
        "hidden_norm": np.ones(size),
        "input_layernorm": np.ones(size),
        "post_attention_layernorm": np.ones(size),
        "mlp.gate_proj": np.zeros((inner, size)),
        "mlp.up_proj": np.zeros((inner, size)),
        "mlp.down_proj": np.zeros((size, inner)),
        "self_attn.q_proj": 4 * passed,
        "self_attn.k_proj": passed[: kv_heads * dim],
        "self_attn.v_proj": passed[: kv_heads * dim],
        "self_attn.o_proj": np.eye(size, heads * dim),
    }
    drafts = {f"midlayer.{name}.weight": x for name, x in layer.items()}
    drafts["fc.weight"] = np.zeros((size, 3 * size))
    drafts |= {"norm.weight": weights["model.norm"], "lm_head.weight": weights["lm_head"]}
    stored = {name: x.astype(np.float32) for name, x in drafts.items()}
    stored["d2t"] = np.zeros(config["vocab_size"], np.int64)
    save_file(stored, draft / "model.safetensors", metadata={"format": "pt"})
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {"draft_vocab_size": config["vocab_size"], "num_hidden_layers": 1}
    (draft / "config.json").write_text(json.dumps(config))
    config = json.loads((target / "config.json").read_text())
    tokens = [numpy_model.greedy(config, weights, prompt, COUNT) for prompt in prompts()]
    return Judged(config, str(target), weights, tokens)


def drafted_in_blocks(target, draft) -> Judged:
    """Save a Qwen3 whose next token depends mostly on its last one, and a DFLASH draft model.

    Tokens to draft have embeddings of zeros, and see the embedding of the block's known token.
    """
    mask = numpy_model.QWEN3["vocab_size"] - 1
    config = numpy_model.QWEN3
    weights = numpy_model.make(target, config)
    weights["model.embed_tokens"][mask] = 0
    follow_last_token(target, weights)
    size, inner, dim = (config[f"{n}"] for n in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = {
        "input_layernorm": np.ones(size),
        "post_attention_layernorm": np.ones(size),
        "mlp.gate_proj": np.zeros((inner, size)),
        "mlp.up_proj": np.zeros((inner, size)),
        "mlp.down_proj": np.zeros((size, inner)),
        "self_attn.q_norm": np.ones(dim),
        "self_attn.k_norm": np.ones(dim),
        "self_attn.q_proj": np.zeros((heads * dim, size)),
        "self_attn.k_proj": np.zeros((kv_heads * dim, size)),
        "self_attn.v_proj": np.tile(np.eye(dim, size), (kv_heads, 1)),
        "self_attn.o_proj": np.eye(size, heads * dim),
    }
    drafts = {f"layers.0.{name}": x for name, x in layer.items()}
    drafts |= {"fc": np.zeros((size, 2 * size)), "hidden_norm": np.ones(size)}
    save(draft, {**drafts, "norm": weights["model.norm"]})
    blocks = {"mask_token_id": mask, "target_layer_ids": [-1, 0]}
    config = {**config, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 1}
    config |= {"block_size": 3, "dflash_config": blocks}
    (draft / "config.json").write_text(json.dumps(config))
    config = json.loads((target / "config.json").read_text())
    tokens = [numpy_model.greedy(config, weights, prompt, COUNT) for prompt in prompts()]
    return Judged(config, str(target), weights, tokens)


def follow_last_token(folder, weights: numpy_model.Weights) -> None:
    """Save weights whose layers add less, so that the last token's embedding matters most."""
    for name in weights:
        if name.endswith(("o_proj", "down_proj")):
            weights[name] /= 4
    save(folder, weights)


def save(folder, weights: numpy_model.Weights) -> None:
    """Save weights as a checkpoint."""
    stored = {f"{name}.weight": x.astype(np.float32) for name, x in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
