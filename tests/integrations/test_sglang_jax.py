"""sglang-jax with jattn in place of its TPU kernel, judged by NumPy in float64.

`test_sglang_jax_batches.py` tests requests that share a batch.

Needs the host in its own environment with Python 3.12 or 3.13, and takes minutes:

    pip install -e '.[sglang]' pytest openai
    pytest -m hosts tests/integrations/test_sglang_jax*.py
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import shutil
import socket
import urllib.request

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support import numpy_hybrid, numpy_model, processes
from tests.support.sglang_host import COUNT, generate, judged, prompts, run, server, start

pytestmark = [pytest.mark.hosts]
if not importlib.util.find_spec("sgl_jax"):
    pytestmark.append(pytest.mark.skip(reason="needs sglang-jax: pip install 'jattn[sglang]'"))


def bundled(tmp_path, name: str) -> pathlib.Path:
    """Copy a bundled text-only Gemma 4, and write its configuration as published ones have it."""
    folder = tmp_path / name
    shutil.copytree(processes.ROOT / "examples/checkpoints" / name, folder)
    text = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "float32"}
    full = next(iter(text.pop("per_layer_config", {}).values()), {})
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    text |= {name: full.get(field, text[field]) for field, name in names.items()}
    whole = {name: text[name] for name in ("tie_word_embeddings", "torch_dtype", "vocab_size")}
    whole |= {"model_type": "gemma4", "architectures": ["Gemma4ForCausalLM"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def check_bundled(folder: pathlib.Path, devices: int, **engine: object) -> None:
    """Check that tokens and log-probabilities match what transformers wrote to `reference.npz`."""
    with np.load(folder / "reference.npz") as file:
        lens, padded, tokens, logits = (
            file[name] for name in ("prompt_lens", "prompts", "tokens", "logits")
        )
    given = [row[:length].tolist() for row, length in zip(padded, lens, strict=True)]
    count = tokens.shape[1]
    found = run(str(folder), devices, given, count, context_length=256, **engine)
    assert [row for row, _ in found] == tokens.tolist()
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = np.take_along_axis(want, tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose([row for _, row in found], want, atol=1e-3)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return judged(tmp_path_factory.mktemp("qwen3"), numpy_model.QWEN3)


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory):
    return judged(tmp_path_factory.mktemp("gemma2"), numpy_model.GEMMA2)


@pytest.mark.parametrize("page_size", [16, 1])
def test_tokens_are_the_judges(qwen3, page_size):
    assert generate(qwen3.folder, page_size=page_size) == qwen3.tokens


def test_windows_and_soft_caps_are_the_judges(gemma2):
    """Without either of them the log-probabilities are far off."""
    found = run(gemma2.folder, page_size=16)
    assert [tokens for tokens, _ in found] == gemma2.tokens
    want = gemma2.logprobs()
    np.testing.assert_allclose([row for _, row in found], want, atol=1e-3)
    for name in ("attn_logit_softcapping", "sliding_window"):
        assert np.abs(np.subtract(gemma2.logprobs(**{name: None}), want)).max() > 0.1


def test_rotary_embeddings_are_scaled_as_in_llama_3(tmp_path):
    """Without the scaling, as in the unpatched host, the log-probabilities are far off."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    judge = judged(tmp_path, {**numpy_model.LLAMA, "rope_scaling": scaling})
    found = run(judge.folder, page_size=16)
    assert [tokens for tokens, _ in found] == judge.tokens
    np.testing.assert_allclose([row for _, row in found], judge.logprobs(), atol=1e-3)
    assert np.abs(np.subtract(judge.logprobs(rope_scaling=None), judge.logprobs())).max() > 0.1


@pytest.mark.parametrize(("devices", "page_size"), [(1, 16), (1, 2), (2, 16)])
def test_latents_and_experts_are_those_of_transformers(tmp_path, devices, page_size):
    """A bundled DeepSeek-V3, with tokens and logits of transformers in float32."""
    folder = tmp_path / "deepseek-v3"
    shutil.copytree(processes.ROOT / "examples/checkpoints/deepseek-v3-tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    assert "rope_theta" not in config  # it is in rope_parameters, as transformers 5 writes it
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    check_bundled(folder, devices, page_size=page_size, tp_size=devices)


@pytest.mark.parametrize("devices", [1, 2])
def test_two_head_sizes_are_those_of_transformers(tmp_path, devices):
    """A bundled Gemma 4, with windows and another head size on some layers."""
    folder = bundled(tmp_path, "gemma4-31b-tiny")
    check_bundled(folder, devices, page_size=16, tp_size=devices)


def test_features_that_the_host_would_ignore_are_refused(tmp_path):
    folder = bundled(tmp_path, "gemma4-e2b-tiny")
    with start(str(folder), page_size=16) as process:
        out, errors = process.communicate(timeout=300)
    assert "RESULT" not in out
    assert "--model-path: a model with num_kv_shared_layers=" in errors
    assert "hidden_size_per_layer_input=" in errors


def test_pools_that_would_never_have_room_are_refused(gemma2):
    """Unpatched, the host starts and accepts requests, which then wait forever."""
    with start(gemma2.folder, page_size=16, max_total_tokens=96) as process:
        try:
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert "RESULT" not in out
    assert "--max-total-tokens (--mem-fraction-static): room for " in errors


def test_checkpoints_without_a_weight_are_refused(tmp_path):
    """Unpatched, the host starts with a warning and crashes on the first request."""
    numpy_model.make(tmp_path, numpy_model.LLAMA)
    weights = load_file(tmp_path / "model.safetensors")
    names = [f"model.layers.{i}.self_attn.{name}_proj.weight" for i in range(2) for name in "qkv"]
    for name in names:
        weights.pop(name)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with start(str(tmp_path), page_size=16) as process:
        try:
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert "RESULT" not in out
    assert "a checkpoint without model.layers.0.self_attn.q_proj.weight, " in errors


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_bfloat16_is_off_by_its_rounding(request, family):
    """While the tokens agree, the error is at most twice that of plain bfloat16 arithmetic."""
    judge = request.getfixturevalue(family)
    want = judge.logprobs()
    budget = 2 * np.abs(np.subtract(judge.logprobs(ml_dtypes.bfloat16), want)).max()
    if family == "gemma2":
        for name in ("attn_logit_softcapping", "sliding_window"):
            assert np.abs(np.subtract(judge.logprobs(**{name: None}), want)).max() > 4 * budget
    found = run(judge.folder, page_size=16, dtype="bfloat16")
    differences = numpy_model.errors(*zip(*found, strict=True), judge.tokens, want)
    assert len(differences) > COUNT * len(want) / 2
    assert 1e-3 < np.abs(differences).max() < budget


HYBRID = {
    "qwen3_5": numpy_hybrid.QWEN3_5,
    "kimi_linear": numpy_hybrid.KIMI_LINEAR,
    "bailing": numpy_hybrid.BAILING,
}
UNCACHED = {"disable_radix_cache": True, "page_size": 16}
# The host caches recurrent states at the ends of chunks, for prefixes that are reused.
KEPT = {
    "enable_unified_radix_tree": True,
    "enable_recurrent_extra_buffer": True,
    "page_size": 16,
    "chunked_prefill_size": 32,
}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_5", UNCACHED),
        ("qwen3_5", KEPT),
        ("kimi_linear", UNCACHED),
        ("kimi_linear", KEPT),
        ("bailing", UNCACHED),  # whose states the host does not cache
    ],
    ids=["qwen3_5", "qwen3_5-kept", "kimi_linear", "kimi_linear-kept", "bailing"],
)
def test_linear_attention_is_the_judges(tmp_path, family, settings):
    """Gated delta nets, Kimi's delta attention and Lightning, each mixed with attention layers."""
    check_hybrid(tmp_path, numpy_hybrid.Model(HYBRID[family]), **settings)


@pytest.mark.parametrize("devices", [1, 2])
def test_sinks_are_the_judges(tmp_path, devices):
    """MiMo-V2-Flash: heads of 192 with values of 128, and windows with sinks and other heads."""
    model = numpy_hybrid.Model(numpy_hybrid.MIMO)
    want = check_hybrid(tmp_path, model, devices, page_size=16, tp_size=devices)
    for name, wrong in (("add_swa_attention_sink_bias", False), ("sliding_window", None)):
        other = numpy_hybrid.Model({**model.config, name: wrong}, model.weights)
        found = [
            numpy_hybrid.logprobs(other, prompt + row)[-COUNT:]
            for prompt, (row, _) in zip(prompts(), want, strict=True)
        ]
        assert np.abs(np.subtract(found, [row for _, row in want])).max() > 0.1


def check_hybrid(
    folder, model: numpy_hybrid.Model, devices: int = 1, **engine: object
) -> list[tuple[list[int], list[float]]]:
    """Check the engine against the judge; return the tokens and their log-probabilities."""
    model.save(folder)
    want = [model.greedy(prompt, COUNT) for prompt in prompts()]
    found = run(str(folder), devices, **engine)
    assert [row for row, _ in found] == [row for row, _ in want]
    np.testing.assert_allclose([row for _, row in found], [row for _, row in want], atol=1e-3)
    return want


def test_the_server_takes_tokens(qwen3, tmp_path):
    sampling = {"temperature": 0.0, "max_new_tokens": COUNT, "ignore_eos": True}
    given = json.dumps({"input_ids": prompts(), "sampling_params": sampling}).encode()
    with server(qwen3.folder, tmp_path, "--skip-tokenizer-init") as address:
        request = urllib.request.Request(
            f"{address}/generate", given, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            found = json.load(answer)
    assert [one["output_ids"] for one in found] == qwen3.tokens


@pytest.mark.parametrize("flag", ["is_embedding", "multimodal"])
def test_modes_in_which_every_request_fails_are_refused_at_the_start(qwen3, flag):
    with start(qwen3.folder, page_size=16, **{flag: True}) as process:
        out, errors = process.communicate(timeout=300)
    assert "RESULT" not in out
    assert f"--{flag.replace('_', '-')}: given, but must be left out" in errors


def test_the_server_answers_openais_client(gemma2, tmp_path):
    openai = pytest.importorskip("openai", reason="needs the openai client")
    numpy_model.save_tokenizer(gemma2.folder)
    # The host's grammars need a tokenizer of bytes, but this one has numbers.
    with (
        server(gemma2.folder, tmp_path, "--grammar-backend", "none") as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=300) as client,
    ):
        for prompt, tokens in zip(prompts(), gemma2.tokens, strict=True):
            answer = client.completions.create(
                model=gemma2.folder,
                prompt=prompt,
                max_tokens=COUNT,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            assert answer.usage.prompt_tokens == len(prompt)
            assert [int(word) for word in answer.choices[0].text.split()] == tokens
        given = {"model": gemma2.folder, "prompt": prompts()[0], "max_tokens": COUNT}
        for more, word in (
            ({"seed": 7}, "sampling_seed"),
            ({"extra_body": {"return_hidden_states": True}}, "return_hidden_states"),
        ):
            with pytest.raises(openai.BadRequestError, match=word):
                client.completions.create(**given, **more)
        client.completions.create(**given, seed=7, temperature=0)


def test_two_devices_have_their_own_requests(qwen3):
    """With `--dp-size`, each has the whole model."""
    assert generate(qwen3.folder, devices=2, page_size=16, tp_size=2, dp_size=2) == qwen3.tokens


def test_two_devices_share_the_heads(qwen3):
    assert generate(qwen3.folder, devices=2, page_size=16, tp_size=2) == qwen3.tokens


def test_two_processes_share_the_heads(qwen3):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = {"page_size": 16, "tp_size": 2, "nnodes": 2, "dist_init_addr": address}
    with start(qwen3.folder, node_rank=1, **nodes) as other:
        try:
            assert generate(qwen3.folder, node_rank=0, **nodes) == qwen3.tokens
        finally:
            other.kill()
