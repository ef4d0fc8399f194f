"""Small random models of transformers' model types, and inputs for them, for the census."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

TOKENS, BATCH = 24, 2
WRITTEN = 9  # decoder tokens of an encoder-decoder
VOCABULARY = 96
MOST_PARAMETERS = 40e6

# Patterns of the names of sizes, and a small value. The first pattern that matches wins.
SIZES: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size|.*codebook.*|.*num_labels.*", 0),  # unchanged
    (r"(.*_)?vocab_size|n_vocab|vocab_size_per_layer_input|n_words", VOCABULARY),
    (r"(num_|n_)(experts|local_experts|routed_experts)|moe_num_experts|num_local_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|experts_top_k", 2),
    (r"n_group|topk_group|n_shared_experts|num_shared_experts|first_k_dense_replace", 1),
    (r"(.*_)?(num_)?(hidden_|encoder_|decoder_|n_)?layers|n_layer|depth|num_hidden_groups", 2),
    (r"n_encoder_layers|n_decoder_layers|num_(encoder|decoder)_layers", 2),
    (r"num_key_value_heads|n_kv_heads|num_kv_heads|num_global_key_value_heads", 2),
    (r"(.*_)?(num_)?(attention_)?heads|n_heads?|num_attention_heads", 4),
    (r"qk_nope_head_dim|v_head_dim|d_kv|kv_channels|head_dim|attention_head_dim", 16),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_head_dim", 24),
    (r"global_head_dim", 32),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank|index_head_dim", 16),
    (r"(.*_)?(intermediate_size|ffn_dim|mlp_dim|ffn_hidden_size)|d_ff|n_inner|d_inner|dff", 96),
    (r"(.*_)?intermediate_size_mlp|expert_ffn_hidden_size", 96),
    (r"(.*_)?(hidden_size|d_model|hidden_dim|embed_dim|embedding_size|emb_dim|model_dim)", 64),
    (r"n_embd|dim|width|projection_dim|word_embed_proj_dim|hidden_sizes?|decoder_dim", 64),
    (r"image_size|img_size", 32),
    (r"patch_size", 8),
    (r"sliding_window|attention_chunk_size|local_attention|window_size|local_window_size", 8),
    (r"hidden_size_per_layer_input|embedding_dim", 16),
)
# Settings derived from others, which would keep the values of the large configuration.
DERIVED = ("per_layer_config", "out_features", "out_indices", "stage_names")


def small(name: str, value: Any, ids: Iterator[int], sizes: dict[str, Any]) -> Any:
    """Return a smaller value for a setting of a configuration."""
    if isinstance(value, dict) and "model_type" in value:
        return shrunk(value, ids)
    if isinstance(value, dict):
        sections = {"mrope_section": [2, 3, 3]}  # they add up to half of a head
        return {key: sections.get(key, x) for key, x in value.items()}
    if name == "head_dim" and "qk_rope_head_dim" in sizes:
        return 8 if value else value
    if name == "vocab_size" and value is None:
        return VOCABULARY
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name.endswith(("_token_id", "_token_index", "_start_id", "_end_id", "_token_ids")):
        return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(
            name, next(ids) if value >= VOCABULARY else value
        )
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            if not size:
                return value
            if size == 2 and "heads" in name:  # KV heads: still as many as query heads, or fewer
                heads = sizes.get("num_attention_heads", sizes.get("n_heads"))
                return value if value < 2 else 4 if value == heads else 2
            return min(value, size) if value > 0 else value
    return value


def shrunk(settings: dict[str, Any], ids: Iterator[int]) -> dict[str, Any]:
    """Return smaller settings of a configuration and of those nested in it."""
    settings = {name: x for name, x in settings.items() if name not in DERIVED}
    if isinstance(settings.get("depths"), list):  # widths that grow with the stages
        return settings
    found = {name: small(name, x, ids, settings) for name, x in settings.items()}
    layers = next(
        (n for n in ("num_hidden_layers", "n_layer", "num_layers") if n in settings), None
    )
    if layers is None or not isinstance(settings[layers], int):
        return found
    kinds = settings.get("layer_types") or settings.get("layers_block_type")
    keep = list(range(min(2, settings[layers])))
    if isinstance(kinds, list) and len(kinds) == settings[layers]:
        keep = sorted({kinds.index(kind) for kind in kinds} | {0, len(kinds) - 1})[:4]
    for name, x in settings.items():
        if isinstance(x, list) and len(x) == settings[layers] > 2:
            found[name] = [x[i] for i in keep]
    found[layers] = len(keep)
    return found


def configuration(transformers: Any, model_type: str) -> Any:
    """Return a small configuration of a model type: from `families`, or its default, shrunk."""
    from tests.support.families import FAMILIES

    for family in FAMILIES:
        if family.model_type == model_type:
            return transformers.AutoConfig.for_model(model_type, **family.settings)
    default = transformers.AutoConfig.for_model(model_type)
    settings = shrunk(default.to_dict(), iter(range(VOCABULARY - 1, 80, -1)))
    for name in ("model_type", "transformers_version", "architectures", "dtype"):
        settings.pop(name, None)
    return type(default)(**settings)


def model_class(transformers: Any, config: Any) -> Any:
    """Return the class of the causal or sequence-to-sequence language model, or the bare model.

    For an encoder-decoder it is the whole model, even if its decoder is a language model too.
    """
    auto = transformers.models.auto.modeling_auto
    mappings = [auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING]
    if getattr(config, "is_encoder_decoder", False):
        mappings = [mappings[1], auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, mappings[0]]
    for mapping in (*mappings, auto.MODEL_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise LookupError("transformers' auto classes have no model for it")


def build(torch: Any, transformers: Any, model_type: str) -> Any:
    """Make a random model with weights of unit gain: attention is neither flat nor one-hot."""
    config = configuration(transformers, model_type)
    cls = model_class(transformers, config)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls._from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise MemoryError(f"its smallest configuration here has {count / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and not re.search("conv|A_log|embed_positions|position_emb", name):
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise / weight[0].numel() ** 0.5)
    return model


def candidates(torch: Any, model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield inputs that the model may accept, the likeliest first."""
    config = model.config
    generator = torch.Generator().manual_seed(2)

    def find(*names: str, default: Any = None) -> Any:
        for part in (config, *(getattr(config, sub, None) for sub in config.sub_configs)):
            for name in names:
                found = getattr(part, name, None)
                if found is not None:
                    return found
        return default

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    ids = torch.randint(3, 80, (BATCH, TOKENS), generator=generator)
    size = find("image_size", "img_size", default=32)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = find("num_channels", default=3)
    pixels = normal(BATCH, channels, height, width)
    video = normal(BATCH, find("num_frames", "frames_per_clip", default=2), channels, height, width)
    mel = find("num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
    frames = 2 * find("max_source_positions", default=64)
    text = {"input_ids": ids}
    written = {"decoder_input_ids": ids[:, :WRITTEN]}
    both = {**text, **written}
    options: list[tuple[str, dict[str, Any]]] = [
        ("text", text),
        ("text, text", both),
        ("picture", {"pixel_values": pixels}),
        ("text, picture", {**text, "pixel_values": pixels}),
        ("picture, text", {"pixel_values": pixels, **written}),
        ("video", {"pixel_values": video}),
        ("video", {"pixel_values_videos": video}),
        ("sound", {"input_values": normal(BATCH, 4000)}),
        ("sound, text", {"input_values": normal(BATCH, 4000), **written}),
        *(
            (words, {"input_features": normal(BATCH, *shape), **more})
            for shape in ((mel, frames), (64, mel))
            for words, more in (
                ("sound", {}),
                ("sound, text", written),
                ("text, sound", text),
            )
        ),
        ("text, sound", {**text, "input_values": normal(BATCH, 4000)}),
    ]
    size = find("patch_size", default=8)
    size = size[0] if isinstance(size, (list, tuple)) else size
    patch = 3 * find("temporal_patch_size", default=1) * size**2
    grid = torch.tensor([[1, 8, 8], [1, 4, 4]])
    rows = normal(80, patch)
    options += [
        ("pictures", {"hidden_states": rows, "grid_thw": grid}),
        ("pictures", {"pixel_values": rows, "grid_thw": grid}),
        ("pictures", {"pixel_values": rows, "image_grid_thw": grid}),
    ]
    if getattr(config, "is_encoder_decoder", False):  # without decoder inputs it may decode inputs
        options.sort(key=lambda option: "decoder_input_ids" not in option[1])
    taken = inspect.signature(model.forward).parameters
    for words, inputs in options:
        if set(inputs) <= set(taken):
            yield words, inputs
