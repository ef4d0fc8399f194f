"""Checkpoints with block-scaled fp8 weights are decoded as the formula says."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors

from examples.engine import model as engine_model
from examples.engine.model import load_model
from examples.models import fp8
from examples.models.checkpoint import open_checkpoint
from examples.options import CHECKPOINTS
from tests.support.checkpoints import one_file_entry_per_expert, rewrite
from tests.support.devices import on_eight_devices

BLOCK = (48, 40)  # divides no matrix of the tiny models
CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [*BLOCK],
}
PROJECTIONS = r"_proj(_qkvz|_ba|_with_mqa)?\.weight$|experts\.(gate_up|down)_proj$"
# A checkpoint of every family; `with_experts` adds experts to Nemotron-H's.
FAMILIES = (
    *("qwen3-tiny", "gpt-oss-tiny", "nemotron-h-tiny"),
    *("qwen3-next-tiny", "deepseek-v3-tiny", "gemma4-e2b-tiny"),
)
EXPERTS = {"n_routed_experts": 4, "moe_intermediate_size": 56}
EXPERTS |= {"moe_shared_expert_intermediate_size": 48, "moe_latent_size": 44}
KINDS = ["linear_attention", "moe", "linear_attention", "full_attention", "mlp", "moe"]


def formula(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Compute `W[..., i, j] = code[..., i, j] * scale_inv[..., i // R, j // C]`."""
    i, j = np.indices(codes.shape[-2:])
    return codes.astype(np.float32) * scales[..., i // block[0], j // block[1]]


def num_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return (*shape[:-2], *(-(-n // size) for n, size in zip(shape[-2:], block, strict=True)))


def in_fp8(tensors: dict[str, np.ndarray], *, decoded: bool) -> dict[str, np.ndarray]:
    """Replace all projections by random codes and scales, or by their `decoded` float32 values."""
    found = {}
    for name, x in sorted(tensors.items()):
        if not re.search(PROJECTIONS, name) or x.ndim < 2:
            found[name] = x
            continue
        rng = np.random.default_rng([*name.encode()])
        codes = rng.normal(size=x.shape).astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(0.01, 0.1, num_blocks(x.shape, BLOCK)).astype(np.float32)
        if decoded:
            found[name] = formula(codes, scales, BLOCK)
        else:
            found |= {name: codes, f"{name}_scale_inv": scales}
    return found


def write(name: str, target: Path, change, config: object, **others: object) -> Path:
    """Copy a checkpoint with changed tensors, this `quantization_config` and other settings."""
    rewrite(name, target, change)
    there = target / "config.json"
    given = {**json.loads(there.read_text()), "quantization_config": config, **others}
    there.write_text(json.dumps(given))
    return target


def with_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Give nemotron-h-tiny experts in layers 1 and 5, named as in published checkpoints."""
    found = {n: x for n, x in tensors.items() if ".1.mixer." not in n and ".5.mixer." not in n}
    size, (count, inner, shared, latent) = 64, EXPERTS.values()
    rng = np.random.default_rng(0)

    def put(name: str, *shape: int) -> None:
        found[name] = rng.normal(size=shape).astype(np.float32)

    for path in ("model.layers.1.mixer", "model.layers.5.mixer"):
        put(f"{path}.gate.weight", count, size)
        put(f"{path}.gate.e_score_correction_bias", count)
        put(f"{path}.fc1_latent_proj.weight", latent, size)
        put(f"{path}.fc2_latent_proj.weight", size, latent)
        experts = [(f"experts.{e}", latent, inner) for e in range(count)]
        for part, outside, inside in (*experts, ("shared_experts", size, shared)):
            put(f"{path}.{part}.up_proj.weight", inside, outside)
            put(f"{path}.{part}.down_proj.weight", outside, inside)
    return found


def write_pair(name: str, folder: Path) -> list[Path]:
    """Write the same weights in fp8 and in float32; only GPT-OSS keeps its experts stacked."""
    others = {**EXPERTS, "layers_block_type": KINDS} if name == "nemotron-h-tiny" else {}

    def change(tensors: dict[str, np.ndarray], decoded: bool) -> dict[str, np.ndarray]:
        if others:
            tensors = with_experts(tensors)
        elif name != "gpt-oss-tiny" and "experts" in str(tensors.keys()):
            tensors = one_file_entry_per_expert(tensors)
        if name != "qwen3-next-tiny":
            tensors = {n: x for n, x in tensors.items() if not n.startswith("mtp.")}
        return in_fp8(tensors, decoded=decoded)

    folder.mkdir(exist_ok=True)
    given = zip((False, True), (CONFIG, None), strict=True)
    return [
        write(name, folder / str(decoded), functools.partial(change, decoded=decoded), c, **others)
        for decoded, c in given
    ]


@pytest.mark.parametrize(
    "index",
    [
        (),
        (slice(None), slice(None)),
        (slice(3, 11),),
        (slice(4, 8), slice(0, 5)),
        (slice(0, 1), slice(6, 13)),
        (slice(None), slice(10, 15)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(11, 15), (3, 11, 15)], ids=str)
def test_parts_are_decoded_as_the_formula_says(shape, index, tmp_path):
    """All codes, blocks of 4 by 5 that the part cuts, and some matrices of a stack."""
    rng, block, path = np.random.default_rng(0), (4, 5), tmp_path / "x.safetensors"
    codes = rng.permutation(np.resize(np.arange(256, dtype=np.uint8), np.prod(shape)))
    codes = codes.reshape(shape).view(ml_dtypes.float8_e4m3fn)
    scales = rng.normal(size=num_blocks(shape, block)).astype(np.float32)
    safetensors.save_file({"before": np.ones(7, np.float32), "w": codes}, path)
    if len(shape) == 3 and index:
        index = (slice(1, 3), *index)
    asked = []

    def read_scales(at):
        asked.append(scales[at].size)
        return scales[at]

    found = fp8.read(path, "w", index, scales.shape, read_scales, block, jnp.dtype("float32"))
    wanted = formula(codes, scales, block)[index]
    assert np.isnan(wanted).any() or wanted.size < 200
    np.testing.assert_array_equal(found, wanted)
    # Reads only scales of blocks that the part touches: along each axis, at most one more than fit.
    most = [-(-n // size) + 1 for n, size in zip(wanted.shape[-2:], block, strict=True)]
    assert asked[0] <= np.prod(wanted.shape[:-2]) * np.prod(most)
    rounded = fp8.read(path, "w", index, scales.shape, read_scales, block, jnp.dtype("bfloat16"))
    np.testing.assert_array_equal(
        *(x.astype("float32") for x in (rounded, wanted.astype("bfloat16")))
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.extended if n != "qwen3-tiny" else ()) for n in FAMILIES],
)
def test_a_checkpoint_in_fp8_loads_as_the_numbers_it_stands_for(name, tmp_path):
    coded, decoded = write_pair(name, tmp_path)
    ours, theirs = (load_model(there).params for there in (coded, decoded))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    # All projections were in fp8, except those of Gemma 4's per-layer embeddings.
    in_files = open_checkpoint(coded)
    others = {n for n in set(in_files.files) - set(in_files.scales) if "proj" in n}
    assert len(in_files.scales) >= 8
    assert all("norm" in n or n.endswith("bias") or "per_layer" in n for n in others), others


def test_a_checkpoint_of_every_family_is_read_in_fp8():
    configs = (json.loads((CHECKPOINTS / n / "config.json").read_text()) for n in FAMILIES)
    found = {engine_model.FAMILIES[config["model_type"]] for config in configs}
    assert found == set(engine_model.FAMILIES.values())


@pytest.mark.extended
def test_devices_read_their_own_parts(tmp_path):
    """Rows and columns that begin inside blocks, experts, heads, channels of several sections."""
    meshes = {"qwen3-tiny": 4, "deepseek-v3-tiny": 4, "gpt-oss-tiny": 2, "nemotron-h-tiny": 2}
    for name in meshes:
        write_pair(name, tmp_path / name)
    on_eight_devices(f"""
for name, count in {meshes}.items():
    found = [
        load_model(f"{tmp_path}/{{name}}/{{decoded}}", mesh=make_mesh(f"tensor={{count}}")).params
        for decoded in (False, True)
    ]
    jax.tree.map(np.testing.assert_array_equal, *found)
""")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"quant_method": "awq"},
            "quantization_config is .*'awq'.* but weights must be unquantized, or",
        ),
        ({"weight_block_size": None}, r"weight_block_size \[rows, columns\]"),
        ({"weight_block_size": [128, 0]}, "quantization_config is"),
        ({"activation_scheme": "static"}, "activation_scheme 'dynamic'"),
        ({"fmt": "e5m2"}, "fmt 'e4m3'"),
    ],
)
def test_other_quantizations_are_refused(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        load_model(write("qwen3-tiny", tmp_path / "x", lambda x: x, {**CONFIG, **changes}))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.norm.weight", "norm.weight is int8, but must be float32, float16, bfloat16"),
        ("model.layers.0.mlp.experts.0.down_proj.weight", "down_proj is int8, but must be float32"),
    ],
)
def test_integer_weights_are_refused(name, words, tmp_path):
    def change(tensors):
        tensors = one_file_entry_per_expert(tensors)
        pattern = name.replace("experts.0", r"experts\.\d+") + "$"
        return {n: x.astype(np.int8) if re.match(pattern, n) else x for n, x in tensors.items()}

    with pytest.raises(ValueError, match=words):
        load_model(rewrite("qwen3-next-tiny", tmp_path / "x", change))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no scales", "q_proj.weight is in fp8 without .*q_proj.weight_scale_inv"),
        ("few scales", r"_inv is \[10, 2\], but must be \[11, 2\] for blocks of \[48, 40\] in"),
        ("many scales", r"weight_scale_inv is \[2, 11, 2\], but must be \[11, 2\]"),
        ("other codes", r"q_proj.weight is BF16\[512, 64\], but must be a matrix of F8_E4M3"),
        ("no codes", "no place for layers.0.self_attn.x_scale_inv"),
    ],
)
def test_scales_that_do_not_fit_are_reported(what, words, tmp_path):
    q = "model.layers.0.self_attn.q_proj.weight"

    def change(tensors):
        found = in_fp8(tensors, decoded=False)
        scales = found[f"{q}_scale_inv"]
        if what == "no scales":
            del found[f"{q}_scale_inv"]
        elif what == "few scales":
            found[f"{q}_scale_inv"] = scales[:-1]
        elif what == "many scales":
            found[f"{q}_scale_inv"] = np.stack([scales, scales])
        elif what == "other codes":
            found[q] = tensors[q]
        else:
            found["model.layers.0.self_attn.x_scale_inv"] = scales
        return found

    with pytest.raises(ValueError, match=words):
        load_model(write("qwen3-tiny", tmp_path / "x", change, CONFIG))
