"""Write a checkpoint's `reference.npz` with transformers, for `generate.py --verify`.

    python examples/make_reference.py DIR          # for an existing checkpoint
    python examples/make_reference.py DIR --tiny qwen3    # first make a small random one in DIR

This needs torch and transformers (`pip install '.[conformance]'`). The file holds
- `prompts` int32 [8, 100], padded with -1, and `prompt_lens`: random tokens;
- `tokens` int32 [8, 32]: the greedy continuation of each;
- `logits` float32 [8, 32, vocabulary]: the logits from which each token was chosen, computed in
  float32 by transformers' eager attention, a token at a time with a cache;
- `margin` [8, 32]: the largest logit minus the second, which should be well above 1e-3, or else
  rounding decides the choice;
- `self_check_max_abs`: how far those logits are from one pass over the whole text without a cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

PROMPT_LENS = (1, 3, 16, 23, 24, 25, 47, 100)
NUM_NEW = 32
LEAST_MARGIN = 1.5e-3


def tiny_qwen3(seed: int) -> transformers.PreTrainedModel:
    """Make a random Qwen3 with real head sizes and a vocabulary of bytes.

    Weights have unit gain, and those of the query and key norms give attention logits a standard
    deviation of 3: sharper than plain initialisation, softer than one-hot. All are exact in
    bfloat16, in which they are stored.
    """
    config = transformers.Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=4096,
        attn_implementation="eager",
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                value = 3**0.5 * (1 + 0.1 * noise)
            elif name.endswith("norm.weight"):
                value = 1 + 0.1 * noise
            elif "embed_tokens" in name:
                value = noise
            else:
                value = noise / weight.shape[1] ** 0.5
            weight.copy_(value.bfloat16().float())
    return model


def tiny_deepseek(seed: int) -> transformers.PreTrainedModel:
    """Make a random DeepSeek-V3 with a latent cache of the real size, and a vocabulary of bytes.

    The experts' balancing correction is so large that it decides by itself which are chosen, with
    different ones in each layer: a choice that depended on the hidden state would not be
    continuous.
    """
    config = transformers.DeepseekV3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_nope_head_dim=16,
        qk_rope_head_dim=64,
        v_head_dim=16,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
        num_mtp_layers=0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    gains = {"q_b_proj": 1.5, "o_proj": 4.0, "gate.weight": 1.0}
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("e_score_correction_bias"):
                value = 4.0 * torch.randperm(len(weight), generator=generator)
            elif weight.ndim == 1 and not name.endswith("norm.weight"):
                continue  # rotary frequencies
            elif weight.ndim == 1:
                value = 1 + 0.1 * noise
            elif "embed_tokens" in name:
                value = noise
            else:
                gain = next((gain for part, gain in gains.items() if part in name), 1.0)
                value = noise * gain / weight.shape[-1] ** 0.5
            weight.copy_(value.bfloat16().float())
    return model


TINY = {"qwen3": tiny_qwen3, "deepseek": tiny_deepseek}


@torch.no_grad()
def full_logits(model, tokens: list[int], **options) -> np.ndarray:
    """Compute logits after every token, in one pass."""
    return model(torch.tensor([tokens]), use_cache=False, **options).logits[0].float().numpy()


@torch.no_grad()
def continue_greedily(model, prompt: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return `NUM_NEW` tokens and the logits from which they were chosen, with a cache."""
    tokens, logits, past, feed, done = [], [], None, list(prompt), 0
    for _ in range(NUM_NEW):
        # transformers may ignore what is cached if position_ids is left out.
        positions = torch.arange(done, done + len(feed))[None]
        out = model(
            torch.tensor([feed]), past_key_values=past, use_cache=True, position_ids=positions
        )
        done, past = done + len(feed), out.past_key_values
        logits.append(out.logits[0, -1].float().numpy())
        tokens.append(int(logits[-1].argmax()))
        feed = tokens[-1:]
    return np.array(tokens, np.int32), np.stack(logits)


def reference(model, vocab_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Compute the arrays of the file."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocab_size, n).tolist() for n in PROMPT_LENS]
    padded = np.full((len(prompts), max(PROMPT_LENS)), -1, np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    runs = [continue_greedily(model, prompt) for prompt in prompts]
    logits = np.stack([run[1] for run in runs])
    errors = [
        np.abs(full_logits(model, prompt + tokens[:-1].tolist())[len(prompt) - 1 :] - rows).max()
        for prompt, (tokens, rows) in zip(prompts, runs, strict=True)
    ]
    best = np.sort(logits, axis=-1)
    return {
        "prompts": padded,
        "prompt_lens": np.array(PROMPT_LENS, np.int32),
        "tokens": np.stack([run[0] for run in runs]),
        "logits": logits,
        "margin": best[..., -1] - best[..., -2],
        "self_check_max_abs": np.float32(max(errors)),
    }


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tiny", choices=TINY, help="make a small random one first")
    options = parser.parse_args()
    if options.tiny:
        for seed in range(100):  # until rounding decides no choice
            model = TINY[options.tiny](seed)
            made = reference(model, model.config.vocab_size)
            print(f"seed {seed}: least margin {made['margin'].min():.1e}")
            if made["margin"].min() >= LEAST_MARGIN:
                break
        model.to(torch.bfloat16).save_pretrained(options.directory)
        config = json.loads((options.directory / "config.json").read_text())
        config["dtype"] = None  # so that it is computed in float32
        (options.directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (options.directory / "generation_config.json").unlink(missing_ok=True)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        made = reference(model, model.config.get_text_config().vocab_size)
    np.savez_compressed(options.directory / "reference.npz", **made)
    print(f"least margin {made['margin'].min():.1e}, self check {made['self_check_max_abs']:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
