"""Makes the `reference.npz` next to it with transformers: a tiny DeepSeek V3 with random weights.

    python tests/data/deepseek/make_reference.py     # needs torch and transformers

The latent cache has its real sizes, 512 + 64 numbers a token; everything else is small. Weights are
numbers that bfloat16 holds, stored as its words; computation is float32. Attention logits have a
standard deviation of about 2, so that attention matters, and the seed is the first one whose greedy
tokens are nowhere near a tie.
"""

import json
import pathlib

import numpy as np
import torch
import transformers

PROMPT_LENS = (1, 5, 16, 17, 40)
NEW_TOKENS = 8
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def make(seed):
    """`(arrays, smallest margin between the two best tokens of a step)`."""
    torch.manual_seed(seed)
    config = transformers.DeepseekV3Config(
        **CONFIG, num_mtp_layers=0, attn_implementation="eager", eos_token_id=None
    )
    model = transformers.DeepseekV3ForCausalLM(config).float().eval()
    gains = {"q_b_proj": 2.0, "embed_tokens": CONFIG["hidden_size"] ** 0.5, "lm_head": 2.0}
    weights = {}
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.ndim == 1:
                x.copy_(1 + 0.2 * torch.randn_like(x))
            else:
                gain = next((gain for part, gain in gains.items() if part in name), 1.0)
                x.copy_(torch.randn_like(x) * gain / x.shape[1] ** 0.5)
            x.copy_(x.bfloat16().float())
            weights[name] = x.bfloat16().view(torch.int16).numpy().view(np.uint16)
    rng = np.random.default_rng(seed)
    prompts = np.full((len(PROMPT_LENS), max(PROMPT_LENS)), -1, np.int32)
    tokens, logits = [], []
    for row, length in enumerate(PROMPT_LENS):
        prompts[row, :length] = rng.integers(0, CONFIG["vocab_size"], length)
        ids, steps = list(prompts[row, :length]), []
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                steps.append(model(torch.tensor([ids])).logits[0, -1].numpy())
            ids.append(int(steps[-1].argmax()))
        tokens.append(ids[length:])
        logits.append(steps)
    best = np.sort(np.array(logits), axis=-1)
    arrays = {
        "config": json.dumps(CONFIG),
        "prompt_lens": np.array(PROMPT_LENS, np.int32),
        "prompts": prompts,
        "tokens": np.array(tokens, np.int32),
        "logits": np.array(logits, np.float32),
        **{f"weights/{name}": words for name, words in weights.items()},
    }
    return arrays, (best[..., -1] - best[..., -2]).min()


if __name__ == "__main__":
    for seed in range(100):
        arrays, margin = make(seed)
        if margin > 0.01:
            break
    path = pathlib.Path(__file__).with_name("reference.npz")
    np.savez_compressed(path, **arrays)
    print(f"seed {seed}: margin {margin:.4f}, {path.stat().st_size} bytes")
