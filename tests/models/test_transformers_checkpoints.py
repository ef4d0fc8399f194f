"""The example models on checkpoints that transformers saves.

Needs torch and transformers, as tests/transformers/test_generation.py does.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import transformers_models as support
from tests.support.families import COMMON, EXPERTS, Family
from tests.support.transformers_models import make_model, read

pytestmark = support.MARKS
libraries = support.libraries  # the fixture

SAVED = (
    Family("qwen3", "tied embeddings, windows on later layers", {
        "tie_word_embeddings": True, "head_dim": 32, "use_sliding_window": True,
        "sliding_window": 9, "max_window_layers": 1,
    }),
    Family("gpt_oss", "yarn, two of four experts", {
        "head_dim": 32, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64,
        },
    }),
    Family("qwen3_next", "two of four experts, a layer without", {
        "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "mlp_only_layers": [1], "layer_types": ["linear_attention", "full_attention"],
    }),
    Family("nemotron_h", "experts in groups, of a latent size", {
        **EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "head_dim": 32,
        "num_key_value_heads": 1, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2,
        "ssm_state_size": 8, "chunk_size": 8, "moe_latent_size": 24, "time_step_min": 1e-6,
        "moe_shared_expert_intermediate_size": 32, "routed_scaling_factor": 2.5,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    }, without=("num_hidden_layers",)),
    Family("deepseek_v3", "yarn with two scales, norms of latents with an epsilon of their own", {
        **EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-2,
        "routed_scaling_factor": 2.5, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 2.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
    }),
)  # fmt: skip


@pytest.mark.parametrize("family", SAVED, ids=lambda f: f"{f.model_type}-{f.features}")
def test_example_models_read_what_transformers_saves(family, libraries, tmp_path):
    torch, transformers, _ = libraries
    from examples.engine.caches import group_layers
    from examples.engine.engine import Engine
    from examples.engine.model import load_model
    from examples.engine.request import Request
    from examples.engine.scheduler import Limits
    from examples.engine.step import Bucket

    model = make_model(torch, transformers, family)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    text = torch.randint(3, 96, (1, 40), generator=torch.Generator().manual_seed(4))
    wanted = read(torch, model, text, (40,))[0]

    loaded = load_model(tmp_path, "float32")
    limits = Limits(group_layers(loaded.layers), 2, 16, 16, 64, prefix_caching=False)
    engine = Engine(loaded, limits, buckets=(Bucket(16, 2, 16),), keep_logits=True)
    tokens = tuple(text[0].tolist())
    sequence = engine.add(Request(tokens[:30], 10, follow=(*tokens[30:], 0)))
    for _ in engine.stream():
        pass
    np.testing.assert_allclose(np.stack(sequence.logits), wanted[29:39], atol=2e-4)


def test_rotary_frequencies_match_transformers(libraries):
    _, transformers, _ = libraries
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from examples.models.rope import rope_frequencies

    for parameters in (
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        SAVED[1].options["rope_parameters"],
        {**SAVED[1].options["rope_parameters"], "truncate": True, "attention_factor": 1.5},
        {**SAVED[1].options["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0},
        {**SAVED[1].options["rope_parameters"], "mscale": 2.0, "mscale_all_dim": 1.0},
    ):
        config = transformers.GptOssConfig(
            **{**COMMON, "head_dim": 64, "rope_parameters": dict(parameters)}
        )
        wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
        ours, our_factor = rope_frequencies(parameters, 64)
        np.testing.assert_allclose(ours, wanted.numpy(), rtol=3e-7)
        assert our_factor == pytest.approx(factor)


def test_mxfp4_is_unpacked_as_transformers_does(libraries):
    torch, _, _ = libraries
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from examples.models.gpt_oss import unpack_mxfp4

    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = rng.integers(120, 134, (2, 6, 3), dtype=np.uint8)
    wanted = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    found = unpack_mxfp4([blocks, scales])
    np.testing.assert_array_equal(found.swapaxes(1, 2), wanted.float().numpy())
