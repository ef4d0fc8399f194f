"""Generate with an unmodified transformers model whose attention and paged KV cache are jattn's.

    pip install 'jattn[transformers]'
    python -m examples.transformers_model

The model is small and random. For a real one, use `AutoModelForCausalLM.from_pretrained(...)`.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import jattn.integrations.transformers as jattn_transformers


def main() -> None:
    jattn_transformers.register()
    config = AutoConfig.for_model(
        "qwen3", vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="jattn").eval()
    prompts = torch.randint(3, 96, (2, 9))
    cache = jattn_transformers.PagedCache(config, max_cache_len=64)
    # Before transformers 5.24 the argument is called past_key_values.
    print(model.generate(prompts, cache=cache, max_new_tokens=16, do_sample=False))


if __name__ == "__main__":
    main()
