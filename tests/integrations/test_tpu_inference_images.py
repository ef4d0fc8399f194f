"""What jattn fixes for images in tpu-inference, with a stand-in for the host.

`tests/integrations/test_vllm.py` runs the real host.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.integrations import tpu_inference
from tests.support import stand_in_host

host = stand_in_host.host  # the fixture
SEEING = {"is_multimodal_model": True, "supports_multimodal_inputs": True}
MODULES = {"Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl"}
MODULES["Gemma4ForConditionalGeneration"] = "gemma4_mm"


def load(host, **settings):
    """Load a model while jattn is the backend, and return the host's runner."""
    tpu_inference.register()
    host.start()
    kind = sys.modules["tpu_inference.runner.tpu_runner"].TPUModelRunner
    model = stand_in_host.config(**settings).model_config
    runner = kind(model, embed_multimodal_fn="an encoder")
    runner.load_model()
    return runner


def model_of(name):
    return getattr(sys.modules[f"tpu_inference.models.jax.{MODULES[name]}"], name)()


def test_a_model_gets_images_if_its_limits_leave_room_for_one(host):
    """The host takes limits of 0 for some modalities as limits for all."""
    assert load(host, **SEEING).is_multimodal_model
    assert not load(host, is_multimodal_model=True).is_multimodal_model


@pytest.mark.parametrize(("size", "ids"), [(None, None), (0, None), (8, "ids")])
def test_per_layer_embeddings_get_the_token_ids_of_a_step_with_images(host, size, ids):
    runner = load(host, hidden_size_per_layer_input=size, **SEEING)
    assert runner._get_input_ids_embeds("ids", "embeds", "mask") == (ids, "embeds")
    assert runner._get_input_ids_embeds("ids", None, None) == ("ids", None)


@pytest.mark.parametrize("name", MODULES)
def test_images_are_placed_where_the_runner_says(host, name):
    """The text before and after the image also contains the image token."""
    ids = jnp.array([9, 1, 9, 9, 2, 9, 0])
    rows = jnp.array([[5, 6], [7, 8], [0, 0]], jnp.bfloat16)
    mask = jnp.array([0, 0, 1, 1, 0, 0, 0], bool)
    for _ in range(2):  # the second time changes nothing
        load(host, architectures=[name])
    embed = jax.jit(model_of(name).embed_input_ids)
    found = embed(ids, rows, is_multimodal=mask)
    assert found.dtype == jnp.float32
    want = [[9, -9], [1, -1], [5, 6], [7, 8], [2, -2], [9, -9], [0, 0]]
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(embed(ids, None)[:2], want[:2])


def test_other_models_are_loaded_unchanged(host):
    load(host)
    for name in MODULES:
        assert not hasattr(model_of(name).embed_input_ids, "__wrapped__")


def test_positions_are_found_from_where_the_images_are(host):
    for name in MODULES:
        load(host, architectures=[name])
    model = model_of("Qwen2_5_VLForConditionalGeneration")
    model.config = 1
    positions, delta = model.get_mrope_input_positions([4, 5], [2, 3])
    assert (positions.tolist(), delta) == ([1, 2, 3, 4, 5], 7)
    with pytest.raises(IndexError):
        model_of("Gemma4ForConditionalGeneration").get_mrope_input_positions([4], [])


def test_images_whose_tokens_are_in_the_cache_are_sent_with_a_request(host):
    load(host)
    output = sys.modules["vllm.v1.core.sched.output"]
    assert output.strip_covered_mm_data(["an image"], 99, uses_mrope=True) == ["an image"]
