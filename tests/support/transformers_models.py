"""Random transformers models on jattn, for the tests that have torch and transformers."""

from __future__ import annotations

import importlib

import jax
import numpy as np
import pytest

from tests.support.families import Family

MARKS = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore"),  # torch and transformers warn, which we cannot fix
]
WHY = "needs torch and transformers: pip install '.[conformance]'"
BRIDGE = "jattn.integrations.transformers"


@pytest.fixture(scope="module")
def libraries():
    """Yield torch, transformers and jattn's attention for it; skip if a package is missing."""
    torch = pytest.importorskip("torch", reason=WHY)
    transformers = pytest.importorskip("transformers", reason=WHY)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    package = importlib.import_module(BRIDGE)
    package.register()
    package.register("jattn_nhd", block_size=5, kv_layout="NHD")
    bridge = importlib.import_module(f"{BRIDGE}.attention")
    jax.config.update("jax_disable_most_optimizations", True)  # hundreds of small programs
    yield torch, transformers, bridge
    jax.config.update("jax_disable_most_optimizations", False)


def make_model(torch, transformers, family: Family):
    """Make a random model with weights of unit gain: attention is neither flat nor one-hot."""
    config = transformers.AutoConfig.for_model(family.model_type, **family.settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    model.set_experts_implementation("eager")  # the only one that runs in float64
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "sink" in name:
                weight.copy_(noise + 1)
            elif weight.ndim >= 2 and "conv" not in name and "A_log" not in name:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
            elif name.endswith("bias") and weight.abs().max() == 0:
                weight.copy_(0.1 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def read(torch, model, text, chunks) -> np.ndarray:
    """Return logits after every token of `text` [B, n], fed in chunks with a cache."""
    logits, cache, done = [], None, 0
    with torch.no_grad():
        for count in chunks:
            positions = torch.arange(done, done + count)[None].expand(text.shape[0], -1)
            out = model(
                text[:, done : done + count],
                past_key_values=cache,
                use_cache=len(chunks) > 1,
                position_ids=positions,
            )
            cache, done = out.past_key_values, done + count
            logits.append(out.logits.double())
    return torch.cat(logits, dim=1).numpy()
