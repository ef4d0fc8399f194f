"""Images, sounds and videos as tpu-inference's runner hands them to a model.

Encoders make embeddings of them; the runner puts these where vLLM has made room in a prompt.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from jattn.integrations.tpu_inference.settings import VllmConfig

# The host's JAX models that see images, and the modules that define them.
JAX_MODELS = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Gemma4ForConditionalGeneration": "gemma4_mm",
}
WITH_POSITIONS = "Qwen2_5_VLForConditionalGeneration"  # of three axes, which it finds itself


def enable(runner: type[Any]) -> None:
    """Have each image seen by the request that has it, and by no other.

    Args:
      runner: the host's `TPUModelRunner`. Each hook takes the place of one of its methods:

    - `load_model`: a model is given images if `--limit-mm-per-prompt` leaves room for one. The host
      reads the kinds of input that the flag names, and gives it none where these are all 0.
      The host's JAX models of images have their methods mended before.
    - vLLM's `strip_covered_mm_data`, where its scheduler is in the same process (with Ray it is
      not): images whose tokens are in the prefix cache are sent with a request, too. It may be
      preempted, and then the cache may have lost them as it returns; the host encodes nothing.
    - `_get_input_ids_embeds`: a model with embeddings per layer (Gemma 4 E2B and E4B) is given
      tokens next to the embeddings of a step with images. The host leaves them out; the model
      takes 0 for every token of the step.
    """
    from vllm.v1.core.sched import output

    load, embed = runner.load_model, runner._get_input_ids_embeds

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.model_config
        for name in model.architectures or ():
            if name in JAX_MODELS:
                path = f"tpu_inference.models.jax.{JAX_MODELS[name]}"
                mend(getattr(importlib.import_module(path), name))
        found = load(self, *args, **kwargs)
        if model.supports_multimodal_inputs and self.embed_multimodal_fn is not None:
            self.is_multimodal_model = True
        return found

    @functools.wraps(embed)
    def get_input_ids_embeds(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        ids, embeds = embed(self, input_ids, *args, **kwargs)
        if getattr(self.model_config.hf_text_config, "hidden_size_per_layer_input", None):
            ids = input_ids
        return ids, embeds

    output.strip_covered_mm_data = _as_they_are
    runner.load_model = load_model
    runner._get_input_ids_embeds = get_input_ids_embeds


def _as_they_are(mm_features: list[Any], *coverage: Any, **options: Any) -> list[Any]:
    return mm_features


def are_seen_by_jax_model(config: VllmConfig) -> bool:
    """Whether an engine gives images to one of the host's JAX models.

    Asked in a server's process, where nothing may be imported that touches a device.
    """
    from tpu_inference import envs

    asked = envs.MODEL_IMPL_TYPE
    # Weights that are streamed may have the host choose the other one.
    is_jax = asked == "flax_nnx" or (
        asked == "auto" and config.load_config.load_format != "runai_streamer"
    )
    return is_jax and any(name in JAX_MODELS for name in config.model_config.architectures or ())


def mend(model: type[Any]) -> None:
    """Mend one of the host's JAX models of images.

    - `embed_input_ids`: embeddings of images go to the tokens that the runner names. The host
      searches for the token of an image, which a text may have, too: each one moves the images
      behind it.
    - `get_mrope_input_positions` of Qwen2.5-VL: by vLLM's own method, from where the images are.
      The host counts tokens that begin an image, which a text may have, and raises where there are
      more of them than images, or one of them ends the prompt.
    """
    embed = model.embed_input_ids
    if hasattr(embed, "__wrapped__"):
        return  # done before

    @functools.wraps(embed)
    def embed_input_ids(
        self: Any,
        input_ids: jax.Array,
        multimodal_embeddings: jax.Array | None = None,
        *,
        is_multimodal: jax.Array | None = None,
    ) -> Any:
        if multimodal_embeddings is None or is_multimodal is None:
            return embed(self, input_ids, multimodal_embeddings)
        text = embed(self, input_ids, None)
        return None if text is None else place(text, multimodal_embeddings, is_multimodal)

    model.embed_input_ids = embed_input_ids
    if model.__name__ == WITH_POSITIONS:
        model.get_mrope_input_positions = _positions


def place(text: jax.Array, images: jax.Array, is_image: jax.Array) -> jax.Array:
    """`text` with the rows of `images`, in their order, where `is_image`.

    Args:
      text: [T, W].
      images: [U, W], of which the first rows are meant, one for each token of an image.
      is_image: bool [T].
    """
    rows = jnp.maximum(jnp.cumsum(is_image) - 1, 0)
    return jnp.where(is_image[:, None], images[rows].astype(text.dtype), text)


def _positions(self: Any, input_tokens: list[int], mm_features: list[Any]) -> tuple[Any, int]:
    """The positions [3, T] of a prompt's tokens, and what they are ahead of their number."""
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Theirs

    model = SimpleNamespace(config=self.config)
    model.iter_mm_grid_thw = functools.partial(Theirs.iter_mm_grid_thw, model)
    positions, delta = Theirs.get_mrope_input_positions(model, input_tokens, mm_features)
    return positions.numpy(), delta
