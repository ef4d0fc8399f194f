"""DeepSeek-V3: multi-head latent attention over one cache without values, and gated experts.

A token has one row in the cache, whatever the number of heads: its latent `c` (512 numbers) and a
rotated key `r` that all heads share (64). Conceptually, a head expands the latent into its own keys
and values, `k = [W_k c, r]` and `v = W_v c`. With absorption, nothing is expanded: since

    q . k = q_nope . W_k c + q_rope . r = [W_k^T q_nope, q_rope] . [c, r]
    sum_j p_j v_j = W_v sum_j p_j c_j

the heads attend with queries of 576 numbers to one KV head whose values are the first 512 numbers
of its keys: `jattn.paged_attention` with `value_cache=None, value_dim=512` reads every row once for
both. Queries also come from a latent: `q = W_qb norm(W_qa x)`.

On a mesh each device has some of the heads and all of the cache, since every head reads every
latent. Experts are chosen by sigmoids, corrected for balance, within some groups (`moe.Router`).

The published checkpoints have fp8 weights (`fp8.py`), and after the last layer an MTP layer, which
predicts the token after the next (`mtp.py`), with copies of the model's embedding and head, which
are not read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from examples.engine.caches import Caches
from examples.engine.mesh import DeviceMesh
from examples.engine.model import AttentionCache, Model
from examples.models import parallel
from examples.models.checkpoint import Assembly, Checkpoint
from examples.models.config import check_config
from examples.models.decoder import CausalLM, DecoderLayer, Outline, Step, load_causal_lm
from examples.models.layers import GatedMLP, Linear, RMSNorm
from examples.models.moe import ExpertSizes, GatedExperts, Router, mix_experts, stacked_experts
from examples.models.mtp import PredictingConfig, PredictingLM
from examples.models.rope import Rope, rope_parameters, rotate, yarn_growth

INTEGERS = (
    *("intermediate_size", "moe_intermediate_size", "num_hidden_layers", "n_routed_experts"),
    *("n_shared_experts", "num_experts_per_tok", "kv_lora_rank", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "v_head_dim", "first_k_dense_replace"),
)
ONLY = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "rope_interleave": (True, None),
}
# Of the MTP layer: our names by the published ones, and its copies of the model's own parameters.
PREDICTOR = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
LATENT_EPS = 1e-6  # of the norms of latents, whatever `rms_norm_eps` is
COPIES = ("embed_tokens.", "shared_head.head.")


@dataclasses.dataclass(frozen=True)
class LatentHeads:
    """The geometry of latent attention."""

    num_heads: int
    query_rank: int | None  # of the queries' latent; None: there is none
    rank: int  # of the keys' and values' latent
    plain_dim: int  # the part of a head's query that is not rotated
    rotated_dim: int
    value_dim: int
    rope: Rope
    scale: float  # of the logits, as for the expanded heads
    context: int = 1  # devices that the tokens are distributed over

    def cache(self, dtype: str) -> AttentionCache:
        """Return the layer's cache: rows [c, r] of one head, 576 = 512 + 64 numbers."""
        dim = self.rank + self.rotated_dim
        return AttentionCache(1, dim, values_in_keys=True, context=self.context)


@dataclasses.dataclass(frozen=True)
class DeepseekConfig(PredictingConfig):
    """The configuration of a DeepSeek-V3 checkpoint. Make one with `from_hf`."""

    num_dense: int  # layers without experts, which come first
    intermediate_size: int  # of the dense layers
    experts: ExpertSizes

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, mtp: bool = False) -> DeepseekConfig:
        """Read a `config.json`.

        Args:
          config: the file.
          mtp: also include the MTP layer.

        Raises:
          ValueError: keys are missing or have unsupported values; the error lists them all.
        """
        rope = rope_parameters(config)
        check_config(config, ("deepseek_v3",), INTEGERS, ONLY, rope=rope)
        plain, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        factor, mscale = 1.0, rope.get("mscale_all_dim") or 0
        if rope["rope_type"] != "default" and mscale:
            factor = yarn_growth(rope["factor"], mscale)
        heads = LatentHeads(
            config["num_attention_heads"],
            config.get("q_lora_rank"),
            config["kv_lora_rank"],
            plain,
            rotated,
            config["v_head_dim"],
            Rope.from_hf(rope, rotated),
            (plain + rotated) ** -0.5 * factor**2,
        )
        return cls(
            outline=Outline.from_hf(config, ropes=(heads.rope,)),
            layers=(heads,) * config["num_hidden_layers"],
            num_dense=config["first_k_dense_replace"],
            intermediate_size=config["intermediate_size"],
            experts=ExpertSizes(
                count=config["n_routed_experts"],
                per_token=config["num_experts_per_tok"],
                size=config["moe_intermediate_size"],
                shared_size=config["moe_intermediate_size"] * config["n_shared_experts"],
                latent_size=None,
                num_groups=config.get("n_group", 8) or 1,
                chosen_groups=config.get("topk_group", 4) or 1,
                normalize=bool(config.get("norm_topk_prob", True)),
                scale=float(config.get("routed_scaling_factor", 2.5)),
            ),
            mtp=heads if mtp else None,
        )


class Expansion(nnx.Module):
    """`[W_k; W_v]` of all heads, [H (plain + values), rank], used from the left and the right.

    It is not a `Linear`, because what adapters add to its product would be lost.
    """

    def __init__(self, heads: LatentHeads, dtype: jnp.dtype):
        self.heads = heads
        rows = heads.num_heads * (heads.plain_dim + heads.value_dim)
        self.weight = nnx.Param(jnp.zeros((rows, heads.rank), dtype))

    def absorb(self, query: jax.Array) -> jax.Array:
        """Compute `W_k^T q_nope` [T, H, rank] of queries [T, H, plain]."""
        weight = self._by_head()[:, : self.heads.plain_dim]
        return _einsum("thn,hnr->thr", query, weight).astype(query.dtype)

    def expand(self, latents: jax.Array) -> jax.Array:
        """Compute values `W_v c` [T, H, values] from the heads' outputs [T, H, rank]."""
        weight = self._by_head()[:, self.heads.plain_dim :]
        return _einsum("thr,hvr->thv", latents, weight).astype(latents.dtype)

    def _by_head(self) -> jax.Array:
        return self.weight[...].reshape(self.heads.num_heads, -1, self.heads.rank)


def _einsum(formula: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(formula, *arrays, precision="highest", preferred_element_type=jnp.float32)


class LatentAttention(nnx.Module):
    """One layer's attention, as in the formula at the top of this file."""

    def __init__(self, index: int, outline: Outline, heads: LatentHeads, dtype: jnp.dtype):
        self.index, self.heads = index, heads
        size, rows = outline.hidden_size, heads.num_heads * (heads.plain_dim + heads.rotated_dim)
        if heads.query_rank is None:
            self.q_proj = Linear(size, rows, dtype)
        else:
            self.q_a_proj = Linear(size, heads.query_rank, dtype)
            self.q_a_layernorm = RMSNorm(heads.query_rank, LATENT_EPS, dtype)
            self.q_b_proj = Linear(heads.query_rank, rows, dtype)
        self.kv_a_proj_with_mqa = Linear(size, heads.rank + heads.rotated_dim, dtype)
        self.kv_a_layernorm = RMSNorm(heads.rank, LATENT_EPS, dtype)
        self.kv_b_proj = Expansion(heads, dtype)
        self.o_proj = Linear(heads.num_heads * heads.value_dim, size, dtype, sums_parts=True)

    def __call__(self, x: jax.Array, step: Step, caches: Caches) -> tuple[jax.Array, Caches]:
        heads, num_tokens = self.heads, x.shape[0]
        if heads.query_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.reshape(num_tokens, heads.num_heads, -1)
        rotated = self._rotate(query[..., heads.plain_dim :], step)
        query = jnp.concatenate(
            [self.kv_b_proj.absorb(query[..., : heads.plain_dim]), rotated], axis=-1
        )
        latent = self.kv_a_proj_with_mqa(x)[:, None]
        row = [
            self.kv_a_layernorm(latent[..., : heads.rank]),
            self._rotate(latent[..., heads.rank :], step),
        ]
        out, caches = caches.attend(
            self.index,
            query,
            step.batch,
            key=jnp.concatenate(row, axis=-1),
            value_dim=heads.rank,
            scale=heads.scale,
        )
        return self.o_proj(self.kv_b_proj.expand(out).reshape(num_tokens, -1)), caches

    def _rotate(self, x: jax.Array, step: Step) -> jax.Array:
        """Rotate pairs of adjacent elements, which end up half of the size apart."""
        turned = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        return rotate(turned, step.angles[self.heads.rope])


class MixtureOfExperts(nnx.Module):
    """Experts, their router, and an expert that sees every token."""

    def __init__(self, outline: Outline, sizes: ExpertSizes, dtype: jnp.dtype):
        size, self.sizes, self.num_devices = outline.hidden_size, sizes, outline.num_devices
        self.gate = Router(size, sizes, dtype)
        self.experts = GatedExperts(sizes.count // self.num_devices, size, sizes.size, dtype)
        self.shared_experts = GatedMLP(size, sizes.shared_size, dtype, sums_parts=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        experts, shares = self.gate(x)
        mixed = mix_experts(
            x, experts, shares, self.sizes.count, self.experts, num_devices=self.num_devices
        )
        return parallel.add_up(mixed + self.shared_experts(x))


def make(config: DeepseekConfig, dtype: jnp.dtype) -> CausalLM:
    """Make the model, of zeros."""
    outline, layers = config.outline, []
    for index, heads in enumerate((*config.layers, *([config.mtp] if config.mtp else []))):
        if index < config.num_dense:
            mlp = GatedMLP(outline.hidden_size, config.intermediate_size, dtype)
        else:
            mlp = MixtureOfExperts(outline, config.experts, dtype)
        attention = LatentAttention(index, outline, heads, dtype)
        layers.append(DecoderLayer(outline, attention, mlp, dtype))
    if config.mtp:
        return PredictingLM(outline, layers[:-1], layers[-1], dtype)
    return CausalLM(outline, layers, dtype)


def separate_experts(config: DeepseekConfig) -> dict[str, Assembly]:
    """Return assemblies of the matrices that published checkpoints store per expert."""
    parts, assemblies = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}, {}
    paths = [f"layers.{index}" for index in range(config.num_dense, len(config.layers))]
    for path in (*paths, *(["mtp.layers.0"] if config.mtp else [])):
        assemblies |= stacked_experts(f"{path}.mlp.experts", config.experts.count, parts)
    return assemblies


def with_predictor(checkpoint: Checkpoint) -> Checkpoint:
    """Rename the parameters of a checkpoint's MTP layer to those of `mtp.Predictor`.

    Raises:
      ValueError: there is no such layer.
    """
    path = f"layers.{checkpoint.config.get('num_hidden_layers')}."
    if f"{path}eh_proj.weight" not in checkpoint.files:
        raise ValueError(
            f"{checkpoint.directory} has no MTP layer: {path}eh_proj.weight is missing"
        )

    def name_in_model(name: str) -> str:
        part = name.removeprefix(path)
        if part == name or part.startswith(COPIES):
            return name
        module = part.removesuffix(".weight")
        return f"mtp.{PREDICTOR[module]}.weight" if module in PREDICTOR else f"mtp.layers.0.{part}"

    files, scales = (
        {name_in_model(name): where for name, where in found.items()}
        for found in (checkpoint.files, checkpoint.scales)
    )
    return dataclasses.replace(checkpoint, files=files, scales=scales)


def load(
    checkpoint: Checkpoint,
    dtype: str | None = None,
    mesh: DeviceMesh | None = None,
    *,
    mtp: bool = False,
    join: bool = False,
) -> Model:
    """Load the model of a checkpoint; arguments are as for `load_model`."""

    published = checkpoint.files
    checkpoint = with_predictor(checkpoint) if mtp else checkpoint

    def guessing(config: DeepseekConfig) -> list[str]:
        """Return published names of the MTP layers, which come after the last layer."""
        more = range(len(config.layers), len(config.layers) + 8)
        prefixes = tuple(f"layers.{index}." for index in more)
        return [name for name in published if name.startswith(prefixes)]

    return load_causal_lm(
        functools.partial(DeepseekConfig.from_hf, mtp=mtp),
        make,
        checkpoint,
        dtype,
        mesh,
        assemblies=separate_experts,
        unused=guessing,
        join=join,
    )
