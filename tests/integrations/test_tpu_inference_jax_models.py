"""JAX models of tpu-inference that jattn refuses when an engine starts."""

from __future__ import annotations

import pytest

from jattn.integrations import tpu_inference
from tests.support import stand_in_host

host = stand_in_host.host  # the fixture

LLAMA = {"architectures": ["LlamaForCausalLM"]}
IMAGES = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "is_multimodal_model": True,
}
TORCH = "MODEL_IMPL_TYPE: auto, but must be vllm: the host's JAX model"
REFUSED = {  # changes to a model's settings, and the error
    "RoPE scaling": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        f"{TORCH} of Qwen3ForCausalLM does not support rope_type yarn",
    ),
    "RoPE scaling by its older name": (
        {**LLAMA, "rope_parameters": {"type": "linear", "factor": 4.0}},
        f"{TORCH} of LlamaForCausalLM does not support rope_type linear",
    ),
    "a rotated part of heads": (
        {**LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        f"{TORCH} of LlamaForCausalLM does not support partial_rotary_factor 0.5",
    ),
    "a factor that others ignore": (
        {"rope_parameters": {"rope_type": "default", "factor": 4.0}},
        f"{TORCH} of Qwen3ForCausalLM does not support rope_type default with a factor as vLLM",
    ),
    "layers of two kinds": (
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        f"{TORCH} of Qwen3ForCausalLM does not support rope_parameters of several kinds of layers",
    ),
    "image positions, scaled": (
        {**IMAGES, "rope_parameters": {"rope_type": "yarn", "mrope_section": [8, 12, 12]}},
        f"{TORCH} of Qwen2_5_VLForConditionalGeneration does not support rope_type yarn",
    ),
    "a window": (
        {"sliding_window": 512},
        f"{TORCH} of Qwen3ForCausalLM has no sliding window, but this model's is 512",
    ),
    "no causal mask": (
        {"is_causal": False},
        f"{TORCH} of Qwen3ForCausalLM is causal, but is_causal is false",
    ),
    "classification": (
        {"convert_type": "classify"},
        f"{TORCH}s have no pooler for --convert classify",
    ),
    "weights of another revision": (
        {**LLAMA, "revision": "refs/pr/1"},
        "--revision: refs/pr/1, but must be left out, with --model a folder that has that revision",
    ),
}
SERVED = {
    "Llama 3's scaling": {**LLAMA, "rope_parameters": {"rope_type": "llama3", "factor": 32.0}},
    "no scaling": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "image positions": {
        **IMAGES, "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]},
    },
    "embeddings": {"convert_type": "embed"},
    "a revision that the host downloads": {"revision": "refs/pr/1"},
    "the revision that it downloads anyway": {**LLAMA, "revision": "main"},
    "no rope_parameters": {"rope_parameters": None},
    "a window of a model that has windows": {
        "architectures": ["Gemma4ForConditionalGeneration"], "sliding_window": 512,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_jax_model_computes_differently_is_refused(host, name):
    changes, message = REFUSED[name]
    tpu_inference.register()
    with pytest.raises(ValueError, match=r"1 wrong argument\(s\)") as error:
        host.start(**changes)
    assert message in str(error.value)
    host.impl = "vllm"
    host.start(**changes)


@pytest.mark.parametrize("name", SERVED)
def test_settings_close_to_refused_ones_are_served(host, name):
    tpu_inference.register()
    host.start(**SERVED[name])


def test_a_folder_has_one_revision(host, tmp_path):
    tpu_inference.register()
    host.start(**LLAMA, revision="refs/pr/1", model=str(tmp_path))
