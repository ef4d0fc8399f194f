"""Small random models of many families, as transformers describes them.

Each family is here because of a feature of its attention. Its settings on top of `COMMON` make that
feature matter: windows shorter than the text, groups that are no power of two, odd head sizes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LATENT = {  # multi-head latent attention, written out: queries and keys are larger than values
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
}
EXPERTS = {  # every token goes to every expert: otherwise rounding would choose between them
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SLIDING_FIRST = ["sliding_attention", "full_attention"]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model type and a configuration of it."""

    model_type: str
    features: str  # what its attention does, for readers
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    without: tuple[str, ...] = ()  # keys of COMMON that it does not have

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of its configuration."""
        common = {key: value for key, value in COMMON.items() if key not in self.without}
        return {**common, **self.options}


FAMILIES = (
    Family("llama", "GQA, group 2"),
    Family("llama", "MQA, group 4", {"num_key_value_heads": 1}),
    Family("mistral", "window on every layer", {"sliding_window": 11}),
    Family("mixtral", "group 3, experts", {
        "num_attention_heads": 6, "head_dim": 16, "num_local_experts": 2,
    }),
    Family("qwen2", "group 7, biases", {
        "num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112,
    }),
    Family("qwen3", "D=128, norms of q and k", {"head_dim": 128}),
    Family("qwen3_moe", "D=64, group 4, experts", {
        "head_dim": 64, "num_key_value_heads": 1, "num_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }),
    Family("qwen3_next", "D=256, gate, a quarter rotates, delta net", {
        "head_dim": 256, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    }),
    Family("gemma", "D=256, MQA", {"head_dim": 256, "num_key_value_heads": 1}),
    Family("gemma2", "soft cap, scale, alternating window", {
        "head_dim": 32, "sliding_window": 9, "attn_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 24, "layer_types": SLIDING_FIRST,
    }),
    Family("gemma3_text", "norms of q and k, alternating window, two ropes", {
        "head_dim": 64, "sliding_window": 9, "layer_types": SLIDING_FIRST,
    }),
    Family("gemma3n_text", "shared KV, scale 1, norm of v", {
        "head_dim": 32, "sliding_window": 9, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": SLIDING_FIRST * 2, "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4, "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8, "laurel_rank": 8, "altup_num_inputs": 2,
    }),
    Family("gemma4_text", "D=32 and 512, shared KV, scale 1", {
        "head_dim": 32, "global_head_dim": 512, "sliding_window": 9, "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "layer_types": SLIDING_FIRST * 2,
        "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8,
    }),
    Family("gpt_oss", "sinks, alternating window", {
        "head_dim": 32, "sliding_window": 9, "num_local_experts": 2, "num_experts_per_tok": 2,
        "layer_types": SLIDING_FIRST,
    }),
    Family("granite", "scale of its own", {"attention_multiplier": 0.31}),
    Family("cohere", "norms of q and k, interleaved rope", {"use_qk_norm": True}),
    Family("cohere2", "window, no rope on global layers", {
        "sliding_window": 9, "layer_types": SLIDING_FIRST, "head_dim": 16,
    }),
    Family("olmo2", "MHA, norms before heads", {"num_key_value_heads": 4}),
    Family("olmo3", "window, norms before heads", {
        "sliding_window": 9, "layer_types": SLIDING_FIRST,
    }),
    Family("phi", "partial rope, D=20", {
        "hidden_size": 80, "num_key_value_heads": 4, "partial_rotary_factor": 0.4,
    }),
    Family("phi3", "D=24, window", {"hidden_size": 96, "sliding_window": 9}),
    Family("stablelm", "quarter rope, D=80", {
        "hidden_size": 320, "partial_rotary_factor": 0.25,
    }),
    Family("gpt_neox", "MHA, quarter rope", {"num_key_value_heads": 4}),
    Family("gpt2", "MHA, learned positions", {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256,
    }, without=("num_key_value_heads",)),
    Family("opt", "MHA, scaled queries", {
        "ffn_dim": 96, "word_embed_proj_dim": 64,
    }, without=("num_key_value_heads", "intermediate_size")),
    Family("starcoder2", "biases, window, group 6", {
        "num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96,
        "sliding_window": 9,
    }),
    Family("smollm3", "no rope on some layers", {"no_rope_layers": [1, 0]}),
    Family("exaone4", "window, no rope on global layers", {
        "sliding_window": 9, "layer_types": SLIDING_FIRST,
    }),
    Family("nemotron", "half rope", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    Family("nemotron_h", "no positions, Mamba-2, group 4", {
        "head_dim": 32, "num_key_value_heads": 1, "mamba_num_heads": 4, "mamba_head_dim": 8,
        "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8,
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
    }, without=("num_hidden_layers",)),
    Family("bamba", "Mamba-2, half rope", {
        "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8,
        "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 8,
    }),
    Family("jamba", "Mamba-1, no positions", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "num_experts": 1, "num_experts_per_tok": 1, "mamba_d_state": 8, "use_mamba_kernels": False,
    }),
    Family("zamba2", "D=32 of doubled inputs, Mamba-2", {
        "num_key_value_heads": 4, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1,
        "chunk_size": 8, "num_mem_blocks": 1, "layers_block_type": ["linear_attention", "hybrid"],
        "attention_head_dim": 32, "attention_hidden_size": 128,
        "use_shared_attention_adapter": False,
    }),
    Family("lfm2", "short convolutions", {
        "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
    }),
    Family("deepseek_v2", "MLA: D=48, V=24", {**LATENT, **EXPERTS, "topk_method": "greedy"}),
    Family("deepseek_v3", "MLA: D=48, V=24, scale", {**LATENT, **EXPERTS}),
    Family("minicpm3", "MLA: D=48, V=24", LATENT),
    Family("mimo_v2_flash", "D=48, V=32, sinks on windows", {
        **EXPERTS, "head_dim": 48, "v_head_dim": 32, "swa_head_dim": 48, "swa_v_head_dim": 32,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 1, "sliding_window": 9,
        "layer_types": SLIDING_FIRST,
    }),
    Family("glm4", "half rope, group 2", {"head_dim": 16}),
    Family("seed_oss", "D=32, biases", {"head_dim": 32}),
    Family("ernie4_5", "interleaved rope"),
    Family("helium", "interleaved rope, D=16", {"head_dim": 16}),
    Family("arcee", "squared activations"),
    Family("hunyuan_v1_dense", "norms of q and k after rope", {"head_dim": 16}),
)  # fmt: skip
