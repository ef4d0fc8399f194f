"""GPT-OSS checkpoints with experts in MXFP4, the format in which OpenAI publishes them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

BLOCK = 32  # numbers with a scale of their own, along the inputs
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; the fourth bit is the sign
BIAS = 127  # of a scale's exponent
QUANTIZED = ("gate_up_proj", "down_proj")


def round_experts(model: Any) -> dict[str, Any]:
    """Round a torch model's experts to MXFP4, in place.

    The largest number of each block becomes 6 times its scale. So quantizing the block again, with
    a scale made from that number, changes nothing.

    Returns: uint8 tensors under the checkpoint's names, `..._blocks` and `..._scales`.
    """
    import torch

    found = {}
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if not name.endswith(tuple(f"experts.{each}" for each in QUANTIZED)):
                continue
            blocks = weights.transpose(1, 2).unflatten(-1, (-1, BLOCK))  # [E, out, in / 32, 32]
            largest, where = blocks.abs().max(-1, keepdim=True)
            exponents = torch.ceil(torch.log2(largest / 6))
            scaled = blocks / 2**exponents
            codes = (scaled.abs()[..., None] - torch.tensor(MAGNITUDES)).abs().argmin(-1)
            codes.scatter_(-1, where, len(MAGNITUDES) - 1)
            rounded = torch.tensor(MAGNITUDES)[codes] * scaled.sign() * 2**exponents
            weights.copy_(rounded.flatten(-2).transpose(1, 2))
            pairs = (codes + 8 * (scaled < 0)).unflatten(-1, (-1, 2))
            found[f"{name}_blocks"] = (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
            found[f"{name}_scales"] = (exponents[..., 0] + BIAS).to(torch.uint8)
    return found


def replace(folder: str, packed: dict[str, Any]) -> None:
    """Put packed experts into the checkpoint that transformers saved in `folder`."""
    from safetensors.torch import load_file, save_file

    path = pathlib.Path(folder)
    names = [name.removesuffix("_blocks") for name in packed if name.endswith("_blocks")]
    weights = load_file(path / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if name not in names}
    assert len(kept) == len(weights) - len(names)
    save_file(kept | packed, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"],
    }
    (path / "config.json").write_text(json.dumps(config))
