"""Prompts with images, continued by small models in vLLM on JAX and in transformers.

These are parts of `vllm_host.main`, each run in a separate process.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

COUNT = 8  # tokens of a completion
PROMPT = "5 6 <|vision_start|><|image_pad|><|vision_end|> 7 8 9"
SPECIAL = (
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
# Prompts without an image that contain its tokens, such as its start token at the end.
LOOKALIKES = ([5, 93, 6, 90, 93, 7], [8, 94, 9, 93], [10, 90])
GEMMA_PROMPT = "5 6 <image> 7 8 9"
GEMMA_TEXTS = ([11, 12, 13, 14],)
GEMMA_SPECIAL = (
    *("<begin>", "<end>", "<image>", "<sound>", "<begin sound>", "<end sound>", "<|video|>"),
)
GEMMA_TEXT = {  # with embeddings per layer, as Gemma 4 E2B has them
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 512,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
GEMMA_VISION = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "position_embedding_size": 64,
    "default_output_length": 70,
}
TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": False,
}
VISION = {  # two layers, the first of which attends within windows of four by four patches
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
    "window_size": 56,
}


def _images() -> list[Any]:
    """Images of 8 by 6 patches: neither a whole tile of tokens nor whole windows."""
    from PIL import Image

    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (112, 84, 3)).astype(np.uint8)) for _ in range(2)]


def judge(folder: str) -> dict[str, Any]:
    """Save a random Qwen2.5-VL with its processor, and continue prompts in float64.

    Returns: `tokens` and `logprobs`, a list for each of `LOOKALIKES`, and then for `PROMPT` with
      each image.
    """
    import transformers

    tokenizer = _tokenizer(SPECIAL)
    tokenizer.image_token, tokenizer.video_token = SPECIAL[3:]
    pixels = {"min_pixels": 56**2, "max_pixels": 112**2}
    processor = transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(**pixels),
    )
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        tie_word_embeddings=False,
        vision_start_token_id=90,
        vision_end_token_id=91,
        image_token_id=93,
        video_token_id=94,
    )
    kind = transformers.Qwen2_5_VLForConditionalGeneration
    return _continue(kind, config, folder, processor, PROMPT, LOOKALIKES)


def judge_gemma(folder: str) -> dict[str, Any]:
    """Like `judge`, with a random Gemma 4 with per-layer embeddings, and `GEMMA_TEXTS`."""
    import transformers
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

    named = ("boi_token", "eoi_token", "image_token", "audio_token", "boa_token", "eoa_token")
    tokenizer = _tokenizer(
        GEMMA_SPECIAL, extra_special_tokens=dict(zip(named, GEMMA_SPECIAL, strict=False))
    )
    processor = transformers.Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(max_soft_tokens=70),
        tokenizer=tokenizer,
        video_processor=Gemma4VideoProcessor(),
    )
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.Gemma4Config(
        text_config=GEMMA_TEXT,
        vision_config=GEMMA_VISION,
        audio_config=None,
        boi_token_id=ids("<begin>"),
        eoi_token_id=ids("<end>"),
        image_token_id=ids("<image>"),
        audio_token_id=ids("<sound>"),
        boa_token_id=ids("<begin sound>"),
        eoa_token_index=ids("<end sound>"),
        video_token_id=ids("<|video|>"),
        tie_word_embeddings=True,
    )
    kind = transformers.Gemma4ForConditionalGeneration
    return _continue(kind, config, folder, processor, GEMMA_PROMPT, GEMMA_TEXTS)


def _tokenizer(special: tuple[str, ...], **more: Any) -> Any:
    """Return a tokenizer whose words are token ids, except for the special tokens at the end."""
    import tokenizers
    import transformers

    first = 95 - len(special)
    words = {str(token): token for token in range(first)}
    words |= {word: first + i for i, word in enumerate(special)}
    numbers = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    numbers.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    numbers.add_special_tokens(list(special))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=numbers, unk_token="0", eos_token="2", pad_token="0", **more
    )


def _continue(
    kind: Any,
    config: Any,
    folder: str,
    processor: Any,
    prompt: str,
    texts: tuple[list[int], ...],
) -> dict[str, Any]:
    """Save a random model and its processor; continue texts, then a prompt with each image."""
    import torch

    processor.save_pretrained(folder)
    model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise / weight[0].numel() ** 0.5)
    model.save_pretrained(folder)
    model = model.double()
    found: dict[str, Any] = {"tokens": [], "logprobs": []}
    asked = [{"input_ids": torch.tensor([tokens])} for tokens in texts]
    for image in _images():
        given = processor(text=[prompt], images=[image], return_tensors="pt")
        given["pixel_values"] = given["pixel_values"].double()
        asked.append(given)
    for given in asked:
        answer = model.generate(
            **given,
            max_new_tokens=COUNT,
            min_new_tokens=COUNT,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        found["tokens"].append(answer.sequences[0, -COUNT:].tolist())
        found["logprobs"].append([float(x.log_softmax(-1).max()) for x in answer.logits])
    return found


def generate(folder: str, engine: dict[str, Any], gemma: bool = False) -> dict[str, Any]:
    """Continue the prompts of `judge` with vLLM's own engine in this process, all at once.

    With `gemma`, continue those of `judge_gemma`.

    Returns: as `judge`, and `video`, the engine's error for a video instead of an image; or
      `error`, what it raised when it started.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    try:
        llm = LLM(model=folder, attention_backend="jattn", **engine)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    sampling = SamplingParams(
        temperature=0.0, max_tokens=COUNT, ignore_eos=True, detokenize=False, logprobs=1
    )
    prompt, texts = (GEMMA_PROMPT, GEMMA_TEXTS) if gemma else (PROMPT, LOOKALIKES)
    given: list[Any] = [{"prompt_token_ids": tokens} for tokens in texts]
    given += [{"prompt": prompt, "multi_modal_data": {"image": image}} for image in _images()]
    answers = [request.outputs[0] for request in llm.generate(given, sampling, use_tqdm=False)]
    frames = np.zeros((4, 56, 56, 3), np.uint8), {"fps": 2.0, "total_num_frames": 4, "duration": 2}
    moving = {
        "prompt": PROMPT.replace("image", "video"),
        "multi_modal_data": {"video": frames},
    }
    said = ""
    try:
        llm.generate([moving], sampling, use_tqdm=False)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return {
        "video": said,
        "tokens": [list(answer.token_ids) for answer in answers],
        "logprobs": [
            [
                one[token].logprob
                for token, one in zip(answer.token_ids, answer.logprobs, strict=True)
            ]
            for answer in answers
        ],
    }
