"""Fixes for how tpu-inference's runner passes images, audio and video to a model.

Encoders turn them into embeddings, which replace the placeholder tokens that vLLM puts in a prompt.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from jattn.integrations.tpu_inference.settings import VllmConfig

# The host's JAX models that take images, and the modules that define them.
JAX_MODELS = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Gemma4ForConditionalGeneration": "gemma4_mm",
}
WITH_POSITIONS = "Qwen2_5_VLForConditionalGeneration"  # has positions of three axes


def enable(runner: type[Any]) -> None:
    """Make each request see its own images, and no others.

    Args:
      runner: the host's `TPUModelRunner`.

    The hooks replace two methods of the runner and a function of vLLM:

    - `load_model`: the host gives a model no images if every modality that `--limit-mm-per-prompt`
      names has a limit of 0. The hook gives it images if the flag leaves room for any modality. It
      also fixes the host's JAX models before they are loaded (`mend`).
    - `_get_input_ids_embeds`: for a step with images, the host passes the model embeddings and no
      tokens. A model with embeddings per layer (Gemma 4 E2B and E4B) then takes 0 for every token.
      The hook passes such a model the tokens as well.
    - `vllm.v1.core.sched.output.strip_covered_mm_data`: vLLM does not send images whose tokens are
      in the prefix cache. If the request is preempted, the cache may have lost those tokens when
      it returns, and the host then encodes nothing. The hook sends all images, provided that vLLM's
      scheduler runs in this process (with Ray it does not).
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

    This runs in the server's process, which must not import anything that touches a device.
    """
    from tpu_inference import envs

    asked = envs.MODEL_IMPL_TYPE
    # With streamed weights the host may choose the torch model.
    is_jax = asked == "flax_nnx" or (
        asked == "auto" and config.load_config.load_format != "runai_streamer"
    )
    return is_jax and any(name in JAX_MODELS for name in config.model_config.architectures or ())


def mend(model: type[Any]) -> None:
    """Fix one of the host's JAX models for images.

    - `embed_input_ids`: the host puts image embeddings wherever it finds the image token. A text
      may contain that token, which then shifts all images after it. The hook puts the embeddings at
      the positions that the runner names.
    - `get_mrope_input_positions` of Qwen2.5-VL: the host counts the tokens that start an image, and
      raises if a text contains more of them than there are images, or if one ends the prompt. The
      hook calls vLLM's method, which goes by the positions of the images.
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
    """Return `text` with the rows of `images`, in order, where `is_image`.

    Args:
      text: [T, W].
      images: [U, W]; the first rows, one for each image token, are used.
      is_image: bool [T].
    """
    rows = jnp.maximum(jnp.cumsum(is_image) - 1, 0)
    return jnp.where(is_image[:, None], images[rows].astype(text.dtype), text)


def _positions(self: Any, input_tokens: list[int], mm_features: list[Any]) -> tuple[Any, int]:
    """Return the positions [3, T] of a prompt's tokens, and how far they are ahead of T."""
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Theirs

    model = SimpleNamespace(config=self.config)
    model.iter_mm_grid_thw = functools.partial(Theirs.iter_mm_grid_thw, model)
    positions, delta = Theirs.get_mrope_input_positions(model, input_tokens, mm_features)
    return positions.numpy(), delta
